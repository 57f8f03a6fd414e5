// SPDX-License-Identifier: 0BSD
/**
 * A tensor as a picture: a matrix of it, in at most 192 x 256 cells, each the element of largest magnitude in it:
 * an outlier is never lost, and every cell is an element of the tensor, with its index.
 *
 * The element under the pointer, or under the cursor that arrow keys move, is named below it.
 */

import { short } from "./values.js";

const [ROWS, COLUMNS] = [192, 256];
const WRAP = 64; // elements of one axis that fit a line
const BEYOND = 0.995; // the share of cells whose colours are told apart; a few outliers would leave all others pale
const COLOURS = {
  light: { zero: [246, 246, 248], plus: [178, 24, 43], minus: [20, 90, 170],
    odd: [190, 0, 200], none: [205, 208, 214] },
  dark: { zero: [24, 27, 33], plus: [255, 138, 96], minus: [92, 176, 255], odd: [255, 90, 255], none: [66, 71, 80] },
};

/** Returns rows and columns that a shape is shown in: its axes are split so that it is nearest to a square. */
export function matrixOf(shape) {
  const dims = shape.map(Number);
  const count = dims.reduce((a, b) => a * b, 1);
  if (dims.length < 2) {
    const columns = count <= WRAP ? count : Math.ceil(Math.sqrt(count));
    return { rows: Math.ceil(count / Math.max(1, columns)), columns, count, split: null };
  }
  let best = null;
  for (let split = 1, rows = 1; split < dims.length; split++) {
    rows *= dims[split - 1];
    const apart = Math.abs(Math.log(rows / (count / rows)));
    if (!best || apart < best.apart) best = { rows, columns: count / rows, count, split, apart };
  }
  return best;
}

export class HeatMap {
  #place = -1; // the cell that is told

  constructor(shape, { whole = false } = {}) {
    Object.assign(this, { shape: shape.map(Number), whole, matrix: matrixOf(shape) });
    this.height = Math.min(ROWS, this.matrix.rows);
    this.width = Math.min(COLUMNS, this.matrix.columns);
    this.values = new Float64Array(this.width * this.height);
    this.indices = new Float64Array(this.width * this.height).fill(-1); // -1: nothing was read of it
  }

  /** Takes elements in C order, the first being number `first` of the tensor. */
  add(numbers, first) {
    const { matrix: { rows, columns }, width, height, values, indices } = this;
    for (let i = 0; i < numbers.length;) {
      const at = first + i;
      const row = Math.floor(at / columns);
      const line = Math.floor((row * height) / rows) * width;
      const end = Math.min(numbers.length, (row + 1) * columns - first);
      for (let column = at - row * columns; i < end; i++, column++) {
        const cell = line + Math.floor((column * width) / columns);
        const [value, known] = [numbers[i], values[cell]];
        // A comparison with NaN is false: one that is there stays, one that comes is taken.
        if (indices[cell] < 0 || !(Math.abs(value) <= Math.abs(known) || known !== known)) {
          values[cell] = value;
          indices[cell] = first + i;
        }
      }
    }
  }

  /** Returns the magnitude that has the full colour. */
  get limit() {
    const sizes = this.values.filter((v, i) => this.indices[i] >= 0 && Number.isFinite(v)).map(Math.abs).sort();
    if (!sizes.length) return 0;
    return sizes[Math.floor(BEYOND * (sizes.length - 1))] || sizes.at(-1);
  }

  /** Returns how axes became rows and columns, in words. */
  get told() {
    const { matrix: { rows, columns, split }, shape } = this;
    if (split === null) return rows > 1 ? `One axis, in lines of ${columns}.` : "";
    const axes = (from, to) => (to - from > 1 ? `axes ${from} to ${to - 1}` : `axis ${from}`);
    const each = Math.ceil(rows / this.height) * Math.ceil(columns / this.width);
    const cells = each > 1 ? ` A cell is the largest of up to ${short(each, true)} elements.` : "";
    return `${rows} × ${columns}: down ${axes(0, split)}, across ${axes(split, shape.length)}.${cells}`;
  }

  /** Returns the canvas, its legend, and the line that tells what is pointed at. */
  element() {
    const make = (tag, attributes, text = "") => {
      const element = document.createElement(tag);
      for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
      element.textContent = text;
      return element;
    };
    this.canvas = make("canvas", { width: this.width, height: this.height, tabindex: "0", role: "img",
      "aria-label": `Heat map of ${this.matrix.rows} by ${this.matrix.columns} elements; arrow keys move over it` });
    this.mark = make("span", { class: "mark", hidden: "" });
    this.line = make("output", { class: "pointed" }, "Point at a cell, or use the arrow keys.");
    this.scale = make("p", { class: "scale" });
    this.#listen();
    const frame = make("div", { class: "frame" });
    const cell = Math.min(24, 320 / this.width, 400 / this.height); // pixels; of a long strip not a square
    frame.style.width = `min(100%, ${Math.max(this.width * cell, Math.min(this.width * 24, 120))}px)`;
    this.canvas.style.height = `${Math.max(this.height * cell, Math.min(this.height * 24, 24))}px`;
    frame.append(this.canvas, this.mark);
    const box = make("div", { class: "heatmap" });
    box.append(make("p", { class: "note" }, this.told), frame, this.line, this.scale);
    return box;
  }

  draw() {
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    const { zero, plus, minus, odd, none } = COLOURS[dark ? "dark" : "light"];
    const { limit, width, height, values, indices } = this;
    const image = new ImageData(width, height);
    values.forEach((value, cell) => {
      const colour = indices[cell] < 0 ? none : Number.isNaN(value) ? odd : null;
      const part = limit ? Math.min(1, Math.abs(value) / limit) : Number.isFinite(value) ? 0 : 1;
      const end = value > 0 ? plus : minus;
      const [r, g, b] = colour ?? zero.map((from, i) => from + (end[i] - from) * part);
      image.data.set([r, g, b, 255], 4 * cell);
    });
    this.canvas.getContext("2d").putImageData(image, 0, 0);
    this.#legend(limit, { minus, zero, plus, odd, none });
  }

  #legend(limit, colours) {
    const show = (colour, text) => {
      const swatch = document.createElement("span");
      swatch.className = "colour";
      swatch.style.backgroundColor = `rgb(${colour})`;
      this.scale.append(swatch, text);
    };
    this.scale.replaceChildren();
    const beyond = (sign) => (this.values.some((v) => sign * v > limit) ? { "-1": "≤ ", 1: "≥ " }[sign] : "");
    if (this.values.some((v, i) => v < 0 && this.indices[i] >= 0)) {
      show(colours.minus, `${beyond(-1)}${short(-limit, this.whole)}`);
    }
    show(colours.zero, "0");
    if (limit || beyond(1)) show(colours.plus, `${beyond(1)}${short(limit, this.whole)}`);
    if (this.values.some(Number.isNaN)) show(colours.odd, "not a number");
    if (this.indices.includes(-1)) show(colours.none, "not read");
  }

  #listen() {
    const { canvas } = this;
    canvas.addEventListener("pointermove", (event) => {
      const box = canvas.getBoundingClientRect();
      const [x, y] = [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
      this.#tell(Math.floor(y * this.height), Math.floor(x * this.width));
    });
    canvas.addEventListener("keydown", (event) => {
      const [dy, dx] = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key] ?? [];
      if (dy === undefined) return;
      event.preventDefault();
      if (this.#place < 0) this.#tell(0, 0);
      else this.#tell(Math.floor(this.#place / this.width) + dy, (this.#place % this.width) + dx);
    });
    canvas.addEventListener("blur", () => { this.mark.hidden = true; });
    canvas.addEventListener("pointerleave", () => { this.mark.hidden = true; });
  }

  #tell(row, column) {
    const [y, x] = [Math.max(0, Math.min(this.height - 1, row)), Math.max(0, Math.min(this.width - 1, column))];
    const cell = (this.#place = y * this.width + x);
    const { style } = this.mark;
    [style.left, style.top] = [`${(100 * x) / this.width}%`, `${(100 * y) / this.height}%`];
    [style.width, style.height] = [`${100 / this.width}%`, `${100 / this.height}%`];
    this.mark.hidden = false;
    const index = this.indices[cell];
    this.line.textContent = index < 0 ? "Nothing was read there."
      : `[${this.#index(index).join(", ")}] = ${short(this.values[cell], this.whole)}`;
  }

  #index(number) {
    const step = ([rest, ...out], dim) => [Math.floor(rest / dim), rest % dim, ...out];
    return this.shape.reduceRight(step, [number]).slice(1);
  }
}
