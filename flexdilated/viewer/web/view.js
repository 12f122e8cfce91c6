// What part of the matrix is seen, in which order of tokens; and numbers as people read them. Positions reach 2^31 and
// pairs 2^53: doubles hold them exactly, `|` and `>>` do not.

const LARGEST_PAIR = 64; // pixels a side

const quotient = (a, b) => Math.floor(a / b);
const clamp = (value, least, most) => Math.min(Math.max(value, least), most);
const grouped = (number) => number.toLocaleString("en-US");
const plural = (number, word) => `${grouped(number)} ${word}${number === 1 ? "" : "s"}`;

/** Tokens in the largest unit that divides `step`: M of 1,048,576, K of 1,024 or 1, as everywhere in the library. */
function shortTokens(number, step = number) {
  const [unit, name] = [[1048576, "M"], [1024, "K"], [1, ""]].find(([size]) => step % size === 0);
  return number ? `${grouped(number / unit)}${name}` : "0";
}

/** A share of all pairs: percent, or one in so many where percent would be a row of zeros; above 1 in a mixture. */
function shareText(share) {
  if (share > 1) return `${Number(share.toPrecision(3))} times all`;
  if (share === 1) return "all";
  if (share >= 0.001) return `${Number((100 * share).toPrecision(3))} %`;
  return share ? `1 in ${grouped(Math.round(1 / share))}` : "none";
}

/**
 * Which position stands in which slot. Residue-major order of rate R sorts positions by (position mod R, position div
 * R); rate 1 is the natural order. `starts` are the first slots of the residue classes.
 */
function orderOf(numTokens, rate) {
  const each = quotient(numTokens, rate);
  const longer = numTokens % rate; // so many residue classes, the first ones, have one token more
  const border = longer * (each + 1);
  const startOf = (residue) => residue * each + Math.min(residue, longer);
  const classOf = (slot) =>
    slot < border ? quotient(slot, each + 1) : longer + quotient(slot - border, Math.max(each, 1));
  return {
    numTokens,
    rate,
    position: (slot) => classOf(slot) + rate * (slot - startOf(classOf(slot))),
    slot: (position) => startOf(position % rate) + quotient(position, rate),
    starts: () => Array.from({ length: Math.min(rate, numTokens) }, (_, residue) => startOf(residue)),
  };
}

/** {q, k} is the slot at the top left corner of the picture, `scale` the tokens of one pixel. */
class View {
  constructor(numQueries, numKeys) {
    Object.assign(this, { numQueries, numKeys, q: 0, k: 0, scale: 1, width: 1, height: 1 });
  }

  /** The scale at which everything is seen. */
  get wholeScale() {
    return Math.max(this.numQueries / this.height, this.numKeys / this.width, 1 / LARGEST_PAIR);
  }

  /** The tokens along the shorter side: what a link stores, so that it looks alike on other screens. */
  get span() {
    return this.scale * Math.min(this.width, this.height);
  }

  /** To these slots and this scale: within the matrix as far as it fills the view, centred where it does not. */
  show(q, k, scale) {
    this.scale = clamp(scale, 1 / LARGEST_PAIR, this.wholeScale);
    const inside = (start, tokens, seen) => (seen >= tokens ? (tokens - seen) / 2 : clamp(start, 0, tokens - seen));
    this.q = inside(q, this.numQueries, this.height * this.scale);
    this.k = inside(k, this.numKeys, this.width * this.scale);
  }

  showWhole() {
    this.show(0, 0, this.wholeScale);
  }

  /** Zoom in by a factor above 1, or out, with the slots under pixel (x, y) staying where they are. */
  zoomAt(factor, x, y) {
    const scale = clamp(this.scale / factor, 1 / LARGEST_PAIR, this.wholeScale);
    this.show(this.q + y * (this.scale - scale), this.k + x * (this.scale - scale), scale);
  }

  panBy(x, y) {
    this.show(this.q + y * this.scale, this.k + x * this.scale, this.scale);
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

/** Where cells begin along one axis, and the last one's end: a pixel each, or a token each where those are larger. */
function cellEdges(start, scale, pixels, tokens) {
  const end = Math.min(tokens, Math.ceil(start + pixels * scale));
  const first = Math.max(0, Math.floor(start));
  if (scale <= 1) return Float64Array.from({ length: end - first + 1 }, (_, index) => first + index);
  const origin = Math.max(0, start);
  const count = Math.min(pixels, Math.ceil((end - origin) / scale));
  const edge = (_, index) => Math.min(end, Math.floor(origin + index * scale));
  const edges = Float64Array.from({ length: count + 1 }, edge);
  // The last pixel may begin where the last but one ends.
  return edges.length > 1 && edges[count] === edges[count - 1] ? edges.subarray(0, count) : edges;
}

/** What is seen, as the part of the address after #: whoever opens the link sees the same. */
function linkOf({ view, head, order, block }) {
  const tidy = (number) => String(Number(number.toFixed(view.scale < 1 ? 2 : 0)));
  const place = { q: tidy(view.q), k: tidy(view.k), span: tidy(view.span) };
  return Object.entries({ ...place, head, order, block }).map(([name, value]) => `${name}=${value}`).join("&");
}

/** Take from a link what makes sense here: a number out of range, or a word that is none, is left out. */
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
