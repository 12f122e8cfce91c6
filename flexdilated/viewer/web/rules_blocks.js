// Rules over blocks of tokens: a pattern of blocks, tables of blocks, and tables that are drawn.

const MOST_ROWS = 256; // a box over more rows of a table is bounded by the picture
const MOST_ROWS_APART = 16;
const PICTURE_SIDE = 1024;
const MOST_DRAWN = 1 << 18; // entries of a picture: drawing so many takes less than a second

const BLOCK_RULES = {
  blockwise: (data, context) => blockwiseRule(context.build(data.part), data.block),
  random_blocks: (data, context) => randomBlocksRule(data, data.head ?? context.head),
  block_list: (data, context) => blockListRule(data, context.head),
};

function blockwiseRule(part, block) {
  const at = (t) => quotient(t, block);
  return {
    allowed: (q, k) => part.allowed(at(q), at(k)),
    count: (q, k) => {
      const [rows, columns] = [blockRuns(q, block), blockRuns(k, block)];
      if (!rows || !columns) return countCoarseBlocks(part, q, k, block);
      let total = exactly(0);
      for (const row of rows) {
        for (const column of columns) {
          total = sumOf(total, part.count(row.blocks, column.blocks), row.each * column.each);
        }
      }
      return total;
    },
    why: (q, k) => `the query is of block ${grouped(at(q))}, the key of block ${grouped(at(k))}`,
    parts: (q, k) => [{ rule: part, q: at(q), k: at(k) }],
  };
}

/** The blocks of a progression in runs, with the terms that a block of each holds; null where steps fit unevenly. */
function blockRuns(terms, block) {
  if (terms.step % block === 0) {
    return [{ blocks: progression(quotient(terms.first, block), terms.step / block, terms.count), each: 1 }];
  }
  if (block % terms.step) return null;
  const [first, last] = [quotient(terms.first, block), quotient(lastOf(terms), block)];
  const holds = (index) => countWithin(terms, index * block, (index + 1) * block);
  const run = (start, count, each) => ({ blocks: progression(start, 1, count), each });
  if (first === last) return [run(first, 1, terms.count)];
  const whole = last - first - 1;
  const between = whole ? [run(first + 1, whole, block / terms.step)] : [];
  return [run(first, 1, holds(first)), ...between, run(last, 1, holds(last))];
}

/** From all blocks between the ends of a box, and the most pairs of it that one pair of blocks may hold. */
function countCoarseBlocks(part, q, k, block) {
  const span = (side) => {
    const first = quotient(side.first, block);
    return progression(first, 1, quotient(lastOf(side), block) - first + 1);
  };
  const most = [q, k].reduce((product, side) => product * Math.min(side.count, Math.ceil(block / side.step)), 1);
  const [rows, columns] = [span(q), span(k)];
  const allowed = part.count(rows, columns);
  const area = q.count * k.count;
  const forbidden = (rows.count * columns.count - allowed.low) * most;
  return { low: Math.max(0, area - forbidden), high: Math.min(allowed.high * most, area) };
}

function randomBlocksRule({ num_tokens: numTokens, block, count, seed }, head) {
  const numBlocks = Math.ceil(numTokens / block);
  const draw = drawnRows(numBlocks, count, seed, head);
  const kept = new Map();
  const row = (index) => {
    if (!kept.has(index)) kept.set(index, draw(index));
    return kept.get(index);
  };
  const sizes = { height: numBlocks, width: numBlocks, entries: numBlocks * count, block, limit: numTokens };
  return tableRule({ row, ...sizes, verb: "drew" });
}

function blockListRule({ rows, block }, head) {
  const byHead = Array.isArray(rows[0][0]); // the first row of the first head's table
  const tables = byHead ? rows : [rows];
  const table = byHead ? rows[head] : rows;
  const height = Math.max(...tables.map((each) => each.length));
  let last = 0;
  for (const each of tables) for (const row of each) last = Math.max(last, row.at(-1) ?? 0);
  const entries = table.reduce((total, row) => total + row.length, 0);
  const width = Math.max(height, last + 1);
  const sizes = { height, width, entries, block, limit: width * block };
  return tableRule({ row: (index) => table[index] ?? [], ...sizes, verb: "lists" });
}

/** Row r of a table holds the key blocks, ascending, that query block r sees; nothing is seen from `limit` on. */
function tableRule(table) {
  const { row, height, block, limit } = table;
  let picture = null;
  const rowsOf = (q) => [quotient(q.first, block), Math.min(quotient(lastOf(q), block), height - 1)];
  const inLimits = (q, k) => [clip(q, 0, limit), clip(k, 0, limit)];
  const narrow = (q, k) => {
    [q, k] = inLimits(q, k);
    if (!q.count || !k.count) return [];
    const [first, last] = rowsOf(q);
    return last - first < MOST_ROWS_APART ? listedBoxes(table, q, k, first, last) : null;
  };
  return {
    allowed: (q, k) => {
      if (q >= limit || k >= limit || quotient(q, block) >= height) return false;
      const [entries, column] = [row(quotient(q, block)), quotient(k, block)];
      return entries[firstAbove(entries, column) - 1] === column;
    },
    count: (q, k) => {
      [q, k] = inLimits(q, k);
      if (!q.count || !k.count) return exactly(0);
      const [first, last] = rowsOf(q);
      if (last - first < MOST_ROWS) return countPieces(listedBoxes(table, q, k, first, last), q, k);
      picture ??= pictureOf(table);
      return picture ? countInPicture(picture, q, k) : unknown(q, k);
    },
    narrow,
    why: (q, k) => whyTable(table, q, k),
  };
}

function listedBoxes({ row, block }, q, k, first, last) {
  const boxes = [];
  const [from, to] = [quotient(k.first, block), quotient(lastOf(k), block)];
  for (let index = first; index <= last; index++) {
    const entries = row(index);
    const queries = clip(q, index * block, (index + 1) * block);
    for (let place = firstAbove(entries, from - 1); place < entries.length && entries[place] <= to; place++) {
      boxes.push({ q: queries, k: clip(k, entries[place] * block, (entries[place] + 1) * block), times: 1 });
    }
  }
  return boxes;
}

/** How many entries lie above and left of each corner of a coarse grid; null for a table too large to look through. */
function pictureOf({ row, height, width, entries, block }) {
  if (entries > MOST_DRAWN) return null;
  const cell = Math.max(1, Math.ceil(Math.max(height, width) / PICTURE_SIDE));
  const side = Math.ceil(Math.max(height, width) / cell) + 1;
  const sums = new Uint32Array(side * side);
  for (let index = 0; index < height; index++) {
    for (const entry of row(index)) sums[(quotient(index, cell) + 1) * side + quotient(entry, cell) + 1]++;
  }
  for (let line = 1; line < side; line++) {
    let total = 0;
    for (let column = 1; column < side; column++) {
      total += sums[line * side + column];
      sums[line * side + column] = total + sums[(line - 1) * side + column];
    }
  }
  return { cell, side, sums, block };
}

function countInPicture({ cell, side, sums, block }, q, k) {
  const tokens = cell * block;
  const ends = (terms) => [quotient(terms.first, tokens), Math.min(quotient(lastOf(terms), tokens) + 1, side - 1)];
  const [[top, bottom], [left, right]] = [ends(q), ends(k)];
  if (top >= bottom || left >= right) return exactly(0);
  const at = (line, column) => sums[line * side + column];
  const listed = at(bottom, right) - at(top, right) - at(bottom, left) + at(top, left);
  const each = Math.ceil(block / q.step) * Math.ceil(block / k.step);
  return { low: 0, high: Math.min(listed * each, q.count * k.count) };
}

function whyTable({ row, height, block, limit, verb }, q, k) {
  const outside = q >= limit ? "query" : k >= limit ? "key" : null;
  if (outside) return `the ${outside} lies beyond the ${plural(limit, "token")} of the table`;
  const [index, column] = [quotient(q, block), quotient(k, block)];
  if (index >= height) return `the table has no row for query block ${grouped(index)}`;
  const entries = [...row(index)];
  const some = entries.slice(0, 8).map(grouped).join(", ") + (entries.length > 8 ? ", …" : "");
  const yes = entries.includes(column) ? "" : ", not this one";
  return `the key is of block ${grouped(column)}; query block ${grouped(index)} ${verb} ${some || "none"}${yes}`;
}
