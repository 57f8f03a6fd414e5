// SPDX-License-Identifier: 0BSD
/** Reads zcrecord archives in browsers and Node 20+; zcrecord.d.ts documents it. Loads other modules when needed. */

import { END, KINDS, NONE, LimitError, RecordError, TensorNotFoundError, UnsupportedError, big, checkGoing, checkIndex,
  crc32, decodeHeader, decodeIndex, exact, missing, need, printable, range, rule } from "./format.js";
import { FIRST, placeOf } from "./places.js";

export { FillError, FormatError, IntegrityError, LimitError, LoadCancelledError, ProducerError, RecordError,
  SourceError, SourceNotFoundError, TensorNotFoundError, UnsupportedError, VersionError } from "./format.js";

export async function open(source, options = {}) {
  const { signal, verify = "index", embedded } = options;
  need(["index", "full"].includes(verify), `verify is "index" or "full", not ${verify}`, UnsupportedError);
  need(new Uint8Array(Uint16Array.of(1).buffer)[0], "this machine is not little-endian", UnsupportedError);
  checkGoing(signal);
  const place = await placeOf(source, options);
  try {
    const { index, ...found } = await locate(place, embedded, signal);
    rule(17, crc32(index) === found.header.indexCrc, "index");
    const ix = decodeIndex(index);
    checkIndex(ix, found.header);
    const record = new Record({ ...found, ix, place });
    if (verify === "full") await record.verify(options);
    return record;
  } catch (error) {
    await place.close?.();
    const told = error.rule && await import("./rules.js").then(({ explain }) => explain(error), () => null);
    throw located(told || error, { path: place.path });
  }
}

function located(error, where) {
  const what = `this machine has no room for it: ${error.message}; save it in parts`;
  if (error instanceof RangeError) error = new LimitError(what, { cause: error });
  return error instanceof RecordError ? error.located(where) : error;
}

/** Finds header, start and index (R8, R14). */
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
  need(size < 2 ** 53, "is larger than 2^53 bytes", UnsupportedError);
  rule(14, size >= END, "the file", size);
  if (embedded) [base, size] = await (await import("./embedded.js").catch(missing)).find(embedded, get, size);
  const first = await get(base, base + END);
  const header = decodeHeader(first, "header");
  const end = base + size;
  rule(14, !header || header.archiveSize === size, "header", size);
  if (!header?.front) await get(header ? base + header.indexOffset : Math.max(base, end - FIRST), end);
  const last = await get(end - END, end);
  const trailer = decodeHeader(last, "trailer");
  rule(8, trailer && (header ? String(first) === String(last) : first[9] === last[9]), "trailer");
  rule(14, trailer.archiveSize === size, "trailer", size);
  const start = base + trailer.indexOffset;
  let index = await get(start, start + trailer.indexSize);
  // Copied where it is unaligned, shared with threads, or a part of more, which it would keep.
  if (index.byteOffset % 8 || !place.octets || !(index.buffer instanceof ArrayBuffer)) index = index.slice();
  return { header: trailer, sealed: header !== null, base, index };
}

export class Record {
  #names = null;
  #numbers = null;

  constructor({ header, sealed, base, ix, place, digest = ix.digestKind ? "xxh3" : "none" }) {
    const { indexCrc: _, ...rest } = header;
    const layout = { ...rest, sealed, digest, offset: base };
    Object.assign(this, { path: place.path, layout, length: ix.tensors.n, nbytes: ix.nbytes, _header: header,
      _base: base, _ix: ix, _place: place });
  }

  get names() {
    return (this.#names ??= Object.freeze(range(this.length, this._ix.tensors.name)));
  }

  has(name) {
    return this._search(name) >= 0;
  }

  /** Returns a tensor's number, or -1. */
  _search(name) {
    this.#numbers ??= new Map(this.names.map((each, i) => [each, i]));
    return this.#numbers.get(name) ?? -1;
  }

  _find(name) {
    const i = this._search(name);
    if (i >= 0) return i;
    const text = String(name);
    const tail = text.split(".").pop();
    const close = this.names.filter((n) => n.endsWith(tail) || n.includes(text)).slice(0, 3).map(printable);
    const what = close.length ? `close names: '${close.join("', '")}'`
      : `record.names has all ${this.length}`;
    throw this._located(new TensorNotFoundError(`not in this record; ${what}`), text);
  }

  _located(error, tensor = null) {
    return located(error, { path: this.path, tensor });
  }

  info(name) {
    return this._info(this._find(name));
  }

  _info(i) {
    const { tensors: t, modules, dims, strides } = this._ix;
    const [code, bits, number, byteOffset] = [t.dtype(i), t.bits(i), t.payload(i), t.offset(i)];
    const shape = range(t.rank(i), (k) => exact(big(dims, t.dims(i) + k)));
    const step = (k) => exact(BigInt.asIntN(64, big(strides, t.strides(i) + k)));
    const empty = number === NONE;
    const count = empty ? 0 : shape.reduce((a, b) => a * Number(b), 1);
    return {
      name: t.name(i), dtype: KINDS.get(code)?.name ?? `unknown_${code}`, code, bits, shape, count, byteOffset,
      strides: t.strides(i) === NONE ? null : range(t.rank(i), step),
      offset: empty ? null : this._start(number) + byteOffset,
      nbytes: bits || empty ? Math.ceil((count * bits) / 8) : this._nbytes(number),
      payload: empty ? null : number, digest: empty ? null : this._digest(number), module: modules.name(t.parent(i)),
    };
  }

  _nbytes(number) {
    return this._ix.payloads.nbytes(number);
  }

  _start(number) {
    return this._base + this._header.payloadOffset + this._ix.payloads.offset(number);
  }

  _digest(number) {
    return this.layout.digest === "none" ? null : big(this._ix.payloads, number);
  }

  async _payload(number, lo, hi, signal, onProgress) {
    try {
      checkGoing(signal);
      const start = this._start(number);
      return lo === hi ? new Uint8Array(0) : await this._place.read(start + lo, start + hi, signal, onProgress);
    } catch (error) {
      throw this._located(error);
    }
  }

  async tensor(name, { signal, verify, onProgress } = {}) {
    const info = this.info(name);
    const { bits, payload, nbytes } = info;
    try {
      let get = async (lo, hi) => {
        const octets = await this._payload(payload, lo, hi, signal, onProgress);
        onProgress?.(hi - lo, hi - lo);
        return octets;
      };
      if (verify && nbytes) get = await this._verified(payload, get);
      if (bits && bits % 8 === 0 && !info.strides) return new Tensor(info, await get(0, nbytes));
      return await this._read(info, get);
    } catch (error) {
      throw this._located(error, name);
    }
  }

  async close() {
    await this._place.close?.();
  }
}

function later(load, ...names) {
  for (const name of names) {
    Record.prototype[name] = async function ask(...given) {
      try {
        return await (await load().catch(missing))[name](this, ...given);
      } catch (error) {
        throw this._located(error);
      }
    };
  }
}
later(() => import("./structure.js"), "modules", "attributes", "metadata", "tree", "tied");
later(() => import("./elements.js"), "array", "slice", "_read");
later(() => import("./contents.js"), "verify", "contentDigest", "_verified");
later(() => import("./upload.js"), "uploadTo");
later(() => import("./hollow.js"), "hollow");

/** Elements in C order; elements.js has all others. */
export class Tensor {
  constructor({ name, dtype, code, bits, shape, strides, count }, octets, Kind = KINDS.get(code)?.Array ?? Uint8Array) {
    const item = Kind.BYTES_PER_ELEMENT;
    if (octets.byteOffset % item) octets = octets.slice();
    const data = new Kind(octets.buffer, octets.byteOffset, octets.length / item);
    const components = bits >= 8 ? bits / 8 / item : 1;
    Object.assign(this, { name, dtype, code, bits, shape: shape.map(Number), strides, base: 0, count, packed: false,
      components, data, nbytes: octets.length });
  }

  contiguous() {
    return this;
  }

  unpack() {
    return this.data;
  }

  strings() {
    throw new UnsupportedError(`${this.dtype} has no strings`);
  }
}
