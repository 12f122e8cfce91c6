// Neighbourhood attention: a query sees a window around its place in a grid, shifted inwards at the ends of an axis.

const MOST_CLASSES = 64;
const MOST_UNEVEN_ROWS = 6; // of a grid that an uneven step is followed through

const GRID_RULES = {
  neighborhood: ({ grid, radius, rate }) =>
    neighborhoodRule(grid, grid.map((length, axis) => [length, radius[axis], rate[axis]])),
};

function neighborhoodRule(grid, axes) {
  const strides = stridesOf(grid);
  const tokens = strides[0] * grid[0];
  const places = (t) => strides.map((stride, axis) => quotient(t, stride) % grid[axis]);
  const inWindow = (query, key, axis) => sees(query[axis], key[axis], ...axes[axis]);
  return {
    allowed: (q, k) => {
      if (q >= tokens || k >= tokens) return false;
      const [query, key] = [places(q), places(k)];
      return axes.every((_, axis) => inWindow(query, key, axis));
    },
    count: (q, k) => countNeighbours(clip(q, 0, tokens), clip(k, 0, tokens), grid, axes),
    why: (q, k) => {
      const [query, key] = [places(q), places(k)];
      const far = axes.findIndex((_, axis) => !inWindow(query, key, axis));
      const said = `the query stands at (${query.join(", ")}), the key at (${key.join(", ")})`;
      return far < 0 ? `${said}, inside its window` : `${said}, outside its window along axis ${far}`;
    },
  };
}

function sees(query, key, length, radius, rate) {
  if (query % rate !== key % rate) return false;
  const held = quotient(length - 1 - (query % rate), rate) + 1; // tokens of the query's residue class
  const first = Math.min(Math.max(quotient(query, rate) - radius, 0), held - (2 * radius + 1));
  const ahead = quotient(key, rate) - first;
  return ahead >= 0 && ahead < 2 * radius + 1;
}

function countNeighbours(q, k, grid, axes) {
  const area = q.count * k.count;
  if (!area) return exactly(0);
  const even = [q, k].every((terms) => fitsGrid(terms.step, grid) || rowsOf(terms, grid) <= MOST_UNEVEN_ROWS);
  const hull = (terms) => progression(terms.first, 1, lastOf(terms) - terms.first + 1);
  const side = (terms) => {
    if (fitsGrid(terms.step, grid)) return rectanglesOf(terms, grid);
    return even ? rowByRow(terms, grid) : rectanglesOf(hull(terms), grid);
  };
  const [queries, keys] = [side(q), side(k)];
  let total = exactly(0);
  for (const rows of queries) for (const columns of keys) total = sumOf(total, countRectangles(rows, columns, axes));
  return even ? total : { low: 0, high: Math.min(total.high, area) }; // between uneven steps lie other tokens too
}

/** Axis by axis: the counts multiply. */
function countRectangles(rows, columns, axes) {
  const pairs = exactly(1);
  for (let axis = 0; axis < axes.length && pairs.high; axis++) {
    const along = countWindow(rows[axis], columns[axis], ...axes[axis]);
    pairs.low *= along.low;
    pairs.high *= along.high;
  }
  return pairs;
}

/** Coordinates of one residue modulo the rate are neighbours of each other. */
function countWindow(q, k, length, radius, rate) {
  if (rate > MOST_CLASSES) return countFarApart(q, k, radius * rate, rate);
  let total = exactly(0);
  for (let residue = 0; residue < rate; residue++) {
    const held = quotient(length - 1 - residue, rate) + 1;
    total = sumOf(total, countInClass(classOf(q, rate, residue), classOf(k, rate, residue), held, radius));
  }
  return total;
}

/** Keys of the class within `reach` tokens are all in the window; a shifted one holds some up to twice as far. */
function countFarApart(q, k, reach, rate) {
  const [near, far] = [reach, 2 * reach].map((most) => countMultiples(q, k, rate, -most, most));
  return { low: near.low, high: far.high };
}

/** The terms of one residue class, by their number in that class. */
function classOf(terms, rate, residue) {
  if (rate === 1) return terms;
  const held = ofResidue(terms, rate, residue);
  return progression(quotient(held.first, rate), held.step / rate, held.count);
}

/** Queries near the start share the first window, those near the end the last; the others have their own. */
function countInClass(q, k, length, radius) {
  const window = 2 * radius + 1;
  let edges = countWithin(q, 0, radius) * countWithin(k, 0, window);
  edges += countWithin(q, length - radius, length) * countWithin(k, length - window, length);
  const [queries, keys] = [clip(q, radius, length - radius), clip(k, 0, length)];
  if (!queries.count || !keys.count) return exactly(edges);
  const inner = countBetween(queries, keys, -radius, radius);
  return { low: edges + inner.low, high: edges + Math.min(inner.high, queries.count * keys.count) };
}
