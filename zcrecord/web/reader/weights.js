// SPDX-License-Identifier: 0BSD
/** Payloads of an archive one after the other, and a Blob of them that holds none: bytes are read when asked for. */

import { Xxh3, damaged } from "./verify.js";
import { checkCancelled } from "./format.js";
import { payloadRanges, streamPayloads } from "./payloads.js";
import { allocate, readPieces } from "./pieces.js";

/** The payloads with these numbers in file order, each once; `failure` is the first error of a read. */
export class Weights {
  #record;
  #options;
  #ranges;
  #places = new Map(); // by payload
  failure = null;
  nbytes = 0;

  constructor(record, numbers, options) {
    [this.#record, this.#options] = [record, options];
    this.#ranges = payloadRanges(record, numbers).map((range) => {
      const at = this.nbytes;
      for (const number of range.numbers) this.#places.set(number, at);
      this.nbytes += range.end - range.start;
      return { ...range, at };
    });
  }

  /** Returns the first byte of a payload. */
  placeOf(number) {
    return this.#places.get(number);
  }

  blob() {
    return new RangeBlob(this, 0, this.nbytes);
  }

  /** Returns all bytes: a few requests at a time, each for payloads that lie near each other. */
  async all() {
    const out = allocate(this.nbytes);
    const hashes = new Map();
    const take = (range, from, chunk) => {
      out.set(chunk, range.at + from);
      if (from === 0) hashes.set(range, this.#hash(range, 0, range.end - range.start));
      hashes.get(range)?.update(chunk);
    };
    try {
      await streamPayloads(this.#record, this.#ranges, take, this.#options);
      for (const [range, hash] of hashes) this.#check(range, hash);
    } catch (error) {
      throw this.#failed(error);
    }
    return out;
  }

  /** Yields bytes [lo, hi), each chunk valid until the next; each payload in them is a request of its own. */
  async *pieces(lo, hi) {
    const first = this.#ranges.findLastIndex(({ at }) => at <= lo);
    try {
      for (const range of this.#ranges.slice(first)) {
        const [from, to] = [lo, hi].map((place) => Math.min(range.end - range.start, Math.max(0, place - range.at)));
        if (from === to) break;
        const hash = this.#hash(range, from, to);
        for await (const chunk of this.#read(range, from, to)) {
          hash?.update(chunk);
          yield chunk;
        }
        this.#check(range, hash);
      }
    } catch (error) {
      throw this.#failed(error);
    }
  }

  #read({ start, numbers: [number] }, from, to) {
    const { signal } = this.#options;
    checkCancelled(signal);
    const { _room: room, _source: source } = this.#record;
    return room ? [room(number).subarray(from, to)] : readPieces(source, start + from, start + to, signal);
  }

  /** Returns a hash for bytes [from, to) of a payload if they are to be verified: those of a part cannot be. */
  #hash({ start, end, numbers: [number] }, from, to) {
    const whole = from === 0 && to === end - start;
    return whole && this.#options.verify && this.#record._digest(number) !== null ? new Xxh3(to) : null;
  }

  #check({ numbers: [number] }, hash) {
    if (hash && hash.digest() !== this.#record._digest(number)) throw damaged(this.#record, number);
  }

  #failed(error) {
    return (this.failure ??= this.#record._located(error));
  }
}

/** A Blob of bytes [lo, hi) of weights. It has no bytes of its own, so a copy in a worker is empty. */
class RangeBlob extends Blob {
  #weights;
  #lo;
  #hi;

  constructor(weights, lo, hi) {
    super();
    [this.#weights, this.#lo, this.#hi] = [weights, lo, hi];
  }

  get size() {
    return this.#hi - this.#lo;
  }

  slice(start = 0, end = this.size) {
    const [lo, hi] = [start, end].map((n) => this.#lo + Math.min(this.size, Math.max(0, n < 0 ? n + this.size : n)));
    return new RangeBlob(this.#weights, lo, Math.max(lo, hi));
  }

  stream() {
    const pieces = this.#weights.pieces(this.#lo, this.#hi);
    let rest = new Uint8Array(0);
    const pull = async (controller) => {
      if (!rest.length) {
        const { done, value } = await pieces.next();
        if (done) {
          controller.close();
          controller.byobRequest?.respond(0);
          return;
        }
        rest = value;
      }
      const room = controller.byobRequest?.view; // of the reader: nothing is allocated
      const part = rest.subarray(0, room?.byteLength);
      rest = rest.subarray(part.length);
      if (!room) controller.enqueue(part.slice());
      else {
        new Uint8Array(room.buffer, room.byteOffset).set(part);
        controller.byobRequest.respond(part.length);
      }
    };
    return new ReadableStream({ type: "bytes", pull, cancel: () => pieces.return() });
  }

  async bytes() {
    const [weights, lo, hi] = [this.#weights, this.#lo, this.#hi];
    if (this.size === weights.nbytes) return weights.all();
    const out = allocate(this.size);
    let at = 0;
    for await (const chunk of weights.pieces(lo, hi)) {
      out.set(chunk, at);
      at += chunk.length;
    }
    return out;
  }

  async arrayBuffer() {
    return (await this.bytes()).buffer;
  }

  async text() {
    return new TextDecoder().decode(await this.bytes());
  }
}
