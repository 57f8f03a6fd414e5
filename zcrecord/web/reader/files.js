// SPDX-License-Identifier: 0BSD
/** Archives in memory, in Blobs and in Node's files; and what is to be said of a source that is none. */

import { SourceError, SourceNotFoundError, UnsupportedError, checkGoing, need, printable } from "./format.js";
import { Place, PIECE } from "./places.js";
import { roomFor } from "./pieces.js";

const PART = 1 << 26; // bytes that are read at once

class FilePlace extends Place {
  async read(start, end, signal, onProgress) {
    const out = roomFor(end - start);
    for (let at = 0; at < out.length;) {
      checkGoing(signal);
      at += await this.some(out, at, Math.min(out.length - at, PART), start + at);
      if (at < out.length) onProgress?.(at, out.length);
    }
    checkGoing(signal);
    return out;
  }

  async *pieces(start, end, signal) {
    const piece = new Uint8Array(Math.min(PIECE, end - start));
    for (let at = start; at < end;) {
      checkGoing(signal);
      const count = await this.some(piece, 0, Math.min(piece.length, end - at), at);
      at += count;
      yield piece.subarray(0, count);
    }
  }

  async some(out, start, count, at) {
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

/** Returns the place of memory, a Blob, a path, a file URL or a FileHandle. */
export async function placeOf(source) {
  const shared = globalThis.SharedArrayBuffer; // pages have it where they are isolated
  if (source instanceof ArrayBuffer || (shared && source instanceof shared)) source = new Uint8Array(source);
  if (ArrayBuffer.isView(source)) {
    const octets = new Uint8Array(source.buffer, source.byteOffset, source.byteLength);
    return new Place({ octets, size: octets.length });
  }
  if (source instanceof Blob) {
    const ask = async (start, end) => source.slice(start, end);
    return new Place({ path: source.name ?? null, size: source.size, ask });
  }
  const node = globalThis.process?.versions?.node;
  if (node && typeof source?.read === "function" && "fd" in source) {
    return new FilePlace({ handle: source, size: await sizeOf(source) });
  }
  need(typeof source === "string" || source instanceof URL, () => `open takes a URL, a Blob, an ArrayBuffer or a typed \
array, in Node a path or FileHandle, too; got ${source?.constructor?.name ?? source}`, UnsupportedError);
  const path = String(source);
  const remote = /^(?!file:)[a-z][a-z0-9+.-]+:/i.test(path);
  need(node && !remote, () => `'${printable(path)}' is no URL`, UnsupportedError);
  // What bundles for browsers is not to look for it: the catch tells esbuild.
  const { open } = await import(/* webpackIgnore: true */ "node:fs/promises").catch((cause) => { throw cause; });
  const failed = (cause) => { throw unreadable(cause, path); };
  const handle = await open(/^file:/i.test(path) ? new URL(path) : path).catch(failed);
  return new FilePlace({ handle, path, size: await sizeOf(handle, path), owned: true });
}
