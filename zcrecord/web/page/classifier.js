// SPDX-License-Identifier: 0BSD
/**
 * Runs the archive's ONNX model, a classifier, over samples: shows its accuracy, and images with their class.
 *
 * Samples are an archive of their own with `images` (or `inputs`) and `labels`. Computing is left to network.js and an
 * engine: WebGPU if the browser has it, else, or on request, plain JavaScript.
 */

import { make } from "../view/elements.js";
import { counted, exactly } from "../view/text.js";
import { open } from "../reader/zcrecord.js";
import { CpuEngine } from "./cpu.js";
import { gpuEngine } from "./gpu.js";
import { graphOf } from "./graph.js";
import { Job } from "./job.js";
import { floats, refusal, run, shapesOf } from "./network.js";
import { numbersOf } from "./values.js";

const SHOWN = 60; // images; the wrong ones come first

export class ClassifierPanel {
  constructor(record, { samples, page, onSource }) {
    Object.assign(this, { record, samples, page, onSource });
  }

  /** Fills a section, or leaves it hidden where the archive has no model. */
  async place(section) {
    const skeleton = (await this.record.attributes()).get("onnx.graph");
    if (typeof skeleton?.read !== "function") return;
    this.box = make("div", { class: "box" });
    section.append(this.box);
    section.hidden = false;
    this.job = new Job("Running the model", this.onSource);
    if (!this.samples) {
      const what = "The archive has an ONNX model. To run it, start with --samples ARCHIVE, one of images and labels.";
      this.box.append(make("p", {}, what));
      return;
    }
    this.skeleton = skeleton;
    this.#controls();
  }

  #controls() {
    const there = Boolean(globalThis.navigator?.gpu);
    const choice = (value, label, more) => {
      const input = make("input", { type: "radio", name: "engine", value, ...more });
      return make("label", {}, input, ` ${label}`);
    };
    const gpu = choice("gpu", "WebGPU", there ? { checked: "" } : { disabled: "" });
    const plain = choice("plain", "plain JavaScript", there ? {} : { checked: "" });
    const engines = make("fieldset", {}, make("legend", {}, "Computed by"), gpu, plain);
    const button = make("button", { type: "button" }, "Run it on the samples");
    button.addEventListener("click", () => this.#run(this.box.querySelector("input:checked").value));
    this.result = make("div", { class: "result" });
    const why = globalThis.isSecureContext ? "This browser has no WebGPU, or has it turned off"
      : "WebGPU is there for https and for localhost alone";
    const word = there ? [] : [make("p", { class: "note" }, `${why}: the model runs in plain JavaScript instead.`)];
    this.box.append(...word, engines, button, this.job.element, this.result);
  }

  #run(engine) {
    this.result.replaceChildren();
    this.page.logits = null;
    return this.job.run(async (signal) => {
      const graph = graphOf(await this.skeleton.read({ signal }));
      const why = refusal(graph, this.record);
      if (why) throw new Error(why);
      const samples = await open(new URL("samples.zcr", location.href), { signal });
      const { images, inputs, labels } = await samplesOf(samples, signal);
      this.#show(await this.#compute(graph, engine, inputs, signal), images, labels);
    });
  }

  async #compute(graph, kind, inputs, signal) {
    const gpu = kind === "gpu" ? await gpuEngine() : null;
    const engine = gpu ?? new CpuEngine();
    try {
      const options = { signal, onProgress: (done, total) => this.job.progress(done, total) };
      const weights = await engine.weights(this.record, floats(graph), options);
      const shapes = await shapesOf(graph, this.record, signal);
      const begun = performance.now();
      const output = run(graph, engine, weights, shapes, engine.array(inputs.data, inputs.shape));
      const logits = await engine.read(output);
      const ms = performance.now() - begun;
      const instead = kind === "gpu" && !gpu ? ", since no GPU was to be had" : "";
      return { logits, shape: output.shape, ms, by: `${engine.name}${instead}` };
    } finally {
      engine.close();
    }
  }

  #show({ logits, shape, ms, by }, images, labels) {
    const [count, classes] = [shape[0], logits.length / shape[0]];
    const guesses = Array.from({ length: count }, (_, i) => best(logits.subarray(i * classes, (i + 1) * classes)));
    const wrong = guesses.map((guess, i) => (guess === labels[i] ? -1 : i)).filter((i) => i >= 0);
    this.page.logits = { data: logits, shape: [count, classes], by };
    const right = count - wrong.length;
    const share = ((100 * right) / count).toFixed(1);
    this.result.append(make("p", { class: "score", role: "status" },
      `${exactly(right)} of ${exactly(count)} right, ${share} %. ${by}, ${ms.toFixed(0)} ms.`));
    const order = [...wrong, ...guesses.keys()].filter((i, place, all) => all.indexOf(i) === place).slice(0, SHOWN);
    if (images) this.result.append(this.#grid(order, images, guesses, labels, wrong.length));
  }

  #grid(order, images, guesses, labels, wrong) {
    const list = make("ul", { class: "samples" }, ...order.map((i) => {
      const fine = guesses[i] === labels[i];
      const told = fine ? `${guesses[i]}` : `${guesses[i]}, is ${labels[i]}`;
      const label = `${fine ? "right" : "wrong"}: taken for ${guesses[i]}, is ${labels[i]}`;
      const picture = draw(images, i);
      picture.setAttribute("aria-label", `sample ${i}, ${label}`);
      return make("li", fine ? {} : { class: "wrong" }, picture, make("span", {}, told));
    }));
    const first = wrong ? `${counted(wrong, "wrong one")} first; ` : "";
    const note = make("p", { class: "note" }, `${first}${order.length} of ${guesses.length} are shown.`);
    return make("div", {}, note, list);
  }
}

const best = (row) => row.reduce((most, value, i) => (value > row[most] ? i : most), 0);

/** Returns the inputs as rows of float32, the images if the samples look like some, and the labels. */
async function samplesOf(samples, signal) {
  const name = ["images", "inputs"].find((known) => samples.has(known));
  const absent = "The samples need tensors 'images' (or 'inputs') and 'labels'.";
  if (!name || !samples.has("labels")) throw new Error(absent);
  const tensor = await samples.tensor(name, { signal });
  const [count, ...rest] = tensor.shape.map(Number);
  const data = Float32Array.from(numbersOf(tensor));
  const labels = Array.from(numbersOf(await samples.tensor("labels", { signal })));
  const fits = count && labels.length === count;
  if (!fits) throw new Error(`There are ${count ?? 0} samples and ${labels.length} labels.`);
  const images = rest.length === 2 ? { data, height: rest[0], width: rest[1] } : null;
  return { inputs: { data, shape: [count, data.length / count] }, images, labels };
}

/** Returns a picture of one sample, its largest value black. */
function draw({ data, height, width }, number) {
  const canvas = make("canvas", { width, height, role: "img" });
  const pixels = data.subarray(number * width * height, (number + 1) * width * height);
  const most = pixels.reduce((a, b) => Math.max(a, b), 0) || 1;
  const image = new ImageData(width, height);
  pixels.forEach((value, i) => {
    const shade = 255 * (1 - value / most);
    image.data.set([shade, shade, shade, 255], 4 * i);
  });
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}
