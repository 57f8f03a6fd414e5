// SPDX-License-Identifier: 0BSD
/** Archives at URLs, of servers that answer requests for ranges; files.js has all other places. */

import { RecordError, checkGoing, missing } from "./format.js";

export const FIRST = 1 << 16; // bytes asked for at once, of either end
export const PIECE = 1 << 20; // bytes that are taken at once

/** Bytes in memory (`octets`), or in the Blob or Response that `ask` gives. */
export class Place {
  constructor(fields) {
    Object.assign(this, { path: null, octets: null }, fields);
  }

  /** Returns bytes [start, end), or those up to the end of the source. */
  async read(start, end, signal, onProgress) {
    if (this.octets) return this.octets.subarray(start, end);
    let [done, out, reader] = [0];
    try {
      if (end - start <= PIECE) {
        const answer = await this.ask(start, end, signal);
        out = new Uint8Array(Math.min(end, this.size) - start);
        reader = (answer.body ?? answer.stream()).getReader();
        for (let part; (part = (await reader.read()).value);) out.set(part, (done += part.length) - part.length);
      }
    } catch (error) {
      if (error instanceof RecordError) throw error;
    }
    reader?.cancel().catch(() => {});
    checkGoing(signal);
    if (out?.length === done) return out;
    return (await import("./pieces.js").catch(missing)).gathered(this, start, end, signal, onProgress);
  }
}

class WebPlace extends Place {
  /** Asks for a range; later answers have to agree with the first. */
  async ask(at, end, signal, tries = 0) {
    const headers = new Headers(this.headers);
    headers.set("Range", `bytes=${at}-${end - 1}`);
    const response = await this.fetch.call(globalThis, this.url, { headers, cache: this.cache, signal });
    const told = (name) => response.headers.get(name);
    const [, lo, last, size] = /^bytes (\d+)-(\d+)\/(\d+)$/.exec(told("content-range"))?.map(Number) ?? [];
    const tags = [told("etag"), told("last-modified")];
    const opening = this.size === undefined;
    const plain = response.status === 206 && (told("content-encoding") ?? "identity") === "identity";
    if (opening && plain) Object.assign(this, { size, tags });
    const same = size && size === this.size && String(tags) === String(this.tags);
    if (plain && same && lo === at && last < end) return response;
    const { instead } = await import("./answers.js").catch(missing);
    return instead(this, response, { at, end, lo, last, size, tags, opening, signal, tries });
  }
}

/** Returns the place of a URL; files.js has every other one. */
export async function placeOf(source, { fetch = globalThis.fetch, headers, cache = "no-store", allowWhole }) {
  const text = typeof source === "string" || source instanceof URL ? String(source) : "";
  const base = globalThis.location?.href; // in Node there is none: what is no URL is a path
  const url = text && URL.canParse(text, base) ? new URL(text, base) : null;
  const { protocol, host, pathname, search, href } = url ?? { protocol: "" };
  if (/^(file|.?):?$/.test(protocol)) return (await import("./files.js").catch(missing)).placeOf(source);
  // Without credentials, which a query may hold, too.
  const path = `${protocol}${host && "//"}${host}${pathname}${search && "?…"}`;
  return new WebPlace({ url: href, path, fetch, headers, cache, allowWhole });
}
