// Densities as colours: a hue a branch, mixed where branches meet; the shade says how full, and beyond full how often.

const PALEST = 0.2; // the shade of a cell with a single pair among millions: thin windows stay visible
const DARKEST_MIX = 0.6;

/** How strongly a cell of this density is drawn, from 0 for none to 1 for full. */
function shadeOf(density) {
  return density > 0 ? PALEST + (1 - PALEST) * Math.min(1, density) ** 0.4 : 0;
}

/** The colours of the page's theme, as [red, green, blue]. */
function paletteOf(element, branches) {
  const style = getComputedStyle(element);
  const colour = (name) => parseColour(style.getPropertyValue(name));
  const hues = Array.from({ length: branches }, (_, index) => colour(`--branch-${index % 8}`));
  return { paper: colour("--paper"), ink: colour("--ink"), hues, css: (name) => style.getPropertyValue(name).trim() };
}

function parseColour(text) {
  const digits = text.trim().slice(1);
  return [0, 2, 4].map((at) => parseInt(digits.slice(at, at + 2), 16));
}

/**
 * The colour of a cell where branch b allows the share densities[b] of its pairs. A pair that m branches allow counts m
 * times: from one time a pair on, more of them lead from the hue towards the ink.
 */
function colourOf(densities, palette, out) {
  let [total, weight, red, green, blue] = [0, 0, 0, 0, 0];
  for (let branch = 0; branch < densities.length; branch++) {
    const density = densities[branch];
    if (!(density > 0)) continue;
    const share = Math.sqrt(density); // a sparse branch tints what a dense one fills
    const hue = palette.hues[branch];
    total += density;
    weight += share;
    red += share * hue[0];
    green += share * hue[1];
    blue += share * hue[2];
  }
  const { paper, ink } = palette;
  if (!weight) return setColour(out, paper, paper, 1);
  const often = total > 1 ? DARKEST_MIX * (1 - 1 / total) : 0;
  const hue = [red / weight, green / weight, blue / weight].map((value, at) => value + often * (ink[at] - value));
  return setColour(out, paper, hue, shadeOf(total));
}

function setColour(out, from, to, share) {
  for (let at = 0; at < 3; at++) out[at] = Math.round(from[at] + share * (to[at] - from[at]));
  return out;
}

/** All cells of a density as pixels. Cells that wait for one of their branches stay transparent. */
function paintCells(density, palette, shown, image) {
  const branches = density.share.length;
  const densities = new Float64Array(branches).fill(NaN);
  const colour = [0, 0, 0];
  for (let cell = 0, at = 0; cell < density.cells; cell++, at += 4) {
    let [known, changed] = [true, false];
    for (let branch = 0; branch < branches; branch++) {
      const found = density.share[branch][cell];
      known &&= found >= 0;
      const share = shown[branch] ? found : 0;
      changed ||= share !== densities[branch];
      densities[branch] = share;
    }
    if (changed) colourOf(densities, palette, colour); // neighbours are mostly alike
    image.data[at] = colour[0];
    image.data[at + 1] = colour[1];
    image.data[at + 2] = colour[2];
    image.data[at + 3] = known ? 255 : 0;
  }
}
