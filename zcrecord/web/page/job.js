// SPDX-License-Identifier: 0BSD
/**
 * A task that takes a while, on a page: a progress bar, a button that cancels, and the text of an error.
 *
 * One task runs at a time: a new one ends the one before.
 */

import { make } from "../view/elements.js";
import { shown } from "../view/text.js";
import { LoadCancelledError, SourceError, SourceNotFoundError } from "../reader/zcrecord.js";

const failed = (error) => error instanceof SourceError && error.what.startsWith("the request failed");

/** Returns an error in words. */
export function inWords(error) {
  return `${shown(error.message)}${failed(error) ? "; is the server still running?" : ""}`;
}

export class Job {
  #abort = null;

  /** `onSource` is called with an error that opening the archive again may mend, and with null after a success. */
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

  /** Runs `work(signal)`; returns true if it ended without an error. */
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

  /** Cancels the task that runs, and shows a text. */
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
