// SPDX-License-Identifier: 0BSD
/** Opens archives; zcrecord.d.ts documents it. Other modules are loaded when needed. */

import { END, UnsupportedError, checkCancelled, checkIndex, crc32, decodeHeader, decodeIndex, need, notLoaded,
  rule } from "./format.js";
import { Record, Tensor, located } from "./record.js";
import { FIRST, HttpFile } from "./source.js";

export { Record, Tensor };
export { FillError, FormatError, IntegrityError, LimitError, LoadCancelledError, ProducerError, RecordError,
  SourceError, SourceNotFoundError, TensorNotFoundError, UnsupportedError, VersionError } from "./format.js";

export async function open(source, options = {}) {
  const { signal, verify = "index", embedded } = options;
  need(["index", "full"].includes(verify), `verify is "index" or "full", not ${verify}`, UnsupportedError);
  need(new Uint8Array(Uint16Array.of(1).buffer)[0], "this machine is not little-endian", UnsupportedError);
  checkCancelled(signal);
  const bytes = await sourceOf(source, options);
  try {
    const { index, ...found } = await locate(bytes, embedded, signal);
    rule(17, crc32(index) === found.header.indexCrc, "index");
    const ix = decodeIndex(index);
    checkIndex(ix, found.header);
    const record = new Record({ ...found, ix, source: bytes });
    if (verify === "full") await record.verify(options);
    return record;
  } catch (error) {
    await bytes.close?.();
    const explained = error.rule && await import("./rules.js").then(({ explain }) => explain(error), () => null);
    throw located(explained || error, { path: bytes.path });
  }
}

/** Returns the ByteSource of a URL; local.js has every other one. */
async function sourceOf(source, { fetch = globalThis.fetch, headers, cache = "no-store", allowWhole }) {
  const text = typeof source === "string" || source instanceof URL ? String(source) : "";
  const base = globalThis.location?.href; // Node has none: other strings are paths
  const url = text && URL.canParse(text, base) ? new URL(text, base) : null;
  const { protocol, host, pathname, search, href } = url ?? { protocol: "" };
  if (/^(file|.?):?$/.test(protocol)) return (await import("./local.js").catch(notLoaded)).localSource(source);
  // Without credentials, which a query may hold, too.
  const path = `${protocol}${host && "//"}${host}${pathname}${search && "?…"}`;
  return new HttpFile({ url: href, path, fetch, headers, cache, allowWhole });
}

/** Finds header, start and index (R8, R14). */
async function locate(source, embedded, signal) {
  const held = [];
  const get = async (lo, hi) => {
    const found = held.find(([start, octets]) => start <= lo && hi <= start + octets.length);
    if (found) return found[1].subarray(lo - found[0], hi - found[0]);
    held.push([lo, await source.read(lo, hi, signal)]);
    return held.at(-1)[1];
  };
  await get(0, Math.min(FIRST, source.size ?? FIRST));
  let [base, size] = [0, source.size];
  need(size, "the file is empty");
  need(size < 2 ** 53, "is larger than 2^53 bytes", UnsupportedError);
  rule(14, size >= END, "the file", size);
  if (embedded) [base, size] = await (await import("./embedded.js").catch(notLoaded)).search(embedded, get, size);
  const first = await get(base, base + END);
  const header = decodeHeader(first, "header");
  const end = base + size;
  rule(14, !header || header.archiveSize === size, "header", size);
  if (!header?.front) await get(header ? base + header.indexOffset : Math.max(base, end - FIRST), end);
  const last = await get(end - END, end);
  const trailer = decodeHeader(last, "trailer");
  rule(8, trailer && (header ? String(first) === String(last) : first[9] === last[9]), "trailer");
  rule(14, trailer.archiveSize === size, "trailer", size);
  const start = base + trailer.indexOffset;
  let index = await get(start, start + trailer.indexSize);
  // Copied if it is unaligned, shared with threads, or would keep a larger buffer alive.
  if (index.byteOffset % 8 || !source.octets || !(index.buffer instanceof ArrayBuffer)) index = index.slice();
  return { header: trailer, sealed: header !== null, base, index };
}

/** Gives Record methods of a module that is loaded when one is called. */
function later(load, ...names) {
  for (const name of names) {
    Record.prototype[name] = async function call(...args) {
      try {
        return await (await load().catch(notLoaded))[name](this, ...args);
      } catch (error) {
        throw this._located(error);
      }
    };
  }
}
later(() => import("./structure.js"), "modules", "attributes", "metadata", "tree", "tied");
later(() => import("./tensors.js"), "array", "slice", "_read");
later(() => import("./verify.js"), "verify", "_verified");
later(() => import("./contentdigest.js"), "contentDigest");
later(() => import("./upload.js"), "uploadTo");
later(() => import("./hollow.js"), "hollow");
later(() => import("./onnx.js"), "toOnnx");
later(() => import("./webnn.js"), "webnnSink");
