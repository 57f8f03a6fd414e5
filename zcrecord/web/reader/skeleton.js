// SPDX-License-Identifier: 0BSD
/**
 * The skeleton of an ONNX model: finds the tensors in it, names them as Python's `convert` does, and puts fields in the
 * place of their values. Their bytes are left to onnx.js.
 *
 * Source of field numbers: onnx.proto.
 */

import { FormatError, LimitError, need, printable } from "./format.js";

const [VARINT, FIXED64, LEN, FIXED32] = [0, 1, 2, 5];
const NESTED = 100; // messages in messages, protobuf's own default
const MOST_SHORT = 5; // bytes of a tag or a length: protobuf's parsers read no more, and of a tag no more than 32 bits
const MOST_LENGTH = 2 ** 31 - 1; // bytes of a field
const SPARE = 1 << 20; // bytes that names of nested tensors may take beyond those of the record

/** Messages that can hold tensors: field number to the message in it; those with a star are repeated. */
const CHILDREN = {
  Model: { 7: "Graph", 20: "Training*", 25: "Function*" },
  Graph: { 1: "Node*", 5: "Tensor*", 15: "Sparse*" },
  Node: { 5: "Attribute*" },
  Attribute: { 5: "Tensor", 6: "Graph", 10: "Tensor*", 11: "Graph*", 22: "Sparse", 23: "Sparse*" },
  Sparse: { 1: "Tensor", 2: "Tensor" },
  Function: { 7: "Node*", 11: "Attribute*" },
  Training: { 1: "Graph", 2: "Graph" },
};
const OPERATOR = 4; // NodeProto.op_type
/** Fields of texts that name a message: a node's outputs, name and operator; name, domain, overload. */
const TEXTS = { Node: [2, 3, OPERATOR], Attribute: [1], Function: [1, 10, 13] };
const [DIMS, DATA_TYPE, NAME, RAW_DATA, EXTERNAL_DATA, DATA_LOCATION] = [1, 2, 8, 9, 13, 14];
const SEGMENT = 3;
const [STRING_DATA, VALUES] = [6, [4, 5, 6, 7, 9, 10, 11]]; // of TensorProto
const LOOSE = new TextDecoder("utf-8", { ignoreBOM: true });
const STRICT = new TextDecoder("utf-8", { ignoreBOM: true, fatal: true });
const ENCODER = new TextEncoder();

const loose = (octets) => LOOSE.decode(octets).replaceAll("\0", "\ufffd") || "_";

/** Decodes an initializer's name, which the archive has as it is. */
function strict(octets) {
  let name = "";
  try {
    name = STRICT.decode(octets);
  } catch {
    // refused below
  }
  need(name && !name.includes("\0"), "an initializer has no name, or one with NUL or that is not UTF-8; name it");
  return name;
}

/** Reads a varint; returns its value, rounded beyond 2^53, and the position after it. */
function varint(octets, at) {
  let [value, scale] = [0, 1];
  for (let k = 0; k < 10; k++, scale *= 128) {
    const byte = octets[at++];
    need(byte !== undefined, "a varint ends past its message");
    value += (byte & 127) * scale;
    if (byte < 128) return [value, at];
  }
  throw new FormatError("a varint has more than 10 bytes");
}

/** Reads a tag or a length as `varint` does, and refuses those of which other parsers read less. */
function short(octets, start, most, what) {
  const [value, at] = varint(octets, start);
  need(value <= most && at - start <= MOST_SHORT, `${what} is more than ${most}, or has more than ${MOST_SHORT} bytes`);
  return [value, at];
}

/** Yields a message's fields: number, wire type, [start, end), and the value or the first byte of its content. */
function* fields(octets) {
  for (let start = 0, end; start < octets.length; start = end) {
    const [tag, at] = short(octets, start, 2 ** 32 - 1, "a tag");
    const [number, wire] = [Math.floor(tag / 8), tag % 8];
    let value = at;
    if (wire === VARINT) [value, end] = varint(octets, at);
    else if (wire === LEN) {
      const [size, from] = short(octets, at, MOST_LENGTH, "a length");
      [value, end] = [from, from + size];
    } else {
      need(wire === FIXED64 || wire === FIXED32, `wire type ${wire} is not known`);
      end = at + (wire === FIXED64 ? 8 : 4);
    }
    need(number && end <= octets.length, "a field ends past its message");
    yield { number, wire, start, end, value };
  }
}

/** Reads a message into `scope.parts`: bytes that stay as they are, and { tag, inner } of messages with tensors. */
function read(scope, octets, found, depth) {
  need(depth <= NESTED, `messages are nested more than ${NESTED} deep`);
  const { kind, counts, texts, parts } = scope;
  let kept = 0; // where bytes start that stay
  for (const { number, wire, start, end, value } of fields(octets)) {
    const child = wire === LEN && CHILDREN[kind][number];
    if (child) {
      const [what] = child.split("*");
      const place = counts.get(number) ?? 0;
      counts.set(number, place + 1);
      need(!place || what !== child, `${kind}Proto has its field ${number} twice; export the model again`);
      const inner = { kind: what, parent: scope, field: number, place, parts: [], counts: new Map(), texts: new Map() };
      const before = found.length;
      (what === "Tensor" ? readTensor : read)(inner, octets.subarray(value, end), found, depth + 1);
      if (found.length === before) continue;
      parts.push(octets.subarray(kept, start), { tag: number * 8 + LEN, inner });
      kept = end;
    } else if (wire === LEN && TEXTS[kind]?.includes(number) && !(kind === "Node" && number === 2 && texts.has(2))) {
      texts.set(number, octets.subarray(value, end));
    }
  }
  parts.push(octets.subarray(kept));
}

function readTensor(t, octets, found, depth) {
  need(depth <= NESTED, `messages are nested more than ${NESTED} deep`);
  need(found.length < found.most, "the model has more tensors than the archive; save the record with all it had");
  Object.assign(t, { name: new Uint8Array(0), dims: [], type: 0, graph: graphOf(t.parent) });
  found.push(t);
  let kept = 0;
  const leaveOut = (start, end) => {
    t.parts.push(octets.subarray(kept, start));
    kept = end;
  };
  for (const { number, wire, start, end, value } of fields(octets)) {
    if (number === DIMS && wire === VARINT) t.dims.push(value);
    else if (number === DIMS && wire === LEN) {
      let [at, dim] = [value, 0];
      for (; at < end; t.dims.push(dim)) [dim, at] = varint(octets, at);
      need(at === end, "dims end inside a varint");
    } else if (number === DATA_TYPE && wire === VARINT) t.type = value;
    else if (number === NAME && wire === LEN) t.name = octets.subarray(value, end);
    else if (number === EXTERNAL_DATA || number === DATA_LOCATION) leaveOut(start, end);
    else if (number === SEGMENT || VALUES.includes(number)) {
      const none = wire === LEN && value === end && ![SEGMENT, RAW_DATA, STRING_DATA].includes(number);
      need(none, () => `tensor '${loose(t.name)}' has values of its own; convert the model again`);
      leaveOut(start, end);
    }
  }
  need(t.dims.every(Number.isSafeInteger), "a dim is more than 2^53");
  t.parts.push(octets.subarray(kept));
}

/** Whether a tensor in this attribute is the value of a Constant node, of which runtimes make an initializer. */
function isConstant({ kind, parent, texts }) {
  const said = (message, number, text) => loose(message.texts.get(number) ?? new Uint8Array(0)) === text;
  const inNode = kind === "Attribute" && parent.kind === "Node";
  return inNode && said({ texts }, 1, "value") && said(parent, OPERATOR, "Constant");
}

/** "main" or "inner" for an initializer, or a constant, of the model's graph or of one in its nodes, "apart" for one of
 *  a function or of training_info, "" for any other tensor. */
function graphOf(parent) {
  const scope = isConstant(parent) ? parent.parent.parent : parent;
  if (scope.kind === "Function") return "apart";
  if (scope.kind !== "Graph") return "";
  if (scope.parent.kind === "Model") return "main";
  let above = scope.parent;
  while (above && above.kind !== "Function" && above.kind !== "Training") above = above.parent;
  return above ? "apart" : "inner";
}

/**
 * Returns { found, encode }: a model's tensors in its order, each with `name` (bytes), `full` (its name in the
 * archive), `dims`, `type` (ONNX's data_type) and `graph`; and a function that returns the model's bytes, each
 * tensor's `fields` in the place of its values. The archive's `names` limit its tensors, and what names of nested ones
 * take.
 */
export function parseSkeleton(octets, names) {
  const found = Object.assign([], { most: names.length });
  const model = { kind: "Model", parent: null, parts: [], counts: new Map(), texts: new Map() };
  read(model, octets, found, 0);
  need(model.counts.has(7), "it has no graph");
  nameAll(found, 8 * names.join("").length + SPARE);
  return { found, encode: () => encode(model) };
}

function nameAll(found, room) {
  const taken = new Set(["onnx.graph"]);
  const counters = new Map();
  for (const t of found.filter(({ parent }) => parent.kind === "Graph")) {
    const names = (t.parent.names ??= new Set());
    t.text = strict(t.name);
    need(!names.has(t.text), () => `two initializers of one graph are called '${printable(t.text)}'; rename one`);
    names.add(t.text);
    if (t.graph === "main") taken.add((t.full = t.text));
  }
  for (const t of found) {
    if (t.full !== undefined) continue;
    const name = [...prefix(t.parent), ...last(t)].join(".");
    need((room -= name.length + 1) >= 0, "the names of nested tensors take more than 8 times the record's", LimitError);
    let count = counters.get(name) ?? 1;
    for (t.full = name; taken.has(t.full);) t.full = `${name}~${++count}`;
    counters.set(name, count);
    taken.add(t.full);
  }
}

function last({ parent: { kind }, field, place, text }) {
  if (kind === "Graph") return [text];
  if (kind === "Sparse") return [field === 1 ? "values" : "indices"];
  return field === 5 ? [] : [String(place)];
}

/** Returns the parts of a name that a message stands for, and those around it; computed once for each. */
function prefix(scope) {
  return (scope.prefix ??= scope.parent ? [...prefix(scope.parent), ...own(scope)] : []);
}

function own({ kind, parent, field, place, texts, parts }) {
  const text = (number) => texts.get(number) ?? new Uint8Array(0);
  const within = parent.kind;
  if (kind === "Node") return [loose(text(3).length ? text(3) : text(2))];
  if (kind === "Attribute") return [loose(text(1))];
  if (kind === "Function") {
    const [domain, overload] = [text(10), text(13)].map((octets) => octets.length && loose(octets));
    return ["function", `${domain || ""}:${loose(text(1))}${overload ? `:${overload}` : ""}`];
  }
  if (kind === "Training") return ["training_info", String(place)];
  if (kind === "Graph" && within === "Training") return [field === 1 ? "initialization" : "algorithm"];
  if (within === "Attribute") return field === 11 || field === 23 ? [String(place)] : [];
  if (kind === "Sparse") return [loose(parts.find((part) => part.inner?.field === 1)?.inner.name ?? text(0))];
  return [];
}

/** Appends the bytes of a message to `out`, in order; returns how many there are. */
function flatten({ parts, fields: values = [] }, out) {
  let nbytes = 0;
  for (const part of [...parts, ...values]) {
    const at = out.push(part) - 1;
    if (part.inner) {
      const size = flatten(part.inner, out);
      out[at] = header(part.tag, size);
      nbytes += size;
    }
    nbytes += out[at].length;
  }
  return nbytes;
}

function encode(message) {
  const parts = [];
  const nbytes = flatten(message, parts);
  need(nbytes < 2 ** 31, `the model takes ${nbytes} bytes with the values that must be in it, over 2^31`, LimitError);
  const out = new Uint8Array(nbytes);
  let at = 0;
  for (const part of parts) {
    out.set(part, at);
    at += part.length;
  }
  return out;
}

function header(tag, value) {
  const out = [];
  for (let rest of [tag, value]) {
    for (; rest > 127; rest = Math.floor(rest / 128)) out.push((rest % 128) | 128);
    out.push(rest);
  }
  return Uint8Array.from(out);
}

const field = (number, octets) => [header(number * 8 + LEN, octets.length), octets];

/** Returns the fields of raw_data. */
export const rawData = (octets) => field(RAW_DATA, octets);

/** Returns the fields of string_data. */
export const stringData = (texts) => texts.flatMap((octets) => field(STRING_DATA, octets));

/** Returns the fields that say a tensor's values lie in a file. */
export function reference(location, offset, nbytes) {
  const entries = Object.entries({ location, offset, length: nbytes }).flatMap(([key, value]) => field(EXTERNAL_DATA,
    encode({ parts: [...field(1, ENCODER.encode(key)), ...field(2, ENCODER.encode(value))] })));
  return [header(DATA_LOCATION * 8, 1), ...entries];
}
