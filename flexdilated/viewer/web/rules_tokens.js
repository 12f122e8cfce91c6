// Rules that single out tokens: global tokens, landmarks, summaries of blocks, and keys that are marked as visible.

const TOKEN_RULES = {
  global_tokens: ({ tokens, rows, columns }) =>
    singledOut(rows, columns, {
      has: (t) => t < tokens,
      among: (side) => clip(side, 0, tokens),
      says: (t) => `${t < tokens ? "one" : "not one"} of the first ${plural(tokens, "token")}`,
    }),
  landmark_tokens: ({ stride, rows, columns }) =>
    singledOut(rows, columns, {
      has: (t) => t % stride === 0,
      among: (side) => ofResidue(side, stride, 0),
      says: (t) => `${t % stride ? "not " : ""}at a multiple of ${grouped(stride)}`,
    }),
  fixed: ({ stride, summary }) => fixedRule(stride, summary),
  visible_keys: (data) => visibleKeysRule(spansOf(data)),
};

/** Allowed where the query (`rows`) or the key (`columns`) is one of those tokens; `among` picks them out. */
function singledOut(rows, columns, tokens) {
  const rule = {
    allowed: (q, k) => (rows && tokens.has(q)) || (columns && tokens.has(k)),
    count: (q, k) => {
      // Pairs outside are those of a query and a key neither of which is one of them.
      const queries = rows ? q.count - tokens.among(q).count : q.count;
      const keys = columns ? k.count - tokens.among(k).count : k.count;
      return exactly(q.count * k.count - queries * keys);
    },
    why: (q, k) => {
      const said = [];
      if (rows) said.push(`the query is ${tokens.says(q)}`);
      if (columns) said.push(`the key is ${tokens.says(k)}`);
      return said.join("; ");
    },
  };
  if (rows && columns) return rule;
  const narrow = (q, k) => [{ q: rows ? tokens.among(q) : q, k: columns ? tokens.among(k) : k, times: 1 }];
  return { ...rule, narrow };
}

function fixedRule(stride, summary) {
  const first = stride - summary;
  return {
    allowed: (q, k) => k % stride >= first,
    count: (q, k) => {
      const keys = countSummaries(k, stride, summary);
      return keys === null ? unknown(q, k) : exactly(q.count * keys);
    },
    why: (q, k) => {
      const place = `the key's place in its block of ${grouped(stride)} is ${grouped(k % stride)}`;
      return `${place}, ${k % stride >= first ? "one" : "not one"} of its last ${grouped(summary)}`;
    },
  };
}

/** A key is of a summary where `summary` steps further lead into the next block. null: beyond exact numbers. */
function countSummaries(keys, stride, summary) {
  if (!keys.count) return 0;
  if ((keys.count * (lastOf(keys) + summary)) / stride > LARGEST_EXACT / 4) return null;
  const upTo = (first) => sumOfQuotients(keys.count, keys.step, first, stride);
  return upTo(keys.first + summary) - upTo(keys.first);
}

/** The sum of floor((first + step * i) / modulus) over i < number, by Euclid's steps. */
function sumOfQuotients(number, step, first, modulus) {
  let total = 0;
  for (;;) {
    total += ((number * (number - 1)) / 2) * quotient(step, modulus) + number * quotient(first, modulus);
    step %= modulus;
    first %= modulus;
    if (step === 0) return total;
    // Count the same lattice points along the other axis, where fewer are left.
    const top = first + step * number;
    [number, first, step, modulus] = [quotient(top, modulus), top % modulus, modulus, step];
  }
}

function visibleKeysRule(runs) {
  const before = new Float64Array(runs.starts.length + 1); // visible keys before each run
  runs.starts.forEach((start, index) => (before[index + 1] = before[index] + runs.stops[index] - start));
  const seen = (position) => {
    const index = firstAbove(runs.starts, position);
    return index ? before[index] - Math.max(0, runs.stops[index - 1] - position) : 0;
  };
  return {
    allowed: (q, k) => spanAt(runs, k) >= 0,
    count: (q, k) => {
      const [stop, first] = [lastOf(k) + 1, k.first];
      const visible = seen(stop) - seen(first);
      if (k.step === 1) return exactly(q.count * visible);
      const high = q.count * Math.min(visible, k.count);
      return { low: visible === stop - first ? q.count * k.count : 0, high };
    },
    why: (q, k) => `the key is ${spanAt(runs, k) >= 0 ? "visible" : "hidden"}`,
  };
}
