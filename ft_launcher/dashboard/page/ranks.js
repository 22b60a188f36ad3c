// The same ranks as a table, a page at a time: for screen readers, for search, for copying.

import { $, h, put, whole } from "./dom.js";
import { NAMES } from "./shapes.js";

const PAGE = 100;

export class RankTable {
  constructor(grid) {
    this.grid = grid;
    this.page = 0;
    $("table-filter").addEventListener("change", () => { this.page = 0; this.draw(); });
    $("table-box").addEventListener("toggle", () => this.draw());
  }

  show(derived) {
    this.derived = derived;
    const states = Object.keys(derived.counts);
    put($("table-filter"), JSON.stringify(states), () => [
      h("option", { value: "all" }, "all ranks"),
      h("option", { value: "odd" }, "all but running and finished"),
      ...states.map((name) => h("option", { value: name }, name)),
    ]);
    this.draw();
  }

  draw() {
    if (!this.derived || !$("table-box").open) return;
    const filter = $("table-filter").value;
    const { states } = this.derived;
    const wanted = [];
    for (let rank = 0; rank < this.derived.world; rank++) {
      const name = NAMES[states[rank]];
      if (filter === "all" || name === filter || (filter === "odd" && name !== "running" && name !== "finished")) wanted.push(rank);
    }
    const pages = Math.max(1, Math.ceil(wanted.length / PAGE));
    this.page = Math.min(this.page, pages - 1);
    const shown = wanted.slice(this.page * PAGE, (this.page + 1) * PAGE);
    $("table-count").textContent = `${whole(wanted.length)} of ${whole(this.derived.world)}`;
    const rows = shown.map((rank) => [rank, this.grid.coords(rank), this.grid.say(rank)]);
    put($("rank-table"), JSON.stringify(rows), () => [this.head(), h("tbody", {}, rows.map((row) => this.row(row)))]);
    put($("table-pages"), `${this.page}/${pages}`, () => (pages === 1 ? [] : [
      h("button", { type: "button", "data-key": "before", disabled: this.page === 0, onclick: () => this.turn(-1) }, "Before"),
      h("span", {}, `page ${this.page + 1} of ${pages}`),
      h("button", { type: "button", "data-key": "next", disabled: this.page === pages - 1, onclick: () => this.turn(1) }, "Next"),
    ]));
  }

  head() {
    return h("thead", {}, h("tr", {}, ["rank", "state", "pp", "dp", "tp", "cp", "on"].map((name) => h("th", { scope: "col" }, name))));
  }

  row([rank, c, { name, where }]) {
    return h("tr", {}, h("th", { scope: "row" }, String(rank)), [name, c.pp, c.dp, c.tp, c.cp, where].map((cell) => h("td", {}, String(cell))));
  }

  turn(by) {
    this.page += by;
    this.draw();
  }
}
