// SPDX-License-Identifier: 0BSD
/** Reads many payloads forward, in file order: neighbours in one request, a few requests at a time. */

import { readPieces } from "./pieces.js";
import { LimitError, UnsupportedError, checkCancelled, need } from "./format.js";

export const NEAR = 1 << 16; // bytes between payloads that are fetched to save a request
const GROUP = 1 << 26; // bytes of small payloads in one request, at most
const [APART, APART_FREE] = [64, 2 ** 30]; // times what is stored, and bytes, that tensors may take apart

/** Throws LimitError if tensors that share their bytes would take, each by itself, far more than the index and the
 *  ranges of their payloads. The rest may be a size that a server claims and never sends. */
export function checkApart({ _header: { indexSize } }, nbytes, ranges) {
  const stored = ranges.reduce((sum, { start, end }) => sum + end - start, indexSize);
  need(nbytes <= APART * stored + APART_FREE, () => `tensors that share their bytes would take ${nbytes} bytes, \
each by itself; load those that you need, or save them as a record of their own`, LimitError);
}

/** Returns the distinct ranges of payloads in the file, ascending, each with the numbers of its payloads. */
export function payloadRanges(record, numbers = Array.from({ length: record._ix.payloads.n }, (_, i) => i)) {
  const out = [];
  for (const number of [...new Set(numbers)].sort((a, b) => a - b)) {
    const start = record._start(number);
    if (!record._room && out.length && out.at(-1).start === start) out.at(-1).numbers.push(number);
    else out.push({ start, end: start + record._nbytes(number), numbers: [number] });
  }
  return out;
}

/** Calls `take(range, offset in it, chunk)` for each chunk, which is valid until that returns. */
export async function streamPayloads(record, ranges, take, { signal, maxInFlight = 3 } = {}) {
  need(maxInFlight >= 1, "maxInFlight is a number from 1 on", UnsupportedError);
  checkCancelled(signal);
  if (record._room) {
    for (const range of ranges.filter(({ numbers }) => numbers.length)) {
      checkCancelled(signal);
      await take(range, 0, record._room(range.numbers[0]));
    }
    return;
  }
  const groups = groupsOf(ranges);
  const stop = new AbortController();
  const abort = () => stop.abort(signal.reason);
  signal?.addEventListener("abort", abort, { once: true });
  const work = async () => {
    for (let group = groups.shift(); group; group = groups.shift()) await readGroup(record, group, take, stop.signal);
  };
  let failed = null;
  const run = () => work().catch((error) => { failed ??= { error }; stop.abort(); });
  await Promise.all(Array.from({ length: Math.min(maxInFlight, groups.length) }, run));
  signal?.removeEventListener("abort", abort);
  checkCancelled(signal);
  if (failed) throw failed.error;
}

function groupsOf(ranges) {
  const groups = [];
  for (const range of ranges) {
    const last = groups.at(-1);
    if (last && range.start - last.end <= NEAR && range.end - last.start <= GROUP) {
      last.ranges.push(range);
      last.end = range.end;
    } else groups.push({ start: range.start, end: range.end, ranges: [range] });
  }
  return groups;
}

async function readGroup(record, { start, end, ranges }, take, signal) {
  let [at, k] = [start, 0];
  for await (const chunk of readPieces(record._source, start, end, signal)) {
    const next = at + chunk.length;
    for (; k < ranges.length && ranges[k].start < next; k++) {
      const range = ranges[k];
      const [lo, hi] = [Math.max(at, range.start), Math.min(next, range.end)];
      checkCancelled(signal);
      if (lo < hi) await take(range, lo - range.start, chunk.subarray(lo - at, hi - at));
      if (range.end > next) break;
    }
    at = next;
  }
}
