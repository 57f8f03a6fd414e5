// Makes the ONNX models of the archives that standard input names, one JSON array of [path, options] a line: writes the
// model and its files beside the archive, and prints a JSON line of the files' names, or of the error.

import { readFileSync, writeFileSync } from "node:fs";

import { open } from "../../../../zcrecord/web/reader/zcrecord.js";

for (const line of readFileSync(0, "utf8").trim().split("\n")) {
  const [path, options] = JSON.parse(line);
  const record = await open(path);
  let told;
  try {
    const { model, externalData } = await record.toOnnx(options);
    writeFileSync(`${path}.onnx`, model);
    for (const { path: name, data } of externalData) {
      writeFileSync(`${path}.${name}`, data instanceof Blob ? await data.bytes() : data);
    }
    told = { files: externalData.map((file) => file.path) };
  } catch ({ name, message, tensor }) {
    told = { name, message, tensor };
  }
  await record.close();
  process.stdout.write(`${JSON.stringify(told)}\n`);
}
