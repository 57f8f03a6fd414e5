// Reads graphs, one of base64 a line of standard input: prints for each a JSON line of its tensors, each name, dims,
// data_type, and of the model in which every tensor refers to a file; or of the error.

import { readFileSync } from "node:fs";

import { parseSkeleton, reference } from "../../../../zcrecord/web/reader/skeleton.js";

const names = Array(1000).fill("n");

function answer(line) {
  try {
    const { found, encode } = parseSkeleton(new Uint8Array(Buffer.from(line, "base64")), names);
    for (const t of found) t.fields = reference("large", 0, 1);
    const tensors = found.map(({ full, dims, type }) => [full, dims, type]);
    return { tensors, model: Buffer.from(encode()).toString("base64") };
  } catch ({ name, message }) {
    return { name, message };
  }
}

for (const line of readFileSync(0, "utf8").trimEnd().split("\n")) {
  process.stdout.write(`${JSON.stringify(answer(line))}\n`);
}
