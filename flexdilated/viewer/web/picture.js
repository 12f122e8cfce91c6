// The picture on its canvas: cells in the branches' colors, grids, rulers and the cursor.

const RULER = { left: 72, top: 30 };
const STRIPES_FROM = 7; // pixels per pair, from which branches are drawn as stripes instead of mixed colors
const GRID_FROM = 7; // pixels per block, from which lines between blocks are drawn
const TICK_EVERY = 90; // approximate pixels between ticks
const PALEST = 0.2; // shade of a cell with one allowed pair among millions, so that thin windows stay visible
const DARKEST_MIX = 0.6;

/** The colors of the page's theme, as [red, green, blue]. */
function paletteOf(branches) {
  const style = getComputedStyle(document.documentElement);
  const css = (name) => style.getPropertyValue(name).trim();
  const color = (name) => [1, 3, 5].map((at) => parseInt(css(name).slice(at, at + 2), 16));
  const hues = Array.from({ length: branches }, (_, index) => color(`--branch-${index % 8}`));
  return { paper: color("--paper"), ink: color("--ink"), hues, css };
}

/**
 * The color of a cell, of which branch b allows the share densities[b]: the mixed hues of the branches, stronger
 * for a larger share, and closer to the ink color if a pair has more than one branch on average.
 */
function colorOf(densities, { paper, ink, hues }) {
  let [total, weight, red, green, blue] = [0, 0, 0, 0, 0];
  for (let branch = 0; branch < densities.length; branch++) {
    const share = Math.sqrt(densities[branch]); // the root keeps sparse branches visible next to dense ones
    total += densities[branch];
    weight += share;
    red += share * hues[branch][0];
    green += share * hues[branch][1];
    blue += share * hues[branch][2];
  }
  if (!weight) return paper;
  const often = total > 1 ? DARKEST_MIX * (1 - 1 / total) : 0;
  const shade = PALEST + (1 - PALEST) * Math.min(1, total) ** 0.4;
  const mixed = (hue, at) => Math.round(paper[at] + shade * (hue + often * (ink[at] - hue) - paper[at]));
  return [mixed(red / weight, 0), mixed(green / weight, 1), mixed(blue / weight, 2)];
}

/** A density, and a canvas with one pixel for each of its cells. */
function imageOf(density) {
  const canvas = new OffscreenCanvas(Math.max(1, density.width), Math.max(1, density.height));
  return { canvas, context: canvas.getContext("2d"), density };
}

/** Paint each cell of the density as one pixel; cells without a share yet stay transparent. */
function repaint({ context, density }, palette, shown) {
  const { width, height, cells, share } = density;
  if (!cells) return;
  const pixels = context.createImageData(width, height);
  const densities = new Float64Array(share.length).fill(NaN);
  let color = palette.paper;
  for (let cell = 0; cell < cells; cell++) {
    let [known, changed] = [true, false];
    for (let branch = 0; branch < share.length; branch++) {
      const drawn = shown[branch] ? share[branch][cell] : 0;
      known &&= share[branch][cell] >= 0;
      changed ||= drawn !== densities[branch];
      densities[branch] = drawn;
    }
    if (!known) continue;
    if (changed) color = colorOf(densities, palette); // neighbouring cells mostly have equal shares
    pixels.data.set(color, 4 * cell);
    pixels.data[4 * cell + 3] = 255;
  }
  context.putImageData(pixels, 0, 0);
}

function drawAll(context, state, palette) {
  const { view, image } = state;
  context.setTransform(state.ratio, 0, 0, state.ratio, 0, 0);
  context.fillStyle = palette.css("--outside");
  context.fillRect(0, 0, RULER.left + view.width, RULER.top + view.height);
  context.save();
  context.beginPath();
  context.rect(RULER.left, RULER.top, view.width, view.height);
  context.clip();
  context.translate(RULER.left, RULER.top);
  context.fillStyle = palette.css("--pending");
  context.fillRect(...[-view.k, -view.q, view.numKeys, view.numQueries].map((tokens) => tokens / view.scale));
  context.imageSmoothingEnabled = false;
  for (const each of [state.before, image]) if (each) placeImage(context, view, each);
  if (view.scale < 1 / STRIPES_FROM) drawPairs(context, state, palette);
  drawBlocks(context, state, palette);
  drawCursor(context, state, palette);
  context.restore();
  drawRuler(context, view, palette, true);
  drawRuler(context, view, palette, false);
}

/** Draw an image where its slots are in the view. */
function placeImage(context, view, { canvas, density: { rows, columns, width, height } }) {
  if (!width || !height) return;
  const [left, top] = view.pixelOf({ q: rows[0], k: columns[0] });
  const [right, bottom] = view.pixelOf({ q: rows[height], k: columns[width] });
  // If a cell is one pixel, draw at whole pixels, so that the image is not resampled.
  const exact = Math.abs(right - left - width) < 1.5 && view.scale > 1;
  if (exact) context.drawImage(canvas, Math.round(left), Math.round(top));
  else context.drawImage(canvas, left, top, right - left, bottom - top);
}

/** Draw each allowed pair as a square, with one stripe for each branch that allows it. */
function drawPairs(context, { view, image: { density }, shown }, palette) {
  const { rows, columns, share, width, height } = density;
  const gap = Math.min(2, 0.1 / view.scale);
  const [left, top] = view.pixelOf({ q: rows[0], k: columns[0] });
  context.fillStyle = palette.css("--paper");
  context.fillRect(left, top, width / view.scale, height / view.scale);
  for (let cell = 0; cell < density.cells; cell++) {
    const allowing = steps(0, share.length).filter((branch) => shown[branch] && share[branch][cell] > 0);
    const [x, y] = view.pixelOf({ q: rows[quotient(cell, width)], k: columns[cell % width] });
    const [side, stripe] = [1 / view.scale - 2 * gap, (1 / view.scale - 2 * gap) / allowing.length];
    allowing.forEach((branch, index) => {
      context.fillStyle = `rgb(${palette.hues[branch].join(" ")})`;
      context.fillRect(x + gap + index * stripe, y + gap, stripe, side);
    });
  }
}

/** Draw lines between blocks, and between residue classes, if these have enough pixels. */
function drawBlocks(context, { view, order, queries, keys, block }, palette) {
  if (!block) return;
  const right = Math.min(view.k + view.width * view.scale, view.numKeys);
  const bottom = Math.min(view.q + view.height * view.scale, view.numQueries);
  context.fillStyle = palette.css("--grid");
  if (block / view.scale >= GRID_FROM) {
    drawLines(context, view, multiplesIn(view.k, right, block), multiplesIn(view.q, bottom, block));
  }
  if (order === "residue" && view.numKeys / keys.rate / view.scale >= GRID_FROM) {
    drawLines(context, view, keys.starts().slice(1), queries.starts().slice(1));
  }
}

function multiplesIn(start, stop, step) {
  const first = Math.max(0, Math.ceil(start / step));
  return steps(first, Math.max(first, Math.floor(stop / step) + 1)).map((index) => index * step);
}

/** Draw lines at these key and query slots, on whole pixels so that they are sharp. */
function drawLines(context, view, keys, queries) {
  const [left, top] = view.pixelOf({ q: 0, k: 0 }).map((edge) => Math.max(0, edge));
  const end = view.pixelOf({ q: view.numQueries, k: view.numKeys });
  const [right, bottom] = [Math.min(view.width, end[0]), Math.min(view.height, end[1])];
  const at = (tokens) => Math.round(tokens / view.scale - 0.5);
  for (const key of keys) context.fillRect(at(key - view.k), top, 1, bottom - top);
  for (const query of queries) context.fillRect(left, at(query - view.q), right - left, 1);
}

function drawCursor(context, { view, cursor, pinned }, palette) {
  if (!cursor) return;
  const side = Math.max(1, 1 / view.scale);
  const [x, y] = view.pixelOf(cursor);
  context.fillStyle = palette.css("--cross");
  context.fillRect(0, y, view.width, side);
  context.fillRect(x, 0, side, view.height);
  if (!pinned) return;
  context.strokeStyle = palette.css("--accent");
  context.lineWidth = 2;
  const room = Math.max(side, 9);
  context.strokeRect(x + side / 2 - room / 2, y + side / 2 - room / 2, room, room);
}

/** Draw a ruler along one side, with ticks at multiples of a power of two, as most sizes are powers of two. */
function drawRuler(context, view, palette, across) {
  const [start, tokens, pixels] = across ? [view.k, view.numKeys, view.width] : [view.q, view.numQueries, view.height];
  const rectangle = (at, aside, length, thickness) => {
    if (across) context.fillRect(RULER.left + at, RULER.top + aside, length, thickness);
    else context.fillRect(RULER.left + aside, RULER.top + at, thickness, length);
  };
  const margin = across ? RULER.top : RULER.left;
  context.fillStyle = palette.css("--surface");
  rectangle(across ? -RULER.left : 0, -margin, pixels + RULER.left, margin);
  context.fillStyle = palette.css("--line");
  rectangle(0, -1, pixels, 1);
  const half = view.scale < 1 / 8 ? 0.5 : 0; // at this scale ticks are at the middle of a pair, else at its edge
  const step = 2 ** Math.max(0, Math.round(Math.log2(TICK_EVERY * view.scale)));
  context.font = `12px ${palette.css("--font")}`;
  for (const slot of multiplesIn(start, Math.min(start + pixels * view.scale, tokens - 1), step)) {
    const at = (slot + half - start) / view.scale;
    if (at < 0 || at > pixels) continue;
    context.fillStyle = palette.css("--line");
    rectangle(at, -6, 1, 6);
    context.fillStyle = palette.css("--muted");
    const label = shortTokens(slot, step); // both rulers have one step, so labels have one unit
    const end = at > pixels - 24;
    context.textAlign = !across || end ? "right" : at < 24 && label.length > 3 ? "left" : "center";
    context.textBaseline = across ? "middle" : at < 6 ? "top" : end ? "bottom" : "middle";
    context.fillText(label, across ? RULER.left + at : RULER.left - 10, across ? RULER.top / 2 - 2 : RULER.top + at);
  }
  if (!across) return;
  context.font = `11px ${palette.css("--font")}`;
  [context.textAlign, context.textBaseline] = ["left", "middle"];
  context.fillText("keys →", 6, 9);
  context.fillText("queries ↓", 6, 22);
}
