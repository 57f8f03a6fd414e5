// SPDX-License-Identifier: 0BSD
/**
 * Draws an archive: makes elements of a page from a description, for `zcrecord report` and `zcrecord serve` alike.
 *
 * Knows how tensors, modules and bytes are drawn, and how keyboard and pointer move in them; fetches nothing, and
 * leaves the handling of a choice to the page. Names are not trusted: they become text, never markup.
 *
 * A description is plain JSON, made by zcrecord/report/pages.py, or of an opened archive by page/describe.js. Columns
 * are arrays of one item a row; places in the archive count from its first byte:
 *
 *     { name: "model.zcr",
 *       archive: { nbytes, version, base, indexOffset, indexNbytes, payloadOffset, front, sealed, alignment,
 *                  baseAlignment, digest: "xxh3" | "none", contentDigest: "sha256:..." | null,
 *                  shards: ["model-00001-of-00002.zcr", ...] },              // of a catalogue alone
 *       dtypes: ["float32", ...], shapes: ["[3, 4]", ...],            // numbered in the columns dtype and shape
 *       strides: ["[1, 3]", ...],                                     // numbered in strided
 *       tensors: { key, module, place, dtype, shape, payload },       // in saved order; payload -1: no bytes
 *       strided: { "7": { strides: 0, byteOffset, nbytes } },         // by the number of the tensor
 *       payloads: { offset, nbytes, digest },                         // ascending; digest: null, or 16 hex digits each
 *       modules: { key, parent, place, kind, type },                  // in pre-order, the record itself first
 *       attributes: { key, module, place, value },
 *       metadata: { key, value } }
 *
 * A value is null, true, a number, a text, or { items: [...], count } of a list, { nbytes } of bytes, { number: "..." }
 * where JSON has no such number, { text, count } of a text that is cut. A full name is the module's, a dot, the key.
 *
 * A choice calls `onSelect(kind, number)`: "module", "tensor" or "attribute", by its row.
 *
 *     tree(description, { onSelect })       -> { element, select(kind, number), focus() }
 *     treemap(description, { onSelect })    -> { element, select(kind, number) }
 *     layoutMap(description, { onSelect, fetching })  -> { element, select(kind, number), fetched(start, end) }
 *     facts(description, { onSelect })      -> an element
 *     details(description, kind, number, { onSelect })  -> an element
 *     legend(description, { parts })        -> an element that explains the colours
 *     new Selection(description, panel, onChosen)  -> { choose(kind, number), add(section, draw, options, ...more) }
 *     reveal(section, panel, { near })      -> scrolls details into the window after a click in a section
 *     human(nbytes), shown(text), shownValue(value), fullName(description, number), nbytesOf(description, number)
 */

export { fullName, nbytesOf } from "./model.js";
export { human, shown, shownValue } from "./text.js";
export { layoutMap } from "./layoutmap.js";
export { treemap } from "./treemap.js";
export { Selection, reveal } from "./selection.js";
export { details, facts, legend } from "./tables.js";
export { tree } from "./tree.js";
