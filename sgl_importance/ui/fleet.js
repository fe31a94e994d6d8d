// The page of a fleet: all servers as one, and pins for all.

import { $, count, el, oneLine, plural, refill, share } from "./dom.js";
import { confirmed, say, showLive } from "./page.js";
import { Poll } from "./poll.js";
import { request } from "./request.js";

const TIERS = { device: "Device", host: "Host memory", storage: "Storage" };
const SOURCES = { requested: "the operator", hinted: "a request" };

const poll = new Poll(round, showLive);

async function round() {
  const fleet = await request("fleet");
  showTrouble(fleet);
  showTogether(fleet);
  showMembers(fleet.members);
  showHottest(fleet);
  showPins(fleet);
}

// ---- what it shows ----

function showTrouble({ members, unreached }) {
  const lines = [
    ...Object.values(unreached),
    ...members.flatMap(({ name, trouble }) => trouble.map((line) => `${name}: ${line}`)),
  ];
  const text = lines.join("\n");
  if ($("trouble").textContent !== text) $("trouble").textContent = text; // said once to screen readers
  $("trouble").hidden = !text;
}

function showTogether({ members, together }) {
  refill($("tiers"), Object.entries(TIERS).map(([tier, name]) => {
    const used = members.reduce((sum, { tiers }) => sum + tiers[tier].used_tokens, 0);
    return el("li", { class: "card tier", "data-tier": tier },
      el("div", {}, el("strong", {}, name),
        el("span", { class: "role" }, `${share(together.hit_rate[tier] ?? 0)} of ${plural(together.prompt_tokens, "prompt token")} found here`)),
      el("div", { class: "amount" }, `${count(used)} tokens on ${plural(members.length, "server")}`));
  }));
}

function showMembers(members) {
  const columns = ["Server", "Requests", ...Object.values(TIERS).flatMap((name) => [name, "Hits"]), "Policy", "Faults"];
  refill($("members"), table("Servers, one in each row", columns, members.map((each) => {
    const rank = each.dp_rank === null ? "" : `?dp_rank=${each.dp_rank}`;
    const link = el("a", { href: `${each.url}/kv_importance/ui${rank}`, "data-key": each.name, rel: "noreferrer" }, each.name);
    return el("tr", { "data-member": each.name }, el("th", { scope: "row" }, link),
      cells(count(each.hits.requests), ...Object.keys(TIERS).flatMap((tier) => [held(each.tiers[tier], `${TIERS[tier]} of ${each.name}`), share(each.hit_rate[tier] ?? 0)]),
        each.policy, each.trouble.length ? count(each.trouble.length) : "none"));
  })));
}

function held({ used_tokens: used, total_tokens: total }, name) {
  if (total === 0) return "not used";
  if (total === null) return count(used);
  return [`${count(used)} of ${count(total)}`, el("meter", { min: 0, max: total, value: used, "aria-label": `${name}: ${share(used / total)} full` })];
}

function showHottest({ members, hottest }) {
  if (!hottest.length) return refill($("hottest"), el("p", { class: "hint" }, "No server has been asked for the same prompt twice."));
  const canPin = members.some(({ policy }) => policy === "importance");
  const columns = ["Its last text begins", "Tokens", "Uses", "On each server", "Salt", "Pin"];
  refill($("hottest"), table("Hottest prefixes, most used first", columns, hottest.map((row) =>
    el("tr", { "data-prefix": row.id }, el("th", { scope: "row" }, el("span", { class: "label" }, oneLine(row.label) || "no text")),
      cells(count(row.prefix_tokens), count(row.uses), row.members.map(({ uses }) => count(uses)).join(" + "), row.cache_salt ?? "",
        canPin ? el("button", { type: "button", "data-key": row.id, onclick: () => pin(row, members.length) }, "Pin") : "")))));
}

function showPins({ servers, pins }) {
  if (!pins.length) return refill($("pins"), el("p", { class: "hint" }, "Nothing is pinned."));
  const columns = ["Pin", "Tokens", "Held by", "Granted on the device", "Asked for by", "Unpin"];
  refill($("pins"), table("Pins of all servers", columns, pins.map((row) => {
    const granted = Object.values(row.granted_tokens);
    return el("tr", { "data-pin": row.pin_id }, el("th", { scope: "row" }, row.pin_id.slice(0, 12)),
      cells(count(row.tokens), `${granted.length} of ${servers.length}`, granted.map(count).join(" + "), SOURCES[row.source] ?? row.source,
        el("button", { type: "button", "data-key": row.pin_id, onclick: () => unpin(row) }, "Unpin")));
  })));
}

function table(caption, columns, rows) {
  return el("table", {}, el("caption", { class: "sr-only" }, caption),
    el("thead", {}, el("tr", {}, columns.map((column) => el("th", { scope: "col" }, column)))), el("tbody", {}, rows));
}

const cells = (...contents) => contents.map((content) => el("td", {}, ...[content].flat()));

// ---- what a person does ----

async function act(work) {
  try {
    const { unreached } = await work();
    const missing = Object.values(unreached);
    say(missing.length ? `Done, but not everywhere: ${missing.join("; ")}` : "Done on every server.", missing.length > 0);
  } catch (error) {
    say(error.message, true);
  }
  poll.now();
}

async function pin(row, servers) {
  const text = `Everything up to the end of this prefix, ${plural(row.prefix_tokens, "token")}, is then evicted last on ${plural(servers, "server")}, as far as each pin budget reaches.`;
  if (!(await confirmed("Pin on every server?", text, "Pin", true))) return;
  const ttl = $("confirm-ttl").value;
  await act(() => request("pin", { body: { prefix: row.id, ...(ttl && { ttl_seconds: Number(ttl) }) } }));
}

async function unpin(row) {
  const text = `Its ${plural(row.tokens, "token")} then compete with everything else again.`;
  if (!(await confirmed("End this pin on every server?", text, "Unpin"))) return;
  await act(() => request("unpin", { body: { pin_id: row.pin_id } }));
}

$("pause").addEventListener("click", () => poll.setPaused(!poll.paused));
poll.now();
