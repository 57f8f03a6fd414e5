// WebNN without a device: contexts, builders and constants that hold to the specification's IDL and algorithms.
//
// Source: webmachinelearning.github.io/webnn, draft of 2026-06-27; `IDL` is its own, without what constants do not use.

export const IDL = `
enum MLOperandDataType { "float32", "float16", "int32", "uint32", "int64", "uint64", "int8", "uint8" };
dictionary MLOperandDescriptor {
  required MLOperandDataType dataType;
  required sequence<[EnforceRange] unsigned long> shape;
};
interface MLContext {
  Promise<MLTensor> createConstantTensor(MLOperandDescriptor descriptor, AllowSharedBufferSource inputData);
  MLOpSupportLimits opSupportLimits();
  undefined destroy();
};
interface MLOperand {
  readonly attribute MLOperandDataType dataType;
  readonly attribute FrozenArray<unsigned long> shape;
};
interface MLTensor {
  readonly attribute MLOperandDataType dataType;
  readonly attribute FrozenArray<unsigned long> shape;
  readonly attribute boolean readable;
  readonly attribute boolean writable;
  readonly attribute boolean constant;
  undefined destroy();
};
interface MLGraphBuilder {
  MLOperand constant(MLOperandDescriptor descriptor, AllowSharedBufferSource buffer);
  MLOperand constant(MLTensor tensor);
  Promise<MLGraph> build(MLNamedOperands outputs);
};`;

/** Names of the members of each interface. */
export const MEMBERS = Object.fromEntries([...IDL.matchAll(/interface (\w+) \{(.*?)\};/gs)].map(([, name, body]) =>
  [name, [...new Set([...body.matchAll(/(\w+)(?=\(|;)/g)].map(([, member]) => member))]]));
const TYPES = JSON.parse(`[${/MLOperandDataType \{(.*?)\}/.exec(IDL)[1]}]`);
const SHARED = globalThis.SharedArrayBuffer ?? ArrayBuffer; // pages that are not isolated have none

function check(holds, what, name) {
  if (!holds) throw name ? new DOMException(what, name) : new TypeError(what);
}

/** Converts an MLOperandDescriptor, and checks its dimensions; Node 20 has no Float16Array. */
function described({ dataType, shape }, { rankRange }, most) {
  check(TYPES.includes(dataType), `'${dataType}' is not a valid enum value of type MLOperandDataType`);
  const dims = Array.from(shape, (dim) => {
    check(typeof dim === "number" && dim > -1 && dim < 2 ** 32, "Value is outside the 'unsigned long' value range");
    return Math.trunc(dim);
  });
  const [count, item] = [dims.reduce((a, b) => a * b, 1), Number(/\d+/.exec(dataType)) / 8];
  check([count, ...dims].every((dim) => dim > 0 && dim < 2 ** 31), "Invalid descriptor: not a valid dimension");
  check(dims.length <= rankRange.max, "Invalid descriptor: its rank is not supported");
  check(count * item <= most, "Invalid descriptor: its byte length is not supported");
  return { dataType, shape: dims, nbytes: count * item };
}

/** Returns the bytes of an AllowSharedBufferSource that is right for a descriptor. */
function octetsOf(source, { dataType, nbytes }) {
  const isView = ArrayBuffer.isView(source);
  const buffer = isView ? source.buffer : source;
  check(buffer instanceof ArrayBuffer || buffer instanceof SHARED, "The provided value is not a BufferSource");
  check(!buffer.resizable && !buffer.growable, "The provided ArrayBufferView value must not be resizable");
  check(source.byteLength === nbytes, `The byte length (${source.byteLength}) is not the expected one (${nbytes})`);
  const match = { float: "Float", int: "Int", uint: "Uint" }[dataType.replace(/\d+/, "")] + /\d+/.exec(dataType);
  const kinds = ["Uint8Array", `${/64/.test(dataType) ? "Big" : ""}${match}Array`];
  check(!isView || kinds.includes(source.constructor.name), "The view must match the data type or be a Uint8Array");
  return new Uint8Array(buffer, source.byteOffset ?? 0, nbytes);
}

class Described {
  #of;
  constructor(of) {
    this.#of = of;
  }
  get dataType() {
    return this.#of.dataType;
  }
  get shape() {
    return this.#of.shape;
  }
}

export class MLOperand extends Described {}

/** `octets` is for tests: no script can read a constant tensor. */
export class MLTensor extends Described {
  constructor(of, context, octets) {
    super(of);
    Object.assign(this, { context, octets });
  }
  get readable() {
    return false;
  }
  get writable() {
    return false;
  }
  get constant() {
    return true;
  }
  destroy() {
    this.octets = null;
    this.context.alive.delete(this);
  }
}

/** Options are for tests: `limits`; `refuses`, the message with which it makes no constant tensors, as Chromium with
 *  LiteRT does; and `keep`: whether it copies the bytes, which a browser holds outside of the heap. */
export class MLContext {
  constructor({ dataTypes = TYPES, max = 8, most = 2 ** 31 - 1, refuses = null, keep = true } = {}) {
    this.limits = { maxTensorByteLength: most, constant: { dataTypes, rankRange: { min: 0, max } } };
    Object.assign(this, { refuses, keep, lost: false, alive: new Set(), making: 0 });
  }
  opSupportLimits() {
    return structuredClone(this.limits);
  }
  read(descriptor, source) {
    const of = described(descriptor, this.limits.constant, this.limits.maxTensorByteLength);
    const octets = octetsOf(source, of);
    return [of, this.keep ? octets.slice() : null];
  }
  async createConstantTensor(descriptor, inputData) {
    check(!this.lost, "Context is lost", "InvalidStateError");
    check(this.refuses === null, this.refuses, "NotSupportedError");
    const [of, octets] = this.read(descriptor, inputData);
    check(++this.making === 1, "a test wants one at a time");
    await new Promise((resolve) => { setTimeout(resolve, 1); }); // its timeline
    this.making -= 1;
    check(!this.lost, "Context is lost", "InvalidStateError");
    const tensor = new MLTensor(of, this, octets);
    this.alive.add(tensor);
    return tensor;
  }
  destroy() {
    this.lost = true;
    for (const tensor of this.alive) tensor.destroy();
  }
}

export class MLGraphBuilder {
  #built = false;
  constructor(context) {
    check(!context.lost, "Context is lost", "InvalidStateError");
    this.context = context;
    this.constants = new Map(); // operands to bytes, or to the tensor
  }
  constant(descriptor, buffer) {
    const tensor = descriptor instanceof MLTensor ? descriptor : null;
    check(!tensor || (tensor.context === this.context && this.context.alive.has(tensor)), "The tensor is invalid");
    check(!this.#built && !this.context.lost, "The builder can not build", "InvalidStateError");
    const [of, value] = tensor ? [tensor, tensor] : this.context.read(descriptor, buffer);
    const operand = new MLOperand(of);
    this.constants.set(operand, value);
    return operand;
  }
  /** Ends the builder; there is no graph. */
  async build() {
    check(!this.#built && !this.context.lost, "The builder can not build", "InvalidStateError");
    this.#built = true;
  }
}
