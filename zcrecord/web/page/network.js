// SPDX-License-Identifier: 0BSD
/**
 * Runs a small feed-forward ONNX graph in float32: its operators, and the shapes they make.
 *
 * Computing is left to an engine, cpu.js or gpu.js; both have the same few methods. An array of an
 * engine is opaque here: { shape, ... }.
 */

const BINARY = { Add: "+", Sub: "-", Mul: "*", Div: "/" };
const UNARY = ["Relu", "Sigmoid", "Tanh"];
const SAME = ["Identity", "Flatten", "Reshape"];
export const OPERATORS = [...Object.keys(BINARY), ...UNARY, ...SAME, "Gemm", "MatMul", "Softmax"];

const product = (dims) => dims.reduce((a, b) => a * b, 1);

/** Returns the reason that a graph cannot be run here, "" if it can. */
export function refusal(graph, record) {
  const strange = graph.nodes.filter(({ op, domain }) => !OPERATORS.includes(op) || domain);
  const unknown = new Set(strange.map(({ op }) => op));
  if (unknown.size) return `The page does not know ${[...unknown].join(", ")}. It knows ${OPERATORS.join(", ")}.`;
  const single = graph.inputs.length === 1 && graph.outputs.length === 1;
  if (!single) return "The page runs models of one input and one output.";
  const absent = graph.weights.find((name) => !record.has(name));
  if (absent !== undefined) return `The archive has no tensor '${absent}', which the graph needs.`;
  const other = floats(graph).map((name) => record.info(name)).find((w) => w.dtype !== "float32" || w.strides);
  const what = () => `'${other.name}' is ${other.dtype}${other.strides ? ", strided" : ""}`;
  return other ? `The page computes in float32 in C order, and ${what()}.` : "";
}

/** Returns the names of weights that are computed with; the shapes for Reshape are not. */
export function floats(graph) {
  const shapes = new Set(graph.nodes.filter(({ op }) => op === "Reshape").map(({ inputs }) => inputs[1]));
  return graph.weights.filter((name) => !shapes.has(name));
}

/** Returns the integer weights that say how Reshape shapes, by name. */
export async function shapesOf(graph, record, signal) {
  const wanted = graph.nodes.filter(({ op }) => op === "Reshape").map(({ inputs }) => inputs[1]);
  const out = new Map();
  for (const name of wanted) {
    if (!record.has(name)) throw new Error(`Reshape takes its shape from '${name}', which is no weight.`);
    out.set(name, Array.from(await record.array(name, { signal }), Number));
  }
  return out;
}

/** Runs the graph on an input of the engine; returns the output, still the engine's. */
export function run(graph, engine, weights, shapes, input) {
  const values = new Map([...weights, [graph.inputs[0], input]]);
  for (const node of graph.nodes) {
    const inputs = node.inputs.filter((name) => name !== "" && !shapes.has(name)).map((name) => {
      if (!values.has(name)) throw new Error(`${node.op} takes '${name}', which nothing has made.`);
      return values.get(name);
    });
    values.set(node.outputs[0], step(node, engine, inputs, shapes));
  }
  return values.get(graph.outputs[0]);
}

function step({ op, attributes, inputs: names }, engine, inputs, shapes) {
  const [a, b] = inputs;
  if (op in BINARY) return binary(op, engine, a, b);
  if (UNARY.includes(op)) return engine.unary(op, a);
  if (op === "Gemm") return gemm(engine, inputs, attributes);
  if (op === "MatMul") return gemm(engine, inputs, {});
  if (op === "Softmax") return softmax(engine, a, attributes.axis ?? -1);
  return engine.reshaped(a, op === "Identity" ? a.shape : op === "Flatten" ? flat(a.shape, attributes.axis ?? 1)
    : asked(a.shape, shapes.get(names[1])));
}

function flat(shape, axis) {
  const at = axis < 0 ? axis + shape.length : axis;
  return [product(shape.slice(0, at)), product(shape.slice(at))];
}

function asked(shape, wanted) {
  const dims = wanted.map((dim, i) => (dim === 0 ? shape[i] : dim));
  const known = product(dims.filter((dim) => dim >= 0));
  const out = dims.map((dim) => (dim < 0 ? product(shape) / known : dim));
  if (product(out) !== product(shape)) throw new Error(`Reshape of [${shape}] to [${wanted}] does not come out.`);
  return out;
}

/** One operand has the shape of the result, the other repeats along it: a number, a row, or the like. */
function binary(op, engine, a, b) {
  const shape = product(a.shape) >= product(b.shape) ? a.shape : b.shape;
  for (const { shape: part } of [a, b]) {
    const bare = part.slice(part.findIndex((dim) => dim !== 1)).filter(() => part.some((dim) => dim !== 1));
    const fits = bare.length <= shape.length && bare.every((dim, i) => dim === shape[shape.length - bare.length + i]);
    if (!fits) throw new Error(`${op} of [${a.shape}] and [${b.shape}] is not known.`);
  }
  return engine.binary(BINARY[op], a, b, shape);
}

function gemm(engine, [a, b, c], { transA = 0, transB = 0, alpha = 1, beta = 1 }) {
  const [m, k] = transA ? [...a.shape].reverse() : a.shape;
  const [inner, n] = transB ? [...b.shape].reverse() : b.shape;
  const row = c && (c.shape.length > 1 ? c.shape[0] : 1);
  const column = c && (c.shape.at(-1) ?? 1);
  const plane = a.shape.length === 2 && b.shape.length === 2 && k === inner;
  const fits = plane && (!c || ([1, m].includes(row) && [1, n].includes(column)));
  if (!fits) throw new Error(`Gemm of [${a.shape}], [${b.shape}]${c ? ` and [${c.shape}]` : ""} does not come out.`);
  return engine.gemm(a, b, c ?? null, { m, n, k, transA, transB, alpha, beta, row, column });
}

function softmax(engine, a, axis) {
  if (axis !== -1 && axis !== a.shape.length - 1) throw new Error("Softmax is known along the last axis alone.");
  return engine.softmax(a, product(a.shape.slice(0, -1)), a.shape.at(-1));
}
