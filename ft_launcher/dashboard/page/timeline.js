// When each cycle ran and what ended it; what every fault has cost, and whether it was made up for.

import { $, h, s, put, seconds, lasting, moment, count, whoText, whole } from "./dom.js";
import { cause, stacksLink } from "./panels.js";

const H = 62, Y = 18, BAR = 24;
const SHOWN = 8;
let all = false;
let W = 1000;

export function timeline(doc) {
  const cycles = doc.cycles;
  const costs = Object.fromEntries(doc.derived.losses.cycles.map((cost) => [`${cost.generation}.${cost.n}`, cost]));
  const hidden = doc.dropped.cycles;
  $("time-caption").textContent = cycles.length ? `${count(hidden + cycles.length, "cycle")}, ${count(doc.derived.incident_count, "incident")} in this launch's folder${hidden ? `; the newest ${cycles.length} are listed` : ""}` : "no cycle yet";
  // `written` moves every two seconds: the strip follows it coarsely, the list not at all
  const end = cycles.length && (cycles.at(-1).end || doc.run?.written);
  W = Math.max(200, $("strip").clientWidth);
  put($("strip"), JSON.stringify([W, cycles.map((c) => [c.start, c.end, c.cause, c.n]), String(end).slice(0, 18)]), () => (cycles.length ? [strip(cycles, Date.parse(end))] : []));
  const names = Object.fromEntries(doc.derived.incidents.map((one) => [one.cycle, one.name]));
  const newest = [...cycles].reverse();
  const shown = all ? newest : newest.slice(0, SHOWN);
  const generation = doc.run?.generation;
  put($("cycles"), JSON.stringify([shown, names, doc.derived.losses.cycles.map((c) => [c.outage_s, c.repeated, c.regained])]), () =>
    shown.map((cycle) => row(cycle, costs[`${cycle.generation}.${cycle.n}`], cycle.generation === generation ? names[cycle.n] : null)));
  const more = $("more-cycles");
  more.hidden = newest.length <= SHOWN;
  more.textContent = all ? "Show the newest only" : `Show all ${newest.length} cycles`;
  more.onclick = () => { all = !all; timeline(doc); };
}

function strip(cycles, endMs) {
  const from = Date.parse(cycles[0].start);
  const to = Math.max(from + 1000, endMs || from);
  const x = (ms) => (W * (ms - from)) / (to - from);
  let named = -99;
  const room = (at) => at - named > 48 && Boolean((named = at) || true); // names of causes that would overlap are left out
  const parts = cycles.map((cycle) => {
    const [a, b] = [x(Date.parse(cycle.start)), x(cycle.end ? Date.parse(cycle.end) : to)];
    const bad = cycle.end && cycle.cause !== "finished" && cycle.cause !== "drain";
    const said = `cycle ${cycle.n}: ${moment(cycle.start)} to ${cycle.end ? moment(cycle.end) : "now"}${cycle.cause ? `, ended by ${cycle.cause}` : ", running"}`;
    return [
      s("rect", { x: a, y: Y, width: Math.max(1.5, b - a - 1), height: BAR, rx: 2, fill: cycle.cause === "finished" ? "var(--finished)" : "var(--running)", opacity: cycle.n % 2 ? 0.72 : 1 }, s("title", {}, said)),
      b - a > 60 ? s("text", { x: a + 6, y: Y + 16, class: "on" }, `${cycle.n}`) : null,
      bad ? s("path", { d: `M${b - 1} ${Y + BAR} l-5 -9 h10 z M${b - 1} ${Y - 3} v${BAR + 3}`, fill: "var(--culprit)", stroke: "var(--culprit)", "stroke-width": 1.6 }, s("title", {}, said)) : null,
      bad && room(b) ? s("text", { x: Math.min(Math.max(b - 1, 18), W - 18), y: Y - 6, "text-anchor": "middle" }, cycle.cause) : null,
    ];
  });
  const label = `Timeline of ${cycles.length} cycles from ${moment(cycles[0].start)}; each is described in the list that follows`;
  return s("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": label },
    ...parts,
    s("text", { x: 0, y: H - 4 }, moment(cycles[0].start)),
    s("text", { x: W, y: H - 4, "text-anchor": "end" }, moment(new Date(to).toISOString())));
}

function row(cycle, cost, incident) {
  const running = cycle.end === null;
  return h("li", { value: cycle.n },
    h("div", { class: "row" },
      h("h3", {}, `Cycle ${cycle.n}${cycle.generation ? ` (generation ${cycle.generation})` : ""}`),
      running ? h("span", { class: "tag good" }, "running") : cause(cycle.cause),
      h("span", { class: "dim small" }, `${moment(cycle.start)}${running ? "" : `, lasted ${lasting(cost?.lasted_s)}`}`),
      stacksLink(incident, `cycle-${cycle.n}`)),
    cycle.culprit ? h("p", { class: "who" }, `\u2715 ${whoText(cycle.culprit)}: ${cycle.culprit.why || ""}`) : null,
    running ? null : cycle.culprit ? h("details", {}, h("summary", { class: "small dim" }, "in full"), h("p", { class: "why dim" }, cycle.reason || "")) : h("p", { class: "why dim" }, cycle.reason || ""),
    facts(cycle, cost));
}

function facts(cycle, cost) {
  const list = [];
  if (cycle.iteration_start !== null || cycle.iteration_end !== null) list.push(["iterations", `${whole(cycle.iteration_start)} to ${cycle.iteration_end === null ? "now" : whole(cycle.iteration_end)}`]);
  if (cycle.recovery_s !== null) list.push(["recovered in", seconds(cycle.recovery_s)]);
  if (cost && cost.outage_s !== null) list.push(["lost", `${seconds(cost.outage_s)} of outage${cost.repeated ? `, ${count(cost.repeated, "iteration")} to do again` : ""}`]);
  if (cost && cost.regained !== null) list.push(["regained", cost.regained ? `yes, iteration ${whole(cycle.iteration_end)} was passed again` : `not yet: iteration ${whole(cycle.iteration_end)} is to come`]);
  if (cycle.decision) list.push(["decision", cycle.decision]);
  return list.length ? h("p", { class: "facts" }, list.map(([name, value]) => h("span", {}, `${name} `, h("b", {}, value)))) : null;
}
