// Token grids in row-major order: progressions of positions as rectangles of coordinates, one progression an axis.

/** Whether progressions of this step fall into rectangles: it goes through rows evenly, or over whole rows. */
function fitsGrid(step, grid) {
  const inner = grid.at(-1);
  if (grid.length === 1 || inner % step === 0) return true;
  return step % inner === 0 && fitsGrid(step / inner, grid.slice(0, -1));
}

/** Rectangles whose terms together are those of the progression, of a step that fits. */
function rectanglesOf(terms, grid) {
  if (!terms.count) return [];
  if (grid.length === 1) return [[terms]];
  const outer = grid.slice(0, -1);
  const inner = grid.at(-1);
  const { first, step, count } = terms;
  if (inner % step) {
    const rows = rectanglesOf(progression(quotient(first, inner), step / inner, count), outer);
    return rows.map((each) => [...each, progression(first % inner, 1, 1)]);
  }
  return inRows(first, step, count, inner, outer);
}

/** How many rows a progression reaches across. */
function rowsOf(terms, grid) {
  return quotient(lastOf(terms), grid.at(-1)) - quotient(terms.first, grid.at(-1)) + 1;
}

/** A progression of any step: what it has in each row, a few rows long. */
function rowByRow(terms, grid) {
  const [inner, outer] = [grid.at(-1), grid.slice(0, -1)];
  const first = quotient(terms.first, inner);
  const rows = Array.from({ length: rowsOf(terms, grid) }, (_, index) => first + index);
  const inRow = (row) => movedDown(clip(terms, row * inner, (row + 1) * inner), row * inner);
  const found = rows.map((row) => [...coordinatesOf(row, outer), inRow(row)]);
  return found.filter((sides) => sides.at(-1).count);
}

/** A row-major run is the rest of a row, whole rows, and the beginning of another row. */
function inRows(first, step, count, inner, outer) {
  const [width, phase] = [inner / step, first % step];
  const [begin, end] = [quotient(first, step), quotient(first, step) + count];
  const wholeFrom = Math.min(Math.ceil(begin / width) * width, end);
  const wholeTo = Math.max(quotient(end, width) * width, wholeFrom);
  const found = [];
  for (const [start, stop] of [[begin, wholeFrom], [wholeTo, end]]) {
    if (start >= stop) continue;
    const place = progression(phase + step * (start % width), step, stop - start);
    found.push([...coordinatesOf(quotient(start, width), outer), place]);
  }
  const rows = progression(quotient(wholeFrom, width), 1, quotient(wholeTo - wholeFrom, width));
  for (const each of rectanglesOf(rows, outer)) found.push([...each, progression(phase, step, width)]);
  return found;
}

/** One row's coordinates along the outer axes; beyond the grid they go on along the outermost. */
function coordinatesOf(row, outer) {
  return stridesOf(outer).map((stride, axis) => {
    const coordinate = quotient(row, stride);
    return progression(axis ? coordinate % outer[axis] : coordinate, 1, 1);
  });
}

/** Tokens from one place along each axis to the next. */
function stridesOf(grid) {
  return grid.map((_, axis) => grid.slice(axis + 1).reduce((product, length) => product * length, 1));
}
