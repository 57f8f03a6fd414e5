// A tensor of an archive in memory, by code that flatc generates: node find.mjs MODEL.zcr NAME prints its shape and the
// first of its numbers, float32. The file is trusted: generated.mjs beside it checks more.

import { readFileSync } from "node:fs";

import { ByteBuffer } from "flatbuffers";

import { Record } from "./generated/zcrecord.js";

const archive = new Uint8Array(readFileSync(process.argv[2])).buffer;
const trailer = new BigUint64Array(archive, archive.byteLength - 64);
const [indexOffset, indexSize, payloadOffset] = [...trailer.subarray(3, 6)].map(Number);
const record = Record.getRootAsRecord(new ByteBuffer(new Uint8Array(archive, indexOffset, indexSize)));

const text = Buffer.from(record.textArray());
for (let i = 0; i < record.tensorsLength(); i++) {
  const tensor = record.tensors(i);
  const start = tensor.name().start();
  if (text.toString("utf8", start, start + tensor.name().size()) !== process.argv[3]) continue;
  const payload = record.payloads(tensor.payload());
  const at = payloadOffset + Number(payload.offset() + tensor.byteOffset());
  const shape = Array.from({ length: tensor.rank() }, (_, axis) => Number(record.dims(tensor.dims() + axis)));
  const values = new Float32Array(archive, at, Number(payload.nbytes()) / 4); // a view: nothing is copied
  console.log(...shape, values[0]);
}
