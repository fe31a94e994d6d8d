// Requests to whoever served this page, under the servers' API key where they have one.

import { $ } from "./dom.js";

const STORED_KEY = "kv-importance-api-key";
const TIMEOUT_MS = 30_000;
// Headers carry no others: the browser throws, or the server answers 500 and never 401, and the key would stay.
const KEY_PATTERN = "[\\x20-\\x7e]+";

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

let asking = null;

/** Asks for the key, once for however many requests wait for it. */
function askForKey(wrong) {
  asking ??= new Promise((resolve) => {
    const dialog = $("key-dialog");
    if (wrong) $("key-problem").textContent = "The server refused this key. Try another one.";
    $("key").value = "";
    $("key").pattern = KEY_PATTERN;
    $("key").title = "A key has letters without accents, digits and signs of ASCII only.";
    dialog.addEventListener("close", () => {
      asking = null;
      if (dialog.returnValue === "ok") sessionStorage.setItem(STORED_KEY, $("key").value);
      $("key").value = "";
      resolve(dialog.returnValue === "ok");
    }, { once: true });
    dialog.returnValue = "";
    dialog.showModal();
  });
  return asking;
}

/** The JSON that a path answers. Refused where the server says no. */
export async function request(path, { body = null, method = body ? "POST" : "GET" } = {}) {
  for (;;) {
    const key = sessionStorage.getItem(STORED_KEY);
    const headers = key ? { Authorization: `Bearer ${key}` } : {};
    if (body) headers["Content-Type"] = "application/json";
    const answer = await fetch(path, {
      method, headers, body: body && JSON.stringify(body),
      cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS),
    });
    if (answer.status === 401) {
      if (sessionStorage.getItem(STORED_KEY) !== key) continue; // another request has asked meanwhile
      sessionStorage.removeItem(STORED_KEY);
      if (await askForKey(key !== null)) continue;
      throw new Refused(401, "The server wants an API key. Resume to enter one.");
    }
    const document = await answer.json().catch(() => ({}));
    if (answer.ok) return document;
    throw new Refused(answer.status, document.message ?? document.detail ?? `the server answered ${answer.status}`);
  }
}
