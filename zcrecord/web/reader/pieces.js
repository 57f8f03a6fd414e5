// SPDX-License-Identifier: 0BSD
/** Bytes that come piece by piece: what is large, and what broke off and is taken up where it broke. */

import { LimitError, RecordError, SourceError, checkGoing, need } from "./format.js";
import { FIRST, PIECE } from "./places.js";

const PAUSE = 16 * PIECE; // bytes in memory after which others have their turn

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

/** Returns bytes [start, end) of a place, or those up to its end; `onProgress` is called before the last have come. */
export async function gathered(place, start, end, signal, onProgress) {
  const out = roomFor(end - start);
  let done = 0;
  for await (const chunk of pieces(place, start, end, signal)) {
    out.set(chunk, done);
    done += chunk.length;
    if (done < out.length) onProgress?.(done, out.length);
  }
  return out.subarray(0, done);
}

/** Yields bytes up to `end`, or that of the place; each chunk is good until the next. A stream that breaks off is taken
 *  up where it broke, twice even if nothing came: browsers drop what had arrived and was not read. */
export async function* pieces(place, start, end, signal) {
  if (place.pieces) {
    yield* place.pieces(start, end, signal);
    return;
  }
  let [at, tries] = [start, 0];
  for (let from = at; at < Math.min(end, place.size ?? end); from = at) {
    checkGoing(signal);
    if (place.octets) {
      if (at > start && (at - start) % PAUSE === 0) await new Promise((done) => { setTimeout(done); });
      yield place.octets.subarray(at, (at = Math.min(end, at + PIECE)));
      continue;
    }
    let cause;
    try {
      const answer = await place.ask(at, end, signal);
      for await (const chunk of chunksOf(answer.body ?? answer.stream(), end - at)) {
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
    if (at >= Math.min(end, place.size) || tries < 3) continue;
    throw new SourceError(cause ? `the request failed: ${cause.cause?.message ?? cause.message}`
      : `bytes ${at} to ${end} are missing; it is truncated or changed, open it again`, { offset: at, cause });
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
