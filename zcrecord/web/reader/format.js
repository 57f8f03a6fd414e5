// SPDX-License-Identifier: 0BSD
/** Header and index, and every rule of FORMAT.md's levels `open` and `index`, by its number. */

export const NONE = 0xffffffff;
export const END = 64; // bytes of header and trailer

export function range(count, make) {
  const out = [];
  for (let i = 0; i < count; i++) out.push(make(i));
  return out;
}

/** Shortens text and escapes control characters. */
export const printable = (text) => (text.length > 200 ? `${text.slice(0, 100)}…${text.slice(-100)}` : text)
  .replace(/(?! )[\p{C}\p{Z}]/gu, (c) => `\\u{${c.codePointAt(0).toString(16)}}`);

export class RecordError extends Error {
  static name = "RecordError";

  constructor(what, { cause, ...where } = {}) {
    super(what, { cause });
    Object.assign(this, { name: new.target.name, what, path: null, tensor: null, offset: null }).located(where);
  }

  /** Adds where it happened, unless that is known. */
  located(where) {
    for (const key of ["path", "tensor", "offset"]) this[key] ??= where[key] ?? null;
    const { path, tensor, what } = this;
    const parts = [path && printable(path), tensor !== null && `tensor '${printable(tensor)}'`, what];
    this.message = parts.filter(Boolean).join(": ");
    return this;
  }
}
/** Returns error classes whose names no minifier changes. */
const kinds = (Base, names) => names.split(" ").map((name) => ({ [name]: class extends Base {} })[name]);
export const [FormatError, LimitError, UnsupportedError, ProducerError, FillError, LoadCancelledError,
  TensorNotFoundError, SourceError] = kinds(RecordError, "FormatError LimitError UnsupportedError ProducerError \
FillError LoadCancelledError TensorNotFoundError SourceError");
export const [VersionError, IntegrityError] = kinds(FormatError, "VersionError IntegrityError");
export const [SourceNotFoundError] = kinds(SourceError, "SourceNotFoundError");

/** Throws unless something holds. */
export function need(holds, what, Kind = FormatError) {
  if (!holds) throw new Kind(what.call ? what() : what);
}

/** Reports that a module cannot be loaded. */
export const missing = (cause) => {
  throw new SourceError(`the request failed: ${cause.message}`, { cause });
};

export function checkGoing(signal) {
  if (signal?.aborted) throw new LoadCancelledError("was cancelled", { cause: signal.reason });
}

/** Checks a rule of a part, or of item `i` of a vector; rules.js has the words. */
export function rule(number, holds, part, got, i) {
  if (holds) return;
  const where = part.what ? `${part.what}[${i}]` : part;
  const tensor = part.what === "tensors" ? part.name(i) : null;
  throw Object.assign(new FormatError(`${where} breaks R${number}`, { tensor }), { rule: number, where, got });
}

/** Calls `check` with each item's number, and a function that checks a rule of it. */
function each(rows, check, from = 0) {
  let i = from;
  const hold = (number, holds) => holds || rule(number, false, rows, null, i);
  for (; i < rows.n; i++) check(i, hold);
}

const CRC = Int32Array.from({ length: 256 }, (_, n) => {
  for (let bit = 0; bit < 8; bit++) n = (n >>> 1) ^ (n & 1 ? 0xedb88320 : 0);
  return n;
});

export function crc32(octets) {
  let c = NONE;
  for (let i = 0; i < octets.length; i++) c = (c >>> 8) ^ CRC[(c ^ octets[i]) & 255];
  return ~c >>> 0;
}

const zeros = (octets, start, end) => !octets.subarray(start, end).some(Boolean);
const alignUp = (n, alignment) => Math.ceil(n / alignment) * alignment;

/** Decodes header or trailer; null: an unsealed header. */
export function decodeHeader(octets, what) {
  const view = new DataView(octets.buffer, octets.byteOffset, END);
  const u32 = (at) => view.getUint32(at, true);
  const check = (number, holds, got) => rule(number, holds, what, got);
  check(1, view.getBigUint64(0) === 0x895a43520d0a1a0an, octets);
  check(2, !octets[8], octets[8]);
  check(3, crc32(octets.subarray(0, 60)) === u32(60));
  const [log2, baseLog2] = octets.subarray(9, 11);
  check(4, log2 >= 4 && log2 <= 16);
  if (zeros(octets, 10, 60)) return null;
  check(5, baseLog2 >= log2 && baseLog2 <= 16);
  check(6, zeros(octets, 11, 16));
  const [features, ...sizes] = range(5, (i) => view.getBigUint64(16 + 8 * i, true));
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

// generated by tools/generate from dtypes.py: types
const TYPES = `1 bool:Uint8:8 uint8 int8:Int8 uint16:Uint16 int16:Int16 uint32:Uint32 int32:Int32 uint64:BigUint64
int64:BigInt64
16 float16:Float16 bfloat16:Uint16 float32:Float32 float64:Float64 complex64:Float32 complex128:Float64
32 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu
48 float6_e2m3fn float6_e3m2fn float4_e2m1fn uint4 int4:Int8 uint2 int2:Int8
64 string`;
// end

/** Element types by code; above, Uint8 and the width in the name go without saying. */
export const KINDS = new Map();
TYPES.split(/\s/).reduce((code, entry) => {
  const [name, array = "Uint8", bits = /\d+|$/.exec(name)[0]] = entry.split(":");
  if (Number(name)) return Number(name); // the code of the next one
  KINDS.set(code, { name, bits: Number(bits), Array: globalThis[`${array}Array`] ?? Uint16Array });
  return code + 1;
}, 0);

// Name, alignment, bytes of an item; its fields, of 4 bytes unless they say another number. The rest is zeros.
const VALUE = "start size low high parent place type1 form1";
const VECTORS = `text 1 1
dims 8 8 low high
strides 8 8 low high
words 8 8 low high
payloads 8 24 offset8 nbytes8 low high
tensors 8 48 start size key parent place payload offset8 dims strides dtype1 bits1 rank1
byName 4 4 item
byModule 4 4 item
modules 4 48 start size type typeSize key parent end place tensor attribute kind1
attributes 8 32 ${VALUE}
metadata 8 32 ${VALUE}`.split("\n").map((line) => line.split(" "));

/** Decodes an index: of each vector its length `n`, and for each field a function that reads it. Checks bounds. */
export function decodeIndex(octets) {
  const size = octets.length;
  const u32 = new Uint32Array(octets.buffer, octets.byteOffset, size / 4);
  const u16 = (at) => octets[at] | (octets[at + 1] << 8);
  const table = u32[0];
  rule(19, size >= 12 && u32[1] === 0x3152435a && table % 4 === 0 && table + 4 <= size, "index");
  const vtable = table - (u32[table / 4] | 0);
  const [slots, end] = [u16(vtable), table + u16(vtable + 2)];
  rule(20, vtable >= 0 && vtable % 2 === 0 && slots >= 4 && slots % 2 === 0 && vtable + slots <= size
    && end >= table + 4 && end <= size, "index");
  const placeOf = (id, width) => {
    const place = 4 + 2 * id < slots ? u16(vtable + 4 + 2 * id) : 0;
    rule(21, !place || (place >= 4 && table + place + width <= end), "index", id);
    return place && table + place;
  };
  const decoder = new TextDecoder("utf-8", { ignoreBOM: true }); // or a name would lose its first character
  const textAt = (start, count) => decoder.decode(ix.pool.subarray(start, start + count));
  const kind = placeOf(0, 1);
  const ix = { textAt, nbytes: 0, digestKind: kind && octets[kind] };
  VECTORS.forEach(([what, alignment, item, ...fields], k) => {
    const place = placeOf(k + 1, 4);
    const at = place && place + u32[place >> 2] + 4;
    const n = at && u32[at / 4 - 1];
    rule(22, !at || (place % 4 === 0 && at % Math.max(4, alignment) === 0 && at + n * item <= size), what);
    const rows = { what, at, n, name: (i) => textAt(rows.start(i), rows.size(i)) };
    let used = at;
    for (const field of fields) {
      const bytes = Number(field.at(-1)) || 4;
      const unit = Math.min(bytes, 4);
      const [from, first, step] = [unit === 1 ? octets : u32, used / unit, item / unit];
      rows[field.replace(/\d/, "")] = bytes < 8 ? (i) => from[first + step * i]
        : (i) => from[first + step * i + 1] * 2 ** 32 + from[first + step * i];
      used += bytes;
    }
    rows.key ??= rows.size; // of attributes
    rows.before = (i, k) => compare(ix.pool, rows.start(i), rows.size(i), ix.pool, rows.start(k), rows.size(k)) < 0;
    rows.zero = (i) => zeros(octets, used + item * i, at + item * (i + 1));
    ix[what] = rows;
  });
  ix.pool = octets.subarray(ix.text.at, ix.text.at + ix.text.n);
  rule(24, ix.byName.n === ix.tensors.n && (!ix.byModule.at || ix.byModule.n === ix.tensors.n), "by_name or by_module");
  rule(25, ix.digestKind <= 1, "index", ix.digestKind);
  rule(37, ix.modules.n, "modules");
  return ix;
}

export const big = (rows, i) => (BigInt(rows.high(i)) << 32n) | BigInt(rows.low(i));

export const exact = (value) => (Number.isSafeInteger(Number(value)) ? Number(value) : value);

/** Compares two spans bytewise, a proper prefix first. */
export function compare(pool, a, aSize, other, b, bSize) {
  const size = Math.min(aSize, bSize);
  for (let i = 0; i < size; i++) if (pool[a + i] !== other[b + i]) return pool[a + i] - other[b + i];
  return aSize - bSize;
}

/** Calls `visit` with the vector and number of each word of a value. */
export function eachWord({ words }, rows, i, visit) {
  if (!rows.form(i)) visit(rows, i);
  else for (let k = 0; k < rows.high(i); k++) visit(words, rows.low(i) + k);
}

/** Checks every rule but those that need payloads' bytes; linear in the index. */
export function checkIndex(ix, header) {
  checkNamed(ix);
  checkPayloads(ix, header);
  each(ix.byName, (k, hold) => {
    const i = ix.byName.item(k);
    hold(32, i < ix.tensors.n && (!k || ix.tensors.before(ix.byName.item(k - 1), i)));
  });
  const used = new Uint8Array(ix.payloads.n);
  each(ix.tensors, (i, hold) => checkTensor(ix, i, hold, used));
  checkModules(ix);
  checkValues(ix, used);
  checkChildren(ix);
  each(ix.payloads, (i, hold) => hold(61, used[i]));
}

/** A span lies in the pool; a name has no NUL, and so many bytes at least. */
function checkSpan({ pool }, hold, start, size, least) {
  hold(27, start + size < pool.length && !pool[start + size]);
  hold(28, (pool[start] & 0xc0) !== 0x80);
  hold(29, least === null || (size >= least && pool.indexOf(0, start) === start + size));
}

/** Names repeat their pool only so often (R30): all that follows is linear. */
function checkNamed(ix) {
  const { pool, tensors, modules, attributes, metadata } = ix;
  const decoder = new TextDecoder("utf-8", { fatal: true });
  const step = 1 << 24; // or the string would be too long
  try {
    for (let at = 0; at < pool.length; at += step) decoder.decode(pool.subarray(at, at + step), { stream: true });
    decoder.decode();
  } catch {
    rule(28, false, "text");
  }
  const check = (rows, start, size, least) => {
    let total = 0;
    each(rows, (i, hold) => {
      hold(30, (total += size(i)) <= pool.length + 256 * rows.n);
      checkSpan(ix, hold, start(i), size(i), least);
      hold(26, rows.zero(i));
    });
  };
  for (const rows of [tensors, attributes, metadata, modules]) check(rows, rows.start, rows.size, rows !== modules);
  check(modules, modules.type, modules.typeSize, 0);
}

function checkPayloads(ix, h) {
  const { payloads: p, digestKind } = ix;
  let end = 0;
  each(p, (i, hold) => {
    const [start, nbytes] = [p.offset(i), p.nbytes(i)];
    const same = i > 0 && start === p.offset(i - 1) && nbytes === p.nbytes(i - 1);
    hold(56, nbytes && start + nbytes <= h.archiveSize - h.payloadOffset);
    hold(57, (h.payloadOffset + start) % h.alignment === 0);
    hold(58, same || start >= end);
    hold(59, same || start - end < h.baseAlignment);
    hold(60, digestKind ? !same || big(p, i) === big(p, i - 1) : !big(p, i));
    if (!same) ix.nbytes += nbytes;
    end = start + nbytes;
  });
  const region = (h.front ? h.archiveSize - END : h.indexOffset) - h.payloadOffset;
  rule(13, alignUp(end, h.alignment) === region, "payloads");
}

/** After this a view of a tensor lies inside. */
function checkTensor({ tensors: t, modules, dims, strides, payloads }, i, hold, used) {
  const [dtype, bits, rank, payload, steps] = [t.dtype(i), t.bits(i), t.rank(i), t.payload(i), t.strides(i)];
  const natural = KINDS.get(dtype)?.bits;
  const strided = steps !== NONE;
  const first = t.dims(i);
  hold(47, rank <= 64);
  hold(45, t.parent(i) < modules.n);
  hold(33, t.key(i) && t.key(i) <= t.size(i));
  hold(46, natural === undefined ? dtype && bits && bits <= 128
    : bits === natural || (bits === 8 && natural && natural < 8));
  hold(48, first + rank <= dims.n);
  hold(52, !strided || (bits && bits % 8 === 0 && steps + rank <= strides.n));
  const shape = range(rank, (k) => big(dims, first + k));
  const empty = shape.includes(0n);
  const claimed = shape.reduce((all, dim) => all * (dim || 1n), BigInt(bits || 64)); // bits
  hold(49, claimed <= 1n << 59n);
  const needed = Number((claimed + 7n) / 8n);
  const [nbytes, offset, item] = [payloads.nbytes(payload), t.offset(i), bits / 8];
  hold(50, empty ? payload === NONE && !strided : payload < payloads.n);
  hold(51, strided || (!offset && (empty || !bits || nbytes === needed)));
  hold(71, empty || bits || (nbytes % 8 === 0 && nbytes >= needed + 8));
  used[payload] = 1;
  if (!strided) return;
  let [low, high] = [0, 0];
  shape.forEach((dim, k) => { // what is rounded here is too far in any case
    const [lo, hi] = [strides.low(steps + k), strides.high(steps + k) | 0];
    hold(53, hi >= -(2 ** 24) && hi + Math.sign(lo) <= 2 ** 24);
    const reach = (hi * 2 ** 32 + lo) * (Number(dim) - 1);
    low += Math.min(0, reach);
    high += Math.max(0, reach);
  });
  hold(53, offset + low * item >= 0 && offset + (high + 1) * item <= nbytes);
  hold(54, offset % item === 0);
  hold(55, needed <= nbytes);
}

function checkModules({ modules: m }) {
  const around = []; // modules that have not ended
  each(m, (i, hold) => {
    const [parent, end] = [m.parent(i), m.end(i)];
    while (around.length && m.end(around.at(-1)) === i) around.pop();
    hold(41, m.kind(i));
    if (i) {
      hold(38, parent < i && end > i && end <= m.end(parent));
      hold(39, parent === around.at(-1));
      hold(40, around.length <= 99);
    } else hold(37, parent === NONE && end === m.n && !m.size(i) && !m.key(i) && !m.place(i));
    around.push(i);
  });
}

/** Lists repeat their pools only so often, too (R31). */
function checkValues(ix, used) {
  const { pool, words, attributes, metadata, payloads } = ix;
  let [texts, size] = [0, 0];
  for (const rows of [attributes, metadata]) {
    let listed = 0;
    each(rows, (i, hold) => {
      const [type, form, count] = [rows.type(i), rows.form(i), rows.high(i)];
      hold(66, type <= 6 && form <= 2);
      hold(67, !form || rows.low(i) + count <= words.n);
      hold(31, (listed += form && count) <= words.n + 32 * rows.n);
      eachWord(ix, rows, i, (from, k) => {
        const [low, high] = [from.low(k), from.high(k)];
        if (type < 2) hold(68, !high && low <= type);
        if (type === 6) hold(68, !high && (low === NONE || low < payloads.n));
        if (type === 6) used[low] = 1;
        if (type !== 5) return;
        checkSpan(ix, hold, low, high, null);
        texts += 1;
        size += high;
      });
    });
  }
  rule(30, size <= pool.length + 256 * texts, "attributes and metadata");
  each(metadata, (i, hold) => {
    hold(65, metadata.parent(i) === NONE && !metadata.place(i));
    hold(65, !i || metadata.before(i - 1, i));
  });
}

function checkChildren({ pool, textAt, tensors, modules: m, attributes, byModule }) {
  const ends = new Uint32Array(m.n + 1); // where in `taken` a module's children end, by its number + 1
  for (const [rows, first] of [[tensors, m.tensor], [attributes, m.attribute]]) {
    const begins = new Uint32Array(m.n + 1);
    let [module, last] = [-1, -1];
    each(rows, (k, hold) => {
      const i = rows === tensors && byModule.at ? byModule.item(k) : k;
      hold(42, i < rows.n);
      const [parent, order] = [rows.parent(i), rows === tensors ? i : rows.place(i)];
      const ascends = parent > module || (parent === module && order > last);
      if (rows === tensors) hold(42, ascends);
      else hold(64, parent < m.n && ascends);
      [module, last] = [parent, order];
      begins[parent + 1] += 1;
      ends[parent + 1] += 1;
    });
    each(m, (i, hold) => {
      hold(43, first(i) === begins[i]);
      begins[i + 1] += begins[i];
    });
  }
  each(m, (i) => { ends[m.parent(i) + 1] += 1; }, 1);
  const [names, keys] = [new Set(), new Set()];
  each(m, (i, hold) => {
    hold(35, names.size < names.add(m.name(i)).size);
    ends[i + 1] += ends[i];
  });
  // Tensors' keys alone are unique by their names.
  const [taken, mixed] = [new Uint8Array(ends[m.n]), new Uint8Array(m.n)];
  for (const [rows, from] of [[m, 1], [attributes, 0], [tensors, 0]]) {
    each(rows, (i, hold) => {
      const [parent, start, size, key] = [rows.parent(i), rows.start(i), rows.size(i), rows.key(i)];
      const [slot, prefix] = [ends[parent] + rows.place(i), m.size(parent)];
      hold(44, slot < ends[parent + 1] && !taken[slot]);
      taken[slot] = 1;
      hold(34, key && (rows === attributes || !parent ? key === size : size === prefix + 1 + key
        && pool[start + prefix] === 46 && !compare(pool, start, prefix, pool, m.start(parent), prefix)));
      if (rows !== tensors) mixed[parent] = 1;
      hold(36, !mixed[parent] || keys.size < keys.add(`${parent} ${textAt(start + size - key, key)}`).size);
    }, from);
  }
}
