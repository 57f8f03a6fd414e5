// SPDX-License-Identifier: 0BSD
/** Strided tensors, tensors of packed elements and of strings; slices, and elements as arrays. */

import { KINDS, LimitError, UnsupportedError, need, range } from "./format.js";
import { allocate } from "./pieces.js";
import { Tensor } from "./record.js";

const product = (shape) => shape.reduce((a, b) => a * Number(b), 1);

/** Returns the tensor of `info`; `get` reads a range of its payload. */
export function _read(record, info, get) {
  return readItems(record, info, get, 0, Infinity);
}

export async function slice(record, name, start = 0, stop = Infinity, { signal } = {}) {
  const info = record.info(name);
  const what = "a tensor of rank 0 has no slices";
  if (!info.shape.length) throw record._located(new UnsupportedError(what), name);
  const rows = Number(info.shape[0]);
  const at = (n) => Math.min(rows, Math.max(0, n < 0 ? n + rows : n));
  const [first, end] = [start, stop].map((n) => at(Math.trunc(n) || 0)); // NaN is 0
  try {
    const get = (lo, hi) => record._payload(info.payload, lo, hi, signal);
    return await readItems(record, info, get, first, Math.max(first, end));
  } catch (error) {
    throw record._located(error, name);
  }
}

/** Returns items [start, stop) of the first axis. */
async function readItems(record, all, get, start, stop) {
  const { bits, code, strides, payload, shape: [rows = 1, ...rest] } = all;
  const info = start === 0 && stop >= rows ? all : { ...all, shape: [stop - start, ...rest] };
  info.count = payload === null ? 0 : product(info.shape);
  if (!info.count) return new (code === 64 ? StringTensor : bits % 8 ? PackedTensor : Tensor)(info, new Uint8Array(0));
  if (code === 64) return strings(info, get, all, start, record._nbytes(payload));
  if (strides) return strided(info, get, start);
  if (bits % 8) return packed(info, get, all, start);
  const row = (product(rest) * bits) / 8;
  return new Tensor(info, await get(row * start, row * start + (info.count * bits) / 8));
}

/** Returns a tensor's elements in C order, packed ones one to an item. */
export async function array(record, name, options) {
  const { code, bits } = record.info(name);
  const what = code === 64 ? "strings are no array; use (await record.tensor(name)).strings()"
    : `dtype code ${code} is not known; elements of ${bits} bits are bytes: (await tensor(name)).contiguous().data`;
  if (code === 64 || !KINDS.has(code)) throw new UnsupportedError(what, { path: record.path, tensor: name });
  const tensor = await record.tensor(name, options);
  try {
    return tensor.packed ? tensor.unpack() : tensor.contiguous().data;
  } catch (error) {
    throw record._located(error, name);
  }
}

class StridedTensor extends Tensor {
  constructor(info, octets, base) {
    super(info, octets);
    this.base = base;
  }

  contiguous() {
    const { base, bits, count, data } = this;
    // As integers: a float that signals is no NaN that signals any more once it was a number.
    const Kind = { 1: Uint8Array, 2: Uint16Array }[data.BYTES_PER_ELEMENT] ?? Uint32Array;
    const from = new Kind(data.buffer, data.byteOffset, data.byteLength / Kind.BYTES_PER_ELEMENT);
    const each = bits / 8 / Kind.BYTES_PER_ELEMENT;
    const out = allocate(count * each, Kind);
    let to = 0;
    eachRow(this, (first, step, length) => {
      for (let k = 0, at = (base + first) * each; k < length; k++, at += step * each) {
        for (let c = 0; c < each; c++) out[to++] = from[at + c];
      }
    });
    return new Tensor({ ...this, strides: null }, new Uint8Array(out.buffer));
  }
}

/** Calls `visit` with the place of the first element of each row along the last axis, in C order, the step to the next
 *  element and their number. Leaves axes of one item out: they take no step, and their strides may be past 2^53. */
export function eachRow({ shape, strides }, visit) {
  const axes = range(shape.length, (k) => k).filter((k) => shape[k] > 1);
  const [dims, steps] = [shape, strides].map((all) => axes.map((k) => Number(all[k])));
  const [length, step] = [dims.pop() ?? 1, steps.pop() ?? 0];
  const index = dims.map(() => 0);
  for (let at = 0, left = product(dims); left > 0; left--) {
    visit(at, step, length);
    for (let axis = dims.length - 1; axis >= 0; axis--) {
      at += steps[axis];
      if (++index[axis] < dims[axis]) break;
      at -= steps[axis] * dims[axis];
      index[axis] = 0;
    }
  }
}

/** Reads the bytes that strides reach, of items from `start` on. */
async function strided(info, get, start) {
  const { shape, strides, bits, byteOffset } = info;
  const item = bits / 8;
  const first = byteOffset + (shape.length ? start * Number(strides[0]) * item : 0);
  let [low, high] = [0, 0];
  shape.forEach((dim, axis) => {
    const reach = dim > 1 ? (Number(dim) - 1) * Number(strides[axis]) : 0;
    low += Math.min(0, reach);
    high += Math.max(0, reach);
  });
  return new StridedTensor(info, await get(first + low * item, first + (high + 1) * item), 0 - low); // not -0
}

/** Elements narrower than a byte; those of an unknown type cannot be unpacked. */
class PackedTensor extends Tensor {
  constructor(info, octets) {
    super(info, octets, Uint8Array);
    this.packed = KINDS.has(info.code);
  }

  unpack() {
    const { bits, data, code } = this;
    if (!this.packed) return data; // of an unknown type
    const out = allocate(this.count, KINDS.get(code).Array);
    const shift = out instanceof Int8Array ? 32 - bits : 0;
    for (let i = 0, bit = 0; i < out.length; i++, bit += bits) {
      const at = Math.floor(bit / 8); // `>>` would wrap beyond 2^32
      const word = data[at] | (data[at + 1] << 8);
      out[i] = (((word >>> (bit % 8)) & ((1 << bits) - 1)) << shift) >> shift;
    }
    return out;
  }
}

async function packed(info, get, { shape }, start) {
  const most = "more than 2^53 bits are not read by slices";
  need(Number.isSafeInteger(product(shape) * info.bits), most, LimitError);
  const first = product(shape.slice(1)) * start * info.bits;
  const [skip, count] = [first % 8, info.count * info.bits];
  const octets = await get(Math.floor(first / 8), Math.ceil((first + count) / 8));
  const whole = info.count === product(shape);
  return new PackedTensor(info, skip || (count % 8 && !whole) ? shifted(octets, skip, count) : octets);
}

/** Returns bits [skip, skip + count), with zeros after the last. */
function shifted(octets, skip, count) {
  const out = new Uint8Array(Math.ceil(count / 8));
  for (let i = 0; i < out.length; i++) out[i] = (octets[i] | (octets[i + 1] << 8)) >>> skip;
  if (count % 8) out[out.length - 1] &= (1 << (count % 8)) - 1;
  return out;
}

class StringTensor extends Tensor {
  strings({ decoded = true } = {}) {
    const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
    return Array.from({ length: this.count }, (_, i) => {
      const octets = this.data.subarray(this._ends[i], this._ends[i + 1]);
      if (!decoded) return octets;
      return decoder.decode(octets.buffer instanceof ArrayBuffer ? octets : octets.slice()); // it refuses shared memory
    });
  }
}

/** Reads strings; the table of their ends, at the end of the payload, is checked first (R71). */
async function strings(info, get, { shape }, start, nbytes) {
  const all = product(shape);
  const room = nbytes - 8 * (all + 1);
  const whole = info.count === all;
  const first = product(shape.slice(1)) * start;
  const row = await get(room + 8 * first, room + 8 * (first + info.count + 1));
  const words = new Uint32Array(row.slice().buffer);
  const ends = Float64Array.from({ length: info.count + 1 }, (_, i) => words[2 * i + 1] * 2 ** 32 + words[2 * i]);
  const end = ends[info.count];
  let fine = whole ? ends[0] === 0 && end <= room && room - end < 8 : end <= room;
  for (let i = 0; i < info.count; i++) fine &&= ends[i] <= ends[i + 1];
  need(fine, "the ends of its strings do not ascend from 0 to the end of their bytes");
  const octets = await get(ends[0], whole ? room : end);
  need(!whole || !octets.subarray(end).some(Boolean), "the padding after its strings is not zero");
  const tensor = new StringTensor(info, octets.subarray(0, end - ends[0]));
  return Object.defineProperty(tensor, "_ends", { value: ends.map((at) => at - ends[0]) });
}
