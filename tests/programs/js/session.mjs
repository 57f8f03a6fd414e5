// ONNX Runtime in Node over a model and its archive: session [-- NAME:TYPE:DIMS:FILE...]...
//
// Does what tests/programs/cpp/session.cpp does; the lines of zcrecord/onnx/README.md make `session` in the place that is marked.

import { readFileSync, writeFileSync } from "node:fs";

const ARRAYS = { float: Float32Array, int64: BigInt64Array, bool: Uint8Array };

function readInput(text) {
  const [name, type, dims, path] = text.split(":");
  const data = new ARRAYS[type](Uint8Array.from(readFileSync(path)).buffer);
  return [name, new ort.Tensor(type === "float" ? "float32" : type, data, dims.split("x").filter(Boolean).map(Number))];
}

function privateBytes() {
  return Number(/^Anonymous:\s+(\d+)/m.exec(readFileSync("/proc/self/smaps_rollup", "utf8"))[1]) * 1024;
}

const before = privateBytes();
// the guide's lines
const runs = process.argv.slice(2).join("\0").split("--").slice(1);
for (const [number, run] of runs.entries()) {
  const inputs = run.split("\0").filter(Boolean).map(readInput);
  const results = await session.run(Object.fromEntries(inputs));
  const { data } = results[session.outputNames[0]];
  writeFileSync(`output${number}`, new Uint8Array(data.buffer, data.byteOffset, data.byteLength));
}
console.log(ort.env.versions.node, privateBytes() - before);
