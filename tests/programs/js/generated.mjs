// A reader of archives made of what flatc generates from schema/zcrecord.fbs, for Node: a checker, as tests/support/readers.py
// has it.
//
// Header and trailer are 64 bytes that this file reads itself; the index is generated code's. FlatBuffers has no
// verifier in JavaScript: the CRC finds damage, and no index, however made up, has the language read outside of the
// buffer; but it may have generated code answer nonsense. Offsets in the archive are BigInt until they are known to be
// small enough for a Number.

import { readFileSync } from "node:fs";

import { ByteBuffer } from "flatbuffers";

import { Record, ValueForm, ValueType } from "./generated/zcrecord.js";

const NONE = 0xffffffff;
const END = 64; // bytes of header and trailer
const MAGIC = [0x89, 0x5a, 0x43, 0x52, 0x0d, 0x0a, 0x1a, 0x0a];

class Refused extends Error {}

function require(holds, otherwise) {
  if (!holds) throw new Refused(otherwise);
}

const CRC_TABLE = Uint32Array.from({ length: 256 }, (_, n) => {
  for (let bit = 0; bit < 8; bit++) n = (n >>> 1) ^ (n & 1 ? 0xedb88320 : 0);
  return n;
});

function crc32(bytes) {
  let crc = 0xffffffff;
  for (const byte of bytes) crc = (crc >>> 8) ^ CRC_TABLE[(crc ^ byte) & 255];
  return ~crc >>> 0;
}

function toNumber(value, otherwise) {
  require(value <= BigInt(Number.MAX_SAFE_INTEGER), otherwise);
  return Number(value);
}

// -- header and trailer ----------------------------------------------------------------------------------------------

function readHeader(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, END);
  const size = (at) => toNumber(view.getBigUint64(at, true), "a size or offset of more than 2^53");
  require(MAGIC.every((byte, i) => bytes[i] === byte), "the magic is missing");
  require(bytes[8] === 1, "another version");
  require(crc32(bytes.subarray(0, 60)) === view.getUint32(60, true), "the CRC of header or trailer does not match");
  require(view.getBigUint64(16, true) === 0n, "needs features that this reader does not know");
  return {
    alignment: 2 ** bytes[9],
    baseAlignment: 2 ** bytes[10],
    indexOffset: size(24),
    indexSize: size(32),
    payloadOffset: size(40),
    archiveSize: size(48),
    indexCrc: view.getUint32(56, true),
    sealed: bytes[10] !== 0,
  };
}

// -- the archive -----------------------------------------------------------------------------------------------------

class Archive {
  // Opens a Uint8Array without copying it: "w" the whole of it, "p" what starts there, "s" what ends there.
  constructor(bytes, mode) {
    require(bytes.length >= 2 * END, "too few bytes for an archive");
    if (mode === "s") {
      const { archiveSize } = readHeader(bytes.subarray(bytes.length - END));
      require(archiveSize >= 2 * END && archiveSize <= bytes.length, "no archive ends here");
      bytes = bytes.subarray(bytes.length - archiveSize);
    }
    let header = readHeader(bytes);
    if (mode === "p") {
      require(header.sealed && header.archiveSize <= bytes.length, "no sealed archive of that size starts here");
      bytes = bytes.subarray(0, header.archiveSize);
    }
    const trailer = readHeader(bytes.subarray(bytes.length - END));
    require(trailer.sealed, "the trailer is not sealed");
    if (!header.sealed) header = trailer;
    require(header.archiveSize === bytes.length, "archive_size is not what is there");
    const { indexOffset, indexSize } = header;
    require(indexOffset + indexSize <= bytes.length - END, "the index leaves the archive");
    const index = bytes.subarray(indexOffset, indexOffset + indexSize);
    require(crc32(index) === header.indexCrc, "the CRC of the index does not match");
    const buffer = new ByteBuffer(index);
    require(Record.bufferHasIdentifier(buffer), "the index is no FlatBuffer of zcrecord.fbs");
    this.bytes = bytes;
    this.header = header;
    this.record = Record.getRootAsRecord(buffer);
    this.pool = this.record.textArray() ?? new Uint8Array();
  }

  // The bytes of a name, type name or text.
  text(start, size) {
    require(start + size < this.pool.length, "a span is past the end of the text");
    return this.pool.subarray(start, start + size);
  }

  name(entry) {
    return this.text(entry.name().start(), entry.name().size());
  }

  // The bytes of a payload, where they lie.
  payload(number) {
    require(number < this.record.payloadsLength(), "no such payload");
    const payload = this.record.payloads(number);
    const start = this.header.payloadOffset + toNumber(payload.offset(), "a payload leaves the archive");
    const end = start + toNumber(payload.nbytes(), "a payload leaves the archive");
    require(end <= this.bytes.length - END, "a payload leaves the archive");
    return this.bytes.subarray(start, end);
  }

  // Which tensor has this name, or NONE: names ascend in byName, bytewise.
  find(wanted) {
    let low = 0;
    let high = this.record.byNameLength();
    while (low < high) {
      const middle = (low + high) >>> 1;
      const number = this.record.byName(middle);
      require(number < this.record.tensorsLength(), "no such tensor");
      const order = Buffer.compare(this.name(this.record.tensors(number)), wanted);
      if (order === 0) return number;
      if (order < 0) low = middle + 1;
      else high = middle;
    }
    return NONE;
  }
}

// -- what it says, as tests/support/readers.py has it ------------------------------------------------------------------------

const hex = (bytes) => Buffer.from(bytes.buffer, bytes.byteOffset, bytes.length).toString("hex") || "-";
const hex32 = (value) => value.toString(16).padStart(8, "0");
const parent = (number) => (number === NONE ? "-" : String(number));

// What `item` makes of [start, start + size) of a vector, with commas between.
function listed(start, size, length, item) {
  require(start + size <= length, "a range is past the end of its vector");
  return Array.from({ length: size }, (_, i) => item(start + i)).join(",") || "-";
}

function tensorLine(archive, tensor) {
  const { record, header } = archive;
  const rank = tensor.rank();
  const dims = listed(tensor.dims(), rank, record.dimsLength(), (i) => record.dims(i));
  const strides =
    tensor.strides() === NONE ? "c" : listed(tensor.strides(), rank, record.stridesLength(), (i) => record.strides(i));
  let bytes = "- 0 00000000";
  if (tensor.payload() !== NONE) {
    const payload = archive.payload(tensor.payload());
    const start = record.payloads(tensor.payload()).offset() + tensor.byteOffset() + BigInt(header.payloadOffset);
    bytes = `${start} ${payload.length} ${hex32(crc32(payload))}`;
  }
  const what = `${hex(archive.name(tensor))} ${tensor.dtype()} ${tensor.bits()} ${dims} ${strides} ${bytes}`;
  return `tensor ${what} ${tensor.parent()} ${tensor.place()} ${tensor.keySize()}\n`;
}

function moduleLine(archive, module) {
  const typeName = archive.text(module.typeName().start(), module.typeName().size());
  const what = `${hex(archive.name(module))} ${module.kind()} ${hex(typeName)} ${parent(module.parent())}`;
  return `module ${what} ${module.end()} ${module.place()} ${module.keySize()}\n`;
}

function word(archive, type, value) {
  const low = Number(value & 0xffffffffn);
  const high = Number(value >> 32n);
  if (type === ValueType.TEXT) return hex(archive.text(low, high));
  if (type === ValueType.PAYLOAD) return value === BigInt(NONE) ? "0" : String(archive.payload(low).length);
  return String(value);
}

function attributeLine(archive, kind, attribute) {
  const { record } = archive;
  const type = attribute.type();
  const value = attribute.value();
  const words =
    attribute.form() === ValueForm.SCALAR
      ? word(archive, type, value)
      : listed(Number(value & 0xffffffffn), Number(value >> 32n), record.wordsLength(), (i) =>
          word(archive, type, record.words(i)),
        );
  const what = `${parent(attribute.parent())} ${attribute.place()} ${hex(archive.name(attribute))}`;
  return `${kind} ${what} ${type} ${attribute.form()} ${words}\n`;
}

function dump(archive) {
  const { record, header } = archive;
  const counts = [record.tensorsLength(), record.modulesLength(), record.attributesLength(), record.metadataLength()];
  // An entry takes 32 bytes and more: a count beyond that is made up, and would take for ever.
  require(counts.every((count) => count * 32 <= header.indexSize), "a vector is larger than the index");
  let out = `archive ${header.alignment} ${header.baseAlignment} ${header.archiveSize} ${counts.join(" ")}\n`;
  for (let i = 0; i < counts[0]; i++) {
    const tensor = record.tensors(i);
    require(archive.find(archive.name(tensor)) === i, "a tensor is not found by its name");
    out += tensorLine(archive, tensor);
  }
  require(archive.find(Buffer.from("no such tensor")) === NONE, "a tensor is found that is not there");
  for (let i = 0; i < counts[1]; i++) out += moduleLine(archive, record.modules(i));
  for (let i = 0; i < counts[2]; i++) out += attributeLine(archive, "attribute", record.attributes(i));
  for (let i = 0; i < counts[3]; i++) out += attributeLine(archive, "metadata", record.metadata(i));
  return out;
}

function answer(question, bytes, shown) {
  const [mode, level] = question.toString("latin1", 0, 2);
  try {
    const archive = new Archive(bytes, mode);
    const text = level === "o" ? "" : dump(archive);
    return `accepted ${hex32(crc32(Buffer.from(text)))}\n${shown ? `${text}\n` : ""}`;
  } catch (error) {
    // A RangeError is the language's own check: a read outside of the buffer.
    if (error instanceof Refused || error instanceof RangeError) return `refused ${error.message}\n`;
    throw error;
  }
}

const questions = readFileSync(0);
let answers = "";
for (let at = 0; at < questions.length; ) {
  const size = questions.readUInt32LE(at + 4);
  const bytes = questions.subarray(at + 8, at + 8 + size);
  answers += answer(questions.subarray(at, at + 2), bytes, process.argv[2] === "--dump");
  at += 8 + size;
}
process.stdout.write(answers);
