// SPDX-License-Identifier: 0BSD
/**
 * What an archive's bytes mean: errors, header and trailer, the vectors of its index, and every rule of FORMAT.md's
 * levels `open` and `index`, by its number. Where bytes come from, and what is made of them, is left to others.
 */

export const NONE = 0xffffffff;
export const END = 64; // bytes of header and trailer

/** Returns text with its middle cut out and control characters escaped: names come from strangers. */
export const printable = (text) =>
  (text.length > 200 ? `${text.slice(0, 100)}…${text.slice(-100)}` : text).replace(/(?! )[\p{C}\p{Z}]/gu, (c) =>
    `\\u{${c.codePointAt(0).toString(16)}}`);

export class RecordError extends Error {
  constructor(what, { cause, ...where } = {}) {
    super(what, { cause });
    Object.assign(this, { name: new.target.name, what, path: null, tensor: null, offset: null }).located(where);
  }

  /** Fills in the places that were not known where it was thrown. */
  located(where) {
    for (const key of ["path", "tensor", "offset"]) this[key] ??= where[key] ?? null;
    const tensor = this.tensor === null ? [] : [`tensor '${printable(this.tensor)}'`];
    this.message = [...(this.path ? [printable(this.path)] : []), ...tensor, this.what].join(": ");
    return this;
  }
}
export class FormatError extends RecordError {}
export class VersionError extends FormatError {}
export class IntegrityError extends FormatError {}
export class LimitError extends RecordError {}
export class UnsupportedError extends RecordError {}
export class ProducerError extends RecordError {}
export class FillError extends RecordError {}
export class LoadCancelledError extends RecordError {}
export class TensorNotFoundError extends RecordError {}
export class SourceError extends RecordError {}
export class SourceNotFoundError extends SourceError {}

/** Throws an error of that kind unless something holds. */
export function need(holds, what, Kind = FormatError) {
  if (!holds) throw new Kind(typeof what === "string" ? what : what());
}

/** Throws if a load was cancelled. */
export function checkGoing(signal) {
  if (signal?.aborted) throw new LoadCancelledError("was cancelled", { cause: signal.reason });
}

// What the breach of a rule is, where it is no FormatError.
const KIND = { 2: VersionError, 3: IntegrityError, 7: VersionError, 9: LimitError, 17: IntegrityError, 30: LimitError,
  31: LimitError, 40: LimitError, 47: LimitError, 49: LimitError };

function breach(number, part, i, got) {
  const tensor = part.what === "tensors" ? part.name(i) : null;
  const error = new (KIND[number] ?? FormatError)(part.what ? `${part.what}[${i}]` : part, { tensor });
  return Object.assign(error, { rule: number, got });
}

/** Holds a part of the archive to a rule; rules.js has the words. */
export function rule(number, holds, part, got) {
  if (!holds) throw breach(number, part, 0, got);
}

/** Calls `check` with the number of every item of a vector, and with what holds it to a rule. */
function each(rows, check, from = 0) {
  let i = from;
  const hold = (number, holds) => {
    if (!holds) throw breach(number, rows, i);
  };
  for (; i < rows.n; i++) check(i, hold);
}

const CRC = new Uint32Array(1024); // four tables of 256: as many bytes a step
for (let n = 0; n < 1024; n++) {
  let c = n < 256 ? n : CRC[n - 256];
  for (let bit = 0; bit < 8; bit++) c = (c >>> 1) ^ (c & 1 ? 0xedb88320 : 0);
  CRC[n] = c;
}

/** Returns the CRC-32 of bytes, as zlib has it. */
export function crc32(octets) {
  const aligned = octets.byteOffset % 4 ? 0 : octets.length >> 2;
  let c = NONE;
  for (const word of new Uint32Array(octets.buffer, aligned && octets.byteOffset, aligned)) {
    c ^= word;
    c = CRC[768 + (c & 255)] ^ CRC[512 + ((c >>> 8) & 255)] ^ CRC[256 + ((c >>> 16) & 255)] ^ CRC[c >>> 24];
  }
  for (let i = 4 * aligned; i < octets.length; i++) c = (c >>> 8) ^ CRC[(c ^ octets[i]) & 255];
  return ~c >>> 0;
}

const alignUp = (n, alignment) => Math.ceil(n / alignment) * alignment;

/** Returns what 64 bytes say, null for an unsealed header; numbers are rounded from 2^53 on. */
export function decodeHeader(octets, what) {
  const view = new DataView(octets.buffer, octets.byteOffset, END);
  const u32 = (at) => view.getUint32(at, true);
  const check = (number, holds, got) => rule(number, holds, what, got);
  check(1, view.getUint32(0) === 0x895a4352 && view.getUint32(4) === 0x0d0a1a0a);
  check(2, !octets[8], octets[8]);
  check(3, crc32(octets.subarray(0, 60)) === u32(60));
  const [log2, baseLog2] = octets.subarray(9, 11);
  check(4, log2 >= 4 && log2 <= 16);
  if (!octets.subarray(10, 60).some(Boolean)) return null;
  check(5, baseLog2 >= log2 && baseLog2 <= 16);
  check(6, !octets.subarray(11, 16).some(Boolean));
  const [features, ...sizes] = [16, 24, 32, 40, 48].map((at) => view.getBigUint64(at, true));
  check(7, !features, `0x${features.toString(16)}`);
  check(9, sizes[3] <= 1n << 56n);
  const [alignment, baseAlignment] = [2 ** log2, 2 ** baseLog2];
  const [indexOffset, indexSize, payloadOffset, archiveSize] = sizes.map(Number);
  check(10, indexSize && indexSize < 2 ** 31 && indexSize % 8 === 0);
  check(11, payloadOffset % alignment === 0 && payloadOffset <= archiveSize - END);
  const front = indexOffset === END && payloadOffset >= END + indexSize;
  check(12, front ? payloadOffset - END - indexSize < baseAlignment
    : payloadOffset === alignUp(END, alignment) && indexOffset >= payloadOffset && indexOffset % alignment === 0
      && indexOffset + indexSize === archiveSize - END);
  return { alignment, baseAlignment, indexOffset, indexSize, payloadOffset, archiveSize, indexCrc: u32(56), front };
}

/** Element types by code: name, natural bits, and of which typed array elements, or their components, are. */
export const KINDS = new Map(Object.entries({
  1: "bool uint8 int8:Int8 uint16:Uint16 int16:Int16 uint32:Uint32 int32:Int32 uint64:BigUint64 int64:BigInt64",
  16: "float16:Float16 bfloat16:Uint16 float32:Float32 float64:Float64 complex64:Float32 complex128:Float64",
  32: "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu",
  48: "float6_e2m3fn float6_e3m2fn float4_e2m1fn uint4 int4:Int8 uint2 int2:Int8",
  64: "string",
}).flatMap(([first, names]) => names.split(" ").map((entry, i) => {
  const [name, array = "Uint8"] = entry.split(":");
  const bits = name === "string" ? 0 : Number(/\d+/.exec(name) ?? 8);
  return [Number(first) + i, { name, bits, Array: globalThis[`${array}Array`] ?? Uint16Array }];
})));

// Name, alignment, bytes of an item, its fields with the bytes of each; after them it is zeros.
const VALUES = "start4 size4 low4 high4 parent4 place4 type1 form1";
const VECTORS = [
  ["text", 1, 1], ["dims", 8, 8, "low4 high4"], ["strides", 8, 8, "low4 high4"], ["words", 8, 8, "low4 high4"],
  ["payloads", 8, 24, "offset8 nbytes8 low4 high4"],
  ["tensors", 8, 48, "start4 size4 key4 parent4 place4 payload4 offset8 dims4 strides4 dtype1 bits1 rank1"],
  ["byName", 4, 4, "item4"], ["byModule", 4, 4, "item4"],
  ["modules", 4, 48, "start4 size4 type4 typeSize4 key4 parent4 end4 place4 tensor4 attribute4 kind1"],
  ["attributes", 8, 32, VALUES], ["metadata", 8, 32, VALUES],
];
const READERS = { // of octets or words, from the first one on that is asked for, and so many from item to item
  1: (octets, first, step) => (i) => octets[first + step * i],
  4: (u32, first, step) => (i) => u32[first + step * i],
  8: (u32, first, step) => (i) => u32[first + step * i + 1] * 2 ** 32 + u32[first + step * i],
};

/** Returns the vectors of an index: each how many items it has, and a function of an item's number for each field,
 *  that reads in place. Their bounds are checked, nothing else. */
export function decodeIndex(octets) {
  const size = octets.length;
  const u32 = new Uint32Array(octets.buffer, octets.byteOffset, size / 4);
  const u16 = (at) => octets[at] | (octets[at + 1] << 8);
  const table = u32[0];
  rule(19, size >= 12 && u32[1] === 0x3152435a && table % 4 === 0 && table + 4 <= size, "index");
  const vtable = table - (u32[table / 4] | 0);
  const [fields, end] = [u16(vtable), table + u16(vtable + 2)];
  rule(20, vtable >= 0 && vtable % 2 === 0 && fields >= 4 && fields % 2 === 0 && vtable + fields <= size
    && end >= table + 4 && end <= size, "index");
  const places = [1, ...VECTORS.map(() => 4)].map((width, id) => {
    const place = 4 + 2 * id < fields ? u16(vtable + 4 + 2 * id) : 0;
    rule(21, !place || (place >= 4 && table + place + width <= end), "index", id);
    return place && table + place;
  });
  const decoder = new TextDecoder("utf-8", { ignoreBOM: true }); // or a name would lose its first character
  const ix = { digestKind: places[0] && octets[places[0]] };
  VECTORS.forEach(([what, alignment, item, layout = ""], k) => {
    const place = places[k + 1];
    const at = place && place + u32[place >> 2] + 4;
    const n = at && u32[at / 4 - 1];
    rule(22, !at || (place % 4 === 0 && at % Math.max(4, alignment) === 0 && at + n * item <= size), what);
    const rows = { what, at, n, name: (i) => ix.textAt(rows.start(i), rows.size(i)) };
    let used = at;
    for (const [, field, bytes] of layout.matchAll(/(\D+)(\d) ?/g)) {
      const unit = Math.min(bytes, 4);
      rows[field] = READERS[bytes](unit === 1 ? octets : u32, used / unit, item / unit);
      used += Number(bytes);
    }
    rows.zero = (i) => {
      for (let k = used + item * i; k < at + item * (i + 1); k++) if (octets[k]) return false;
      return true;
    };
    ix[what] = rows;
  });
  ix.pool = octets.subarray(ix.text.at, ix.text.at + ix.text.n);
  ix.textAt = (start, count) => decoder.decode(ix.pool.subarray(start, start + count));
  rule(24, ix.byName.n === ix.tensors.n && (!ix.byModule.at || ix.byModule.n === ix.tensors.n), "by_name or by_module");
  rule(25, ix.digestKind <= 1, "index", ix.digestKind);
  rule(37, ix.modules.n, "modules");
  return ix;
}

/** Returns 64 bits of an item as a number, rounded from 2^53 on, or as a BigInt. */
const u64 = (rows, i) => rows.high(i) * 2 ** 32 + rows.low(i);
export const big = (rows, i) => (BigInt(rows.high(i)) << 32n) | BigInt(rows.low(i));

/** Compares two spans bytewise, a proper prefix first. */
export function compare(pool, a, aSize, other, b, bSize) {
  const size = Math.min(aSize, bSize);
  for (let i = 0; i < size; i++) if (pool[a + i] !== other[b + i]) return pool[a + i] - other[b + i];
  return aSize - bSize;
}

/** Calls `visit` with every word of an attribute's value: the vector that has it, and its number there. */
export function eachWord({ words }, rows, i, visit) {
  if (!rows.form(i)) visit(rows, i);
  else for (let k = 0; k < rows.high(i); k++) visit(words, rows.low(i) + k);
}

/** Checks every rule but those that need payloads' bytes; linear in the index. */
export function checkIndex(ix, header) {
  checkPools(ix);
  checkPayloads(ix, header);
  checkNames(ix);
  const used = new Uint8Array(ix.payloads.n);
  each(ix.tensors, (i, hold) => {
    checkTensor(ix, i, hold);
    used[ix.tensors.payload(i)] = 1;
  });
  checkModules(ix);
  checkValues(ix, used);
  checkChildren(ix);
  checkKeys(ix);
  each(ix.payloads, (i, hold) => hold(61, used[i]));
}

/** Names and lists repeat their pools only so often, which keeps all that follows linear (R30, R31). */
function checkPools({ pool, words, tensors, modules, attributes, metadata }) {
  const decoder = new TextDecoder("utf-8", { fatal: true });
  const step = 1 << 24; // or the text of a large index would be too long for a string
  try {
    for (let at = 0; at < pool.length; at += step) decoder.decode(pool.subarray(at, at + step), { stream: true });
    decoder.decode();
  } catch {
    rule(28, false, "text");
  }
  const budget = (number, rows, least, allowance, count) => {
    let total = 0;
    each(rows, (i, hold) => { total += count(i, hold); });
    rule(number, total <= least + allowance * rows.n, rows.what);
  };
  for (const rows of [tensors, modules, attributes, metadata]) budget(30, rows, pool.length, 256, rows.size);
  budget(30, modules, pool.length, 256, modules.typeSize);
  let [texts, size] = [0, 0];
  const add = (from, k) => { texts += 1; size += from.high(k); };
  for (const rows of [attributes, metadata]) {
    budget(31, rows, words.n, 32, (i, hold) => {
      hold(67, !rows.form(i) || rows.low(i) + rows.high(i) <= words.n);
      return rows.form(i) ? rows.high(i) : 0;
    });
    each(rows, (i) => { if (rows.type(i) === 5) eachWord({ words }, rows, i, add); });
  }
  rule(30, size <= pool.length + 256 * texts, "attributes and metadata");
}

/** A span lies in the pool; that of a name has no NUL and, but where a type's is left out, bytes. */
function checkSpan({ pool }, hold, start, size, name = true, least = 1) {
  hold(27, start + size < pool.length && !pool[start + size]);
  hold(28, (pool[start] & 0xc0) !== 0x80);
  hold(29, !name || (size >= least && pool.indexOf(0, start) === start + size));
}

function checkPayloads({ payloads: p, digestKind }, h) {
  let end = 0;
  each(p, (i, hold) => {
    const [start, nbytes] = [p.offset(i), p.nbytes(i)];
    const same = i > 0 && start === p.offset(i - 1) && nbytes === p.nbytes(i - 1);
    hold(56, nbytes && start + nbytes <= h.archiveSize - h.payloadOffset);
    hold(57, (h.payloadOffset + start) % h.alignment === 0);
    hold(58, same || start >= end);
    hold(59, same || start - end < h.baseAlignment);
    hold(60, digestKind ? !same || big(p, i) === big(p, i - 1) : !p.low(i) && !p.high(i));
    end = start + nbytes;
  });
  const region = (h.front ? h.archiveSize - END : h.indexOffset) - h.payloadOffset;
  rule(13, alignUp(end, h.alignment) === region, "payloads");
}

function checkNames(ix) {
  const { pool, tensors: t, byName } = ix;
  let [start, size] = [0, 0];
  each(byName, (k, hold) => {
    const i = byName.item(k);
    hold(32, i < t.n);
    checkSpan(ix, hold, t.start(i), t.size(i));
    hold(32, compare(pool, start, size, pool, t.start(i), t.size(i)) < 0);
    [start, size] = [t.start(i), t.size(i)];
  });
}

/** After this a view of a tensor lies inside. */
function checkTensor(ix, i, hold) {
  const { tensors: t, dims, strides, payloads } = ix;
  const [dtype, bits, rank, payload, steps] = [t.dtype(i), t.bits(i), t.rank(i), t.payload(i), t.strides(i)];
  const natural = KINDS.get(dtype)?.bits;
  const strided = steps !== NONE;
  const first = t.dims(i);
  hold(26, t.zero(i));
  hold(47, rank <= 64);
  hold(45, t.parent(i) < ix.modules.n);
  hold(33, t.key(i) && t.key(i) <= t.size(i));
  hold(46, natural === undefined ? dtype && bits && bits <= 128
    : bits === natural || (bits === 8 && natural && natural < 8));
  hold(48, first + rank <= dims.n);
  hold(50, payload === NONE || payload < payloads.n);
  hold(52, !strided || (bits && bits % 8 === 0 && steps + rank <= strides.n));
  const width = bits || 64;
  let [claimed, empty] = [width, false]; // claimed bits
  for (let k = first; k < first + rank; k++) {
    claimed *= u64(dims, k) || 1;
    empty ||= !u64(dims, k);
  }
  let needed = Math.ceil(claimed / 8);
  if (claimed >= 2 ** 53) { // rounded, maybe
    let product = BigInt(width);
    for (let k = first; k < first + rank; k++) product *= big(dims, k) || 1n;
    hold(49, product <= 1n << 59n);
    needed = Number((product + 7n) / 8n);
  }
  hold(50, empty === (payload === NONE) && !(empty && strided));
  hold(51, strided || !t.offset(i));
  if (empty) return;
  const [nbytes, offset, item] = [payloads.nbytes(payload), t.offset(i), bits / 8];
  if (!bits) hold(71, nbytes % 8 === 0 && nbytes >= needed + 8);
  else if (!strided) hold(51, nbytes === needed);
  if (!strided) return;
  let [low, high] = [0, 0];
  for (let k = 0; k < rank; k++) { // what is rounded here is too far in any case
    const [lo, hi] = [strides.low(steps + k), strides.high(steps + k) | 0];
    hold(53, hi >= -(2 ** 24) && hi + Math.sign(lo) <= 2 ** 24);
    const reach = (hi * 2 ** 32 + lo) * (u64(dims, first + k) - 1);
    low += Math.min(0, reach);
    high += Math.max(0, reach);
  }
  hold(53, offset + low * item >= 0 && offset + (high + 1) * item <= nbytes);
  hold(54, offset % item === 0);
  hold(55, needed <= nbytes);
}

function checkModules(ix) {
  const { modules: m } = ix;
  const depth = new Uint8Array(m.n);
  each(m, (i, hold) => {
    const [parent, end] = [m.parent(i), m.end(i)];
    checkSpan(ix, hold, m.start(i), m.size(i), true, Math.min(i, 1));
    checkSpan(ix, hold, m.type(i), m.typeSize(i), true, 0);
    hold(26, m.zero(i));
    hold(41, m.kind(i));
    if (i) {
      hold(38, parent < i && end > i && end <= m.end(parent));
      depth[i] = depth[parent] + 1;
      hold(40, depth[i] <= 99);
    } else hold(37, parent === NONE && end === m.n && !m.size(i) && !m.key(i) && !m.place(i));
  });
  each(m, (i, hold) => {
    const [parent, end] = [m.parent(i), m.end(i)];
    hold(39, i + 1 === end || m.parent(i + 1) === i);
    hold(39, !i || end === m.end(parent) || m.parent(end) === parent);
  });
}

function checkValues(ix, used) {
  const { pool, modules, metadata, payloads } = ix;
  for (const rows of [ix.attributes, metadata]) {
    each(rows, (i, hold) => {
      const [start, size, parent, type] = [rows.start(i), rows.size(i), rows.parent(i), rows.type(i)];
      checkSpan(ix, hold, start, size);
      hold(26, rows.zero(i));
      hold(66, type <= 6 && rows.form(i) <= 2);
      if (rows === metadata) {
        hold(65, parent === NONE && !rows.place(i));
        hold(65, !i || compare(pool, rows.start(i - 1), rows.size(i - 1), pool, start, size) < 0);
      } else {
        hold(64, parent < modules.n);
        hold(64, !i || (parent - rows.parent(i - 1) || rows.place(i) - rows.place(i - 1)) > 0);
      }
      eachWord(ix, rows, i, (from, k) => {
        const [low, high] = [from.low(k), from.high(k)];
        if (type < 2) hold(68, !high && low <= type);
        if (type === 6) {
          hold(68, !high && (low === NONE || low < payloads.n));
          used[low] = 1;
        }
        if (type === 5) checkSpan(ix, hold, low, high, false);
      });
    });
  }
}

/** Modules know where their own tensors and attributes begin (R42, R43); places (R44) and full names (R34) fit. */
function checkChildren({ pool, tensors, modules: m, attributes, byModule }) {
  const ends = new Uint32Array(m.n + 1); // where in `taken` a module's children end, by its number + 1
  for (const [rows, first] of [[tensors, m.tensor], [attributes, m.attribute]]) {
    let [module, last] = [-1, -1];
    each(rows, (k, hold) => {
      const i = rows === tensors && byModule.at ? byModule.item(k) : k;
      hold(42, i < rows.n);
      const parent = rows.parent(i);
      hold(42, parent > module || (parent === module && i > last));
      while (module < parent) rule(43, first(++module) === k, "modules");
      last = i;
      ends[parent + 1] += 1;
    });
    while (module < m.n - 1) rule(43, first(++module) === rows.n, "modules");
  }
  each(m, (i) => { ends[m.parent(i) + 1] += 1; }, 1);
  each(m, (i) => { ends[i + 1] += ends[i]; });
  const taken = new Uint8Array(ends[m.n]);
  for (const [rows, from] of [[tensors, 0], [m, 1], [attributes, 0]]) {
    each(rows, (i, hold) => {
      const parent = rows.parent(i);
      const slot = ends[parent] + rows.place(i);
      hold(44, slot < ends[parent + 1] && !taken[slot]);
      taken[slot] = 1;
      if (!rows.key) return;
      const [start, size, key, prefix] = [rows.start(i), rows.size(i), rows.key(i), m.size(parent)];
      hold(34, parent ? key && size === prefix + 1 + key && pool[start + prefix] === 46
        && !compare(pool, start, prefix, pool, m.start(parent), prefix) : key === size);
    }, from);
  }
}

/** Modules' full names, and the keys in a module, are unique (R35, R36). Where all of its children are tensors,
 *  `byName` has shown that already. */
function checkKeys({ textAt, tensors, modules: m, attributes }) {
  const mixed = new Uint8Array(m.n);
  for (const [rows, from] of [[m, 1], [attributes, 0]]) each(rows, (i) => { mixed[rows.parent(i)] = 1; }, from);
  const [names, keys] = [new Set(), new Set()];
  each(m, (i, hold) => hold(35, names.size < names.add(m.name(i)).size));
  for (const [rows, key, from] of [[m, m.key, 1], [attributes, attributes.size, 0], [tensors, tensors.key, 0]]) {
    each(rows, (i, hold) => {
      const [parent, size] = [rows.parent(i), key(i)];
      if (!mixed[parent]) return;
      hold(36, keys.size < keys.add(`${parent} ${textAt(rows.start(i) + rows.size(i) - size, size)}`).size);
    }, from);
  }
}
