// One rank's cell: a colour and a shape for each state, so that neither has to be told by the other.

export const NAMES = { r: "running", s: "starting", q: "suspect", h: "hung", k: "culprit", x: "failed", f: "finished", t: "stopped", w: "waiting" };

export const MEANINGS = {
  running: "running", starting: "being started", suspect: "still for longer than the soft timeout", hung: "still for longer than the hard timeout",
  culprit: "found to be the cause", failed: "ended with an error", finished: "finished", stopped: "ended", waiting: "waiting for its start",
};

export function palette() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(`--${name}`).trim();
  const found = { ink: colour("ink"), dim: colour("dim"), card: colour("card"), on: colour("on-state"), accent: colour("accent"), bad: colour("culprit"), line: colour("line") };
  for (const [letter, name] of Object.entries(NAMES)) found[letter] = colour(name);
  return found;
}

// The shape on top of a cell of side `size` at (x, y); the cell itself is filled already. Small cells get what can be seen at their size.
export function mark(ctx, letter, x, y, size, colours) {
  if (letter === "r") return;
  const inset = size * 0.27;
  const line = (...points) => {
    ctx.beginPath();
    points.forEach(([px, py], i) => (i ? ctx.lineTo(px, py) : ctx.moveTo(px, py)));
    ctx.stroke();
  };
  ctx.strokeStyle = ctx.fillStyle = colours.on;
  ctx.lineWidth = Math.max(1.2, size / 8);
  ctx.lineCap = "round";
  const [l, t, r, b, cx, cy] = [x + inset, y + inset, x + size - inset, y + size - inset, x + size / 2, y + size / 2];
  if (letter === "k" || letter === "x") {
    line([l, t], [r, b]);
    line([r, t], [l, b]);
  } else if (letter === "h") {
    line([x + size * 0.36, t], [x + size * 0.36, b]);
    line([x + size * 0.64, t], [x + size * 0.64, b]);
  } else if (letter === "q") {
    ctx.beginPath();
    ctx.moveTo(cx, t);
    ctx.lineTo(r, b);
    ctx.lineTo(l, b);
    ctx.closePath();
    ctx.fill();
  } else if (letter === "f") {
    line([l, cy], [x + size * 0.43, b - size * 0.05], [r, t]);
  } else if (letter === "t") {
    line([l, cy], [r, cy]);
  } else {
    ctx.fillStyle = colours.card;
    const edge = Math.max(1, size * (letter === "s" ? 0.2 : 0.12));
    ctx.fillRect(x + edge, y + edge, size - 2 * edge, size - 2 * edge);
    if (letter === "s" && size >= 6) {
      ctx.fillStyle = colours.s;
      ctx.beginPath();
      ctx.arc(cx, cy, size * 0.14, 0, 7);
      ctx.fill();
    }
  }
}

// A small canvas with one cell, for legends and lists.
export function swatch(letter, colours) {
  const canvas = document.createElement("canvas");
  const scale = Math.max(1, window.devicePixelRatio || 1);
  canvas.width = canvas.height = 18 * scale;
  canvas.setAttribute("aria-hidden", "true");
  const ctx = canvas.getContext("2d");
  ctx.scale(scale, scale);
  ctx.fillStyle = colours[letter];
  ctx.fillRect(1, 1, 16, 16);
  mark(ctx, letter, 1, 1, 16, colours);
  return canvas;
}
