// SPDX-License-Identifier: 0BSD
/** The content digest of a record, the same however it is laid out; reads forward and holds a chunk at a time. */

import { Sha256 } from "./digests.js";
import { LimitError, NONE, big, compare, eachWord } from "./format.js";
import { payloadRanges, streamPayloads } from "./payloads.js";

/** Returns 'sha256:...'; FORMAT.md has the exact bytes (R76). */
export async function contentDigest(record, { signal } = {}) {
  const { _ix: ix } = record;
  const { pool, byName, tensors, modules: m, attributes } = ix;
  const known = await elementDigests(record, signal);
  const sha = new Sha256().update(new TextEncoder().encode("zcrecord content digest 2\n"));
  const number = (value) => sha.update(new Uint8Array(BigUint64Array.of(BigInt(value)).buffer));
  const bytes = (start, size) => number(size).update(pool.subarray(start, start + size));
  const numbers = ({ n }) => Uint32Array.from({ length: n }, (_, i) => i);
  const order = (rows, a, b) => compare(pool, rows.start(a), rows.size(a), pool, rows.start(b), rows.size(b));
  const inOrder = numbers(m).sort((a, b) => order(m, a, b));
  const numberOf = new Uint32Array(m.n);
  inOrder.forEach((i, k) => void (numberOf[i] = k));
  const child = (rows, i, size = rows.key(i)) => {
    const parent = rows.parent(i) === NONE ? 0 : rows.parent(i); // module 0 is written as a child of itself
    number(numberOf[parent]);
    number(m.kind(parent) === 2 || m.kind(parent) === 3 ? rows.place(i) : 0);
    bytes(rows.start(i) + rows.size(i) - size, size);
  };
  number(m.n);
  for (const i of inOrder) {
    child(m, i);
    number(m.kind(i));
    bytes(m.type(i), m.typeSize(i));
  }
  number(tensors.n);
  for (let k = 0; k < byName.n; k++) {
    const i = byName.item(k);
    const { code, bits, shape } = record._info(i);
    child(tensors, i);
    [code, bits, shape.length, ...shape].forEach(number);
    sha.update(known.get(keyOf(record, i)));
  }
  const moduleOf = (i) => numberOf[attributes.parent(i)];
  for (const i of numbers(attributes).sort((a, b) => moduleOf(a) - moduleOf(b) || order(attributes, a, b))) {
    const [type, form] = [attributes.type(i), attributes.form(i)];
    child(attributes, i, attributes.size(i));
    [type, form, form ? attributes.high(i) : 1].forEach(number);
    eachWord(ix, attributes, i, (from, at) => {
      if (type === 5) bytes(from.low(at), from.high(at));
      else if (type === 6) sha.update(known.get(payloadKey(record, from.low(at))));
      else number(big(from, at));
    });
  }
  return `sha256:${Array.from(sha.digest(), (byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}

const payloadKey = (record, number) =>
  number === NONE ? "" : String(record._room ? number : record._start(number));

function keyOf(record, i) {
  const { payload, strides, byteOffset, bits, shape } = record._info(i);
  const key = payloadKey(record, payload ?? NONE);
  return strides ? [key, byteOffset, bits, shape.join(), strides.join()].join(" ") : key;
}

/** Returns the SHA-256 of every payload, and of every distinct strided view's elements in C order, by their keys. */
async function elementDigests(record, signal) {
  const known = new Map([["", new Sha256().digest()]]);
  const { tensors: t, attributes } = record._ix;
  const whole = [];
  let left = 64n * BigInt(record._header.indexSize + record._ix.nbytes); // no holes: so no alignment decides
  for (let i = 0; i < t.n; i++) if (t.strides(i) === NONE && t.payload(i) !== NONE) whole.push(t.payload(i));
  const add = (from, at) => void (from.low(at) !== NONE && whole.push(from.low(at)));
  for (let i = 0; i < attributes.n; i++) if (attributes.type(i) === 6) eachWord(record._ix, attributes, i, add);
  const running = new Map();
  await streamPayloads(record, payloadRanges(record, whole), ({ start, end, numbers }, from, chunk) => {
    const key = payloadKey(record, numbers[0]);
    if (!running.has(key)) running.set(key, new Sha256());
    running.get(key).update(chunk);
    if (from + chunk.length < end - start) return;
    known.set(key, running.get(key).digest());
    running.delete(key);
  }, { signal });
  for (let i = 0; i < t.n; i++) {
    if (t.strides(i) === NONE || known.has(keyOf(record, i))) continue;
    const { name, nbytes } = record._info(i);
    left -= BigInt(nbytes); // views may add up past 2^53
    const what = "different views add up to more than 64 times index and payloads; save copies of them";
    if (left < 0) throw new LimitError(what, { path: record.path, tensor: name });
    const { data } = (await record.tensor(name, { signal })).contiguous();
    const octets = new Uint8Array(data.buffer, data.byteOffset, data.byteLength);
    known.set(keyOf(record, i), new Sha256().update(octets).digest());
  }
  return known;
}
