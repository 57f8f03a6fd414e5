// SPDX-License-Identifier: 0BSD
/**
 * Work that takes a while, as a page shows it: a bar, a button that cancels, and what went wrong as text in its place.
 *
 * One thing is done at a time: what is begun ends what was there before.
 */

import { make, shown } from "../view/model.js";
import { LoadCancelledError, SourceError, SourceNotFoundError } from "../reader/zcrecord.js";

const failed = (error) => error instanceof SourceError && error.what.startsWith("the request failed");

/** Returns an error in words. */
export function inWords(error) {
  return `${shown(error.message)}${failed(error) ? "; is the server still running?" : ""}`;
}

export class Job {
  #abort = null;

  /** `onSource` is told of an error that opening the archive again may mend, and null when something was done. */
  constructor(label, onSource) {
    this.onSource = onSource;
    this.bar = make("progress", { "aria-label": label, max: "1", value: "0" });
    this.button = make("button", { type: "button" }, "Cancel");
    this.button.addEventListener("click", () => this.end("Cancelled."));
    this.going = make("div", { class: "going", hidden: "" }, this.bar, this.button);
    this.status = make("p", { class: "status", role: "status" });
    this.alert = make("p", { class: "error", role: "alert", hidden: "" });
    this.element = make("div", { class: "job" }, this.going, this.status, this.alert);
  }

  /** Runs `work(signal)`; returns whether it came to its end. */
  async run(work) {
    this.end("");
    const mine = (this.#abort = new AbortController());
    this.alert.hidden = true;
    this.progress(0, 1);
    this.going.hidden = false;
    try {
      await work(mine.signal);
      if (mine.signal.aborted) return false;
      this.onSource(null);
      return true;
    } catch (error) {
      if (!mine.signal.aborted && !(error instanceof LoadCancelledError)) this.#fail(error);
      return false;
    } finally {
      if (this.#abort === mine) this.end(this.status.textContent);
    }
  }

  progress(done, total) {
    this.bar.value = total ? done / total : 1;
  }

  /** Breaks off what is going on, and says so. */
  end(what) {
    this.#abort?.abort();
    this.#abort = null;
    this.going.hidden = true;
    this.status.textContent = what;
  }

  #fail(error) {
    this.alert.textContent = inWords(error);
    this.alert.hidden = false;
    const changed = error instanceof SourceError && /open it again/.test(error.what);
    if (changed || error instanceof SourceNotFoundError || failed(error)) this.onSource(error);
  }
}
