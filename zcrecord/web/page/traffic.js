// SPDX-License-Identifier: 0BSD
/** A `fetch` that counts the bytes that come, and reports their ranges of the file. */

export class Traffic {
  #ranges = []; // that came before `follow`
  #follower = null;

  constructor() {
    Object.assign(this, { nbytes: 0, requests: 0, onChange: () => {} });
    this.fetch = this.fetch.bind(this);
  }

  /** Calls `report(start, end)` for all ranges that came, and those that will come. */
  follow(report) {
    this.#follower = report;
    for (const range of this.#ranges.splice(0)) report(...range);
  }

  async fetch(url, options) {
    // The browser's cache lets requests for one URL wait for each other, and would keep the model on disk again.
    const response = await fetch(url, { ...options, cache: "no-store" });
    this.requests += 1;
    this.onChange();
    if (!response.body) return response;
    let at = Number(/^bytes (\d+)-/.exec(response.headers.get("content-range") ?? "")?.[1] ?? 0);
    const count = new TransformStream({
      transform: (chunk, controller) => {
        this.#take(at, chunk.length, response.ok);
        at += chunk.length;
        controller.enqueue(chunk);
      },
    });
    return new Response(response.body.pipeThrough(count), response);
  }

  #take(at, nbytes, ofFile) {
    this.nbytes += nbytes;
    if (ofFile && this.#follower) this.#follower(at, at + nbytes);
    else if (ofFile) this.#ranges.push([at, at + nbytes]);
    this.onChange();
  }
}
