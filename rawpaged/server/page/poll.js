// Asking a server again and again, never twice at once, less often while it does not answer.

const INTERVAL = 1000; // milliseconds from one answer to the next question
const LONGEST_INTERVAL = 5000; // while there are no answers
const TIMEOUT = 20_000; // a map waits for the step that runs

/** An answer that is no success. */
export class HttpStatus extends Error {
  constructor(status) {
    super(`status ${status}`);
    this.status = status;
  }
}

/** What went wrong between here and the server, as opposed to in this page. */
function isFailure(error) {
  return error instanceof HttpStatus || error instanceof TypeError || error instanceof DOMException;
}

/** A response of status 200; throws HttpStatus, and what fetch throws. */
export async function get(path, key) {
  const headers = key === null ? {} : { Authorization: `Bearer ${key}` };
  const signal = AbortSignal.timeout(TIMEOUT);
  const response = await fetch(path, { headers, signal, cache: "no-store" });
  if (!response.ok) throw new HttpStatus(response.status);
  return response;
}

export class Poll {
  /** `ask` is an async function; `onFailure` hears why it did not come to an end. */
  constructor(ask, onFailure) {
    this.ask = ask;
    this.onFailure = onFailure;
    this.isOn = false;
    this.isBusy = false;
    this.isLate = false; // whether now() was called while busy
    this.delay = INTERVAL;
  }

  start() {
    if (this.isOn) return;
    this.isOn = true;
    this.delay = INTERVAL;
    this.now();
  }

  stop() {
    this.isOn = false;
    clearTimeout(this.timer);
  }

  /** Ask at once, or as soon as the question under way is answered. */
  async now() {
    this.isLate = this.isBusy;
    if (!this.isOn || this.isBusy) return;
    clearTimeout(this.timer);
    this.isBusy = true;
    try {
      await this.ask();
      this.delay = INTERVAL;
    } catch (error) {
      if (!isFailure(error)) throw error;
      this.delay = Math.min(2 * this.delay, LONGEST_INTERVAL);
      this.onFailure(error);
    } finally {
      this.isBusy = false;
      if (this.isOn) this.timer = setTimeout(() => this.now(), this.isLate ? 0 : this.delay);
    }
  }
}
