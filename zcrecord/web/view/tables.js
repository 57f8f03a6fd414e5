// SPDX-License-Identifier: 0BSD
/** Tables of an archive, and the details of one tensor, module or attribute. */

import { make, swatch } from "./elements.js";
import { ATTRIBUTE, COLOURS, HEADER, MODULE, TENSOR, modelOf } from "./model.js";
import { both, counted, exactly, hex, human, percent, shown, shownValue } from "./text.js";

const GLANCE = 200; // rows of a table
const ROOM = 300; // characters of a cell

function table(caption, heads, rows) {
  const cell = (tag, content, i, more = {}) => {
    const side = heads[i][1] ?? "left";
    return make(tag, { class: side, ...more }, ...(Array.isArray(content) ? content : [content]));
  };
  const body = rows.map((row) => make("tr", {}, ...row.map((content, i) =>
    (i ? cell("td", content, i) : cell("th", content, i, { scope: "row" })))));
  const head = make("tr", {}, ...heads.map(([label], i) => cell("th", label, i, { scope: "col" })));
  return make("table", {}, make("caption", {}, caption), make("thead", {}, head), make("tbody", {}, ...body));
}

function list(pairs) {
  const items = pairs.flatMap(([term, what]) => [make("dt", {}, term), make("dd", {}, ...[what].flat())]);
  return make("dl", { class: "facts" }, ...items);
}

/** Returns the bytes that are stored, that ties and equal bytes save, and that padding costs. */
function spaceOf(model) {
  const { archive, payloads } = model.d;
  const named = payloads.nbytes.reduce((a, b) => a + b, 0);
  const tied = model.users.reduce((sum, users) => {
    const sizes = users.map((i) => model.nbytes[i]);
    return users.length > 1 ? sum + sizes.reduce((a, b) => a + b, 0) - sizes.reduce((a, b) => Math.max(a, b), 0) : sum;
  }, 0);
  const padding = archive.nbytes - 2 * HEADER - archive.indexNbytes - model.stored;
  return { stored: model.stored, tied, equal: named - model.stored, padding };
}

/** Returns tables: the archive, element types, space, the largest tensors, metadata and attributes. */
export function facts(description, { onSelect = () => {} } = {}) {
  const model = modelOf(description);
  const tables = [aboutArchive(model), typesTable(model), spaceTable(model), largestTable(model, onSelect)];
  const { metadata } = description;
  if (metadata.key.length) tables.push(valuesTable("Metadata", metadata.key, metadata.value));
  const { attributes } = description;
  if (attributes.key.length) {
    const names = attributes.key.slice(0, GLANCE).map((_, i) => model.name(model.node(ATTRIBUTE, i)));
    tables.push(valuesTable("Attributes", names, attributes.value));
  }
  if (description.payloads.digest) tables.push(digests(model));
  return make("div", { class: "tables" }, ...tables.map((element) => make("div", { class: "scroll" }, element)));
}

function aboutArchive(model) {
  const { archive } = model.d;
  const index = `${both(archive.indexNbytes)} ${archive.front ? "before" : "after"} the payloads`;
  const pairs = [
    ["size", both(archive.nbytes)],
    ["format", `version ${archive.version}`],
    ["tensors", `${exactly(model.tensors)} in ${counted(model.modules, "module")}`],
    ["alignment", archive.baseAlignment > archive.alignment
      ? `${exactly(archive.alignment)} bytes, of some payloads ${exactly(archive.baseAlignment)}`
      : `${exactly(archive.alignment)} bytes`],
    ["index", `${index}, at ${hex(archive.indexOffset)}`],
    ["header", archive.sealed ? "sealed" : "not sealed: the trailer says it all"],
    ["payload digests", archive.digest === "none" ? "none stored" : archive.digest],
    ["content digest", archive.contentDigest ?? "not computed"],
    ...tunedFor(model.d).map((target) => ["tuned for", target]),
  ];
  if (archive.base) pairs.splice(1, 0, ["starts at", `${hex(archive.base)} in its file`]);
  return make("div", {}, make("h3", {}, "Archive"), list(pairs));
}

/** Returns the machines that an archive is tuned for, a line each, by CONVENTIONS.md, "Tuned models". */
function tunedFor({ modules, attributes }) {
  const targets = attributes.value.filter((_, i) =>
    attributes.key[i] === "target" && modules.type[attributes.module[i]] === "zcr:onnx_target");
  return targets.map((value) => {
    try {
      const { onnxruntime, provider, machine, cpu } = JSON.parse(value);
      return cut(`onnxruntime ${onnxruntime}, ${provider}, ${machine}, CPU with ${cpu.join(", ")}`);
    } catch {
      return cut(shownValue(value));
    }
  });
}

function typesTable(model) {
  const whole = model.below[0];
  const rows = model.types.map(({ name, number, count, nbytes }) =>
    [[swatch(model.colours[number]), name], exactly(count), human(nbytes), percent(nbytes, whole)]);
  const heads = [["type", "whole"], ["tensors", "right"], ["bytes", "right"], ["share", "right"]];
  return table("Element types", heads, rows);
}

function spaceTable(model) {
  const { stored, tied, equal, padding } = spaceOf(model);
  const { nbytes, indexNbytes } = model.d.archive;
  const row = (what, size) => [what, exactly(size), human(size), percent(size, nbytes)];
  const rows = [
    row("payloads, as stored", stored), row("index", indexNbytes), row("header and trailer", 2 * HEADER),
    row("padding costs", padding), row("ties save", tied), row("equal bytes stored once save", equal),
  ];
  return table("Space", [["what"], ["bytes", "right"], ["rounded", "right spare"], ["share", "right"]], rows);
}

/** Returns a button that chooses a tensor. */
function tensorButton(model, i, onSelect) {
  const button = make("button", { type: "button", class: "name" }, model.brief(model.modules + i));
  button.addEventListener("click", () => onSelect(TENSOR, i));
  return button;
}

function largestTable(model, onSelect) {
  const order = Array.from(model.nbytes.keys()).sort((a, b) => model.nbytes[b] - model.nbytes[a]).slice(0, 10);
  const rows = order.filter((i) => model.nbytes[i]).map((i) => {
    return [[tensorButton(model, i, onSelect)], model.typed(i), human(model.nbytes[i])];
  });
  return table("The largest tensors", [["tensor"], ["type and shape", "typed"], ["bytes", "right"]], rows);
}

function valuesTable(caption, keys, values) {
  const rows = keys.slice(0, GLANCE).map((key, i) =>
    [[make("span", { class: "name" }, cut(key))], cut(shownValue(values[i]))]);
  const told = values.length > GLANCE ? `${caption}: the first ${GLANCE} of ${exactly(values.length)}` : caption;
  return table(told, [["name"], ["value"]], rows);
}

/** Returns as much of a text as a table has room for, in one line; `details` have all of it. */
function cut(text) {
  return text.length > ROOM ? `${shown(text.slice(0, ROOM))}…` : shown(text);
}

/** Returns the payloads' digests, in a table that is made when it is opened. */
function digests(model) {
  const { payloads, archive } = model.d;
  const summary = make("summary", {}, `Digests of ${counted(payloads.offset.length, "payload")}`);
  const told = make("details", { class: "digests" }, summary);
  told.addEventListener("toggle", () => {
    if (!told.open || told.children.length > 1) return;
    const rows = payloads.offset.slice(0, 1000).map((at, p) => {
      const users = model.users[p];
      const name = users.length ? model.brief(model.modules + users[0]) : "of an attribute";
      return [exactly(p), hex(archive.payloadOffset + at), exactly(payloads.nbytes[p]), payloads.digest[p], name];
    });
    const more = payloads.offset.length > 1000 ? "; the first 1,000, zcrecord ls --json has all" : "";
    const heads = [["payload"], ["at"], ["bytes", "right"], [archive.digest], ["tensor"]];
    told.append(make("div", { class: "scroll" }, table(`XXH3 of each payload${more}`, heads, rows)));
  });
  return told;
}

/** Returns what the index says of one module, tensor or attribute. */
export function details(description, kind, number, { onSelect = () => {} } = {}) {
  const model = modelOf(description);
  const node = model.node(kind, number);
  const name = node ? shown(model.name(node)) : shown(description.name);
  const pairs = kind === TENSOR ? aboutTensor(model, number, onSelect) : kind === MODULE ? aboutModule(model, number)
    : [["value", shownValue(description.attributes.value[number])]];
  return make("div", { class: "details" }, make("h3", { class: "name" }, name), make("p", {}, kind), list(pairs));
}

function aboutModule(model, m) {
  const { kind, type } = model.d.modules;
  const pairs = [["kind", kind[m]], ["tensors", exactly(model.tensorsBelow[m])], ["bytes", both(model.below[m])]];
  const stored = model.ownBelow[m];
  if (!m && stored < model.below[m]) pairs.push(["stored in", `${both(stored)}, shared ones once`]);
  return type[m] ? [["type", shown(type[m])], ...pairs] : pairs;
}

function aboutTensor(model, i, onSelect) {
  const { tensors, strided, strides, payloads, archive, shapes, dtypes } = model.d;
  const p = tensors.payload[i];
  const pairs = [["type", dtypes[tensors.dtype[i]]], ["shape", shapes[tensors.shape[i]]]];
  if (strided[i]) pairs.push(["strides", `${strides[strided[i].strides]}, in elements`]);
  pairs.push(["bytes", both(model.nbytes[i])]);
  if (p < 0) return [...pairs, ["payload", "none: it is empty"]];
  const at = archive.payloadOffset + payloads.offset[p];
  const start = archive.base + at + (strided[i]?.byteOffset ?? 0);
  pairs.push(["at", `${hex(start)} (${exactly(start)}) in the file`]);
  pairs.push(["payload", `number ${p}, ${exactly(payloads.nbytes[p])} bytes`]);
  if (payloads.digest) pairs.push(["payload's digest", `${archive.digest} ${payloads.digest[p]}`]);
  const named = (all) => {
    const others = all.filter((k) => k !== i);
    const names = others.slice(0, 10).flatMap((k, at) => [at ? ", " : "", tensorButton(model, k, onSelect)]);
    return others.length > 10 ? [...names, ` and ${exactly(others.length - 10)} more`] : names;
  };
  const { users } = model.ranges[model.range[p]];
  const twins = users.filter((k) => tensors.payload[k] !== p);
  if (model.users[p].length > 1) pairs.push(["tied to", named(model.users[p])]);
  if (twins.length) pairs.push(["stored once with", named(twins)]);
  return pairs;
}

/** Returns an element that explains the colours: element types, with `parts` those of an archive, too. */
export function legend(description, { parts = false } = {}) {
  const model = modelOf(description);
  const item = (mark, text) => make("li", {}, mark, text);
  const types = model.types.slice(0, COLOURS).map(({ name, number }, rank) => {
    const others = rank === COLOURS - 1 && model.types.length > COLOURS;
    return item(swatch(model.colours[number]), others ? "other types" : name);
  });
  if (parts) {
    const mark = (kind) => make("span", { class: `swatch ${kind}`, "aria-hidden": "true" });
    types.unshift(item(mark("index"), "header, index, trailer"));
    if (model.ranges.some(({ users }) => !users.length)) types.push(item(swatch(COLOURS - 1), "bytes of attributes"));
    types.push(item(mark("padding"), "zeros between"));
  }
  return make("ul", { class: "legend" }, ...types);
}
