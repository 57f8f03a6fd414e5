// Archives over HTTP: how much is fetched, and what is said of servers that do not behave.

import { open } from "../../../../zcrecord/web/reader/zcrecord.js";
import { counting, equal, ok, rejects, test } from "./harness.mjs";

test("one tensor of a small archive takes three requests", async ({ base }) => {
  const told = counting();
  const record = await open(`${base}/front.zcr`, { fetch: told.fetch });
  equal(told.requests, 2);
  equal((await record.tensor("t3")).data[0], 3);
  equal(told.requests, 3);
  equal(told.ranges[0], "bytes=0-65535");
});

test("an index at the end takes no more, sealed or not", async ({ base }) => {
  for (const name of ["back_sealed", "back_unsealed"]) {
    const told = counting();
    const record = await open(`${base}/long_${name}.zcr`, { fetch: told.fetch });
    await record.tensor(record.names[0]);
    ok(told.requests <= 3 && told.asked < 1 << 18, JSON.stringify(told));
  }
});

test("one 16 KiB tensor out of 1 GiB takes three requests and less than 256 KiB", async ({ base }) => {
  const told = counting();
  const record = await open(`${base}/sparse1.zcr`, { fetch: told.fetch });
  const { data } = await record.tensor("t9");
  equal([data.length, data[0], told.requests], [16384, 9, 3]);
  ok(told.asked < 256 << 10, `${told.asked} bytes`);
});

test("offsets beyond 2^32 are read right", async ({ base }) => {
  const record = await open(`${base}/sparse6.zcr`);
  const last = record.names.at(-1);
  ok(record.info(last).offset > 2 ** 32);
  const rows = record.info(last).shape[0];
  equal(Array.from((await record.slice(last, rows - 4)).data), [6, 6, 6, 6]);
});

test("no cache stands between, unless that is asked for", async ({ base }) => {
  for (const [asked, used] of [[undefined, "no-store"], ["default", "default"]]) {
    const seen = new Set();
    const watching = (url, options) => {
      seen.add(options.cache);
      return fetch(url, options);
    };
    await (await open(`${base}/front.zcr`, { fetch: watching, cache: asked })).tensor("t3");
    equal([...seen], [used]);
  }
});

test("streams that cannot fill memory of ours are read as well", async ({ base }) => {
  let streams = 0;
  const plain = async (url, options) => {
    const { body, status, headers } = await fetch(url, options);
    streams += 1;
    return new Response(body.pipeThrough(new TransformStream()), { status, headers });
  };
  const { body } = await plain(`${base}/things.zcr`, {});
  await rejects(() => body.getReader({ mode: "byob" }), "TypeError", /./);
  await body.cancel();
  const record = await open(`${base}/things.zcr`, { fetch: plain });
  await record.verify();
  equal((await record.tensor("encoder.w", { verify: true })).data[5], 5);
  ok(streams > 3);
});

test("what is no URL says so", async () => {
  for (const url of ["http://", "https://["]) {
    await rejects(() => open(url), "UnsupportedError", /is no URL/);
  }
});

test("headers go along", async ({ base }) => {
  const url = `${base}/front.zcr?do=secret`;
  await rejects(() => open(url), "SourceError", /front\.zcr\?…: the server answered 401/);
  ok((await open(url, { headers: { "X-Token": "letmein" } })).has("t3"));
});

test("a server that does no ranges is refused, or taken at its word", async ({ base }) => {
  const url = `${base}/things.zcr?do=whole`;
  await rejects(() => open(url), "SourceError", /would send everything; use one that does, or open it with allowWhole/);
  const record = await open(url, { allowWhole: true });
  equal((await record.tensor("encoder.w")).data[5], 5);
  ok((await open(`${base}/golden/tiny.zcr?do=whole`)).has("w"));
});

const OPENING = {
  missing: ["SourceNotFoundError", /no such file: the server answered 404/],
  forbidden: ["SourceError", /the server answered 403/],
  failing: ["SourceError", /the server answered 500/],
  gzip: ["SourceError", /encoded as gzip|the request failed: Failed to fetch/], // which Chromium says by itself
  silent: ["SourceError", /no Content-Range that can be read; another origin/],
  empty: ["FormatError", /the file is empty/],
  short: ["SourceError", /the request failed|are missing/],
  hangup: ["SourceError", /the request failed/],
  elsewhere: ["SourceError", /the server sent/],
};

for (const [how, [name, pattern]] of Object.entries(OPENING)) {
  test(`a server that is ${how} gives a ${name} with its URL`, async ({ base }) => {
    const error = await rejects(() => open(`${base}/front.zcr?do=${how}`), name, pattern);
    ok(error.message.startsWith(`${base}/front.zcr?…: `), error.message);
  });
}

const LATER = {
  lateetag: ["SourceError", /was replaced or changed since it was opened; open it again/],
  grown: ["SourceError", /was replaced or changed/],
  latewhole: ["SourceError", /a request for a range with everything/],
  lateshort: ["SourceError", /the request failed|are missing/],
  lateshrunk: ["SourceError", /has become shorter/],
  latemissing: ["SourceNotFoundError", /404/],
  lateelsewhere: ["SourceError", /the server sent bytes/],
};

for (const [how, [name, pattern]] of Object.entries(LATER)) {
  test(`a server that turns ${how} gives a ${name} that names the tensor`, async ({ base }) => {
    const record = await open(`${base}/front.zcr?do=${how}&seed=${Math.random()}`);
    const error = await rejects(() => record.tensor("t5"), name, pattern);
    ok(error.message.startsWith(`${base}/front.zcr?…: `), error.message);
    if (error.tensor !== null) equal(error.tensor, "t5");
  });
}

test("a connection that breaks off is taken up where it broke", async ({ base }) => {
  const record = await open(`${base}/things.zcr?do=breaking`);
  const { data } = await record.tensor("big", { verify: true });
  equal([data.length, data[299_999]], [300_000, 299_999 % 251]);
});

test("a server that sends less than was asked for is asked again", async ({ base }) => {
  const record = await open(`${base}/things.zcr?do=sparing`);
  await record.verify();
});

for (const status of [429, 502, 503, 504]) {
  test(`a server that answers ${status} twice is asked a third time`, async ({ base }) => {
    equal((await open(`${base}/front.zcr?do=busy&refused=${status}x2&seed=${Math.random()}`)).length, 10);
  });
}

test("a server that stays busy gives a SourceError with its status", async ({ base }) => {
  const url = `${base}/front.zcr?do=busy&refused=503x3&seed=${Math.random()}`;
  await rejects(() => open(url), "SourceError", /the server answered 503/);
  equal((await open(url)).length, 10); // three requests, and no more, were made
});

test("a load is cancelled while it waits for a busy server", async ({ base }) => {
  const url = `${base}/front.zcr?do=busy&refused=503x9&seed=${Math.random()}`;
  await rejects(() => open(url, { signal: AbortSignal.timeout(50) }), "LoadCancelledError", /was cancelled/);
});

test("progress of one tensor ascends to its bytes, whatever it comes from", async ({ base }) => {
  const url = `${base}/odd.zcr`;
  const octets = await (await fetch(url)).arrayBuffer();
  for (const source of [url, octets, new Blob([octets])]) {
    const record = await open(source);
    for (const [name, calls] of [["of9", 1], [`of${(3 << 20) + 3}`, 2]]) {
      const told = [];
      await record.tensor(name, { verify: true, onProgress: (...all) => told.push(all) });
      const { nbytes } = record.info(name);
      equal(told.at(-1), [nbytes, nbytes]);
      ok(source === octets || told.length >= calls, `${told.length} calls`);
      ok(told.every(([done, total], i) => total === nbytes && (!i || done > told[i - 1][0])), JSON.stringify(told));
    }
  }
});

test("opening with every digest checked tells how far it is", async ({ base }) => {
  const told = [];
  await open(`${base}/front.zcr`, { verify: "full", onProgress: (...all) => told.push(all) });
  const [done, total] = told.at(-1);
  ok(told.length > 1 && done === total && total >= 1_000_000, JSON.stringify(told.at(-1)));
});

test("nobody at the other end is a SourceError", async () => {
  const failed = /127\.0\.0\.1:9\/model\.zcr: the request failed/;
  await rejects(() => open("http://127.0.0.1:9/model.zcr"), "SourceError", failed);
});

test("a load that is cancelled says so, before and while it goes on", async ({ base }) => {
  const reason = AbortSignal.abort();
  await rejects(() => open(`${base}/front.zcr`, { signal: reason }), "LoadCancelledError", /was cancelled/);
  const stop = new AbortController();
  setTimeout(() => stop.abort(), 30);
  const { signal } = stop;
  await rejects(() => open(`${base}/front.zcr?do=slow`, { signal }), "LoadCancelledError", /was cancelled/);
  const record = await open(`${base}/front.zcr?do=lateslow`);
  const later = new AbortController();
  setTimeout(() => later.abort(), 30);
  await rejects(() => record.tensor("t5", { signal: later.signal }), "LoadCancelledError", /was cancelled/);
  const octets = await (await fetch(`${base}/front.zcr`)).arrayBuffer();
  await rejects(() => open(octets, { signal: reason }), "LoadCancelledError", /was cancelled/);
  const bytes = await open(octets);
  await rejects(() => bytes.tensor("t5", { signal: reason }), "LoadCancelledError", /tensor 't5': was cancelled/);
  await rejects(() => record.verify({ signal: reason }), "LoadCancelledError", /was cancelled/);
});

test("what is returned is what was verified, and is fetched once", async ({ base }) => {
  const told = counting();
  const record = await open(`${base}/things.zcr`, { fetch: told.fetch });
  for (const [name, item] of [["encoder.w", 5], ["turned", 4], ["packed", 2]]) {
    const before = told.requests;
    const found = await record.tensor(name, { verify: true });
    equal((found.packed ? found.unpack() : found.contiguous().data)[item], item === 2 ? 0 : item === 5 ? 5 : 2);
    equal(told.requests, before + 1);
  }
  equal((await record.tensor("words", { verify: true })).strings()[2], "ünï");
});

const answering = (tags, more = {}) => async (url, options) => {
  const response = await fetch(url, options);
  const headers = new Headers(response.headers);
  const tag = tags.length > 1 ? tags.shift() : tags[0];
  headers.delete("etag");
  if (tag) headers.set("etag", tag);
  for (const [name, value] of Object.entries(more)) headers.set(name, value);
  return new Response(response.body, { status: response.status, headers });
};

test("a weak ETag that changes is a change, but not beside a date that stays", async ({ base }) => {
  const changing = () => ['W/"1"', 'W/"1"', 'W/"2"'];
  const record = await open(`${base}/front.zcr`, { fetch: answering(changing()) });
  await rejects(() => record.tensor("t5"), "SourceError", /was replaced or changed since it was opened/);
  const dated = answering(changing(), { "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT" });
  equal((await (await open(`${base}/front.zcr`, { fetch: dated })).tensor("t5")).data[0], 5);
});

test("several ranges in one answer, and a size that is left open, are refused", async ({ base }) => {
  for (const more of [{ "Content-Range": "bytes 0-65535/*" }, { "Content-Type": "multipart/byteranges; boundary=x",
    "Content-Range": "" }]) {
    const asked = () => open(`${base}/front.zcr`, { fetch: answering([null], more) });
    await rejects(asked, "SourceError", /no Content-Range that can be read/);
  }
});

test("a server that sends nothing, or a little each time, is not asked for ever", async ({ base }) => {
  for (const nbytes of [0, 10]) {
    const told = counting(async (url, options) => {
      const response = await fetch(url, options);
      const { status, headers } = response;
      return new Response((await response.arrayBuffer()).slice(0, nbytes), { status, headers });
    });
    const missing = /bytes \d+ to \d+ are missing; it is truncated or changed, open it again/;
    await rejects(() => open(`${base}/front.zcr`, { fetch: told.fetch }), "SourceError", missing);
    equal(told.requests, 4);
  }
});

test("an answer that is not used is let go of", async ({ base }) => {
  const cancelled = [];
  const watching = (status, range) => async () => {
    const body = new ReadableStream({ cancel: () => void cancelled.push(status) });
    return new Response(body, { status, headers: range ? { "Content-Range": range } : {} });
  };
  for (const [status, range] of [[200], [403], [500], [416, "bytes */5"], [206], [206, "bytes 7-9/100"]]) {
    await rejects(() => open(`${base}/front.zcr`, { fetch: watching(status, range) }), "SourceError", /./);
  }
  equal(cancelled, [200, 403, 500, 416, 206, 206]);
});

/** Answers as the server does, with another body. */
const bodied = (made) => async (url, options) => {
  const { body, status, headers } = await fetch(url, options);
  const kept = new Headers(headers);
  kept.delete("content-length");
  return new Response(made(body), { status, headers: kept });
};

test("an answer that does not say how long it is is asked for once", async ({ base }) => {
  const told = counting(bodied((body) => body));
  const record = await open(`${base}/front.zcr`, { fetch: told.fetch });
  equal((await record.tensor("t3")).data[0], 3);
  equal(told.requests, 3);
});

test("an answer without end is not waited for, nor kept", async ({ base }) => {
  let sent = 0;
  const endless = () => new ReadableStream({
    pull(controller) {
      sent += 1 << 16;
      if (sent > 1 << 26) controller.error(new Error("all of it was taken"));
      else controller.enqueue(new Uint8Array(1 << 16));
    },
  });
  const more = /the server sent more than was asked for/;
  await rejects(() => open(`${base}/long_back_sealed.zcr`, { fetch: bodied(endless) }), "SourceError", more);
  ok(sent < 1 << 24, `${sent} bytes`);
});

test("an answer that cannot be let go of is not waited for", async ({ base }) => {
  const held = (body) => {
    const reader = body.getReader();
    const pull = async (controller) => {
      const { done, value } = await reader.read();
      if (!done) controller.enqueue(value.subarray(0, value.length - 1));
      else controller.close();
    };
    return new ReadableStream({ pull, cancel: () => new Promise(() => {}) });
  };
  await rejects(() => open(`${base}/front.zcr`, { fetch: bodied(held) }), "SourceError", /are missing/);
});

test("errors show what a server says escaped and shortened", async ({ base }) => {
  const said = (status, statusText, headers = {}) => async () => new Response("", { status, statusText, headers });
  const open500 = (text) => open(`${base}/front.zcr`, { fetch: said(500, text) });
  await rejects(() => open500("a\u009b31mb"), "SourceError", /answered 500 a\\u\{9b\}31mb$/);
  await rejects(() => open500("x".repeat(5000)), "SourceError", /answered 500 x{100}…x{100}$/);
  const coded = said(206, "", { "Content-Encoding": `x\u009by${"z".repeat(5000)}` });
  await rejects(() => open(`${base}/front.zcr`, { fetch: coded }), "SourceError", /as x\\u\{9b\}yz+…z{100}; have it/);
});

test("a load from a Blob is cancelled, too", async ({ base }) => {
  const record = await open(await (await fetch(`${base}/front.zcr`)).blob());
  const stop = new AbortController();
  const loading = record.tensor("t3", { signal: stop.signal });
  stop.abort();
  await rejects(() => loading, "LoadCancelledError", /tensor 't3': was cancelled/);
});
