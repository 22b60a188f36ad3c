// Each section's durations as a histogram on a logarithmic axis, with the soft and the hard timeout drawn in.

import { $, h, s, put, seconds, whole, moment } from "./dom.js";

const W = 460, H = 132, LEFT = 8, RIGHT = 10, TOP = 30, BOTTOM = 20;
const STEP = 10 ** (1 / 8); // the buckets of the launcher's distributions: eight a decade

export function sections(doc) {
  const found = Object.entries(doc.sections);
  put($("sections"), JSON.stringify(found), () => (found.length ? found.map(card) : [h("p", { class: "dim" }, "No section is known yet.")]));
}

function card([name, section]) {
  const d = section.distribution;
  const usual = d && d.count ? `median ${seconds(d.recent?.p50_s)}, longest of the last 64 ${seconds(d.recent?.max_s)}, ${whole(d.count)} seen, longest ever ${seconds(d.longest_s)}` : "no occurrence seen yet";
  const limits = `soft ${seconds(section.soft_s)}, hard ${seconds(section.hard_s)}`;
  const title = name === "out-of-section" ? "out of section" : name;
  return h("article", { class: "section", "aria-label": `Section ${title}` },
    h("div", { class: "row" }, h("h3", {}, title), h("span", { class: `tag ${section.learned ? "good" : ""}` }, section.learned ? "learned" : "fixed"), h("span", { class: "small" }, limits)),
    plot(title, section, usual),
    h("p", { class: "small" }, usual),
    h("p", { class: "why" }, section.why),
    changes(section.history || []));
}

function changes(history) {
  if (history.length < 2) return null;
  return h("details", {}, h("summary", { class: "small" }, `${history.length} changes`),
    h("ul", { class: "standing" }, [...history].reverse().slice(0, 10).map((one) => h("li", {}, `${moment(one.at)}: hard ${seconds(one.hard_s)}. ${one.why}`))));
}

function plot(title, section, usual) {
  const lows = section.distribution?.histogram?.low_s || [];
  const counts = section.distribution?.histogram?.count || [];
  const marks = [section.soft_s, section.hard_s].filter((v) => typeof v === "number");
  const values = [...lows.filter((v) => v > 0), ...marks];
  if (!values.length) return null;
  const least = Math.min(...values) / 1.6, most = Math.max(...values.map((v) => v * STEP), ...marks) * 3;
  const x = (v) => LEFT + ((W - LEFT - RIGHT) * Math.log(v / least)) / Math.log(most / least);
  const top = Math.max(1, ...counts);
  const label = `Durations of ${title} on a logarithmic axis from ${seconds(least)} to ${seconds(most)}: ${usual}; soft timeout ${seconds(section.soft_s)}, hard timeout ${seconds(section.hard_s)}`;
  return s("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": label },
    ...ticks(least, most).map((v) => [
      s("line", { x1: x(v), x2: x(v), y1: TOP, y2: H - BOTTOM, stroke: "var(--line)" }),
      s("text", { x: x(v), y: H - 5, "text-anchor": "middle" }, v < 1 ? `${+(v * 1000).toPrecision(3)} ms` : `${v} s`),
    ]),
    ...lows.map((low, i) => bar(x, low, counts[i], top)),
    s("line", { x1: LEFT, x2: W - RIGHT, y1: H - BOTTOM, y2: H - BOTTOM, stroke: "var(--dim)" }),
    ...limit(x, section.soft_s, "soft", "var(--suspect)", "5 4"),
    ...limit(x, section.hard_s, "hard", "var(--hung)", ""));
}

function bar(x, low, n, top) {
  const full = H - TOP - BOTTOM;
  const height = Math.max(2, full * Math.sqrt(n / top)); // the root, so that one odd occurrence among thousands is still seen
  return s("rect", { x: x(low) + 0.5, y: H - BOTTOM - height, width: Math.max(1, x(low * STEP) - x(low) - 1), height, fill: "var(--running)" }, s("title", {}, `${seconds(low)} to ${seconds(low * STEP)}: ${Math.round(n)}`));
}

// The soft one's name stands left of its line, the hard one's right of it: they are never far apart.
function limit(x, value, name, stroke, dash) {
  if (typeof value !== "number") return [];
  const at = x(value);
  const left = name === "soft" && at > 90;
  return [
    s("line", { x1: at, x2: at, y1: 6, y2: H - BOTTOM, stroke, "stroke-width": 2.5, "stroke-dasharray": dash }),
    s("text", { x: at + (left ? -6 : 6), y: 16, "text-anchor": left ? "end" : "start" }, `${name} ${seconds(value)}`),
  ];
}

function ticks(least, most) {
  const found = [];
  for (let p = Math.ceil(Math.log10(least)); 10 ** p <= most; p++) found.push(10 ** p);
  return found.filter((_, i) => found.length <= 6 || i % 2 === 0);
}
