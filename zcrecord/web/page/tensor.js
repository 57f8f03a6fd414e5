// SPDX-License-Identifier: 0BSD
/**
 * The panel of the chosen tensor: statistics, a histogram and a heat map, of bytes that are fetched only then.
 *
 * reading.js plans how much is read. Strings are listed, unknown types are shown as bytes.
 */

import { make } from "../view/elements.js";
import { both, counted, exactly, shown } from "../view/text.js";
import { HeatMap } from "./heatmap.js";
import { Job } from "./job.js";
import { GLANCE, piecesOf, planOf } from "./reading.js";
import { Statistics } from "./statistics.js";
import { isNumeric, isWhole, numbersOf, short } from "./values.js";

const [STRINGS, LETTERS, OCTETS] = [50, 200, 256]; // shown of each
const SVG = "http://www.w3.org/2000/svg";

export class TensorPanel {
  #wanted = null; // the name that is shown

  constructor(record, { onSource }) {
    this.record = record;
    this.job = new Job("Reading the tensor", onSource);
    this.all = make("button", { type: "button", hidden: "" });
    this.all.addEventListener("click", () => this.#read(this.record.info(this.#wanted), true));
    this.result = make("div", { class: "result" });
    this.element = make("div", { class: "reading" }, this.job.element, this.all, this.result);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.map?.draw());
  }

  /** Returns the panel, and begins to fill it. */
  show(name) {
    this.#wanted = name;
    this.#read(this.record.info(name), false);
    return this.element;
  }

  /** Breaks off what is being read: something else was chosen. */
  leave() {
    this.#wanted = null;
    this.job.end("");
    this.result.replaceChildren();
  }

  #read(info, all) {
    const plan = planOf(this.record, info, all);
    this.map = null;
    this.result.replaceChildren();
    this.all.hidden = plan.complete || plan.reason === "huge";
    this.all.textContent = `Read all of it, ${both(info.nbytes)}`;
    if (!plan.pieces.length) {
      this.job.end(info.count === 0 ? "It has no elements."
        : plan.reason === "huge" ? "It does not come in pieces that fit in memory here."
          : `It does not come in pieces of less than ${both(GLANCE)}, so nothing was read yet.`);
      this.job.alert.hidden = true;
      return Promise.resolve();
    }
    const view = isNumeric(info.dtype) ? new Numbers(info) : info.dtype === "string" ? new Strings() : new Octets();
    this.map = view.map ?? null;
    return this.job.run((signal) => this.#fill(info, plan, view, signal));
  }

  async #fill(info, plan, view, signal) {
    let [done, pieces] = [0, 0];
    const digest = plan.verify ? ", its digest matches" : info.digest === null ? "" : ", digest not checked";
    for await (const { tensor, first } of piecesOf(this.record, info, plan, signal)) {
      if (signal.aborted) return;
      if (!pieces++) this.result.append(...view.elements); // before, and if nothing comes, there is nothing to see
      view.add(tensor, first);
      const all = plan.complete && pieces === plan.pieces.length; // strings have more bytes than their texts
      done = all ? info.nbytes : done + tensor.nbytes;
      view.draw();
      this.job.progress(done, plan.nbytes);
      const stretches = counted(plan.pieces.length, "stretch").replace("stretchs", "stretches");
      const told = plan.complete ? `${both(Math.min(done, info.nbytes))} of ${both(info.nbytes)} read`
        : `A sample: ${both(done)} of ${both(info.nbytes)} read, in ${stretches}`;
      this.job.status.textContent = `${told}${digest}.`;
      await new Promise((next) => { setTimeout(next); }); // or the page could not be used meanwhile
    }
  }
}

/** Statistics, histogram and heat map of numbers. */
class Numbers {
  constructor(info) {
    this.whole = isWhole(info.dtype);
    this.statistics = new Statistics();
    this.map = new HeatMap(info.shape, { whole: this.whole });
    this.facts = make("dl", { class: "facts" });
    this.histogram = make("figure", { class: "histogram" });
    const rounded = /int64$/.test(info.dtype) ? ["Integers beyond 2^53 are rounded here."] : [];
    const magnitude = info.dtype.startsWith("complex") ? ["Of complex numbers it is the magnitude."] : [];
    const notes = [...rounded, ...magnitude].map((note) => make("p", { class: "note" }, note));
    this.elements = [...notes, this.facts, this.histogram, make("h4", {}, "Heat map"), this.map.element()];
  }

  add(tensor, first) {
    const numbers = numbersOf(tensor);
    this.statistics.add(numbers);
    this.map.add(numbers, first);
  }

  draw() {
    const { statistics: s, whole } = this;
    const pairs = [["elements", exactly(s.count)], ["zeros", exactly(s.zeros)],
      ["smallest", s.finite ? short(s.min, whole) : "none"], ["largest", s.finite ? short(s.max, whole) : "none"],
      ["mean", s.finite ? short(s.mean) : "none"], ["deviation", s.finite ? short(s.deviation) : "none"],
      ["not a number", exactly(s.nans)], ["infinite", exactly(s.infinities)]]; // two to a line where there is room
    if (s.distinct !== null && s.finite) pairs.push(["distinct", exactly(s.distinct)]);
    this.facts.replaceChildren(...pairs.flatMap(([term, what]) => [make("dt", {}, term), make("dd", {}, what)]));
    this.histogram.replaceChildren(...histogramOf(s.bars(), whole));
    this.map.draw();
  }
}

/** Returns bars, and a line of what they are. */
function histogramOf(bars, whole) {
  if (!bars.length) return [];
  const [width, height] = [480, 120];
  const most = Math.max(...bars.map(([, , count]) => count));
  const peak = bars.find(([, , count]) => count === most);
  const range = ([from, to]) => (from === to ? short(from, whole) : `${short(from)} to ${short(to)}`);
  const label = `Histogram from ${short(bars[0][0], whole)} to ${short(bars.at(-1)[1], whole)}; most, \
${exactly(Math.round(most))}, at ${range(peak)}`;
  const svg = drawn("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label,
    preserveAspectRatio: "none" });
  const step = width / bars.length;
  bars.forEach((bar, i) => {
    const tall = bar[2] ? Math.max(1, (bar[2] / most) * (height - 4)) : 0;
    const gap = Math.min(2, step * 0.15);
    const rect = drawn("rect", { x: i * step + gap / 2, y: height - tall, width: step - gap, height: tall });
    const title = drawn("title", {});
    title.textContent = `${range(bar)}: ${exactly(Math.round(bar[2]))}`;
    rect.append(title);
    svg.append(rect);
  });
  const ends = [short(bars[0][0], whole), `most: ${range(peak)}`, short(bars.at(-1)[1], whole)];
  return [svg, make("figcaption", {}, ...ends.map((end) => make("span", {}, end)))];
}

function drawn(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

/** The first strings. */
class Strings {
  constructor() {
    this.list = make("ol", { class: "strings", start: "0" });
    this.elements = [make("h4", {}, "Strings"), this.list];
  }

  add(tensor, first) {
    const room = STRINGS - this.list.children.length;
    if (first > this.list.children.length || room <= 0) return; // of those that follow one another from the first
    for (const octets of tensor.strings({ decoded: false }).slice(0, room)) {
      const text = new TextDecoder().decode(octets.subarray(0, 4 * LETTERS)).slice(0, LETTERS);
      const cut = octets.length > 4 * LETTERS || text.length === LETTERS;
      const more = cut ? `… ${counted(octets.length, "byte")}` : "";
      this.list.append(make("li", { class: "name" }, `'${shown(text)}'${more}`));
    }
  }

  draw() {}
}

/** The first bytes of elements of a type that is not known. */
class Octets {
  constructor() {
    this.text = make("pre", { class: "octets", tabindex: "0", "aria-label": "The first bytes" });
    this.elements = [make("p", { class: "note" }, "This version does not know the type; these are its first bytes."),
      this.text];
  }

  add(tensor) {
    if (this.text.textContent) return;
    const octets = [...tensor.data.subarray(0, OCTETS)].map((byte) => byte.toString(16).padStart(2, "0"));
    const lines = Array.from({ length: Math.ceil(octets.length / 16) }, (_, i) => octets.slice(16 * i, 16 * i + 16));
    this.text.textContent = lines.map((line) => line.join(" ")).join("\n");
  }

  draw() {}
}
