// SPDX-License-Identifier: 0BSD
/** Modules, attributes, metadata, ties and the tree of a record, from its index. Fetches nothing. */

import { LimitError, NONE, UnsupportedError, big, eachWord, exact, printable, range } from "./format.js";

const NUMBERED = 5;
const INTEGER = /^(0|-?[1-9][0-9]{0,19})$/;

const KINDS = [, , "list", "tuple", "object", "numbered"]; // every other one is a mapping

/** Returns a function that decodes a module's name once: many attributes may have a long one before theirs. */
function moduleNames({ modules }) {
  const known = new Map();
  return (i) => {
    if (!known.has(i)) known.set(i, modules.name(i));
    return known.get(i);
  };
}

/** Throws LimitError if full names are too large: 100,000 attributes of a module whose name has a MiB. */
function checkFullNames({ path, _header: { indexSize }, _ix: { attributes, modules } }) {
  let total = 0;
  for (let i = 0; i < attributes.n; i++) total += modules.size(attributes.parent(i));
  if (total <= 64 * indexSize) return;
  throw new LimitError(`full names of attributes add up to ${total} bytes, more than 64 times the index`, { path });
}

export function modules({ _ix: ix }) {
  const { modules: m, tensors, textAt } = ix;
  const name = moduleNames(ix);
  return new Map(range(m.n, (i) => {
    const last = m.end(i) < m.n ? m.tensor(m.end(i)) : tensors.n;
    return [name(i), {
      name: name(i), kind: KINDS[m.kind(i)] ?? "mapping", typeName: textAt(m.type(i), m.typeSize(i)),
      tensors: last - m.tensor(i), parent: i ? name(m.parent(i)) : null,
    }];
  }));
}

export function attributes(record) {
  checkFullNames(record);
  const module = moduleNames(record._ix);
  const out = new Map();
  for (const { parent, name, value } of values(record, record._ix.attributes)) {
    const full = parent ? `${module(parent)}.${name}` : name;
    const what = `two attributes have the full name '${printable(full)}'; tree() has both`;
    if (out.has(full)) throw new UnsupportedError(what, { path: record.path });
    out.set(full, value);
  }
  return out;
}

export function metadata(record) {
  return new Map(values(record, record._ix.metadata).map(({ name, value }) => [name, value]));
}

/** Returns every row of attributes or of metadata: number of its module, place in it, name, and value. */
export function values(record, rows) {
  const texts = new Map(); // lists may share words, and words texts: each is made once
  return range(rows.n, (i) => {
    const words = [];
    eachWord(record._ix, rows, i, (from, k) => void words.push(valueOf(record, rows.type(i), from, k, texts)));
    const value = rows.form(i) ? words : words[0];
    return { parent: rows.parent(i), place: rows.place(i), name: rows.name(i), value };
  });
}

function valueOf(record, type, from, k, texts) {
  const [low, high] = [from.low(k), from.high(k)];
  if (type < 2) return type ? low === 1 : null;
  if (type < 4) return exact(type === 2 ? BigInt.asIntN(64, big(from, k)) : big(from, k));
  if (type === 4) return new Float64Array(Uint32Array.of(low, high).buffer)[0];
  if (type === 5) {
    const span = `${low} ${high}`;
    if (!texts.has(span)) texts.set(span, record._ix.textAt(low, high));
    return texts.get(span);
  }
  const nbytes = low === NONE ? 0 : record._nbytes(low);
  return { nbytes, read: ({ signal } = {}) => record._payload(low, 0, nbytes, signal) };
}

/** Returns a key of a NUMBERED module: an integer if it is the canonical text of one that has 64 bits. */
function keyOfText(text) {
  if (!INTEGER.test(text)) return text;
  const value = BigInt(text);
  return value < -(2n ** 63n) || value >= 2n ** 64n ? text : exact(value);
}

export function tree(record) {
  const { modules: m, tensors: t, attributes: rows, textAt } = record._ix;
  const made = range(m.n, () => []);
  const putAt = (parent, place, key, value) => {
    made[parent][place] = [m.kind(parent) === NUMBERED ? keyOfText(key) : key, value];
  };
  const put = (vector, i, value) => {
    const key = textAt(vector.start(i) + vector.size(i) - vector.key(i), vector.key(i));
    putAt(vector.parent(i), vector.place(i), key, value);
  };
  for (let i = 0; i < t.n; i++) put(t, i, record._info(i));
  for (const { parent, place, name, value } of values(record, rows)) putAt(parent, place, name, value);
  for (let i = m.n - 1; i >= 0; i--) { // children come after their parents
    const list = m.kind(i) === 2 || (m.kind(i) === 3 && !m.typeSize(i));
    made[i] = list ? made[i].map(([, value]) => value) : new Map(made[i]);
    if (i) put(m, i, made[i]);
  }
  return made[0];
}

const users = new WeakMap(); // of a record: the names that use a payload, by its number

export function tied(record, name) {
  const { payload } = record._ix.tensors;
  if (!users.has(record)) {
    const found = new Map();
    record.names.forEach((one, i) => {
      if (!found.has(payload(i))) found.set(payload(i), []);
      if (payload(i) !== NONE) found.get(payload(i)).push(one);
    });
    users.set(record, found);
  }
  const names = users.get(record).get(payload(record._find(name)));
  return names.length > 1 ? names : [];
}
