// Many ranks: which of them holds a position, and the bytes of keys and values that one receives from another.

const NAME_FROM = [54, 34]; // pixels that a tile needs to be written in
const TILE_FROM = 10;

/** The runs of positions of a sharding as [start, stop, rank], ascending. */
function runsOf(sharding) {
  return sharding.runs.flatMap((runs, rank) => runs.map(([start, stop]) => [start, stop, rank])).sort((a, b) => a[0] - b[0]);
}

function rankOf(sharding, position) {
  return runsOf(sharding).find(([start, stop]) => position >= start && position < stop)?.[2] ?? null;
}

/** Ranks hold runs of positions: other orders have no borders to draw. */
function drawRanks(context, state, palette) {
  const sharding = state.order === "natural" && state.data.ranks?.shardings[state.sharding];
  if (!sharding) return;
  const runs = runsOf(sharding);
  const borders = runs.slice(1).map(([start]) => start);
  drawTiles(context, state, palette, sharding, runs);
  drawLines(context, state.view, borders, borders, palette.css("--rank-line"), 2);
}

function drawTiles(context, { view }, palette, sharding, runs) {
  const most = Math.max(1, ...sharding.received.flat());
  const seen = (start, at, pixels) => runs.filter(([from, to]) => (to - start) / view.scale > 0 && (from - start) / view.scale < pixels && at);
  for (const [top, bottom, target] of seen(view.q, true, view.height)) {
    for (const [left, right, source] of seen(view.k, true, view.width)) {
      const box = [(left - view.k) / view.scale, (top - view.q) / view.scale, (right - left) / view.scale, (bottom - top) / view.scale];
      if (Math.min(box[2], box[3]) >= TILE_FROM) drawTile(context, view, palette, box, target, source, sharding.received[target][source], most);
    }
  }
}

/** A wash that says how many bytes, on a scale of powers of two, and where there is room the bytes in words. */
function drawTile(context, view, palette, [x, y, width, height], target, source, bytes, most) {
  if (bytes) {
    context.globalAlpha = 0.06 + 0.2 * Math.max(0, 1 + Math.log2(bytes / most) / 12);
    context.fillStyle = palette.css("--rank-wash");
    context.fillRect(x, y, width, height);
    context.globalAlpha = 1;
  }
  const [left, top] = [Math.max(x, 0), Math.max(y, 0)];
  const [right, bottom] = [Math.min(x + width, view.width), Math.min(y + height, view.height)];
  if (right - left < NAME_FROM[0] || bottom - top < NAME_FROM[1]) return;
  const lines = target === source ? [`rank ${target}`, "its own"] : [`${target} ← ${source}`, bytes ? bytesText(bytes) : "nothing"];
  writeLabel(context, palette, (left + right) / 2, (top + bottom) / 2, lines, bytes > 0);
}

function writeLabel(context, palette, x, y, lines, strong) {
  context.font = `${strong ? 600 : 400} 12px ${palette.css("--font")}`;
  const width = Math.max(...lines.map((line) => context.measureText(line).width)) + 12;
  context.fillStyle = palette.css("--label");
  context.beginPath();
  context.roundRect(x - width / 2, y - 17, width, 34, 6);
  context.fill();
  context.fillStyle = palette.css(strong ? "--ink" : "--muted");
  [context.textAlign, context.textBaseline] = ["center", "middle"];
  lines.forEach((line, index) => context.fillText(line, x, y - 7 + 14 * index));
}
