// SPDX-License-Identifier: 0BSD
/** Finds archives with other bytes before or after them: loaded for the option `embedded`. */

import { END, UnsupportedError, decodeHeader, need, rule } from "./format.js";
import { FIRST } from "./source.js";

/** Returns offset and size of the archive in `size` bytes; `get` reads a range of them (R15, R16). */
export async function search(embedded, get, size) {
  const what = `embedded is "prefix" or "suffix", not ${embedded}`;
  need(["prefix", "suffix"].includes(embedded), what, UnsupportedError);
  if (embedded === "prefix") {
    const header = decodeHeader(await get(0, END), "header");
    rule(15, header && header.archiveSize <= size, "header", size);
    return [0, header.archiveSize];
  }
  const end = await unsignedSize(get, size);
  const { archiveSize = 0 } = end < END ? {} : decodeHeader(await get(end - END, end), "trailer") ?? {};
  rule(16, archiveSize >= 2 * END && archiveSize <= end, "trailer", end);
  await get(end - archiveSize, end - archiveSize + Math.min(archiveSize, FIRST));
  return [end - archiveSize, archiveSize];
}

/** Returns the end of the bytes that may end in an archive. A signed Windows program ends in a certificate table: there
 *  it is the table's start, less up to 7 zeros before it (R16). */
async function unsignedSize(get, size) {
  const view = async (at, count) => {
    const octets = at + count > size ? new Uint8Array(count) : await get(at, at + count);
    return new DataView(octets.buffer, octets.byteOffset, count);
  };
  const first = await view(0, END);
  if (first.getUint16(0) !== 0x4d5a) return size; // "MZ"
  const header = first.getUint32(60, true);
  const head = await view(header, 26);
  const directories = header + ({ 0x10b: 120, 0x20b: 136 }[head.getUint16(24, true)] ?? size);
  if (head.getUint32(0) !== 0x50450000) return size; // "PE", 0, 0
  const found = await view(directories - 4, 44);
  const [count, at, nbytes] = [0, 36, 40].map((i) => found.getUint32(i, true));
  if (count < 5 || !nbytes || at + nbytes !== size) return size;
  const lo = Math.max(0, at - END - 7);
  const last = await get(lo, at);
  const start = new DataView(last.buffer, last.byteOffset);
  for (let end = at - lo; end >= END && end > at - lo - 8; end--) {
    if (start.getBigUint64(end - END) === 0x895a43520d0a1a0an) return lo + end;
    if (last[end - 1]) break;
  }
  return at;
}
