// SPDX-License-Identifier: 0BSD
/**
 * Makes the description that view.js draws, of an archive that zcrecord.js has opened; zcrecord/report/pages.py does
 * it in Python. Knows the columns of an index; fetches nothing.
 */

import { KINDS, NONE, big } from "../reader/format.js";
import { values } from "../reader/structure.js";

const MOST_TEXT = 2000; // characters of a value
const MOST_ITEMS = 20; // of a list
const MOST_ITEM = 200; // characters of an item

/** Returns the description of an opened archive; the page calls it `name`. */
export function describe(record, name, { contentDigest = null } = {}) {
  const { _ix: ix } = record;
  const { layout } = record;
  const out = {
    name,
    archive: {
      nbytes: layout.archiveSize, version: 1, base: layout.offset, indexOffset: layout.indexOffset,
      indexNbytes: layout.indexSize, payloadOffset: layout.payloadOffset, front: layout.front, sealed: layout.sealed,
      alignment: layout.alignment, baseAlignment: layout.baseAlignment, digest: layout.digest, contentDigest,
    },
    dtypes: [], shapes: [], strides: [], strided: {},
    tensors: { key: [], module: [], place: [], dtype: [], shape: [], payload: [] },
    payloads: payloadsOf(ix), modules: modulesOf(ix), attributes: { key: [], module: [], place: [], value: [] },
    metadata: { key: [], value: [] },
  };
  addTensors(record, out);
  for (const { parent, place, name: key, value } of values(record, ix.attributes)) {
    add(out.attributes, { key, module: parent, place, value: jsonable(value) });
  }
  for (const { name: key, value } of values(record, ix.metadata))
    if (key !== "zcrecord.blocks") add(out.metadata, { key, value: jsonable(value) }); // checksums are its writer's
  return out;
}

function add(columns, row) {
  for (const [column, value] of Object.entries(row)) columns[column].push(value);
}

/** Returns the index of a text in a list; a new one is appended. */
function numberOf(text, list, numbers) {
  if (!numbers.has(text)) numbers.set(text, list.push(text) - 1);
  return numbers.get(text);
}

function addTensors({ _ix: ix }, out) {
  const { tensors: t, dims, strides } = ix;
  const [types, shapes, steps] = [new Map(), new Map(), new Map()];
  const textOf = (pool, at, rank, read) =>
    `[${Array.from({ length: rank }, (_, k) => read(big(pool, at + k))).join(", ")}]`;
  for (let i = 0; i < t.n; i++) {
    const [code, bits, rank, number] = [t.dtype(i), t.bits(i), t.rank(i), t.payload(i)];
    const type = KINDS.get(code) ?? { name: `unknown ${code}`, bits };
    add(out.tensors, {
      key: keyOf(ix, t, i), module: t.parent(i), place: t.place(i),
      dtype: numberOf(type.bits === bits ? type.name : `${type.name} in ${bits} bits`, out.dtypes, types),
      shape: numberOf(textOf(dims, t.dims(i), rank, String), out.shapes, shapes),
      payload: number === NONE ? -1 : number,
    });
    if (t.strides(i) === NONE) continue;
    const count = Array.from({ length: rank }, (_, k) => Number(big(dims, t.dims(i) + k)));
    const text = textOf(strides, t.strides(i), rank, (step) => String(BigInt.asIntN(64, step)));
    out.strided[i] = {
      strides: numberOf(text, out.strides, steps),
      byteOffset: t.offset(i), nbytes: Math.ceil((count.reduce((a, b) => a * b, 1) * bits) / 8),
    };
  }
}

const keyOf = ({ textAt }, rows, i) => textAt(rows.start(i) + rows.size(i) - rows.key(i), rows.key(i));

function payloadsOf({ payloads: p, digestKind }) {
  const out = { offset: [], nbytes: [], digest: digestKind ? [] : null };
  for (let i = 0; i < p.n; i++) {
    out.offset.push(p.offset(i));
    out.nbytes.push(p.nbytes(i));
    out.digest?.push(big(p, i).toString(16).padStart(16, "0"));
  }
  return out;
}

function modulesOf(ix) {
  const { modules: m, textAt } = ix;
  const out = { key: [], parent: [], place: [], kind: [], type: [] };
  const kinds = { 2: "list", 3: "tuple", 4: "object", 5: "numbered" };
  for (let i = 0; i < m.n; i++) {
    add(out, {
      key: keyOf(ix, m, i), parent: i ? m.parent(i) : -1, place: m.place(i), kind: kinds[m.kind(i)] ?? "mapping",
      type: textAt(m.type(i), m.typeSize(i)),
    });
  }
  return out;
}

/** Returns a value that JSON can hold, as view.js documents it: shortened if it is long. */
function jsonable(value, most = MOST_TEXT) {
  if (typeof value === "bigint" || (typeof value === "number" && !Number.isFinite(value))) {
    return { number: numberText(value) };
  }
  if (typeof value === "string") {
    const letters = [...value.slice(0, 2 * most + 2)];
    return letters.length > most ? { text: letters.slice(0, most).join(""), count: [...value].length } : value;
  }
  if (Array.isArray(value)) {
    return { items: value.slice(0, MOST_ITEMS).map((item) => jsonable(item, MOST_ITEM)), count: value.length };
  }
  return value !== null && typeof value === "object" ? { nbytes: value.nbytes } : value;
}

function numberText(value) {
  const names = new Map([[Infinity, "inf"], [-Infinity, "-inf"]]);
  return typeof value === "bigint" ? String(value) : (names.get(value) ?? "nan");
}
