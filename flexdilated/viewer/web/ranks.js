// Many ranks: which of them holds a position, and the bytes of keys and values that one receives from another.

const NAME_FROM = [38, 26]; // pixels that a tile needs to be written in
const TILE_FROM = 10;
const RUN_FROM = 16; // pixels of a run in a residue class: shorter ones would hide the pattern behind their borders
const ROOMY_RUN = 48;
const LETTER = 0.68; // the width of a letter, in heights
const SMALLEST_FONT = 8;

/** The runs of positions of a sharding as [start, stop, rank], ascending. */
function runsOf(sharding) {
  const named = sharding.runs.flatMap((runs, rank) => runs.map(([start, stop]) => [start, stop, rank]));
  return named.sort((a, b) => a[0] - b[0]);
}

function rankOf(sharding, position) {
  return runsOf(sharding).find(([start, stop]) => position >= start && position < stop)[2];
}

/** The pixels of a run of a residue class, about: each class is cut into as many runs as the sequence. */
function runSide({ data, view, keys, sharding }) {
  return view.numKeys / keys.rate / data.ranks.shardings[sharding].runs.flat().length / view.scale;
}

function areRanksTooFine(state) {
  return state.keys.rate > 1 && runSide(state) < RUN_FROM;
}

/** The runs of slots from `start` on that ranks hold, as [start, stop, rank]: residue class by residue class. */
function slotRuns(sharding, order, start, seen, tokens) {
  const [first, end] = [Math.max(0, Math.floor(start)), Math.min(tokens, Math.ceil(start + seen))];
  if (first >= end) return [];
  const found = [];
  for (let residue = order.classOf(first); residue <= order.classOf(end - 1); residue++) {
    for (const [from, to, rank] of runsOf(sharding)) found.push([...order.slotsWithin(residue, from, to), rank]);
  }
  return found.filter(([from, to]) => to > first && from < end && to > from);
}

function drawRanks(context, state, palette) {
  const { view, queries, keys } = state;
  const sharding = state.data.ranks?.shardings[state.sharding];
  if (!sharding || areRanksTooFine(state)) return;
  const rows = slotRuns(sharding, queries, view.q, view.height * view.scale, view.numQueries);
  const columns = slotRuns(sharding, keys, view.k, view.width * view.scale, view.numKeys);
  drawTiles(context, view, palette, sharding, rows, columns);
  const [across, down] = [columns, rows].map((runs) => runs.map(([start]) => start).filter((start) => start > 0));
  drawLines(context, view, across, down, palette.css("--rank-line"), runSide(state) < ROOMY_RUN ? 1 : 2);
}

function drawTiles(context, view, palette, sharding, rows, columns) {
  const most = Math.max(1, ...sharding.received.flat());
  for (const [top, bottom, target] of rows) {
    for (const [left, right, source] of columns) {
      const corner = [left - view.k, top - view.q];
      const box = [...corner, right - left, bottom - top].map((tokens) => tokens / view.scale);
      const bytes = sharding.received[target][source];
      if (Math.min(box[2], box[3]) >= TILE_FROM) drawTile(context, view, palette, box, { target, source, bytes, most });
    }
  }
}

/** What the borders mean, or why there are none. */
function rankLegend(state) {
  const { note, shardings } = state.data.ranks;
  if (!areRanksTooFine(state)) return note;
  const pieces = grouped(shardings[state.sharding].runs.flat().length);
  const classes = `each of the ${grouped(state.keys.rate)} residue classes is cut into ${pieces} runs`;
  return `Ranks are too fine to draw here: ${classes}. Zoom in, or choose the natural order.`;
}

/** A wash that says how many bytes, on a scale of powers of two, and where there is room the bytes in words. */
function drawTile(context, view, palette, [x, y, width, height], { target, source, bytes, most }) {
  if (bytes) {
    context.globalAlpha = 0.03 + 0.12 * Math.max(0, 1 + Math.log2(bytes / most) / 12);
    context.fillStyle = palette.css("--ink");
    context.fillRect(x, y, width, height);
    context.globalAlpha = 1;
  }
  const [left, top] = [Math.max(x, 0), Math.max(y, 0)];
  const [right, bottom] = [Math.min(x + width, view.width), Math.min(y + height, view.height)];
  if (right - left < NAME_FROM[0] || bottom - top < NAME_FROM[1]) return;
  const lines = bytes ? [`${target} ← ${source}`, bytesText(bytes)] : target === source ? [`rank ${target}`] : [];
  const size = Math.min(12, (right - left) / (LETTER * Math.max(...lines.map((line) => line.length))));
  if (!lines.length || size < SMALLEST_FONT) return;
  // A rank's own name stands in a corner: most patterns are densest along the diagonal.
  const [x0, y0] = bytes ? [(left + right) / 2, (top + bottom) / 2] : [right - 2.4 * size, top + size];
  writeLabel(context, palette, size, x0, y0, lines);
}

function writeLabel(context, palette, size, x, y, lines) {
  context.font = `600 ${size}px ${palette.css("--font")}`;
  const width = Math.max(...lines.map((line) => context.measureText(line).width)) + size / 2;
  const height = 1.2 * size * lines.length + 2;
  context.fillStyle = palette.css("--label");
  context.beginPath();
  context.roundRect(x - width / 2, y - height / 2, width, height, 5);
  context.fill();
  context.fillStyle = palette.css("--ink");
  [context.textAlign, context.textBaseline] = ["center", "middle"];
  lines.forEach((line, index) => context.fillText(line, x, y + 1.2 * size * (index - (lines.length - 1) / 2)));
}
