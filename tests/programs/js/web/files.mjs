// Node alone: archives in files, read by ranges.

import { open as openFile, readFile, truncate, writeFile } from "node:fs/promises";
import { pathToFileURL } from "node:url";

import { open } from "../../../../zcrecord/web/reader/zcrecord.js";
import { equal, ok, rejects, test } from "./harness.mjs";

test("a path, a file URL and a FileHandle are read by ranges", async ({ folder }) => {
  const path = `${folder}/things.zcr`;
  for (const source of [path, pathToFileURL(path), String(pathToFileURL(path))]) {
    const record = await open(source, { verify: "full" });
    equal((await record.tensor("encoder.w")).data[5], 5);
    await record.close();
  }
  const handle = await openFile(path);
  const record = await open(handle);
  await record.close();
  equal((await record.slice("big", 250, 252)).data, Uint8Array.of(250, 0)); // it is the caller's, and open still
  await handle.close();
  await rejects(() => record.tensor("big"), "SourceError", /cannot be read/);
  await rejects(() => open(handle), "SourceError", /cannot be read/);
});

test("a load from a file, or from memory, is cancelled, too", async ({ folder }) => {
  const record = await open(`${folder}/things.zcr`);
  const stop = new AbortController();
  const loading = record.tensor("big", { signal: stop.signal });
  stop.abort();
  await rejects(() => loading, "LoadCancelledError", /tensor 'big': was cancelled/);
  await record.close();
  const inMemory = await open(await readFile(`${folder}/quarter.zcr`));
  const later = new AbortController();
  setTimeout(() => later.abort(), 1);
  await rejects(() => inMemory.contentDigest({ signal: later.signal }), "LoadCancelledError", /was cancelled/);
});

test("the last tensor of a file of 6 GiB is read right", async ({ folder }) => {
  const record = await open(`${folder}/sparse6.zcr`);
  const last = record.names.at(-1);
  equal(Array.from((await record.slice(last, -4)).data), [6, 6, 6, 6]);
  await record.close();
});

test("a file that is not there, and one that shrinks, are typed errors", async ({ folder }) => {
  await rejects(() => open(`${folder}/nothing.zcr`), "SourceNotFoundError", /nothing\.zcr: there is no such file/);
  await rejects(() => open(folder), "SourceError", /cannot be read/);
  const path = `${folder}/shrinking.zcr`;
  const record = await open(`${folder}/things.zcr`);
  await writeFile(path, await record._source.read(0, record._source.size));
  await record.close();
  const shrinking = await open(path);
  await truncate(path, 5000);
  const cut = /tensor 'big': ends at .* truncated or changed/;
  const error = await rejects(() => shrinking.tensor("big"), "SourceError", cut);
  ok(error.path === path);
  await shrinking.close();
});
