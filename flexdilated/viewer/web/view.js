// The part of the matrix that is shown, the order of tokens, and numbers as text. Positions reach 2^31 and pairs 2^53:
// doubles hold them exactly, `|` and `>>` do not.

const LARGEST_PAIR = 64; // pixels a side

const quotient = (a, b) => Math.floor(a / b);
const clamp = (value, least, most) => Math.min(Math.max(value, least), most);
const grouped = (number) => number.toLocaleString("en-US");
const plural = (number, word) => `${grouped(number)} ${word}${number === 1 ? "" : "s"}`;
const steps = (start, stop) => Array.from({ length: stop - start }, (_, index) => start + index);

/** Tokens in the largest unit that divides `step`: M of 1,048,576, K of 1,024 or 1. */
function shortTokens(number, step = number) {
  const [unit, name] = [[1048576, "M"], [1024, "K"], [1, ""]].find(([size]) => step % size === 0);
  return number ? `${grouped(number / unit)}${name}` : "0";
}

/** A share of all pairs: in percent, or as 1 in n below 0.1 %; above 1 in a mixture. */
function shareText(share) {
  if (share > 1) return `${Number(share.toPrecision(3))} times all`;
  if (share === 1) return "all";
  if (share >= 0.001) return `${Number((100 * share).toPrecision(3))} %`;
  return share ? `1 in ${grouped(Math.round(1 / share))}` : "none";
}

/**
 * Positions of slots. Residue-major order of rate R sorts positions by (position mod R, position div R); rate 1 is the
 * natural order. `starts` are the first slots of the residue classes.
 */
function orderOf(numTokens, rate) {
  const each = quotient(numTokens, rate);
  const longer = numTokens % rate; // number of residue classes, the first ones, with one token more
  const border = longer * (each + 1);
  const startOf = (residue) => residue * each + Math.min(residue, longer);
  const classOf = (slot) =>
    slot < border ? quotient(slot, each + 1) : longer + quotient(slot - border, Math.max(each, 1));
  return {
    numTokens,
    rate,
    position: (slot) => classOf(slot) + rate * (slot - startOf(classOf(slot))),
    slot: (position) => startOf(position % rate) + quotient(position, rate),
    starts: () => steps(0, Math.min(rate, numTokens)).map(startOf),
  };
}

/** {q, k} is the slot at the top left corner of the picture, `scale` the tokens of one pixel. */
class View {
  constructor(numQueries, numKeys) {
    Object.assign(this, { numQueries, numKeys, q: 0, k: 0, scale: 1, width: 1, height: 1 });
  }

  /** The scale at which the whole matrix is shown. */
  get wholeScale() {
    return Math.max(this.numQueries / this.height, this.numKeys / this.width, 1 / LARGEST_PAIR);
  }

  /** Move to these slots and this scale; along an axis where the matrix is smaller than the view, it is centred. */
  show(q, k, scale = this.scale) {
    this.scale = clamp(scale, 1 / LARGEST_PAIR, this.wholeScale);
    const inside = (start, tokens, seen) => (seen >= tokens ? (tokens - seen) / 2 : clamp(start, 0, tokens - seen));
    this.q = inside(q, this.numQueries, this.height * this.scale);
    this.k = inside(k, this.numKeys, this.width * this.scale);
  }

  showWhole() {
    this.show(0, 0, this.wholeScale);
  }

  /** Zoom in by a factor above 1, or out; the slots under pixel (x, y) keep their place. */
  zoomAt(factor, x, y) {
    const scale = clamp(this.scale / factor, 1 / LARGEST_PAIR, this.wholeScale);
    this.show(this.q + y * (this.scale - scale), this.k + x * (this.scale - scale), scale);
  }

  panBy(x, y) {
    this.show(this.q + y * this.scale, this.k + x * this.scale);
  }

  centreOn({ q, k }, scale = this.scale) {
    const within = clamp(scale, 1 / LARGEST_PAIR, this.wholeScale);
    this.show(q + 0.5 - (this.height * within) / 2, k + 0.5 - (this.width * within) / 2, within);
  }

  /** The pixel of a slot's corner. */
  pixelOf({ q, k }) {
    return [(k - this.k) / this.scale, (q - this.q) / this.scale];
  }

  /** The slots under a pixel, or null outside the matrix. */
  slotsAt(x, y) {
    const [q, k] = [Math.floor(this.q + y * this.scale), Math.floor(this.k + x * this.scale)];
    return Math.min(x, y, q, k) >= 0 && q < this.numQueries && k < this.numKeys ? { q, k } : null;
  }
}

/** First slots of the cells along one axis, and the end of the last; cells are pixels, or tokens if larger. */
function cellEdges(start, scale, pixels, tokens) {
  const end = Math.min(tokens, Math.ceil(start + pixels * scale));
  if (scale <= 1) return Float64Array.from(steps(Math.max(0, Math.floor(start)), end + 1));
  const origin = Math.max(0, start);
  const count = Math.min(pixels, Math.ceil((end - origin) / scale));
  const edges = Float64Array.from(steps(0, count + 1), (index) => Math.min(end, Math.floor(origin + index * scale)));
  // Rounding may leave the last pixel without slots.
  return edges.length > 1 && edges[count] === edges[count - 1] ? edges.subarray(0, count) : edges;
}

/** The view as the part of the address after #. `span`: tokens along the shorter side, for screens of any size. */
function linkOf({ view, head, order, block }) {
  const tidy = (number) => String(Number(number.toFixed(view.scale < 1 ? 2 : 0)));
  const place = { q: tidy(view.q), k: tidy(view.k), span: tidy(view.scale * Math.min(view.width, view.height)) };
  return Object.entries({ ...place, head, order, block }).map(([name, value]) => `${name}=${value}`).join("&");
}

/** Set the state from a link; values that are out of range or undefined are ignored. */
function followLink(text, state) {
  const { data, view } = state;
  const values = new URLSearchParams(text.replace(/^#/, ""));
  const number = (name, least, most) => {
    const value = values.has(name) ? Number(values.get(name)) : NaN;
    return value >= least && value <= most ? value : null;
  };
  state.head = Math.floor(number("head", 0, data.num_heads - 1) ?? state.head);
  state.block = Math.floor(number("block", 0, 2 ** 31) ?? state.block);
  const order = values.get("order");
  if (order === "natural" || (order === "residue" && data.residue)) state.order = order;
  view.showWhole();
  const span = number("span", 2 ** -10, 2 ** 32);
  const [q, k] = ["q", "k"].map((name) => number(name, -(2 ** 32), 2 ** 32) ?? 0);
  if (span !== null) view.show(q, k, span / Math.min(view.width, view.height));
}
