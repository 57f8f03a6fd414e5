// SPDX-License-Identifier: 0BSD
/**
 * Runs the archive's ONNX model over samples: shows its accuracy, and images with their class.
 *
 * Samples are an archive of their own with `images` (or `inputs`) and `labels`. runtime.js computes: on WebGPU if the
 * browser has it, else, or on request, in WebAssembly.
 */

import { make } from "../view/elements.js";
import { counted, exactly, human } from "../view/text.js";
import { open } from "../reader/zcrecord.js";
import { Job } from "./job.js";
import { createSession, filesOf, gpuName, load, run } from "./runtime.js";
import { numbersOf } from "./values.js";

const SHOWN = 60; // images; the wrong ones come first

export class ClassifierPanel {
  constructor(record, { about, page, onSource }) {
    Object.assign(this, { record, about, page, onSource });
  }

  /** Fills a section, or leaves it hidden where the archive has no model. */
  async place(section) {
    const skeleton = (await this.record.attributes()).get("onnx.graph");
    if (typeof skeleton?.read !== "function") return;
    this.box = make("div", { class: "box" });
    section.append(this.box);
    section.hidden = false;
    this.job = new Job("Running the model", this.onSource);
    if (!this.about.samples) {
      const what = "The archive has an ONNX model. To run it, start with --samples ARCHIVE, one of images and labels.";
      this.box.append(make("p", {}, what));
      return;
    }
    this.#controls();
  }

  #controls() {
    const there = Boolean(globalThis.navigator?.gpu);
    const choice = (value, label, more) => {
      const input = make("input", { type: "radio", name: "provider", value, ...more });
      return make("label", {}, input, ` ${label}`);
    };
    const gpu = choice("webgpu", "WebGPU", there ? { checked: "" } : { disabled: "" });
    const wasm = choice("wasm", "WebAssembly", there ? {} : { checked: "" });
    const providers = make("fieldset", {}, make("legend", {}, "Computed by"), gpu, wasm);
    const button = make("button", { type: "button" }, "Run it on the samples");
    button.addEventListener("click", () => this.#run(this.box.querySelector("input:checked").value));
    this.result = make("div", { class: "result" });
    const why = globalThis.isSecureContext ? "This browser has no WebGPU, or has it turned off"
      : "WebGPU is there for https and for localhost alone";
    const word = there ? [] : [make("p", { class: "note" }, `${why}: the model runs in WebAssembly instead.`)];
    this.box.append(...word, make("p", { class: "note" }, origin(this.about.runtime)), providers, button,
      this.job.element, this.result);
  }

  #run(provider) {
    this.result.replaceChildren();
    this.page.logits = null;
    return this.job.run(async (signal) => {
      const samples = await open(new URL("samples.zcr", location.href), { signal });
      const { images, inputs, labels } = await samplesOf(samples, signal);
      this.#show(await this.#compute(provider, inputs, signal), images, labels);
    });
  }

  async #compute(wanted, inputs, signal) {
    const gpu = wanted === "webgpu" ? await gpuName() : null;
    const ort = await load(this.about.runtime);
    signal.throwIfAborted();
    const session = await createSession(ort, this.record, gpu === null ? "wasm" : "webgpu", signal);
    try {
      const begun = performance.now();
      const onProgress = (done, total) => this.job.progress(done, total);
      const { data: logits, shape, type } = await run(ort, session, inputs, { signal, onProgress });
      const ms = performance.now() - begun;
      const known = shape[1] > 1 || /int/.test(type);
      if (!known) throw new Error("The page needs an output with a number for each class, or with the class.");
      const instead = wanted === "webgpu" && gpu === null ? ", since no GPU was to be had" : "";
      const by = gpu === null ? `WebAssembly${instead}` : `WebGPU${gpu && ` (${gpu})`}`;
      return { logits, shape, ms, by: `onnxruntime-web ${ort.env.versions.web}: ${by}` };
    } finally {
      await session.release();
    }
  }

  #show({ logits, shape, ms, by }, images, labels) {
    const [count, classes] = shape;
    const row = (i) => logits.subarray(i * classes, (i + 1) * classes);
    const guesses = Array.from({ length: count }, (_, i) => (classes === 1 ? logits[i] : best(row(i))));
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

/** Returns where onnxruntime-web comes from, in words. */
function origin(runtime) {
  if (!runtime.version) return "onnxruntime-web runs it, from the folder that --onnxruntime-web names.";
  const size = human(filesOf(runtime).reduce((sum, { nbytes }) => sum + nbytes, 0));
  return `onnxruntime-web ${runtime.version} runs it. The first run fetches ${size} of it from \
${new URL(runtime.url).host}, and checks the digest; --onnxruntime-web FOLDER takes it from a folder instead.`;
}

/** Returns the inputs, the images if the samples look like some, and the labels. */
async function samplesOf(samples, signal) {
  const name = ["images", "inputs"].find((known) => samples.has(known));
  const absent = "The samples need tensors 'images' (or 'inputs') and 'labels'.";
  if (!name || !samples.has("labels")) throw new Error(absent);
  const tensor = await samples.tensor(name, { signal });
  const [count, ...rest] = tensor.shape.map(Number);
  const data = numbersOf(tensor);
  const labels = Array.from(numbersOf(await samples.tensor("labels", { signal })));
  const fits = count && labels.length === count;
  if (!fits) throw new Error(`There are ${count ?? 0} samples and ${labels.length} labels.`);
  const images = rest.length === 2 ? { data, height: rest[0], width: rest[1] } : null;
  return { inputs: { data, shape: [count, ...rest] }, images, labels };
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
