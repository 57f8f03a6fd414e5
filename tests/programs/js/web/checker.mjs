// The checker of tests/support/readers.py's protocol over zcrecord.js, for levels i and f; it uses everything the reader offers
// on every archive that it accepts. `--xxh3` reads u32 sizes and bytes instead, and writes their digests; `--content`
// answers with content digests; `--elements` with them and a CRC of all elements in C order, which every way of reading
// and filling has to give; `--terse` answers as if there were nothing in any archive; `--everything` as well, but
// asks all there is to ask, and refuses what any of it refuses.

import { readFileSync } from "node:fs";

import { RecordError, open } from "../../../../zcrecord/web/reader/zcrecord.js";
import { big, crc32, eachWord } from "../../../../zcrecord/web/reader/format.js";
import { xxh3 } from "../../../../zcrecord/web/reader/digests.js";

const NONE = 0xffffffff;
const EMBEDDED = { w: null, p: "prefix", s: "suffix" };
const LEVELS = { i: "index", f: "full" };
const flag = (name) => process.argv.includes(name);

const hex = (bytes) => Buffer.from(bytes).toString("hex") || "-";
const hex32 = (value) => value.toString(16).padStart(8, "0");
const parent = (number) => (number === NONE ? "-" : number);

async function tensorLine(record, i) {
  const { tensors: t } = record._ix;
  const { name, code, bits, shape, strides, offset, payload } = record._info(i);
  let bytes = "- 0 00000000";
  if (payload !== null) {
    const octets = await record._payload(payload, 0, record._nbytes(payload));
    bytes = `${offset - record._base} ${octets.length} ${hex32(crc32(octets))}`;
  }
  const stored = strides === null ? "c" : strides.join() || "-";
  const what = `${hex(name)} ${code} ${bits} ${shape.join() || "-"} ${stored} ${bytes}`;
  return `tensor ${what} ${t.parent(i)} ${t.place(i)} ${t.key(i)}\n`;
}

function moduleLine({ modules: m, textAt }, i) {
  const type = hex(textAt(m.type(i), m.typeSize(i)));
  const what = `${hex(m.name(i))} ${m.kind(i)} ${type} ${parent(m.parent(i))} ${m.end(i)}`;
  return `module ${what} ${m.place(i)} ${m.key(i)}\n`;
}

function attributeLine(record, what, rows, i) {
  const { _ix: ix } = record;
  const [type, form] = [rows.type(i), rows.form(i)];
  const words = [];
  eachWord(ix, rows, i, (from, k) => {
    const [low, high] = [from.low(k), from.high(k)];
    if (type === 5) words.push(hex(ix.pool.subarray(low, low + high)));
    else if (type === 6) words.push(low === NONE ? 0 : record._nbytes(low));
    else words.push(big(from, k));
  });
  const where = `${parent(rows.parent(i))} ${rows.place(i)} ${hex(rows.name(i))}`;
  return `${what} ${where} ${type} ${form} ${words.join() || "-"}\n`;
}

async function dump(record) {
  const { _ix: ix, _header: h } = record;
  const counts = [ix.tensors, ix.modules, ix.attributes, ix.metadata].map(({ n }) => n);
  let out = `archive ${h.alignment} ${h.baseAlignment} ${h.archiveSize} ${counts.join(" ")}\n`;
  for (let i = 0; i < counts[0]; i++) out += await tensorLine(record, i);
  for (let i = 0; i < counts[1]; i++) out += moduleLine(ix, i);
  for (let i = 0; i < counts[2]; i++) out += attributeLine(record, "attribute", ix.attributes, i);
  for (let i = 0; i < counts[3]; i++) out += attributeLine(record, "metadata", ix.metadata, i);
  return out;
}

// Uses whatever the reader offers: in an archive that opened nothing may fail but the ends of strings, which are the
// payload's, and all ways to one thing agree.
async function useAll(record, level) {
  await record.tree();
  if ((await record.modules()).size < 1 || record.names.length !== record.length) throw new Error("counts differ");
  const values = [...(await record.attributes()).values(), ...(await record.metadata()).values()];
  for (const value of values.flat()) await value?.read?.();
  for (const [i, name] of record.names.entries()) {
    if (record._find(name) !== i) throw new Error(`${name} is not found`);
    const { shape, code, dtype } = record.info(name);
    if (shape.some((dim) => typeof dim === "bigint")) continue;
    try {
      const tensor = await record.tensor(name);
      if (code === 64) {
        const all = tensor.strings({ decoded: false });
        const rows = shape.length && shape[0] ? await record.slice(name, 0, 1) : tensor;
        if (rows.strings({ decoded: false }).some((one, k) => Buffer.compare(one, all[k]))) throw new Error("strings");
      } else if (tensor.data.length < 1 << 16 && !dtype.startsWith("unknown")) {
        const all = await record.array(name);
        if (!shape.length || !shape[0]) continue;
        const half = shape[0] >> 1;
        const parts = [await record.slice(name, 0, half), await record.slice(name, half)];
        const joined = parts.map((part) => [...(part.packed ? part.unpack() : part.contiguous().data)]).flat();
        const same = (a, b) => Object.is(a, b);
        const aligned = joined.length === all.length;
        if (!aligned || !joined.every((one, k) => same(one, all[k]))) throw new Error(`${name}: slices differ`);
      }
    } catch (error) {
      if (level === "f" || code !== 64 || !(error instanceof RecordError)) throw error;
    }
  }
}

/** Asks each question whatever came of the ones before, and throws the first error. */
async function askAll(record) {
  const some = record.names.slice(0, 1000);
  const questions = [
    async () => { for (const name of some) await record.tied(record.info(name).name); },
    async () => { for (const name of some.slice(0, 100)) await record.tensor(name); },
    () => record.tree(), () => record.modules(), () => record.attributes(), () => record.metadata(),
    () => record.verify(), () => record.contentDigest(),
  ];
  let first = null;
  for (const ask of questions) {
    try {
      await ask();
    } catch (error) {
      if (!(error instanceof RecordError)) throw error;
      first ??= error;
    }
  }
  if (first) throw first;
}

const octetsOf = ({ buffer, byteOffset, byteLength }) => Buffer.from(buffer, byteOffset, byteLength);

/** Returns the elements of every tensor in saved order; as they come by slices, as an array, and out of a record that
 *  was filled with them. */
async function elementsOf(record) {
  const hollow = await record.hollow();
  await hollow.stream(record);
  const filled = hollow.seal();
  const out = [];
  for (const name of record.names) {
    const { shape: [rows], dtype } = record.info(name);
    const wholes = [(await record.tensor(name)).contiguous().data, (await filled.tensor(name)).contiguous().data];
    if (!dtype.startsWith("unknown")) wholes.push(await record.array(name));
    if (rows !== undefined) {
      const parts = [await record.slice(name, 0, rows >> 1), await record.slice(name, rows >> 1)];
      wholes.push(new Uint8Array(Buffer.concat(parts.map((part) => octetsOf(part.contiguous().data)))));
    }
    const [first, ...others] = wholes.map(octetsOf);
    if (!others.every((other) => first.equals(other))) throw new Error(`${name}: ways to its elements differ`);
    out.push(first);
  }
  if (await filled.contentDigest() !== await record.contentDigest()) throw new Error("the filled record differs");
  return Buffer.concat(out);
}

async function answer(mode, level, bytes) {
  let record;
  try {
    record = await open(bytes, { embedded: EMBEDDED[mode], verify: LEVELS[level] });
    if (flag("--everything")) await askAll(record);
  } catch (error) {
    if (error instanceof RecordError) return `refused ${error.name}: ${error.message}\n`.replace(/\n(?=.)/g, " ");
    throw error;
  }
  if (flag("--terse") || flag("--everything")) return `accepted ${hex32(crc32(Buffer.from("")))}\n`;
  if (flag("--content")) return `accepted ${await record.contentDigest()}\n`;
  if (flag("--elements")) {
    return `accepted ${await record.contentDigest()} ${hex32(crc32(await elementsOf(record)))}\n`;
  }
  if (bytes.length < 1 << 16) await useAll(record, level);
  const text = await dump(record);
  return `accepted ${hex32(crc32(Buffer.from(text)))}\n${flag("--dump") ? `${text}\n` : ""}`;
}

const input = readFileSync(0);
const answers = [];
const head = flag("--xxh3") ? 0 : 4;
for (let at = 0; at < input.length;) {
  const size = input.readUInt32LE(at + head);
  const bytes = input.subarray(at + head + 4, at + head + 4 + size);
  const [mode, level] = input.toString("latin1", at, at + 2);
  answers.push(head ? await answer(mode, level, bytes) : `${xxh3(bytes).toString(16).padStart(16, "0")}\n`);
  at += head + 4 + size;
}
process.stdout.write(answers.join(""));
