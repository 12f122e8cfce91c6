// Rules of the distance alone: causal order, windows and strides. A pair is allowed where key - query lies in
// [least, most] and is a multiple of the rate.

const DISTANCE_RULES = {
  causal: () => distanceRule(1, -Infinity, 0, whyCausal),
  every: () => distanceRule(1, -Infinity, Infinity, () => "every pair is allowed"),
  local_window: ({ left, right }) => distanceRule(1, -left, right),
  dilated_window: ({ left, right, rate }) => distanceRule(rate, -left * rate, right * rate),
  strided: ({ stride }) => distanceRule(stride, -Infinity, Infinity),
};

function distanceRule(rate, least, most, why) {
  const allowed = (q, k) => k - q >= least && k - q <= most && (k - q) % rate === 0;
  return {
    allowed,
    count: (q, k) => countMultiples(q, k, rate, least, most),
    distance: { rate, least, most },
    why: why ?? ((q, k) => whyDistance(k - q, rate, least, most)),
  };
}

/** One rule for what both allow, or null where its rate is beyond positions. */
function bothDistances(a, b) {
  const rate = (a.rate / greatestDivisor(a.rate, b.rate)) * b.rate;
  return rate < 2 ** 31 ? distanceRule(rate, Math.max(a.least, b.least), Math.min(a.most, b.most)) : null;
}

function whyCausal(q, k) {
  if (k > q) return `the key comes ${plural(k - q, "token")} after the query`;
  return k === q ? "the key is the query itself" : `the key comes ${plural(q - k, "token")} before the query`;
}

function whyDistance(distance, rate, least, most) {
  const said = [`key − query is ${signed(distance)}`];
  if (distance < least || distance > most) said.push(`outside ${signed(least)} to ${signed(most)}`);
  else if (least !== -Infinity) said.push(`within ${signed(least)} to ${signed(most)}`);
  if (rate > 1) said.push(`${distance % rate ? "not " : ""}a multiple of ${grouped(rate)}`);
  return said.join(", ");
}
