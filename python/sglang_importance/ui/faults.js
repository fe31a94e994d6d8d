// What of ours has failed in the server, as a banner.

import { count, plural } from "./dom.js";

/** Says what a tree's `faults` hold, and the cure; hides the banner where nothing has failed. */
export function showFaults(element, { counts, fallback }) {
  const text = fallback ? fallenBack(fallback) : counted(Object.entries(counts));
  if (element.textContent !== text) element.textContent = text; // said once to screen readers, not every round
  element.hidden = !text;
}

function fallenBack({ clock, place, error }) {
  return `Since request ${count(clock)} this server evicts by LRU, until it is restarted: ${error}. It serves on, but knows `
    + `nothing of its tree any more. Restart it, and report the line “KV importance: fault in ${place}” of its log.`;
}

function counted(places) {
  if (!places.length) return "";
  const total = places.reduce((sum, [, number]) => sum + number, 0);
  const kinds = places.map(([place, number]) => `${place} ${count(number)}`).join(", ");
  return `${plural(total, "fault")} of this server caught and counted (${kinds}). It serves and learns on. Report `
    + "the lines “KV importance: fault in …” of its log.";
}
