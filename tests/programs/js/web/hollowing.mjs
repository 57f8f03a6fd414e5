// Hollow records: the states and errors of Python's.

import { open } from "../../../../zcrecord/web/reader/zcrecord.js";
import { counting, equal, ok, rejects, test } from "./harness.mjs";

const things = (base) => open(`${base}/things.zcr`);

test("a record that is filled from itself is the same", async ({ base }) => {
  const record = await things(base);
  const hollow = await record.hollow();
  equal([hollow.state, hollow.nbytesFilled], ["declared", 0]);
  equal(hollow.names, record.names);
  equal([...(await hollow.modules()).keys()], [...(await record.modules()).keys()]);
  equal(hollow.missing(), record.names.filter((name) => name !== "empty"));
  await hollow.stream(record);
  equal([hollow.state, hollow.nbytesFilled, hollow.missing()], ["filled", hollow.nbytes, []]);
  const sealed = hollow.seal();
  equal(hollow.state, "sealed");
  equal(await sealed.contentDigest(), await record.contentDigest());
  await sealed.verify();
  equal(await (await sealed.attributes()).get("blob").read(), Uint8Array.of(1, 2, 3));
});

test("tied tensors are filled once, equal ones by themselves", async ({ base }) => {
  const hollow = await (await things(base)).hollow();
  await hollow.set("again", Float32Array.of(9, 8, 7, 6, 5, 4));
  equal(hollow.state, "filling");
  ok(!hollow.missing().includes("encoder.w") && !hollow.missing().includes("turned"));
  ok(hollow.missing().includes("equal"));
  await rejects(() => hollow.set("again", new Float32Array(6)), "FillError", /tensor 'again': is filled already; each/);
  const also = /already, with a tensor whose bytes it shares; each/;
  await rejects(() => hollow.set("encoder.w", new Float32Array(6)), "FillError", also);
});

test("what is filled by strides lies where they say", async ({ base }) => {
  const hollow = await (await things(base)).hollow();
  await hollow.set("turned", Float32Array.of(0, 3, 1, 4, 2, 5));
  await hollow.stream(await things(base));
  const sealed = hollow.seal();
  equal((await sealed.tensor("encoder.w")).data, Float32Array.of(0, 1, 2, 3, 4, 5));
});

test("what was filled with other weights has no digest, and is whole", async ({ base }) => {
  const record = await things(base);
  const hollow = await record.hollow();
  await hollow.set("scalar", Float64Array.of(-1));
  await hollow.stream(record);
  const sealed = hollow.seal();
  equal([sealed.info("scalar").digest, sealed.info("big").digest, sealed.layout.digest], [null, null, "none"]);
  await sealed.verify();
  equal((await sealed.tensor("scalar", { verify: true })).data, Float64Array.of(-1));
  ok((await sealed.contentDigest()) !== (await record.contentDigest()));
});

test("chunks, Maps and iterables fill as well", async ({ base }) => {
  const record = await things(base);
  const hollow = await record.hollow();
  const writer = await hollow.open("encoder.b");
  await writer.write(BigInt64Array.of(5n));
  await writer.write(new Uint8Array(8));
  await rejects(() => hollow.open("encoder.b"), "FillError", /is being filled by another writer/);
  await writer.close();
  await hollow.stream(new Map([["scalar", Float64Array.of(1)], ["no such name", 5]]));
  await hollow.stream(async function* pairs() {
    yield ["encoder.h", [Uint8Array.of(1, 2), Uint8Array.of(3, 4)]];
  }());
  await hollow.stream(record);
  equal((await hollow.seal().tensor("encoder.b")).data, BigInt64Array.of(5n, 0n));
});

test("too much, too little and the wrong kind can be tried again", async ({ base }) => {
  const record = await things(base);
  const hollow = await record.hollow();
  await rejects(() => hollow.set("scalar", new Float64Array(2)), "ProducerError", /8 bytes were declared, at least 16/);
  await rejects(() => hollow.set("scalar", new Uint8Array(7)), "ProducerError", /8 bytes were declared, 7 produced/);
  await rejects(() => hollow.set("scalar", new Float32Array(2)), "ProducerError", /as float64, got Float32Array/);
  await rejects(() => hollow.set("scalar", 5), "ProducerError", /are due, got Number/);
  await rejects(async () => hollow.set("encoder.w", await record.tensor("turned")), "ProducerError",
    /with shape \(2, 3\), got \(3, 2\)/);
  await rejects(() => hollow.set("nope", new Uint8Array(1)), "TensorNotFoundError", /not in this record/);
  equal(hollow.state, "declared");
  const writer = await hollow.open("scalar");
  writer.abort();
  await rejects(() => writer.write(new Uint8Array(1)), "FillError", /was closed, or something failed; open it again/);
  await hollow.set("scalar", Float64Array.of(1));
});

test("sealing lists what is missing, and ends it", async ({ base }) => {
  const record = await things(base);
  const hollow = await record.hollow();
  const listed = /of \d+ tensors are missing: 'encoder\.w', .* more; fill them first/;
  await rejects(async () => hollow.seal(), "FillError", listed);
  await hollow.stream(record);
  hollow.seal();
  await rejects(async () => hollow.seal(), "FillError", /the hollow record is sealed; make another/);
  await rejects(() => hollow.set("scalar", new Float64Array(1)), "FillError", /is sealed/);
  hollow.abort();
  equal(hollow.state, "sealed");
});

test("giving up ends it, and whoever is at it", async ({ base }) => {
  const hollow = await (await things(base)).hollow();
  const writer = await hollow.open("scalar");
  await writer.write(Float64Array.of(1));
  hollow.abort();
  equal(hollow.state, "aborted");
  await rejects(() => writer.close(), "FillError", /was given up; make another/);
  await rejects(() => hollow.open("scalar"), "FillError", /was given up/);
});

test("a sink is given each constant once, and what it makes of them is sealed", async ({ base }) => {
  const record = await things(base);
  const made = [];
  const sink = async (name, info) => {
    made.push(name);
    if (name === "scalar") return new Uint8Array(info.nbytes);
    let done = 0;
    return { write: async (chunk) => { done += chunk.length; }, close: () => `${name}: ${done}` };
  };
  const hollow = await record.hollow({ sink });
  await hollow.stream(record);
  const sealed = hollow.seal();
  equal([...sealed.keys()], record.names);
  equal([sealed.get("encoder.w"), sealed.get("again")], ["encoder.w: 24", "encoder.w: 24"]);
  equal(sealed.get("scalar"), new Uint8Array(Float64Array.of(2.5).buffer));
  equal(sealed.get("empty"), null);
  equal(made.length, new Set(made).size);
  ok(made.includes("encoder.w") && !made.includes("again") && made.includes("turned"));
});

test("a tensor comes in one request, and what a sink keeps of it stays as it was", async ({ base }) => {
  const told = counting();
  const record = await open(`${base}/odd.zcr`, { fetch: told.fetch });
  const before = told.requests;
  const chunks = [];
  const keeper = { write: (chunk) => void chunks.push(chunk) };
  const sink = (_, { nbytes }) => (nbytes > 3 << 20 ? keeper : new ArrayBuffer(nbytes));
  const hollow = await record.hollow({ sink });
  await hollow.stream(record);
  const sealed = hollow.seal();
  equal(told.requests, before + record.length);
  const large = record.names.filter((name) => record.info(name).nbytes > 3 << 20);
  const whole = new Uint8Array(await new Blob(chunks).arrayBuffer());
  let at = 0;
  for (const name of record.names) {
    const { data } = await record.tensor(name);
    const found = large.includes(name) ? whole.subarray(at, (at += data.length)) : new Uint8Array(sealed.get(name));
    ok(found.length === data.length && data.every((byte, i) => byte === found[i]), `${name} differs`);
  }
});

test("a sink that fails leaves the constant to be filled again", async ({ base }) => {
  const record = await things(base);
  let aborted = 0;
  const sink = (name) => (name === "scalar" ? new Uint8Array(3)
    : { write: () => { throw new TypeError("no"); }, abort: () => { aborted += 1; } });
  const hollow = await record.hollow({ sink });
  await rejects(() => hollow.set("encoder.b", new BigInt64Array(2)), "TypeError", /no/);
  equal([aborted, hollow.state], [1, "declared"]);
  await rejects(() => hollow.set("scalar", new Float64Array(1)), "ProducerError", /a buffer of 3 bytes; 8 are needed/);
  await rejects(() => record.hollow({ sink: 5 }), "UnsupportedError", /sink is a function/);
});

test("filling is cancelled between tensors, wherever they come from", async ({ base }) => {
  const record = await things(base);
  const gone = { signal: AbortSignal.abort() };
  const pairs = [["scalar", Float64Array.of(1)]];
  for (const source of [record, new Map(pairs), pairs]) {
    const hollow = await record.hollow();
    await rejects(() => hollow.stream(source, gone), "LoadCancelledError", /was cancelled/);
    equal(hollow.state, "declared");
  }
  const hollow = await record.hollow();
  await hollow.stream(record);
  await rejects(() => hollow.seal().verify(gone), "LoadCancelledError", /was cancelled/);
});

test("what a sink gave is let go of, not finished, once the record was given up", async ({ base }) => {
  const told = [];
  const sink = () => ({ write: () => void told.push("write"), close: () => void told.push("close"),
    abort: () => void told.push("abort") });
  for (const step of [(writer) => writer.close(), (writer) => writer.write(new Uint8Array(1))]) {
    const hollow = await (await things(base)).hollow({ sink });
    const writer = await hollow.open("scalar");
    await writer.write(Float64Array.of(1));
    hollow.abort();
    await rejects(() => step(writer), "FillError", /tensor 'scalar': the hollow record was given up; make another/);
  }
  equal(told, ["write", "abort", "write", "abort"]);
});

test("payloads that share their bytes take no memory out of proportion to the archive", async ({ base }) => {
  const told = counting();
  const record = await open(`${base}/twins.zcr`, { fetch: told.fetch });
  const before = told.requests;
  const what = /twins\.zcr: tensors that share their bytes would take 1258291200 bytes, each by itself; load those/;
  await rejects(() => record.hollow(), "LimitError", what);
  await rejects(() => record.hollow({ sink: () => { throw new Error("it was asked"); } }), "LimitError", what);
  equal(told.requests, before);
});
