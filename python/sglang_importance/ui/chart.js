// The tree as an icicle chart that is read like text; also a keyboard tree for screen readers.

import { count, el, heat, oneLine, plural, refill, share } from "./dom.js";
import { layOut } from "./layout.js";

const ROW = { least: 22, most: 46 };
const WANTED_HEIGHT = 400;
const MORE_WIDTH = 132;
const AXIS = 22;
const LETTER = 7; // a wide one, at 12 pixels

export const TIERS = { device: "device", host: "host memory", storage: "storage" };

/** The fastest tier that holds a node. */
export const tierOf = (node) => Object.keys(TIERS).find((tier) => node.tiers.includes(tier)) ?? "none";

export const hottest = (nodes) => Math.max(1e-9, ...nodes.map((node) => node.cross_mass));

export function describe(node) {
  const held = node.tiers.map((tier) => TIERS[tier]).join(" and ") || "no tier";
  const asked = node.queries
    ? `${share(node.cross_mass)} of the attention of ${plural(node.queries, "later request")}`
    : "no later request has looked at it";
  return `Node ${node.id}: ${plural(node.tokens, "token")} from position ${count(node.depth_tokens)}, ` +
    `in ${held}${node.pinned ? ", pinned" : ""}; ${asked}. Text: ${oneLine(node.label)}`;
}

export const describeMore = (more) =>
  `and ${plural(more.nodes, "more node")}, ${plural(more.tokens, "token")}`;

function clipped(text, width) {
  const letters = Math.floor((width - 10) / LETTER);
  if (letters < 3) return "";
  return text.length <= letters ? text : `${text.slice(0, letters - 1)}…`;
}

export class Chart {
  #focus = null;

  /** `onSelect(id)` on a click or Enter; `onZoom(id)` for the block of what is left out; null is the root. */
  constructor(element, { onSelect, onZoom }) {
    this.element = element;
    this.onSelect = onSelect;
    this.onZoom = onZoom;
    new ResizeObserver(() => this.document && this.draw()).observe(element);
  }

  show(document, { selected, found }) {
    Object.assign(this, { document, selected, found: new Set(found) });
    this.draw();
  }

  draw() {
    const width = this.element.clientWidth;
    if (!width) return;
    if (!this.document.nodes.length) {
      const why = this.document.faults.fallback ? "The tree is not followed any more."
        : "Nothing is cached yet. Send the server a request.";
      refill(this.element, el("p", { class: "empty" }, why));
      return;
    }
    const plan = layOut(this.document);
    this.blocks = plan.blocks;
    const hasMore = plan.blocks.some((block) => block.more);
    const scale = (width - 2 - (hasMore ? MORE_WIDTH : 0)) / (plan.end - plan.start);
    const row = Math.max(ROW.least, Math.min(ROW.most, WANTED_HEIGHT / plan.rows));
    const height = plan.rows * row + AXIS;
    const most = hottest(this.document.nodes);
    const keys = new Set(plan.blocks.map(keyOf));
    if (!keys.has(this.#focus)) this.#focus = keys.has(String(this.selected)) ? String(this.selected) : keyOf(plan.blocks[0]);

    const items = plan.blocks.map((block) => {
      const box = {
        x: 1 + (block.x - plan.start) * scale, y: block.row * row,
        width: block.more ? MORE_WIDTH - 8 : Math.max(1, block.tokens * scale), height: block.rows * row,
      };
      return block.more ? this.#drawMore(block, box) : this.#drawNode(block, box, most);
    });
    const chart = el("svg", {
      role: "tree", "aria-label": "Prefix tree", width, height, viewBox: `0 0 ${width} ${height}`,
      onkeydown: (event) => this.#move(event),
    }, items, axis(plan, scale, height));
    refill(this.element, chart);
  }

  #drawNode(block, box, most) {
    const { node } = block;
    const gap = box.width > 4 ? 1 : 0;
    const rect = el("rect", {
      class: `block ${tierOf(node)}`, rx: box.width > 8 ? 3 : 0,
      x: box.x + gap, y: box.y + 1.5, width: box.width - 2 * gap, height: box.height - 3,
    });
    const group = el("g", {
      ...this.#item(block), "aria-label": describe(node), "aria-selected": String(node.id === this.selected),
      class: ["node", node.pinned && "pinned", !node.queries && "unseen", node.id === this.selected && "selected",
        this.found.has(node.id) && "found"].filter(Boolean).join(" "),
      onclick: () => this.#choose(block),
    }, el("title", {}, describe(node)), rect);
    if (node.queries) heat(group, node.cross_mass / most);
    const middle = box.y + box.height / 2;
    const inset = node.pinned && box.width > 26 ? 14 : 0;
    const label = clipped(oneLine(node.label), box.width - inset - 4);
    if (inset) group.append(el("path", { class: "pin", d: pinShape(box.x + 7, middle - 5) }));
    if (label) group.append(el("text", { class: "name", x: box.x + 7 + inset, y: middle + 4 }, label));
    return group;
  }

  #drawMore(block, box) {
    const words = [`+ ${plural(block.more.nodes, "node")}`, plural(block.more.tokens, "token")];
    const two = box.height >= 34;
    const middle = box.y + box.height / 2;
    const text = two
      ? words.map((line, index) => el("text", { x: box.x + 10, y: middle - 3 + 14 * index }, line))
      : [el("text", { x: box.x + 10, y: middle + 4 }, clipped(words.join(", "), box.width))];
    return el("g", {
      ...this.#item(block), class: "more", onclick: () => this.#choose(block),
      "aria-label": `${describeMore(block.more)}. Enter shows them.`,
    }, el("title", {}, describeMore(block.more)),
    el("rect", { x: box.x + 3, y: box.y + 1.5, width: box.width - 4, height: box.height - 3, rx: 3 }), text);
  }

  #item(block) {
    const key = keyOf(block);
    return {
      role: "treeitem", "data-key": key, tabindex: key === this.#focus ? 0 : -1, "aria-level": block.level,
      "aria-posinset": block.index + 1, "aria-setsize": block.siblings,
      onfocus: () => { this.#focus = key; },
    };
  }

  #choose(block) {
    this.#focus = keyOf(block);
    if (block.more) this.onZoom(block.parent?.id ?? null);
    else this.onSelect(block.node.id);
  }

  #move(event) {
    const at = this.blocks.findIndex((block) => keyOf(block) === this.#focus);
    const block = this.blocks[at];
    const level = this.blocks.filter((each) => each.level === block.level);
    const beside = level.indexOf(block);
    const isChild = (each) => block.node && each.parent?.id === block.node.id;
    const target = {
      ArrowRight: () => this.blocks.find(isChild),
      ArrowLeft: () => this.blocks.find((each) => each.node && each.node.id === block.parent?.id),
      ArrowDown: () => level[beside + 1],
      ArrowUp: () => level[beside - 1],
      Home: () => this.blocks[0],
      End: () => this.blocks.at(-1),
      Enter: () => (this.#choose(block), block),
      " ": () => (this.#choose(block), block),
    }[event.key];
    if (!target) return;
    event.preventDefault();
    const next = target();
    if (!next) return;
    for (const item of this.element.querySelectorAll("[role=treeitem]")) {
      item.setAttribute("tabindex", item.dataset.key === keyOf(next) ? 0 : -1);
    }
    if (next !== block) this.element.querySelector(`[data-key="${keyOf(next)}"]`)?.focus();
  }
}

const keyOf = (block) => (block.more ? `more-${block.parent?.id ?? "top"}` : String(block.node.id));

const pinShape = (x, y) => `M${x} ${y}h7l-1 1v3l2 2v1h-4v4l-.5 1l-.5-1v-4h-4v-1l2-2v-3z`;

/** Positions in the prompt, in tokens. */
function axis(plan, scale, height) {
  const length = plan.end - plan.start;
  const rough = length / Math.max(2, Math.min(8, (length * scale) / 110));
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max(1, [1, 2, 5, 10].map((times) => times * power).find((size) => size >= rough));
  const marks = [];
  for (let token = Math.ceil(plan.start / step) * step; token <= plan.end; token += step) {
    const x = 1 + (token - plan.start) * scale;
    const last = token + step > plan.end;
    marks.push(el("line", { x1: x, x2: x, y1: height - AXIS + 2, y2: height - AXIS + 6 }));
    marks.push(el("text", {
      x, y: height - 4, "text-anchor": token === plan.start ? "start" : last ? "end" : "middle",
    }, last ? `${count(token)} tokens` : count(token)));
  }
  return el("g", { class: "axis", "aria-hidden": "true" }, marks);
}
