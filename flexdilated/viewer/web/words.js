// Numbers and sizes as people read them.

function grouped(number) {
  return number.toLocaleString("en-US");
}

function signed(number) {
  if (Math.abs(number) === Infinity) return number < 0 ? "−∞" : "∞";
  return number < 0 ? `−${grouped(-number)}` : grouped(number);
}

function plural(number, word) {
  return `${grouped(number)} ${word}${number === 1 ? "" : "s"}`;
}

/** Tokens on a ruler: in K of 1,024 and M of 1,048,576 where they are whole, as everywhere in the library. */
function shortTokens(number) {
  if (number && number % 1048576 === 0) return `${grouped(number / 1048576)}M`;
  if (number && number % 1024 === 0) return `${grouped(number / 1024)}K`;
  return grouped(number);
}

function bytesText(size) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  while (size >= 1024 && power < units.length - 1) {
    size /= 1024;
    power++;
  }
  return `${power && size < 99.95 ? Number(size.toFixed(1)) : grouped(Math.round(size))} ${units[power]}`;
}

const COUNTED = "counted";

/** How far a picture has come: what is drawn of it, then what is still an estimate. 100 % and 0 % mean all and none. */
function workText(density) {
  const all = density.cells * density.rules.length;
  if (!density.isDrawn()) return `${Math.floor((100 * density.drawn) / all)} % drawn`;
  const estimated = all - density.certain;
  return estimated ? `≈ ${Math.ceil((100 * estimated) / all)} % estimated` : COUNTED;
}

/** A share of a whole: percent, or one in so many where percent would be a row of zeros. */
function shareText(part, whole) {
  const share = part / whole;
  if (part === whole) return "all";
  if (share >= 0.001) return `${Number((100 * share).toPrecision(3))} %`;
  return part ? `1 in ${grouped(Math.round(1 / share))}` : "none";
}
