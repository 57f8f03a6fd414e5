// SPDX-License-Identifier: 0BSD
/**
 * Decodes the ONNX graph in an archive's attribute `onnx.graph`: nodes, inputs, outputs.
 *
 * Reads the protobuf fields it needs, and skips all others; weights are not in it. Source of field numbers: onnx.proto.
 */

const [GRAPH, NODE, INITIALIZER, INPUT, OUTPUT] = [7, 1, 5, 11, 12];
const TEXT = new TextDecoder();

/** Yields the fields of a message: number, and value (a BigInt, a Float32's bits, or bytes). */
function* fields(octets) {
  const view = new DataView(octets.buffer, octets.byteOffset, octets.length);
  let at = 0;
  const varint = () => {
    let value = 0n;
    for (let shift = 0n; ; shift += 7n) {
      const byte = view.getUint8(at++); // past the end it throws a RangeError
      value |= BigInt(byte & 127) << shift;
      if (byte < 128) return value;
    }
  };
  while (at < octets.length) {
    const tag = varint();
    const [number, wire] = [Number(tag >> 3n), Number(tag & 7n)];
    if (wire === 0) yield [number, varint()];
    else if (wire === 5) yield [number, view.getFloat32((at += 4) - 4, true)];
    else if (wire === 1) yield [number, view.getBigUint64((at += 8) - 8, true)];
    else if (wire === 2) {
      const end = Number(varint()) + at;
      if (end > octets.length) throw new RangeError("a field ends past its message");
      yield [number, octets.subarray(at, end)];
      at = end;
    } else throw new RangeError(`wire type ${wire} is not known`);
  }
}

const of = (octets, number) => [...fields(octets)].filter(([n]) => n === number).map(([, value]) => value);
const text = (octets, number) => TEXT.decode(of(octets, number).at(-1) ?? new Uint8Array(0));

/** Returns an attribute's name and value: a number, a text, or a list of numbers; undefined for anything else. */
function attribute(octets) {
  const value = { name: text(octets, 1) };
  const integers = [];
  for (const [number, found] of fields(octets)) {
    if (number === 2) value.value = found;
    else if (number === 3) value.value = Number(BigInt.asIntN(64, found));
    else if (number === 4) value.value = TEXT.decode(found);
    else if (number === 8 && typeof found === "bigint") integers.push(Number(BigInt.asIntN(64, found)));
  }
  if (integers.length) value.value = integers;
  return [value.name, value.value];
}

function node(octets) {
  return {
    op: text(octets, 4),
    domain: text(octets, 7),
    inputs: of(octets, 1).map((name) => TEXT.decode(name)),
    outputs: of(octets, 2).map((name) => TEXT.decode(name)),
    attributes: Object.fromEntries(of(octets, 5).map(attribute)),
  };
}

/** Returns { nodes, weights, inputs, outputs }, the last three names. Throws RangeError: it is no ModelProto. */
export function graphOf(skeleton) {
  const [graph] = of(skeleton, GRAPH);
  if (!(graph instanceof Uint8Array)) throw new RangeError("there is no graph in it");
  const weights = of(graph, INITIALIZER).map((tensor) => text(tensor, 8));
  const known = new Set(weights);
  return {
    nodes: of(graph, NODE).map(node),
    weights,
    inputs: of(graph, INPUT).map((value) => text(value, 1)).filter((name) => !known.has(name)),
    outputs: of(graph, OUTPUT).map((value) => text(value, 1)),
  };
}
