// SPDX-License-Identifier: 0BSD
/** A `fetch` that counts what comes through it, and tells which bytes of the file it was, as they come. */

export class Traffic {
  #ranges = []; // what came while nobody followed
  #follower = null;

  constructor() {
    Object.assign(this, { nbytes: 0, requests: 0, onChange: () => {} });
    this.fetch = this.fetch.bind(this);
  }

  /** Has `told(start, end)` called for all that came, and will come. */
  follow(told) {
    this.#follower = told;
    for (const range of this.#ranges.splice(0)) told(...range);
  }

  async fetch(url, options) {
    // The browser's cache has requests for one URL wait for each other, and would have all of a model twice on disk.
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
