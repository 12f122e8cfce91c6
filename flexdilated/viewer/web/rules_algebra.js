// Rules made of rules: intersection, union, complement, and the choice by head.

const MOST_ALTERNATIVES = 8;

const ALGEBRA_RULES = {
  and: (data, context) => bothOf(data.parts.map(context.build)),
  or: (data, context) => eitherOf(data.parts.map(context.build)),
  not: (data, context) => complementOf(context.build(data.part)),
  per_head: (data, context) => chosenRule(data, context, context.head),
  head_groups: (data, context) => chosenRule(data, context, groupOf(context.head, context.numHeads, data.parts.length)),
};

/** What every part allows. `written` are the parts as they were given, which explain it. */
function bothOf(written) {
  const parts = withOneDistance(written);
  const rests = new Map(); // the others of each part
  const restOf = (index) => {
    if (!rests.has(index)) rests.set(index, bothOf(parts.filter((_, other) => other !== index)));
    return rests.get(index);
  };
  const alternatives = alternativesOf(parts);
  return {
    allowed: (q, k) => written.every((part) => part.allowed(q, k)),
    count: (q, k) => countBoth(parts, restOf, alternatives, q, k),
    distance: parts.length === 1 ? parts[0].distance : undefined,
    why: () => "",
    parts: (q, k) => written.map((rule) => ({ rule, q, k })),
  };
}

/** Rules of distance joined into one, whose count is exact where two bounds would not be. */
function withOneDistance(parts) {
  const distances = parts.filter((part) => part.distance);
  let joined = distances[0] ?? null;
  for (const part of distances.slice(1)) joined &&= bothDistances(joined.distance, part.distance);
  return joined && distances.length > 1 ? [joined, ...parts.filter((part) => !part.distance)] : parts;
}

/** (a | b) & c as (a & c) | (b & c), whose bounds are closer; empty where there is no union or it is long. */
function alternativesOf(parts) {
  const index = parts.findIndex((part) => part.alternatives?.length <= MOST_ALTERNATIVES);
  if (index < 0) return [];
  const others = parts.filter((_, other) => other !== index);
  return parts[index].alternatives.map((part) => bothOf([part, ...others]));
}

function countBoth(parts, restOf, alternatives, q, k) {
  if (parts.length === 1) return parts[0].count(q, k);
  for (let index = 0; index < parts.length; index++) {
    const rest = parts[index].narrow && restOf(index);
    const pieces = rest ? parts[index].narrow(q, k, Boolean(rest.distance)) : null;
    if (pieces) return countInPieces(pieces, rest);
  }
  const area = q.count * k.count;
  if (alternatives.length) return alternatives.map((part) => part.count(q, k)).reduce((a, b) => unionOf(a, b, area));
  return parts.map((part) => part.count(q, k)).reduce((a, b) => intersection(a, b, area));
}

function countInPieces(pieces, rest) {
  let total = exactly(0);
  for (const { q, k, times } of pieces) {
    if (q.count && k.count) total = sumOf(total, rest.count(q, k), times);
  }
  return total;
}

function eitherOf(parts) {
  return {
    allowed: (q, k) => parts.some((part) => part.allowed(q, k)),
    count: (q, k) => {
      const area = q.count * k.count;
      return parts.map((part) => part.count(q, k)).reduce((a, b) => unionOf(a, b, area));
    },
    alternatives: parts,
    why: () => "",
    parts: (q, k) => parts.map((rule) => ({ rule, q, k })),
  };
}

function complementOf(part) {
  return {
    allowed: (q, k) => !part.allowed(q, k),
    count: (q, k) => {
      const [{ low, high }, area] = [part.count(q, k), q.count * k.count];
      return { low: area - high, high: area - low };
    },
    why: () => "",
    parts: (q, k) => [{ rule: part, q, k }],
  };
}

/** Groups are consecutive; where the heads do not divide, the first groups have one head more. */
function groupOf(head, numHeads, groups) {
  const [size, larger] = [quotient(numHeads, groups), numHeads % groups];
  const border = larger * (size + 1);
  return head < border ? quotient(head, size + 1) : larger + quotient(head - border, size);
}

function chosenRule(data, context, index) {
  const rule = context.build(data.parts[index]);
  return { ...rule, why: () => `head ${context.head} follows part ${index}`, parts: (q, k) => [{ rule, q, k }] };
}
