// The tree as a table: the same nodes as the chart, for those who would rather read.

import { TIERS, describeMore } from "./chart.js";
import { count, el, oneLine, refill, share } from "./dom.js";
import { layOut } from "./layout.js";

const COLUMNS = ["Text", "Position", "Tokens", "Cross mass", "Requests", "Reuse", "Kept in", "Pinned"];

export function showTable(element, document, { selected, onSelect, onZoom }) {
  const rows = layOut(document).blocks.map((block) => {
    const more = block.more;
    const node = block.node;
    const key = more ? `more-${block.parent?.id ?? "top"}` : String(node.id);
    const name = more ? describeMore(more) : oneLine(node.label) || `node ${node.id}`;
    const button = el("button", {
      type: "button", class: "link", "data-key": key, "aria-current": node?.id === selected && "true",
      onclick: () => (more ? onZoom(block.parent?.id ?? null) : onSelect(node.id)),
    }, name);
    const head = el("th", { scope: "row" }, button);
    head.style.setProperty("--level", Math.min(8, block.level - 1));
    if (more) return el("tr", { class: "more-row" }, head, el("td", { colspan: COLUMNS.length - 1 }));
    return el("tr", { "data-node": node.id }, head,
      [count(node.depth_tokens), count(node.tokens), node.queries ? share(node.cross_mass) : "–",
        count(node.queries), share(node.p_reuse), node.tiers.map((tier) => TIERS[tier]).join(", "),
        node.pinned ? "yes" : "no"].map((cell) => el("td", {}, cell)));
  });
  refill(element, el("table", {},
    el("caption", { class: "sr-only" }, "Nodes of the tree, parents first"),
    el("thead", {}, el("tr", {}, COLUMNS.map((column) => el("th", { scope: "col" }, column)))),
    el("tbody", {}, rows)));
}
