// The head of the page and its smaller panels: where the run is, its numbers, the newest incident, hardware, budgets.

import { $, h, put, seconds, lasting, moment, count, whole, whoText, number } from "./dom.js";

export function head(doc) {
  const { run, derived } = doc;
  $("run-id").textContent = run ? run.id : "No run yet";
  $("run-line").textContent = run ? `generation ${run.generation}, ${run.script} ${(run.args || []).join(" ")}`.slice(0, 200) : derived.path;
  const phase = derived.outcome || derived.phase;
  $("phase").dataset.phase = derived.outcome === null ? derived.phase : derived.outcome === "finished" ? "finished" : derived.outcome === "stopped" ? "stopped" : "failed";
  $("phase").textContent = !run ? "no run" : derived.exit_code ? `${phase}, exit ${derived.exit_code}` : phase;
  document.title = run ? `${phase} \u00b7 ${run.id} \u00b7 ft-launcher` : "ft-launcher";
  put($("notes"), JSON.stringify(derived.notes), () => derived.notes.map((note) => h("p", { class: "notice warn" }, note)));
}

export function tiles(doc) {
  const { run, derived, budgets } = doc;
  const lost = derived.losses;
  const last = [...doc.cycles].reverse().find((cycle) => cycle.recovery_s !== null);
  const restarts = budgets.restarts;
  const quarantined = Object.values(doc.hardware).filter((device) => device.quarantine_until && new Date(device.quarantine_until) > new Date()).length;
  const list = [
    ["Iteration", whole(run?.iteration), run ? `cycle ${derived.cycle}` : ""],
    ["Goodput", lost.goodput === null ? "-" : `${(100 * lost.goodput).toFixed(1)} %`, `${lasting(lost.outage_s)} of outages`],
    ["Restarts", restarts ? whole(restarts.used) : "-", restarts ? (restarts.limit === null ? "without limit" : `of ${restarts.limit} allowed`) : ""],
    ["Last recovery", last ? seconds(last.recovery_s) : "-", last ? "from fault to training again" : "none needed"],
    ["Done again", whole(lost.repeated), "iterations repeated"],
    ["Spare nodes", whole(run?.spares), run ? `beside ${count(run.nodes ?? 0, "node")}` : ""],
    ["Quarantined", whole(quarantined), quarantined === 1 ? "device" : "devices"],
  ];
  put($("tiles"), JSON.stringify(list), () => list.map(([name, value, more]) => h("div", {}, h("dt", {}, name), h("dd", {}, value), h("dd", {}, more))));
}

export function latest(doc) {
  const found = doc.derived.latest;
  const panel = $("latest");
  panel.hidden = !found;
  if (!found) return;
  const now = ["ending", "paused"].includes(doc.derived.phase) || doc.derived.outcome;
  panel.classList.toggle("now", Boolean(now) && doc.derived.outcome !== "finished");
  const after = found.recovery_s === null ? null : `${found.complete ? "training again" : "all ranks started"} ${seconds(found.recovery_s)} after the fault`;
  put(panel, JSON.stringify([found, doc.derived.phase]), () => [
    h("div", { class: "row" }, h("h2", { id: "latest-title" }, "Last incident"), cause(found.cause), h("span", { class: "dim small" }, `cycle ${found.cycle}, ${moment(found.at)}`)),
    h("p", { class: "who" }, found.culprit ? `\u2715 ${whoText(found.culprit)}` : "No culprit could be told"),
    h("p", {}, found.culprit?.why || found.reason),
    h("div", { class: "row" },
      h("span", {}, `decision: ${found.decision}`),
      after ? h("span", { class: "after" }, `\u2713 ${after}`) : null,
      stacksLink(found.incident, "latest")),
  ]);
  const said = `Incident in cycle ${found.cycle}, ${found.cause}: ${whoText(found.culprit)}. Decision: ${found.decision}.`;
  if ($("announce-incident").textContent !== said) $("announce-incident").textContent = said;
}

export const cause = (name) => h("span", { class: `tag ${name || ""}` }, name || "running");

export const stacksLink = (name, where) =>
  name ? h("a", { href: `#incident-${number(name)}`, "data-key": `${where}-${name}` }, `incident ${number(name)}: stacks`) : null;

// At most three sentences: when all ranks wait for one, ten thousand sentences say less.
export function standing(derived) {
  const blamed = derived.latest?.culprit?.rank;
  const all = derived.standing.filter((one) => one.kind === "hung" || one.kind === "suspect");
  const list = all.sort((a, b) => (b.rank === blamed) - (a.rank === blamed)).slice(0, 3);
  const more = (derived.counts.hung || 0) + (derived.counts.suspect || 0) + (derived.counts.culprit || 0) - list.length;
  put($("standing"), JSON.stringify([list, more]), () => (list.length ? [h("ul", { class: "standing", "aria-label": "Ranks that stand still" },
    list.map((one) => h("li", {}, h("span", { class: `tag ${one.kind === "hung" ? "bad" : "warn"}` }, one.kind), ` ${one.reason}`)),
    more > 0 ? h("li", { class: "dim" }, `and ${whole(more)} more`) : null)] : []));
}

export function hardware(doc) {
  const devices = Object.entries(doc.hardware);
  put($("hardware"), JSON.stringify(devices), () => (devices.length === 0 ? [h("p", { class: "dim" }, "Nothing is held against any device.")] : [
    h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Hardware ledger" }, h("table", {},
      h("thead", {}, h("tr", {}, ["device", "state", "suspicions", "verdicts"].map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, devices.sort((a, b) => (b[1].quarantine_until || "").localeCompare(a[1].quarantine_until || "")).slice(0, 200).map(device)))),
  ]));
}

function device([name, known]) {
  const until = known.quarantine_until;
  const state = until && new Date(until) > new Date() ? h("span", { class: "tag bad" }, `quarantined until ${moment(until)}`) : until ? `was in quarantine until ${moment(until)}` : "in use";
  const verdicts = (known.verdicts || []).slice(-3).map((one) => h("div", {}, `${one.verdict}, ${moment(one.at)}`));
  const about = [known.device, Number.isInteger(known.rank) ? `held rank ${known.rank}` : null].filter(Boolean).join(", ");
  return h("tr", {}, h("th", { scope: "row" }, name, about ? h("div", { class: "dim small" }, about) : null), h("td", {}, state, known.why ? h("div", { class: "dim" }, known.why) : null), h("td", {}, String(known.suspicions)), h("td", {}, verdicts.length ? verdicts : "none"));
}

const BUDGETS = { restarts: "restarts", platform_faults: "platform faults", stuck_cycles: "cycles without progress" };

export function budgets(doc) {
  const kinds = Object.entries(doc.budgets);
  put($("budgets"), JSON.stringify(kinds), () => (kinds.length === 0 ? [h("p", { class: "dim" }, "None yet.")] : kinds.map(([kind, { used, limit }]) => {
    const name = BUDGETS[kind] || kind.replaceAll("_", " ");
    const said = limit === null ? `${name}: ${used} used, without limit` : `${name}: ${used} of ${limit}`;
    return h("p", {}, said, limit ? h("meter", { min: 0, max: limit, value: used, high: limit * 0.6, optimum: 0, "aria-label": said }) : null);
  })));
}

export function about(doc) {
  const { run, derived } = doc;
  const earlier = Object.keys(doc.earlier_runs).length;
  const rows = [
    ["started", run ? moment(run.started) : "-"],
    ["topology", run ? Object.entries(run.topology).map(([name, value]) => `${name} ${value}`).join(", ") : "-"],
    ["nodes", run ? `${run.nodes} with ${run.nproc_per_node} ${run.nproc_per_node === 1 ? "rank" : "ranks"} each` : "-"],
    ["launcher", run?.launcher || "-"],
    ["reason", derived.verdict?.reason || derived.reason || "-"],
    ["state file", derived.path],
    ["run folder", derived.run_folder || "not here: no journal, no incidents"],
    ["earlier runs", earlier ? `${earlier} in this file` : "none in this file"],
  ];
  put($("about"), JSON.stringify(rows), () => rows.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}
