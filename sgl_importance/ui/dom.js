// Elements, and numbers as people write them.

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "g", "rect", "text", "circle", "line", "path", "title"]);

/** An element with attributes (`on…` are listeners; null, undefined and false are left out) and children. */
export function el(tag, attributes = {}, ...children) {
  const element = SVG_TAGS.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

export const $ = (id) => document.getElementById(id);

export const count = (value) => Math.round(value).toLocaleString("en");

export function plural(value, noun) {
  return `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
}

export function share(value) {
  if (value > 0 && value < 0.001) return "< 0.1 %";
  return `${(100 * value).toFixed(value < 0.1 ? 1 : 0)} %`;
}

export function ago(seconds) {
  if (seconds < 60) return `${Math.max(0, Math.round(seconds))} s ago`;
  if (seconds < 3600) return `${Math.round(seconds / 60)} min ago`;
  return `${Math.round(seconds / 3600)} h ago`;
}

/** Text of tokens on one line. */
export const oneLine = (text) => text.replace(/\s+/g, " ").trim();

/** Sets the colour of a value between 0 and 1: the square root, so that small values can be told apart. */
export function heat(element, value) {
  const strength = Math.sqrt(Math.min(1, Math.max(0, value)));
  element.style.setProperty("--heat", `${(100 * strength).toFixed(1)}%`);
  element.classList.toggle("hot", strength > 0.55);
}

/** Replaces the children of an element, and gives the focus back to the child of the same data-key. */
export function refill(element, ...children) {
  const key = element.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  const scroll = element.scrollTop;
  element.replaceChildren(...children.flat().filter(Boolean));
  element.scrollTop = scroll;
  if (key !== undefined) element.querySelector(`[data-key="${CSS.escape(key)}"]`)?.focus({ preventScroll: true });
}
