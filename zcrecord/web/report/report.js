// SPDX-License-Identifier: 0BSD
/**
 * The report of an archive: puts what view.js draws into the page, and has the parts follow one another.
 *
 * Knows the page of report.html; what is drawn is view.js's. It asks for nothing: all it shows lies in the page.
 */

import { Parts, facts, human, layoutMap, legend, reveal, shown, tree, treemap } from "../view/view.js";

const description = JSON.parse(document.getElementById("description").textContent);
const place = (id) => document.getElementById(id);
const { archive } = description;
const count = description.tensors.key.length;

const panel = document.createElement("div");
panel.setAttribute("role", "status");
const parts = new Parts(description, panel);
reveal(place("facts"), place("details"));
for (const id of ["treemap", "map"]) reveal(place(id), place("details"), { near: true });

const shortly = (draw) => requestAnimationFrame(() => setTimeout(draw)); // after what is there was painted

place("title").textContent = shown(description.name);
place("summary").textContent = `${count.toLocaleString("en")} tensor${count === 1 ? "" : "s"} in an archive of \
${human(archive.nbytes)}`;
const modules = parts.add(place("tree"), tree);
place("details").append(panel);
parts.choose("module", 0, modules);
document.documentElement.dataset.ready = "tree";

shortly(() => {
  parts.add(place("treemap"), treemap, {}, legend(description));
  parts.add(place("map"), layoutMap, {}, legend(description, { parts: true }));
  place("facts").append(facts(description, { onSelect: parts.choose }));
  document.documentElement.dataset.ready = "all";
});
