// One incident in a dialog: what was decided, the stacks put together where they are equal, the ranks, the culprit's last lines. Opened by #incident-N.

import { $, h, seconds, count, whoText } from "./dom.js";
import { cause } from "./panels.js";

export class IncidentDialog {
  constructor(ask) {
    this.ask = ask;
    this.dialog = $("incident");
    this.dialog.addEventListener("close", () => { if (location.hash.startsWith("#incident-")) history.replaceState(null, "", location.pathname + location.search); });
    this.dialog.addEventListener("click", (event) => { if (event.target === this.dialog) this.dialog.close(); });
    window.addEventListener("hashchange", () => this.follow());
  }

  async follow() {
    const found = /^#incident-(\d+)$/.exec(location.hash);
    if (!found) return this.dialog.open ? this.dialog.close() : undefined;
    this.fill(found[1], [h("p", { role: "status" }, "Reading the incident and grouping its stacks \u2026")]);
    if (!this.dialog.open) this.dialog.showModal();
    try {
      const answer = await this.ask(`api/incident/${found[1]}`);
      const body = await answer.json();
      this.fill(found[1], answer.ok ? this.content(body) : [h("p", { role: "alert" }, body.error || `the server answers ${answer.status}`)]);
    } catch (error) {
      this.fill(found[1], [h("p", { role: "alert" }, `The server cannot be reached: ${error.message}`)]);
    }
  }

  fill(number, content) {
    const close = h("button", { type: "button", onclick: () => this.dialog.close() }, "Close");
    this.dialog.replaceChildren(h("div", { class: "sheet" }, h("div", { class: "head" }, h("h2", { id: "incident-title" }, `Incident ${number}`), close), content));
  }

  content(one) {
    const { stacks } = one;
    return [
      h("div", { class: "row" }, cause(one.cause), h("span", {}, `cycle ${one.cycle}`), h("span", {}, `decision: ${one.decision}`)),
      one.culprit ? h("p", {}, h("b", {}, `\u2715 ${whoText(one.culprit)}`), h("br"), one.culprit.why || "") : h("p", {}, "No culprit could be told."),
      one.reason === one.culprit?.why ? null : h("p", { class: "dim" }, one.reason),
      h("h3", {}, "Stacks"),
      h("p", {}, stacks.dumped ? `${stacks.dumped.toLocaleString("en")} of ${count(one.world, "rank")} dumped their stacks; ${stacks.groups.length === 1 ? "all are alike" : `${stacks.groups.length + stacks.more_groups} different ones`}.` : "No rank dumped its stacks."),
      stacks.outliers ? h("p", {}, h("b", {}, `Outliers: ${stacks.outliers}`)) : null,
      stacks.missing ? h("p", {}, `Without stacks: ${stacks.missing}`) : null,
      stacks.groups.map((group, i) => this.group(group, i)),
      one.last_lines.length ? [h("h3", {}, "The culprit's last lines"), h("pre", { tabindex: "0" }, one.last_lines.join("\n"))] : null,
      this.ranks(one),
    ];
  }

  group(group, i) {
    const frames = group.frames.map((frame) => `${frame.function}  ${frame.file}:${frame.line}`).join("\n");
    return h("article", { class: `group ${group.outlier ? "odd" : ""}`, "aria-label": `Stack ${i + 1}: ${group.said}` },
      h("div", { class: "row" }, h("h3", {}, group.said), h("span", { class: `tag ${group.outlier ? "bad" : ""}` }, count(group.count, "rank")), group.outlier ? h("span", { class: "tag bad" }, "outlier") : null),
      h("p", {}, group.place),
      h("details", { open: i < 3 }, h("summary", { class: "small dim" }, `Stack of rank ${group.example}, innermost call first`), h("pre", { tabindex: "0" }, frames || "(no Python frame)")));
  }

  ranks(one) {
    const names = ["rank", "section", "iteration", "for", "process", "place"];
    const rows = one.ranks.slice(0, 256).map((r) => [r.section ?? "out of section", r.iteration, r.since_s === null ? "" : seconds(r.since_s), r.exit === null ? r.state : `exit ${r.exit}`, r.place].map((cell) => h("td", {}, cell === null || cell === undefined ? "" : String(cell))).toSpliced(0, 0, h("th", { scope: "row" }, `${r.rank}${r.rank === one.culprit?.rank ? " \u2715" : ""}`)));
    return h("details", {}, h("summary", {}, `Where each rank was (${one.world > rows.length ? `${rows.length} of ${one.world}` : rows.length})`),
      h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Where each rank was" }, h("table", {}, h("thead", {}, h("tr", {}, names.map((name) => h("th", { scope: "col" }, name)))), h("tbody", {}, rows.map((cells) => h("tr", {}, cells))))));
  }
}
