// SPDX-License-Identifier: 0BSD
/** A picture of what takes an archive's bytes. */

import { MODULE, TENSOR, modelOf } from "./model.js";
import { counted, percent, shown } from "./text.js";
import { MOST_MARKS, Picture } from "./pictures.js";

const KEPT = 0.8; // of a box's area: titles, its own and those around it, take no more than the rest

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
    if (this.model.ownBelow[0]) this.#layOut(0, [0, 0, width, height], 1, "");
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

  /** `kept` is how much of its area titles around a module have left to it; `label` its name below them. */
  #layOut(module, [x, y, width, height], kept, label) {
    const { model } = this;
    const add = (node, box, text) => { this.#boxes.push([node, ...box]); this.#labels.push(text); };
    if (width * height < 4) {
      add(module, [x, y, width, height], label);
      return;
    }
    const nodes = Array.from(model.childrenOf(module)).filter((node) => model.weight(node) > 0);
    nodes.sort((a, b) => model.weight(b) - model.weight(a));
    const room = kept * (1 - 5 / width) * (1 - 19 / height);
    if (module && width > 70 && height > 50 && nodes.length > 1 && room >= KEPT) {
      kept = room;
      this.#titles.push([label, x, y, width]);
      [x, y, width, height, label] = [x + 2, y + 16, width - 5, height - 19, ""];
    }
    const below = (node) => (label ? `${label}.${model.key(node)}` : model.key(node));
    squarify(nodes.map((node) => model.weight(node)), [x, y, width, height], (i, ...box) => {
      if (nodes[i] < model.modules) this.#layOut(nodes[i], box, kept, below(nodes[i]));
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
