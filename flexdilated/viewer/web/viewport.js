// What part of the matrix is seen: {q, k} is the slot at the top left corner, `scale` the tokens of one pixel.

const LARGEST_PAIR = 64; // pixels a side
const NUDGE = 1 / 8; // of the view, for one press of an arrow key
const ZOOM_STEP = Math.SQRT2;

function viewport(numQueries, numKeys) {
  return { numQueries, numKeys, q: 0, k: 0, scale: 1, width: 1, height: 1 };
}

/** The scale at which everything is seen. */
function wholeScale(view) {
  return Math.max(view.numQueries / view.height, view.numKeys / view.width, 1 / LARGEST_PAIR);
}

function showWhole(view) {
  view.scale = wholeScale(view);
  [view.q, view.k] = [0, 0];
  keepInside(view);
}

/** Within the matrix as far as it fills the view, and centred where it does not. */
function keepInside(view) {
  view.scale = clamp(view.scale, 1 / LARGEST_PAIR, wholeScale(view));
  view.q = insideAlong(view.q, view.numQueries, view.height * view.scale);
  view.k = insideAlong(view.k, view.numKeys, view.width * view.scale);
}

function insideAlong(start, tokens, seen) {
  return seen >= tokens ? (tokens - seen) / 2 : clamp(start, 0, tokens - seen);
}

/** Zoom in by a factor above 1, or out, with the slots under pixel (x, y) staying where they are. */
function zoomAt(view, factor, x, y) {
  const [q, k] = [view.q + y * view.scale, view.k + x * view.scale];
  view.scale = clamp(view.scale / factor, 1 / LARGEST_PAIR, wholeScale(view));
  [view.q, view.k] = [q - y * view.scale, k - x * view.scale];
  keepInside(view);
}

function panBy(view, x, y) {
  view.q += y * view.scale;
  view.k += x * view.scale;
  keepInside(view);
}

/** The tokens along the shorter side of the view: what a link stores, so that it looks alike on other screens. */
function spanOf(view) {
  return view.scale * Math.min(view.width, view.height);
}

function setSpan(view, span) {
  view.scale = span / Math.min(view.width, view.height);
}

function centreOn(view, q, k) {
  view.q = q + 0.5 - (view.height * view.scale) / 2;
  view.k = k + 0.5 - (view.width * view.scale) / 2;
  keepInside(view);
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

/** The slot under a pixel along one axis, or null outside the matrix. */
function slotUnder(start, scale, pixel, tokens) {
  const slot = Math.floor(start + pixel * scale);
  return slot >= 0 && slot < tokens ? slot : null;
}
