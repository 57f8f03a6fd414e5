// SPDX-License-Identifier: 0BSD
/** Fills a constant of a hollow record chunk by chunk: its writer, and the targets of the bytes. */

import { FillError, KINDS, ProducerError } from "./format.js";
import { Tensor } from "./record.js";
import { eachRow } from "./tensors.js";

/** Returns a target that gathers bytes in memory. */
export function fills(room, close, abort = () => {}) {
  let at = 0;
  return { copies: true, write: (chunk) => { room.set(chunk, at); at += chunk.length; }, close, abort };
}

/** Returns the target for the result of a sink: a writable buffer, or an object with write(chunk). */
export function sinkTarget(made, { name, nbytes }) {
  if (made instanceof ArrayBuffer || ArrayBuffer.isView(made)) {
    const room = made instanceof ArrayBuffer ? new Uint8Array(made)
      : new Uint8Array(made.buffer, made.byteOffset, made.byteLength);
    const what = `sink gave a buffer of ${room.length} bytes; ${nbytes} are needed`;
    if (room.length !== nbytes) throw new ProducerError(what, { tensor: name });
    return fills(room, () => made);
  }
  const what = "sink gave neither a buffer nor an object with write(chunk)";
  if (typeof made?.write !== "function") throw new ProducerError(what, { tensor: name });
  return {
    copies: made.copies,
    write: (chunk) => made.write(chunk),
    close: async () => (await made.close?.()) ?? made,
    abort: () => made.abort?.(),
  };
}

/** Copies elements in C order to their strided positions in a payload. */
export function scatter(octets, info, room) {
  const item = info.bits / 8;
  let from = 0;
  eachRow(info, (first, step, length) => {
    for (let k = 0, at = info.byteOffset + first * item; k < length; k++, at += step * item) {
      for (let c = 0; c < item; c++) room[at + c] = octets[from++];
    }
  });
  return null;
}

export class Writer {
  #state = "open";
  #done = 0;

  constructor(constant, name, target, record) {
    Object.assign(this, { name, info: constant.info });
    this._ = { target, ...record };
  }

  #fault(what, Kind = ProducerError) {
    return new Kind(what, { path: this._.path, tensor: this.name });
  }

  async #do(step) {
    const what = "its writer was closed, or something failed; open it again";
    if (this.#state !== "open") throw this.#fault(what, FillError);
    try {
      this._.check(); // not after abort
      return await step();
    } catch (error) {
      this.abort();
      throw error;
    }
  }

  /** Passes on the next bytes in C order; a typed array has to be of the constant's dtype, or bytes. */
  write(chunk) {
    return this.#do(async () => {
      const octets = this.#octets(chunk);
      const { nbytes } = this.info;
      if (this.#done + octets.length > nbytes) {
        throw this.#fault(`${nbytes} bytes were declared, at least ${this.#done + octets.length} came`);
      }
      this.#done += octets.length;
      if (octets.length) await this._.target.write(octets);
    });
  }

  #octets(chunk) {
    if (chunk instanceof ArrayBuffer) return new Uint8Array(chunk);
    const got = chunk?.constructor?.name ?? chunk;
    if (!ArrayBuffer.isView(chunk)) throw this.#fault(`bytes or a typed array are due, got ${got}`);
    const { code, bits, dtype } = this.info;
    const kind = KINDS.get(code);
    const fits = [Uint8Array, Uint8ClampedArray, DataView].some((Kind) => chunk instanceof Kind)
      || (kind && bits === kind.bits && bits >= 8 && chunk instanceof kind.Array)
      || (bits === 8 && chunk instanceof Int8Array) || (code === 16 && chunk instanceof Uint16Array);
    if (!fits) throw this.#fault(`declared as ${dtype}, got ${got}`);
    return new Uint8Array(chunk.buffer, chunk.byteOffset, chunk.byteLength);
  }

  take(data) {
    if (!(data instanceof Tensor)) return this.write(data);
    return this.#do(async () => {
      const { shape, dtype, bits, code } = this.info;
      if (data.shape.join() !== shape.join()) {
        throw this.#fault(`declared with shape (${shape.join(", ")}), got (${data.shape.join(", ")})`);
      }
      if (data.code !== code || data.bits !== bits) throw this.#fault(`declared as ${dtype}, got ${data.dtype}`);
      if (code === 64) throw this.#fault("strings are filled by the bytes of their payload");
      const whole = data.contiguous().data;
      await this.write(new Uint8Array(whole.buffer, whole.byteOffset, whole.byteLength));
    });
  }

  /** Marks the constant as filled. */
  async close() {
    if (this.#state !== "open") return;
    const result = await this.#do(() => {
      const { nbytes } = this.info;
      if (this.#done < nbytes) throw this.#fault(`${nbytes} bytes were declared, ${this.#done} produced`);
      return this._.target.close();
    });
    this.#state = "closed";
    this._.done(result);
  }

  /** Marks the constant as not begun; never throws. */
  abort() {
    if (this.#state !== "open") return;
    this.#state = "aborted";
    this._.gone();
    try {
      Promise.resolve(this._.target.abort()).catch(() => {});
    } catch {
      // the target is not used any more
    }
  }
}
