// SPDX-License-Identifier: 0BSD
/**
 * An engine for network.js on WebGPU: arrays are { shape, buffer, offset }, the offset in elements.
 *
 * Weights go from the network into their buffers by `uploadTo`, and are never whole in the heap. Each operator is a
 * kernel with a thread for each element of its result; for a large model that would be too slow.
 */

const GROUP = 64; // threads
const MOST = 65535; // groups in a row, the least that every device allows
const [STORAGE, UNIFORM, COPY_SRC, COPY_DST, MAP_READ] = [0x80, 0x40, 4, 8, 1];

// Bindings of every kernel: up to three inputs, a result, eight integers and two numbers. `p.n` counts threads.
const HEAD = `
struct Parameters { n: u32, a: u32, b: u32, c: u32, i: vec4u, j: vec4u, f: vec4f }
@group(0) @binding(0) var<storage, read> a: array<f32>;
@group(0) @binding(1) var<storage, read> b: array<f32>;
@group(0) @binding(2) var<storage, read> c: array<f32>;
@group(0) @binding(3) var<storage, read_write> out: array<f32>;
@group(0) @binding(4) var<uniform> p: Parameters;
@compute @workgroup_size(${GROUP})
fn main(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
  let t = id.x + id.y * groups.x * ${GROUP}u;
  if (t >= p.n) { return; }
`;
const binaryOf = (op) => `out[t] = a[p.a + t % p.i.x] ${op} b[p.b + t % p.i.y];`;
const UNARY = { Relu: "max(x, 0.0)", Sigmoid: "1.0 / (1.0 + exp(-x))", Tanh: "tanh(clamp(x, -20.0, 20.0))" };
const unaryOf = (op) => `let x = a[p.a + t]; out[t] = ${UNARY[op]};`;
const GEMM = `
  let row = t / p.i.x; // i: n, k, steps of a; j: steps of b, of c
  let column = t % p.i.x;
  var sum = 0.0;
  for (var l = 0u; l < p.i.y; l++) {
    sum += a[p.a + row * p.i.z + l * p.i.w] * b[p.b + l * p.j.x + column * p.j.y];
  }
  out[t] = p.f.x * sum;
  if (p.f.z > 0.0) { out[t] += p.f.y * c[p.c + row * p.j.z + column * p.j.w]; }`;
const SOFTMAX = `
  let start = p.a + t * p.i.x; // a thread for each row
  var most = a[start];
  for (var l = 1u; l < p.i.x; l++) { most = max(most, a[start + l]); }
  var sum = 0.0;
  for (var l = 0u; l < p.i.x; l++) { sum += exp(a[start + l] - most); }
  for (var l = 0u; l < p.i.x; l++) { out[t * p.i.x + l] = exp(a[start + l] - most) / sum; }`;

const product = (dims) => dims.reduce((x, y) => x * y, 1);

/** Returns an engine; null where there is no WebGPU to be had. */
export async function gpuEngine() {
  const adapter = await globalThis.navigator?.gpu?.requestAdapter();
  if (!adapter) return null;
  const { vendor, architecture, description } = adapter.info ?? {};
  const called = description || [vendor, architecture].filter(Boolean).join(" ");
  return new GpuEngine(await adapter.requestDevice(), called);
}

class GpuEngine {
  #kernels = new Map();
  #buffers = [];

  constructor(device, called) {
    Object.assign(this, { device, name: `WebGPU${called ? ` (${called})` : ""}` });
    this.none = this.#buffer(4, STORAGE); // for inputs that a kernel does not have
    this.failed = new Promise((_, reject) => {
      device.addEventListener("uncapturederror", ({ error }) => reject(new Error(`WebGPU: ${error.message}`)));
      device.lost.then(({ reason, message }) => {
        if (reason !== "destroyed") reject(new Error(`the GPU was lost: ${message}`));
      });
    });
    this.failed.catch(() => {}); // it is told by whoever waits for a result
  }

  #buffer(nbytes, usage) {
    const buffer = this.device.createBuffer({ size: Math.max(4, nbytes), usage });
    this.#buffers.push(buffer);
    return buffer;
  }

  async weights(record, names, options) {
    const bindings = await record.uploadTo(this.device, names, options);
    const out = new Map();
    for (const [name, { buffer, offset, shape }] of bindings) {
      if (buffer) this.#buffers.push(buffer);
      out.set(name, { shape: shape.map(Number), buffer: buffer ?? this.none, offset: offset / 4 });
    }
    return out;
  }

  array(data, shape) {
    const buffer = this.#buffer(data.byteLength, STORAGE | COPY_DST);
    this.device.queue.writeBuffer(buffer, 0, data);
    return { shape, buffer, offset: 0 };
  }

  reshaped({ buffer, offset }, shape) {
    return { shape, buffer, offset };
  }

  binary(op, a, b, shape) {
    return this.#run(binaryOf(op), [a, b], shape, product(shape), [product(a.shape), product(b.shape)]);
  }

  unary(op, a) {
    return this.#run(unaryOf(op), [a], a.shape, product(a.shape), []);
  }

  gemm(a, b, c, { m, n, k, transA, transB, alpha, beta, row, column }) {
    const steps = [...(transA ? [1, m] : [k, 1]), ...(transB ? [1, k] : [n, 1])];
    const ofC = c ? [row > 1 ? column : 0, column > 1 ? 1 : 0] : [0, 0];
    return this.#run(GEMM, [a, b, c], [m, n], m * n, [n, k, ...steps, ...ofC], [alpha, beta, c ? 1 : 0]);
  }

  softmax(a, rows, columns) {
    return this.#run(SOFTMAX, [a], a.shape, rows, [columns]);
  }

  #kernel(body) {
    if (!this.#kernels.has(body)) {
      const module = this.device.createShaderModule({ code: `${HEAD}${body}\n}` });
      this.#kernels.set(body, this.device.createComputePipeline({ layout: this.#layout(), compute: { module } }));
    }
    return this.#kernels.get(body);
  }

  /** Returns the one layout of all kernels: one that is made of a kernel leaves out what that does not use. */
  #layout() {
    this.entries ??= this.device.createBindGroupLayout({
      entries: [...Array(3).fill("read-only-storage"), "storage", "uniform"].map((type, binding) =>
        ({ binding, visibility: 4, buffer: { type } })), // 4: compute
    });
    return this.device.createPipelineLayout({ bindGroupLayouts: [this.entries] });
  }

  #run(body, inputs, shape, threads, integers, numbers = []) {
    const { device } = this;
    const out = { shape, buffer: this.#buffer(4 * product(shape), STORAGE | COPY_SRC), offset: 0 };
    const room = new ArrayBuffer(64);
    new Uint32Array(room).set([threads, ...[0, 1, 2].map((i) => inputs[i]?.offset ?? 0), ...integers]);
    new Float32Array(room, 48).set(numbers);
    const parameters = this.#buffer(64, UNIFORM | COPY_DST);
    device.queue.writeBuffer(parameters, 0, room);
    const kernel = this.#kernel(body);
    const buffers = [...[0, 1, 2].map((i) => inputs[i]?.buffer ?? this.none), out.buffer, parameters];
    const entries = buffers.map((buffer, binding) => ({ binding, resource: { buffer } }));
    const encoder = device.createCommandEncoder();
    const pass = encoder.beginComputePass();
    pass.setPipeline(kernel);
    pass.setBindGroup(0, device.createBindGroup({ layout: this.entries, entries }));
    const groups = Math.ceil(threads / GROUP);
    pass.dispatchWorkgroups(Math.min(groups, MOST), Math.ceil(groups / MOST));
    pass.end();
    device.queue.submit([encoder.finish()]);
    return out;
  }

  async read({ shape, buffer, offset }) {
    const nbytes = 4 * product(shape);
    const target = this.#buffer(nbytes, MAP_READ | COPY_DST);
    const encoder = this.device.createCommandEncoder();
    encoder.copyBufferToBuffer(buffer, 4 * offset, target, 0, nbytes);
    this.device.queue.submit([encoder.finish()]);
    await Promise.race([target.mapAsync(1), this.failed]);
    return new Float32Array(target.getMappedRange().slice(0));
  }

  close() {
    for (const buffer of this.#buffers) buffer.destroy();
    this.device.destroy();
  }
}
