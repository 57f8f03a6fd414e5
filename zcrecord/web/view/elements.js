// SPDX-License-Identifier: 0BSD
/** Makes elements of a page. */

/** Returns an element; attributes as given, children elements or text. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export function swatch(colour) {
  return make("span", { class: `swatch c${colour}`, "aria-hidden": "true" });
}
