// SPDX-License-Identifier: 0BSD
/**
 * The page of `zcrecord serve`: opens the archive by ranges, and puts the parts of the view into their sections.
 *
 * tensor.js shows the chosen tensor, classifier.js runs the model. `globalThis.zcrecordPage` has the opened record, the
 * traffic, and, once the model ran, its logits: for the console, and for tests.
 */

import { describe } from "./describe.js";
import { Selection, facts, fullName, human, layoutMap, legend, reveal, shown, tree, treemap } from "../view/view.js";
import { SourceNotFoundError, open } from "../reader/zcrecord.js";
import { ClassifierPanel } from "./classifier.js";
import { inWords } from "./job.js";
import { TensorPanel } from "./tensor.js";
import { Traffic } from "./traffic.js";

const byId = (id) => document.getElementById(id);
const shortly = () => new Promise((done) => { requestAnimationFrame(() => setTimeout(done)); }); // after a painting
const page = (globalThis.zcrecordPage = { record: null, traffic: null, logits: null });

/** Shows a text below the archive's name: its size, or an error, with a button to open it again. */
function say(text, error) {
  if (byId("summary").textContent !== text) byId("summary").textContent = text; // or it would be read out again
  byId("summary").className = error ? "error" : "";
  byId("again").hidden = !error;
}

byId("again").addEventListener("click", () => location.reload());

async function start() {
  const about = await (await fetch("about.json")).json();
  byId("title").textContent = shown(about.name);
  document.title = `${shown(about.name)} - zcrecord`;
  const traffic = (page.traffic = new Traffic());
  traffic.onChange = () => {
    const { nbytes, requests } = traffic;
    byId("traffic").textContent = `${human(nbytes)} fetched in ${requests} request${requests === 1 ? "" : "s"}.`;
  };
  const record = (page.record = await open(new URL("archive.zcr", location.href), { fetch: traffic.fetch }));
  const description = describe(record, about.name);
  const count = record.length.toLocaleString("en");
  const size = human(record.layout.archiveSize);
  const summary = `${count} tensor${record.length === 1 ? "" : "s"} in an archive of ${size}.`;
  say(summary, null);
  document.querySelector("main").hidden = false;
  build(record, description, traffic, about, (error) => {
    const other = error instanceof SourceNotFoundError && error.path !== record.path; // the samples
    if (!other) say(error ? inWords(error) : summary, error);
  });
}

function build(record, description, traffic, about, onSource) {
  const box = document.createElement("div");
  box.className = "box";
  const tensor = new TensorPanel(record, { onSource });
  const selection = new Selection(description, box, (kind, number) => {
    if (kind === "tensor") box.append(tensor.show(fullName(description, number)));
    else tensor.leave();
  });
  reveal(byId("facts"), byId("details"));
  for (const id of ["treemap", "map"]) reveal(byId(id), byId("details"), { near: true });
  const modules = selection.add(byId("tree"), tree);
  byId("details").append(box);
  selection.choose("module", 0, modules);
  shortly().then(() => {
    const strip = selection.add(byId("map"), layoutMap, { fetching: true }, legend(description, { parts: true }));
    traffic.follow((start, end) => strip.fetched(start - record.layout.offset, end - record.layout.offset));
    const model = new ClassifierPanel(record, { about, page, onSource });
    model.place(byId("model"));
    selection.add(byId("treemap"), treemap, {}, legend(description));
    byId("facts").append(facts(description, { onSelect: selection.choose }));
    document.documentElement.dataset.ready = "all";
  });
}

start().catch((error) => say(inWords(error), error));
