// A reader of tests/conformance in JavaScript, by zcrecord.js, which has no level `touch`: node tests/conformance/readers/reader.mjs

import { readFileSync } from "node:fs";

import { big, eachWord, range } from "../../../zcrecord/web/reader/format.js";
import { LimitError, RecordError, open } from "../../../zcrecord/web/reader/zcrecord.js";

const [STRING, NONE] = [64, 0xffffffff];
const hex = ({ buffer, byteOffset, byteLength }) => Buffer.from(buffer, byteOffset, byteLength).toString("hex");
const text = (_, value) => (typeof value === "bigint" ? String(value) : value); // JSON has no integers of 64 bits

async function elements(record, { name, code, payload }) {
  if (payload === null) return "";
  if (code === STRING) return hex(await record._payload(payload, 0, record._nbytes(payload)));
  return hex((await record.tensor(name)).contiguous().data);
}

async function tensor(record, name) {
  const info = record.info(name);
  const { module, code, bits, shape, strides, offset, nbytes } = info;
  return { name, module, dtype: code, bits, shape, strides, offset: offset === null ? null : offset - record._base,
    nbytes, tied: await record.tied(name), elements: await elements(record, info) };
}

// Types of values, and kinds and children of modules, are told by their codes; only the index itself has these.
async function attribute(record, rows, i) {
  const { _ix: ix } = record;
  const [type, form, values] = [rows.type(i), rows.form(i), []];
  const words = [];
  eachWord(ix, rows, i, (from, k) => void words.push([from.low(k), from.high(k), big(from, k)]));
  for (const [low, high, word] of words) {
    if (type === 0) values.push(null);
    else if (type === 1) values.push(low === 1);
    else if (type === 2) values.push(BigInt.asIntN(64, word));
    else if (type === 3) values.push(word);
    else if (type === 4) values.push(word.toString(16).padStart(16, "0"));
    else if (type === 5) values.push(ix.textAt(low, high));
    else values.push(low === NONE ? "" : hex(await record._payload(low, 0, record._nbytes(low))));
  }
  return { key: rows.name(i), type, form, values };
}

function modules({ _ix: { modules: m, tensors, attributes, textAt } }) {
  const told = range(m.n, (i) => ({ name: m.name(i), kind: m.kind(i), type_name: textAt(m.type(i), m.typeSize(i)),
    children: [] }));
  const put = (rows, i, key) => { told[rows.parent(i)].children[rows.place(i)] = key; };
  const tail = (rows, i) => textAt(rows.start(i) + rows.size(i) - rows.key(i), rows.key(i));
  for (let i = 1; i < m.n; i++) put(m, i, tail(m, i));
  for (let i = 0; i < tensors.n; i++) put(tensors, i, tail(tensors, i));
  for (let i = 0; i < attributes.n; i++) put(attributes, i, attributes.name(i));
  return told;
}

async function digest(record) {
  try {
    return await record.contentDigest();
  } catch (error) {
    if (error instanceof LimitError) return null; // R76
    throw error;
  }
}

async function contents(record) {
  const { _ix: { modules: m, attributes, metadata } } = record;
  const all = (rows, tell) => Promise.all(range(rows.n, tell));
  return {
    tensors: await Promise.all(record.names.map((name) => tensor(record, name))),
    modules: modules(record),
    attributes: await all(attributes, async (i) => (
      { module: m.name(attributes.parent(i)), ...await attribute(record, attributes, i) })),
    metadata: await all(metadata, (i) => attribute(record, metadata, i)),
    content_digest: await digest(record),
  };
}

async function answer(level, embedded, path) {
  if (level === "touch") return {};
  try {
    const record = await open(readFileSync(path), { verify: level, embedded: embedded === "whole" ? null : embedded });
    return { accepted: true, ...await contents(record) };
  } catch (error) {
    if (!(error instanceof RecordError)) throw error;
    return { accepted: false, message: error.message };
  }
}

let rest = "";
for await (const chunk of process.stdin.setEncoding("utf8")) {
  const lines = (rest + chunk).split("\n"); // node:readline ends lines at CR, too
  rest = lines.pop();
  for (const line of lines) process.stdout.write(`${JSON.stringify(await answer(...line.split("\t")), text)}\n`);
}
