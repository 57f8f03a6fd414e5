// SPDX-License-Identifier: 0BSD
/** The map of an archive: its bytes from first to last. */

import { make } from "./elements.js";
import { COLOURS, HEADER, MODULE, TENSOR, modelOf } from "./model.js";
import { counted, exactly, hex, human, percent, shown } from "./text.js";
import { MOST_MARKS, Picture } from "./pictures.js";

const PIECES = ["header", "index", "payload", "zeros between", "trailer"];
const [INDEX, PAYLOAD, ZEROS, TRAILER] = [1, 2, 3, 4];

/** Returns the parts of an archive from its first byte to its last: [start, end, kind, range]. */
function piecesOf(model) {
  const { archive } = model.d;
  const known = [[0, HEADER, 0, -1], [archive.indexOffset, archive.indexOffset + archive.indexNbytes, INDEX, -1]];
  const payloads = model.ranges.map(({ start, nbytes }, i) => {
    const at = archive.payloadOffset + start;
    return [at, at + nbytes, PAYLOAD, i];
  });
  if (archive.front) known.push(...payloads);
  else known.splice(1, 0, ...payloads);
  known.push([archive.nbytes - HEADER, archive.nbytes, TRAILER, -1]);
  const out = [];
  let end = 0;
  for (const piece of known) {
    if (piece[0] > end) out.push([end, piece[0], ZEROS, -1]);
    out.push(piece);
    end = piece[1];
  }
  return out;
}

/**
 * Returns the archive as rows of a strip, from its first byte to its last. With `fetching` it is pale but for the bytes
 * passed to `fetched(start, end)`, counted from the archive's first byte.
 */
export function layoutMap(description, { onSelect = () => {}, fetching = false } = {}) {
  return new LayoutMap(modelOf(description), onSelect, fetching);
}

class LayoutMap extends Picture {
  #pieces;
  #rows = { count: 1, height: 1, gap: 0, width: 1 };
  #whole = null; // the strip in full colours; its fetched part is shown
  #intervals = []; // fetched, ascending, apart

  constructor(model, onSelect, fetching) {
    const { archive } = model.d;
    const where = `index of ${human(archive.indexNbytes)} ${archive.front ? "before" : "after"} the payloads`;
    const parts = `header, ${where}, ${counted(model.ranges.length, "payload")}, trailer`;
    const label = `Map of the archive, ${human(archive.nbytes)}: ${parts}. Arrow keys go through them.`;
    super(model, onSelect, label, "strip");
    [this.fetching, this.#pieces] = [fetching, piecesOf(model)];
    this.hint = "From the first byte to the last. Arrow keys or pointer name each part.";
    this.count = this.#pieces.length;
    this.bytes = make("p", { class: "status" });
    if (fetching) this.element.append(this.bytes);
    this.#told();
    this.start();
  }

  /** Notes that bytes of the archive were fetched, and shows them. */
  fetched(start, end) {
    [start, end] = [Math.max(0, start), Math.min(this.model.d.archive.nbytes, end)];
    if (start >= end) return;
    const apart = this.#intervals.filter(([from, to]) => to < start || from > end);
    const touching = this.#intervals.filter(([from, to]) => to >= start && from <= end);
    const merged = [Math.min(start, ...touching.map(([from]) => from)), Math.max(end, ...touching.map(([, to]) => to))];
    this.#intervals = [...apart, merged].sort((a, b) => a[0] - b[0]);
    this.#told();
    const context = this.canvas.getContext("2d");
    if (this.#whole) this.#reveal(context, start, end);
  }

  get fetchedBytes() {
    return this.#intervals.reduce((sum, [start, end]) => sum + end - start, 0);
  }

  #told() {
    const { nbytes } = this.model.d.archive;
    const share = percent(this.fetchedBytes, nbytes);
    this.bytes.textContent = `${exactly(this.fetchedBytes)} of ${exactly(nbytes)} bytes fetched, ${share}`;
  }

  draw(context, width, height, palette) {
    const count = width > 600 ? 12 : 18;
    this.#rows = { count, gap: 3, height: height / count - 3, width };
    this.#paint(context, palette);
    if (!this.fetching) return;
    this.#whole = make("canvas", { width: this.canvas.width, height: this.canvas.height });
    this.#whole.getContext("2d").drawImage(this.canvas, 0, 0);
    context.globalAlpha = 0.75;
    context.fillStyle = palette.ground;
    context.fillRect(0, 0, width, height);
    context.globalAlpha = 1;
    for (const [start, end] of this.#intervals) this.#reveal(context, start, end);
  }

  #paint(context, palette) {
    const { model } = this;
    const { count, height, gap, width } = this.#rows;
    context.fillStyle = palette.padding;
    for (let row = 0; row < count; row++) context.fillRect(0, row * (height + gap), width, height);
    let last = "";
    const paint = ([start, end, kind, range], least) => {
      const first = range < 0 ? -1 : model.ranges[range].users[0] ?? -1;
      const colour = kind !== PAYLOAD ? "index" : `c${first < 0 ? COLOURS - 1 : model.colour(first)}`;
      if (colour !== last) context.fillStyle = palette[(last = colour)];
      for (const [x, y, w, h] of this.#boxesOf(start, end, least)) context.fillRect(x, y, w > 3 ? w - 1 : w, h);
    };
    for (const piece of this.#pieces) if (piece[2] === PAYLOAD) paint(piece, 0);
    for (const piece of this.#pieces) if (piece[2] !== PAYLOAD && piece[2] !== ZEROS) paint(piece, 3);
  }

  #reveal(context, start, end) {
    const ratio = this.canvas.width / this.#rows.width;
    for (const [x, y, w, h] of this.#boxesOf(start, end, 1)) {
      const from = [Math.floor(x * ratio), y * ratio, Math.ceil(w * ratio), h * ratio];
      context.drawImage(this.#whole, ...from, from[0] / ratio, y, from[2] / ratio, h);
    }
  }

  /** Returns where bytes are drawn: a box in each row, at least so many pixels wide. */
  #boxesOf(start, end, least = 0) {
    const { count, height, gap, width } = this.#rows;
    const each = this.model.d.archive.nbytes / count;
    const out = [];
    for (let row = Math.floor(start / each); row < count && row * each < end; row++) {
      const from = (Math.max(start - row * each, 0) / each) * width;
      const wide = Math.max((Math.min(end - row * each, each) / each) * width - from, least);
      out.push([Math.min(from, width - Math.min(wide, width)), row * (height + gap), wide, height]);
    }
    return out;
  }

  at(x, y) {
    const { count, height, gap, width } = this.#rows;
    const row = Math.floor(y / (height + gap));
    if (row < 0 || row >= count || x < 0 || x >= width) return -1;
    const byte = ((row + x / width) * this.model.d.archive.nbytes) / count;
    let [low, high] = [0, this.#pieces.length];
    while (low < high) {
      const middle = (low + high) >>> 1;
      if (this.#pieces[middle][1] <= byte) low = middle + 1;
      else high = middle;
    }
    return low < this.#pieces.length ? low : -1;
  }

  boxes(piece) {
    const [start, end] = this.#pieces[piece];
    return this.#boxesOf(start, end, 3);
  }

  tell(piece) {
    const [start, end, kind, range] = this.#pieces[piece];
    const where = `${hex(start)} to ${hex(end)}, ${human(end - start)}`;
    if (kind !== PAYLOAD) return `${PIECES[kind]}: ${where}`;
    const { users } = this.model.ranges[range];
    const names = users.slice(0, 3).map((i) => this.model.brief(this.model.modules + i));
    const more = users.length > 3 ? ` and ${users.length - 3} more` : "";
    return `payload: ${where}: ${names.length ? names.join(", ") + more : "of an attribute"}`;
  }

  choose(piece) {
    const range = this.#pieces[piece][3];
    const first = range < 0 ? undefined : this.model.ranges[range].users[0];
    if (first !== undefined) this.onSelect(TENSOR, first);
  }

  piecesOf(kind, row) {
    const { model } = this;
    const { payload, module } = model.d.tensors;
    const last = kind === MODULE && row ? model.end(row) : 0; // of the whole record nothing is marked
    const chosen = kind === TENSOR ? (i) => i === row : (i) => module[i] >= row && module[i] < last;
    const ranges = new Set();
    if (kind === TENSOR || last) payload.forEach((p, i) => { if (p >= 0 && chosen(i)) ranges.add(model.range[p]); });
    return [...this.#pieces.keys()].filter((i) => ranges.has(this.#pieces[i][3])).slice(0, MOST_MARKS);
  }
}
