// A GPUDevice that keeps bytes in memory, or only counts them, and holds to the rules of WebGPU.

const COPY_DST = 8;

class FakeBuffer {
  constructor({ size, usage }, keep) {
    Object.assign(this, { size, usage, destroyed: false, written: 0, octets: keep ? new Uint8Array(size) : null });
  }
  destroy() {
    this.destroyed = true;
    this.octets = null;
  }
}

export class FakeDevice {
  constructor({ keep = true, maxBufferSize = 2 ** 30, room = Infinity } = {}) {
    Object.assign(this, { keep, room, limits: { maxBufferSize }, buffers: [], scopes: [], mostQueued: 0, queued: 0 });
    const promise = new Promise((resolve) => {
      this.lose = () => resolve({ reason: "destroyed", message: "pulled out" });
    });
    this.waiting = 0; // callbacks that the device keeps
    this.lost = { then: (done) => { this.waiting += 1; return promise.then(done); } };
    this.queue = {
      writeBuffer: (buffer, at, data, from, size) => this.write(buffer, at, data, from, size),
      onSubmittedWorkDone: async () => {
        await null;
        this.queued = 0;
      },
    };
  }
  pushErrorScope(filter) {
    this.scopes.push({ filter, error: null });
  }
  async popErrorScope() {
    if (!this.scopes.length) throw new Error("OperationError: no error scope");
    const { error } = this.scopes.pop();
    await new Promise((resolve) => { setTimeout(resolve, 1); }); // a device answers when it comes to it
    return error;
  }
  createBuffer(descriptor) {
    const { size, usage } = descriptor;
    const fail = (filter, message) => {
      const scope = this.scopes.findLast((one) => one.filter === filter);
      if (!scope) throw new Error(`uncaptured ${filter}: ${message}`);
      scope.error ??= { message };
    };
    if (size > this.limits.maxBufferSize) fail("validation", "larger than maxBufferSize");
    if (!Number.isInteger(size) || !usage) fail("validation", "no size or usage");
    this.room -= size;
    if (this.room < 0) fail("out-of-memory", "no memory left");
    this.buffers.push(new FakeBuffer(descriptor, this.keep));
    return this.buffers.at(-1);
  }
  write(buffer, at, data, from = 0, size = data.byteLength - from) {
    const rules = [
      [!buffer.destroyed, "the buffer is destroyed"], [buffer.usage & COPY_DST, "the buffer lacks COPY_DST"],
      [at % 4 === 0 && size % 4 === 0, `[${at}, +${size}) is no multiple of 4`],
      [at + size <= buffer.size, "past the end"],
      [from + size <= data.byteLength, "past the end of the data"], [data instanceof ArrayBuffer, "data is no buffer"],
    ];
    for (const [holds, what] of rules) if (!holds) throw new Error(`OperationError: ${what}`);
    buffer.octets?.set(new Uint8Array(data, from, size), at);
    buffer.written += size;
    this.queued += size;
    this.mostQueued = Math.max(this.mostQueued, this.queued);
  }
}
