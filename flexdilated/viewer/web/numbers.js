// Whole numbers beyond 32 bits. Positions reach 2^31 and pairs 2^53: doubles hold them exactly, `|` and `>>` do not.

const LARGEST_EXACT = Number.MAX_SAFE_INTEGER;

/** floor(a / b) for b > 0. */
function quotient(a, b) {
  return Math.floor(a / b);
}

/** The remainder in [0, b), also for negative a. */
function remainder(a, b) {
  const rest = a % b;
  return rest < 0 ? rest + b : rest + 0; // + 0 makes 0 of -0
}

function greatestDivisor(a, b) {
  while (b) [a, b] = [b, a % b];
  return a;
}

/** (a * b) mod m for 0 <= a, b < m: in doubles where the product fits, else in 64 bits and more. */
function timesModulo(a, b, m) {
  const product = a * b;
  return product <= LARGEST_EXACT ? product % m : Number((BigInt(a) * BigInt(b)) % BigInt(m));
}

/** The number x in [0, m) with a * x = 1 modulo m; a and m have no common divisor. */
function inverseModulo(a, m) {
  let [r, next, x, nextX] = [remainder(a, m), m, 1, 0];
  while (next) {
    const times = quotient(r, next);
    [r, next] = [next, r - times * next];
    [x, nextX] = [nextX, x - times * nextX];
  }
  return remainder(x, m);
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
