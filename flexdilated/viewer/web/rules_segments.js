// Rules that cut the sequence into runs: dilated segments, documents and lengths, and patterns that start anew in each.
//
// `narrow(q, k, repeats)` gives the boxes, without overlap, in which such a rule allows every pair; outside it allows
// none. A box with `times` stands for so many alike, one period apart, which only `repeats` permits. null: too many.

const MOST_PIECES = 64;

const SEGMENT_RULES = {
  dilated: (data, context) => dilatedRule(data.segment, data.rate, offsetOf(data, context)),
  spans: (data) => spansRule(spansOf(data), data.word),
  per_document: (data, context) => perDocumentRule(context.build(data.part), spansOf(data.spans), data.spans.word),
};

function offsetOf({ offset, rate }, { head, numHeads }) {
  if (offset === "interleaved") return head % rate;
  if (offset === "contiguous") return quotient(head, Math.ceil(numHeads / rate));
  return offset;
}

function dilatedRule(segment, rate, offset) {
  const active = (t) => rate === 1 || (t % segment) % rate === offset;
  const narrow = (q, k, repeats) => segmentBoxes(q, k, segment, rate, offset, repeats);
  return {
    allowed: (q, k) => quotient(q, segment) === quotient(k, segment) && active(q) && active(k),
    count: (q, k) => countPieces(narrow(q, k, true), q, k),
    narrow,
    why: (q, k) => whyDilated(q, k, segment, rate, offset),
  };
}

function segmentBoxes(q, k, segment, rate, offset, repeats) {
  const first = Math.max(quotient(q.first, segment), quotient(k.first, segment));
  const last = Math.min(quotient(lastOf(q), segment), quotient(lastOf(k), segment));
  const box = (index) => {
    const start = index * segment;
    const activeOf = (side) => ofResidue(clip(side, start, start + segment), rate, start + offset);
    return { q: activeOf(q), k: activeOf(k), times: 1 };
  };
  // Whole segments between the first and the last are alike where steps go through segments evenly.
  const alike = repeats && last - first > 2 && segment % q.step === 0 && segment % k.step === 0;
  if (alike) return [box(first), { ...box(first + 1), times: last - first - 1 }, box(last)];
  if (last - first >= MOST_PIECES) return null;
  return Array.from({ length: Math.max(0, last - first + 1) }, (_, step) => box(first + step));
}

/** The pairs of boxes that a rule allows whole. */
function countPieces(pieces, q, k) {
  if (pieces === null) return unknown(q, k);
  let pairs = 0;
  for (const piece of pieces) pairs += piece.times * piece.q.count * piece.k.count;
  return exactly(pairs);
}

function whyDilated(q, k, segment, rate, offset) {
  const [ofQuery, ofKey] = [quotient(q, segment), quotient(k, segment)];
  if (ofQuery !== ofKey) {
    const segments = [ofQuery, ofKey].map(grouped);
    return `the query lies in segment ${segments[0]}, the key in segment ${segments[1]} of ${grouped(segment)} tokens`;
  }
  const where = `both lie in segment ${grouped(ofQuery)}`;
  if (rate === 1) return where;
  const place = (name, t) => {
    const rest = (t % segment) % rate;
    const verdict = rest === offset ? "active" : `not the offset ${offset}`;
    return `the ${name}'s place in it is ${grouped(t % segment)}, modulo ${rate} ${rest}: ${verdict}`;
  };
  return `${where}; ${place("query", q)}; ${place("key", k)}`;
}

/** {starts, stops}: runs of positions, in ascending order, from the lengths of gaps and runs in turn. */
function spansOf({ gaps, lengths }) {
  const [starts, stops] = [new Float64Array(lengths.length), new Float64Array(lengths.length)];
  let position = 0;
  lengths.forEach((length, index) => {
    starts[index] = position + gaps[index];
    position = stops[index] = starts[index] + length;
  });
  return { starts, stops };
}

/** The run in which a position lies, or -1. */
function spanAt(spans, position) {
  const index = firstAbove(spans.starts, position) - 1;
  return index >= 0 && position < spans.stops[index] ? index : -1;
}

/** The runs that both sides of a box may touch: [first, last]. */
function commonSpans(spans, q, k) {
  const first = Math.max(firstAbove(spans.stops, q.first), firstAbove(spans.stops, k.first));
  return [first, Math.min(firstAbove(spans.starts, lastOf(q)), firstAbove(spans.starts, lastOf(k))) - 1];
}

function spansRule(spans, word) {
  const narrow = (q, k) => {
    const [first, last] = commonSpans(spans, q, k);
    if (last - first >= MOST_PIECES) return null;
    return Array.from({ length: Math.max(0, last - first + 1) }, (_, step) => {
      const [start, stop] = [spans.starts[first + step], spans.stops[first + step]];
      return { q: clip(q, start, stop), k: clip(k, start, stop), times: 1 };
    });
  };
  return {
    allowed: (q, k) => spanAt(spans, q) >= 0 && spanAt(spans, q) === spanAt(spans, k),
    count: (q, k) => countPieces(narrow(q, k), q, k),
    narrow,
    why: (q, k) => whySpans(spans, q, k, word),
  };
}

function perDocumentRule(part, spans, word) {
  const whole = spansRule(spans, word);
  return {
    allowed: (q, k) => {
      const [span, ofKey] = [spanAt(spans, q), spanAt(spans, k)];
      return span >= 0 && span === ofKey && part.allowed(q - spans.starts[span], k - spans.starts[span]);
    },
    count: (q, k) => {
      const pieces = whole.narrow(q, k);
      return pieces === null ? unknown(q, k) : countFromStarts(part, spans, pieces);
    },
    why: (q, k) => {
      if (!whole.allowed(q, k)) return whySpans(spans, q, k, word);
      const start = spans.starts[spanAt(spans, q)];
      return `${whySpans(spans, q, k, word)}, where they are ${grouped(q - start)} and ${grouped(k - start)}`;
    },
    parts: (q, k) => {
      if (!whole.allowed(q, k)) return [];
      const start = spans.starts[spanAt(spans, q)];
      return [{ rule: part, q: q - start, k: k - start }];
    },
  };
}

/** Pairs of boxes that each lie in one run, counted from its start. */
function countFromStarts(part, spans, pieces) {
  let total = exactly(0);
  for (const { q, k } of pieces) {
    if (!q.count || !k.count) continue;
    const start = spans.starts[spanAt(spans, q.first)];
    total = sumOf(total, part.count(movedDown(q, start), movedDown(k, start)));
  }
  return total;
}

function whySpans(spans, q, k, word) {
  const [ofQuery, ofKey] = [spanAt(spans, q), spanAt(spans, k)];
  const run = (index) => `${grouped(spans.starts[index])} to ${grouped(spans.stops[index] - 1)}`;
  if (ofQuery < 0) return `the query is padding`;
  if (ofKey < 0) return `the key is padding`;
  if (ofQuery === ofKey) return `both lie in ${word} ${grouped(ofQuery)}, positions ${run(ofQuery)}`;
  const place = (index) => `${word} ${grouped(index)} (${run(index)})`;
  return `the query lies in ${place(ofQuery)}, the key in ${place(ofKey)}`;
}
