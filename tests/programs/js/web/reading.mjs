// Opening, names, values and bytes: what an archive holds is what was saved, wherever it lies.

import { checkIndex, decodeHeader, decodeIndex } from "../../../../zcrecord/web/reader/format.js";
import * as zcrecord from "../../../../zcrecord/web/reader/zcrecord.js";
import { equal, ok, rejects, test } from "./harness.mjs";

const { open } = zcrecord;
const GOLDEN = ["alignment_16", "alignment_4096", "back_sealed", "back_unsealed", "deduplicated", "dtypes", "empty",
  "int4_bytes", "nested", "numbered", "onnx", "prefix", "strings", "suffix", "tiny", "unknown_dtype", "unknown_kind",
  "unknown_vector", "views"];
const KINDS = [, , "list", "tuple", "object", "numbered"];

const bytesOf = async (base, name) => new Uint8Array(await (await fetch(`${base}/${name}`)).arrayBuffer());
const hex = (octets) => Array.from(octets, (byte) => byte.toString(16).padStart(2, "0")).join("");
const octetsOf = ({ data }) => new Uint8Array(data.buffer, data.byteOffset, data.byteLength);

/** Returns a tensor's bytes as the format has them: of strings the payload. */
async function stored(record, name) {
  const { code, payload } = record.info(name);
  if (code === 64) return payload === null ? new Uint8Array(0) : record._payload(payload, 0, record._nbytes(payload));
  return octetsOf((await record.tensor(name)).contiguous());
}

for (const name of GOLDEN) {
  test(`golden archive ${name} holds what its description says`, async ({ base }) => {
    const told = await (await fetch(`${base}/golden/${name}.json`)).json();
    const record = await open(`${base}/golden/${name}.zcr`, { embedded: told.embedded, verify: "full" });
    equal(record.names, told.tensors.map((tensor) => tensor.name));
    for (const expected of told.tensors) {
      const { code, bits, shape, strides, module } = record.info(expected.name);
      equal([code, bits, shape], [expected.dtype, expected.bits, expected.shape]);
      equal([strides, module], [expected.strides, expected.module]);
      equal(await record.tied(expected.name), expected.tied);
      equal(hex(await stored(record, expected.name)), expected.elements);
    }
    const modules = [...(await record.modules()).values()].map(({ name: n, kind, typeName }) => [n, kind, typeName]);
    equal(modules, told.modules.map((m) => [m.name, KINDS[m.kind] ?? "mapping", m.type_name]));
    equal(await record.contentDigest(), told.content_digest);
  });
}

const SOURCES = {
  url: (base, name) => `${base}/${name}`,
  "a URL object": (base, name) => new URL(`${base}/${name}`),
  "a Blob": async (base, name) => new Blob([await bytesOf(base, name)]),
  "an ArrayBuffer": async (base, name) => (await bytesOf(base, name)).buffer,
  "an odd address": async (base, name) => {
    const octets = await bytesOf(base, name);
    const room = new Uint8Array(octets.length + 3);
    room.set(octets, 3);
    return room.subarray(3);
  },
};

for (const [kind, source] of Object.entries(SOURCES)) {
  test(`everything is read from ${kind}`, async ({ base }) => {
    const record = await open(await source(base, "things.zcr"));
    equal(record.names.slice(0, 3), ["encoder.w", "encoder.b", "encoder.h"]);
    const w = await record.tensor("encoder.w");
    equal([w.data, w.shape, w.dtype, w.strides], [Float32Array.of(0, 1, 2, 3, 4, 5), [2, 3], "float32", null]);
    equal((await record.tensor("encoder.b")).data, BigInt64Array.of(-1n, 2n ** 60n));
    const half = await record.tensor("encoder.h");
    equal([half.dtype, half.data], ["bfloat16", Uint16Array.of(0x3f80, 0xc000)]);
    const f16 = await record.tensor("encoder.f");
    equal(f16.data.constructor, globalThis.Float16Array ?? Uint16Array);
    const complex = await record.tensor("encoder.c");
    equal([complex.data, complex.components], [Float32Array.of(1, 2, 3, -4), 2]);
    equal((await record.array("packed")), Int8Array.of(-8, -1, 0, 7, 3));
    equal((await record.tensor("words")).strings(), ["zero", "", "ünï", "\ufeffthree"]);
    equal((await record.tensor("empty")).data, new Float32Array(0));
    equal((await record.array("turned")), Float32Array.of(0, 3, 1, 4, 2, 5));
    equal((await record.tensor("scalar")).data, Float64Array.of(2.5));
    await record.close();
  });
}

test("a tensor of an ArrayBuffer is a view of it", async ({ base }) => {
  const { buffer } = await bytesOf(base, "things.zcr");
  const record = await open(buffer);
  for (const name of ["encoder.w", "turned", "big"]) ok((await record.tensor(name)).data.buffer === buffer, name);
  ok((await record.slice("big", 5, 9)).data.buffer === buffer);
});

test("a slice has the rows of the whole", async ({ base }) => {
  const record = await open(`${base}/things.zcr`);
  equal((await record.slice("encoder.w", 1)).data, Float32Array.of(3, 4, 5));
  equal((await record.slice("encoder.w", -1, 2)).shape, [1, 3]);
  equal((await record.slice("turned", 1, 3)).contiguous().data, Float32Array.of(1, 4, 2, 5));
  equal((await record.slice("packed", 1, 4)).unpack(), Int8Array.of(-1, 0, 7));
  equal((await record.slice("words", 1, 3)).strings(), ["", "ünï"]);
  equal((await record.slice("encoder.w", 2)).shape, [0, 3]);
  await rejects(() => record.slice("scalar", 0, 1), "UnsupportedError", /tensor 'scalar': a tensor of rank 0/);
});

test("where a slice starts and stops is a number, however it is written", async ({ base }) => {
  const record = await open(`${base}/things.zcr`);
  const rows = async (...args) => (await record.slice("big", ...args)).data.length;
  equal([await rows(NaN), await rows(5, NaN), await rows(1.9, 4.2), await rows(undefined, 3)], [300_000, 0, 3, 3]);
  equal([await rows(-3, Infinity), await rows(-Infinity, 2), await rows(7, 3)], [3, 2, 0]);
  const items = new Array(300_000).fill(0);
  for (const at of [-0.5, 0.5, -1.5, "2", null]) equal(await rows(at), items.slice(at).length);
});

test("integers of less than a byte have their sign where they take a byte each", async ({ base }) => {
  const record = await open(`${base}/golden/int4_bytes.zcr`);
  for (const name of record.names.filter((n) => record.info(n).dtype === "int4")) {
    const { bits } = record.info(name);
    equal([bits, (await record.array(name)).constructor], [8, Int8Array]);
    ok((await record.array(name)).some((value) => value < 0));
  }
});

test("values keep every digit", async ({ base }) => {
  const record = await open(`${base}/things.zcr`);
  const [attributes, metadata] = [await record.attributes(), await record.metadata()];
  equal([attributes.get("version"), attributes.get("huge"), attributes.get("note")], [3, 2n ** 60n, "hi\0there"]);
  equal([attributes.get("numbers"), attributes.get("nothing"), attributes.get("yes")], [[1, -2], null, true]);
  equal([attributes.get("encoder.rate"), metadata.get("by")], [0.5, "a test"]);
  equal(await attributes.get("blob").read(), Uint8Array.of(1, 2, 3));
  equal(record.info("encoder.w").digest.constructor, BigInt);
});

test("the tree is nested as it was saved", async ({ base }) => {
  const tree = await (await open(`${base}/things.zcr`)).tree();
  equal([...tree.get("encoder").keys()], ["w", "b", "h", "f", "c", "rate"]);
  equal(tree.get("layers").map((layer) => layer.get("k").name), ["layers.0.k", "layers.1.k"]);
  equal(tree.get("encoder").get("w").shape, [2, 3]);
});

test("keys that were saved as integers are integers in the tree, all others text", async ({ base }) => {
  const tree = await (await open(`${base}/golden/numbered.zcr`)).tree();
  equal([...tree.keys()], ["state", "milestones", "keys", "rng", "phase", 7]);
  const keys = [-1, 0, "01", "-0", "name", 18446744073709551615n, -9223372036854775808n];
  equal([...tree.get("keys").keys()], keys);
  equal([...tree.get(7).keys()], ["7"]);
  equal(tree.get("state").get(1).get("exp_avg").name, "state.1.exp_avg");
});

test("ties are told, and what is stored once is not tied", async ({ base }) => {
  const record = await open(`${base}/things.zcr`);
  equal(await record.tied("again"), ["encoder.w", "again", "turned"]);
  equal(await record.tied("equal"), []);
  equal(record.info("equal").offset, record.info("encoder.w").offset);
});

test("more than memory holds at once is a typed error", async ({ base }) => {
  const record = await open(`${base}/huge.zcr`);
  await rejects(() => record.tensor("t0"), "LimitError", /tensor 't0': \d+ bytes at once are more .* by slices/);
  equal((await record.slice("t0", 0, 2)).data, Uint8Array.of(0, 0));
  const repeated = await open(`${base}/repeated.zcr`);
  equal((await repeated.tensor("t0")).data, Uint8Array.of(0)); // 2^43 elements, and one byte
  const large = /repeated\.zcr: tensor 't0': 8796093022208 bytes at once are more/;
  await rejects(() => repeated.array("t0"), "LimitError", large);
});

test("a missing tensor lists close names", async ({ base }) => {
  const record = await open(`${base}/things.zcr`);
  const error = await rejects(() => record.tensor("enc.w"), "TensorNotFoundError", /close names: 'encoder\.w'/);
  equal([error.tensor, error.path], ["enc.w", `${base}/things.zcr`]);
  ok(error instanceof zcrecord.RecordError && error instanceof Error && !record.has("enc.w") && !record.has(""));
});

test("a damaged payload is found when it is asked for, and names its tensor", async ({ base }) => {
  const octets = await bytesOf(base, "things.zcr");
  const { offset } = (await open(octets)).info("big");
  octets[offset + 7] ^= 1;
  const record = await open(octets);
  const damaged = /tensor 'big': .*digest does not match/;
  await rejects(() => record.tensor("big", { verify: true }), "IntegrityError", damaged);
  await rejects(() => record.verify(), "IntegrityError", /tensor 'big'/);
  await rejects(() => open(octets, { verify: "full" }), "IntegrityError", /tensor 'big'/);
  await record.tensor("encoder.w", { verify: true });
});

test("names are shown without control characters", async ({ base }) => {
  const record = await open(`${base}/things.zcr`);
  const error = await rejects(() => record.tensor("a\u001b[31m\n"), "TensorNotFoundError", /'a\\u\{1b\}\[31m\\u\{a\}'/);
  ok(!error.message.includes("\n"));
});

test("elements of an unknown type are bytes, and no array", async ({ base }) => {
  const record = await open(`${base}/golden/unknown_dtype.zcr`);
  const name = record.names.find((n) => record.info(n).dtype.startsWith("unknown_"));
  equal((await record.tensor(name)).data.constructor, Uint8Array);
  await rejects(() => record.array(name), "UnsupportedError", /dtype code \d+ is not known/);
  const things = await open(`${base}/things.zcr`);
  await rejects(() => things.array("words"), "UnsupportedError", /strings are no array/);
});

test("what is no archive says so", async ({ base }) => {
  const text = (start) => Uint8Array.from(start.padEnd(300), (c) => c.charCodeAt(0));
  const octets = await bytesOf(base, "golden/tiny.zcr");
  const cases = [
    [new Uint8Array(0), "FormatError", /the file is empty/],
    [octets.subarray(0, 100), "FormatError", /100 bytes are too few|truncated/],
    [octets.subarray(0, -1), "FormatError", /truncated, or other bytes follow it .*copy it again/],
    [new Uint8Array(500), "FormatError", /not a zcrecord archive/],
    [new Uint8Array([...octets, 0]), "FormatError", /or other bytes follow it/],
    [octets.with(8, 0), "VersionError", /format version 0 is not known; of a draft, version 0, `zcrecord convert` makes/],
    [octets.with(8, 2), "VersionError", /format version 2 .*upgrade zcrecord.js/],
    [octets.with(70, 1), "IntegrityError", /index: its CRC/],
    [42, "UnsupportedError", /open takes .* got Number/],
    [null, "UnsupportedError", /open takes .* got null/],
    [text("\x28\xb5\x2f\xfd"), "FormatError", /packed with Zstandard; unpack it first/],
    [text("<!doctype html>"), "FormatError", /looks like HTML .* look at the URL/],
    [text("\x08\x08\x12\x07"), "FormatError", /an ONNX model; convert it with `onnx2zc`/],
    [text('12345678{"__metadata__"'), "FormatError", /safetensors/],
  ];
  for (const [source, name, pattern] of cases) await rejects(() => open(source), name, pattern);
  await rejects(() => open(octets, { verify: "maybe" }), "UnsupportedError", /verify is/);
  await rejects(() => open(octets, { embedded: "middle" }), "UnsupportedError", /embedded is/);
});

test("an empty tensor's elements are of the type that others' are", async ({ base }) => {
  const record = await open(`${base}/things.zcr`);
  const { constructor } = await record.array("packed");
  equal((await record.slice("packed", 2, 2)).unpack().constructor, constructor);
});

test("a tensor whose strides are all forward starts at 0, not at -0", async ({ base }) => {
  equal((await (await open(`${base}/things.zcr`)).tensor("turned")).base, 0);
});

test("what is no text is no tensor's name", async ({ base }) => {
  const record = await open(`${base}/golden/nested.zcr`);
  for (const name of [5, /w/, null, undefined, Symbol("w"), ["w"]]) {
    ok(!record.has(name));
    await rejects(() => record.tensor(name), "TensorNotFoundError", /not in this record/);
  }
  ok(!(await open(`${base}/golden/tiny.zcr`)).has(["w"]));
});

test("an index in memory that others may write to is copied before it is checked", async ({ base }) => {
  const octets = await bytesOf(base, "things.zcr");
  const pages = Math.ceil(octets.length / 65_536);
  const { buffer } = new WebAssembly.Memory({ initial: pages, maximum: pages, shared: true });
  const shared = new Uint8Array(buffer, 0, octets.length);
  shared.set(octets);
  const record = await open(shared);
  const { indexOffset, indexSize } = record.layout;
  shared.fill(0xff, indexOffset, indexOffset + indexSize);
  equal((await record.tensor("encoder.w")).data, Float32Array.of(0, 1, 2, 3, 4, 5));
  equal((await record.tensor("words")).strings()[2], "ünï");
});

test("a shape of more than 2^53 bits is held to its payload to the byte", async ({ base }) => {
  const octets = await bytesOf(base, "golden/tiny.zcr");
  const found = decodeHeader(octets.subarray(0, 64), "header");
  const claimed = (nbytes) => {
    const ix = decodeIndex(octets.slice(found.indexOffset, found.indexOffset + found.indexSize));
    Object.assign(ix.tensors, { dtype: () => 200, bits: () => 1 });
    Object.assign(ix.dims, { low: () => 1, high: () => 2 ** 21 }); // 2^53 + 1, which no number is
    ix.payloads.nbytes = () => nbytes;
    const region = Math.ceil(nbytes / found.alignment) * found.alignment;
    checkIndex(ix, { ...found, archiveSize: found.payloadOffset + region + 64 });
  };
  claimed(2 ** 50 + 1);
  const error = await rejects(async () => claimed(2 ** 50), "FormatError", /tensors\[0\]/);
  equal(error.rule, 51);
});

test("a tensor of more elements than any number counts has the bytes of its payload, and no slices", async ({ base }) => {
  const record = await open(`${base}/golden/tiny.zcr`);
  Object.assign(record._ix.tensors, { dtype: () => 200, bits: () => 1, rank: () => 1 });
  Object.assign(record._ix.dims, { low: () => 1, high: () => 2 ** 21 }); // 2^53 + 1
  record._ix.payloads.nbytes = () => 2 ** 50 + 1;
  const { shape, nbytes } = record.info("w");
  equal([shape, nbytes], [[2n ** 53n + 1n], 2 ** 50 + 1]);
  await rejects(() => record.slice("w", 8, 9), "LimitError", /tensor 'w': more than 2\^53 bits are not read by slices/);
});

test("an empty tensor may have dims that no number is", async ({ base }) => {
  const record = await open(`${base}/golden/tiny.zcr`);
  Object.assign(record._ix.tensors, { rank: () => 2, payload: () => 0xffffffff });
  Object.assign(record._ix.dims, { low: (k) => 1 - k, high: (k) => (k ? 0 : 2 ** 22) });
  const { shape, count, nbytes } = record.info("w");
  equal([shape, count, nbytes], [[2n ** 54n + 1n, 0], 0, 0]);
  equal((await record.tensor("w")).data, new Uint8Array(0));
  equal((await record.slice("w", 3, 5)).shape, [2, 0]);
  equal(await record.array("w"), new Uint8Array(0));
});
