// SPDX-License-Identifier: 0BSD
/**
 * The page of `zcrecord serve`: opens the archive by ranges, and puts the parts of the view where they belong.
 *
 * What a tensor is like is tensor.js's, the model that runs is digits.js's. `globalThis.zcrecordPage` has the opened
 * record, what was fetched, and, once the model ran, its logits: for the console, and for tests.
 */

import { describe } from "./describe.js";
import { Parts, facts, fullName, human, layoutMap, legend, reveal, shown, tree, treemap } from "../view/view.js";
import { SourceNotFoundError, open } from "../reader/zcrecord.js";
import { ModelPanel } from "./digits.js";
import { inWords } from "./job.js";
import { TensorPanel } from "./tensor.js";
import { Traffic } from "./traffic.js";

const place = (id) => document.getElementById(id);
const shortly = () => new Promise((done) => { requestAnimationFrame(() => setTimeout(done)); }); // after a painting
const page = (globalThis.zcrecordPage = { record: null, traffic: null, logits: null });

/** Tells of the archive below its name: what it is, or an error; whatever that is, it can be opened again. */
function tell(text, error) {
  if (place("summary").textContent !== text) place("summary").textContent = text; // or it would be read out again
  place("summary").className = error ? "error" : "";
  place("again").hidden = !error;
}

place("again").addEventListener("click", () => location.reload());

async function start() {
  const about = await (await fetch("about.json")).json();
  place("title").textContent = shown(about.name);
  document.title = `${shown(about.name)} - zcrecord`;
  const traffic = (page.traffic = new Traffic());
  traffic.onChange = () => {
    const { nbytes, requests } = traffic;
    place("traffic").textContent = `${human(nbytes)} fetched in ${requests} request${requests === 1 ? "" : "s"}.`;
  };
  const record = (page.record = await open(new URL("archive.zcr", location.href), { fetch: traffic.fetch }));
  const description = describe(record, about.name);
  const count = record.length.toLocaleString("en");
  const size = human(record.layout.archiveSize);
  const summary = `${count} tensor${record.length === 1 ? "" : "s"} in an archive of ${size}.`;
  tell(summary, null);
  document.querySelector("main").hidden = false;
  build(record, description, traffic, about, (error) => {
    const other = error instanceof SourceNotFoundError && error.path !== record.path; // the samples
    if (!other) tell(error ? inWords(error) : summary, error);
  });
}

function build(record, description, traffic, about, onSource) {
  const box = document.createElement("div");
  box.className = "box";
  const tensor = new TensorPanel(record, { onSource });
  const parts = new Parts(description, box, (kind, number) => {
    if (kind === "tensor") box.append(tensor.show(fullName(description, number)));
    else tensor.leave();
  });
  reveal(place("facts"), place("details"));
  for (const id of ["treemap", "map"]) reveal(place(id), place("details"), { near: true });
  const modules = parts.add(place("tree"), tree);
  place("details").append(box);
  parts.choose("module", 0, modules);
  shortly().then(() => {
    const strip = parts.add(place("map"), layoutMap, { fetching: true }, legend(description, { parts: true }));
    traffic.follow((start, end) => strip.fetched(start - record.layout.offset, end - record.layout.offset));
    const model = new ModelPanel(record, { samples: about.samples, page, onSource });
    model.place(place("model"));
    parts.add(place("treemap"), treemap, {}, legend(description));
    place("facts").append(facts(description, { onSelect: parts.choose }));
    document.documentElement.dataset.ready = "all";
  });
}

start().catch((error) => tell(inWords(error), error));
