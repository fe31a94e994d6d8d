// How full each tier is, and what the marks in the chart mean.

import { hottest } from "./chart.js";
import { count, el, refill, share } from "./dom.js";

const NAMES = {
  device: ["Device", "next to the model; read at once"],
  host: ["Host memory", "copied back when asked for"],
  storage: ["Storage", "outlives the server"],
};

export function showTiers(element, document) {
  refill(element, Object.entries(NAMES).map(([tier, [name, role]]) => {
    const { used_tokens: used, total_tokens: total } = document.tiers[tier];
    const isOff = total === 0;
    const amount = isOff ? "not used" : total === null ? `${count(used)} tokens`
      : `${count(used)} of ${count(total)} tokens`;
    const bar = total ? el("meter", { min: 0, max: total, value: used, "aria-label": `${name}: ${amount}` }) : null;
    return el("li", { class: `card tier ${isOff ? "off" : ""}`, "data-tier": tier },
      el("div", {}, el("strong", {}, name), el("span", { class: "role" }, role)),
      el("div", { class: "amount" }, amount, total ? el("span", {}, share(used / total)) : null), bar);
  }));
}

export function showLegend(element, document) {
  const swatch = (kind, words) => el("span", {},
    el("svg", { width: 26, height: 16, "aria-hidden": "true", class: "swatch" },
      el("rect", { class: `block ${kind}`, x: 1.5, y: 1.5, width: 23, height: 13, rx: 3 })), words);
  refill(element,
    el("span", { class: "scale" }, "attention of later requests:", el("span", {}, "none"), el("span", { class: "ramp", "aria-hidden": "true" }),
      el("span", {}, share(document.nodes.length ? hottest(document.nodes) : 0))),
    swatch("unseen", "nobody came back yet"),
    swatch("device", "on the device"), swatch("host", "in host memory only"), swatch("storage", "in storage only"),
    swatch("pinned", "pinned: evicted last"));
}
