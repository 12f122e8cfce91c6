// The draw of masks.random_blocks, bit by bit: splitmix64 over the seed, the head, the row of blocks and the number of
// the draw, and Floyd's method for blocks that are distinct.

const GOLDEN = 0x9e3779b97f4a7c15n;

/** One output of splitmix64. */
function mixed(state) {
  let z = BigInt.asUintN(64, state + GOLDEN);
  z = BigInt.asUintN(64, (z ^ (z >> 30n)) * 0xbf58476d1ce4e5b9n);
  z = BigInt.asUintN(64, (z ^ (z >> 27n)) * 0x94d049bb133111ebn);
  return z ^ (z >> 31n);
}

/** A function that gives the key blocks, in ascending order, that a row of blocks drew. */
function drawnRows(numBlocks, drawn, seed, head) {
  const ofHead = mixed(mixed(BigInt(seed)) + BigInt(head));
  return (row) => {
    const state = mixed(ofHead + BigInt(row));
    const chosen = new Set();
    for (let index = 0; index < drawn; index++) {
      const last = numBlocks - drawn + index;
      const block = Number(((mixed(state + BigInt(index)) >> 32n) * BigInt(last + 1)) >> 32n);
      chosen.add(chosen.has(block) ? last : block);
    }
    return Float64Array.from(chosen).sort();
  };
}
