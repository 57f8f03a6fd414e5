// SPDX-License-Identifier: 0BSD
/**
 * The two pictures of an archive: a treemap of what takes the bytes, and a map of where they lie.
 *
 * Both are canvases, of which a line of words says what is under the pointer or the cursor that arrow keys move.
 */

import {
  COLOURS, HEADER, MODULE, TENSOR, counted, exactly, hex, human, make, modelOf, percent, shown,
} from "./model.js";

const MOST_MARKS = 500; // of pieces at a time: each is an element

/** A canvas that is drawn again when its width or the colours change, with pieces that pointer and arrows go to. */
class Picture {
  #cursor = -1;
  #marked = [];
  #frame = 0;

  /** `label` names it for who cannot see it; a subclass calls `start` when it can be drawn. */
  constructor(model, onSelect, label, kind) {
    [this.model, this.onSelect] = [model, onSelect];
    this.canvas = make("canvas", { "aria-hidden": "true" });
    this.marks = make("div", { class: "marks", "aria-hidden": "true" });
    this.words = make("p", { class: "words", role: "status" });
    this.stage = make("div", { class: `stage ${kind}`, tabindex: "0", role: "application",
      "aria-roledescription": kind === "treemap" ? "treemap" : "map of the archive", "aria-label": label },
      this.canvas, this.marks);
    this.element = make("div", { class: "picture" }, this.stage, this.words);
  }

  start() {
    this.stage.addEventListener("pointermove", (event) => this.#point(event));
    this.stage.addEventListener("pointerleave", () => this.#go(this.#cursor));
    this.stage.addEventListener("click", (event) => {
      const piece = this.at(event.offsetX, event.offsetY);
      if (piece >= 0) this.#choose(piece);
    });
    this.stage.addEventListener("keydown", (event) => this.#press(event));
    new ResizeObserver(() => this.redraw()).observe(this.stage);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
    this.words.textContent = this.hint;
  }

  /** Draws in the next frame, once however often it is asked for. */
  redraw() {
    this.#frame ||= requestAnimationFrame(() => {
      this.#frame = 0;
      const [width, height] = [this.stage.clientWidth, this.stage.clientHeight];
      const ratio = Math.min(window.devicePixelRatio || 1, 2);
      if (!width || !height) return;
      [this.canvas.width, this.canvas.height] = [width * ratio, height * ratio];
      const context = this.canvas.getContext("2d");
      context.scale(ratio, ratio);
      this.draw(context, width, height, this.#palette());
      this.#mark(this.#marked);
    });
  }

  /** Returns the colours of view.css, by name. */
  #palette() {
    const style = getComputedStyle(this.stage);
    const names = ["index", "padding", "ground", "ink", ...Array.from({ length: COLOURS }, (_, i) => `c${i}`)];
    return Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  }

  #point(event) {
    const piece = this.at(event.offsetX, event.offsetY);
    this.words.textContent = piece >= 0 ? this.tell(piece) : this.hint;
  }

  #press(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !this.count) return;
    const ways = { ArrowRight: this.#cursor + 1, ArrowDown: this.#cursor + 1, ArrowLeft: this.#cursor - 1,
      ArrowUp: this.#cursor - 1, Home: 0, End: this.count - 1 };
    if (event.key in ways) this.#go(Math.max(0, Math.min(this.count - 1, ways[event.key])));
    else if ((event.key === "Enter" || event.key === " ") && this.#cursor >= 0) this.#choose(this.#cursor);
    else return;
    event.preventDefault();
  }

  #go(piece) {
    this.#cursor = piece;
    this.words.textContent = piece >= 0 ? this.tell(piece) : this.hint;
    this.#mark(piece >= 0 ? [piece] : []);
  }

  #choose(piece) {
    this.#go(piece);
    this.choose(piece);
  }

  /** Marks the pieces that a node is. */
  select(kind, row) {
    const pieces = this.piecesOf(kind, row);
    this.#cursor = pieces[0] ?? -1;
    this.words.textContent = kind === TENSOR && pieces.length ? this.tell(pieces[0]) : this.hint;
    this.#mark(pieces);
  }

  #mark(pieces) {
    this.#marked = pieces;
    this.marks.replaceChildren(...pieces.flatMap((piece) => this.boxes(piece)).map(([x, y, width, height]) => {
      const mark = make("div", { class: "mark" });
      Object.assign(mark.style, { left: `${x}px`, top: `${y}px`, width: `${width}px`, height: `${height}px` });
      return mark;
    }));
  }
}

/**
 * Calls `put(i, x, y, width, height)` for each weight, which descend: areas that are in proportion to them and as near
 * to squares as filling row by row makes them.
 */
function squarify(weights, [x, y, width, height], put) {
  let left = weights.reduce((a, b) => a + b, 0);
  for (let i = 0; i < weights.length && left > 0;) {
    const [side, scale] = [Math.min(width, height), (width * height) / left];
    let [sum, worst, j] = [0, Infinity, i];
    for (; j < weights.length; j++) {
      const thin = (((sum + weights[j]) * scale) / side) ** 2; // squared thickness of the row with this one in it
      const ratio = Math.max((weights[i] * scale) / thin, thin / (weights[j] * scale));
      if (ratio > worst) break;
      [worst, sum] = [ratio, sum + weights[j]];
    }
    const thick = side ? Math.min((sum * scale) / side, Math.max(width, height)) : 0;
    for (let along = 0; i < j; i++) {
      const long = (side * weights[i]) / sum;
      if (width >= height) put(i, x, y + along, thick, long);
      else put(i, x + along, y, long, thick);
      along += long;
    }
    if (width >= height) [x, width] = [x + thick, width - thick];
    else [y, height] = [y + thick, height - thick];
    left -= sum;
  }
}

/** Returns a treemap: areas are bytes as they are stored, colours element types. */
export function treemap(description, { onSelect = () => {} } = {}) {
  return new Treemap(modelOf(description), onSelect);
}

class Treemap extends Picture {
  #boxes = []; // [node, x, y, width, height] of each tensor, or module too small to be looked into
  #labels = []; // of each: its name below the last module that has a title
  #titles = [];

  constructor(model, onSelect) {
    const largest = Array.from(model.own, (nbytes, i) => [nbytes, i]).sort((a, b) => b[0] - a[0]).slice(0, 3);
    const names = largest.filter(([nbytes]) => nbytes).map(([, i]) => model.inWords(i)).join("; ");
    super(model, onSelect, `Treemap of tensors by bytes. The largest: ${names || "none"}. Arrow keys go through them.`,
      "treemap");
    this.hint = "There are no bytes to draw.";
    if (model.stored) this.hint = "Area is bytes as stored, shared ones once. Arrow keys or pointer name tensors.";
    this.start();
  }

  get count() {
    return this.#boxes.length;
  }

  draw(context, width, height, palette) {
    [this.#boxes, this.#labels, this.#titles] = [[], [], []];
    if (this.model.ownBelow[0]) this.#layOut(0, [0, 0, width, height], 0, "");
    context.fillStyle = palette.ground;
    context.fillRect(0, 0, width, height);
    let last = "";
    for (const [node, x, y, w, h] of this.#boxes) {
      const tight = w < 3 || h < 3;
      const colour = node < this.model.modules ? "padding" : `c${this.model.colour(node - this.model.modules)}`;
      if (colour !== last) context.fillStyle = palette[(last = colour)]; // for 100,000 of them it takes a while
      context.fillRect(x, y, tight ? w : w - 1, tight ? h : h - 1);
    }
    context.fillStyle = palette.ink;
    context.font = `11px ${getComputedStyle(this.stage).fontFamily}`;
    context.textBaseline = "middle";
    for (const [label, x, y, w] of this.#titles) this.#write(context, label, x + 4, y + 8, w - 8);
    this.#boxes.forEach(([, x, y, w, h], i) => {
      if (w > 44 && h > 18) this.#write(context, this.#labels[i], x + 4, y + Math.min(10, h / 2), w - 9);
    });
  }

  /** Writes as much of a name as there is room for. */
  #write(context, name, x, y, room) {
    let text = shown(name.slice(0, 80));
    if (context.measureText(text).width > room) {
      while (text && context.measureText(`${text}…`).width > room) text = text.slice(0, -1);
      text = text && `${text}…`;
    }
    context.fillText(text, x, y);
  }

  #layOut(module, [x, y, width, height], depth, label) {
    const { model } = this;
    const add = (node, box, text) => { this.#boxes.push([node, ...box]); this.#labels.push(text); };
    if (width * height < 4) {
      add(module, [x, y, width, height], label);
      return;
    }
    const nodes = Array.from(model.childrenOf(module)).filter((node) => model.weight(node) > 0);
    nodes.sort((a, b) => model.weight(b) - model.weight(a));
    if (depth && width > 70 && height > 50 && nodes.length > 1) {
      this.#titles.push([label, x, y, width]);
      [x, y, width, height, label] = [x + 2, y + 16, width - 5, height - 19, ""];
    }
    const below = (node) => (label ? `${label}.${model.key(node)}` : model.key(node));
    squarify(nodes.map((node) => model.weight(node)), [x, y, width, height], (i, ...box) => {
      if (nodes[i] < model.modules) this.#layOut(nodes[i], box, depth + 1, below(nodes[i]));
      else add(nodes[i], box, below(nodes[i]));
    });
  }

  at(px, py) {
    return this.#boxes.findIndex(([, x, y, w, h]) => px >= x && px < x + w && py >= y && py < y + h);
  }

  boxes(piece) {
    return this.#boxes[piece] ? [this.#boxes[piece].slice(1)] : [];
  }

  tell(piece) {
    const { model } = this;
    const [node] = this.#boxes[piece] ?? [];
    if (node === undefined) return this.hint;
    const share = percent(model.weight(node), model.stored);
    if (node >= model.modules) return `${model.inWords(node - model.modules)}, ${share}`;
    return `${model.brief(node)}: ${counted(model.tensorsBelow[node], "tensor")}, ${share}`;
  }

  choose(piece) {
    const [node] = this.#boxes[piece];
    this.onSelect(this.model.kind(node), this.model.row(node));
  }

  piecesOf(kind, row) {
    const { model } = this;
    if (kind === MODULE) { // its tensors, unless that is everything
      const last = model.end(row);
      const inside = (node) => {
        const module = node < model.modules ? node : model.parent(node);
        return module >= row && module < last;
      };
      return row ? [...this.#boxes.keys()].filter((i) => inside(this.#boxes[i][0])).slice(0, MOST_MARKS) : [];
    }
    if (kind !== TENSOR || model.d.tensors.payload[row] < 0) return [];
    const first = model.ranges[model.range[model.d.tensors.payload[row]]].users[0];
    return [...this.#boxes.keys()].filter((i) => this.#boxes[i][0] === model.modules + first);
  }
}

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
 * that were told to `fetched(start, end)`, counted from the archive's first byte.
 */
export function layoutMap(description, { onSelect = () => {}, fetching = false } = {}) {
  return new LayoutMap(modelOf(description), onSelect, fetching);
}

class LayoutMap extends Picture {
  #pieces;
  #rows = { count: 1, height: 1, gap: 0, width: 1 };
  #whole = null; // the strip in full colours, of which what was fetched is shown
  #intervals = []; // fetched, ascending, apart

  constructor(model, onSelect, fetching) {
    const { archive } = model.d;
    const where = `index of ${human(archive.indexNbytes)} ${archive.front ? "before" : "after"} the payloads`;
    const parts = `header, ${where}, ${counted(model.ranges.length, "payload")}, trailer`;
    const label = `Map of the archive, ${human(archive.nbytes)}: ${parts}. Arrow keys go through them.`;
    super(model, onSelect, label, "strip");
    [this.fetching, this.#pieces] = [fetching, piecesOf(model)];
    this.hint = "From the first byte to the last. Arrow keys or pointer name what lies where.";
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
