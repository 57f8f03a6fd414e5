// SPDX-License-Identifier: 0BSD
/** Sources that are not URLs: memory, Blobs and, in Node, files; all others are refused. */

import { SourceError, SourceNotFoundError, UnsupportedError, checkCancelled, need, printable } from "./format.js";
import { PIECE, allocate } from "./pieces.js";
import { ByteSource } from "./source.js";

const MOST = 1 << 26; // bytes that are read at once

class NodeFile extends ByteSource {
  async read(start, end, signal, onProgress) {
    const out = allocate(end - start);
    for (let at = 0; at < out.length;) {
      checkCancelled(signal);
      at += await this.readSome(out, at, Math.min(out.length - at, MOST), start + at);
      if (at < out.length) onProgress?.(at, out.length);
    }
    checkCancelled(signal);
    return out;
  }

  async *readPieces(start, end, signal) {
    const piece = new Uint8Array(Math.min(PIECE, end - start));
    for (let at = start; at < end;) {
      checkCancelled(signal);
      const count = await this.readSome(piece, 0, Math.min(piece.length, end - at), at);
      at += count;
      yield piece.subarray(0, count);
    }
  }

  async readSome(out, start, count, at) {
    const { bytesRead } = await this.handle.read(out, start, count, at)
      .catch((cause) => { throw unreadable(cause, this.path); });
    const what = `ends at ${at}, bytes up to ${at + count} are missing; it is truncated or changed, open it again`;
    if (!bytesRead) throw new SourceError(what, { path: this.path, offset: at });
    return bytesRead;
  }

  async close() {
    if (this.owned) await this.handle.close();
  }
}

function unreadable(cause, path) {
  const Kind = cause.code === "ENOENT" ? SourceNotFoundError : SourceError;
  return new Kind(Kind === SourceError ? `cannot be read: ${cause.message}` : "there is no such file", { path, cause });
}

async function sizeOf(handle, path) {
  const { size } = await handle.stat().catch((cause) => { throw unreadable(cause, path); });
  return size;
}

/** Returns the ByteSource of memory, a Blob, a path, a file URL or a FileHandle. */
export async function localSource(source) {
  const shared = globalThis.SharedArrayBuffer; // only isolated pages have it
  if (source instanceof ArrayBuffer || (shared && source instanceof shared)) source = new Uint8Array(source);
  if (ArrayBuffer.isView(source)) {
    const octets = new Uint8Array(source.buffer, source.byteOffset, source.byteLength);
    return new ByteSource({ octets, size: octets.length });
  }
  if (source instanceof Blob) {
    const request = async (start, end) => source.slice(start, end);
    return new ByteSource({ path: source.name ?? null, size: source.size, request });
  }
  const node = globalThis.process?.versions?.node;
  if (node && typeof source?.read === "function" && "fd" in source) {
    return new NodeFile({ handle: source, size: await sizeOf(source) });
  }
  need(typeof source === "string" || source instanceof URL, () => `open takes a URL, a Blob, an ArrayBuffer or a typed \
array, in Node a path or FileHandle, too; got ${source?.constructor?.name ?? source}`, UnsupportedError);
  const path = String(source);
  const remote = /^(?!file:)[a-z][a-z0-9+.-]+:/i.test(path);
  need(node && !remote, () => `'${printable(path)}' is no URL`, UnsupportedError);
  // Bundlers for browsers must not look for it: the catch says so to esbuild, the comment to webpack.
  const { open } = await import(/* webpackIgnore: true */ "node:fs/promises").catch((cause) => { throw cause; });
  const failed = (cause) => { throw unreadable(cause, path); };
  const handle = await open(/^file:/i.test(path) ? new URL(path) : path).catch(failed);
  return new NodeFile({ handle, path, size: await sizeOf(handle, path), owned: true });
}
