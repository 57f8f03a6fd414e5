// The weights of an ONNX model as a Blob that holds none of them. Whether the model is right test_web_onnx.py looks at.

import { open } from "../../../../zcrecord/web/reader/zcrecord.js";
import { counting, equal, ok, rejects, test } from "./harness.mjs";

/** Returns all that a stream has, read into `room` bytes at a time if that is given. */
async function drained(stream, room) {
  const reader = stream.getReader(room ? { mode: "byob" } : {});
  const out = [];
  for (;;) {
    const { done, value } = await reader.read(room ? new Uint8Array(room) : undefined);
    if (done) return new Uint8Array(await new Blob(out).arrayBuffer());
    out.push(value);
  }
}

async function largeOf(source, { fetch, ...options } = {}) {
  const made = await (await open(source, { fetch })).toOnnx(options);
  return { ...made, made, blob: made.externalData.find(({ path }) => path === "large").data };
}

test("names of an archive's models are escaped in errors, and few of them shown", async ({ base }) => {
  const record = await open(`${base}/models.zcr`);
  const shown = /its models are in modules: m0\\u\{1b\}\[31m\\u\{202e\}, m1.{80,400}; name one, as the option module$/;
  await rejects(() => record.toOnnx(), "UnsupportedError", shown);
});

test("large weights are fetched when they are read, and each in one request", async ({ base }) => {
  const told = counting();
  const { model, blob } = await largeOf(`${base}/model.zcr`, { fetch: told.fetch });
  ok(blob instanceof Blob && blob.size === 1_240_000, `${blob.size} bytes`);
  ok(model.length < 3000 && told.asked < 300_000, `${told.asked} bytes asked for`);
  const before = told.requests;
  const part = await blob.slice(1_200_000, 1_240_000).arrayBuffer();
  equal(told.requests, before + 1);
  equal(new Float32Array(part)[9_999], 9_999);
});

test("it is sliced and read as any Blob is", async ({ base }) => {
  const { blob } = await largeOf(`${base}/model.zcr`);
  const plain = new Blob([await blob.arrayBuffer()]);
  equal(plain.size, blob.size);
  for (const [start, end] of [[0, 100], [1_199_990, 1_200_010], [-40, -20], [5, 2], [1_239_999], [9e9], [-8]]) {
    const [ours, theirs] = [blob.slice(start, end), plain.slice(start, end)];
    const octets = new Uint8Array(await theirs.arrayBuffer());
    equal([ours.size, await ours.bytes()], [theirs.size, octets]);
    equal(await ours.slice(3, -3).bytes(), octets.slice(3, -3));
    equal(await ours.text(), await theirs.text());
    for (const room of [0, 7, 4096]) equal(await drained(ours.stream(), room), octets);
  }
  ok((await drained(blob.slice(0, 200_000).stream(), 1 << 16)).length === 200_000);
});

test("a Blob, memory and a record that was filled have a model, too", async ({ base }) => {
  const octets = new Uint8Array(await (await fetch(`${base}/model.zcr`)).arrayBuffer());
  const { model, blob } = await largeOf(`${base}/model.zcr`);
  const whole = await blob.bytes();
  const record = await open(octets);
  const hollow = await record.hollow();
  await hollow.stream(record);
  for (const source of [record, await open(new Blob([octets])), hollow.seal()]) {
    const { model: other, externalData } = await source.toOnnx({ verify: true });
    equal(other, model);
    equal(await externalData.at(-1).data.bytes(), whole);
    equal(await drained(externalData.at(-1).data.slice(0, 100).stream()), whole.slice(0, 100));
  }
});

test("a read that fails is told apart from others, and damage is noticed on request", async ({ base }) => {
  const octets = new Uint8Array(await (await fetch(`${base}/model.zcr`)).arrayBuffer());
  const record = await open(octets);
  octets[record.info("large").offset + 5] ^= 1;
  const { made, blob } = await largeOf(octets, { verify: true });
  equal(made.failure, null);
  const damage = /payload \d+: its digest does not match; the file is damaged, copy it again/;
  await rejects(() => drained(blob.slice(0, 1_200_000).stream()), "IntegrityError", damage);
  equal(made.failure.name, "IntegrityError");
  await rejects(() => blob.bytes(), "IntegrityError", damage);
  equal((await (await largeOf(octets)).blob.bytes()).length, 1_240_000);
  octets[record.info("middle").offset] ^= 1;
  await rejects(() => record.toOnnx({ verify: true }), "IntegrityError", damage);
});

test("reads end when they are cancelled, and when the server fails", async ({ base }) => {
  const stop = new AbortController();
  const { made, blob } = await largeOf(`${base}/model.zcr`, { signal: stop.signal });
  stop.abort();
  await rejects(() => blob.arrayBuffer(), "LoadCancelledError", /model\.zcr: was cancelled/);
  equal(made.failure.name, "LoadCancelledError");
  let gone = false;
  const vanishing = (url, options) => fetch(gone ? `${base}/model.zcr?do=missing` : url, options);
  const other = await largeOf(`${base}/model.zcr`, { fetch: vanishing });
  gone = true;
  await rejects(() => drained(other.blob.stream()), "SourceNotFoundError", /model\.zcr/);
  equal(other.made.failure.name, "SourceNotFoundError");
});

test("an archive without a model has none", async ({ base }) => {
  const none = /things\.zcr: no attribute 'onnx\.graph': .* make one with onnx2zc/;
  await rejects(async () => (await open(`${base}/things.zcr`)).toOnnx(), "UnsupportedError", none);
});
