// What a cell looks like before it is counted: the share of allowed pairs among a few, drawn at random from a seed that
// is the cell's own, so that a picture does not depend on the order of the work.

const FAINTEST = 1e-6; // the share of a cell that may hold pairs, but showed none

class Estimates {
  constructor(cells, branches) {
    this.cells = cells;
    this.asked = Array.from({ length: branches }, () => null); // made for branches that need them
    this.hits = Array.from({ length: branches }, () => null);
  }

  /** Ask further pairs of a cell's box of slots until there are `pairs` of them. */
  ask(branch, cell, rule, queryOrder, keyOrder, [top, bottom, left, right], pairs) {
    this.asked[branch] ??= new Uint16Array(this.cells);
    this.hits[branch] ??= new Uint16Array(this.cells);
    let hits = 0;
    for (let pair = this.asked[branch][cell]; pair < pairs; pair++) {
      const q = queryOrder.position(top + Math.floor(randomPart(cell, 2 * pair) * (bottom - top)));
      const k = keyOrder.position(left + Math.floor(randomPart(cell, 2 * pair + 1) * (right - left)));
      if (rule.allowed(q, k)) hits++;
    }
    this.hits[branch][cell] += hits;
    this.asked[branch][cell] = Math.max(this.asked[branch][cell], pairs);
  }

  askedOf(branch, cell) {
    return this.asked[branch]?.[cell] ?? 0;
  }

  /** The share of a cell between its bounds. No hit is no proof: such a cell is drawn as faintly as can be seen. */
  shareOf(branch, cell, low, high) {
    const share = this.hits[branch][cell] / this.asked[branch][cell];
    return clamp(share || FAINTEST, Math.max(low, 0), Math.min(high, 1));
  }
}

/** A number in [0, 1) that belongs to these two: mixed as in the finalizer of MurmurHash3. */
function randomPart(cell, index) {
  let mixed = Math.imul(cell, 0x9e3779b1) ^ Math.imul(index + 1, 0x85ebca77);
  mixed = Math.imul(mixed ^ (mixed >>> 16), 0x85ebca6b);
  mixed = Math.imul(mixed ^ (mixed >>> 13), 0xc2b2ae35);
  return ((mixed ^ (mixed >>> 16)) >>> 0) / 2 ** 32;
}
