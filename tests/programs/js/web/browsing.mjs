// Only in browsers: other origins, URLs of a page, workers.

import { open } from "../../../../zcrecord/web/reader/zcrecord.js";
import { equal, rejects, test } from "./harness.mjs";

const elsewhere = (base) => base.replace("127.0.0.1", "localhost"); // the same server, another origin

test("a URL may be of the page", async ({ base }) => {
  if (base !== location.origin) throw new Error("page and archives are to be of one origin");
  const whole = await (await open("/things.zcr")).tensor("encoder.w");
  equal((await (await open("../../../../things.zcr")).tensor("encoder.w")).data, whole.data);
});

test("another origin has to allow it", async ({ base }) => {
  const refused = /localhost:\d+\/things\.zcr: the request failed: (Failed to fetch|NetworkError)/; // of Firefox
  await rejects(() => open(`${elsewhere(base)}/things.zcr`), "SourceError", refused);
});

test("another origin that does not say which headers may be read is told what to send", async ({ base }) => {
  const url = `${elsewhere(base)}/things.zcr?do=cors`;
  await rejects(() => open(url), "SourceError", /must send Access-Control-Expose-Headers: Content-Range, ETag/);
});

test("another origin that says all of it is read as any other, without preflights", async ({ base }) => {
  const record = await open(`${elsewhere(base)}/things.zcr?do=exposing`);
  equal((await record.tensor("encoder.w", { verify: true })).data[5], 5);
  await record.verify();
});

test("a worker reads what a page reads", async ({ base }) => {
  const worker = new Worker(new URL("./worker.mjs", import.meta.url), { type: "module" });
  const told = await new Promise((resolve, reject) => {
    worker.onmessage = ({ data }) => resolve(data);
    worker.onerror = ({ message }) => reject(new Error(message));
    worker.postMessage("/things.zcr");
  });
  worker.terminate();
  equal(told, { path: `${base}/things.zcr`, data: Float32Array.of(0, 1, 2, 3, 4, 5) });
});
