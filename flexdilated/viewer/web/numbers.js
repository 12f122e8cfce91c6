// Numbers: whole ones beyond 32 bits, and how people read them. Positions reach 2^31 and pairs 2^53: doubles hold them
// exactly, `|` and `>>` do not.

/** floor(a / b) for b > 0. */
function quotient(a, b) {
  return Math.floor(a / b);
}

/** The first index in an ascending array whose entry is above `value`. */
function firstAbove(ascending, value) {
  let [low, high] = [0, ascending.length];
  while (low < high) {
    const middle = (low + high) >>> 1; // lengths of arrays are below 2^32
    if (ascending[middle] > value) high = middle;
    else low = middle + 1;
  }
  return low;
}

function clamp(value, least, most) {
  return Math.min(Math.max(value, least), most);
}

function grouped(number) {
  return number.toLocaleString("en-US");
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

/** A share of a whole: percent, or one in so many where percent would be a row of zeros. */
function shareText(part, whole) {
  const share = part / whole;
  if (part === whole) return "all";
  if (share >= 0.001) return `${Number((100 * share).toPrecision(3))} %`;
  return part ? `1 in ${grouped(Math.round(1 / share))}` : "none";
}
