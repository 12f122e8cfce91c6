// Arithmetic progressions of positions: {first, step, count} is first, first + step, ... (count terms).

function progression(first, step, count) {
  return { first, step, count };
}

function lastOf(terms) {
  return terms.first + terms.step * (terms.count - 1);
}

/** The terms that lie in [start, stop). */
function clip(terms, start, stop) {
  const skipped = Math.max(0, quotient(start - terms.first + terms.step - 1, terms.step));
  const end = Math.min(terms.count, quotient(stop - 1 - terms.first, terms.step) + 1);
  return progression(terms.first + terms.step * skipped, terms.step, Math.max(0, end - skipped));
}

/** The terms that are congruent to `residue` modulo `modulus`: every so many-th one, or none. */
function ofResidue(terms, modulus, residue) {
  const divisor = greatestDivisor(terms.step, modulus);
  const distance = remainder(residue - terms.first, modulus);
  if (distance % divisor) return progression(terms.first, terms.step, 0);
  const period = modulus / divisor;
  const index = period === 1 ? 0 : firstIndex(distance / divisor, terms.step / divisor, period);
  const count = Math.max(0, quotient(terms.count - 1 - index, period) + 1);
  return progression(terms.first + terms.step * index, terms.step * period, count);
}

function firstIndex(distance, step, period) {
  return timesModulo(distance % period, inverseModulo(step, period), period);
}

/** How many terms lie in [start, stop). */
function countWithin(terms, start, stop) {
  return clip(terms, start, stop).count;
}

/** Terms moved down by `shift`. */
function movedDown(terms, shift) {
  return progression(terms.first - shift, terms.step, terms.count);
}
