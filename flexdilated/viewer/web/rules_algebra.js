// Rules made of rules: intersection, union, complement, and the choice by head.

const MOST_ALTERNATIVES = 8;
const FEWEST_OF_CLASS = 8; // tokens, on the shorter side of a box; splitting it is quicker where there are fewer

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
  const [exceptOf, classes] = [exceptionOf(parts), classesOf(parts)];
  return {
    allowed: (q, k) => written.every((part) => part.allowed(q, k)),
    count: (q, k) => countBoth(parts, { restOf, exceptOf, classes, alternatives }, q, k),
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

/**
 * a & ~b is what a allows less what a & b allow: null where no part is a
 * complement, else both, made at first use.
 */
function exceptionOf(parts) {
  const index = parts.length > 1 ? parts.findIndex((part) => part.complementOf) : -1;
  if (index < 0) return () => null;
  const others = parts.filter((_, other) => other !== index);
  let made = null;
  return () => (made ??= { all: bothOf(others), except: bothOf([...others, parts[index].complementOf]) });
}

/** Multiples of a rate lie within a residue class: that rate, and what else holds there; null for none, or too many. */
function classesOf(parts) {
  const index = parts.findIndex(({ distance }) => distance?.rate > 1 && distance.rate <= MOST_CLASSES);
  if (index < 0 || parts.length === 1) return null;
  const { rate, least, most } = parts[index].distance;
  const others = parts.filter((_, other) => other !== index);
  const within = least === -Infinity && most === Infinity ? [] : [distanceRule(1, least, most)];
  return { rate, rest: bothOf([...within, ...others]) };
}

function countBoth(parts, { restOf, exceptOf, classes, alternatives }, q, k) {
  if (parts.length === 1) return parts[0].count(q, k);
  for (let index = 0; index < parts.length; index++) {
    const rest = parts[index].narrow && restOf(index);
    const pieces = rest ? parts[index].narrow(q, k, Boolean(rest.distance)) : null;
    if (pieces) return countInPieces(pieces, rest);
  }
  const area = q.count * k.count;
  if (alternatives.length) return alternatives.map((part) => part.count(q, k)).reduce((a, b) => unionOf(a, b, area));
  const together = parts.map((part) => part.count(q, k)).reduce((a, b) => intersection(a, b, area));
  if (together.low === together.high) return together;
  if (classes?.rate * FEWEST_OF_CLASS <= Math.min(q.count, k.count)) {
    return closerOf(together, countInPieces(residueBoxes(q, k, classes.rate), classes.rest));
  }
  return exceptOf() ? lessExcepted(together, exceptOf(), q, k) : together;
}

/** Bounds of all pairs less those that are excepted, where they are closer. */
function lessExcepted(together, { all, except }, q, k) {
  const [most, least] = [all.count(q, k), except.count(q, k)];
  return closerOf(together, { low: most.low - least.high, high: most.high - least.low });
}

function closerOf(a, b) {
  return { low: Math.max(a.low, b.low), high: Math.min(a.high, b.high) };
}

/** Queries and keys of one residue class at a time. */
function residueBoxes(q, k, rate) {
  const box = (_, residue) => ({ q: ofResidue(q, rate, residue), k: ofResidue(k, rate, residue), times: 1 });
  return Array.from({ length: rate }, box);
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
    complementOf: part,
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
