// How many pairs of a box a rule allows. A box is a progression of queries and one of keys; bounds {low, high} are
// sound: at least `low` pairs are allowed and at most `high`. Equal bounds are an exact count.

function exactly(pairs) {
  return { low: pairs, high: pairs };
}

function unknown(q, k) {
  return { low: 0, high: q.count * k.count };
}

/** Pairs with key - query <= shift: exact for equal steps, else exact only where all or none are. */
function countBelow(q, k, shift) {
  if (q.step !== k.step) return coarselyBelow(q, k, shift);
  const lead = quotient(q.first - k.first + shift, q.step); // key j is allowed for query i where j <= i + lead
  const begin = clamp(-lead, 0, q.count); // the first query that sees a key
  const full = clamp(k.count - 1 - lead, begin, q.count); // the first one that sees all
  const ramp = full - begin;
  return exactly(ramp * (begin + lead + 1) + (ramp * (ramp - 1)) / 2 + (q.count - full) * k.count);
}

function coarselyBelow(q, k, shift) {
  const area = q.count * k.count;
  if (area === 0 || k.first - lastOf(q) > shift) return exactly(0);
  if (lastOf(k) - q.first <= shift) return exactly(area);
  return { low: 1, high: area - 1 };
}

/** Pairs with least <= key - query <= most. */
function countBetween(q, k, least, most) {
  const area = q.count * k.count;
  const reached = most === Infinity ? exactly(area) : countBelow(q, k, most);
  const missed = least === -Infinity ? exactly(0) : countBelow(q, k, least - 1);
  return { low: Math.max(0, reached.low - missed.high), high: reached.high - missed.low };
}

/** Pairs whose distance key - query is a multiple of `rate` and lies in [least, most]. */
function countMultiples(q, k, rate, least, most) {
  if (rate === 1) return countBetween(q, k, least, most);
  if (q.step === k.step) return countLags(q, k, rate, least, most);
  const [byQuery, byKey] = [countPartners(q, k, rate), countPartners(k, q, rate)];
  const together = { low: Math.max(byQuery.low, byKey.low), high: Math.min(byQuery.high, byKey.high) };
  return intersection(together, countBetween(q, k, least, most), q.count * k.count);
}

/** A pair's distance is shift + step * lag, where lag is key index - query index: count the lags that fit. */
function countLags(q, k, rate, least, most) {
  const step = k.step;
  const shift = k.first - q.first;
  const divisor = greatestDivisor(step, rate);
  if (remainder(shift, divisor)) return exactly(0);
  const period = rate / divisor;
  if ((q.count + k.count) ** 2 / period > LARGEST_EXACT / 4) return unknown(q, k); // sums below would be rounded
  const start = remainder(-quotient(shift, divisor), period);
  const residue = period === 1 ? 0 : timesModulo(start, inverseModulo(step / divisor, period), period);
  const upTo = (distance) => {
    if (distance === -Infinity) return 0;
    return lagsUpTo(Math.min(quotient(distance - shift, step), k.count - 1), residue, period, q.count, k.count);
  };
  return exactly(upTo(most) - upTo(least - 1));
}

/**
 * Pairs of indices whose lag is at most `most` and congruent to `residue`. Over the lags of a box its pairs make a
 * trapezoid, a sum of ramps: lag + rows, less lag, less lag + rows - columns, each where it is positive.
 */
function lagsUpTo(most, residue, period, rows, columns) {
  const top = most - remainder(most - residue, period);
  return rampSum(top + rows, period) - rampSum(top, period) - rampSum(top + rows - columns, period);
}

/** height + (height - period) + ..., as long as that is positive. */
function rampSum(height, period) {
  if (height <= 0) return 0;
  const further = quotient(height, period);
  return (further + 1) * height - period * ((further * (further + 1)) / 2);
}

/** Each query that fits some key fits every so many-th of them. */
function countPartners(q, k, rate) {
  const divisor = greatestDivisor(k.step, rate);
  const every = rate / divisor;
  const fitting = ofResidue(q, divisor, remainder(k.first, divisor)).count;
  return { low: fitting * quotient(k.count, every), high: fitting * Math.ceil(k.count / every) };
}

function intersection(a, b, area) {
  return { low: Math.max(0, a.low + b.low - area), high: Math.min(a.high, b.high) };
}

function unionOf(a, b, area) {
  return { low: Math.max(a.low, b.low), high: Math.min(a.high + b.high, area) };
}

function sumOf(a, b, times = 1) {
  return { low: a.low + times * b.low, high: a.high + times * b.high };
}
