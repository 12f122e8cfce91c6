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
    numTokens,
    rate,
    position: (slot) => {
      const residue = classOfSlot(slot);
      return residue + rate * (slot - startOf(residue));
    },
    slot: (position) => startOf(position % rate) + quotient(position, rate),
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
