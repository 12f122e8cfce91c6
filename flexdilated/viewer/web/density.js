// How full each cell of a window is: coarse first, then finer, in slices of time. A cell is a pixel, or one pair where
// pairs are larger than pixels. Its bounds are sound at every moment, and in the end equal, or as good as to the eye.

const ROOT = 16; // cells a side of the squares that are looked at first
const LARGEST_ROOT = 2 ** 25; // tokens a side: products of larger sides would be rounded
const MOST_RUNS = 8; // residue classes that a side of a square may touch before it is split
const MOST_RUNS_OF_CELL = 64;
const EFFORTS = [64, 1024, 8192]; // boxes that a cell's count may take, round by round
const FEW_PAIRS = 16; // that are asked one by one
const AT_A_TIME = 32; // squares between two looks at the clock

class Density {
  /** rows, columns: the slots at which cells begin, and the end of the last. rules: one a branch. */
  constructor(rules, queries, keys, rows, columns) {
    Object.assign(this, { rules, queries, keys, rows, columns });
    this.height = rows.length - 1;
    this.width = columns.length - 1;
    const cells = this.height * this.width;
    // Shares of a cell's pairs. -1 to 2 stand for nothing known yet.
    this.low = rules.map(() => new Float32Array(cells).fill(-1));
    this.high = rules.map(() => new Float32Array(cells).fill(2));
    this.squares = this.roots();
    this.doubtful = rules.map(() => []);
    this.effort = 0;
    this.place = 0;
    this.estimates = 0; // cells that all efforts left in doubt
    this.finished = cells === 0;
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
    let changed = false;
    while (!this.finished && performance.now() < deadline) {
      let times = this.squares.at < this.squares.list.length ? AT_A_TIME : 1; // a cell in doubt may take its time
      while (times-- && !this.finished) this.step();
      changed = true;
    }
    return changed;
  }

  step() {
    const { squares } = this;
    if (squares.at < squares.list.length) {
      this.lookAt(...squares.list.slice(squares.at, squares.at + 4));
      squares.at += 4;
    } else if (squares.next.length) {
      this.squares = { list: squares.next, next: [], at: 0 };
    } else {
      this.settleNext();
    }
  }

  lookAt(branch, top, left, side) {
    const bottom = Math.min(top + side, this.height);
    const right = Math.min(left + side, this.width);
    const box = this.boxOf(top, bottom, left, right);
    const mostRuns = side === 1 ? MOST_RUNS_OF_CELL : MOST_RUNS;
    const bounds = countSlots(this.rules[branch], this.queries, this.keys, box, mostRuns);
    const area = areaOf(box);
    const decided = bounds.high === 0 || bounds.low === area;
    if (decided || side === 1) this.fill(branch, top, bottom, left, right, bounds.low / area, bounds.high / area);
    if (decided) return;
    if (side === 1) {
      if (!isSettled(bounds, area)) this.doubtful[branch].push(top * this.width + left);
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

  boxOf(top, bottom, left, right) {
    return [this.rows[top], this.rows[bottom], this.columns[left], this.columns[right]];
  }

  fill(branch, top, bottom, left, right, low, high) {
    for (let row = top; row < bottom; row++) {
      this.low[branch].fill(low, row * this.width + left, row * this.width + right);
      this.high[branch].fill(high, row * this.width + left, row * this.width + right);
    }
  }

  /** The next cell in doubt, with this round's effort; those that it does not settle come again with more. */
  settleNext() {
    const branch = this.doubtful.findIndex((cells) => this.place < cells.length);
    if (branch < 0) {
      this.nextEffort();
      return;
    }
    const cell = this.doubtful[branch][this.place++];
    this.settle(branch, cell);
    if (this.place === this.doubtful[branch].length) this.endBranch(branch);
  }

  endBranch(branch) {
    this.later ??= this.rules.map(() => []);
    this.later[branch] = this.doubtful[branch].filter((cell) => !this.isSettledCell(branch, cell));
    this.doubtful[branch] = [];
    this.place = 0;
  }

  nextEffort() {
    const later = this.later ?? [];
    this.later = undefined;
    this.place = 0;
    this.effort++;
    const left = later.reduce((total, cells) => total + cells.length, 0);
    if (left && this.effort < EFFORTS.length) {
      this.doubtful = later;
      return;
    }
    this.estimates = left;
    this.finished = true;
  }

  settle(branch, cell) {
    const row = quotient(cell, this.width);
    const column = cell % this.width;
    const box = this.boxOf(row, row + 1, column, column + 1);
    const bounds = countClosely(this.rules[branch], this.queries, this.keys, box, EFFORTS[this.effort]);
    this.fill(branch, row, row + 1, column, column + 1, bounds.low / areaOf(box), bounds.high / areaOf(box));
  }

  isSettledCell(branch, cell) {
    return isSettled({ low: this.low[branch][cell], high: this.high[branch][cell] }, 1);
  }

  /** 0 to 1: how far the work has come, as far as that is known. */
  progress() {
    if (this.finished) return 1;
    const left = this.doubtful.reduce((total, cells) => total + cells.length, 0) - this.place;
    const cells = this.height * this.width * this.rules.length;
    return clamp(1 - (left + (this.squares.list.length - this.squares.at) / 4) / cells, 0, 0.99);
  }
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
