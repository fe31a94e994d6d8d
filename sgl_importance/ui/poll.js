// Bounded polling: one round at a time, never more than a tenth of the time, none while nobody looks.

const INTERVAL_MS = 2_000;
const MAX_WAIT_MS = 60_000;
const SHARE_OF_TIME = 10;

/**
 * Calls `round` again and again.
 *
 * A round that fails doubles the wait, up to a minute; one that takes long is waited for ten times as long.
 * `onState` is told { state: "live" | "waiting" | "paused", seconds, error }.
 */
export class Poll {
  #timer = null;
  #running = false;
  #again = false;
  #failures = 0;

  constructor(round, onState) {
    this.round = round;
    this.onState = onState;
    this.paused = false;
    document.addEventListener("visibilitychange", () => this.now());
  }

  setPaused(paused) {
    this.paused = paused;
    if (paused) this.onState({ state: "paused" });
    this.now();
  }

  /** Runs a round at once; after the one under way, if there is one. */
  async now() {
    clearTimeout(this.#timer);
    if (this.paused || document.hidden) return;
    if (this.#running) {
      this.#again = true;
      return;
    }
    this.#running = true;
    const start = performance.now();
    let problem = null;
    try {
      await this.round();
      this.#failures = 0;
    } catch (error) {
      this.#failures += 1;
      problem = error;
    }
    this.#running = false;
    const wait = problem
      ? Math.min(MAX_WAIT_MS, INTERVAL_MS * 2 ** this.#failures)
      : Math.min(MAX_WAIT_MS, Math.max(INTERVAL_MS, SHARE_OF_TIME * (performance.now() - start)));
    if (problem?.status === 401) this.paused = true;
    this.onState({
      state: this.paused ? "paused" : problem ? "waiting" : "live", seconds: wait / 1000, error: problem,
    });
    if (this.#again && !problem) {
      this.#again = false;
      this.now();
    } else if (!this.paused && !document.hidden) {
      this.#again = false;
      this.#timer = setTimeout(() => this.now(), wait);
    }
  }
}
