// SPDX-License-Identifier: 0BSD
/**
 * What elements are worth as numbers: every element type of the format, the narrow floats among them.
 *
 * Knows nothing of where elements come from. Integers of 64 bits are rounded: they are looked at, not counted with.
 */

/** Narrow floats: bits of exponent and fraction, bias, and which of their codes are no finite numbers. */
const FLOATS = {
  float16: [5, 10, 15, "ieee"],
  bfloat16: [8, 7, 127, "ieee"],
  float8_e4m3fn: [4, 3, 7, "fn"],
  float8_e4m3fnuz: [4, 3, 8, "fnuz"],
  float8_e5m2: [5, 2, 15, "ieee"],
  float8_e5m2fnuz: [5, 2, 16, "fnuz"],
  float8_e8m0fnu: [8, 0, 127, "scale"],
  float6_e2m3fn: [2, 3, 1, "finite"],
  float6_e3m2fn: [3, 2, 3, "finite"],
  float4_e2m1fn: [2, 1, 1, "finite"],
};
const tables = new Map();

/** Returns the value of every code of a narrow float. */
export function tableOf(dtype) {
  if (!tables.has(dtype)) {
    const [exponent, fraction, bias, kind] = FLOATS[dtype];
    const signed = kind !== "scale";
    const size = 2 ** (exponent + fraction + (signed ? 1 : 0));
    tables.set(dtype, Float64Array.from({ length: size }, (_, code) => decoded(code, exponent, fraction, bias, kind)));
  }
  return tables.get(dtype);
}

function decoded(code, exponent, fraction, bias, kind) {
  const most = 2 ** exponent - 1;
  if (kind === "scale") return code === most ? NaN : 2 ** (code - bias);
  const sign = code >> (exponent + fraction) ? -1 : 1;
  const [e, f] = [(code >> fraction) & most, code & (2 ** fraction - 1)];
  if (kind === "ieee" && e === most) return f ? NaN : sign * Infinity;
  if (kind === "fn" && e === most && f === 2 ** fraction - 1) return NaN;
  if (kind === "fnuz" && sign < 0 && !e && !f) return NaN; // where others have a negative zero
  return sign * (e ? (1 + f / 2 ** fraction) * 2 ** (e - bias) : (f / 2 ** fraction) * 2 ** (1 - bias));
}

/** Whether elements of a type are numbers at all; a type that is not known has bytes only. */
export const isNumeric = (dtype) => dtype !== "string" && !dtype.startsWith("unknown_");

/** Whether elements are whole numbers, and so are shown without decimals. */
export const isWhole = (dtype) => /^(u?int|bool)/.test(dtype);

/** Returns a tensor's elements in C order, one number to an element; of complex ones the magnitude. */
export function numbersOf(tensor) {
  const { dtype, bits, count } = tensor;
  const data = tensor.packed ? tensor.unpack() : tensor.contiguous().data;
  const magnitude = (_, i) => Math.hypot(data[2 * i], data[2 * i + 1]);
  if (tensor.components === 2) return Float64Array.from({ length: count }, magnitude);
  if (data instanceof BigInt64Array || data instanceof BigUint64Array) return Float64Array.from(data, Number);
  if (FLOATS[dtype] && (data instanceof Uint8Array || data instanceof Uint16Array)) {
    const table = tableOf(dtype);
    return Float64Array.from(data, (code) => table[code & (table.length - 1)]);
  }
  const narrow = /^int([24])$/.exec(dtype); // stored one to a byte, it comes as bytes
  if (narrow && bits === 8) return Float64Array.from(data, (code) => (code << (32 - narrow[1])) >> (32 - narrow[1]));
  return data;
}

/** Returns a number in few characters, as exactly as they allow. */
export function short(value, whole = false) {
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  if (whole && Math.abs(value) < 1e15) return value.toLocaleString("en").replace("-", "−");
  const size = Math.abs(value);
  const text = size && (size < 1e-3 || size >= 1e6) ? value.toExponential(3) : String(Number(value.toPrecision(5)));
  return text.replace(/-/g, "−");
}
