// Payloads on a real GPUDevice: what is copied back from its buffers are the archive's bytes. For browsers.

import { open } from "../../../../zcrecord/web/reader/zcrecord.js";
import { equal, ok, rejects, test } from "./harness.mjs";

const STORAGE = 0x80;

async function deviceOf(most = null) {
  const adapter = await navigator.gpu.requestAdapter();
  ok(adapter, "no WebGPU adapter");
  return adapter.requestDevice({ requiredLimits: most ? { maxBufferSize: adapter.limits.maxBufferSize } : {} });
}

/** Returns what lies in a buffer. */
async function readBack(device, buffer) {
  const staging = device.createBuffer({ size: buffer.size, usage: GPUBufferUsage.COPY_DST | GPUBufferUsage.MAP_READ });
  const encoder = device.createCommandEncoder();
  encoder.copyBufferToBuffer(buffer, 0, staging, 0, buffer.size);
  device.queue.submit([encoder.finish()]);
  await staging.mapAsync(GPUMapMode.READ);
  const octets = new Uint8Array(staging.getMappedRange()).slice();
  staging.destroy();
  return octets;
}

/** Returns a device's buffers, made from now on: each knows whether it was destroyed. */
function watched(device) {
  const made = [];
  const { createBuffer } = device;
  device.createBuffer = (descriptor) => {
    const buffer = createBuffer.call(device, descriptor);
    const { destroy } = buffer;
    buffer.destroy = () => {
      buffer.isGone = true;
      destroy.call(buffer);
    };
    made.push(buffer);
    return buffer;
  };
  return made;
}

const allGone = (made) => ok(made.length && made.every(({ isGone }) => isGone), "a buffer was left behind");

for (const name of ["golden/dtypes", "golden/views", "golden/strings", "golden/deduplicated", "things", "odd"]) {
  test(`all bytes of ${name} are on the device, as the archive has them`, async ({ base }) => {
    const url = `${base}/${name}.zcr`;
    const whole = new Uint8Array(await (await fetch(url)).arrayBuffer());
    const record = await open(url);
    const device = await deviceOf();
    const bindings = await record.uploadTo(device);
    const buffers = new Set();
    for (const tensor of record.names) {
      const { payload, offset, byteOffset } = record.info(tensor);
      const { buffer, size } = bindings.get(tensor);
      equal(buffer === null, payload === null);
      if (payload === null || buffers.has(buffer)) continue;
      buffers.add(buffer);
      const found = await readBack(device, buffer);
      const start = offset - byteOffset;
      equal(found.length, Math.ceil(size / 4) * 4);
      ok(whole.subarray(start, start + size).every((byte, i) => byte === found[i]), `${tensor} differs`);
      ok(!found.subarray(size).some(Boolean), `${tensor}: bytes after the last are not zero`);
      for (const other of await record.tied(tensor)) ok(bindings.get(other).buffer === buffer, `${other} is elsewhere`);
    }
    equal(buffers.size, new Set(record.names.map((n) => record.info(n).payload).filter((n) => n !== null)).size);
    device.destroy();
  });
}

test("what is larger than a buffer may be, or than the device has room for, is a LimitError", async ({ base }) => {
  const record = await open(`${base}/sparse6.zcr`);
  const large = /1073741824 bytes is more than the device's maxBufferSize, \d+; ask for more by requiredLimits/;
  const full = /the device has no room for 1073741824 bytes: /;
  for (const [device, pattern] of [[await deviceOf(), large], [await deviceOf("as much as there is"), full]]) {
    const made = watched(device);
    await rejects(() => record.uploadTo(device, ["t6", "t0"]), "LimitError", pattern);
    ok(made.every(({ isGone }) => isGone), "a buffer was left behind");
    device.destroy();
  }
});

test("two uploads at a time each have their own errors, and leave the device's scopes alone", async ({ base }) => {
  const record = await open(`${base}/odd.zcr`);
  const device = await deviceOf();
  device.pushErrorScope("validation");
  const wrong = GPUBufferUsage.MAP_READ | STORAGE; // not allowed together
  const [good, bad] = await Promise.allSettled([
    record.uploadTo(device), record.uploadTo(device, undefined, { usage: wrong }),
  ]);
  equal([good.status, bad.status], ["fulfilled", "rejected"]);
  equal([bad.reason.name, /bytes: /.test(bad.reason.message)], ["UnsupportedError", true]);
  const found = await readBack(device, good.value.get("of3").buffer);
  equal(found.subarray(0, 3), (await record.tensor("of3")).data);
  equal(await device.popErrorScope(), null);
  await rejects(() => device.popErrorScope(), "OperationError", /./);
  device.destroy();
});

test("a load that is cancelled leaves nothing on the device", async ({ base }) => {
  const record = await open(`${base}/quarter.zcr`);
  const device = await deviceOf();
  const made = watched(device);
  const stop = new AbortController();
  const onProgress = (done) => { if (done > 1 << 23) stop.abort(); };
  const { signal } = stop;
  await rejects(() => record.uploadTo(device, undefined, { signal, onProgress }), "LoadCancelledError", /cancelled/);
  allGone(made);
  device.destroy();
});

test("a device that is lost half-way is a SourceError", async ({ base }) => {
  const record = await open(`${base}/quarter.zcr`);
  const device = await deviceOf();
  const made = watched(device);
  const onProgress = (done) => { if (done > 1 << 23) device.destroy(); };
  await rejects(() => record.uploadTo(device, undefined, { onProgress }), "SourceError", /the GPU device was lost: /);
  allGone(made);
});
