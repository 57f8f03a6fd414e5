// SPDX-License-Identifier: 0BSD
/**
 * A sink of hollow records that makes WebNN's constants. WebNN takes the bytes of a constant as a whole, and has copied
 * them when the call returns: one buffer, as large as the largest constant, gathers the chunks of each.
 *
 * Source: constant(descriptor, buffer) and createConstantTensor(descriptor, inputData) in WebNN, draft of 2026-06-27.
 */

import { KINDS, SourceError, UnsupportedError, need } from "./format.js";
import { allocate } from "./pieces.js";
import { fills } from "./writer.js";

const MOST = 2 ** 31 - 1; // elements of an operand

/** Returns a sink for `hollow`; see zcrecord.d.ts. Checks every tensor against the context; fetches no byte of any. */
export async function webnnSink(record, context, { builder = null, unsupported = "error" } = {}) {
  need(typeof context?.opSupportLimits === "function", "webnnSink takes an MLContext", UnsupportedError);
  need(!builder || typeof builder.constant === "function", "builder is an MLGraphBuilder", UnsupportedError);
  const what = `unsupported is "error" or "bytes", not ${unsupported}`;
  need(["error", "bytes"].includes(unsupported), what, UnsupportedError);
  const limits = context.opSupportLimits();
  const refused = new Map();
  let largest = 0;
  for (const info of record.names.map((name) => record.info(name)).filter(({ nbytes }) => nbytes)) {
    const fault = faultOf(info, limits);
    if (fault) refused.set(info.name, fault);
    else largest = Math.max(largest, info.nbytes);
  }
  if (refused.size && unsupported === "error") {
    const [[tensor, fault]] = refused;
    const more = refused.size > 1 ? `; ${refused.size} tensors cannot be constants` : "";
    throw new UnsupportedError(`${fault}, or pass unsupported: "bytes"${more}`, { tensor });
  }
  if (!builder) await checkConstantTensors(context);
  const [room, tensors] = [new Room(largest), []];

  const make = async ({ name, dtype: dataType, shape }, octets) => {
    try {
      if (builder) return builder.constant({ dataType, shape }, octets);
      tensors.push(await context.createConstantTensor({ dataType, shape }, octets));
      return tensors.at(-1);
    } catch (cause) {
      throw new SourceError(`WebNN refuses it: ${cause.message}`, { path: record.path, tensor: name, cause });
    }
  };
  const sink = (name, info) => (refused.has(name) ? new ArrayBuffer(info.nbytes)
    : room.gather(info.nbytes, (octets) => make(info, octets)));
  return Object.assign(sink, { destroy: () => tensors.splice(0).forEach((tensor) => tensor.destroy()) });
}

/** Returns why a tensor cannot be a constant, and what to do; "" if it can. */
function faultOf({ dtype, code, bits, count, nbytes, shape }, { constant, maxTensorByteLength: most = Infinity }) {
  const { dataTypes, rankRange: { min, max } = { min: 0, max: Infinity } } = constant;
  const as = bits === KINDS.get(code)?.bits ? dtype : `${dtype} of ${bits} bits`;
  const has = dataTypes.join(", ");
  if (!dataTypes.includes(as)) return `this context has no constants of ${as}, only of ${has}; save it as one of these`;
  const rank = shape.length;
  if (rank < min || rank > max) return `this context takes ${min} to ${max} dimensions, not ${rank}; reshape it`;
  const fits = count <= MOST && nbytes <= most;
  return fits ? "" : `this context takes ${MOST} elements and ${most} bytes, not ${count} and ${nbytes}; split it`;
}

/** Makes a constant tensor and destroys it: Chromium has the function and, with some backends, always refuses. */
async function checkConstantTensors(context) {
  try {
    (await context.createConstantTensor({ dataType: "float32", shape: [1] }, new Float32Array(1))).destroy();
  } catch (cause) {
    const what = `this context makes no constant tensors (${cause.message}); pass a builder`;
    throw new UnsupportedError(what, { cause });
  }
}

/** Memory for one constant; a second one that is filled at the same time has its own. */
class Room {
  #octets = null;
  #taken = false;

  constructor(nbytes) {
    this.nbytes = nbytes;
  }

  /** Returns a target that gathers `nbytes` bytes, and calls `done` with them. */
  gather(nbytes, done) {
    let mine = !this.#taken;
    if (mine) this.#octets ??= allocate(this.nbytes);
    const octets = mine ? this.#octets.subarray(0, nbytes) : allocate(nbytes);
    if (mine) this.#taken = true;
    const leave = () => {
      if (mine) this.#taken = mine = false;
    };
    const close = () => {
      const made = done(octets); // it has copied them
      leave();
      return made;
    };
    return fills(octets, close, leave);
  }
}
