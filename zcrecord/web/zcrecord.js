// SPDX-License-Identifier: 0BSD
/**
 * A reader of zcrecord archives for browsers and Node 20+, without dependencies or build step: fetches header and
 * index, checks every rule of an index, and then only the bytes that are asked for. zcrecord.d.ts documents it.
 * Always needed: format.js, places.js. All other modules are loaded when something asks for them.
 */

import { END, KINDS, NONE, LimitError, RecordError, TensorNotFoundError, UnsupportedError, big, checkGoing,
  checkIndex, compare, crc32, decodeHeader, decodeIndex, eachWord, need, printable, rule } from "./format.js";
import { FIRST, placeOf } from "./places.js";

export { FillError, FormatError, IntegrityError, LimitError, LoadCancelledError, ProducerError, RecordError,
  SourceError, SourceNotFoundError, TensorNotFoundError, UnsupportedError, VersionError } from "./format.js";

export async function open(source, options = {}) {
  const { signal, verify = "index", embedded = null } = options;
  const due = (holds, what) => need(holds, what, UnsupportedError);
  due(["index", "full"].includes(verify), `verify is "index" or "full", not ${verify}`);
  due([null, "prefix", "suffix"].includes(embedded), `embedded is "prefix" or "suffix", not ${embedded}`);
  due(new Uint8Array(Uint16Array.of(1).buffer)[0], "this machine is not little-endian");
  checkGoing(signal);
  const place = await placeOf(source, options);
  try {
    const found = await locate(place, embedded, signal);
    rule(17, crc32(found.index) === found.header.indexCrc, "index");
    const ix = decodeIndex(found.index);
    checkIndex(ix, found.header);
    const record = new Record({ ...found, ix, place });
    if (verify === "full") await record.verify({ signal });
    return record;
  } catch (error) {
    await place.close?.();
    const short = () => `${error.what} breaks R${error.rule}`; // where the words cannot be loaded
    if (error.rule) error.what = await import("./rules.js").then(({ explain }) => explain(error), short);
    throw located(error, { path: place.path });
  }
}

/** Says where an error happened. A Set or string can be too large for JavaScript. */
function located(error, where) {
  const what = `this machine has no room for it: ${error.message}; save it in parts`;
  if (error instanceof RangeError) error = new LimitError(what, { cause: error });
  return error instanceof RecordError ? error.located(where) : error;
}

/** Finds header, where it starts, and the bytes of the index (R14 to R16). */
async function locate(place, embedded, signal) {
  const held = [];
  const get = async (lo, hi) => {
    const found = held.find(([start, octets]) => start <= lo && hi <= start + octets.length);
    if (found) return found[1].subarray(lo - found[0], hi - found[0]);
    held.push([lo, await place.read(lo, hi, signal)]);
    return held.at(-1)[1];
  };
  await get(0, Math.min(FIRST, place.size ?? FIRST));
  let [base, size] = [0, place.size];
  need(size, "the file is empty");
  need(size < 2 ** 53, "is larger than 2^53 bytes, more than this reader counts", UnsupportedError);
  rule(14, size >= END, "the file", size);
  if (embedded === "suffix") {
    const { archiveSize = 0 } = decodeHeader(await get(size - END, size), "trailer") ?? {};
    rule(16, archiveSize >= 2 * END && archiveSize <= size, "trailer", size);
    base = size - archiveSize;
    size = archiveSize;
    await get(base, base + Math.min(size, FIRST));
  }
  const first = await get(base, base + END);
  const header = decodeHeader(first, "header");
  if (embedded === "prefix") {
    rule(15, header && header.archiveSize <= size, "header", size);
    size = header.archiveSize;
  }
  const end = base + size;
  rule(14, !header || header.archiveSize === size, "header", size);
  if (!header?.front) await get(header ? base + header.indexOffset : Math.max(base, end - FIRST), end);
  const last = await get(end - END, end);
  const trailer = decodeHeader(last, "trailer");
  rule(8, trailer && (header ? first.every((byte, i) => byte === last[i]) : first[9] === last[9]), "trailer");
  rule(14, trailer.archiveSize === size, "trailer", size);
  const start = base + trailer.indexOffset;
  let index = await get(start, start + trailer.indexSize);
  // In place where it is aligned and no thread writes; what came with other bytes is copied, or all would be kept.
  if (index.byteOffset % 8 || !place.octets || !(index.buffer instanceof ArrayBuffer)) index = index.slice();
  return { header: trailer, sealed: header !== null, base, index };
}

const range = (count, make) => Array.from({ length: count }, (_, i) => make(i));
const product = (shape) => shape.reduce((a, b) => a * Number(b), 1);

/** Returns a BigInt as a number, if that loses no digits. */
const exact = (value) => (Number.isSafeInteger(Number(value)) ? Number(value) : value);

export class Record {
  #names = null;
  #tied = null;
  #modules = []; // names, each decoded once: many may have the same long one before theirs

  /** `open` makes records; `room(number)` gives a payload that is in memory. */
  constructor({ header, sealed, base, ix, place, room = null }) {
    Object.assign(this, { path: place.path, _header: header, _sealed: sealed, _base: base, _ix: ix, _place: place });
    this._room = room;
  }

  get layout() {
    const { indexCrc: _, ...rest } = this._header;
    const digest = this._ix.digestKind && !this._room ? "xxh3" : "none";
    return { ...rest, sealed: this._sealed, digest, offset: this._base };
  }

  get length() {
    return this._ix.tensors.n;
  }

  get names() {
    this.#names ??= Object.freeze(range(this.length, this._ix.tensors.name));
    return this.#names;
  }

  has(name) {
    return this._search(name) >= 0;
  }

  /** Returns the number of a tensor, -1 without one of that name. */
  _search(name) {
    if (typeof name !== "string") return -1;
    const { pool, byName, tensors: t } = this._ix;
    const wanted = new TextEncoder().encode(name);
    let [low, high] = [0, byName.n];
    while (low < high) {
      const middle = (low + high) >>> 1;
      const i = byName.item(middle);
      const order = compare(pool, t.start(i), t.size(i), wanted, 0, wanted.length);
      if (!order) return i;
      if (order < 0) low = middle + 1;
      else high = middle;
    }
    return -1;
  }

  _find(name) {
    const i = this._search(name);
    if (i >= 0) return i;
    const text = String(name);
    const tail = text.split(".").pop();
    const close = this.names.filter((n) => n.endsWith(tail) || n.includes(text)).slice(0, 3);
    const what = close.length ? `close names: ${close.map((n) => `'${printable(n)}'`).join(", ")}`
      : `it has ${this.length} tensors, record.names gives all names`;
    throw this._located(new TensorNotFoundError(`not in this record; ${what}`), text);
  }

  _located(error, tensor = null) {
    return located(error, { path: this.path, tensor });
  }

  info(name) {
    return this._info(this._find(name));
  }

  _info(i) {
    const { tensors: t, dims, strides } = this._ix;
    const [code, bits, number, byteOffset] = [t.dtype(i), t.bits(i), t.payload(i), t.offset(i)];
    const shape = range(t.rank(i), (k) => exact(big(dims, t.dims(i) + k)));
    const step = (k) => exact(BigInt.asIntN(64, big(strides, t.strides(i) + k)));
    const empty = number === NONE;
    const count = empty ? 0 : product(shape);
    return {
      name: t.name(i), dtype: KINDS.get(code)?.name ?? `unknown_${code}`, code, bits, shape, count, byteOffset,
      strides: t.strides(i) === NONE ? null : range(t.rank(i), step),
      offset: empty ? null : this._start(number) + byteOffset,
      nbytes: bits || empty ? Math.ceil((count * bits) / 8) : this._nbytes(number),
      payload: empty ? null : number, digest: empty ? null : this._digest(number), module: this._module(t.parent(i)),
    };
  }

  tied(name) {
    const { payload } = this._ix.tensors;
    if (!this.#tied) {
      this.#tied = new Map([[NONE, []]]);
      this.names.forEach((one, i) => {
        if (!this.#tied.has(payload(i))) this.#tied.set(payload(i), []);
        if (payload(i) !== NONE) this.#tied.get(payload(i)).push(one);
      });
    }
    const users = this.#tied.get(payload(this._find(name)));
    return users.length > 1 ? users : [];
  }

  _module(i) {
    this.#modules[i] ??= this._ix.modules.name(i);
    return this.#modules[i];
  }

  /** Lets attributes have their modules' names before them, but not 100,000 of them one of a MiB. */
  _checkFullNames() {
    const { attributes, modules } = this._ix;
    let total = 0;
    for (let i = 0; i < attributes.n; i++) total += modules.size(attributes.parent(i));
    if (total <= 64 * this._header.indexSize) return;
    const what = `full names of attributes add up to ${total} bytes, more than 64 times the index`;
    throw this._located(new LimitError(what));
  }

  get modules() {
    const { modules: m, tensors, textAt } = this._ix;
    return new Map(range(m.n, (i) => {
      const last = m.end(i) < m.n ? m.tensor(m.end(i)) : tensors.n;
      return [this._module(i), {
        name: this._module(i), kind: [, , "list", "tuple", "object"][m.kind(i)] ?? "mapping",
        typeName: textAt(m.type(i), m.typeSize(i)), tensors: last - m.tensor(i),
        parent: i ? this._module(m.parent(i)) : null,
      }];
    }));
  }

  get attributes() {
    this._checkFullNames();
    return new Map(this._values(this._ix.attributes).map(({ parent, name, value }) =>
      [parent ? `${this._module(parent)}.${name}` : name, value]));
  }

  get metadata() {
    return new Map(this._values(this._ix.metadata).map(({ name, value }) => [name, value]));
  }

  _values(rows) {
    const texts = new Map(); // lists may share words, and words texts: each is made once
    return range(rows.n, (i) => {
      const words = [];
      eachWord(this._ix, rows, i, (from, k) => void words.push(this.#value(rows.type(i), from, k, texts)));
      const value = rows.form(i) ? words : words[0];
      return { parent: rows.parent(i), place: rows.place(i), name: rows.name(i), value };
    });
  }

  #value(type, from, k, texts) {
    const [low, high] = [from.low(k), from.high(k)];
    if (type < 2) return type ? low === 1 : null;
    if (type < 4) return exact(type === 2 ? BigInt.asIntN(64, big(from, k)) : big(from, k));
    if (type === 4) return new Float64Array(Uint32Array.of(low, high).buffer)[0];
    if (type === 5) {
      const span = `${low} ${high}`;
      if (!texts.has(span)) texts.set(span, this._ix.textAt(low, high));
      return texts.get(span);
    }
    const nbytes = low === NONE ? 0 : this._nbytes(low);
    return { nbytes, read: ({ signal } = {}) => this._payload(low, 0, nbytes, signal) };
  }

  tree() {
    const { modules: m, tensors: t, attributes, textAt } = this._ix;
    const made = range(m.n, () => []);
    const put = (rows, i, value) => {
      const key = textAt(rows.start(i) + rows.size(i) - rows.key(i), rows.key(i));
      made[rows.parent(i)][rows.place(i)] = [key, value];
    };
    for (let i = 0; i < t.n; i++) put(t, i, this._info(i));
    for (const { parent, place, name, value } of this._values(attributes)) made[parent][place] = [name, value];
    for (let i = m.n - 1; i >= 0; i--) { // children come after their parents
      const list = m.kind(i) === 2 || (m.kind(i) === 3 && !m.typeSize(i));
      made[i] = list ? made[i].map(([, value]) => value) : new Map(made[i]);
      if (i) put(m, i, made[i]);
    }
    return made[0];
  }

  get nbytes() {
    const { offset, nbytes, n } = this._ix.payloads;
    const first = (i) => this._room || !i || offset(i) !== offset(i - 1);
    return range(n, (i) => (first(i) ? nbytes(i) : 0)).reduce((a, b) => a + b, 0);
  }

  _nbytes(number) {
    return this._ix.payloads.nbytes(number);
  }

  _start(number) {
    return this._base + this._header.payloadOffset + this._ix.payloads.offset(number);
  }

  _digest(number) {
    const known = this._ix.digestKind && !this._room; // what a hollow record was filled with nobody has hashed
    return known ? big(this._ix.payloads, number) : null;
  }

  async _payload(number, lo, hi, signal) {
    try {
      checkGoing(signal);
      if (lo === hi) return new Uint8Array(0);
      if (this._room) return this._room(number).subarray(lo, hi);
      return await this._place.read(this._start(number) + lo, this._start(number) + hi, signal);
    } catch (error) {
      throw this._located(error);
    }
  }

  async tensor(name, options) {
    return this.#part(this.info(name), 0, Infinity, options);
  }

  async array(name, options) {
    const { arrayOf } = await import("./elements.js");
    return arrayOf(this, name, options);
  }

  async slice(name, start = 0, stop = Infinity, { signal } = {}) {
    const info = this.info(name);
    const what = "a tensor of rank 0 has no slices";
    if (!info.shape.length) throw this._located(new UnsupportedError(what), name);
    const rows = Number(info.shape[0]);
    const at = (n) => Math.min(rows, Math.max(0, n < 0 ? n + rows : n));
    const [first, end] = [start, stop].map((n) => at(Math.trunc(n) || 0)); // NaN is 0
    return this.#part(info, first, Math.max(first, end), { signal });
  }

  /** Returns items [start, stop) of the first axis. */
  async #part(all, start, stop, { signal, verify } = {}) {
    const { name, bits, strides, payload, shape: [rows = 1, ...rest] } = all;
    const whole = start === 0 && stop >= rows;
    const info = whole ? all : { ...all, shape: [stop - start, ...rest] };
    info.count = payload === null ? 0 : product(info.shape);
    try {
      if (!info.count) return new Tensor(info, new Uint8Array(0));
      let get = async (lo, hi) => this._payload(payload, lo, hi, signal);
      if (verify) get = await (await import("./contents.js")).verified(this, payload, get);
      if (strides || bits % 8 || !bits) {
        return await (await import("./elements.js")).read(info, get, all, start, this._nbytes(payload));
      }
      const row = (product(rest) * bits) / 8;
      return new Tensor(info, await get(row * start, row * start + (info.count * bits) / 8));
    } catch (error) {
      throw this._located(error, name);
    }
  }

  async verify(options) {
    return (await import("./contents.js")).verify(this, options);
  }

  async contentDigest(options) {
    return (await import("./contents.js")).contentDigest(this, options);
  }

  async uploadTo(device, names, options) {
    return (await import("./upload.js")).uploadTo(this, device, names, options);
  }

  async hollow(options) {
    return (await import("./hollow.js")).hollowOf(this, options);
  }

  async close() {
    await this._place.close?.();
  }
}

/** Elements in C order; elements.js has those that do not lie so. */
export class Tensor {
  constructor({ name, dtype, code, bits, shape, strides, count }, octets, base = 0) {
    const kind = KINDS.get(code);
    const packed = kind !== undefined && bits > 0 && bits < 8;
    const Kind = kind && !packed ? kind.Array : Uint8Array;
    const item = Kind.BYTES_PER_ELEMENT;
    if (octets.byteOffset % item) octets = octets.slice();
    this.data = new Kind(octets.buffer, octets.byteOffset, octets.length / item);
    this.components = bits >= 8 ? bits / 8 / item : 1;
    Object.assign(this, { name, dtype, code, bits, shape, strides, base, count, packed });
  }

  get nbytes() {
    return this.data.byteLength;
  }

  contiguous() {
    return this;
  }

  unpack() {
    return this.packed ? new (KINDS.get(this.code).Array)(0) : this.data; // what is packed here is empty
  }

  strings() {
    need(this.code === 64, `${this.dtype} has no strings`, UnsupportedError);
    return [];
  }
}
