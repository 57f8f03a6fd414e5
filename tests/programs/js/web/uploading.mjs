// Payloads onto a device: every byte where it belongs, ties once, little in memory, nothing left behind.

import { open } from "../../../../zcrecord/web/reader/zcrecord.js";
import { FakeDevice } from "./fake_gpu.mjs";
import { counting, equal, ok, rejects, test } from "./harness.mjs";

test("the fake device holds to the rules of WebGPU", async () => {
  const device = new FakeDevice();
  const buffer = device.createBuffer({ size: 8, usage: 8 });
  const write = (...args) => rejects(async () => device.queue.writeBuffer(...args), "Error", /OperationError/);
  await write(buffer, 2, new ArrayBuffer(4));
  await write(buffer, 0, new ArrayBuffer(3));
  await write(buffer, 8, new ArrayBuffer(4));
  await write(device.createBuffer({ size: 8, usage: 4 }), 0, new ArrayBuffer(4));
  buffer.destroy();
  await write(buffer, 0, new ArrayBuffer(4));
});

const sources = {
  "a URL": (base) => `${base}/things.zcr`,
  memory: async (base) => (await fetch(`${base}/things.zcr`)).arrayBuffer(),
  "a Blob": async (base) => (await fetch(`${base}/things.zcr`)).blob(),
};

for (const [kind, source] of Object.entries(sources)) {
  test(`every payload of ${kind} arrives whole in a buffer of its own`, async ({ base }) => {
    const record = await open(await source(base));
    const device = new FakeDevice();
    const steps = [];
    const onProgress = (done, total) => steps.push([done, total]);
    const bindings = await record.uploadTo(device, undefined, { onProgress, verify: true });
    equal([...bindings.keys()], record.names);
    for (const name of record.names) {
      const { payload, shape, dtype, byteOffset } = record.info(name);
      const found = bindings.get(name);
      equal([found.shape, found.dtype, found.offset], [shape, dtype, byteOffset]);
      if (payload === null) {
        equal([found.buffer, found.size], [null, 0]);
        continue;
      }
      const octets = await record._payload(payload, 0, record._nbytes(payload));
      equal([found.size, found.buffer.size], [octets.length, Math.ceil(octets.length / 4) * 4]);
      ok(octets.every((byte, i) => byte === found.buffer.octets[i]), `${name} differs`);
      ok(!found.buffer.octets.subarray(octets.length).some(Boolean));
    }
    ok(bindings.get("again").buffer === bindings.get("encoder.w").buffer, "tied tensors share a buffer");
    ok(bindings.get("equal").buffer !== bindings.get("encoder.w").buffer, "equal ones do not");
    ok(steps.every(([done], i) => !i || done > steps[i - 1][0]));
    equal(steps.at(-1), [record.nbytes - 3, record.nbytes - 3]); // but for the attribute's 3 bytes
    equal(device.scopes, []);
  });
}

test("neighbours come in one request, a chosen few are all that is fetched", async ({ base }) => {
  const told = counting();
  const record = await open(`${base}/things.zcr`, { fetch: told.fetch });
  const before = told.requests;
  await record.uploadTo(new FakeDevice());
  equal(told.requests, before + 1);
  const few = await record.uploadTo(new FakeDevice(), ["encoder.w", "encoder.b"], { usage: 0x20 });
  equal([...few.keys()], ["encoder.w", "encoder.b"]);
  equal(few.get("encoder.w").buffer.usage, 0x28);
  equal(told.requests, before + 2);
});

test("requests run side by side, as many as are asked for", async ({ base }) => {
  let [now, most] = [0, 0];
  const slow = async (url, options) => {
    most = Math.max(most, ++now);
    await new Promise((resolve) => { setTimeout(resolve, 5); });
    const response = await fetch(url, options);
    now -= 1;
    return response;
  };
  const record = await open(`${base}/apart.zcr`, { fetch: slow });
  const names = record.names.filter((name) => name.startsWith("small"));
  await record.uploadTo(new FakeDevice(), names, { maxInFlight: 2 });
  equal(most, 2);
});

test("large payloads go through a few pieces, and wait for the device", async ({ base }) => {
  if (!globalThis.gc) return; // Node with --expose-gc
  const record = await open(`${base}/quarter.zcr`);
  const device = new FakeDevice({ keep: false });
  const used = () => {
    globalThis.gc();
    const { heapUsed, external } = process.memoryUsage();
    return heapUsed + external;
  };
  const settled = async () => { // garbage outside V8's heap goes in its own time
    let least = used();
    for (let i = 0; i < 5; i++) {
      await new Promise((resolve) => { setTimeout(resolve, 10); });
      least = Math.min(least, used());
    }
    return least;
  };
  const start = await settled();
  let [most, last] = [0, 0];
  const onProgress = (done) => {
    if (done - last < 1 << 24) return;
    last = done;
    most = Math.max(most, used() - start);
  };
  await record.uploadTo(device, undefined, { onProgress });
  equal(device.buffers.reduce((sum, { written }) => sum + written, 0), record.nbytes);
  ok(most < 48 << 20 && device.mostQueued <= 9 << 20, `${most >> 20} MiB, ${device.mostQueued >> 20} MiB queued`);
  const before = await settled();
  const held = new Uint8Array(64 << 20).fill(1);
  ok((await settled()) - before > 48 << 20 && held[5] === 1, "a whole payload in the heap would be noticed");
});

async function leavesNothing(device, action, name, pattern) {
  const error = await rejects(action, name, pattern);
  ok(device.buffers.length > 0 && device.buffers.every((buffer) => buffer.destroyed), "a buffer was left behind");
  return error;
}

test("what fails on the way leaves no buffer behind", async ({ base }) => {
  const device = new FakeDevice();
  const record = await open(`${base}/things.zcr?do=lateshort`);
  await leavesNothing(device, () => record.uploadTo(device), "SourceError", /the request failed|are missing/);
});

test("a device that is too small, full or lost is a typed error", async ({ base }) => {
  const record = await open(`${base}/things.zcr`);
  const small = new FakeDevice({ maxBufferSize: 1000 });
  const large = /300000 bytes is more than .* maxBufferSize, 1000/;
  await rejects(() => record.uploadTo(small), "LimitError", large);
  equal(small.buffers, []);
  const full = new FakeDevice({ room: 100_000 });
  await leavesNothing(full, () => record.uploadTo(full), "LimitError", /no room for 300000 bytes: no memory left/);
  const wrong = new FakeDevice();
  const create = wrong.createBuffer;
  wrong.createBuffer = (descriptor) => create.call(wrong, { ...descriptor, size: 0.5 });
  await leavesNothing(wrong, () => record.uploadTo(wrong), "UnsupportedError", /refuses a buffer of \d+ bytes/);
  const lost = new FakeDevice();
  lost.lose();
  await leavesNothing(lost, () => record.uploadTo(lost), "SourceError", /the GPU device was lost: pulled out/);
  await rejects(() => record.uploadTo({}), "UnsupportedError", /takes a GPUDevice/);
  await rejects(() => record.uploadTo(new FakeDevice(), "encoder.w"), "UnsupportedError", /a list of names, not one/);
  await rejects(() => record.uploadTo(new FakeDevice(), ["nope"]), "TensorNotFoundError", /not in this record/);
});

test("a load that is cancelled half-way destroys what it made", async ({ base }) => {
  const record = await open(`${base}/sparse1.zcr`);
  const device = new FakeDevice({ keep: false });
  const stop = new AbortController();
  const onProgress = (done) => { if (done > 1 << 24) stop.abort(); };
  const options = { signal: stop.signal, onProgress };
  await leavesNothing(device, () => record.uploadTo(device, undefined, options), "LoadCancelledError", /was cancelled/);
});

test("a damaged payload is noticed on its way, if that is asked for", async ({ base }) => {
  const octets = new Uint8Array(await (await fetch(`${base}/things.zcr`)).arrayBuffer());
  octets[(await open(octets)).info("big").offset] ^= 1;
  const record = await open(octets);
  await record.uploadTo(new FakeDevice());
  const device = new FakeDevice();
  await leavesNothing(device, () => record.uploadTo(device, undefined, { verify: true }), "IntegrityError", /digest/);
});

test("uploads at the same time each have their own errors", async ({ base }) => {
  const record = await open(`${base}/things.zcr`);
  const device = new FakeDevice({ room: 400_000 });
  device.pushErrorScope("validation");
  const both = await Promise.allSettled([record.uploadTo(device), record.uploadTo(device)]);
  equal(both.map(({ status }) => status), ["fulfilled", "rejected"]);
  equal(both[1].reason.name, "LimitError");
  equal([await device.popErrorScope(), device.scopes], [null, []]);
});

test("a device keeps nothing of an upload that is over", async ({ base }) => {
  const record = await open(`${base}/things.zcr`);
  const device = new FakeDevice();
  for (let i = 0; i < 3; i++) await record.uploadTo(device, ["scalar"]);
  equal(device.waiting, 1);
});

test("payloads that share their bytes get no buffers out of proportion to the archive", async ({ base }) => {
  const told = counting();
  const record = await open(`${base}/twins.zcr`, { fetch: told.fetch });
  const before = told.requests;
  const device = new FakeDevice({ keep: false });
  const what = /twins\.zcr: tensors that share their bytes would take 1258291200 bytes, each by itself; load those/;
  await rejects(() => record.uploadTo(device), "LimitError", what);
  equal([told.requests, device.buffers.length], [before, 0]);
  equal((await record.uploadTo(device, record.names.slice(0, 20))).size, 20);
});

test("payloads that are not uploaded make no room for others that share their bytes", async ({ base }) => {
  const record = await open(`${base}/twins_and_more.zcr`);
  const device = new FakeDevice({ keep: false });
  const names = record.names.filter((name) => name !== "last");
  const what = /more\.zcr: tensors that share their bytes would take 1258291200 bytes, each by itself; load those/;
  await rejects(() => record.uploadTo(device, names), "LimitError", what);
  equal([names.length, device.buffers.length], [1200, 0]);
});

test("requests at a time are a number", async ({ base }) => {
  const record = await open(`${base}/things.zcr`);
  for (const maxInFlight of [NaN, 0, -1, "many", null]) {
    const asked = () => record.uploadTo(new FakeDevice(), undefined, { maxInFlight });
    await rejects(asked, "UnsupportedError", /maxInFlight is a number from 1 on/);
  }
});

test("chunks come in memory that is used again, not in new garbage each", async ({ base }) => {
  const kept = new Set();
  const watching = async (url, options) => {
    const response = await fetch(url, options);
    const { body } = response;
    return { status: response.status, headers: response.headers, body: { getReader: (how) => {
      const reader = body.getReader(how);
      return { read: (view) => { kept.add(view?.byteLength ?? "new"); return reader.read(view); },
        cancel: () => reader.cancel() };
    } } };
  };
  const record = await open(`${base}/quarter.zcr`, { fetch: watching });
  kept.clear();
  await record.uploadTo(new FakeDevice({ keep: false }), ["t0"]);
  equal(kept.size, 1);
  ok(!kept.has("new"), "each chunk has memory of its own");
});

test("a device that throws at once is a typed error, and keeps no scope and no buffer", async ({ base }) => {
  const record = await open(`${base}/things.zcr`);
  const device = new FakeDevice();
  const create = device.createBuffer;
  let made = 0;
  device.createBuffer = (descriptor) => { // as browsers do of a usage that is no 32 bits
    if (++made > 2) throw new TypeError("value is outside the range");
    return create.call(device, descriptor);
  };
  await leavesNothing(device, () => record.uploadTo(device), "UnsupportedError", /refuses a buffer.*outside the range/);
  equal(device.scopes, []);
});
