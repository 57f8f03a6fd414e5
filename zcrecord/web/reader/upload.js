// SPDX-License-Identifier: 0BSD
/**
 * Uploads payloads to a WebGPU device as they arrive: the JavaScript heap holds one piece for each request.
 *
 * Tied tensors share a buffer. Equal bytes that are not tied are fetched once, and get a buffer each.
 */

import { checkApart, payloadRanges, streamPayloads } from "./payloads.js";
import { LimitError, SourceError, UnsupportedError, need, notLoaded } from "./format.js";

const USAGE = 0x8c; // STORAGE | COPY_DST | COPY_SRC
const COPY_DST = 8;
const PIECE = 1 << 20; // bytes handed to the device at a time
const QUEUED = 8 * PIECE; // bytes that may wait in its queue
const losses = new WeakMap(); // by device: whatever waits for its promise lives as long as it does, so not an upload

function lossOf(device) {
  if (!losses.has(device)) {
    const loss = { info: null };
    losses.set(device, loss);
    device.lost?.then((info) => { loss.info = info; });
  }
  return losses.get(device);
}

/** Returns a Map from names to { buffer, offset, size, dtype, bits, shape, strides }; see zcrecord.d.ts. */
export async function uploadTo(record, device, names = record.names, options = {}) {
  const { onProgress, signal, maxInFlight, usage = USAGE, verify = false } = options;
  need(typeof device?.createBuffer === "function", "uploadTo takes a GPUDevice", UnsupportedError);
  need(typeof names !== "string", "uploadTo takes a list of names, not one name", UnsupportedError);
  const infos = [...names].map((name) => record.info(name));
  const ranges = payloadRanges(record, infos.filter((info) => info.payload !== null).map((info) => info.payload));
  checkApart(record, ranges.reduce((sum, { start, end, numbers }) => sum + (end - start) * numbers.length, 0), ranges);
  const upload = new Upload(record, device, usage | COPY_DST);
  try {
    await upload.create(ranges);
    const total = ranges.reduce((sum, { start, end }) => sum + end - start, 0);
    const hashes = verify ? await import("./verify.js").catch(notLoaded) : null;
    let done = 0;
    await streamPayloads(record, ranges, async (range, from, chunk) => {
      await upload.take(range, from, chunk);
      if (hashes) upload.check(range, from, chunk, hashes);
      done += chunk.length;
      onProgress?.(done, total);
    }, { signal, maxInFlight });
    await upload.drain();
    if (!total) onProgress?.(0, 0);
  } catch (error) {
    upload.destroy();
    throw record._located(error);
  }
  return new Map(infos.map((info) => [info.name, upload.binding(info)]));
}

class Upload {
  constructor(record, device, usage) {
    Object.assign(this, { record, device, usage, queued: 0, loss: lossOf(device) });
    this.buffers = new Map(); // by payload
    this.rooms = []; // pieces that are not in use
    this.pieces = new Map(); // by the start of the range that arrives
    this.hashes = new Map();
  }

  /** Makes every buffer, its size a multiple of 4. Error scopes are popped before anything is awaited: they are the
   *  device's, and errors of other tasks would get into them. */
  async create(ranges) {
    const { device, usage } = this;
    const most = device.limits?.maxBufferSize ?? Infinity;
    const sizes = ranges.map(({ start, end }) => Math.ceil((end - start) / 4) * 4);
    const large = sizes.findIndex((size) => size > most);
    const nbytes = ranges[large]?.end - ranges[large]?.start;
    need(large < 0, () => `a payload of ${nbytes} bytes is more than the device's maxBufferSize, ${most}; ask for more \
by requiredLimits, or split the tensor`, LimitError);
    const scopes = device.pushErrorScope ? ["validation", "out-of-memory"] : [];
    const faults = await Promise.all(ranges.map(async ({ numbers }, k) => {
      let thrown = null; // such as a usage that is no number of 32 bits
      for (const scope of scopes) device.pushErrorScope(scope);
      try {
        for (const number of numbers) {
          this.buffers.set(number, device.createBuffer({ size: sizes[k], usage, label: `zcr ${number}` }));
        }
      } catch (error) {
        thrown = error;
      }
      const [full, wrong] = await Promise.all(scopes.map(() => device.popErrorScope())); // the last one first
      return [full, wrong ?? thrown];
    })).catch((cause) => { throw new SourceError(`the GPU device failed: ${cause.message}`, { cause }); });
    faults.forEach(([full, wrong], k) => {
      need(!full, () => `the device has no room for ${sizes[k]} bytes: ${full.message}`, LimitError);
      need(!wrong, () => `the device refuses a buffer of ${sizes[k]} bytes: ${wrong.message}`, UnsupportedError);
    });
  }

  /** Gathers a range's bytes into pieces: writes start and end on multiples of 4, chunks need not. */
  async take(range, from, chunk) {
    const { start, end } = range;
    let piece = this.pieces.get(start);
    if (!piece) {
      piece = { room: this.rooms.pop() ?? new Uint8Array(PIECE), filled: 0, at: 0 };
      this.pieces.set(start, piece);
    }
    for (let at = 0; at < chunk.length;) {
      const count = Math.min(PIECE - piece.filled, chunk.length - at);
      piece.room.set(chunk.subarray(at, at + count), piece.filled);
      piece.filled += count;
      at += count;
      if (piece.filled === PIECE) await this.write(range, piece);
    }
    if (from + chunk.length < end - start) return;
    piece.room.fill(0, piece.filled, Math.ceil(piece.filled / 4) * 4);
    if (piece.filled) await this.write(range, piece);
    this.pieces.delete(start);
    this.rooms.push(piece.room);
  }

  async write(range, piece) {
    const size = Math.ceil(piece.filled / 4) * 4;
    for (const number of range.numbers) {
      if (this.loss.info) throw new SourceError(`the GPU device was lost: ${this.loss.info.message}`);
      this.device.queue.writeBuffer(this.buffers.get(number), piece.at, piece.room.buffer, 0, size); // it copies
      this.queued += size;
      if (this.queued >= QUEUED) await this.drain();
    }
    piece.at += piece.filled;
    piece.filled = 0;
  }

  /** Waits until the device has taken the queued bytes: else the queue would hold all of them. */
  async drain() {
    this.queued = 0;
    await this.device.queue.onSubmittedWorkDone?.();
    if (this.loss.info) throw new SourceError(`the GPU device was lost: ${this.loss.info.message}`);
  }

  check({ start, end, numbers }, from, chunk, { Xxh3, damaged }) {
    const digest = this.record._digest(numbers[0]);
    if (digest === null) return;
    if (!this.hashes.has(start)) this.hashes.set(start, new Xxh3(end - start));
    const hash = this.hashes.get(start).update(chunk);
    if (from + chunk.length < end - start) return;
    this.hashes.delete(start);
    if (hash.digest() !== digest) throw damaged(this.record, numbers[0]);
  }

  destroy() {
    for (const buffer of this.buffers.values()) buffer.destroy();
  }

  binding({ payload, byteOffset, dtype, bits, shape, strides }) {
    const buffer = payload === null ? null : this.buffers.get(payload);
    const size = payload === null ? 0 : this.record._nbytes(payload);
    return { buffer, offset: byteOffset, size, dtype, bits, shape: shape.map(Number), strides };
  }
}
