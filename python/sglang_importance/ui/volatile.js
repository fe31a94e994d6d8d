// Text that changes with each request, in front of text that does not.

import { el, refill } from "./dom.js";

/** Says where the beginnings of prompts change, what it costs and the cure; hides the list where none does. */
export function showVolatile(element, places) {
  element.hidden = !places.length;
  refill(element, places.map(({ sentence, cure, before, variants, after }) => el("li", { class: "notice" },
    `Text at the beginning of prompts changes: ${sentence}. To do: ${cure}.`,
    variants.map((text) => el("code", { class: "variant" }, "…", before, el("mark", {}, text), after, "…")))));
}
