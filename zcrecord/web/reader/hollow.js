// SPDX-License-Identifier: 0BSD
/**
 * Hollow records: every name, shape, dtype and module of a record without its weights, which are filled one by one; the
 * same states and errors as in Python. Tied tensors are one constant: filling one fills all. Different views of one
 * payload are filled one by one, unless one of them covers all of it.
 */

import { FillError, UnsupportedError, checkCancelled, need, printable, range } from "./format.js";
import { checkApart, payloadRanges } from "./payloads.js";
import { readPieces } from "./pieces.js";
import { Record, Tensor } from "./record.js";
import { Writer, fills, scatter, sinkTarget } from "./writer.js";

/** Returns a record without its weights; fetches attributes' bytes, no tensor's. See zcrecord.d.ts. */
export async function hollow(record, { sink = null, signal } = {}) {
  need(sink === null || typeof sink === "function", "sink is a function of a name and a TensorInfo", UnsupportedError);
  const rooms = new Map();
  const ranges = payloadRanges(record);
  checkApart(record, ranges.reduce((sum, { start, end, numbers }) => sum + (end - start) * numbers.length, 0), ranges);
  const weights = new Set(record.names.map((name) => record.info(name).payload));
  for (let number = 0; sink === null && number < record._ix.payloads.n; number++) {
    if (!weights.has(number)) rooms.set(number, await record._payload(number, 0, record._nbytes(number), signal));
  }
  const made = new HollowRecord(record, sink, rooms);
  if (sink) checkApart(record, made.nbytes, ranges);
  return made;
}

/** Returns true if strides reach each byte once: C order but for the order and direction of axes. */
function reachesEachOnce({ shape, strides }) {
  if (!strides) return true;
  const axes = shape.map((dim, i) => [Math.abs(Number(strides[i])), dim]).filter(([, dim]) => dim > 1);
  let step = 1;
  return axes.sort((a, b) => a[0] - b[0]).every(([stride, dim]) => {
    const fits = stride === step;
    step *= dim;
    return fits;
  });
}

/** A record over the memory that was filled: `room(number)` is a payload's bytes; there are no digests. */
class FilledRecord extends Record {
  constructor({ path, layout: { sealed }, _header: header, _base: base, _ix: ix }, room) {
    super({ header, sealed, base, ix, source: { path }, digest: "none" });
    this._room = room;
    this.nbytes = range(ix.payloads.n, ix.payloads.nbytes).reduce((a, b) => a + b, 0);
  }

  async _payload(number, lo, hi, signal) {
    try {
      checkCancelled(signal);
      return lo === hi ? new Uint8Array(0) : this._room(number).subarray(lo, hi);
    } catch (error) {
      throw this._located(error);
    }
  }
}

/** Yields a payload's bytes, in one request; each chunk is valid until the next. */
async function* piecesOf(source, number, signal) {
  const [room, start] = [source._room, source._start(number)];
  try {
    yield* room ? [room(number)] : readPieces(source._source, start, start + source._nbytes(number), signal);
  } catch (error) {
    throw source._located(error);
  }
}

class HollowRecord {
  #record;
  #sink;
  #constants = new Map(); // by name
  #byPayload = new Map();
  #begun = new Set();
  #results = new Map();
  #filledNames = new Set(); // names under which constants were filled
  #rooms; // memory by payload
  #ended = null;

  constructor(record, sink, rooms) {
    this.#record = record;
    this.#sink = sink;
    this.#rooms = rooms;
    const known = new Map();
    for (const name of record.names) {
      const info = record.info(name);
      const key = info.payload === null ? name
        : JSON.stringify([info.payload, info.byteOffset, info.code, info.bits, info.shape, info.strides], (_, v) =>
          (typeof v === "bigint" ? String(v) : v));
      let constant = known.get(key);
      if (!constant) {
        const whole = info.payload !== null && info.nbytes === record._nbytes(info.payload) && reachesEachOnce(info);
        constant = { info, names: [], whole };
        known.set(key, constant);
        if (info.payload !== null) this.#at(info.payload).push(constant);
      }
      constant.names.push(name);
      this.#constants.set(name, constant);
    }
  }

  #at(payload) {
    if (!this.#byPayload.has(payload)) this.#byPayload.set(payload, []);
    return this.#byPayload.get(payload);
  }

  get names() {
    return this.#record.names;
  }
  modules() {
    return this.#record.modules();
  }
  attributes() {
    return this.#record.attributes();
  }
  metadata() {
    return this.#record.metadata();
  }
  info(name) {
    return this.#record.info(name);
  }

  #isFilled(constant) {
    return this.#results.has(constant) || !constant.info.nbytes || this.#ended === "sealed";
  }

  /** "declared", "filling" once something was begun, "filled" when nothing is missing; "sealed" or "aborted". */
  get state() {
    if (this.#ended) return this.#ended;
    if (!this.missing().length) return "filled";
    return this.#results.size || this.#begun.size ? "filling" : "declared";
  }

  missing() {
    return this.names.filter((name) => !this.#isFilled(this.#constants.get(name)));
  }

  get nbytes() {
    return this.#sum(() => true);
  }
  get nbytesFilled() {
    return this.#sum((constant) => this.#isFilled(constant));
  }
  #sum(counts) {
    return [...new Set(this.#constants.values())].filter(counts).reduce((sum, { info }) => sum + info.nbytes, 0);
  }

  #fault(what, tensor, Kind = FillError) {
    return new Kind(what, { path: this.#record.path, tensor });
  }

  #checkOpen(tensor = null) {
    const how = this.#ended === "sealed" ? "is sealed" : "was given up";
    if (this.#ended) throw this.#fault(`the hollow record ${how}; make another`, tensor);
  }

  #begin(constant, name, beside) {
    this.#checkOpen(name);
    if (this.#results.has(constant)) {
      const also = this.#filledNames.has(name) ? "" : ", with a tensor whose bytes it shares";
      throw this.#fault(`is filled already${also}; each constant is filled once`, name);
    }
    const sharing = (this.#byPayload.get(constant.info.payload) ?? []).filter((other) =>
      !this.#sink && (other.whole || constant.whole) && !beside.includes(other));
    if ([constant, ...sharing].some((one) => this.#begun.has(one))) {
      throw this.#fault("is being filled by another writer", name);
    }
    this.#begun.add(constant);
  }

  /** Begins to fill one constant chunk by chunk; returns { write(chunk), close(), abort() }. */
  async open(name) {
    const record = this.#record;
    if (!this.#constants.has(name)) record._find(name);
    const constant = this.#constants.get(name);
    this.#begin(constant, name, []);
    try {
      const target = this.#sink && constant.info.nbytes
        ? sinkTarget(await this.#sink(constant.names[0], constant.info), constant.info) : this.#memoryTarget(constant);
      return new Writer(constant, name, target, {
        check: () => this.#checkOpen(name), done: (result) => this.#note(constant, name, result),
        gone: () => this.#begun.delete(constant), path: record.path,
      });
    } catch (error) {
      this.#begun.delete(constant);
      throw record._located(error, name);
    }
  }

  #note(constant, name, result) {
    this.#begun.delete(constant);
    this.#checkOpen(constant.names[0]);
    if (!constant.info.nbytes) return;
    this.#results.set(constant, result);
    this.#filledNames.add(name);
    if (this.#sink || !constant.whole) return;
    for (const other of this.#byPayload.get(constant.info.payload)) {
      if (!this.#results.has(other)) this.#results.set(other, null);
    }
  }

  #room(payload) {
    if (!this.#rooms.has(payload)) this.#rooms.set(payload, new Uint8Array(this.#record._nbytes(payload)));
    return this.#rooms.get(payload);
  }

  /** Returns the target that puts a constant's bytes into memory; strided elements once all of them have come. */
  #memoryTarget({ info }) {
    if (!info.nbytes) return { write() {}, close: () => null, abort() {} };
    const room = this.#room(info.payload);
    if (!info.strides) return fills(room, () => null);
    const gathered = new Uint8Array(info.nbytes);
    return fills(gathered, () => scatter(gathered, info, room));
  }

  /** Fills one constant at once from a typed array, an ArrayBuffer, or a Tensor of that shape and dtype; copies it. */
  async set(name, data) {
    const writer = await this.open(name);
    await writer.take(data);
    await writer.close();
  }

  /** Fills missing constants from a Record, a Map, or an (async) iterable of [name, data or chunks of it]. */
  async stream(source, { signal } = {}) {
    if (source instanceof Record || source instanceof Map) {
      for (const name of this.missing()) {
        if (!source.has(name) || this.#isTied(name)) continue;
        checkCancelled(signal);
        if (source instanceof Record) await this.#copy(name, source, signal);
        else await this.#take(name, source.get(name), signal);
      }
      return;
    }
    const many = typeof source !== "string" && (source?.[Symbol.asyncIterator] ?? source?.[Symbol.iterator]);
    const what = "a source is a Record, a Map, or an iterable of [name, data]; open a path or URL first";
    need(many, what, UnsupportedError);
    for await (const [name, data] of source) {
      checkCancelled(signal);
      if (!this.#isTied(name)) await this.#take(name, data, signal);
    }
  }

  #isTied(name) {
    const constant = this.#constants.get(name);
    return this.#results.has(constant) && !this.#filledNames.has(name);
  }

  async #take(name, data, signal) {
    const iterable = data?.[Symbol.asyncIterator] ?? data?.[Symbol.iterator];
    if (ArrayBuffer.isView(data) || data instanceof ArrayBuffer || data instanceof Tensor || !iterable) {
      await this.set(name, data);
      return;
    }
    const writer = await this.open(name);
    try {
      for await (const chunk of data) {
        checkCancelled(signal);
        await writer.write(chunk);
      }
    } catch (error) {
      writer.abort();
      throw error;
    }
    await writer.close();
  }

  /** Copies a tensor piece by piece, but for one that strides scatter. */
  async #copy(name, source, signal) {
    const [info, mine] = [source.info(name), this.info(name)];
    const alike = info.code === mine.code && info.bits === mine.bits && info.shape.join() === mine.shape.join();
    if (info.strides || !alike) {
      await this.set(name, (await source.tensor(name, { signal })).contiguous());
      return;
    }
    const writer = await this.open(name);
    try {
      const lasts = writer._.target.copies || source._room || source._source.octets;
      const chunks = piecesOf(source, info.payload, signal);
      for await (const chunk of chunks) await writer.write(lasts ? chunk : chunk.slice());
    } catch (error) {
      writer.abort();
      throw error;
    }
    await writer.close();
  }

  /** Returns a Record over the memory that was filled; with a sink a Map from names to its results. */
  seal() {
    this.#checkOpen();
    const missing = this.missing();
    if (missing.length) {
      const more = missing.length > 10 ? ` and ${missing.length - 10} more` : "";
      const shown = missing.slice(0, 10).map((name) => `'${printable(name)}'`).join(", ");
      const what = `${missing.length} of ${this.names.length} tensors are missing: ${shown}${more}`;
      throw this.#fault(`${what}; fill them first`);
    }
    const [busy] = this.#begun;
    if (busy) throw this.#fault("is being filled still; close its writer", busy.names[0]);
    this.#ended = "sealed";
    const results = this.#results;
    this.#results = new Map();
    if (this.#sink) {
      return new Map(this.names.map((name) => [name, results.get(this.#constants.get(name)) ?? null]));
    }
    return new FilledRecord(this.#record, (number) => this.#room(number));
  }

  /** Gives up: drops the filled memory; fills that go on fail. After `seal` it does nothing. */
  abort() {
    if (this.#ended) return;
    this.#ended = "aborted";
    this.#results = new Map();
    this.#rooms = new Map();
  }
}
