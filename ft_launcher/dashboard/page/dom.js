// Making elements and texts. Everything that comes from a run becomes text nodes: nothing here takes HTML.

export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(9).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function s(tag, props = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(props)) element.setAttribute(name, value);
  element.append(...children.flat(9).filter((child) => child !== null && child !== undefined));
  return element;
}

export const $ = (id) => document.getElementById(id);

// Replaces an element's children, unless they would be the same; the focus stays on what has the same data-key.
export function put(element, key, make) {
  if (element.dataset.made === key) return;
  element.dataset.made = key;
  const active = element.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  element.replaceChildren(...[make()].flat(9).filter((child) => child !== null && child !== undefined && child !== false));
  if (active) element.querySelector(`[data-key="${CSS.escape(active)}"]`)?.focus();
}

export function seconds(value) {
  if (typeof value !== "number" || !isFinite(value)) return "never";
  if (value < 0.001) return "0 s";
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 1000) return `${trim(value.toFixed(value < 10 ? 2 : value < 100 ? 1 : 0))} s`;
  return lasting(value);
}

export function lasting(value) {
  if (typeof value !== "number" || !isFinite(value)) return "?";
  if (value < 100) return `${trim(value.toFixed(value < 10 ? 1 : 0))} s`;
  const minutes = Math.round(value / 60);
  if (minutes < 100) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

const trim = (text) => (text.includes(".") ? text.replace(/\.?0+$/, "") : text);

export const count = (n, one, many = `${one}s`) => `${whole(n)} ${n === 1 ? one : many}`;

export const whole = (n) => (typeof n === "number" ? n.toLocaleString("en") : "-");

export function moment(text) {
  const at = new Date(text);
  if (!text || isNaN(at)) return "?";
  const two = (n) => String(n).padStart(2, "0");
  return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
}

export const coordsText = (coords) =>
  ["tp", "cp", "dp", "pp"].filter((axis) => coords && axis in coords && !(axis === "cp" && coords.cp === 0)).map((axis) => `${axis} ${coords[axis]}`).join(", ");

export function whoText(culprit) {
  if (!culprit) return "nobody could be blamed";
  const place = culprit.node === null ? "" : ` on ${culprit.node} slot ${culprit.slot}`;
  return `rank ${culprit.rank} (${coordsText(culprit.coords)})${place}`;
}

export const number = (name) => String(Number(name));
