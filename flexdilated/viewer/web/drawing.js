// The picture: cells, grids, rulers and the pair that is explained, on one canvas.

const RULER = { left: 72, top: 30 };
const STRIPES_FROM = 7; // pixels a pair: branches stand beside each other instead of mixed
const NUMBER_FROM = 26;
const GRID_FROM = 7; // pixels a block
const TICK_EVERY = 90; // pixels, about
const UNMARKED = 300; // milliseconds of work that pass without a word
const LABEL_ROOM = 90; // pixels from the middle of a label to the border

/** The density as an image of one pixel a cell. */
function imageOf(density) {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [Math.max(1, density.width), Math.max(1, density.height)];
  const context = canvas.getContext("2d");
  return { canvas, context, pixels: context.createImageData(canvas.width, canvas.height), density };
}

/** What it takes to draw an image again, without the numbers that it was made from. */
function keepsake({ canvas, density }) {
  const { rows, columns, width, height } = density;
  return { canvas, density: { rows, columns, width, height } };
}

function repaint(image, palette, shown) {
  if (!image.density.width || !image.density.height) return;
  paintCells(image.density, palette, shown, image.pixels);
  image.context.putImageData(image.pixels, 0, 0);
}

function drawAll(context, state, palette) {
  const { view } = state;
  context.setTransform(state.ratio, 0, 0, state.ratio, 0, 0);
  context.fillStyle = palette.css("--outside");
  context.fillRect(0, 0, RULER.left + view.width, RULER.top + view.height);
  context.save();
  context.beginPath();
  context.rect(RULER.left, RULER.top, view.width, view.height);
  context.clip();
  context.translate(RULER.left, RULER.top);
  drawMatrix(context, state, palette);
  context.restore();
  drawRuler(context, state, palette, "top");
  drawRuler(context, state, palette, "left");
  nameAxes(context, palette);
}

function nameAxes(context, palette) {
  context.font = `11px ${palette.css("--font")}`;
  context.fillStyle = palette.css("--muted");
  [context.textAlign, context.textBaseline] = ["left", "middle"];
  context.fillText("keys →", 6, 9);
  context.fillText("queries ↓", 6, 22);
}

function drawMatrix(context, state, palette) {
  const { view } = state;
  context.fillStyle = palette.css("--pending");
  const matrix = [-view.k, -view.q, view.numKeys, view.numQueries];
  context.fillRect(...matrix.map((tokens) => tokens / view.scale));
  context.imageSmoothingEnabled = false;
  for (const image of [state.before, state.image]) if (image) placeImage(context, view, image);
  if (view.scale < 1 / STRIPES_FROM && state.image) drawPairs(context, state, palette);
  drawBlockGrid(context, state, palette);
  drawClasses(context, state, palette);
  drawRanks(context, state, palette);
  drawCursor(context, state, palette);
  if (state.image) markSamples(context, view, state.image.density, palette);
}

/** In a corner of a picture that is not certain yet, or is not there yet: how far it has come. */
function markSamples(context, view, density, palette) {
  const [text, shortest] = [workText(density), 2 * LABEL_ROOM];
  if (density.spent < UNMARKED || text === COUNTED || view.width < shortest) return;
  writeLabel(context, palette, 12, view.width - LABEL_ROOM, 18, [text]);
}

/** An image lies where its slots lie now, whatever was seen when it was begun. */
function placeImage(context, view, { canvas, density }) {
  const { rows, columns } = density;
  if (!density.width || !density.height) return;
  const [top, left] = [(rows[0] - view.q) / view.scale, (columns[0] - view.k) / view.scale];
  const height = (rows[density.height] - rows[0]) / view.scale;
  const width = (columns[density.width] - columns[0]) / view.scale;
  // Whole pixels where a cell is one: the image is then copied as it is.
  const exact = Math.abs(width - density.width) < 1.5 && view.scale > 1;
  if (exact) context.drawImage(canvas, Math.round(left), Math.round(top));
  else context.drawImage(canvas, left, top, width, height);
}

/** Pairs as squares apart, in stripes where several branches allow one, with its multiplicity where there is room. */
function drawPairs(context, state, palette) {
  const { view, image, shown } = state;
  const { rows, columns, share } = image.density;
  const side = 1 / view.scale;
  const gap = Math.min(2, side / 10);
  context.fillStyle = palette.css("--paper");
  const [width, height] = [(columns.length - 1) * side, (rows.length - 1) * side];
  context.fillRect((columns[0] - view.k) * side, (rows[0] - view.q) * side, width, height);
  for (let row = 0; row < image.density.height; row++) {
    for (let column = 0; column < image.density.width; column++) {
      const cell = row * image.density.width + column;
      const allowing = share.map((_, branch) => branch).filter((branch) => shown[branch] && share[branch][cell] > 0);
      if (!allowing.length) continue;
      const [x, y] = [(columns[column] - view.k) * side + gap, (rows[row] - view.q) * side + gap];
      drawPair(context, x, y, side - 2 * gap, allowing, palette);
    }
  }
}

function drawPair(context, x, y, side, allowing, palette) {
  const width = side / allowing.length;
  allowing.forEach((branch, index) => {
    context.fillStyle = `rgb(${palette.hues[branch].join(" ")})`;
    context.fillRect(x + index * width, y, width, side);
  });
  if (allowing.length < 2 || side < NUMBER_FROM) return;
  context.fillStyle = palette.css("--paper");
  context.font = `600 ${Math.round(side / 3)}px ${palette.css("--font")}`;
  [context.textAlign, context.textBaseline] = ["center", "middle"];
  context.fillText(`×${allowing.length}`, x + side / 2, y + side / 2);
}

function drawBlockGrid(context, { view, block }, palette) {
  if (!block || block / view.scale < GRID_FROM) return;
  const keys = multiplesIn(view.k, view.width * view.scale, block, view.numKeys);
  const queries = multiplesIn(view.q, view.height * view.scale, block, view.numQueries);
  drawLines(context, view, keys, queries, palette.css("--grid"), 1);
}

/** Where residue classes begin: part of the grid, and gone with it. */
function drawClasses(context, { view, order, queries, keys, block }, palette) {
  if (!block || order !== "residue" || view.numKeys / keys.rate / view.scale < GRID_FROM) return;
  drawLines(context, view, keys.starts().slice(1), queries.starts().slice(1), palette.css("--grid"), 1);
}

function multiplesIn(start, seen, step, tokens) {
  const first = Math.max(0, Math.ceil(start / step));
  const last = Math.min(Math.floor((start + seen) / step), Math.floor(tokens / step));
  return Array.from({ length: Math.max(0, last - first + 1) }, (_, index) => (first + index) * step);
}

/** Lines at these keys and queries, sharp on whole pixels. */
function drawLines(context, view, keys, queries, colour, width) {
  context.fillStyle = colour;
  const [left, top] = [Math.max(0, -view.k / view.scale), Math.max(0, -view.q / view.scale)];
  const right = Math.min(view.width, (view.numKeys - view.k) / view.scale);
  const bottom = Math.min(view.height, (view.numQueries - view.q) / view.scale);
  const at = (tokens) => Math.round(tokens / view.scale - width / 2);
  for (const key of keys) context.fillRect(at(key - view.k), top, width, bottom - top);
  for (const query of queries) context.fillRect(left, at(query - view.q), right - left, width);
}

function drawCursor(context, { view, cursor, pinned }, palette) {
  if (!cursor) return;
  const side = Math.max(1, 1 / view.scale);
  const [x, y] = [(cursor.k - view.k) / view.scale, (cursor.q - view.q) / view.scale];
  context.fillStyle = palette.css("--cross");
  context.fillRect(0, y, view.width, side);
  context.fillRect(x, 0, side, view.height);
  if (!pinned) return;
  context.strokeStyle = palette.css("--accent");
  context.lineWidth = 2;
  const room = Math.max(side, 9);
  context.strokeRect(x + side / 2 - room / 2, y + side / 2 - room / 2, room, room);
}

/** Round numbers, about so many pixels apart: powers of two, as sizes here are. */
function tickStep(scale) {
  return 2 ** Math.max(0, Math.round(Math.log2(TICK_EVERY * scale)));
}

function drawRuler(context, state, palette, side) {
  const { view } = state;
  const across = side === "top";
  const [start, tokens, pixels] = across ? [view.k, view.numKeys, view.width] : [view.q, view.numQueries, view.height];
  context.fillStyle = palette.css("--surface");
  if (across) context.fillRect(0, 0, RULER.left + pixels, RULER.top);
  else context.fillRect(0, RULER.top, RULER.left, pixels);
  context.font = `12px ${palette.css("--font")}`;
  const half = view.scale < 1 / 8 ? 0.5 : 0; // ticks stand at the middle of a pair that is seen as one
  const step = tickStep(view.scale);
  for (const slot of multiplesIn(start, pixels * view.scale, step, tokens - 1)) {
    const at = (slot + half - start) / view.scale;
    const label = step < 1024 ? grouped(slot) : shortTokens(slot); // one unit for all ticks
    if (at >= 0 && at <= pixels) drawTick(context, palette, across, at, label, pixels);
  }
  context.fillStyle = palette.css("--line");
  if (across) context.fillRect(RULER.left, RULER.top - 1, pixels, 1);
  else context.fillRect(RULER.left - 1, RULER.top, 1, pixels);
}

function drawTick(context, palette, across, at, label, pixels) {
  context.fillStyle = palette.css("--line");
  if (across) context.fillRect(RULER.left + at, RULER.top - 6, 1, 6);
  else context.fillRect(RULER.left - 6, RULER.top + at, 6, 1);
  context.fillStyle = palette.css("--muted");
  if (across) {
    context.textBaseline = "middle";
    context.textAlign = at > pixels - 24 ? "right" : at < 24 && label.length > 3 ? "left" : "center";
    context.fillText(label, RULER.left + at, RULER.top / 2 - 2);
  } else {
    context.textAlign = "right";
    context.textBaseline = at < 6 ? "top" : at > pixels - 8 ? "bottom" : "middle";
    context.fillText(label, RULER.left - 10, RULER.top + at);
  }
}
