// What the server's terms mean, in a sentence.

const KINDS = {
  insert: "entered", split: "split", back_up: "copied", load_back: "loaded", evict: "evicted", remove: "gone",
  reset: "flushed", pin: "taken in", unpin: "ended",
};

const REASONS = {
  computed: "a request computed it",
  prewarmed: "a pre-warm computed it",
  paths_part: "another prompt, or a pin, parts from it here",
  tail_cut: "room was needed, and its tail was enough",
  write_policy: "the server's write policy asks for a copy",
  requested: "a request asked for it",
  prefetched: "a request asked for it, and storage had it",
  least_loss: "room was needed and nothing else would be missed less",
  dropped_after_use: "its request said that nobody would ask again",
  session_over: "its session said that it was over",
  stock_order: "SGLang's own order chose it",
  flushed: "the cache was emptied",
  asked_for: "the operator asked for it",
  hinted: "a request asked to retain its prompt",
  restored: "it was held before the restart",
  unpinned: "the operator unpinned it",
  expired: "its lifetime is over",
  unused: "nobody has asked for it for long",
  superseded: "a later request retains the same prompt, or more of it",
  made_room: "another pin took its place",
};

const ENDS = {
  unknown: "is not known",
  tool_call: "with a tool call",
  end_of_turn: "with the end of a turn",
  length: "at its limit of tokens",
  abort: "by an abort",
};

const TO = { device: "to the device", host: "to host memory", storage: "to storage" };
const FROM = { device: "from the device", host: "from host memory", storage: "from storage" };

/** An event as a phrase: "copied to host memory". */
export function phrase({ kind, tier }) {
  if (kind === "evict") return `${KINDS[kind]} ${FROM[tier]}`;
  if (kind === "back_up" || kind === "load_back") return `${KINDS[kind]} ${TO[tier]}`;
  if (kind === "insert") return `${KINDS[kind]} ${tier === "device" ? "the cache" : TO[tier]}`;
  if (kind === "remove") return "left the cache";
  return KINDS[kind] ?? kind;
}

export const answerEnd = (node) => ENDS[node.answer_end];

export const because = (event) => REASONS[event.reason] ?? event.reason.replaceAll("_", " ");
