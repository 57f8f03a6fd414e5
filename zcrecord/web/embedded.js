// SPDX-License-Identifier: 0BSD
/** Archives with other bytes before or after them: loaded when `open` is told of some. */

import { END, UnsupportedError, decodeHeader, need, rule } from "./format.js";
import { FIRST } from "./places.js";

/** Returns where in `size` bytes the archive starts, and how many it has; `get` reads a range of them (R15, R16). */
export async function find(embedded, get, size) {
  const what = `embedded is "prefix" or "suffix", not ${embedded}`;
  need(["prefix", "suffix"].includes(embedded), what, UnsupportedError);
  if (embedded === "prefix") {
    const header = decodeHeader(await get(0, END), "header");
    rule(15, header && header.archiveSize <= size, "header", size);
    return [0, header.archiveSize];
  }
  const { archiveSize = 0 } = decodeHeader(await get(size - END, size), "trailer") ?? {};
  rule(16, archiveSize >= 2 * END && archiveSize <= size, "trailer", size);
  await get(size - archiveSize, size - archiveSize + Math.min(archiveSize, FIRST));
  return [size - archiveSize, archiveSize];
}
