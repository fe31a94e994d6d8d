// The last requests: what each found, why the rest was computed, and the text where it parted from an earlier one.

import { ago, count, el, plural, refill } from "./dom.js";

const REASONS = {
  never_seen: "new", parted: "behind another text", evicted: "given up to make room", session_over: "given back by a session that was over", other_namespace: "another namespace's",
  flushed: "flushed", storage: "lost by storage", not_kept: "not kept", unused: "held, not usable",
  forgotten: "forgotten", short: "fills no page",
};

const missed = (request) => Object.entries(request.missed_tokens).sort(([, a], [, b]) => b - a)
  .map(([reason, tokens]) => `${count(tokens)} ${REASONS[reason] ?? reason}`).join(", ");

const found = (request) => Object.values(request.found_tokens).reduce((sum, tokens) => sum + tokens, 0);

/** Lists requests, the newest first; a click on one calls `onSelect` with its id. */
export function showRequests(element, { requests, now }, { selected, onSelect }) {
  refill(element, requests.length ? requests.map((request) => el("li", {},
    el("time", { datetime: new Date(1000 * request.time).toISOString() }, ago(now - request.time)),
    el("div", {},
      el("button", { type: "button", class: "link", "data-key": request.rid, "aria-pressed": String(request.rid === selected),
        onclick: () => onSelect(request.rid) }, `${count(found(request))} of ${plural(request.prompt_tokens, "token")} found`),
      el("span", { class: "why" }, missed(request) || "nothing was computed"))))
    : el("li", { class: "empty" }, "Nobody has asked yet."));
}

/** One request in full: both texts side by side where it parted from an earlier one. */
export function showWhy(element, request) {
  const { parted } = request;
  const title = el("p", {}, `${count(found(request))} of ${plural(request.prompt_tokens, "token")} found; computed: ${missed(request) || "none"}.`);
  if (parted === null) return refill(element, title, el("p", { class: "hint" }, "It left no text that is known."));
  const side = (name, text) => el("div", {}, el("h3", {}, name),
    el("code", { class: "variant" }, "…", parted.before, el("mark", {}, text), "…"));
  const earlier = parted.rid === null ? "Storage had" : `Request ${parted.rid.slice(0, 12)} had`;
  refill(element, title,
    el("p", { class: "hint" }, `It parted at token ${count(parted.token)}. What is marked differs from there on.`),
    el("div", { class: "texts" }, side(earlier, parted.known), side("This one has", parted.asked)));
}
