// SPDX-License-Identifier: 0BSD
/** What is to be said of servers that do not answer a request for a range with that range: loaded when one does not. */

import { FormatError, SourceError, SourceNotFoundError, checkGoing, need } from "./format.js";

const BUSY = [429, 502, 503, 504]; // answers that another try may change
const WAITS = [250, 1000]; // milliseconds before each further try, or what the server asks for
const LONGEST = 5000; // of these

/** Returns whether two answers' ETags and dates are those of one file. A weak ETag may stay when bytes change: the date
 *  tells more. */
function sameFile(...answers) {
  const [one, other] = answers.map(([etag, date]) =>
    (etag?.startsWith("W/") ? date ?? etag.slice(2) : etag ?? date));
  return !one || !other || one === other;
}

/** Waits, unless the load is cancelled. */
async function pause(milliseconds, signal) {
  await new Promise((done) => {
    const timer = setTimeout(done, milliseconds);
    signal?.addEventListener("abort", () => { clearTimeout(timer); done(); }, { once: true });
  });
  checkGoing(signal);
}

/** Returns the response where it is right after all, or a Blob of the whole file where it is small or may be sent
 *  whole; throws what is wrong otherwise. */
export async function instead(place, response, { at, end, lo, last, size, tags, opening, signal, tries }) {
  const { status } = response;
  const told = (name) => response.headers.get(name);
  const check = (holds, what, Kind = SourceError) => {
    if (!holds) response.body?.cancel().catch(() => {});
    need(holds, what, Kind);
  };
  check(status !== 416 || !/\/0$/.test(told("content-range")), "the file is empty", FormatError);
  const missing = `there is no such file: the server answered ${status}`;
  check(status !== 404 && status !== 410, missing, SourceNotFoundError);
  check(status !== 416, "has become shorter since it was opened; open it again");
  if (BUSY.includes(status) && tries < WAITS.length) {
    response.body?.cancel().catch(() => {});
    await pause(Math.min(1000 * told("retry-after") || WAITS[tries], LONGEST), signal);
    return place.ask(at, end, signal, tries + 1);
  }
  check(status === 200 || status === 206, `the server answered ${status} ${response.statusText}`.trim());
  const encoding = told("content-encoding") ?? "identity";
  check(encoding === "identity", `the server sent it encoded as ${encoding}; have it serve .zcr files as they are`);
  if (status === 200 && opening) {
    const length = told("content-length");
    check(place.allowWhole || (length !== null && Number(length) <= end), "the server does not answer requests for \
ranges, and so would send everything; use one that does, or open it with allowWhole");
    const octets = new Uint8Array(await response.arrayBuffer());
    Object.assign(place, { octets, size: octets.length });
    return new Blob([octets.subarray(at, end)]);
  }
  const same = sameFile(tags, place.tags ?? []);
  check(status === 206 || !same, "the server answered a request for a range with everything");
  check(status === 200 || size !== undefined, "the answer has no Content-Range that can be read; another origin must \
send Access-Control-Expose-Headers: Content-Range, ETag");
  const misplaced = status === 206 && size === place.size && (lo !== at || last >= end);
  check(!misplaced, `the server sent bytes [${lo}, ${last + 1}) of [${at}, ${end})`);
  check(status === 206 && size === place.size && same, "was replaced or changed since it was opened; open it again");
  return response;
}
