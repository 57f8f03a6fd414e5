// SPDX-License-Identifier: 0BSD
/**
 * Plans how much of a tensor is read to show it: all of a small one, stretches of the first axis of a large one.
 *
 * At most GLANCE bytes are read, unless the user asks for all of it; memory holds a piece at a time.
 */

export const GLANCE = 8 * 2 ** 20; // bytes
const PIECE = 4 * 2 ** 20; // bytes, read and shown before the next
const STRETCHES = 16; // of a tensor that is read in part
const MOST = 2 ** 29; // bytes that have to be in memory at once, if a tensor cannot be read in smaller pieces

/**
 * Returns a plan: `pieces` [start, stop) of the first axis (null: the whole tensor), their `nbytes`, `verify` if the
 * digest is to be checked, `complete`, and the `reason` if nothing is read.
 */
export function planOf(record, info, all) {
  const [nbytes, rows] = [info.nbytes, info.shape.length ? Number(info.shape[0]) : 1];
  if (!info.count) return { pieces: [], nbytes: 0, complete: true };
  const whole = !info.shape.length || info.strides !== null; // out of order, every slice reaches over most of it
  const row = whole ? nbytes : nbytes / rows;
  if (row > MOST) return { pieces: [], nbytes: 0, complete: false, reason: "huge" };
  if (nbytes > GLANCE && !all) return partOf(nbytes, rows, row);
  const verify = isAllOfItsPayload(record, info);
  if (whole || verify) return { pieces: [null], nbytes, complete: true, verify };
  const step = Math.max(1, Math.floor(PIECE / row));
  const pieces = [];
  for (let start = 0; start < rows; start += step) pieces.push([start, Math.min(rows, start + step)]);
  return { pieces, nbytes, complete: true };
}

/** Returns true if reading a tensor fetches all of a small payload that has a digest: checking it costs no bytes. */
function isAllOfItsPayload(record, { digest, payload, nbytes, shape, strides, bits }) {
  const size = digest === null ? Infinity : record._nbytes(payload);
  const span = shape.reduce((sum, dim, axis) => sum + (Number(dim) - 1) * Math.abs(Number(strides?.[axis])), 1);
  return size <= GLANCE && size <= (strides ? (span * bits) / 8 : nbytes);
}

function partOf(nbytes, rows, row) {
  if (row > GLANCE) return { pieces: [], nbytes: 0, complete: false, reason: "large" };
  const count = Math.max(1, Math.min(STRETCHES, rows, Math.floor(GLANCE / row)));
  const length = Math.max(1, Math.floor(GLANCE / row / count));
  const pieces = Array.from({ length: count }, (_, i) => {
    const start = count > 1 ? Math.floor(((rows - length) * i) / (count - 1)) : 0;
    return [start, start + length];
  });
  return { pieces, nbytes: count * length * row, complete: false };
}

/** Reads a plan's pieces, one ahead of the one that is worked on: yields each with the number of its first element. */
export async function* piecesOf(record, info, plan, signal) {
  const { shape, count, name } = info;
  const row = shape.length ? count / Number(shape[0]) : 1;
  const get = (piece) => (piece ? record.slice(name, ...piece, { signal })
    : record.tensor(name, { signal, verify: plan.verify }));
  let next = plan.pieces.length ? get(plan.pieces[0]) : null;
  for (let i = 0; i < plan.pieces.length; i++) {
    const tensor = await next;
    next = i + 1 < plan.pieces.length ? get(plan.pieces[i + 1]) : null;
    next?.catch(() => {}); // the error is thrown where it is awaited, if it is
    yield { tensor, first: plan.pieces[i] ? plan.pieces[i][0] * row : 0 };
  }
}
