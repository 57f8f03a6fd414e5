// SPDX-License-Identifier: 0BSD
/**
 * What only the payloads' bytes can tell: digests (XXH3, the content digest), zeros between payloads, pad bits, bools
 * and the ends of strings. Reads forward and holds a chunk at a time; what the index says is taken as verified.
 */

import { rangesOf, stream } from "./stream.js";
import { checkFullNames } from "./structure.js";
import { END, FormatError, IntegrityError, KINDS, LimitError, NONE, big, compare, eachWord } from "./format.js";

// -- XXH3, 64 bits, seed 0 -------------------------------------------------------------------------------------------

const SECRET = Uint8Array.from(`\
b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07d\
ccff7221b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c\
343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e\
2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e`.match(/../g), (pair) => parseInt(pair, 16));
const P32 = [0x9e3779b1n, 0x85ebca77n, 0xc2b2ae3dn];
const P64 = [0x9e3779b185ebca87n, 0xc2b2ae3d27d4eb4fn, 0x165667b19e3779f9n, 0x85ebca77c2b2ae63n, 0x27d4eb2f165667c5n];
const wrap = (value) => BigInt.asUintN(64, value);
const u64 = (octets, at) => new DataView(octets.buffer, octets.byteOffset + at, 8).getBigUint64(0, true);
const u32 = (octets, at) => new DataView(octets.buffer, octets.byteOffset + at, 4).getUint32(0, true);
const secret = (at) => u64(SECRET, at);
const SECRET_WORDS = Int32Array.from({ length: 48 }, (_, i) => u32(SECRET, 4 * i));
const LAST_WORDS = Int32Array.from({ length: 16 }, (_, i) => u32(SECRET, 121 + 4 * i));
const SCALE = 0x9e3779b1;

function fold(a, b) {
  const product = a * b;
  return wrap(product) ^ (product >> 64n);
}

function avalanche(h) {
  h = wrap((h ^ (h >> 37n)) * 0x165667919e3779f9n);
  return h ^ (h >> 32n);
}

function shortAvalanche(h) {
  h = wrap((h ^ (h >> 33n)) * P64[1]);
  h = wrap((h ^ (h >> 29n)) * P64[2]);
  return h ^ (h >> 32n);
}

const mix = (data, at, key) => fold(u64(data, at) ^ secret(key), u64(data, at + 8) ^ secret(key + 8));

/** Returns the digest of up to 240 bytes. */
function short(data) {
  const n = data.length;
  const size = BigInt(n);
  if (n === 0) return shortAvalanche(secret(56) ^ secret(64));
  if (n < 4) {
    const word = ((data[0] << 16) | (data[n >> 1] << 24) | data[n - 1] | (n << 8)) >>> 0;
    return shortAvalanche(BigInt(word) ^ BigInt((u32(SECRET, 0) ^ u32(SECRET, 4)) >>> 0));
  }
  if (n < 9) {
    let h = (BigInt(u32(data, n - 4)) | (BigInt(u32(data, 0)) << 32n)) ^ secret(8) ^ secret(16);
    h ^= wrap((h << 49n) | (h >> 15n)) ^ wrap((h << 24n) | (h >> 40n));
    h = wrap(h * 0x9fb21c651e98df25n);
    h = wrap((h ^ ((h >> 35n) + size)) * 0x9fb21c651e98df25n);
    return h ^ (h >> 28n);
  }
  if (n < 17) {
    const low = u64(data, 0) ^ secret(24) ^ secret(32);
    const high = u64(data, n - 8) ^ secret(40) ^ secret(48);
    const swapped = new DataView(BigUint64Array.of(low).buffer).getBigUint64(0);
    return avalanche(wrap(size + swapped + high + fold(low, high)));
  }
  let h = size * P64[0];
  if (n <= 128) {
    for (let pair = Math.ceil(n / 32) - 1; pair >= 0; pair--) {
      h += mix(data, 16 * pair, 32 * pair) + mix(data, n - 16 - 16 * pair, 32 * pair + 16);
    }
    return avalanche(wrap(h));
  }
  for (let i = 0; i < n >> 4; i++) {
    if (i === 8) h = avalanche(wrap(h));
    h += mix(data, 16 * i, i < 8 ? 16 * i : 16 * i - 125);
  }
  if (n < 144) h = avalanche(wrap(h));
  return avalanche(wrap(h + mix(data, n - 16, 119)));
}

/** Adds a stripe of 64 bytes to the lanes, each a low and a high word. BigInt would take twenty times as long. */
function accumulate(acc, data, at, keys, key) {
  for (let lane = 0; lane < 16; lane += 2) {
    const lo = data[at + lane];
    const hi = data[at + lane + 1];
    const a = lo ^ keys[key + lane];
    const b = hi ^ keys[key + lane + 1];
    const ll = Math.imul(a & 0xffff, b & 0xffff);
    const lh = Math.imul(a & 0xffff, b >>> 16);
    const hl = Math.imul(a >>> 16, b & 0xffff);
    const middle = (ll >>> 16) + (lh & 0xffff) + (hl & 0xffff);
    const high = Math.imul(a >>> 16, b >>> 16) + (lh >>> 16) + (hl >>> 16) + (middle >>> 16);
    const other = lane ^ 2;
    let sum = (acc[other] + lo) | 0;
    acc[other + 1] += hi + (sum >>> 0 < lo >>> 0 ? 1 : 0);
    acc[other] = sum;
    const low = (ll & 0xffff) | (middle << 16);
    sum = (acc[lane] + low) | 0;
    acc[lane + 1] += high + (sum >>> 0 < low >>> 0 ? 1 : 0);
    acc[lane] = sum;
  }
}

function scramble(acc) {
  for (let lane = 0; lane < 16; lane += 2) {
    const lo = acc[lane] ^ (acc[lane + 1] >>> 15) ^ SECRET_WORDS[32 + lane];
    const hi = acc[lane + 1] ^ SECRET_WORDS[33 + lane];
    const product = (lo >>> 0) * (SCALE & 0xffff); // less than 2^48
    const rest = (lo >>> 0) * (SCALE >>> 16) + Math.floor(product / 65536);
    acc[lane] = (product & 0xffff) | ((rest & 0xffff) << 16);
    acc[lane + 1] = Math.floor(rest / 65536) + Math.imul(hi, SCALE);
  }
}

/** XXH3 of so many bytes, fed in chunks. */
export class Xxh3 {
  constructor(nbytes) {
    this.nbytes = nbytes;
    this.done = 0; // bytes taken
    const lanes = [P32[2], P64[0], P64[1], P64[2], P64[3], P32[1], P64[4], P32[0]];
    this.acc = Int32Array.from(lanes.flatMap((v) => [Number(v & 0xffffffffn) | 0, Number(v >> 32n) | 0]));
    this.stripe = 0; // stripes added
    this.room = new Int32Array(4096); // where bytes wait for their stripe, aligned
    this.octets = new Uint8Array(this.room.buffer);
    this.filled = 0;
    this.last = new Uint8Array(64); // the last bytes that came
  }

  update(chunk) {
    this.done += chunk.length;
    if (this.nbytes > 240) this.#keep(chunk);
    for (let at = 0; at < chunk.length;) {
      const count = Math.min(chunk.length - at, this.octets.length - this.filled);
      this.octets.set(chunk.subarray(at, at + count), this.filled);
      this.filled += count;
      at += count;
      if (this.filled === this.octets.length) this.#stripes();
    }
    return this;
  }

  #keep(chunk) {
    const tail = chunk.subarray(Math.max(0, chunk.length - 64));
    this.last.copyWithin(0, tail.length);
    this.last.set(tail, 64 - tail.length);
  }

  #stripes() {
    const most = Math.floor((this.nbytes - 1) / 64); // the last one is taken from the end
    const whole = Math.min(this.filled >> 6, most - this.stripe);
    for (let i = 0; i < whole; i++) {
      const number = this.stripe++;
      accumulate(this.acc, this.room, 16 * i, SECRET_WORDS, 2 * (number & 15));
      if ((number & 15) === 15 && (number + 1) * 64 < this.nbytes) scramble(this.acc);
    }
    this.octets.copyWithin(0, 64 * whole, this.filled);
    this.filled -= 64 * whole;
  }

  digest() {
    if (this.nbytes <= 240) return short(this.octets.subarray(0, this.nbytes));
    this.#stripes();
    const last = new Int32Array(this.last.slice().buffer);
    accumulate(this.acc, last, 0, LAST_WORDS, 0);
    const lane = (i) => BigInt(this.acc[2 * i] >>> 0) | (BigInt(this.acc[2 * i + 1] >>> 0) << 32n);
    let h = BigInt(this.nbytes) * P64[0];
    for (let i = 0; i < 4; i++) h += fold(lane(2 * i) ^ secret(16 * i + 11), lane(2 * i + 1) ^ secret(16 * i + 19));
    return avalanche(wrap(h));
  }
}

/** Returns the XXH3 of bytes, as a BigInt. */
export const xxh3 = (octets) => new Xxh3(octets.length).update(octets).digest();

// -- SHA-256 ---------------------------------------------------------------------------------------------------------
// crypto.subtle takes whole buffers alone, and secure pages alone.

const ROUNDS = new Int32Array(64);
const START = new Int32Array(8);
for (let n = 2, i = 0; i < 64; n++) {
  let prime = true;
  for (let d = 2; d * d <= n; d++) prime &&= n % d !== 0;
  if (!prime) continue;
  ROUNDS[i] = fraction(Math.cbrt(n), n, 3n);
  if (i < 8) START[i] = fraction(Math.sqrt(n), n, 2n);
  i += 1;
}

/** Returns the first 32 bits of the fraction of n's root, of which `near` is a rounded value; exactly. */
function fraction(near, n, power) {
  let root = BigInt(Math.floor(near * 2 ** 32));
  const target = BigInt(n) << (32n * power);
  while (root ** power > target) root -= 1n;
  while ((root + 1n) ** power <= target) root += 1n;
  return Number(root & 0xffffffffn) | 0;
}

/** SHA-256 of bytes fed in chunks. */
export class Sha256 {
  constructor() {
    this.state = START.slice();
    this.block = new Uint8Array(64);
    this.words = new Int32Array(64);
    this.done = 0;
  }

  update(chunk) {
    for (let at = 0; at < chunk.length;) {
      const filled = this.done % 64;
      const count = Math.min(64 - filled, chunk.length - at);
      if (count === 64) this.#add(chunk, at);
      else {
        this.block.set(chunk.subarray(at, at + count), filled);
        if (filled + count === 64) this.#add(this.block, 0);
      }
      at += count;
      this.done += count;
    }
    return this;
  }

  #add(data, start) {
    const { words: w, state } = this;
    for (let i = 0, at = start; i < 16; i++, at += 4) {
      w[i] = (data[at] << 24) | (data[at + 1] << 16) | (data[at + 2] << 8) | data[at + 3];
    }
    for (let i = 16; i < 64; i++) {
      const x = w[i - 15];
      const y = w[i - 2];
      const s0 = ((x >>> 7) | (x << 25)) ^ ((x >>> 18) | (x << 14)) ^ (x >>> 3);
      const s1 = ((y >>> 17) | (y << 15)) ^ ((y >>> 19) | (y << 13)) ^ (y >>> 10);
      w[i] = (w[i - 16] + s0 + w[i - 7] + s1) | 0;
    }
    let a = state[0], b = state[1], c = state[2], d = state[3];
    let e = state[4], f = state[5], g = state[6], h = state[7];
    for (let i = 0; i < 64; i++) {
      const s1 = ((e >>> 6) | (e << 26)) ^ ((e >>> 11) | (e << 21)) ^ ((e >>> 25) | (e << 7));
      const t1 = (h + s1 + ((e & f) ^ (~e & g)) + ROUNDS[i] + w[i]) | 0;
      const s0 = ((a >>> 2) | (a << 30)) ^ ((a >>> 13) | (a << 19)) ^ ((a >>> 22) | (a << 10));
      const t2 = (s0 + ((a & b) ^ (a & c) ^ (b & c))) | 0;
      h = g; g = f; f = e; e = (d + t1) | 0;
      d = c; c = b; b = a; a = (t1 + t2) | 0;
    }
    state[0] += a; state[1] += b; state[2] += c; state[3] += d;
    state[4] += e; state[5] += f; state[6] += g; state[7] += h;
  }

  digest() {
    const bits = BigInt(this.done) * 8n;
    const pad = new Uint8Array(((119 - (this.done % 64)) % 64) + 9);
    pad[0] = 0x80;
    new DataView(pad.buffer).setBigUint64(pad.length - 8, bits);
    this.update(pad);
    const out = new DataView(new ArrayBuffer(32));
    this.state.forEach((v, i) => out.setInt32(4 * i, v));
    return new Uint8Array(out.buffer);
  }
}

// -- level `full` ----------------------------------------------------------------------------------------------------

/** Checks every payload's digest, and that all other bytes of the archive outside the index are zero (R70 to R74). */
export async function verify(record, { signal, onProgress, maxInFlight } = {}) {
  const { _header: h, _base: base } = record;
  const { bools, pads, texts } = expectations(record);
  const ranges = [];
  let at = base + (h.front ? END + h.indexSize : END);
  const end = base + (h.front ? h.archiveSize - END : h.indexOffset);
  for (const range of rangesOf(record)) {
    if (at < range.start) ranges.push({ start: at, end: range.start, numbers: [] });
    ranges.push(range);
    at = range.end;
  }
  if (at < end) ranges.push({ start: at, end, numbers: [] });
  const total = ranges.reduce((sum, range) => sum + range.end - range.start, 0);
  const seen = new Map();
  let done = 0;
  await stream(record, ranges, (range, from, chunk) => {
    const { start, end: stop, numbers } = range;
    done += chunk.length;
    if (!numbers.length) {
      const what = `the gap [0x${start.toString(16)}, 0x${stop.toString(16)}) holds bytes that are not zero`;
      if (chunk.some(Boolean)) throw record._located(new FormatError(what, { offset: start }));
    } else {
      const last = from + chunk.length === stop - start;
      checkElements(record, numbers, chunk, last, bools, pads);
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

/** Returns that a payload is damaged. */
export function damaged(record, number, tensor) {
  const what = `payload ${number}: its digest does not match; the file is damaged, copy it again`;
  return new IntegrityError(what, { path: record.path, tensor, offset: record._start(number) });
}

/** Checks the digest of a payload, if it has one. Returns what reads ranges of the bytes that were checked: what is
 *  fetched again could be something else. */
export async function _verified(record, number, get) {
  const wanted = record._digest(number);
  if (wanted === null) return get;
  const octets = await get(0, record._nbytes(number));
  if (xxh3(octets) !== wanted) throw damaged(record, number);
  // A part that was fetched does not keep all of it; one of memory is a view.
  const cut = record._place.octets ? "subarray" : "slice";
  return async (lo, hi) => (hi - lo < octets.length ? octets[cut](lo, hi) : octets);
}

/** Returns the name of a tensor that uses one of some payloads. */
function userOf({ _ix: ix }, numbers) {
  for (let i = 0; i < ix.tensors.n; i++) {
    if (numbers.includes(ix.tensors.payload(i))) return ix.tensors.name(i);
  }
  return null;
}

/** Returns which payloads hold bools, which have pad bits, by tensor, and tensors of strings, each kind once. */
function expectations({ _ix: ix }) {
  const { tensors: t } = ix;
  const [bools, pads, texts] = [new Map(), new Map(), new Map()];
  for (let i = 0; i < t.n; i++) {
    const [number, code, bits] = [t.payload(i), t.dtype(i), t.bits(i)];
    if (number === NONE || !KINDS.has(code)) continue;
    if (code === 1) bools.set(number, i);
    else if (code === 64) texts.set(`${number} ${countOf(ix, i)}`, t.name(i));
    else if (bits < 8 && (countOf(ix, i) * bits) % 8) {
      const used = (countOf(ix, i) * bits) % 8;
      if (!pads.has(number) || pads.get(number).used > used) pads.set(number, { used, i });
    }
  }
  return { bools, pads, texts: texts.values() };
}

function countOf({ tensors: t, dims }, i) {
  let count = 1;
  for (let at = t.dims(i); at < t.dims(i) + t.rank(i); at++) count *= dims.high(at) * 2 ** 32 + dims.low(at);
  return count;
}

function checkElements(record, numbers, chunk, last, bools, pads) {
  for (const number of numbers) {
    const tensor = (i) => ({ path: record.path, tensor: record._ix.tensors.name(i) });
    if (bools.has(number) && chunk.some((byte) => byte > 1)) {
      throw new FormatError("a bool is neither 0 nor 1", tensor(bools.get(number)));
    }
    const pad = last && pads.get(number);
    if (pad && chunk[chunk.length - 1] >> pad.used) {
      throw new FormatError("the pad bits after its last element are not zero", tensor(pad.i));
    }
  }
}

// -- the content digest ----------------------------------------------------------------------------------------------

/** Returns 'sha256:...' over what the record holds, however it is laid out; FORMAT.md has the exact bytes (R76). */
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

/** Puts what names and keys do not tell of the tree, if there is any (FORMAT.md, Content digest, 5). */
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
  const lost = [named, inner.sort((a, b) => byBytes(a.name, b.name))].map((all) => astray(all, names, starts));
  const lists = turned({ tensors, attributes, m }, names, raw).sort((a, b) => byBytes(a.name, b.name));
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

/** Returns those that lie in another module than their names say: that of the longest start. Both ascend. */
function astray(all, names, starts) {
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

/** Returns lists and tuples whose children are in an order that their keys do not tell, with those. */
function turned({ tensors, attributes, m }, names, raw) {
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
    const told = keys.every((key) => numbers.has(key)) ? [...numbers] : [...keys].sort();
    return keys.some((key, k) => key !== told[k]);
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
  await stream(record, rangesOf(record, whole), ({ start, end, numbers }, from, chunk) => {
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
