// The topology as a grid on a canvas: a block for each pipeline stage, in it a column for each data-parallel replica and a row for each tp (and cp) coordinate.
// Ten thousand cells are one pass of fillRect. The keyboard moves a cursor; what it stands on is said in `#rank-detail`, which is a live region.

import { $, h, count, put, coordsText } from "./dom.js";
import { NAMES, MEANINGS, mark, palette, swatch } from "./shapes.js";

const GAP = 14;
const LABEL = 18;
const LEAST = 5; // the smallest cell, in CSS pixels

export class Grid {
  constructor(canvas, onMove) {
    this.canvas = canvas;
    this.onMove = onMove;
    this.cursor = 0;
    this.shown = false;
    this.state = null;
    this.drawn = 0;
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    canvas.addEventListener("keydown", (event) => this.onKey(event));
    canvas.addEventListener("focus", () => this.move(this.cursor));
    canvas.addEventListener("blur", () => this.draw());
    canvas.addEventListener("click", (event) => { const rank = this.at(event); if (rank !== null) this.move(rank); });
    canvas.addEventListener("pointermove", (event) => this.onPointer(event));
    canvas.addEventListener("pointerleave", () => { $("tip").hidden = true; });
  }

  show(derived) {
    const axes = Object.fromEntries((derived.axes || []).map((axis) => [axis.name, axis]));
    const flat = { tp: { size: 1, stride: 1 }, cp: { size: 1, stride: 1 }, dp: { size: derived.world, stride: 1 }, pp: { size: 1, stride: 1 } };
    this.axes = derived.axes ? axes : flat;
    this.state = derived;
    this.world = derived.world;
    this.blamed = derived.latest?.culprit?.rank ?? null;
    if (this.blamed !== null && this.blamed >= this.world) this.blamed = null;
    if (!this.shown && this.world) this.cursor = this.blamed ?? 0;
    this.cursor = Math.min(this.cursor, Math.max(0, this.world - 1));
    $("grid-box").parentElement.classList.toggle("wide", this.world > 1024);
    this.describe();
    this.draw();
  }

  coords(rank) {
    return Object.fromEntries(Object.entries(this.axes).map(([name, { size, stride }]) => [name, Math.floor(rank / stride) % size]));
  }

  rankAt(coords) {
    return Object.entries(this.axes).reduce((rank, [name, { stride }]) => rank + coords[name] * stride, 0);
  }

  place(rank) {
    const placement = this.state.placement;
    if (!placement || !placement.nproc) return null;
    const node = placement.nodes[Math.floor(rank / placement.nproc)];
    const local = rank % placement.nproc;
    return { node, slot: placement.slots?.[node]?.[local] ?? local };
  }

  layout(width) {
    const { tp, cp, dp, pp } = this.axes;
    const rows = tp.size * cp.size;
    const wish = this.world <= 16 ? 64 : this.world <= 64 ? 38 : this.world <= 512 ? 24 : this.world <= 2048 ? 15 : 9;
    const lines = Math.ceil((dp.size * Math.min(wish, LEAST)) / width);
    const columns = Math.ceil(dp.size / lines);
    const size = Math.max(LEAST, Math.min(wish, Math.floor(width / columns)));
    const lineHeight = rows * size + (lines > 1 ? 5 : 0);
    const block = { width: Math.max(columns * size, 40), height: LABEL + lines * lineHeight };
    const across = Math.max(1, Math.floor((width + GAP) / (block.width + GAP)));
    const down = Math.ceil(pp.size / across);
    return { rows, size, columns, lines, lineHeight, block, across, height: down * (block.height + GAP) - GAP };
  }

  cell(rank, at) {
    const c = this.coords(rank);
    const { size, columns, lineHeight } = this.plan;
    const [bx, by] = this.corner(c.pp);
    const row = c.tp + c.cp * this.axes.tp.size;
    at.x = bx + (c.dp % columns) * size;
    at.y = by + LABEL + Math.floor(c.dp / columns) * lineHeight + row * size;
    return at;
  }

  corner(stage) {
    const { across, block } = this.plan;
    return [(stage % across) * (block.width + GAP), Math.floor(stage / across) * (block.height + GAP)];
  }

  draw() {
    if (!this.state || !this.world) return;
    const width = this.canvas.parentElement.clientWidth;
    if (!width) return;
    const plan = (this.plan = this.layout(width));
    const scale = Math.min(Math.max(1, window.devicePixelRatio || 1), 16000 / Math.max(plan.height, width));
    this.canvas.style.height = `${plan.height}px`;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(plan.height * scale);
    const ctx = this.canvas.getContext("2d");
    const colours = palette();
    ctx.setTransform(scale, 0, 0, scale, 0, 0);
    ctx.clearRect(0, 0, width, plan.height);
    this.drawLabels(ctx, colours);
    this.drawCells(ctx, colours);
    this.drawPeers(ctx, colours);
    this.drawBlamed(ctx, colours, width);
    this.legend(colours);
    this.shown = true;
    this.drawn += 1;
  }

  drawLabels(ctx, colours) {
    ctx.font = "600 11px system-ui, sans-serif";
    ctx.fillStyle = colours.dim;
    ctx.textBaseline = "top";
    ctx.textAlign = "left";
    if (this.axes.pp.size === 1) return ctx.fillText(this.axes.dp.size > 1 ? "dp \u2192" : "", 0, 2);
    for (let stage = 0; stage < this.axes.pp.size; stage++) {
      const [x, y] = this.corner(stage);
      ctx.fillText(`pp ${stage}`, x, y + 2);
    }
  }

  drawCells(ctx, colours) {
    const { size } = this.plan;
    const gap = size >= 20 ? 3 : size >= 12 ? 2 : 1;
    const inner = size - gap;
    const at = { x: 0, y: 0 };
    const groups = {};
    for (let rank = 0; rank < this.world; rank++) (groups[this.state.states[rank] ?? "w"] ??= []).push(rank);
    for (const [letter, ranks] of Object.entries(groups)) {
      ctx.fillStyle = colours[letter] || colours.w;
      for (const rank of ranks) {
        this.cell(rank, at);
        ctx.fillRect(at.x, at.y, inner, inner);
      }
      if (letter !== "r") for (const rank of ranks) { this.cell(rank, at); mark(ctx, letter, at.x, at.y, inner, colours); }
    }
    if (size >= 34) {
      ctx.font = `600 ${size >= 60 ? 16 : 12}px system-ui, sans-serif`;
      ctx.textAlign = "center";
      ctx.textBaseline = "middle";
      ctx.fillStyle = "#fff";
      for (const rank of groups.r || []) { this.cell(rank, at); ctx.fillText(String(rank), at.x + inner / 2, at.y + inner / 2); }
    }
    this.inner = inner;
  }

  drawPeers(ctx, colours) {
    if (document.activeElement !== this.canvas && !this.picked) return;
    const at = { x: 0, y: 0 };
    const own = this.coords(this.cursor);
    ctx.strokeStyle = colours.ink;
    ctx.lineWidth = Math.max(1, this.inner / 12);
    for (const axis of ["tp", "cp", "dp", "pp"]) {
      for (let i = 0; i < this.axes[axis].size; i++) {
        this.cell(this.rankAt({ ...own, [axis]: i }), at);
        ctx.strokeRect(at.x + 0.5, at.y + 0.5, this.inner - 1, this.inner - 1);
      }
    }
    this.cell(this.cursor, at);
    ctx.lineWidth = Math.max(2.5, this.inner / 8);
    ctx.strokeRect(at.x - 1, at.y - 1, this.inner + 2, this.inner + 2);
  }

  drawBlamed(ctx, colours, width) {
    if (this.blamed === null) return;
    const at = this.cell(this.blamed, { x: 0, y: 0 });
    const reach = this.inner < 16 ? 4 : 2;
    ctx.strokeStyle = colours.bad;
    ctx.lineWidth = this.inner < 16 ? 2.5 : 3;
    ctx.strokeRect(at.x - reach, at.y - reach, this.inner + 2 * reach, this.inner + 2 * reach);
    const text = `\u2715 rank ${this.blamed}`;
    ctx.font = "700 12px system-ui, sans-serif";
    const w = ctx.measureText(text).width + 12;
    const right = at.x + this.inner + reach + 3;
    const x = right + w <= width ? right : Math.max(0, at.x - reach - 3 - w);
    const y = Math.max(0, Math.min(this.plan.height - 18, at.y + this.inner / 2 - 9));
    if (this.inner >= 34) return this.state.states[this.blamed] === "k" ? undefined : this.badge(ctx, colours, at);
    ctx.fillStyle = colours.bad;
    ctx.beginPath();
    ctx.roundRect(x, y, w, 18, 5);
    ctx.fill();
    ctx.fillStyle = colours.on;
    ctx.textAlign = "left";
    ctx.textBaseline = "middle";
    ctx.fillText(text, x + 6, y + 9.5);
  }

  badge(ctx, colours, at) {
    const side = 15;
    ctx.fillStyle = colours.bad;
    ctx.fillRect(at.x + this.inner - side + 2, at.y - 2, side, side);
    mark(ctx, "k", at.x + this.inner - side + 2, at.y - 2, side, colours);
  }

  legend(colours) {
    const counts = this.state.counts;
    const list = Object.entries(NAMES).filter(([, name]) => counts[name]);
    const key = JSON.stringify([list, counts, this.blamed, this.state.states[this.blamed ?? -1], colours]);
    put($("legend"), key, () => [
      ...list.map(([letter, name]) => h("li", { title: MEANINGS[name] }, swatch(letter, colours), `${name} ${counts[name].toLocaleString("en")}`)),
      this.blamed === null || this.state.states[this.blamed] === "k" ? null : h("li", {}, swatch("k", colours), `framed: rank ${this.blamed}, culprit of the last incident`),
    ]);
  }

  describe() {
    const { tp, cp, dp, pp } = this.axes;
    const shape = [["tp", tp], ["cp", cp], ["dp", dp], ["pp", pp]].filter(([name, axis]) => name !== "cp" || axis.size > 1).map(([name, axis]) => `${name} ${axis.size}`).join(" \u00d7 ");
    const said = Object.entries(this.state.counts).map(([name, n]) => `${n} ${name}`).join(", ");
    const blamed = this.blamed === null ? "" : `; culprit of the last incident: rank ${this.blamed}, ${coordsText(this.coords(this.blamed))}`;
    const layout = pp.size > 1 ? "a block a stage (pp), " : "";
    $("grid-caption").textContent = this.world ? `${count(this.world, "rank")} = ${shape}; ${layout}columns dp, rows ${cp.size > 1 ? "tp, then cp" : "tp"}` : "no ranks yet";
    this.canvas.setAttribute("aria-label", `${count(this.world, "rank")}, ${shape}: ${said}${blamed}`);
    this.detail();
  }

  say(rank) {
    const place = this.place(rank);
    const name = NAMES[this.state.states[rank]] || "unknown";
    return { name, where: place ? `${place.node} slot ${place.slot}` : "unknown", coords: coordsText(this.coords(rank)) };
  }

  detail() {
    if (!this.world) return put($("rank-detail"), "none", () => [h("p", { class: "dim" }, "No ranks yet.")]);
    const rank = this.cursor;
    const { name, where, coords } = this.say(rank);
    const standing = this.state.standing.find((one) => one.rank === rank);
    const blamed = rank === this.blamed ? `of the last incident (${this.state.latest.cause})` : null;
    put($("rank-detail"), JSON.stringify([rank, name, where, coords, standing, blamed]), () => [
      h("h3", {}, `Rank ${rank}`),
      h("dl", {}, h("dt", {}, "state"), h("dd", {}, name), h("dt", {}, "at"), h("dd", {}, coords), h("dt", {}, "on"), h("dd", {}, where)),
      blamed ? h("p", {}, h("span", { class: "tag bad" }, "\u2715 culprit"), ` ${blamed}`) : null,
      standing ? h("p", {}, standing.reason) : null,
    ]);
  }

  move(rank) {
    this.cursor = Math.max(0, Math.min(this.world - 1, rank));
    this.picked = true;
    this.detail();
    this.draw();
    this.onMove?.(this.cursor);
  }

  step(axis, by) {
    const c = this.coords(this.cursor);
    const to = c[axis] + by;
    if (to >= 0 && to < this.axes[axis].size) this.move(this.rankAt({ ...c, [axis]: to }));
    else if (axis === "tp" && this.axes.cp.size > 1 && c.cp + by >= 0 && c.cp + by < this.axes.cp.size) {
      this.move(this.rankAt({ ...c, cp: c.cp + by, tp: by > 0 ? 0 : this.axes.tp.size - 1 }));
    }
  }

  onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !this.world) return;
    const does = {
      ArrowLeft: () => this.step("dp", -1), ArrowRight: () => this.step("dp", 1), ArrowUp: () => this.step("tp", -1), ArrowDown: () => this.step("tp", 1),
      PageUp: () => this.step("pp", -1), PageDown: () => this.step("pp", 1), Home: () => this.move(0), End: () => this.move(this.world - 1),
      c: () => this.blamed !== null && this.move(this.blamed), C: () => this.blamed !== null && this.move(this.blamed),
    }[event.key];
    if (!does) return;
    event.preventDefault();
    does();
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    const [px, py] = [event.clientX - box.left, event.clientY - box.top];
    if (!this.plan || !this.world) return null;
    const { size, columns, lineHeight, block, across, rows } = this.plan;
    const [bx, by] = [Math.floor(px / (block.width + GAP)), Math.floor(py / (block.height + GAP))];
    const stage = by * across + bx;
    const [x, y] = [px - bx * (block.width + GAP), py - by * (block.height + GAP) - LABEL];
    const [column, line] = [Math.floor(x / size), Math.floor(y / lineHeight)];
    const row = Math.floor((y - line * lineHeight) / size);
    const replica = line * columns + column;
    if (bx >= across || stage >= this.axes.pp.size || y < 0 || column >= columns || row >= rows || replica >= this.axes.dp.size) return null;
    const tp = this.axes.tp.size;
    return this.rankAt({ pp: stage, dp: replica, tp: row % tp, cp: Math.floor(row / tp) });
  }

  onPointer(event) {
    const tip = $("tip");
    const rank = this.at(event);
    tip.hidden = rank === null;
    if (rank === null) return;
    const { name, coords, where } = this.say(rank);
    tip.textContent = `rank ${rank}: ${name}; ${coords}; ${where}`;
    const at = this.cell(rank, { x: 0, y: 0 });
    const width = this.canvas.parentElement.clientWidth;
    tip.style.left = `${Math.max(0, Math.min(at.x, width - tip.offsetWidth))}px`;
    tip.style.top = `${at.y - tip.offsetHeight - 6 < 0 ? at.y + this.plan.size + 4 : at.y - tip.offsetHeight - 6}px`;
  }
}
