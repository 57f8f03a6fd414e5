// SPDX-License-Identifier: 0BSD
/** Record and Tensor; zcrecord.js adds the methods that load other modules. */

import { KINDS, NONE, LimitError, RecordError, TensorNotFoundError, UnsupportedError, big, checkCancelled, exact,
  printable, range } from "./format.js";

export function located(error, where) {
  if (error instanceof RangeError) {
    error = new LimitError(`this machine has no room for it: ${error.message}; save it in parts`, { cause: error });
  }
  return error instanceof RecordError ? error.located(where) : error;
}

export class Record {
  #names = null;
  #numbers = null;

  constructor({ header, sealed, base, ix, source, digest = ix.digestKind ? "xxh3" : "none" }) {
    const { indexCrc: _, ...rest } = header;
    const layout = { ...rest, sealed, digest, offset: base };
    Object.assign(this, { path: source.path, layout, length: ix.tensors.n, nbytes: ix.nbytes, _header: header,
      _base: base, _ix: ix, _source: source });
  }

  get names() {
    return (this.#names ??= Object.freeze(range(this.length, this._ix.tensors.name)));
  }

  has(name) {
    this.#numbers ??= new Map(this.names.map((each, i) => [each, i]));
    return this.#numbers.has(name);
  }

  /** Returns a tensor's number. */
  _find(name) {
    if (this.has(name)) return this.#numbers.get(name);
    const text = String(name);
    const tail = text.split(".").pop();
    const close = this.names.filter((n) => n.endsWith(tail) || n.includes(text)).slice(0, 3).map(printable);
    const hint = close.length ? `close names: '${close.join("', '")}'` : `record.names has all ${this.length}`;
    throw this._located(new TensorNotFoundError(`not in this record; ${hint}`), text);
  }

  _located(error, tensor) {
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
    const [empty, strided] = [number === NONE, t.strides(i) !== NONE];
    const count = empty ? 0 : shape.reduce((a, b) => a * Number(b), 1);
    return {
      name: t.name(i), dtype: KINDS.get(code)?.name ?? `unknown_${code}`, code, bits, shape, count, byteOffset,
      strides: strided ? range(t.rank(i), step) : null,
      offset: empty ? null : this._start(number) + byteOffset,
      nbytes: empty ? 0 : strided ? (count * bits) / 8 : this._nbytes(number),
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
      checkCancelled(signal);
      const start = this._start(number);
      return lo === hi ? new Uint8Array(0) : await this._source.read(start + lo, start + hi, signal, onProgress);
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
    await this._source.close?.();
  }
}

/** Elements in C order; tensors.js has all others. */
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
