// SPDX-License-Identifier: 0BSD
/** Responses that are not the requested range: busy servers, whole files, errors; loaded when there is one. */

import { FormatError, SourceError, SourceNotFoundError, checkCancelled, need, shortened } from "./format.js";

const BUSY = [429, 502, 503, 504]; // statuses that another try may change
const WAITS = [250, 1000]; // milliseconds before each further try, or what the server asks for
const LONGEST = 5000; // of these

/** Returns true if the ETags and dates of two responses are those of one file. A weak ETag may stay the same when bytes
 *  change: then the date decides. */
function sameFile(...responses) {
  const [one, other] = responses.map(([etag, date]) =>
    (etag?.startsWith("W/") ? date ?? etag.slice(2) : etag ?? date));
  return !one || !other || one === other;
}

/** Waits, unless the load is cancelled. */
async function pause(milliseconds, signal) {
  await new Promise((done) => {
    const timer = setTimeout(done, milliseconds);
    signal?.addEventListener("abort", () => { clearTimeout(timer); done(); }, { once: true });
  });
  checkCancelled(signal);
}

/** Returns the response if it is valid after all, or a Blob of the range if the whole file came and may. Throws an
 *  error otherwise. */
export async function unexpected(source, response, { at, end, lo, last, size, tags, opening, signal, tries }) {
  const { status } = response;
  const header = (name) => response.headers.get(name);
  const check = (holds, what, Kind = SourceError) => {
    if (!holds) response.body?.cancel().catch(() => {});
    need(holds, what, Kind);
  };
  check(status !== 416 || !/\/0$/.test(header("content-range")), "the file is empty", FormatError);
  const missing = `there is no such file: the server answered ${status}`;
  check(status !== 404 && status !== 410, missing, SourceNotFoundError);
  check(status !== 416, "has become shorter since it was opened; open it again");
  if (BUSY.includes(status) && tries < WAITS.length) {
    response.body?.cancel().catch(() => {});
    await pause(Math.min(1000 * header("retry-after") || WAITS[tries], LONGEST), signal);
    return source.request(at, end, signal, tries + 1);
  }
  check(status === 200 || status === 206, `the server answered ${status} ${shortened(response.statusText)}`.trim());
  const encoding = header("content-encoding") ?? "identity";
  check(encoding === "identity",
    `the server sent it encoded as ${shortened(encoding)}; have it serve .zcr files as they are`);
  if (status === 200 && opening) {
    const length = header("content-length");
    check(source.allowWhole || (length !== null && Number(length) <= end), "the server does not answer requests for \
ranges, and so would send everything; use one that does, or open it with allowWhole");
    const octets = new Uint8Array(await response.arrayBuffer());
    Object.assign(source, { octets, size: octets.length });
    return new Blob([octets.subarray(at, end)]);
  }
  const same = sameFile(tags, source.tags ?? []);
  check(status === 206 || !same, "the server answered a request for a range with everything");
  check(status === 200 || size !== undefined, "the answer has no Content-Range that can be read; another origin must \
send Access-Control-Expose-Headers: Content-Range, ETag");
  const misplaced = status === 206 && size === source.size && (lo !== at || last >= end);
  check(!misplaced, `the server sent bytes [${lo}, ${last + 1}) of [${at}, ${end})`);
  check(status === 206 && size === source.size && same, "was replaced or changed since it was opened; open it again");
  return response;
}
