// The latest moves: a lane for each kind over time, and a list of words.

import { ago, el, plural, refill } from "./dom.js";
import { because, phrase } from "./words.js";

const LANES = [["insert", "entered"], ["back_up", "copied"], ["load_back", "loaded"], ["evict", "evicted"],
  ["pin", "pinned"], ["unpin", "unpinned"]];
const KEPT = 500;
const LISTED = 40;
const BINS = 60;
const SPANS = [60, 120, 600, 3600, 86_400];
const LANE = 26;
const NAMES_WIDTH = 62;

export class Moves {
  #events = [];
  next = 0;

  constructor({ timeline, list, span, onSelect }) {
    Object.assign(this, { timeline, list, span, onSelect });
  }

  /** Takes in an answer of /kv_importance/events. */
  add(answer) {
    if (answer.next < this.next) this.#events = []; // the server was started again
    this.#events = [...this.#events, ...answer.events].slice(-KEPT);
    this.next = answer.next;
    this.now = answer.now;
    this.draw();
  }

  draw() {
    const events = this.#events;
    const oldest = this.now - (events[0]?.time ?? this.now);
    const seconds = SPANS.find((span) => span >= oldest) ?? SPANS.at(-1);
    this.span.textContent = seconds < 3600 ? plural(seconds / 60, "minute") : plural(seconds / 3600, "hour");
    this.#drawLanes(seconds);
    const latest = events.slice(-LISTED).reverse();
    refill(this.list, latest.length ? latest.map((event) => this.#item(event))
      : el("li", { class: "empty" }, "Nothing has moved yet."));
  }

  #item(event) {
    const name = event.kind === "reset" ? "the whole cache"
      : event.node === null ? `pin ${event.pin_id.slice(0, 12)}`
      : el("button", { type: "button", class: "link", "data-key": event.serial, onclick: () => this.onSelect(event.node) },
        `node ${event.node}`);
    const tokens = event.tokens ? ` · ${plural(event.tokens, "token")}` : "";
    return el("li", { class: event.kind, "data-serial": event.serial },
      el("time", { datetime: new Date(1000 * event.time).toISOString() }, ago(this.now - event.time)),
      el("div", {}, el("span", { class: "what" }, name, ` ${phrase(event)}${tokens}`),
        el("span", { class: "why" }, because(event))));
  }

  #drawLanes(seconds) {
    const width = this.timeline.clientWidth;
    if (!width) return;
    const height = LANES.length * LANE + 18;
    const bin = seconds / BINS;
    const scale = (width - NAMES_WIDTH - 10) / seconds;
    const dots = [];
    LANES.forEach(([kind, name], lane) => {
      const y = lane * LANE + LANE / 2;
      dots.push(el("text", { x: 0, y: y + 4 }, name), el("line", { x1: NAMES_WIDTH, x2: width, y1: y, y2: y }));
      const tokens = new Map();
      for (const event of this.#events) {
        const age = this.now - event.time;
        if (event.kind !== kind || age > seconds) continue;
        const at = Math.floor(event.time / bin);
        tokens.set(at, (tokens.get(at) ?? 0) + event.tokens);
      }
      for (const [at, sum] of tokens) {
        const age = Math.min(seconds, Math.max(0, this.now - (at + 0.5) * bin));
        const r = Math.min(LANE / 2 - 2, 2 + Math.sqrt(sum) / 6);
        dots.push(el("circle", { class: kind, cx: width - 10 - age * scale, cy: y, r }, el("title", {}, `${plural(sum, "token")} ${name}`)));
      }
    });
    dots.push(el("text", { x: NAMES_WIDTH, y: height - 2 }, ago(seconds)),
      el("text", { x: width, y: height - 2, "text-anchor": "end" }, "now"));
    refill(this.timeline, el("svg", {
      width, height, role: "img", "aria-label": "Moves over time, by kind; the list below says the same",
    }, dots));
  }
}
