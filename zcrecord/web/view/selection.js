// SPDX-License-Identifier: 0BSD
/** Keeps the parts of a view on one selection: a choice in one part is shown by the others. */

import { details } from "./tables.js";

/** Shows the details of the chosen row in `panel`, then calls `onChosen(kind, number)`. */
export class Selection {
  #parts = [];

  constructor(description, panel, onChosen = () => {}) {
    Object.assign(this, { description, panel, onChosen });
  }

  choose = (kind, number, from) => {
    this.panel.replaceChildren(details(this.description, kind, number, { onSelect: this.choose }));
    this.onChosen(kind, number);
    for (const part of this.#parts) if (part !== from) part.select(kind, number);
  };

  /** Draws a part, such as `tree`, in a section, with `more` below it; returns it. */
  add(section, draw, options = {}, ...more) {
    const part = draw(this.description, { ...options, onSelect: (kind, number) => this.choose(kind, number, part) });
    section.append(part.element, ...more);
    this.#parts.push(part);
    return part;
  }
}

/** Scrolls the details in `panel` into the window after a choice by click in a section; with `near` only if no part of
 *  them is there. */
export function reveal(section, panel, { near = false } = {}) {
  const current = () => panel.querySelector(".details");
  let before = null;
  section.addEventListener("click", () => { before = current(); }, { capture: true });
  section.addEventListener("click", () => {
    const { top, bottom } = panel.getBoundingClientRect();
    const outside = bottom <= 0 || top >= innerHeight;
    if (current() !== before && (outside || !near)) current().scrollIntoView({ block: "nearest" });
  });
}
