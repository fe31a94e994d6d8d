// One node in full: facts, page heat strip, text, pins and what can be done with it.

import { TIERS } from "./chart.js";
import { ago, count, el, heat, plural, refill, share } from "./dom.js";
import { answerEnd, because, phrase } from "./words.js";

const fact = (name, help, value) =>
  el("div", {}, el("dt", { title: help }, name), el("dd", {}, value));

/** Shows a node's document; `actions` has pin, unpin(pin), prewarm and zoom. */
export function showNode(element, node, { policy, now, actions }) {
  const move = node.last_move;
  const end = node.depth_tokens + node.tokens;
  const canPin = policy === "importance";
  refill(element,
    el("dl", { class: "facts" },
      fact("Tokens", "Tokens of this node, and where they lie in the prompt",
        `${count(node.tokens)} (${count(node.depth_tokens)} to ${count(end)})`),
      fact("Kept in", "Tiers that hold a copy", node.tiers.map((tier) => TIERS[tier]).join(", ") || "–"),
      fact("Cross mass", "Mean share of a later request's attention that went here",
        node.queries ? share(node.cross_mass) : "none yet"),
      fact("Later requests", "Requests other than its first that looked at it", count(node.queries)),
      fact("Found", "Requests that found it in the cache", `${count(node.accesses)} ${node.accesses === 1 ? "time" : "times"}`),
      fact("Predicted reuse", "Chance that another request comes for it", share(node.p_reuse)),
      fact("Loss", "Seconds expected to be lost, per KV byte freed and request, were it evicted now; the least goes first",
        node.loss === 0 ? "0" : node.loss.toExponential(1)),
      fact("Last answer ended", "How the answer of the last request on this path ended", answerEnd(node)),
      fact("Last asked for", "Requests admitted since", node.age ? `${plural(node.age, "request")} ago` : "by the latest request")),
    el("p", { class: "move" }, el("strong", {}, "Last move: "),
      move ? `${phrase(move)} ${ago(now - move.time)}, because ${because(move)}.` : "longer ago than the server remembers."),
    strip(node),
    pinList(node, actions),
    el("div", { class: "buttons" },
      el("button", { type: "button", "data-key": "pin", disabled: !canPin, onclick: () => actions.pin(node) }, "Pin"),
      el("button", { type: "button", "data-key": "prewarm", onclick: () => actions.prewarm(node) }, "Pre-warm"),
      el("button", { type: "button", "data-key": "zoom", onclick: () => actions.zoom(node.id) }, "Zoom in")),
    canPin ? null : el("p", { class: "hint" }, `Under --kv-policy ${policy} pins move nothing.`));
}

export function showGone(element, id) {
  refill(element, el("p", { class: "hint" },
    `Node ${id} is no longer in the tree. The moves beside this may say why.`));
}

/** After a fault has ended learning. */
export function showUnknown(element, id) {
  refill(element, el("p", { class: "hint" }, `Nothing is known of node ${id} any more.`));
}

/** Pages as cells, warmer where later requests looked more; under it the text of the cell pointed at. */
function strip(node) {
  const { cross_mass: cross, self_mass: own, peak, chosen, resident, pages_per_cell: pages } = node.strip;
  const isChosen = chosen?.some((times) => times > 0);
  const masses = isChosen ? chosen : node.queries ? cross : own;
  const isSeen = [...cross, ...own].some((mass) => mass > 0);
  const most = Math.max(1e-9, ...masses);
  const text = el("p", { class: "page-text", "data-key": "page-text" });
  const first = masses.indexOf(Math.max(...masses));
  const cells = masses.map((mass, index) => {
    const cell = el("span", { class: "cell", onpointerenter: () => point(index) });
    heat(cell, mass / most);
    if (resident) cell.classList.toggle("absent", resident[index] < 0.5);
    return cell;
  });
  const slider = el("input", {
    type: "range", min: 0, max: masses.length - 1, value: Math.max(0, first), "data-key": "page",
    "aria-label": "Page", oninput: (event) => point(Number(event.target.value)),
  });
  function point(index) {
    cells.forEach((cell, at) => cell.classList.toggle("at", at === index));
    slider.value = index;
    const name = pages === 1 ? `page ${index + 1} of ${node.pages}`
      : `pages ${index * pages + 1} to ${Math.min(node.pages, (index + 1) * pages)} of ${node.pages}`;
    const attention = `later requests ${share(cross[index])}, its own request ${share(own[index])}, peak ${share(peak[index])}`;
    const facts = `${name}: ${isChosen ? `chosen ${chosen[index].toFixed(1)} times of late` : ""}` +
      (isChosen && isSeen ? ", " : "") + (isSeen || !isChosen ? attention : "") +
      (resident ? `, on the device in ${share(resident[index])} of the layers` : "");
    slider.setAttribute("aria-valuetext", facts);
    text.replaceChildren(el("span", { class: "page-facts" }, facts),
      el("q", {}, node.text.cells[index] ?? "text not shown: the node is long"));
  }
  point(Math.max(0, first));
  const whose = isChosen ? "where steps read of late" : node.queries ? "where later requests looked" : "where its own request looked";
  return el("div", { class: "pages" },
    el("p", { class: "strip-name" }, `Pages, ${whose}`),
    el("div", { class: "strip", "aria-hidden": "true" }, cells), slider, text);
}

function pinList(node, actions) {
  if (!node.pins.length) return null;
  return el("ul", { class: "pins", "aria-label": "Pins on this node" }, node.pins.map((pin) => el("li", {},
    el("span", {}, `Pinned, first ${plural(pin.tokens, "token")}`),
    el("button", { type: "button", "data-key": `unpin-${pin.pin_id}`, onclick: () => actions.unpin(pin) }, "Unpin"))));
}
