// SPDX-License-Identifier: 0BSD
/** Where archives lie: memory, a Blob, or a URL whose server answers requests for ranges; files.js has Node's files. */

import { LimitError, RecordError, SourceError, checkGoing, need } from "./format.js";

export const FIRST = 1 << 16; // bytes asked for at once, of either end
const PIECE = 1 << 20; // bytes that a chunk has at most

/** Returns memory for so many items. */
export function roomFor(count, Kind = Uint8Array) {
  try {
    return new Kind(count);
  } catch (cause) {
    const nbytes = count * Kind.BYTES_PER_ELEMENT;
    const what = `${nbytes} bytes at once are more than this machine has room for; read them by slices, or upload them`;
    throw new LimitError(what, { cause });
  }
}

/** Bytes in memory (`octets`), or those that `stream(start, end, signal)` gives as they come. */
export class Place {
  constructor(fields) {
    Object.assign(this, { path: null, octets: null }, fields);
  }

  async read(start, end, signal) {
    if (this.octets) return this.octets.subarray(start, end);
    const out = roomFor(end - start);
    let done = 0;
    for await (const chunk of this.chunks(start, end, signal)) {
      out.set(chunk, done);
      done += chunk.length;
    }
    return out.subarray(0, done);
  }

  /** Yields bytes up to `end`, or that of the source; each chunk is good until the next. A stream that breaks off is
   *  taken up where it broke, twice even if nothing came: browsers drop what had arrived and was not read. */
  async *chunks(start, end, signal) {
    let [at, tries] = [start, 0];
    for (let from = at; at < Math.min(end, this.size ?? end); from = at) {
      checkGoing(signal);
      if (this.octets) {
        yield this.octets.subarray(at, (at = Math.min(end, at + PIECE)));
        continue;
      }
      let cause;
      try {
        for await (const chunk of chunksOf(await this.stream(at, end, signal), end - at)) {
          checkGoing(signal);
          need(chunk.length <= end - at, "the server sent more than was asked for", SourceError);
          at += chunk.length;
          yield chunk;
        }
      } catch (error) {
        cause = error;
      }
      checkGoing(signal);
      if (cause instanceof RecordError) throw cause;
      tries = at - from < FIRST ? tries + 1 : 0;
      if (at >= Math.min(end, this.size) || tries < 3) continue;
      throw new SourceError(cause ? `the request failed: ${cause.cause?.message ?? cause.message}`
        : `bytes ${at} to ${end} are missing; it is truncated or changed, open it again`, { offset: at, cause });
    }
  }
}

/** Yields a stream's chunks in the same memory where that is to be had: else they pile up as garbage. */
async function* chunksOf(stream, nbytes) {
  let [reader, room] = [];
  try {
    reader = stream.getReader({ mode: "byob" });
    room = new ArrayBuffer(Math.min(PIECE, nbytes));
  } catch { // an older browser, or a stream that somebody's `fetch` made
    reader = stream.getReader();
  }
  try {
    for (;;) {
      const { done, value } = await reader.read(room && new Uint8Array(room));
      if (done) return;
      room &&= value.buffer;
      yield value;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

class WebPlace extends Place {
  /** Asks for a range. What is learned from the first answer, later ones have to agree with. */
  async stream(at, end, signal) {
    const headers = new Headers(this.headers);
    headers.set("Range", `bytes=${at}-${end - 1}`);
    const response = await this.fetch.call(globalThis, this.url, { headers, cache: this.cache, signal });
    const told = (name) => response.headers.get(name);
    const [, lo, last, size] = /^bytes (\d+)-(\d+)\/(\d+)$/.exec(told("content-range"))?.map(Number) ?? [];
    const etag = told("etag"); // a weak one may stay when bytes change: the date tells more
    const tag = etag?.startsWith("W/") ? told("last-modified") ?? etag.slice(2) : etag ?? told("last-modified");
    const opening = this.size === undefined;
    const encoded = (told("content-encoding") ?? "identity") !== "identity";
    if (opening && response.status === 206) Object.assign(this, { size, tag });
    const same = size && size === this.size && (!tag || !this.tag || tag === this.tag);
    if (response.status === 206 && same && !encoded && lo === at && last < end) return response.body;
    const { instead } = await import("./answers.js");
    return instead(this, response, { at, end, lo, last, size, tag, opening });
  }
}

/** Returns the place of whatever `open` takes. */
export async function placeOf(source, { fetch = globalThis.fetch, headers, cache = "no-store", allowWhole }) {
  if (source instanceof ArrayBuffer) source = new Uint8Array(source);
  if (ArrayBuffer.isView(source)) {
    const octets = new Uint8Array(source.buffer, source.byteOffset, source.byteLength);
    return new Place({ octets, size: octets.length });
  }
  if (source instanceof Blob) {
    const stream = (start, end) => source.slice(start, end).stream();
    return new Place({ path: source.name ?? null, size: source.size, stream });
  }
  const text = typeof source === "string" || source instanceof URL ? String(source) : "";
  const base = globalThis.location?.href; // in Node there is none: what is no URL is a path
  const url = text && URL.canParse(text, base) ? new URL(text, base) : null;
  const { protocol, host, pathname, search, href } = url ?? { protocol: "" };
  if (/^(file|.?):?$/.test(protocol)) return (await import("./files.js")).fileOf(source);
  // Without credentials, which a query may hold, too. Chromium's cache would hide that a file was replaced.
  const path = `${protocol}${host && "//"}${host}${pathname}${search && "?…"}`;
  return new WebPlace({ url: href, path, fetch, headers, cache, allowWhole });
}
