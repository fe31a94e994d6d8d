// Wires the parts of the page together.

import { api } from "./api.js";
import { Chart } from "./chart.js";
import { $, count, el, oneLine, plural, refill } from "./dom.js";
import { Moves } from "./events.js";
import { showFaults } from "./faults.js";
import { showGone, showNode, showUnknown } from "./node.js";
import { confirmed, say, showLive } from "./page.js";
import { Poll } from "./poll.js";
import { showTable } from "./table.js";
import { showLegend, showTiers } from "./tiers.js";
import { showVolatile } from "./volatile.js";
import { showRequests, showWhy } from "./why.js";

const NODES_SHOWN = 120;
const EVENTS_PER_ROUND = 200;
const REQUESTS_SHOWN = 20;
const JOB_POLL_MS = 500;

const state = { root: null, selected: null, found: [], tree: null, node: null, rid: null, isAccounted: true };

const chart = new Chart($("chart"), { onSelect: select, onZoom: zoom });
const moves = new Moves({ timeline: $("timeline"), list: $("events"), span: $("span"), onSelect: select });
const poll = new Poll(round, showLive);

// ---- one round ----

async function round() {
  const root = state.root;
  const tree = await api.tree(root, NODES_SHOWN).catch((error) => {
    if (error.status !== 404 || root === null) throw error;
    state.root = null; // what was zoomed into has left the tree
    return api.tree(null, NODES_SHOWN);
  });
  if (state.root !== root && root === null) return; // zoomed meanwhile: the next round shows it
  state.tree = tree;
  moves.add(await api.events(moves.next, EVENTS_PER_ROUND));
  draw();
  await loadNode();
  await loadRequests();
}

/** The card is hidden where the server keeps no account. */
async function loadRequests() {
  if (!state.isAccounted) return;
  const answer = await api.requests(REQUESTS_SHOWN).catch((error) => {
    if (!error.status) throw error;
    state.isAccounted = error.status === 503 && !state.tree.faults.fallback; // else it never will be again
    return null;
  });
  $("requests-card").hidden = answer === null;
  if (answer !== null) showRequests($("requests"), answer, { selected: state.rid, onSelect: explain });
}

async function explain(rid) {
  state.rid = rid;
  try {
    const [request] = (await api.why(rid)).requests;
    if (rid === state.rid) showWhy($("why"), request);
  } catch (error) {
    say(error.message, true); // it is none of the last requests any more
  }
}

async function loadNode() {
  const id = state.selected;
  if (id === null) return;
  if (state.tree?.faults.fallback) return showUnknown($("node"), id);
  try {
    const node = await api.node(id);
    if (id !== state.selected) return;
    state.node = node;
    const isReading = $("node").contains(document.activeElement) && document.activeElement.dataset.key === "page";
    if (!isReading) showNode($("node"), node, { policy: state.tree?.policy, now: moves.now ?? Date.now() / 1000, actions });
  } catch (error) {
    if (error.status !== 404) throw error;
    showGone($("node"), id);
  }
}

function draw() {
  if (!state.tree) return;
  showFaults($("faults"), state.tree.faults);
  showTiers($("tiers"), state.tree);
  $("ages").textContent = state.tree.ages.sentence;
  showVolatile($("volatile"), state.tree.volatile);
  const isTable = !$("table").hidden;
  if (isTable) showTable($("table"), state.tree, { selected: state.selected, onSelect: select, onZoom: zoom });
  else chart.show(state.tree, state);
  showLegend($("legend"), state.tree);
  showTrail();
}

function showTrail() {
  const { total, root, nodes } = state.tree;
  const whole = `${plural(total.nodes, "node")}, ${plural(total.tokens, "token")}`;
  if (root === null) return refill($("trail"), el("span", {}, `Whole tree: ${whole}`));
  const label = oneLine(nodes[0]?.label ?? "").slice(0, 40);
  refill($("trail"),
    el("button", { type: "button", class: "link", "data-key": "top", onclick: () => zoom(null) }, `Whole tree (${whole})`),
    el("span", { "aria-current": "true" }, ` › node ${root}: ${label}…`));
}

// ---- what a person does ----

function select(id) {
  state.selected = id;
  $("node-heading").textContent = `Node ${id}`;
  draw();
  loadNode().catch((error) => say(error.message, true));
}

function zoom(id) {
  state.root = id;
  poll.now();
}

async function search(event) {
  event.preventDefault();
  const text = $("search-text").value;
  const kind = $("search-kind").value;
  const prompt = kind === "text" ? { text }
    : kind === "input_ids" ? { input_ids: (text.match(/\d+/g) ?? []).map(Number) }
      : { messages: [{ role: kind, content: text }] };
  try {
    const answer = await api.find(prompt);
    state.found = answer.path.map((part) => part.id);
    const last = answer.path.at(-1);
    $("search-result").textContent = last
      ? `${count(answer.matched_tokens)} of ${plural(answer.tokens, "token")} are cached, down to node ${last.id}`
      : "nothing in the cache begins like this";
    if (!last) return draw();
    const isShown = state.tree.nodes.some((node) => node.id === last.id);
    if (!isShown) zoom(answer.path.length > 1 ? answer.path.at(-2).id : last.id);
    select(last.id);
  } catch (error) {
    $("search-result").textContent = error.message;
  }
}

/** Does something to the server, says how it went, and shows the outcome at once. */
async function act(work) {
  try {
    say(await work());
  } catch (error) {
    say(error.message, true);
  }
  poll.now();
}

const actions = {
  zoom,
  async pin(node) {
    const end = node.depth_tokens + node.tokens;
    const text = `Everything up to the end of this node, ${plural(end, "token")}, is then evicted last, as far as the pin budget reaches.`;
    if (!(await confirmed(`Pin up to node ${node.id}?`, text, "Pin", true))) return;
    const ttl = $("confirm-ttl").value;
    await act(async () => {
      const answer = await api.pin({ ...(await api.prompt(node.id)), ...(ttl && { ttl_seconds: Number(ttl) }) });
      return `Pinned ${plural(answer.tokens, "token")}; the budget grants ${count(answer.granted_tokens.device ?? 0)} on the device.`;
    });
  },
  async unpin(pin) {
    const text = `The first ${plural(pin.tokens, "token")} then compete with everything else again.`;
    if (!(await confirmed("End this pin?", text, "Unpin"))) return;
    await act(async () => {
      await api.unpin(pin.pin_id);
      return `Unpinned ${plural(pin.tokens, "token")}.`;
    });
  },
  async prewarm(node) {
    const end = node.depth_tokens + node.tokens;
    const text = `Everything up to the end of this node, ${plural(end, "token")}, is brought to the device: loaded where a tier holds it, computed where none does. Requests go first.`;
    if (!(await confirmed(`Pre-warm up to node ${node.id}?`, text, "Pre-warm"))) return;
    await act(async () => {
      const { job_id: id } = await api.prewarm(await api.prompt(node.id));
      for (;;) {
        const job = await api.prewarmJob(id);
        if (job.state !== "running") {
          const hits = Object.values(job.hit_tokens).reduce((sum, tokens) => sum + tokens, 0);
          return `Pre-warm ${job.state}: ${count(hits)} tokens found, ${count(job.computed_tokens)} computed.${job.detail ? ` ${job.detail}.` : ""}`;
        }
        say(`Pre-warm: ${count(job.done_tokens)} of ${plural(job.total_tokens, "token")}`);
        await new Promise((resolve) => setTimeout(resolve, JOB_POLL_MS));
      }
    });
  },
};

function showView(isTable) {
  $("table").hidden = !isTable;
  $("chart").hidden = isTable;
  $("show-table").setAttribute("aria-pressed", String(isTable));
  $("show-chart").setAttribute("aria-pressed", String(!isTable));
  draw();
}

$("search").addEventListener("submit", search);
$("show-chart").addEventListener("click", () => showView(false));
$("show-table").addEventListener("click", () => showView(true));
$("pause").addEventListener("click", () => poll.setPaused(!poll.paused));
poll.now();
