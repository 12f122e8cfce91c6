// The share of allowed pairs in each cell of a window, computed in slices of time. A cell is a pixel, or one pair if
// pairs are larger than pixels. All pairs of small cells are evaluated; larger cells are sampled in rounds, which the
// page says. The page has shares of tiles: cells use them if tiles are small on the screen, or are empty or full.

const COUNTED_SIDE = 8; // tokens; all pairs of cells up to this side are evaluated
const SAMPLES = 4; // positions along each side of a cell in each round
const ROUNDS = 4;
const PAIRS = 2 ** 16; // number of pairs evaluated at once
const FAINTEST = 1e-6; // share drawn for a cell that may have allowed pairs, if none was found
const UNKNOWN = -2; // share of a tile without bounds; -1 for a tile with bounds but without a count
const TILE_PIXELS = 8; // the shares of tiles up to this side are drawn

class Density {
  /** rows, columns: first slots of the cells, and the end of the last. grids: shares of tiles, or null, by branch. */
  constructor({ program, outputs, head, queries, keys, tiles, grids }, rows, columns) {
    Object.assign(this, { program, outputs, head, queries, keys, tiles, grids, rows, columns });
    this.needed = neededFor(program, outputs);
    [this.height, this.width] = [rows.length - 1, columns.length - 1];
    this.cells = this.height * this.width;
    this.share = outputs.map(() => new Float32Array(this.cells).fill(-1)); // the drawn shares; -1 before the first
    this.hits = outputs.map(() => new Uint32Array(this.cells));
    this.certain = outputs.map(() => new Uint8Array(this.cells)); // 1 if the share is not an estimate
    const largest = Math.max(...[rows, columns].map((edges) =>
      edges.reduce((most, edge, at) => (at ? Math.max(most, edge - edges[at - 1]) : 0), 0)));
    this.counted = largest <= COUNTED_SIDE;
    this.coarse = largest * TILE_PIXELS >= Math.max(...tiles.sides) && !this.counted;
    const each = this.counted ? largest : SAMPLES; // positions along a side of a cell
    this.high = Math.max(1, quotient(PAIRS, each ** 2 * this.width)); // number of rows of cells evaluated at once
    [this.round, this.top, this.finished] = [0, 0, this.cells === 0];
  }

  get isDrawn() {
    return this.finished || this.round > 0;
  }

  work(deadline) {
    while (!this.finished && performance.now() < deadline) this.step();
  }

  /** Evaluate the next rows of cells in this round. */
  step() {
    const rows = steps(this.top, Math.min(this.top + this.high, this.height));
    if (this.round === 0) this.readTiles(rows);
    this.look(rows);
    this.top += rows.length;
    if (this.top < this.height) return;
    this.top = 0;
    this.finished = ++this.round === (this.counted ? 1 : ROUNDS);
  }

  /** Set shares from tiles; a cell that these do not decide is faint if they say that it may have allowed pairs. */
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

  /** Mean share of the tiles that overlap a cell; the least (-1 or -2) if one of them has no count. */
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

  /** Evaluate this round's pairs of the cells in these rows whose shares are not certain, and update the shares. */
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
          // A sample without an allowed pair is no proof: if a tile may have allowed pairs, the cell stays faint.
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

  /** Number of pairs of a cell that are evaluated in `rounds` rounds. */
  asked(row, column, rounds = Math.max(1, this.round)) {
    if (!this.counted) return rounds * SAMPLES ** 2;
    return (this.rows[row + 1] - this.rows[row]) * (this.columns[column + 1] - this.columns[column]);
  }

  /** Positions that this round evaluates in the chosen cells along one side, and the cell of each position. */
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

  /** Text: progress of the first round, then the share of sampled cells, rounded up. */
  get progress() {
    if (!this.isDrawn) return `${Math.floor((100 * this.top) / this.height)} % drawn`;
    this.samples ??= this.counted ? 0 : steps(0, this.cells).filter((cell) => !this.isCertain(cell)).length;
    if (!this.samples) return "counted";
    const percent = Math.ceil((100 * this.samples) / this.cells);
    return `≈ ${percent} % sampled from ${grouped(this.asked(0, 0))} pairs a pixel`;
  }
}

/** Pseudo-random number in [0, 1), a hash of two integers, mixed as in the finalizer of MurmurHash3. */
function randomPart(start, index) {
  let mixed = Math.imul(start, 0x9e3779b1) ^ Math.imul(index + 1, 0x85ebca77);
  mixed = Math.imul(mixed ^ (mixed >>> 16), 0x85ebca6b);
  mixed = Math.imul(mixed ^ (mixed >>> 13), 0xc2b2ae35);
  return ((mixed ^ (mixed >>> 16)) >>> 0) / 2 ** 32;
}
