// Constants of WebNN: refused before the first byte or given as a whole, tied ones once, little in memory.

import { open } from "../../../../zcrecord/web/reader/zcrecord.js";
import { counting, equal, ok, rejects, test } from "./harness.mjs";
import { IDL, MEMBERS, MLContext, MLGraphBuilder, MLOperand, MLTensor } from "./webnn_standin.mjs";

const TYPES = ["float32", "float16", "int32", "uint32", "int64", "uint64", "int8", "uint8"];
const one = { dataType: "float32", shape: [1] };

/** Returns a record's elements as bytes, in C order. */
async function octetsOf(record, name) {
  const { buffer, byteOffset, byteLength } = (await record.tensor(name)).contiguous().data;
  return new Uint8Array(buffer, byteOffset, byteLength);
}

/** Fills a hollow record from itself; returns its constants. */
async function constantsOf(record, context, options) {
  const hollow = await record.hollow({ sink: await record.webnnSink(context, options) });
  await hollow.stream(record);
  return hollow.seal();
}

test("the stand-in for WebNN holds to its IDL and its steps", async () => {
  const context = new MLContext();
  for (const [name, members] of Object.entries(MEMBERS)) {
    const { prototype } = { MLContext, MLGraphBuilder, MLOperand, MLTensor }[name];
    for (const member of members) ok(member in prototype, `${name} has no ${member}`);
  }
  equal(TYPES.every((type) => IDL.includes(`"${type}"`)), true);
  const builder = new MLGraphBuilder(context);
  const wrong = [
    [{ ...one, dataType: "bool" }, new Uint8Array(1), /'bool' is not a valid enum/],
    [{ ...one, shape: [0] }, new Uint8Array(0), /not a valid dimension/],
    [{ ...one, shape: [2 ** 32] }, new Uint8Array(4), /outside the 'unsigned long'/],
    [{ ...one, shape: Array(9).fill(1) }, new Uint8Array(4), /rank is not supported/],
    [one, new Uint8Array(3), /byte length \(3\) is not the expected one \(4\)/],
    [one, new Int32Array(1), /must match the data type/],
    [one, new DataView(new ArrayBuffer(4)), /must match the data type/],
    [one, "text", /not a BufferSource/],
  ];
  for (const [descriptor, source, what] of wrong) {
    await rejects(async () => builder.constant(descriptor, source), "TypeError", what);
    await rejects(() => context.createConstantTensor(descriptor, source), "TypeError", what);
  }
  for (const source of [new Uint8Array(4), new ArrayBuffer(4), new Float32Array(1)]) builder.constant(one, source);
  const tensor = await context.createConstantTensor(one, new Uint8Array(4));
  const other = new MLGraphBuilder(new MLContext());
  await rejects(async () => other.constant(tensor), "TypeError", /tensor is invalid/);
  equal([...builder.constant(tensor).shape], [1]);
  tensor.destroy();
  await rejects(async () => builder.constant(tensor), "TypeError", /tensor is invalid/);
  await builder.build();
  await rejects(async () => builder.constant(one, new Uint8Array(4)), "InvalidStateError", /can not build/);
  context.destroy();
  await rejects(async () => new MLGraphBuilder(context), "InvalidStateError", /lost/);
});

for (const way of ["operands", "tensors"]) {
  test(`constants become ${way} with their elements in C order, tied ones one`, async ({ base }) => {
    const record = await open(`${base}/things.zcr`);
    const context = new MLContext();
    const builder = way === "operands" ? new MLGraphBuilder(context) : null;
    const constants = await constantsOf(record, context, { builder, unsupported: "bytes" });
    equal([...constants.keys()], record.names);
    const kinds = {};
    for (const name of record.names) {
      const { dtype, shape, nbytes } = record.info(name);
      const made = constants.get(name);
      (kinds[made?.constructor.name ?? "null"] ??= []).push(name);
      if (!nbytes) continue;
      const found = made instanceof ArrayBuffer ? new Uint8Array(made) : made.octets ?? builder.constants.get(made);
      if (dtype === "string") equal(found.length, nbytes);
      else equal(found, await octetsOf(record, name));
      if (!(made instanceof ArrayBuffer)) equal([made.dataType, made.shape], [dtype, shape]);
    }
    const plain = ["encoder.w", "encoder.b", "encoder.f", "again", "equal", "turned", "big", "layers.0.k",
      "layers.1.k"];
    equal(kinds, {
      [builder ? "MLOperand" : "MLTensor"]: plain,
      ArrayBuffer: ["encoder.h", "encoder.c", "packed", "words", "flags", "scalar"], null: ["empty"],
    });
    ok(constants.get("again") === constants.get("encoder.w") && constants.get("equal") !== constants.get("again"));
    equal(constants.get("turned").shape, [3, 2]);
  });
}

test("types that WebNN lacks are refused before the first byte", async ({ base }) => {
  const told = counting();
  const record = await open(`${base}/things.zcr`, { fetch: told.fetch });
  const [before, context] = [told.requests, new MLContext()];
  const error = await rejects(() => record.webnnSink(context, { builder: new MLGraphBuilder(context) }),
    "UnsupportedError", /things\.zcr: tensor 'encoder\.h': this context has no constants of bfloat16, only of float32/);
  ok(/uint8; save it as one of these, or pass unsupported: "bytes"; 6 tensors cannot be constants/.test(error.message));
  equal([error.tensor, told.requests], ["encoder.h", before]);
  for (const file of ["dtypes", "int4_bytes", "unknown_dtype", "strings", "views"]) {
    const golden = await open(`${base}/golden/${file}.zcr`);
    const constants = await constantsOf(golden, context, { unsupported: "bytes" });
    const found = golden.names.filter((name) => constants.get(name) instanceof MLTensor);
    const right = golden.names.filter((name) => golden.info(name).nbytes && TYPES.includes(golden.info(name).dtype));
    equal([file, found], [file, right]);
  }
});

test("packed int4 is taken by a context that has it, int4 in bytes is not", async ({ base }) => {
  const wide = new MLContext({ dataTypes: [...TYPES, "int4"] }); // as Chromium's, beyond the specification
  const record = await open(`${base}/things.zcr`);
  const sink = await record.webnnSink(wide, { unsupported: "bytes" });
  const kinds = ["packed", "flags"].map((name) => sink(name, record.info(name)) instanceof ArrayBuffer);
  equal(kinds, [false, true]);
  const bytes = await open(`${base}/golden/int4_bytes.zcr`);
  await rejects(() => bytes.webnnSink(wide), "UnsupportedError", /no constants of int4 of 8 bits, only of .*, int4;/);
});

test("what a context takes less of is refused, too, and other arguments", async ({ base }) => {
  const record = await open(`${base}/front.zcr`); // ten of 100,000 bytes
  const context = new MLContext();
  const asks = async (limits, what) => rejects(() => record.webnnSink(new MLContext(limits)), "UnsupportedError", what);
  await asks({ dataTypes: ["float16"] }, /'t0': .* no constants of float32, only of float16; .*; 10 tensors cannot/);
  await asks({ most: 99_999 }, /takes 2147483647 elements and 99999 bytes, not 25000 and 100000; split it/);
  await asks({ max: 0 }, /this context takes 0 to 0 dimensions, not 1; reshape it/);
  await asks({ refuses: "not supported" }, /makes no constant tensors \(not supported\); pass a builder/);
  context.createConstantTensor = undefined; // may be removed from the specification, issue 940
  await rejects(() => record.webnnSink(context), "UnsupportedError", /makes no constant tensors \(.*; pass a builder/);
  await rejects(() => record.webnnSink({}), "UnsupportedError", /takes an MLContext/);
  await rejects(() => record.webnnSink(context, { builder: {} }), "UnsupportedError", /is an MLGraphBuilder/);
  await rejects(() => record.webnnSink(context, { unsupported: "skip" }), "UnsupportedError", /"bytes", not skip/);
  await record.webnnSink(new MLContext({ refuses: "not supported" }), { builder: new MLGraphBuilder(context) });
});

test("constant tensors serve several builders, until the sink destroys them", async ({ base }) => {
  const record = await open(`${base}/front.zcr`);
  const context = new MLContext();
  const sink = await record.webnnSink(context);
  equal(context.alive.size, 0); // the one that it tried was destroyed
  const hollow = await record.hollow({ sink });
  await hollow.stream(record);
  const tensors = [...hollow.seal().values()];
  for (const builder of [1, 2].map(() => new MLGraphBuilder(context))) tensors.forEach((t) => builder.constant(t));
  equal(context.alive.size, 10);
  sink.destroy();
  equal(context.alive.size, 0);
});

test("what WebNN refuses on the way names the tensor, and can be filled again", async ({ base }) => {
  const record = await open(`${base}/front.zcr`);
  const context = new MLContext();
  const builder = new MLGraphBuilder(context);
  const hollow = await record.hollow({ sink: await record.webnnSink(context, { builder }) });
  await hollow.set("t0", new Float32Array(25_000));
  const constant = builder.constant.bind(builder);
  const buffers = new Set();
  builder.constant = () => { throw new DOMException("no room", "OperationError"); };
  const failed = await rejects(() => hollow.set("t1", new Float32Array(25_000)), "SourceError",
    /front\.zcr: tensor 't1': WebNN refuses it: no room/);
  equal([failed.cause.name, hollow.missing().length], ["OperationError", 9]);
  builder.constant = (descriptor, octets) => {
    buffers.add(octets.buffer);
    return constant(descriptor, octets);
  };
  await hollow.stream(record);
  equal(buffers.size, 1);
  const constants = hollow.seal();
  equal(builder.constants.get(constants.get("t1")), await octetsOf(record, "t1"));
  const tensors = await record.webnnSink(context);
  const second = await record.hollow({ sink: tensors });
  await second.set("t0", new Float32Array(25_000));
  context.destroy();
  await rejects(() => second.stream(record), "SourceError", /tensor 't1': WebNN refuses it: Context is lost/);
});

test("constants that are filled at the same time do not mix", async ({ base }) => {
  const record = await open(`${base}/front.zcr`);
  const context = new MLContext();
  const builder = new MLGraphBuilder(context);
  const hollow = await record.hollow({ sink: await record.webnnSink(context, { builder }) });
  const names = ["t1", "t2", "t3"];
  for (let round = 0; round < 2; round++) { // the first one is left half-way
    const writers = await Promise.all(names.map((name) => hollow.open(name)));
    for (const [k, writer] of writers.entries()) await writer.write(new Float32Array(12_500).fill(k + 1));
    if (!round) writers.forEach((writer) => writer.abort());
    else for (const [k, writer] of writers.entries()) await writer.take(new Float32Array(12_500).fill(k + 1));
    if (round) await Promise.all(writers.map((writer) => writer.close()));
  }
  await hollow.stream(record);
  const constants = hollow.seal();
  for (const name of names) equal(builder.constants.get(constants.get(name)), await octetsOf(record, name));
});
