// SPDX-License-Identifier: 0BSD
/**
 * The report of an archive: puts the drawings of view.js into the page, and keeps the parts on one selection.
 *
 * Knows the page of report.html; drawing is left to view.js. Fetches nothing: all data lies in the page.
 */

import { Selection, facts, human, layoutMap, legend, reveal, shown, tree, treemap } from "../view/view.js";

const description = JSON.parse(document.getElementById("description").textContent);
const byId = (id) => document.getElementById(id);
const { archive } = description;
const count = description.tensors.key.length;

const panel = document.createElement("div");
panel.setAttribute("role", "status");
const selection = new Selection(description, panel);
reveal(byId("facts"), byId("details"));
for (const id of ["treemap", "map"]) reveal(byId(id), byId("details"), { near: true });

const shortly = (draw) => requestAnimationFrame(() => setTimeout(draw)); // after the next painting

byId("title").textContent = shown(description.name);
const where = archive.shards ? `a catalogue of ${archive.shards.length} shards; its bytes are shown as in one archive` :
  "an archive";
byId("summary").textContent = `${count.toLocaleString("en")} tensor${count === 1 ? "" : "s"} in ${where} of \
${human(archive.nbytes)}`;
const modules = selection.add(byId("tree"), tree);
byId("details").append(panel);
selection.choose("module", 0, modules);
document.documentElement.dataset.ready = "tree";

shortly(() => {
  selection.add(byId("treemap"), treemap, {}, legend(description));
  selection.add(byId("map"), layoutMap, {}, legend(description, { parts: true }));
  byId("facts").append(facts(description, { onSelect: selection.choose }));
  document.documentElement.dataset.ready = "all";
});
