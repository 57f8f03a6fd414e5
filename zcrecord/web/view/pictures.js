// SPDX-License-Identifier: 0BSD
/** Base of both pictures of an archive: a canvas, and a line of text about the piece under the pointer, or under the
 *  cursor that arrow keys move. */

import { make } from "./elements.js";
import { COLOURS, TENSOR } from "./model.js";

export const MOST_MARKS = 500; // of pieces at a time: each is an element

/** A canvas that is drawn again when its width or the colours change, with pieces that pointer and arrows go to. */
export class Picture {
  #cursor = -1;
  #marked = [];
  #frame = 0;

  /** `label` is its name for screen readers; a subclass calls `start` when it can be drawn. */
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
