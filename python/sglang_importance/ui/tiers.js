// How full each tier is, and what the marks in the chart mean.

import { hottest } from "./chart.js";
import { count, el, refill, share } from "./dom.js";

const NAMES = {
  device: ["Device", "next to the model; read at once"],
  host: ["Host memory", "copied back when asked for"],
  storage: ["Storage", "outlives the server"],
};

export function showTiers(element, document) {
  const pools = Object.entries(NAMES).map(([tier, [name, role]]) => {
    const { used_tokens: used, total_tokens: total } = document.tiers[tier];
    return card(tier, name, role, { used, total, unit: "tokens", isOff: total === 0 });
  });
  const chain = document.store_tiers?.tiers ?? [];
  refill(element, pools, chain.map(({ name, kind, state, pages, capacity_pages: total, note }) => {
    const role = [name === kind ? null : kind, state === "in use" ? null : state, note].filter(Boolean).join(", ");
    return card(`store:${name}`, `Storage: ${name}`, role, { used: pages, total, unit: "pages", isOff: state !== "in use" });
  }));
}

function card(tier, name, role, { used, total, unit, isOff }) {
  const amount = total === 0 ? "not used" : total === null ? `${count(used)} ${unit}`
    : `${count(used)} of ${count(total)} ${unit}`;
  const bar = total ? el("meter", { min: 0, max: total, value: used, "aria-label": `${name}: ${amount}` }) : null;
  return el("li", { class: `card tier ${isOff ? "off" : ""}`, "data-tier": tier },
    el("div", {}, el("strong", {}, name), el("span", { class: "role" }, role)),
    el("div", { class: "amount" }, amount, total ? el("span", {}, share(used / total)) : null), bar);
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
