// SPDX-License-Identifier: 0BSD
/** Reads byte ranges in pieces, and resumes a response that breaks off. */

import { LimitError, RecordError, SourceError, checkCancelled, need } from "./format.js";

export const PIECE = 1 << 20; // bytes of a piece
const PAUSE = 16 * PIECE; // bytes in memory after which other tasks run
const PROGRESS = 1 << 16; // bytes that a request has to bring, or it counts as failed

/** Allocates memory for a number of items. */
export function allocate(count, Kind = Uint8Array) {
  try {
    return new Kind(count);
  } catch (cause) {
    const nbytes = count * Kind.BYTES_PER_ELEMENT;
    const what = `${nbytes} bytes at once are more than this machine has room for; read them by slices, or upload them`;
    throw new LimitError(what, { cause });
  }
}

/** Returns bytes [start, end) of a source, or those up to its end; `onProgress` is called before the last arrive. */
export async function readAll(source, start, end, signal, onProgress) {
  const out = allocate(end - start);
  let done = 0;
  for await (const chunk of readPieces(source, start, end, signal)) {
    out.set(chunk, done);
    done += chunk.length;
    if (done < out.length) onProgress?.(done, out.length);
  }
  return out.subarray(0, done);
}

/** Yields bytes up to `end`, or the end of the source; each chunk is valid until the next. When a stream breaks off,
 *  the rest is requested, twice even if nothing arrived: browsers drop bytes that arrived and were not read. */
export async function* readPieces(source, start, end, signal) {
  if (source.readPieces) {
    yield* source.readPieces(start, end, signal);
    return;
  }
  let [at, tries] = [start, 0];
  for (let from = at; at < Math.min(end, source.size ?? end); from = at) {
    checkCancelled(signal);
    if (source.octets) {
      if (at > start && (at - start) % PAUSE === 0) await new Promise((done) => { setTimeout(done); });
      yield source.octets.subarray(at, (at = Math.min(end, at + PIECE)));
      continue;
    }
    let cause;
    try {
      const answer = await source.request(at, end, signal);
      for await (const chunk of chunksOf(answer.body ?? answer.stream(), end - at)) {
        checkCancelled(signal);
        need(chunk.length <= end - at, "the server sent more than was asked for", SourceError);
        at += chunk.length;
        yield chunk;
      }
    } catch (error) {
      cause = error;
    }
    checkCancelled(signal);
    if (cause instanceof RecordError) throw cause;
    tries = at - from < PROGRESS ? tries + 1 : 0;
    if (at >= Math.min(end, source.size) || tries < 3) continue;
    throw new SourceError(cause ? `the request failed: ${cause.cause?.message ?? cause.message}`
      : `bytes ${at} to ${end} are missing; it is truncated or changed, open it again`, { offset: at, cause });
  }
}

/** Yields a stream's chunks, in the same memory if the browser can: else they pile up as garbage. */
async function* chunksOf(stream, nbytes) {
  let [reader, room] = [];
  try {
    reader = stream.getReader({ mode: "byob" });
    room = new ArrayBuffer(Math.min(PIECE, nbytes));
  } catch { // an older browser, or a stream of a custom `fetch`
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
