// SPDX-License-Identifier: 0BSD
/** Texts for names, values, counts and sizes in bytes. */

/** Returns a text in one line: invisible characters and those that turn it around are escaped, stacked accents cut. */
export function shown(text) {
  return text.replace(/(\p{M}{3})\p{M}+/gu, "$1…").replace(/[\p{C}\p{Zl}\p{Zp}]/gu, (c) => {
    const code = c.codePointAt(0);
    return code < 256 ? `\\x${code.toString(16).padStart(2, "0")}` : `\\u{${code.toString(16)}}`;
  });
}

/** Returns a number of bytes with a unit. */
export function human(nbytes) {
  if (nbytes < 1024) return `${nbytes} B`;
  const exponent = Math.min(Math.floor(Math.log2(nbytes) / 10), 6);
  return `${(nbytes / 1024 ** exponent).toFixed(1)} ${"KMGTPE"[exponent - 1]}iB`;
}

/** Returns an attribute's value in one line. */
export function shownValue(value) {
  if (typeof value === "string") return `'${shown(value)}'`;
  if (value === null || typeof value !== "object") return String(value);
  if ("nbytes" in value) return `${exactly(value.nbytes)} bytes`;
  if ("number" in value) return value.number;
  if ("text" in value) return `'${shown(value.text)}'... ${value.count} characters`;
  const more = value.count > value.items.length ? [`... ${value.count} in all`] : [];
  return `[${[...value.items.map(shownValue), ...more].join(", ")}]`;
}

export function exactly(number) {
  return number.toLocaleString("en");
}

export function counted(number, what) {
  return `${exactly(number)} ${what}${number === 1 ? "" : "s"}`;
}

export function both(nbytes) {
  return nbytes < 1024 ? counted(nbytes, "byte") : `${human(nbytes)} (${exactly(nbytes)} bytes)`;
}

export function percent(part, whole) {
  const share = whole ? (100 * part) / whole : 0;
  if (share && share < 0.05) return "< 0.1 %";
  return `${share.toFixed(share && share < 10 ? 1 : 0)} %`;
}

export function hex(number) {
  return `0x${number.toString(16)}`;
}
