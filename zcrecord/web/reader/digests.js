// SPDX-License-Identifier: 0BSD
/** XXH3 and SHA-256 of bytes that come in chunks. */

// -- XXH3, 64 bits, seed 0 -------------------------------------------------------------------------------------------

const SECRET = Uint8Array.from(`\
b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07d\
ccff7221b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c\
343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e\
2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e`.match(/../g), (pair) => parseInt(pair, 16));
const P32 = [0x9e3779b1n, 0x85ebca77n, 0xc2b2ae3dn];
const P64 = [0x9e3779b185ebca87n, 0xc2b2ae3d27d4eb4fn, 0x165667b19e3779f9n, 0x85ebca77c2b2ae63n, 0x27d4eb2f165667c5n];
const wrap = (value) => BigInt.asUintN(64, value);
const u64 = (octets, at) => new DataView(octets.buffer, octets.byteOffset + at, 8).getBigUint64(0, true);
const u32 = (octets, at) => new DataView(octets.buffer, octets.byteOffset + at, 4).getUint32(0, true);
const secret = (at) => u64(SECRET, at);
const SECRET_WORDS = Int32Array.from({ length: 48 }, (_, i) => u32(SECRET, 4 * i));
const LAST_WORDS = Int32Array.from({ length: 16 }, (_, i) => u32(SECRET, 121 + 4 * i));
const SCALE = 0x9e3779b1;

function fold(a, b) {
  const product = a * b;
  return wrap(product) ^ (product >> 64n);
}

function avalanche(h) {
  h = wrap((h ^ (h >> 37n)) * 0x165667919e3779f9n);
  return h ^ (h >> 32n);
}

function shortAvalanche(h) {
  h = wrap((h ^ (h >> 33n)) * P64[1]);
  h = wrap((h ^ (h >> 29n)) * P64[2]);
  return h ^ (h >> 32n);
}

const mix = (data, at, key) => fold(u64(data, at) ^ secret(key), u64(data, at + 8) ^ secret(key + 8));

/** Returns the digest of up to 240 bytes. */
function short(data) {
  const n = data.length;
  const size = BigInt(n);
  if (n === 0) return shortAvalanche(secret(56) ^ secret(64));
  if (n < 4) {
    const word = ((data[0] << 16) | (data[n >> 1] << 24) | data[n - 1] | (n << 8)) >>> 0;
    return shortAvalanche(BigInt(word) ^ BigInt((u32(SECRET, 0) ^ u32(SECRET, 4)) >>> 0));
  }
  if (n < 9) {
    let h = (BigInt(u32(data, n - 4)) | (BigInt(u32(data, 0)) << 32n)) ^ secret(8) ^ secret(16);
    h ^= wrap((h << 49n) | (h >> 15n)) ^ wrap((h << 24n) | (h >> 40n));
    h = wrap(h * 0x9fb21c651e98df25n);
    h = wrap((h ^ ((h >> 35n) + size)) * 0x9fb21c651e98df25n);
    return h ^ (h >> 28n);
  }
  if (n < 17) {
    const low = u64(data, 0) ^ secret(24) ^ secret(32);
    const high = u64(data, n - 8) ^ secret(40) ^ secret(48);
    const swapped = new DataView(BigUint64Array.of(low).buffer).getBigUint64(0);
    return avalanche(wrap(size + swapped + high + fold(low, high)));
  }
  let h = size * P64[0];
  if (n <= 128) {
    for (let pair = Math.ceil(n / 32) - 1; pair >= 0; pair--) {
      h += mix(data, 16 * pair, 32 * pair) + mix(data, n - 16 - 16 * pair, 32 * pair + 16);
    }
    return avalanche(wrap(h));
  }
  for (let i = 0; i < n >> 4; i++) {
    if (i === 8) h = avalanche(wrap(h));
    h += mix(data, 16 * i, i < 8 ? 16 * i : 16 * i - 125);
  }
  if (n < 144) h = avalanche(wrap(h));
  return avalanche(wrap(h + mix(data, n - 16, 119)));
}

/** Adds a stripe of 64 bytes to the lanes, each a low and a high word. BigInt would take twenty times as long. */
function accumulate(acc, data, at, keys, key) {
  for (let lane = 0; lane < 16; lane += 2) {
    const lo = data[at + lane];
    const hi = data[at + lane + 1];
    const a = lo ^ keys[key + lane];
    const b = hi ^ keys[key + lane + 1];
    const ll = Math.imul(a & 0xffff, b & 0xffff);
    const lh = Math.imul(a & 0xffff, b >>> 16);
    const hl = Math.imul(a >>> 16, b & 0xffff);
    const middle = (ll >>> 16) + (lh & 0xffff) + (hl & 0xffff);
    const high = Math.imul(a >>> 16, b >>> 16) + (lh >>> 16) + (hl >>> 16) + (middle >>> 16);
    const other = lane ^ 2;
    let sum = (acc[other] + lo) | 0;
    acc[other + 1] += hi + (sum >>> 0 < lo >>> 0 ? 1 : 0);
    acc[other] = sum;
    const low = (ll & 0xffff) | (middle << 16);
    sum = (acc[lane] + low) | 0;
    acc[lane + 1] += high + (sum >>> 0 < low >>> 0 ? 1 : 0);
    acc[lane] = sum;
  }
}

function scramble(acc) {
  for (let lane = 0; lane < 16; lane += 2) {
    const lo = acc[lane] ^ (acc[lane + 1] >>> 15) ^ SECRET_WORDS[32 + lane];
    const hi = acc[lane + 1] ^ SECRET_WORDS[33 + lane];
    const product = (lo >>> 0) * (SCALE & 0xffff); // less than 2^48
    const rest = (lo >>> 0) * (SCALE >>> 16) + Math.floor(product / 65536);
    acc[lane] = (product & 0xffff) | ((rest & 0xffff) << 16);
    acc[lane + 1] = Math.floor(rest / 65536) + Math.imul(hi, SCALE);
  }
}

/** XXH3 of so many bytes, fed in chunks. */
export class Xxh3 {
  constructor(nbytes) {
    this.nbytes = nbytes;
    this.done = 0; // bytes taken
    const lanes = [P32[2], P64[0], P64[1], P64[2], P64[3], P32[1], P64[4], P32[0]];
    this.acc = Int32Array.from(lanes.flatMap((v) => [Number(v & 0xffffffffn) | 0, Number(v >> 32n) | 0]));
    this.stripe = 0; // stripes added
    this.room = new Int32Array(4096); // bytes that wait for their stripe, aligned
    this.octets = new Uint8Array(this.room.buffer);
    this.filled = 0;
    this.last = new Uint8Array(64); // the last bytes that came
  }

  update(chunk) {
    this.done += chunk.length;
    if (this.nbytes > 240) this.#keep(chunk);
    for (let at = 0; at < chunk.length;) {
      const count = Math.min(chunk.length - at, this.octets.length - this.filled);
      this.octets.set(chunk.subarray(at, at + count), this.filled);
      this.filled += count;
      at += count;
      if (this.filled === this.octets.length) this.#stripes();
    }
    return this;
  }

  #keep(chunk) {
    const tail = chunk.subarray(Math.max(0, chunk.length - 64));
    this.last.copyWithin(0, tail.length);
    this.last.set(tail, 64 - tail.length);
  }

  #stripes() {
    const most = Math.floor((this.nbytes - 1) / 64); // the last one is taken from the end
    const whole = Math.min(this.filled >> 6, most - this.stripe);
    for (let i = 0; i < whole; i++) {
      const number = this.stripe++;
      accumulate(this.acc, this.room, 16 * i, SECRET_WORDS, 2 * (number & 15));
      if ((number & 15) === 15 && (number + 1) * 64 < this.nbytes) scramble(this.acc);
    }
    this.octets.copyWithin(0, 64 * whole, this.filled);
    this.filled -= 64 * whole;
  }

  digest() {
    if (this.nbytes <= 240) return short(this.octets.subarray(0, this.nbytes));
    this.#stripes();
    const last = new Int32Array(this.last.slice().buffer);
    accumulate(this.acc, last, 0, LAST_WORDS, 0);
    const lane = (i) => BigInt(this.acc[2 * i] >>> 0) | (BigInt(this.acc[2 * i + 1] >>> 0) << 32n);
    let h = BigInt(this.nbytes) * P64[0];
    for (let i = 0; i < 4; i++) h += fold(lane(2 * i) ^ secret(16 * i + 11), lane(2 * i + 1) ^ secret(16 * i + 19));
    return avalanche(wrap(h));
  }
}

/** Returns the XXH3 of bytes, as a BigInt. */
export const xxh3 = (octets) => new Xxh3(octets.length).update(octets).digest();

// -- SHA-256 ---------------------------------------------------------------------------------------------------------
// crypto.subtle takes whole buffers alone, and secure pages alone.

const ROUNDS = new Int32Array(64);
const START = new Int32Array(8);
for (let n = 2, i = 0; i < 64; n++) {
  let prime = true;
  for (let d = 2; d * d <= n; d++) prime &&= n % d !== 0;
  if (!prime) continue;
  ROUNDS[i] = fraction(Math.cbrt(n), n, 3n);
  if (i < 8) START[i] = fraction(Math.sqrt(n), n, 2n);
  i += 1;
}

/** Returns the first 32 bits of the fraction of n's root, of which `near` is a rounded value; exactly. */
function fraction(near, n, power) {
  let root = BigInt(Math.floor(near * 2 ** 32));
  const target = BigInt(n) << (32n * power);
  while (root ** power > target) root -= 1n;
  while ((root + 1n) ** power <= target) root += 1n;
  return Number(root & 0xffffffffn) | 0;
}

/** SHA-256 of bytes fed in chunks. */
export class Sha256 {
  constructor() {
    this.state = START.slice();
    this.block = new Uint8Array(64);
    this.words = new Int32Array(64);
    this.done = 0;
  }

  update(chunk) {
    for (let at = 0; at < chunk.length;) {
      const filled = this.done % 64;
      const count = Math.min(64 - filled, chunk.length - at);
      if (count === 64) this.#add(chunk, at);
      else {
        this.block.set(chunk.subarray(at, at + count), filled);
        if (filled + count === 64) this.#add(this.block, 0);
      }
      at += count;
      this.done += count;
    }
    return this;
  }

  #add(data, start) {
    const { words: w, state } = this;
    for (let i = 0, at = start; i < 16; i++, at += 4) {
      w[i] = (data[at] << 24) | (data[at + 1] << 16) | (data[at + 2] << 8) | data[at + 3];
    }
    for (let i = 16; i < 64; i++) {
      const x = w[i - 15];
      const y = w[i - 2];
      const s0 = ((x >>> 7) | (x << 25)) ^ ((x >>> 18) | (x << 14)) ^ (x >>> 3);
      const s1 = ((y >>> 17) | (y << 15)) ^ ((y >>> 19) | (y << 13)) ^ (y >>> 10);
      w[i] = (w[i - 16] + s0 + w[i - 7] + s1) | 0;
    }
    let a = state[0], b = state[1], c = state[2], d = state[3];
    let e = state[4], f = state[5], g = state[6], h = state[7];
    for (let i = 0; i < 64; i++) {
      const s1 = ((e >>> 6) | (e << 26)) ^ ((e >>> 11) | (e << 21)) ^ ((e >>> 25) | (e << 7));
      const t1 = (h + s1 + ((e & f) ^ (~e & g)) + ROUNDS[i] + w[i]) | 0;
      const s0 = ((a >>> 2) | (a << 30)) ^ ((a >>> 13) | (a << 19)) ^ ((a >>> 22) | (a << 10));
      const t2 = (s0 + ((a & b) ^ (a & c) ^ (b & c))) | 0;
      h = g; g = f; f = e; e = (d + t1) | 0;
      d = c; c = b; b = a; a = (t1 + t2) | 0;
    }
    state[0] += a; state[1] += b; state[2] += c; state[3] += d;
    state[4] += e; state[5] += f; state[6] += g; state[7] += h;
  }

  digest() {
    const bits = BigInt(this.done) * 8n;
    const pad = new Uint8Array(((119 - (this.done % 64)) % 64) + 9);
    pad[0] = 0x80;
    new DataView(pad.buffer).setBigUint64(pad.length - 8, bits);
    this.update(pad);
    const out = new DataView(new ArrayBuffer(32));
    this.state.forEach((v, i) => out.setInt32(4 * i, v));
    return new Uint8Array(out.buffer);
  }
}
