// SPDX-License-Identifier: 0BSD
/**
 * onnxruntime-web on the page: fetched when a model is first run; creates a session over the archive, and runs it.
 *
 * The server says where it comes from, and the digests of files that come from elsewhere. Samples, and what is shown of
 * the answers, are left to classifier.js.
 */

import { counted } from "../view/text.js";

const BATCH = 64; // samples at a time, where the model leaves it open
const ELEMENTS = 1 << 20; // of the input at a time, at most, unless one sample has more
const ARRAYS = {
  float32: Float32Array, float64: Float64Array, float16: globalThis.Float16Array, bool: Uint8Array,
  int8: Int8Array, uint8: Uint8Array, int16: Int16Array, uint16: Uint16Array, int32: Int32Array, uint32: Uint32Array,
  int64: BigInt64Array, uint64: BigUint64Array,
};

const product = (dims) => dims.reduce((a, b) => a * b, 1);
let loaded = null;

/** Returns onnxruntime-web, fetched at the first call. */
export function load(runtime) {
  loaded ??= fetched(runtime).catch((error) => {
    loaded = null; // the next call tries again
    throw error;
  });
  return loaded;
}

/** Returns the files that this browser takes. With JSPI weights are read one by one; the other build holds all of them
 *  while it creates a session. */
export function filesOf({ builds }) {
  return builds["Suspending" in WebAssembly ? "jspi" : "asyncify"];
}

async function fetched(runtime) {
  const folder = new URL(runtime.url, location.href);
  const files = filesOf(runtime).map(({ name, integrity }) => octetsOf(new URL(name, folder), integrity));
  const [script, wasm] = await Promise.all(files);
  const place = URL.createObjectURL(new Blob([script], { type: "text/javascript" }));
  try {
    const ort = await import(/* of the bytes that were checked */ place);
    ort.env.logLevel = "error";
    ort.env.wasm.numThreads = 1; // with more it asks for a page that is isolated from others
    ort.env.wasm.wasmBinary = wasm;
    return ort;
  } finally {
    URL.revokeObjectURL(place);
  }
}

async function octetsOf(url, integrity) {
  const online = "; is this machine online? Start with --onnxruntime-web FOLDER to take it from a folder";
  const advice = url.origin === location.origin ? "" : online;
  try {
    const response = await fetch(url, { integrity, credentials: "omit" });
    if (!response.ok) throw new Error(`the server answered ${response.status}`);
    return await response.arrayBuffer();
  } catch (cause) {
    throw new Error(`onnxruntime-web could not be fetched from ${url.host}: ${cause.message}${advice}`, { cause });
  }
}

/** Returns the GPU's name, null if there is none. */
export async function gpuName() {
  const adapter = await globalThis.navigator?.gpu?.requestAdapter();
  if (!adapter) return null;
  const { vendor, architecture, description } = adapter.info ?? {};
  return description || [vendor, architecture].filter(Boolean).join(" ");
}

/** Creates a session of an archive's model; `provider` is "webgpu" or "wasm". */
export async function createSession(ort, record, provider, signal) {
  const onnx = await record.toOnnx({ signal });
  try {
    const options = { externalData: onnx.externalData, executionProviders: [provider], logSeverityLevel: 3 };
    return await ort.InferenceSession.create(onnx.model, options);
  } catch (error) {
    throw onnx.failure ?? new Error(`onnxruntime-web cannot run this model: ${error.message}`, { cause: error });
  }
}

/**
 * Runs a session over samples { data, shape }, whose first axis counts them; returns { data, shape } of its output, the
 * numbers of each sample in a row.
 *
 * Throws an Error that says what the page cannot run: several inputs or outputs, elements that are no numbers, a shape
 * that the samples do not have.
 */
export async function run(ort, session, { data, shape: [count, ...each] }, { signal, onProgress }) {
  const { input, output } = oneOfEach(session);
  const { batch, fixed, rest } = batchesOf(input, each);
  const size = product(each);
  let out = null;
  for (let start = 0; start < count; start += batch) {
    const rows = Math.min(batch, count - start);
    const given = fixed ? batch : rows; // the last batch is filled up with zeros
    const values = arrayOf(input.type, data.subarray(start * size, (start + rows) * size), given * size);
    const answers = await session.run({ [input.name]: new ort.Tensor(input.type, values, [given, ...rest]) });
    const { data: numbers, dims } = answers[output.name];
    if (dims[0] !== given) throw new Error(`The page needs an output with a row for each sample, it has [${dims}].`);
    const width = numbers.length / given;
    out ??= new Float64Array(count * width);
    for (let i = 0; i < rows * width; i++) out[start * width + i] = Number(numbers[i]);
    onProgress(start + rows, count);
    await new Promise((done) => { setTimeout(done); }); // a click on Cancel is heard
    signal.throwIfAborted();
  }
  return { data: out, shape: [count, out.length / count], type: output.type };
}

function oneOfEach({ inputMetadata: inputs, outputMetadata: outputs }) {
  const named = (list, what) => `${counted(list.length, what)} (${list.map(({ name }) => name).join(", ")})`;
  if (inputs.length !== 1 || outputs.length !== 1) {
    const has = `${named(inputs, "input")} and ${named(outputs, "output")}`;
    throw new Error(`The page runs models of one input and one output, this one has ${has}.`);
  }
  const [input, output] = [inputs[0], outputs[0]];
  for (const { name, isTensor, type } of [input, output]) {
    const what = isTensor ? type : "no tensor";
    if (!ARRAYS[what]) throw new Error(`The page runs models of numbers, '${name}' is ${what}.`);
  }
  return { input, output };
}

/** Returns how many samples to give at a time, whether the model takes no other number, and the other axes. */
function batchesOf({ name, shape }, each) {
  const free = (dim) => typeof dim === "string" || dim < 0;
  const [first = "", ...others] = shape;
  const known = product(others.filter((dim) => !free(dim)));
  const one = others.filter(free).length === 1;
  const rest = !shape.length ? each
    : others.map((dim, axis) => (!free(dim) ? dim : one ? product(each) / known : each[axis]));
  const fits = first !== 0 && product(rest) === product(each) && rest.every(Number.isInteger);
  if (!fits) throw new Error(`The model takes [${shape}] as '${name}', a sample of [${each}] does not fit it.`);
  const fixed = !free(first);
  return { batch: fixed ? first : Math.max(1, Math.min(BATCH, Math.floor(ELEMENTS / product(each)))), fixed, rest };
}

/** Returns numbers as an array of a type, zeros behind them. */
function arrayOf(type, numbers, length) {
  const out = new ARRAYS[type](length);
  const whole = out instanceof BigInt64Array || out instanceof BigUint64Array;
  const convert = whole ? (value) => BigInt(Math.trunc(value)) : type === "bool" ? Number : null;
  out.set(convert ? Array.from(numbers, convert) : numbers);
  return out;
}
