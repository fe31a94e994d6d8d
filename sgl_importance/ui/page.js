// What every page says of itself, and asks before it acts.

import { $ } from "./dom.js";
import { Refused } from "./request.js";

/** Shows the state of a `Poll`. */
export function showLive({ state: kind, seconds, error }) {
  const words = {
    live: `live, every ${Math.round(seconds)} s`, paused: "paused",
    waiting: `no answer, again in ${Math.round(seconds)} s`,
  };
  $("live-state").textContent = words[kind];
  $("live-state").className = `pill ${kind}`;
  $("pause").setAttribute("aria-pressed", String(kind === "paused"));
  $("pause").textContent = kind === "paused" ? "Resume" : "Pause";
  if (error) say(error instanceof Refused ? error.message : "The server does not answer.", true);
  else if (kind === "live" && $("notice").classList.contains("error")) say("");
}

/** Shows one line above the page; an empty one hides it. */
export function say(message, isError = false) {
  $("notice").textContent = message;
  $("notice").hidden = !message;
  $("notice").classList.toggle("error", isError);
}

/** Whether a person agrees; with `choice`, for how many seconds ("" is without end). */
export function confirmed(heading, text, button, choice = false) {
  const dialog = $("confirm-dialog");
  $("confirm-heading").textContent = heading;
  $("confirm-text").textContent = text;
  $("confirm-ok").textContent = button;
  $("confirm-choice").hidden = !choice;
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "ok"), { once: true });
  });
}
