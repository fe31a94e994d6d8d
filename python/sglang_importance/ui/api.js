// The routes below /kv_importance/ that the live page asks.

import { request } from "./request.js";

// The page shows one data-parallel rank, the first unless its address says ?dp_rank=1.
const dp_rank = new URLSearchParams(location.search).get("dp_rank") ?? 0;
const query = (values = {}) =>
  new URLSearchParams(Object.entries({ ...values, dp_rank }).filter(([, value]) => value !== null));

export const api = {
  tree: (root, limit) => request(`tree?${query({ root, limit })}`),
  node: (id) => request(`node/${id}?${query()}`),
  prompt: (id) => request(`node/${id}/prompt?${query()}`),
  events: (since, limit) => request(`events?${query({ since, limit })}`),
  requests: (limit) => request(`why?${query({ limit })}`),
  why: (rid) => request(`why?${query({ rid })}`),
  find: (prompt) => request(`find?${query()}`, { body: prompt }),
  pin: (prompt) => request("pin", { body: prompt }),
  unpin: (pin_id) => request("unpin", { body: { pin_id } }),
  prewarm: (prompt) => request("prewarm", { body: prompt }),
  prewarmJob: (id) => request(`prewarm/${id}`),
};
