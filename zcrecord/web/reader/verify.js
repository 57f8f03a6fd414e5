// SPDX-License-Identifier: 0BSD
/**
 * Verification of payloads, level `full`: digests, zeros between payloads, pad bits, bools and the ends of strings.
 * Reads forward and holds a chunk at a time; the index counts as verified.
 */

import { Xxh3, xxh3 } from "./digests.js";
import { END, FormatError, IntegrityError, KINDS, NONE, big } from "./format.js";
import { payloadRanges, streamPayloads } from "./payloads.js";

export { Xxh3 };

/** Checks every payload's digest, and that all other bytes of the archive outside the index are zero (R70 to R74). */
export async function verify(record, { signal, onProgress, maxInFlight } = {}) {
  const { _header: h, _base: base } = record;
  const { bools, pads, texts } = expectations(record);
  const ranges = [];
  let at = base + (h.front ? END + h.indexSize : END);
  const end = base + (h.front ? h.archiveSize - END : h.indexOffset);
  for (const range of payloadRanges(record)) {
    if (at < range.start) ranges.push({ start: at, end: range.start, numbers: [] });
    ranges.push(range);
    at = range.end;
  }
  if (at < end) ranges.push({ start: at, end, numbers: [] });
  const total = ranges.reduce((sum, range) => sum + range.end - range.start, 0);
  const seen = new Map();
  let done = 0;
  await streamPayloads(record, ranges, (range, from, chunk) => {
    const { start, end: stop, numbers } = range;
    done += chunk.length;
    if (!numbers.length) {
      const what = `the gap [0x${start.toString(16)}, 0x${stop.toString(16)}) holds bytes that are not zero`;
      if (chunk.some(Boolean)) throw record._located(new FormatError(what, { offset: start }));
    } else {
      const last = from + chunk.length === stop - start;
      checkElements(record, keyOf(record, numbers[0]), chunk, last, bools, pads);
      const wanted = record._digest(numbers[0]);
      if (wanted === null) return onProgress?.(done, total);
      if (!seen.has(start)) seen.set(start, new Xxh3(stop - start));
      const hash = seen.get(start).update(chunk);
      if (last) {
        seen.delete(start);
        if (hash.digest() !== wanted) throw damaged(record, numbers[0], userOf(record, numbers));
      }
    }
    return onProgress?.(done, total);
  }, { signal, maxInFlight });
  for (const name of texts) await record.tensor(name, { signal });
}

/** Returns the error of a payload whose digest does not match. */
export function damaged(record, number, tensor) {
  const what = `payload ${number}: its digest does not match; the file is damaged, copy it again`;
  return new IntegrityError(what, { path: record.path, tensor, offset: record._start(number) });
}

/** Checks the digest of a payload, if it has one. Returns a function that reads ranges of the bytes that were checked:
 *  bytes that are fetched again could be others. */
export async function _verified(record, number, get) {
  const wanted = record._digest(number);
  if (wanted === null) return get;
  const octets = await get(0, record._nbytes(number));
  if (xxh3(octets) !== wanted) throw damaged(record, number);
  // Parts of fetched bytes are copies, which do not keep all of them alive; parts of memory are views.
  const cut = record._source.octets ? "subarray" : "slice";
  return async (lo, hi) => (hi - lo < octets.length ? octets[cut](lo, hi) : octets);
}

/** Returns the name of a tensor that uses one of some payloads. */
function userOf({ _ix: ix }, numbers) {
  const some = new Set(numbers);
  for (let i = 0; i < ix.tensors.n; i++) {
    if (some.has(ix.tensors.payload(i))) return ix.tensors.name(i);
  }
  return null;
}

/** Returns what payloads of the same bytes have in common: tens of thousands of them are checked as one. */
const keyOf = (record, number) => (record._room ? number : record._start(number));

/** Returns payloads of bools and payloads with pad bits by their keys, each with a tensor, and tensors of strings. */
function expectations(record) {
  const { tensors: t } = record._ix;
  const [bools, pads, texts] = [new Map(), new Map(), new Map()];
  for (let i = 0; i < t.n; i++) {
    const [number, code, bits] = [t.payload(i), t.dtype(i), t.bits(i)];
    if (number === NONE || !KINDS.has(code)) continue;
    const key = keyOf(record, number);
    const count = () => countOf(record._ix, i);
    if (code === 1) bools.set(key, i);
    else if (code === 64) texts.set(`${key} ${count()}`, t.name(i));
    else if (bits < 8) {
      const used = Number((count() * BigInt(bits)) % 8n);
      if (used && !(pads.get(key)?.used <= used)) pads.set(key, { used, i });
    }
  }
  return { bools, pads, texts: texts.values() };
}

function countOf({ tensors: t, dims }, i) { // of 1 bit each there may be more than 2^53
  let count = 1n;
  for (let at = t.dims(i); at < t.dims(i) + t.rank(i); at++) count *= big(dims, at);
  return count;
}

function checkElements(record, key, chunk, last, bools, pads) {
  const tensor = (i) => ({ path: record.path, tensor: record._ix.tensors.name(i) });
  if (bools.has(key) && chunk.some((byte) => byte > 1)) {
    throw new FormatError("a bool is neither 0 nor 1", tensor(bools.get(key)));
  }
  const pad = last && pads.get(key);
  if (pad && chunk[chunk.length - 1] >> pad.used) {
    throw new FormatError("the pad bits after its last element are not zero", tensor(pad.i));
  }
}
