// SPDX-License-Identifier: 0BSD
/**
 * The tree of modules, tensors and attributes: a list of rows, for keyboard and pointer.
 *
 * It has the keys of ARIA's tree: arrows, Home, End, the first letters of a name; Enter chooses. The focus stays on the
 * list, which names the active row: rows that cannot be seen need no elements.
 */

import { make, swatch } from "./elements.js";
import { MODULE, TENSOR, modelOf } from "./model.js";
import { counted, human, shown, shownValue } from "./text.js";

const PAUSE = 700; // ms after which typing starts another word
const LONGEST = 400; // characters of a name in a row; `details` have all of it
const TALLEST = 2e7; // px: browsers have no taller elements than 3e7

let made = 0; // trees: ids are of the whole page

/** Returns the tree of modules, tensors and attributes. Only rows that can be seen are elements, so a million do. */
export function tree(description, { onSelect = () => {} } = {}) {
  return new Tree(modelOf(description), onSelect);
}

class Tree {
  #model;
  #onSelect;
  #rows = []; // nodes that are open, in order
  #found = null; // nodes whose names match, in place of #rows
  #open = new Set([0]);
  #level; // of each module
  #active = 0; // place of the row that has the focus
  #chosen = -1;
  #height = 0;
  #typed = { word: "", time: 0 };

  constructor(model, onSelect) {
    [this.#model, this.#onSelect, this.id] = [model, onSelect, `tree${made++}`];
    this.#level = new Uint8Array(model.modules);
    for (let m = 1; m < model.modules; m++) this.#level[m] = this.#level[model.d.modules.parent[m]] + 1;
    let only = 0; // wrappers of one module are opened, too: their content is of interest
    while (model.childrenOf(only).length === 1 && (only = model.childrenOf(only)[0]) < model.modules) {
      this.#open.add(only);
    }
    this.search = make("input", { type: "search", placeholder: "Find by name", "aria-label": "Find tensors by name",
      spellcheck: "false", autocomplete: "off" });
    this.status = make("p", { class: "status", role: "status" });
    this.rows = make("div", { class: "rows", role: "presentation" });
    this.list = make("div", { class: "list", role: "tree", tabindex: "0", "aria-label": "Modules and tensors" },
      this.rows);
    this.element = make("div", { class: "tree" }, this.search, this.status, this.list);
    this.#listen();
    this.#say();
    this.#unfold();
  }

  /** Shows a node: opens what it is in, and marks it. */
  select(kind, row) {
    const node = this.#model.node(kind, row);
    this.#chosen = node;
    if (!this.#found) this.#reveal(node);
    else if (this.#found.includes(node)) this.#go(this.#found.indexOf(node));
    else this.#find(this.search.value = "");
  }

  focus() {
    this.list.focus();
  }

  get #shown() {
    return this.#found ?? this.#rows;
  }

  /** Px of rows that one px of scrolling is: more than one where they are taller than an element can be. */
  get #scale() {
    const [total, seen] = [this.#shown.length * this.#height, this.list.clientHeight];
    return total > TALLEST ? (total - seen) / (TALLEST - seen) : 1;
  }

  #listen() {
    this.list.addEventListener("scroll", () => this.#draw(), { passive: true });
    this.list.addEventListener("keydown", (event) => this.#press(event));
    this.list.addEventListener("click", (event) => this.#click(event));
    this.search.addEventListener("input", () => this.#find(this.search.value));
    this.search.addEventListener("keydown", (event) => {
      if (event.key !== "ArrowDown" && event.key !== "Enter") return;
      event.preventDefault();
      this.#go(0);
      this.focus();
    });
    new ResizeObserver(() => { this.#height = 0; this.#draw(); }).observe(this.list);
  }

  /** Lists the rows that are open. */
  #unfold() {
    const [model, rows, stack] = [this.#model, [], [0]];
    while (stack.length) {
      const node = stack.pop();
      rows.push(node);
      if (!this.#open.has(node)) continue;
      const children = model.childrenOf(node);
      for (let i = children.length - 1; i >= 0; i--) stack.push(children[i]);
    }
    this.#rows = rows;
    this.#draw();
  }

  /** Opens what a node is in, and goes there. */
  #reveal(node) {
    for (let m = node ? this.#model.parent(node) : -1; m >= 0; m = this.#model.d.modules.parent[m]) this.#open.add(m);
    this.#unfold();
    this.#go(this.#rows.indexOf(node));
  }

  #find(text) {
    const [model, wanted] = [this.#model, text.toLowerCase()];
    this.#found = null;
    if (wanted) {
      this.#found = [];
      for (let node = model.modules; node < model.modules + model.tensors; node++) {
        if (model.name(node).toLowerCase().includes(wanted)) this.#found.push(node);
      }
    }
    this.#say();
    this.#active = 0;
    this.list.scrollTop = 0;
    if (!this.#found && this.#chosen >= 0) this.#reveal(this.#chosen); // what was found is seen where it belongs
    else this.#draw();
  }

  #say() {
    const { tensors, modules } = this.#model;
    const all = `${counted(tensors, "tensor")} in ${counted(modules, "module")}`;
    this.status.textContent = this.#found ? `${counted(this.#found.length, "tensor")} found` : all;
  }

  /** Draws the rows that can be seen, and a few beside them. */
  #draw() {
    const [rows, list] = [this.#shown, this.list];
    if (!this.#height) {
      this.rows.replaceChildren(this.#row(0, 0));
      this.#height = this.rows.firstChild?.offsetHeight || 28;
      const most = this.#model.nodes * this.#height + list.offsetHeight - list.clientHeight; // with its borders
      list.style.maxHeight = `${Math.max(200, most)}px`;
    }
    this.rows.style.height = `${Math.min(rows.length * this.#height, TALLEST)}px`;
    const [top, height] = [list.scrollTop, list.clientHeight || 600];
    const past = top * this.#scale; // px of rows above what can be seen
    const first = Math.max(0, Math.floor(past / this.#height) - 4);
    const last = Math.min(rows.length, Math.ceil((past + height) / this.#height) + 4);
    const drawn = [];
    for (let i = first; i < last; i++) drawn.push(this.#row(i, top + i * this.#height - past));
    if (this.#active < rows.length && (this.#active < first || this.#active >= last)) {
      drawn.push(this.#row(this.#active, top + this.#active * this.#height - past));
    }
    this.rows.replaceChildren(...drawn);
    if (rows.length) list.setAttribute("aria-activedescendant", `${this.id}-${this.#active}`);
    else list.removeAttribute("aria-activedescendant");
  }

  #row(i, top) {
    const [model, node] = [this.#model, this.#shown[i]];
    if (node === undefined) return "";
    const module = node < model.modules;
    const parent = node ? model.parent(node) : -1;
    const level = this.#found || !node ? 1 : this.#level[parent] + 2;
    const place = this.#found ? [i, this.#found.length] : this.#placeOf(node, parent);
    const row = make("div", { role: "treeitem", id: `${this.id}-${i}`, class: `row ${model.kind(node)}`,
      "data-row": i, "aria-level": level, "aria-posinset": place[0] + 1, "aria-setsize": place[1],
      "aria-selected": node === this.#chosen });
    if (module && !this.#found) row.setAttribute("aria-expanded", this.#open.has(node));
    if (i === this.#active) row.classList.add("active");
    row.style.top = `${top}px`;
    row.style.setProperty("--level", Math.min(level - 1, 12));
    const what = shown((this.#found ? model.name(node) : model.key(node)).slice(0, LONGEST));
    const name = make("span", { class: "name", title: what }, what);
    row.append(make("span", { class: "twist", "aria-hidden": "true" }), name, ...this.#cells(node));
    return row;
  }

  #cells(node) {
    const [model, i] = [this.#model, this.#model.row(node)];
    const cell = (kind, text) => make("span", { class: kind }, text);
    if (node < model.modules) {
      const { kind, type } = model.d.modules;
      const told = type[i] ? `${kind[i]} ${shown(type[i].slice(0, LONGEST))}` : kind[i];
      const what = `${told}, ${counted(model.tensorsBelow[i], "tensor")}`;
      return [cell("what", what), cell("size", human(model.below[i]))];
    }
    if (model.kind(node) === TENSOR) {
      const what = cell("what", model.typed(i));
      what.prepend(swatch(model.colour(i)));
      return [what, cell("size", human(model.nbytes[i]))];
    }
    return [cell("what", `= ${shownValue(model.d.attributes.value[i])}`.slice(0, LONGEST)), cell("size", "")];
  }

  #placeOf(node, parent) {
    if (!node) return [0, 1];
    const { modules, tensors, attributes } = this.#model.d;
    const column = { module: modules, tensor: tensors, attribute: attributes }[this.#model.kind(node)];
    return [column.place[this.#model.row(node)], this.#model.childrenOf(parent).length];
  }

  #go(i) {
    const last = this.#shown.length - 1;
    this.#active = Math.max(0, Math.min(last, i));
    const { list } = this;
    const [scale, top] = [this.#scale, this.#active * this.#height];
    const [past, room] = [list.scrollTop * scale, list.clientHeight - this.#height];
    if (top < past) list.scrollTop = Math.floor(top / scale);
    else if (top > past + room) list.scrollTop = Math.ceil((top - room) / scale);
    this.#draw();
  }

  #toggle(node, open = !this.#open.has(node)) {
    if (node >= this.#model.modules || this.#found) return;
    if (open) this.#open.add(node);
    else this.#open.delete(node);
    this.#unfold();
  }

  #choose(node) {
    this.#chosen = node;
    this.#draw();
    this.#onSelect(this.#model.kind(node), this.#model.row(node));
  }

  #click(event) {
    const row = event.target.closest("[data-row]");
    if (!row) return;
    const node = this.#shown[(this.#active = Number(row.dataset.row))];
    this.#toggle(node);
    this.#choose(node);
  }

  #press(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !this.#shown.length) return;
    const [rows, at] = [this.#shown, this.#active];
    const node = rows[at];
    const page = Math.max(1, Math.floor(this.list.clientHeight / this.#height) - 1);
    const ways = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: rows.length - 1, PageDown: at + page,
      PageUp: at - page };
    if (event.key in ways) this.#go(ways[event.key]);
    else if (event.key === "ArrowRight") this.#deeper(node, at);
    else if (event.key === "ArrowLeft") this.#higher(node);
    else if (event.key === "Enter" || (event.key === " " && !this.#typed.word)) this.#enter(node);
    else if (event.key.length === 1) this.#type(event.key, event.timeStamp);
    else return;
    event.preventDefault();
  }

  #enter(node) {
    if (this.#model.kind(node) === MODULE) this.#toggle(node);
    this.#choose(node);
  }

  #deeper(node, at) {
    if (this.#found || node >= this.#model.modules) return;
    if (this.#open.has(node)) this.#go(at + (this.#model.childrenOf(node).length ? 1 : 0));
    else this.#toggle(node, true);
  }

  #higher(node) {
    if (this.#found) return;
    if (node < this.#model.modules && this.#open.has(node)) this.#toggle(node, false);
    else if (node) this.#go(this.#rows.indexOf(this.#model.parent(node)));
  }

  /** Goes to the next row whose key starts with what is typed. */
  #type(letter, time) {
    const typed = this.#typed;
    typed.word = time - typed.time > PAUSE ? letter : typed.word + letter;
    typed.time = time;
    const [rows, wanted] = [this.#shown, typed.word.toLowerCase()];
    const from = this.#active + (typed.word.length > 1 ? 0 : 1);
    for (let k = 0; k < rows.length; k++) {
      const i = (from + k) % rows.length;
      if (this.#model.key(rows[i]).toLowerCase().startsWith(wanted)) {
        this.#go(i);
        break;
      }
    }
    setTimeout(() => { if (typed.time === time) typed.word = ""; }, PAUSE);
  }
}
