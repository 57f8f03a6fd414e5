// SPDX-License-Identifier: 0BSD
/**
 * The report of an archive: puts what view.js draws into the page, and has the parts follow one another.
 *
 * Knows the page of report.html; what is drawn is view.js's. It asks for nothing: all it shows lies in the page.
 */

import { details, facts, human, layoutMap, legend, reveal, shown, tree, treemap } from "../view.js";

const description = JSON.parse(document.getElementById("description").textContent);
const place = (id) => document.getElementById(id);
const { archive } = description;
const count = description.tensors.key.length;

const parts = [];
const panel = document.createElement("div");
panel.setAttribute("role", "status");

function choose(kind, number, from) {
  panel.replaceChildren(details(description, kind, number, { onSelect: choose }));
  for (const part of parts) if (part !== from) part.select(kind, number);
}

/** Puts a part where it belongs; what is chosen in it is shown by the others. */
function put(id, part, ...more) {
  place(id).append(part.element, ...more);
  parts.push(part);
}

reveal(place("facts"), place("details"));
for (const id of ["treemap", "map"]) reveal(place(id), place("details"), { near: true });

const shortly = (draw) => requestAnimationFrame(() => setTimeout(draw)); // after what is there was painted

place("title").textContent = shown(description.name);
place("summary").textContent = `${count.toLocaleString("en")} tensor${count === 1 ? "" : "s"} in an archive of \
${human(archive.nbytes)}`;
const modules = tree(description, { onSelect: (kind, number) => choose(kind, number, modules) });
put("tree", modules);
place("details").append(panel);
choose("module", 0, modules);
document.documentElement.dataset.ready = "tree";

shortly(() => {
  const areas = treemap(description, { onSelect: (kind, number) => choose(kind, number, areas) });
  put("treemap", areas, legend(description));
  const strip = layoutMap(description, { onSelect: (kind, number) => choose(kind, number, strip) });
  put("map", strip, legend(description, { parts: true }));
  place("facts").append(facts(description, { onSelect: (kind, number) => choose(kind, number) }));
  document.documentElement.dataset.ready = "all";
});
