// SPDX-License-Identifier: 0BSD
/** The content digest of a record, the same however it is laid out; reads forward and holds a chunk at a time. */

import { Sha256 } from "./digests.js";
import { LimitError, NONE, big, compare, eachWord } from "./format.js";
import { payloadRanges, streamPayloads } from "./payloads.js";
import { checkFullNames } from "./structure.js";

/** Returns 'sha256:...'; FORMAT.md has the exact bytes (R76). */
export async function contentDigest(record, { signal } = {}) {
  const { _ix: ix } = record;
  const { pool, byName, tensors, modules: m, attributes } = ix;
  checkFullNames(record);
  const known = await elementDigests(record, signal);
  const sha = new Sha256().update(new TextEncoder().encode("zcrecord content digest 1\n"));
  const number = (value) => sha.update(new Uint8Array(BigUint64Array.of(BigInt(value)).buffer));
  const text = (octets) => number(octets.length).update(octets);
  const bytes = (start, size) => text(pool.subarray(start, start + size));
  const name = (rows, i) => bytes(rows.start(i), rows.size(i));
  number(tensors.n);
  for (let k = 0; k < byName.n; k++) {
    const i = byName.item(k);
    const { code, bits, shape } = record._info(i);
    name(tensors, i);
    [code, bits, shape.length, ...shape].forEach(number);
    sha.update(known.get(keyOf(record, i)));
  }
  const numbers = ({ n }) => Uint32Array.from({ length: n }, (_, i) => i);
  const order = (rows, a, b) => compare(pool, rows.start(a), rows.size(a), pool, rows.start(b), rows.size(b));
  number(m.n);
  for (const i of numbers(m).sort((a, b) => order(m, a, b))) {
    name(m, i);
    number(m.kind(i));
    bytes(m.type(i), m.typeSize(i));
  }
  number(attributes.n);
  const { parent } = attributes;
  for (const i of numbers(attributes).sort((a, b) => order(m, parent(a), parent(b)) || order(attributes, a, b))) {
    const [type, form] = [attributes.type(i), attributes.form(i)];
    name(m, parent(i));
    name(attributes, i);
    [type, form, form ? attributes.high(i) : 1].forEach(number);
    eachWord(ix, attributes, i, (from, at) => {
      if (type === 5) bytes(from.low(at), from.high(at));
      else if (type === 6) text(known.get(payloadKey(record, from.low(at))));
      else number(big(from, at));
    });
  }
  putOrder(ix, number, text);
  return `sha256:${Array.from(sha.digest(), (byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}

/** Adds the parts of the tree that names and keys do not imply, if there are any (FORMAT.md, Content digest, 5). */
function putOrder({ pool, byName, tensors, modules: m, attributes }, number, text) {
  if (m.n === 1 && m.kind(0) !== 2 && m.kind(0) !== 3) return;
  // Strings of bytes: they compare as bytes do.
  const raw = (start, size) => (
    pool.subarray(start, start + size).reduce((s, byte) => s + String.fromCharCode(byte), ""));
  const put = (octets) => text(Uint8Array.from(octets, (c) => c.charCodeAt(0)));
  const byBytes = (a, b) => (a < b ? -1 : a > b ? 1 : 0);
  const names = Array.from({ length: m.n }, (_, i) => raw(m.start(i), m.size(i)));
  const inner = names.map((name, i) => ({ name, parent: m.parent(i) })).slice(1);
  const named = Array.from({ length: tensors.n }, (_, k) => byName.item(k)).map((i) => (
    { name: raw(tensors.start(i), tensors.size(i)), parent: tensors.parent(i) }));
  const starts = names.slice(1).map((name) => `${name}.`).sort(byBytes);
  const lost = [named, inner.sort((a, b) => byBytes(a.name, b.name))].map((all) => misplacedByName(all, names, starts));
  const lists = explicitListOrders({ tensors, attributes, m }, names, raw).sort((a, b) => byBytes(a.name, b.name));
  if (!lost[0].length && !lost[1].length && !lists.length) return;
  for (const found of lost) {
    number(found.length);
    for (const { name, parent } of found) [name, names[parent]].forEach(put);
  }
  number(lists.length);
  for (const { name, keys } of lists) {
    put(name);
    number(keys.length);
    keys.forEach(put);
  }
}

/** Returns entries that are not in the module that their names imply: the longest prefix. Both arguments ascend. */
function misplacedByName(all, names, starts) {
  const around = [""];
  let at = 0;
  const leave = (name) => {
    while (!name.startsWith(around[around.length - 1])) around.pop();
  };
  return all.filter(({ name, parent }) => {
    for (; at < starts.length && starts[at] <= name; at++) {
      leave(starts[at]);
      around.push(starts[at]);
    }
    leave(name);
    return around[around.length - 1] !== (parent ? `${names[parent]}.` : "");
  });
}

/** Returns the lists and tuples whose order their keys do not imply, each with its keys. */
function explicitListOrders({ tensors, attributes, m }, names, raw) {
  const children = new Map();
  for (let i = 0; i < m.n; i++) if (m.kind(i) === 2 || m.kind(i) === 3) children.set(i, []);
  if (!children.size) return [];
  const add = (rows, i, key) => children.get(rows.parent(i))?.push({ place: rows.place(i), key: key(i) });
  const tail = (rows) => (i) => raw(rows.start(i) + rows.size(i) - rows.key(i), rows.key(i));
  for (let i = 0; i < tensors.n; i++) add(tensors, i, tail(tensors));
  for (let i = 1; i < m.n; i++) add(m, i, tail(m));
  for (let i = 0; i < attributes.n; i++) add(attributes, i, () => raw(attributes.start(i), attributes.size(i)));
  return [...children].map(([i, found]) => (
    { name: names[i], keys: found.sort((a, b) => a.place - b.place).map(({ key }) => key) })).filter(({ keys }) => {
    const numbers = new Set(keys.map((_, k) => String(k)));
    const implied = keys.every((key) => numbers.has(key)) ? [...numbers] : [...keys].sort();
    return keys.some((key, k) => key !== implied[k]);
  });
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
  let left = 64 * record._header.archiveSize;
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
    left -= nbytes;
    const what = "different views of the same bytes add up to more than 64 times the archive; save copies of them";
    if (left < 0) throw new LimitError(what, { path: record.path, tensor: name });
    const { data } = (await record.tensor(name, { signal })).contiguous();
    const octets = new Uint8Array(data.buffer, data.byteOffset, data.byteLength);
    known.set(keyOf(record, i), new Sha256().update(octets).digest());
  }
  return known;
}
