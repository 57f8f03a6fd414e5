// SPDX-License-Identifier: 0BSD
/** An engine for network.js in plain JavaScript: arrays are { shape, data }, data a Float32Array. */

const made = (shape) => ({ shape, data: new Float32Array(shape.reduce((a, b) => a * b, 1)) });
const BINARY = { "+": (x, y) => x + y, "-": (x, y) => x - y, "*": (x, y) => x * y, "/": (x, y) => x / y };
const UNARY = { Relu: (x) => Math.max(0, x), Sigmoid: (x) => 1 / (1 + Math.exp(-x)), Tanh: Math.tanh };

export class CpuEngine {
  name = "plain JavaScript";

  async weights(record, names, options) {
    const out = new Map();
    let done = 0;
    for (const name of names) {
      const { shape } = record.info(name);
      out.set(name, { shape: shape.map(Number), data: await record.array(name, options) });
      options.onProgress?.(++done, names.length);
    }
    return out;
  }

  array(data, shape) {
    return { shape, data };
  }

  reshaped({ data }, shape) {
    return { shape, data };
  }

  binary(op, a, b, shape) {
    const [out, compute] = [made(shape), BINARY[op]];
    for (let i = 0; i < out.data.length; i++) {
      out.data[i] = compute(a.data[i % a.data.length], b.data[i % b.data.length]);
    }
    return out;
  }

  unary(op, a) {
    return { shape: a.shape, data: a.data.map(UNARY[op]) };
  }

  gemm(a, b, c, { m, n, k, transA, transB, alpha, beta, row, column }) {
    const out = made([m, n]);
    const [ai, ak] = transA ? [1, m] : [k, 1];
    const [bk, bj] = transB ? [1, k] : [n, 1];
    for (let i = 0; i < m; i++) {
      for (let j = 0; j < n; j++) {
        let sum = 0;
        for (let l = 0; l < k; l++) sum += a.data[i * ai + l * ak] * b.data[l * bk + j * bj];
        const offset = c ? beta * c.data[(row > 1 ? i * column : 0) + (column > 1 ? j : 0)] : 0;
        out.data[i * n + j] = alpha * sum + offset;
      }
    }
    return out;
  }

  softmax(a, rows, columns) {
    const out = made(a.shape);
    for (let row = 0; row < rows; row++) {
      const from = a.data.subarray(row * columns, (row + 1) * columns);
      const most = from.reduce((x, y) => Math.max(x, y), -Infinity);
      const powers = from.map((x) => Math.exp(x - most));
      const sum = powers.reduce((x, y) => x + y, 0);
      out.data.set(powers.map((x) => x / sum), row * columns);
    }
    return out;
  }

  async read({ data }) {
    return data;
  }

  close() {}
}
