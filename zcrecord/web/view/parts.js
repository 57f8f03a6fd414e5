// SPDX-License-Identifier: 0BSD
/** How the parts of a view follow one another: what is chosen in one is told, and shown by the others. */

import { details } from "./tables.js";

/** Tells in `panel` what is chosen, then calls `onChosen(kind, number)`. */
export class Parts {
  #parts = [];

  constructor(description, panel, onChosen = () => {}) {
    Object.assign(this, { description, panel, onChosen });
  }

  choose = (kind, number, from) => {
    this.panel.replaceChildren(details(this.description, kind, number, { onSelect: this.choose }));
    this.onChosen(kind, number);
    for (const part of this.#parts) if (part !== from) part.select(kind, number);
  };

  /** Draws a part, such as `tree`, where it belongs, with `more` below it; returns it. */
  add(section, draw, options = {}, ...more) {
    const part = draw(this.description, { ...options, onSelect: (kind, number) => this.choose(kind, number, part) });
    section.append(part.element, ...more);
    this.#parts.push(part);
    return part;
  }
}

/** Brings `panel`, where details are, into the window when a click in a section chose something; with `near` only if
 *  no part of it is there. */
export function reveal(section, panel, { near = false } = {}) {
  const told = () => panel.querySelector(".details");
  let before = null;
  section.addEventListener("click", () => { before = told(); }, { capture: true });
  section.addEventListener("click", () => {
    const { top, bottom } = panel.getBoundingClientRect();
    const outside = bottom <= 0 || top >= innerHeight;
    if (told() !== before && (outside || !near)) told().scrollIntoView({ block: "nearest" });
  });
}
