// A pattern's JSON as rules for one head. A rule has `allowed(q, k)`, the whole truth; `count(q, k)`, bounds over a
// box; `why(q, k)`, a reason in words; and `phrase`, how it is written.

const RULES = { ...DISTANCE_RULES, ...SEGMENT_RULES, ...TOKEN_RULES, ...BLOCK_RULES, ...GRID_RULES, ...ALGEBRA_RULES };

function buildRule(data, head, numHeads) {
  const make = RULES[data.kind];
  if (!make) throw new Error(`no rule is known for the kind ${data.kind}`);
  const context = { head, numHeads, build: (part) => buildRule(part, head, numHeads) };
  return { ...make(data, context), phrase: data.phrase, kind: data.kind };
}
