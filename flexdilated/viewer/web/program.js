// The traced rules of all branches: a list of elementwise operations over heads, queries and keys. All values
// are doubles; true is 1, false 0. Nodes that depend on queries alone, or on keys alone, are computed once for each.

const [ONE, BY_QUERY, BY_KEY, BY_PAIR] = [0, 1, 2, 3]; // what a node's values depend on: bits, joined over its operands

/** Each operation fills `out` from operands of its length. */
const OPERATIONS = {
  add: (out, a, b) => { for (let i = 0; i < out.length; i++) out[i] = a[i] + b[i]; },
  sub: (out, a, b) => { for (let i = 0; i < out.length; i++) out[i] = a[i] - b[i]; },
  mul: (out, a, b) => { for (let i = 0; i < out.length; i++) out[i] = a[i] * b[i]; },
  div: (out, a, b) => { for (let i = 0; i < out.length; i++) out[i] = Math.floor(a[i] / b[i]); },
  mod: (out, a, b) => { for (let i = 0; i < out.length; i++) out[i] = a[i] - b[i] * Math.floor(a[i] / b[i]); },
  fmod: (out, a, b) => { for (let i = 0; i < out.length; i++) out[i] = a[i] % b[i]; },
  pow: (out, a, b) => { for (let i = 0; i < out.length; i++) out[i] = Math.round(a[i] ** b[i]); },
  shift: (out, a, b) => { for (let i = 0; i < out.length; i++) out[i] = a[i] * 2 ** b[i]; },
  shift_down: (out, a, b) => { for (let i = 0; i < out.length; i++) out[i] = Math.floor(a[i] / 2 ** b[i]); },
  min: (out, a, b) => { for (let i = 0; i < out.length; i++) out[i] = a[i] < b[i] ? a[i] : b[i]; },
  max: (out, a, b) => { for (let i = 0; i < out.length; i++) out[i] = a[i] > b[i] ? a[i] : b[i]; },
  neg: (out, a) => { for (let i = 0; i < out.length; i++) out[i] = -a[i]; },
  abs: (out, a) => { for (let i = 0; i < out.length; i++) out[i] = Math.abs(a[i]); },
  eq: (out, a, b) => { for (let i = 0; i < out.length; i++) out[i] = a[i] === b[i] ? 1 : 0; },
  ne: (out, a, b) => { for (let i = 0; i < out.length; i++) out[i] = a[i] !== b[i] ? 1 : 0; },
  lt: (out, a, b) => { for (let i = 0; i < out.length; i++) out[i] = a[i] < b[i] ? 1 : 0; },
  le: (out, a, b) => { for (let i = 0; i < out.length; i++) out[i] = a[i] <= b[i] ? 1 : 0; },
  gt: (out, a, b) => { for (let i = 0; i < out.length; i++) out[i] = a[i] > b[i] ? 1 : 0; },
  ge: (out, a, b) => { for (let i = 0; i < out.length; i++) out[i] = a[i] >= b[i] ? 1 : 0; },
  and: (out, a, b) => { for (let i = 0; i < out.length; i++) out[i] = a[i] * b[i]; },
  or: (out, a, b) => { for (let i = 0; i < out.length; i++) out[i] = a[i] + b[i] - a[i] * b[i]; },
  xor: (out, a, b) => { for (let i = 0; i < out.length; i++) out[i] = Math.abs(a[i] - b[i]); },
  not: (out, a) => { for (let i = 0; i < out.length; i++) out[i] = 1 - a[i]; },
  where: (out, c, a, b) => { for (let i = 0; i < out.length; i++) out[i] = c[i] ? a[i] : b[i]; },
  // JavaScript's own bit operations end at 32 bits.
  bit_and: (out, a, b) => { for (let i = 0; i < out.length; i++) out[i] = Number(BigInt(a[i]) & BigInt(b[i])); },
  bit_or: (out, a, b) => { for (let i = 0; i < out.length; i++) out[i] = Number(BigInt(a[i]) | BigInt(b[i])); },
  bit_xor: (out, a, b) => { for (let i = 0; i < out.length; i++) out[i] = Number(BigInt(a[i]) ^ BigInt(b[i])); },
  bit_not: (out, a) => { for (let i = 0; i < out.length; i++) out[i] = -a[i] - 1; },
};

/** A program from the page's data: its nodes, decoded tables, and what each node's values depend on (`belongs`). */
function programOf({ nodes, tables }) {
  const found = { nodes, tables: tables.map(tableOf), belongs: [] };
  const inputs = { head: ONE, query: BY_QUERY, key: BY_KEY };
  for (const node of nodes) {
    const joined = operandsOf(node).reduce((all, each) => all | found.belongs[each], ONE);
    found.belongs.push(inputs[node[0]] ?? joined);
  }
  return found;
}

/** {shape, values} of a table that is encoded as runs of equal entries. */
function tableOf({ shape, values, counts }) {
  const entries = new Float64Array(shape.reduce((product, size) => product * size, 1));
  let place = 0;
  values.forEach((value, run) => entries.fill(value, place, (place += counts[run])));
  return { shape, values: entries };
}

/** The nodes that `outputs` depend on, `outputs` included, in the order of the program. */
function neededFor({ nodes }, outputs) {
  const needed = new Set(outputs);
  for (let node = nodes.length - 1; node >= 0; node--) {
    if (needed.has(node)) operandsOf(nodes[node]).forEach((each) => needed.add(each));
  }
  return [...needed].sort((a, b) => a - b);
}

/** Values of the nodes `outputs` for all pairs: one array for each node, query by query. `needed`: from `neededFor`. */
function evaluate(program, outputs, needed, head, queries, keys) {
  const { nodes, belongs } = program;
  const values = new Map([[0, Float64Array.of(head)], [1, queries], [2, keys]]);
  const lengths = [1, queries.length, keys.length, keys.length]; // pairs: one query at a time
  for (const node of needed.filter((each) => each > 2)) {
    const out = new Float64Array(lengths[belongs[node]]);
    if (nodes[node][0] === "const") out[0] = nodes[node][1];
    else if (belongs[node] !== BY_PAIR) apply(program, node, out, (each) => stretched(values.get(each), out.length));
    values.set(node, out);
  }
  const rows = new Map(); // map from node to its values for one query and all keys
  const rowOf = (node) => {
    if (!rows.has(node)) rows.set(node, belongs[node] & BY_KEY ? values.get(node) : new Float64Array(keys.length));
    return rows.get(node);
  };
  const steps = needed.filter((node) => belongs[node] === BY_PAIR);
  const used = [...outputs, ...steps.flatMap((node) => operandsOf(nodes[node]))];
  const spread = [...new Set(used)].filter((node) => !(belongs[node] & BY_KEY));
  const found = outputs.map(() => new Float64Array(queries.length * keys.length));
  for (let row = 0; row < queries.length; row++) {
    for (const node of spread) rowOf(node).fill(values.get(node)[belongs[node] === ONE ? 0 : row]);
    for (const node of steps) apply(program, node, values.get(node), rowOf);
    outputs.forEach((node, index) => found[index].set(rowOf(node), row * keys.length));
  }
  return found;
}

function operandsOf([name, ...operands]) {
  return name === "const" ? [] : operands.slice(name === "at" ? 1 : 0);
}

/** `values`, or its single value repeated to this length. */
function stretched(values, length) {
  return values.length === length ? values : new Float64Array(length).fill(values[0]);
}

function apply({ nodes, tables }, node, out, valuesOf) {
  const [name, ...operands] = nodes[node];
  if (name === "at") lookUp(out, tables[operands[0]], operands.slice(1).map(valuesOf));
  else OPERATIONS[name](out, ...operands.map(valuesOf));
}

/** Fill `out` with table entries at one index per dim; negative from the end, NaN (never true) if out of range. */
function lookUp(out, { shape, values }, indices) {
  for (let i = 0; i < out.length; i++) {
    let place = 0;
    for (let axis = 0; axis < shape.length; axis++) {
      const index = indices[axis][i] < 0 ? indices[axis][i] + shape[axis] : indices[axis][i];
      place = index >= 0 && index < shape[axis] ? place * shape[axis] + index : NaN;
    }
    out[i] = values[place];
  }
}
