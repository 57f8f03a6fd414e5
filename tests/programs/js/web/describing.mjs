// Describes the archives that standard input names, one JSON array of [path, name, embedded] a line, as JSON lines by
// describe.js, which have to be those of Python.

import { readFileSync } from "node:fs";

import { describe } from "../../../../zcrecord/web/page/describe.js";
import { open } from "../../../../zcrecord/web/reader/zcrecord.js";

for (const line of readFileSync(0, "utf8").trim().split("\n")) {
  const [path, name, embedded] = JSON.parse(line);
  const octets = readFileSync(path);
  const archive = octets.buffer.slice(octets.byteOffset, octets.byteOffset + octets.length);
  const record = await open(archive, { embedded });
  process.stdout.write(`${JSON.stringify(describe(record, name))}\n`);
}
