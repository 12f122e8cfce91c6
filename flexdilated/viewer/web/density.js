// How full each cell of a window is: coarse first, then finer, in slices of time. A cell is a pixel, or one pair where
// pairs are larger than pixels. Its bounds are sound at every moment, and in the end equal, or as good as to the eye.
// What takes longer than a moment to count is drawn as an estimate first.

const ROOT = 16; // cells a side of the squares that are looked at first
const LARGEST_ROOT = 2 ** 25; // tokens a side: products of larger sides would be rounded
const MOST_RUNS = 8; // residue classes that a side of a square may touch before it is split
const MOST_RUNS_OF_CELL = 64;
const FEW_PAIRS = 16; // that are asked one by one
const AT_A_TIME = 32; // squares or cells between two looks at the clock
const MOMENT = 700; // milliseconds of counting before all cells that wait are estimated
const FIRST_PAIRS = 16; // of an estimate
// Round by round, the pairs of a better estimate, and the boxes that a cell's count may take.
const ROUNDS = [
  { pairs: 144, boxes: 1 },
  { pairs: 144, boxes: 64 },
  { pairs: 144, boxes: 1024 },
  { pairs: 1024, boxes: 8192 },
];

class Density {
  /** rows, columns: the slots at which cells begin, and the end of the last. rules: one a branch. */
  constructor(rules, queries, keys, rows, columns) {
    Object.assign(this, { rules, queries, keys, rows, columns });
    this.height = rows.length - 1;
    this.width = columns.length - 1;
    this.cells = this.height * this.width;
    // Shares of a cell's pairs. -1 to 2 stand for nothing known yet.
    this.low = rules.map(() => new Float32Array(this.cells).fill(-1));
    this.high = rules.map(() => new Float32Array(this.cells).fill(2));
    this.share = rules.map(() => new Float32Array(this.cells).fill(-1)); // what is drawn; -1 for nothing yet
    this.estimates = new Estimates(this.cells, rules.length);
    this.drawn = 0; // how many cells of all branches have a share
    this.certain = 0; // how many of these are no estimate
    this.squares = this.roots();
    this.spent = 0; // milliseconds
    this.ahead = 0; // cells that were looked at to be estimated
    this.doubtful = rules.map(() => []);
    this.later = rules.map(() => []);
    this.round = 0;
    this.place = 0;
    this.finished = this.cells === 0;
  }

  roots() {
    const cell = (this.rows[this.height] - this.rows[0]) / Math.max(1, this.height);
    let side = ROOT;
    while (side > 1 && side * cell > LARGEST_ROOT) side /= 2;
    const squares = [];
    for (let top = 0; top < this.height; top += side) {
      for (let left = 0; left < this.width; left += side) {
        for (let branch = 0; branch < this.rules.length; branch++) squares.push(branch, top, left, side);
      }
    }
    return { list: squares, next: [], at: 0 };
  }

  /** Work until the clock says `deadline`; whether anything changed. */
  work(deadline) {
    const begun = performance.now();
    let [now, changed] = [begun, false];
    while (!this.finished && now < deadline) {
      this.step(this.spent + now - begun);
      changed = true;
      now = performance.now();
    }
    this.spent += now - begun;
    return changed;
  }

  step(spent) {
    const waiting = this.squares.at < this.squares.list.length || this.squares.next.length > 0;
    if (waiting && spent > MOMENT && this.ahead < this.cells) this.estimateAhead();
    else if (waiting) this.lookAtSome();
    else this.settleNext(); // a cell in doubt may take its time
  }

  lookAtSome() {
    if (this.squares.at === this.squares.list.length) this.squares = { list: this.squares.next, next: [], at: 0 };
    const { list } = this.squares;
    const end = Math.min(this.squares.at + 4 * AT_A_TIME, list.length);
    for (let at = this.squares.at; at < end; at += 4) this.lookAt(list[at], list[at + 1], list[at + 2], list[at + 3]);
    this.squares.at = end;
  }

  /** Some of the cells that no square decided yet, spread over the picture. */
  estimateAhead() {
    const stride = strideThrough(this.cells);
    const end = Math.min(this.ahead + AT_A_TIME, this.cells);
    for (; this.ahead < end; this.ahead++) {
      const cell = (this.ahead * stride) % this.cells;
      for (let branch = 0; branch < this.rules.length; branch++) {
        if (this.share[branch][cell] < 0) this.estimate(branch, cell, FIRST_PAIRS);
      }
    }
  }

  lookAt(branch, top, left, side) {
    const bottom = Math.min(top + side, this.height);
    const right = Math.min(left + side, this.width);
    const box = [this.rows[top], this.rows[bottom], this.columns[left], this.columns[right]];
    const mostRuns = side === 1 ? MOST_RUNS_OF_CELL : MOST_RUNS;
    const bounds = countSlots(this.rules[branch], this.queries, this.keys, box, mostRuns);
    const area = areaOf(box);
    if (side === 1) {
      this.learn(branch, top * this.width + left, bounds, area, FIRST_PAIRS);
      if (!isSettled(bounds, area)) this.doubtful[branch].push(top * this.width + left);
      return;
    }
    if (bounds.high === 0 || bounds.low === area) {
      this.learnSquare(branch, top, bottom, left, right, bounds, area);
      return;
    }
    const half = side / 2;
    for (const row of [top, top + half]) {
      if (row >= this.height) continue;
      for (const column of [left, left + half]) {
        if (column < this.width) this.squares.next.push(branch, row, column, half);
      }
    }
  }

  learnSquare(branch, top, bottom, left, right, bounds, area) {
    for (let row = top; row < bottom; row++) {
      const start = row * this.width;
      for (let cell = start + left; cell < start + right; cell++) this.learn(branch, cell, bounds, area, 0);
    }
  }

  boxOf(cell) {
    const [row, column] = [quotient(cell, this.width), cell % this.width];
    return [this.rows[row], this.rows[row + 1], this.columns[column], this.columns[column + 1]];
  }

  /** Bounds that were unknown or wider; where they leave doubt, an estimate by so many pairs stands between them. */
  learn(branch, cell, bounds, area, pairs) {
    this.low[branch][cell] = bounds.low / area;
    this.high[branch][cell] = bounds.high / area;
    if (!isSettled(bounds, area)) return this.estimate(branch, cell, pairs);
    this.certain++;
    this.draw(branch, cell, (bounds.low + bounds.high) / (2 * area));
  }

  estimate(branch, cell, pairs) {
    const { rules, queries, keys, estimates } = this;
    estimates.ask(branch, cell, rules[branch], queries, keys, this.boxOf(cell), pairs);
    this.draw(branch, cell, estimates.shareOf(branch, cell, this.low[branch][cell], this.high[branch][cell]));
  }

  draw(branch, cell, share) {
    if (this.share[branch][cell] < 0) this.drawn++;
    this.share[branch][cell] = share;
  }

  /** The next cell in doubt, with this round's effort; those that it does not settle come again with more. */
  settleNext() {
    const branch = this.doubtful.findIndex((cells) => this.place < cells.length);
    if (branch < 0) {
      this.nextRound();
      return;
    }
    const cell = this.doubtful[branch][this.place++];
    if (!this.settle(branch, cell)) this.later[branch].push(cell);
    if (this.place < this.doubtful[branch].length) return;
    this.doubtful[branch] = [];
    this.place = 0;
  }

  nextRound() {
    this.round++;
    this.finished = this.round === ROUNDS.length || this.later.every((cells) => !cells.length);
    if (!this.finished) this.doubtful = this.later;
    this.later = this.rules.map(() => []);
  }

  settle(branch, cell) {
    const { pairs, boxes } = ROUNDS[this.round];
    const box = this.boxOf(cell);
    if (boxes === 1) this.estimate(branch, cell, pairs);
    if (boxes === 1) return false;
    const bounds = countClosely(this.rules[branch], this.queries, this.keys, box, boxes);
    this.learn(branch, cell, bounds, areaOf(box), pairs);
    return isSettled(bounds, areaOf(box));
  }

  isDrawn() {
    return this.drawn === this.cells * this.rules.length;
  }
}

/** A step that leads through all of so many cells, each far from the one before. */
function strideThrough(cells) {
  let stride = Math.round(cells * 0.618);
  while (greatestDivisor(stride, cells) > 1) stride++;
  return stride;
}

function areaOf([top, bottom, left, right]) {
  return (bottom - top) * (right - left);
}

/** Whether a closer count would look the same. What is settled is known to hold something, or nothing. */
function isSettled({ low, high }, area) {
  if (low === high) return true;
  return low > 0 && shadeOf(high / area) - shadeOf(low / area) < 1 / 128;
}

/** Bounds over a box of slots: the sum over the residue classes that it touches. */
function countSlots(rule, queryOrder, keyOrder, [top, bottom, left, right], mostRuns) {
  const area = (bottom - top) * (right - left);
  if (area === 1) return exactly(rule.allowed(queryOrder.position(top), keyOrder.position(left)) ? 1 : 0);
  const [rows, columns] = [queryOrder.runs(top, bottom, mostRuns), keyOrder.runs(left, right, mostRuns)];
  if (!rows || !columns) return { low: 0, high: area };
  let total = exactly(0);
  for (const row of rows) for (const column of columns) total = sumOf(total, rule.count(row, column));
  return total;
}

/** Split what is in doubt until the sum looks settled, or so many boxes were counted. */
function countClosely(rule, queryOrder, keyOrder, whole, effort) {
  const area = areaOf(whole);
  const total = countSlots(rule, queryOrder, keyOrder, whole, MOST_RUNS_OF_CELL);
  const boxes = [{ box: whole, bounds: { ...total } }];
  for (let at = 0; at < boxes.length && boxes.length < effort && !isSettled(total, area); at++) {
    const { box, bounds } = boxes[at];
    total.low -= bounds.low;
    total.high -= bounds.high;
    for (const part of partsOf(box, queryOrder, keyOrder)) {
      const found = areaOf(part) <= FEW_PAIRS ? countOneByOne(rule, queryOrder, keyOrder, part)
        : countSlots(rule, queryOrder, keyOrder, part, MOST_RUNS_OF_CELL);
      total.low += found.low;
      total.high += found.high;
      if (found.low < found.high) boxes.push({ box: part, bounds: found });
    }
  }
  return total;
}

/** Four quarters, or two halves of what is one slot high or wide. */
function partsOf([top, bottom, left, right], queryOrder, keyOrder) {
  const rows = bottom - top > 1 ? [top, queryOrder.middle(top, bottom), bottom] : [top, bottom];
  const columns = right - left > 1 ? [left, keyOrder.middle(left, right), right] : [left, right];
  const parts = [];
  for (let row = 1; row < rows.length; row++) {
    for (let column = 1; column < columns.length; column++) {
      parts.push([rows[row - 1], rows[row], columns[column - 1], columns[column]]);
    }
  }
  return parts;
}

function countOneByOne(rule, queryOrder, keyOrder, [top, bottom, left, right]) {
  let pairs = 0;
  for (let row = top; row < bottom; row++) {
    const q = queryOrder.position(row);
    for (let column = left; column < right; column++) if (rule.allowed(q, keyOrder.position(column))) pairs++;
  }
  return exactly(pairs);
}
