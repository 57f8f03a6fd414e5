// SPDX-License-Identifier: 0BSD
/** Sources of bytes: memory, Blobs and URLs; local.js has files. */

import { RecordError, checkCancelled, notLoaded } from "./format.js";

export const FIRST = 1 << 16; // bytes read at once, of either end
const SMALL = 1 << 20; // bytes that are read without pieces.js

/** Bytes in memory (`octets`), or in the Blob or Response that `request` gives. */
export class ByteSource {
  constructor(fields) {
    Object.assign(this, { path: null, octets: null }, fields);
  }

  /** Returns bytes [start, end), or those up to the end of the source. */
  async read(start, end, signal, onProgress) {
    if (this.octets) return this.octets.subarray(start, end);
    let [done, out, reader] = [0];
    try {
      if (end - start <= SMALL) {
        const answer = await this.request(start, end, signal);
        out = new Uint8Array(Math.min(end, this.size) - start);
        reader = (answer.body ?? answer.stream()).getReader();
        for (let part; (part = (await reader.read()).value);) out.set(part, (done += part.length) - part.length);
      }
    } catch (error) {
      if (error instanceof RecordError) throw error;
    }
    reader?.cancel().catch(() => {});
    checkCancelled(signal);
    if (out?.length === done) return out;
    return (await import("./pieces.js").catch(notLoaded)).readAll(this, start, end, signal, onProgress);
  }
}

export class HttpFile extends ByteSource {
  /** Requests a range; later responses have to agree with the first. */
  async request(at, end, signal, tries = 0) {
    const headers = new Headers(this.headers);
    headers.set("Range", `bytes=${at}-${end - 1}`);
    const response = await this.fetch.call(globalThis, this.url, { headers, cache: this.cache, signal });
    const header = (name) => response.headers.get(name);
    const [, lo, last, size] = /^bytes (\d+)-(\d+)\/(\d+)$/.exec(header("content-range"))?.map(Number) ?? [];
    const tags = [header("etag"), header("last-modified")];
    const opening = this.size === undefined;
    const plain = response.status === 206 && (header("content-encoding") ?? "identity") === "identity";
    if (opening && plain) Object.assign(this, { size, tags });
    const same = size === this.size && String(tags) === String(this.tags);
    if (plain && same && lo === at && last < end) return response;
    const { unexpected } = await import("./responses.js").catch(notLoaded);
    return unexpected(this, response, { at, end, lo, last, size, tags, opening, signal, tries });
  }
}
