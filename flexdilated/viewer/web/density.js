// The share of allowed pairs in each cell of a window, in slices of time. A cell is a pixel, or one pair where pairs are
// larger. All pairs of small cells are evaluated; larger cells are sampled in rounds, and the page says so. Counts of
// tiles came with the page: where tiles are small on the screen these are drawn, and empty or full tiles are not sampled.

const COUNTED_SIDE = 8; // tokens: cells up to this side are counted
const SAMPLES = 4; // along each side of a cell, for each round
const ROUNDS = 4;
const PAIRS = 2 ** 16; // evaluated at once
const FAINTEST = 1e-6; // the share of a cell that may hold pairs, but showed none
const UNKNOWN = -2; // a tile's share; -1 where it may hold pairs
const TILE_PIXELS = 8; // tiles up to this side are drawn as they are counted

class Density {
  /** rows, columns: the slots at which cells begin, and the end of the last. grids: of tiles, one a branch or null. */
  constructor({ program, outputs, head, queries, keys, tiles, grids }, rows, columns) {
    Object.assign(this, { program, outputs, head, queries, keys, tiles, grids, rows, columns });
    this.needed = neededFor(program, outputs);
    [this.height, this.width] = [rows.length - 1, columns.length - 1];
    this.cells = this.height * this.width;
    this.share = outputs.map(() => new Float32Array(this.cells).fill(-1)); // what is drawn; -1 for nothing yet
    this.hits = outputs.map(() => new Uint32Array(this.cells));
    this.certain = outputs.map(() => new Uint8Array(this.cells)); // 1 where the share is counted
    const largest = Math.max(...[rows, columns].map((edges) =>
      edges.reduce((most, edge, at) => (at ? Math.max(most, edge - edges[at - 1]) : 0), 0)));
    this.counted = largest <= COUNTED_SIDE;
    this.coarse = largest * TILE_PIXELS >= Math.max(...tiles.sides) && !this.counted;
    const each = this.counted ? largest : SAMPLES; // positions along a side of a cell
    this.high = Math.max(1, quotient(PAIRS, each ** 2 * this.width)); // rows of cells at once
    [this.round, this.top, this.finished] = [0, 0, this.cells === 0];
  }

  get isDrawn() {
    return this.finished || this.round > 0;
  }

  work(deadline) {
    while (!this.finished && performance.now() < deadline) this.step();
  }

  /** Count some rows of cells in this round. */
  step() {
    const rows = steps(this.top, Math.min(this.top + this.high, this.height));
    if (this.round === 0) this.readTiles(rows);
    this.look(rows);
    this.top += rows.length;
    if (this.top < this.height) return;
    this.top = 0;
    this.finished = ++this.round === (this.counted ? 1 : ROUNDS);
  }

  /** Draw cells that their tiles decide; where a tile may hold pairs, a cell is faint until one is found. */
  readTiles(rows) {
    const known = (found) => found === 0 || found === 1 || (found > 0 && this.coarse);
    for (const row of rows) {
      for (let column = 0, cell = row * this.width; column < this.width; column++, cell++) {
        this.grids.forEach((grid, branch) => {
          const found = grid ? this.tileOf(grid, row, column) : UNKNOWN;
          this.certain[branch][cell] = Number(known(found));
          this.share[branch][cell] = known(found) ? found : found === UNKNOWN ? 0 : FAINTEST;
        });
      }
    }
  }

  /** The mean share of the tiles that a cell touches; the least of them where some are not counted. */
  tileOf(grid, row, column) {
    const { rows, columns, tiles, keys } = this;
    const [high, wide] = tiles.sides;
    const [bottom, right] = [quotient(rows[row + 1] - 1, high), quotient(columns[column + 1] - 1, wide)];
    let [least, sum, number] = [1, 0, 0];
    for (let y = quotient(rows[row], high); y <= bottom; y++) {
      for (let x = quotient(columns[column], wide); x <= right; x++, number++) {
        const tile = grid[y * Math.ceil(keys.numTokens / wide) + x];
        least = Math.min(least, tile);
        sum += tile;
      }
    }
    return least < 0 ? least : sum / number;
  }

  /** Evaluate this round's pairs of the cells that are not certain yet. */
  look(rows) {
    const { program, outputs, needed, head, width } = this;
    const open = steps(0, width).filter((column) => rows.some((row) => !this.isCertain(row * width + column)));
    if (!open.length) return;
    const queries = this.positions(this.queries, this.rows, rows);
    const keys = this.positions(this.keys, this.columns, open);
    const found = evaluate(program, outputs, needed, head, queries.positions, keys.positions);
    found.forEach((allowed, branch) => {
      const [hits, shares, certain] = [this.hits[branch], this.share[branch], this.certain[branch]];
      let pair = 0;
      for (const row of queries.cells) for (const column of keys.cells) hits[row * width + column] += allowed[pair++];
      for (const row of rows) {
        for (const column of open) {
          const cell = row * width + column;
          if (certain[cell]) continue;
          // A sample without a hit is no proof: where a tile may hold pairs, the cell stays as faint as can be seen.
          const least = this.counted ? 0 : Math.min(shares[cell], FAINTEST);
          shares[cell] = hits[cell] / this.asked(row, column, this.round + 1) || least;
          certain[cell] = Number(this.counted);
        }
      }
    });
  }

  isCertain(cell) {
    return this.certain.every((flags) => flags[cell]);
  }

  /** Number of pairs of a cell that are evaluated in this number of rounds. */
  asked(row, column, rounds = Math.max(1, this.round)) {
    if (!this.counted) return rounds * SAMPLES ** 2;
    return (this.rows[row + 1] - this.rows[row]) * (this.columns[column + 1] - this.columns[column]);
  }

  /** This round's positions of some cells along one side, and the cell of each. */
  positions(order, edges, chosen) {
    const [positions, cells] = [[], []];
    for (const cell of chosen) {
      const [start, length] = [edges[cell], edges[cell + 1] - edges[cell]];
      const number = this.counted ? length : SAMPLES;
      for (let index = 0; index < number; index++) {
        const random = this.counted ? 0 : randomPart(start, index + SAMPLES * this.round);
        positions.push(order.position(start + Math.floor(((index + random) * length) / number)));
        cells.push(cell);
      }
    }
    return { positions: Float64Array.from(positions), cells };
  }

  /** Progress of the picture, then the share of cells that are sampled; 0 % and 100 % mean none and all. */
  get progress() {
    if (!this.isDrawn) return `${Math.floor((100 * this.top) / this.height)} % drawn`;
    this.samples ??= this.counted ? 0 : steps(0, this.cells).filter((cell) => !this.isCertain(cell)).length;
    if (!this.samples) return "counted";
    const percent = Math.ceil((100 * this.samples) / this.cells);
    return `≈ ${percent} % sampled from ${grouped(this.asked(0, 0))} pairs a pixel`;
  }
}

/** A number in [0, 1) that is a function of these two: mixed as in the finalizer of MurmurHash3. */
function randomPart(start, index) {
  let mixed = Math.imul(start, 0x9e3779b1) ^ Math.imul(index + 1, 0x85ebca77);
  mixed = Math.imul(mixed ^ (mixed >>> 16), 0x85ebca6b);
  mixed = Math.imul(mixed ^ (mixed >>> 13), 0xc2b2ae35);
  return ((mixed ^ (mixed >>> 16)) >>> 0) / 2 ** 32;
}
