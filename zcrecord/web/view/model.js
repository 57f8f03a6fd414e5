// SPDX-License-Identifier: 0BSD
/** The model of a description: sizes, ties, nesting, names and colours; view.js documents descriptions. */

import { human, shown } from "./text.js";

export const [MODULE, TENSOR, ATTRIBUTE] = ["module", "tensor", "attribute"];
export const COLOURS = 8; // as many as view.css names; types beyond have the last
export const HEADER = 64;
const LINE = 300; // characters of a name that is shortened

const models = new WeakMap();

export function modelOf(description) {
  if (!models.has(description)) models.set(description, new Model(description));
  return models.get(description);
}

/** Sizes, ties and nesting, from a description. A node is the number of a module, or of a tensor or attribute after
 *  those. */
class Model {
  constructor(description) {
    const { modules, tensors, attributes, payloads, strided } = description;
    this.d = description;
    this.modules = modules.key.length;
    this.tensors = tensors.key.length;
    this.nodes = this.modules + this.tensors + attributes.key.length;
    this.#nest([...modules.parent.slice(1)], tensors.module, attributes.module);
    this.nbytes = Float64Array.from(tensors.payload, (p, i) =>
      (p < 0 ? 0 : (strided[i]?.nbytes ?? payloads.nbytes[p])));
    this.#share();
    this.#sum();
    const types = description.dtypes.map((name, number) => ({ name, number, count: 0, nbytes: 0 }));
    tensors.dtype.forEach((type, i) => { types[type].count += 1; types[type].nbytes += this.nbytes[i]; });
    this.types = types.sort((a, b) => b.nbytes - a.nbytes || b.count - a.count);
    this.colours = [];
    this.types.forEach(({ number }, rank) => { this.colours[number] = Math.min(rank, COLOURS - 1); });
  }

  /** Orders each module's children by place: those of module m are children[start[m]] to [start[m + 1]]. */
  #nest(...parents) {
    const start = (this.start = new Uint32Array(this.modules + 1));
    for (const column of parents) for (const parent of column) start[parent + 1] += 1;
    for (let m = 0; m < this.modules; m++) start[m + 1] += start[m];
    this.children = new Uint32Array(this.nodes - 1);
    const { modules, tensors, attributes } = this.d;
    const places = [modules.place.slice(1), tensors.place, attributes.place];
    let node = 1;
    parents.forEach((column, k) => column.forEach((parent, i) => {
      this.children[start[parent] + places[k][i]] = node++;
    }));
  }

  /** Finds the range of each payload and its users; its bytes count for the first of them. */
  #share() {
    const { payloads, tensors } = this.d;
    const { offset, nbytes } = payloads;
    this.range = new Int32Array(offset.length);
    this.ranges = [];
    offset.forEach((at, p) => {
      if (!p || at !== offset[p - 1]) this.ranges.push({ start: at, nbytes: nbytes[p], first: p, users: [] });
      this.range[p] = this.ranges.length - 1;
    });
    this.own = new Float64Array(this.tensors);
    this.users = Array.from(offset, () => []); // of each payload: tensors that are tied
    tensors.payload.forEach((p, i) => {
      if (p < 0) return;
      const range = this.ranges[this.range[p]];
      if (!range.users.length) this.own[i] = range.nbytes;
      range.users.push(i);
      this.users[p].push(i);
    });
    this.stored = this.ranges.reduce((sum, range) => sum + range.nbytes, 0);
  }

  /** Sums up modules' subtrees: children come after their parents. */
  #sum() {
    const { modules, tensors } = this.d;
    this.below = new Float64Array(this.modules);
    this.ownBelow = new Float64Array(this.modules);
    this.tensorsBelow = new Uint32Array(this.modules);
    tensors.module.forEach((m, i) => {
      this.below[m] += this.nbytes[i];
      this.ownBelow[m] += this.own[i];
      this.tensorsBelow[m] += 1;
    });
    for (let m = this.modules - 1; m > 0; m--) {
      for (const column of [this.below, this.ownBelow, this.tensorsBelow]) column[modules.parent[m]] += column[m];
    }
  }

  /** Returns the module after the last one in a module. */
  end(m) {
    const { parent } = this.d.modules;
    let end = m + 1;
    while (end < this.modules && parent[end] >= m) end++;
    return end;
  }

  childrenOf(m) {
    return this.children.subarray(this.start[m], this.start[m + 1]);
  }

  kind(node) {
    return node < this.modules ? MODULE : node < this.modules + this.tensors ? TENSOR : ATTRIBUTE;
  }

  row(node) {
    return node < this.modules ? node : node - this.modules - (node < this.modules + this.tensors ? 0 : this.tensors);
  }

  node(kind, row) {
    return row + (kind === MODULE ? 0 : this.modules + (kind === TENSOR ? 0 : this.tensors));
  }

  key(node) {
    if (!node) return this.d.name;
    return this.d[`${this.kind(node)}s`].key[this.row(node)];
  }

  parent(node) {
    const column = node < this.modules ? this.d.modules.parent : this.d[`${this.kind(node)}s`].module;
    return column[this.row(node)];
  }

  /** Returns a full name; the record's own is empty. */
  name(node) {
    const keys = [];
    for (let at = node; at > 0; at = this.parent(at)) keys.unshift(this.key(at));
    return keys.join(".");
  }

  /** Returns as much of a full name as a line has room for. */
  brief(node) {
    const name = this.name(node);
    return name.length > LINE ? `${shown(name.slice(0, LINE))}…` : shown(name);
  }

  /** Returns how much of the treemap a node takes: bytes that it stores, shared ones at their first tensor. */
  weight(node) {
    const kind = this.kind(node);
    return kind === MODULE ? this.ownBelow[node] : kind === TENSOR ? this.own[this.row(node)] : 0;
  }

  typed(i) {
    const { dtypes, shapes, tensors } = this.d;
    return `${dtypes[tensors.dtype[i]]} ${shapes[tensors.shape[i]]}`;
  }

  /** Returns the colour of what lies in a range: that of its first tensor. */
  colour(i) {
    return this.colours[this.d.tensors.dtype[i]];
  }

  inWords(i) {
    return `${this.brief(this.modules + i)}: ${this.typed(i)}, ${human(this.nbytes[i])}`;
  }
}

/** Returns the full name of a tensor. */
export function fullName(description, number) {
  const model = modelOf(description);
  return model.name(model.modules + number);
}

/** Returns the bytes of a tensor's own elements. */
export function nbytesOf(description, number) {
  return modelOf(description).nbytes[number];
}
