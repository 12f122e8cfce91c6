// How full each cell of a window is, in slices of time. A cell is a pixel, or one pair where pairs are larger than
// pixels. All pairs of small cells are evaluated; of larger ones some are sampled, in rounds, and the page says so.
// Counts of tiles came with the page: where tiles are small on the screen these are drawn, and empty or full ones are
// never looked into.

const COUNTED_SIDE = 8; // tokens: cells up to this side are counted
const SAMPLES = 4; // along each side of a cell, for each round
const ROUNDS = 4;
const SIDE = 256; // positions along each side of the blocks that are evaluated at once
const COUNTED = "counted";
const FAINTEST = 1e-6; // the share of a cell that may hold pairs, but showed none
const UNKNOWN = -2; // a tile's share; -1 where it may hold pairs
const TILE_PIXELS = 8; // tiles up to this side are drawn as they are counted

class Density {
  /** rows, columns: the slots at which cells begin, and the end of the last. grids: of tiles, one a branch or null. */
  constructor({ program, outputs, head, queries, keys, tiles, grids }, rows, columns) {
    Object.assign(this, { program, outputs, head, queries, keys, tiles, grids, rows, columns });
    this.needed = neededFor(program, outputs);
    this.across = Math.ceil(keys.numTokens / tiles.sides[1]);
    [this.rowTiles, this.columnTiles] = [tilesOf(rows, tiles.sides[0]), tilesOf(columns, tiles.sides[1])];
    this.height = rows.length - 1;
    this.width = columns.length - 1;
    this.cells = this.height * this.width;
    this.hits = outputs.map(() => new Uint32Array(this.cells));
    this.share = outputs.map(() => new Float32Array(this.cells).fill(-1)); // what is drawn; -1 for nothing yet
    this.certain = outputs.map(() => new Uint8Array(this.cells));
    this.largest = Math.max(largestStep(rows), largestStep(columns));
    this.counted = this.largest <= COUNTED_SIDE;
    this.each = this.counted ? this.largest : SAMPLES; // positions along a side of a cell
    this.coarse = this.largest * TILE_PIXELS >= Math.max(...tiles.sides) && !this.counted;
    this.rounds = this.counted ? 1 : ROUNDS;
    this.round = 0;
    this.blocks = this.blocksOf(Math.max(1, quotient(SIDE, this.each)));
    this.at = 0;
    this.spent = 0; // milliseconds
    this.finished = this.cells === 0;
  }

  blocksOf(side) {
    const blocks = [];
    for (let top = 0; top < this.height; top += side) {
      for (let left = 0; left < this.width; left += side) {
        blocks.push([top, Math.min(top + side, this.height), left, Math.min(left + side, this.width)]);
      }
    }
    return blocks;
  }

  /** Work until the clock says `deadline`; whether anything changed. */
  work(deadline) {
    const begun = performance.now();
    let [now, changed] = [begun, false];
    while (!this.finished && now < deadline) {
      this.step();
      changed = true;
      now = performance.now();
    }
    this.spent += now - begun;
    return changed;
  }

  /** One block of cells, once. */
  step() {
    const block = this.blocks[this.at++];
    if (this.round === 0) this.readTiles(block);
    if (!this.isCertain(block)) this.look(block);
    if (this.at < this.blocks.length) return;
    this.at = 0;
    this.finished = ++this.round === this.rounds;
  }

  /** Cells that their tiles decide; where a tile may hold pairs, a cell is drawn faintly until one is met. */
  readTiles([top, bottom, left, right]) {
    this.grids.forEach((grid, branch) => {
      if (!grid) return;
      for (let row = top; row < bottom; row++) {
        for (let column = left; column < right; column++) {
          const [cell, found] = [row * this.width + column, this.tileOf(grid, row, column)];
          if (found === 0 || found === 1 || (found > 0 && this.coarse)) this.certain[branch][cell] = 1;
          this.share[branch][cell] = this.certain[branch][cell] ? found : found === UNKNOWN ? 0 : FAINTEST;
        }
      }
    });
  }

  /** The share of pairs in the tiles that a cell touches, on average; else whether something is known of all. */
  tileOf(grid, row, column) {
    const { rowTiles, columnTiles, across } = this;
    let [least, sum, tiles] = [1, 0, 0];
    for (let y = rowTiles.first[row]; y <= rowTiles.last[row]; y++) {
      for (let x = columnTiles.first[column]; x <= columnTiles.last[column]; x++) {
        const tile = grid[y * across + x];
        least = Math.min(least, tile);
        sum += tile;
        tiles++;
      }
    }
    return least < 0 ? least : sum / tiles;
  }

  isCertain([top, bottom, left, right]) {
    for (let row = top; row < bottom; row++) {
      const start = row * this.width;
      if (this.certain.some((flags) => flags.subarray(start + left, start + right).includes(0))) return false;
    }
    return true;
  }

  /** Evaluate the pairs of a block that are this round's. */
  look(block) {
    const [top, bottom, left, right] = block;
    const rows = this.positions(this.queries, this.rows, top, bottom);
    const columns = this.positions(this.keys, this.columns, left, right);
    const { program, outputs, needed, head } = this;
    const found = evaluate(program, outputs, needed, head, rows.positions, columns.positions);
    found.forEach((allowed, branch) => {
      const hits = this.hits[branch];
      for (let i = 0, pair = 0; i < rows.cells.length; i++) {
        const start = rows.cells[i] * this.width;
        for (let j = 0; j < columns.cells.length; j++) hits[start + columns.cells[j]] += allowed[pair++];
      }
      this.learn(branch, block);
    });
  }

  learn(branch, [top, bottom, left, right]) {
    const [certain, shares, hits] = [this.certain[branch], this.share[branch], this.hits[branch]];
    for (let row = top; row < bottom; row++) {
      for (let column = left; column < right; column++) {
        const cell = row * this.width + column;
        if (certain[cell]) continue;
        // No hit is no proof: where a tile may hold pairs, a cell stays as faint as can be seen.
        const least = this.counted ? 0 : Math.min(Math.max(shares[cell], 0), FAINTEST);
        shares[cell] = hits[cell] / this.asked(row, column, this.round + 1) || least;
        if (this.counted) certain[cell] = 1;
      }
    }
  }

  /** How many pairs of a cell were evaluated after so many rounds. */
  asked(row, column, rounds = Math.max(1, this.round)) {
    if (!this.counted) return rounds * SAMPLES ** 2;
    return (this.rows[row + 1] - this.rows[row]) * (this.columns[column + 1] - this.columns[column]);
  }

  /** Positions of the cells [from, to) along one side, and the cell of each. */
  positions(order, edges, from, to) {
    const [positions, cells] = [[], []];
    for (let cell = from; cell < to; cell++) {
      const [start, length] = [edges[cell], edges[cell + 1] - edges[cell]];
      const number = this.counted ? length : SAMPLES;
      for (let index = 0; index < number; index++) {
        const random = this.counted ? 0 : randomPart(start, index + SAMPLES * this.round);
        positions.push(order.position(start + Math.floor(((index + random) * length) / number)));
        cells.push(cell);
      }
    }
    return { positions: Float64Array.from(positions), cells: Int32Array.from(cells) };
  }

  isDrawn() {
    return this.finished || this.round > 0;
  }

  /** How many cells of all branches are a sample. */
  sampled() {
    return this.certain.reduce((total, flags) => flags.reduce((count, flag) => count + 1 - flag, total), 0);
  }
}

function largestStep(edges) {
  let largest = 0;
  for (let at = 1; at < edges.length; at++) largest = Math.max(largest, edges[at] - edges[at - 1]);
  return largest;
}

/** The first and the last tile that each cell touches. */
function tilesOf(edges, side) {
  const cells = Int32Array.from({ length: edges.length - 1 }, (_, cell) => cell);
  return {
    first: cells.map((cell) => quotient(edges[cell], side)),
    last: cells.map((cell) => quotient(edges[cell + 1] - 1, side)),
  };
}

/** A number in [0, 1) that belongs to these two: mixed as in the finalizer of MurmurHash3. */
function randomPart(start, index) {
  let mixed = Math.imul(start, 0x9e3779b1) ^ Math.imul(index + 1, 0x85ebca77);
  mixed = Math.imul(mixed ^ (mixed >>> 16), 0x85ebca6b);
  mixed = Math.imul(mixed ^ (mixed >>> 13), 0xc2b2ae35);
  return ((mixed ^ (mixed >>> 16)) >>> 0) / 2 ** 32;
}

/** How far a picture has come: what is drawn of it, then what is a sample. 0 % and 100 % mean none and all. */
function workText(density) {
  if (!density.isDrawn()) return `${Math.floor((100 * density.at) / density.blocks.length)} % drawn`;
  if (density.counted) return COUNTED;
  density.samples ??= density.sampled(); // known after the first round
  if (!density.samples) return COUNTED;
  const all = density.cells * density.outputs.length;
  return `≈ ${Math.ceil((100 * density.samples) / all)} % sampled`;
}
