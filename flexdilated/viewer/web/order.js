// Orders of the tokens: which position stands in which slot. Residue-major order of rate R sorts the positions by
// (position mod R, position div R); rate 1 is the natural order.

function orderOf(numTokens, rate) {
  const each = quotient(numTokens, rate);
  const longer = numTokens % rate; // so many residue classes, the first ones, have one token more
  const border = longer * (each + 1);
  const classOfSlot = (slot) =>
    slot < border ? quotient(slot, each + 1) : longer + quotient(slot - border, Math.max(each, 1));
  const startOf = (residue) => residue * each + Math.min(residue, longer);
  return {
    rate,
    position: (slot) => {
      const residue = classOfSlot(slot);
      return residue + rate * (slot - startOf(residue));
    },
    slot: (position) => startOf(position % rate) + quotient(position, rate),
    /** The positions in slots [start, stop) as progressions, one a residue class; null for more than `most`. */
    runs: (start, stop, most) => {
      const [first, last] = [classOfSlot(start), classOfSlot(stop - 1)];
      if (last - first >= most) return null;
      return Array.from({ length: last - first + 1 }, (_, index) => {
        const residue = first + index;
        const from = Math.max(start, startOf(residue));
        const to = Math.min(stop, startOf(residue + 1));
        return progression(residue + rate * (from - startOf(residue)), rate, to - from);
      });
    },
    /** A slot that cuts [start, stop) in two: where a residue class begins, if it holds more than one. */
    middle: (start, stop) => {
      const [first, last] = [classOfSlot(start), classOfSlot(stop - 1)];
      return first < last ? startOf(quotient(first + last + 1, 2)) : quotient(start + stop, 2);
    },
    classOf: classOfSlot,
    /** The slots [first, end) of a residue class whose positions lie in [start, stop). */
    slotsWithin: (residue, start, stop) => {
      const slotFrom = (position) => startOf(residue) + Math.max(0, Math.ceil((position - residue) / rate));
      return [slotFrom(start), slotFrom(stop)];
    },
    /** The first slot of each residue class. */
    starts: () => Array.from({ length: Math.min(rate, numTokens) }, (_, residue) => startOf(residue)),
  };
}
