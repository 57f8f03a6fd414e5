// A test harness for zcrecord.js, in Node and in browsers alike: tests register themselves, and `run` runs them.

const tests = [];
const PATIENCE = 60; // seconds for one test; so that one that hangs is named

/** Registers a test; `body` is called with { base, fetch }: where archives are served. */
export function test(name, body) {
  tests.push({ name, body });
}

/** Runs every test and returns their results: { name, error }, no error for those that passed. */
export async function run(context) {
  const results = [];
  for (const { name, body } of tests) {
    let error = null;
    let timer;
    const late = new Promise((_, reject) => {
      timer = setTimeout(() => reject(new Error(`no answer in ${PATIENCE} seconds`)), 1000 * PATIENCE);
    });
    try {
      await Promise.race([body(context), late]);
    } catch (caught) {
      error = caught?.stack ?? String(caught);
    } finally {
      clearTimeout(timer);
    }
    results.push({ name, error });
  }
  return results;
}

export function ok(holds, what = "it does not hold") {
  if (!holds) throw new Error(what);
}

/** Compares numbers, strings, arrays, typed arrays, Maps and plain objects by what they hold. */
export function equal(found, expected) {
  const [a, b] = [shown(found), shown(expected)];
  if (a !== b) throw new Error(`got ${a.slice(0, 500)}, expected ${b.slice(0, 500)}`);
}

function shown(value) {
  return JSON.stringify(value, (_, v) => {
    if (typeof v === "bigint") return `${v}n`;
    if (typeof v === "function") return `class or function ${v.name}`; // else any two would be alike
    if (v instanceof Map) return [...v];
    if (ArrayBuffer.isView(v)) return { [v.constructor.name]: Array.from(v) };
    return Object.is(v, -0) ? "-0" : v;
  }) ?? "undefined";
}

/** Checks that an action throws an error of that name whose message matches; returns it. */
export async function rejects(action, name, pattern) {
  let caught = null;
  try {
    await action();
  } catch (error) {
    caught = error;
  }
  ok(caught !== null, `nothing was thrown, ${name} was expected`);
  if (caught.name !== name || !pattern.test(caught.message)) {
    throw new Error(`got ${caught.name}: ${caught.message}, expected ${name}: ${pattern}`, { cause: caught });
  }
  return caught;
}

/** A fetch that counts requests, and the bytes that they ask for. */
export function counting(fetch = globalThis.fetch) {
  const told = { requests: 0, asked: 0, ranges: [] };
  told.fetch = (url, options) => {
    const range = new Headers(options.headers).get("range");
    const [, lo, hi] = /bytes=(\d*)-(\d+)/.exec(range);
    told.requests += 1;
    told.ranges.push(range);
    told.asked += lo === "" ? Number(hi) : Number(hi) - Number(lo) + 1;
    return fetch(url, options);
  };
  return told;
}
