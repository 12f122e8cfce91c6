// Why a pair is allowed or not, in words: first the pair, then each branch, and each part of it.

/** What the page says of a pair of slots. */
function reasonsFor(state, cursor) {
  const { queries, keys, rules, data } = state;
  const [q, k] = [queries.position(cursor.q), keys.position(cursor.k)];
  const allowing = rules.filter((rule) => rule.allowed(q, k)).length;
  const inResidues = state.order === "residue";
  const slots = inResidues ? `slots ${grouped(cursor.q)} and ${grouped(cursor.k)} of the residue-major order` : "";
  return {
    title: `query ${grouped(q)}, key ${grouped(k)}`,
    verdict: verdictOf(allowing, rules.length),
    allowing,
    notes: [slots, data.num_heads > 1 ? `head ${state.head} of ${data.num_heads}` : "", rankNote(state, q, k)],
    branches: rules.map((rule) => reasonOf(rule, q, k)),
  };
}

function verdictOf(allowing, branches) {
  if (!allowing) return "not allowed";
  return branches === 1 ? "allowed" : `allowed by ${allowing} of ${branches} branches: weight ${allowing}`;
}

function reasonOf(rule, q, k) {
  return {
    phrase: rule.phrase,
    allowed: rule.allowed(q, k),
    why: rule.why(q, k),
    parts: (rule.parts?.(q, k) ?? []).map((part) => reasonOf(part.rule, part.q, part.k)),
  };
}

function rankNote(state, q, k) {
  const sharding = state.data.ranks?.shardings[state.sharding];
  if (!sharding) return "";
  const [target, source] = [rankOf(sharding, q), rankOf(sharding, k)];
  if (target === source) return `query and key both lie on rank ${target}`;
  const bytes = sharding.received[target][source];
  const much = bytes ? `${bytesText(bytes)} of keys and values` : "nothing";
  return `the query lies on rank ${target}, which receives ${much} from the key's rank ${source}`;
}

/** How full the cell under a pair of slots is; null where a cell is one pair, or not of this picture. */
function cellNote({ image, view, cursor }) {
  if (!image || view.scale <= 1 || !cursor) return null;
  const { rows, columns, width } = image.density;
  const [row, column] = [firstAbove(rows, cursor.q) - 1, firstAbove(columns, cursor.k) - 1];
  if (row < 0 || column < 0 || row >= image.density.height || column >= width) return null;
  const size = `${grouped(rows[row + 1] - rows[row])} × ${grouped(columns[column + 1] - columns[column])}`;
  const found = shareOfCell(image.density, row * width + column);
  return found && `the pixel stands for ${size} pairs; allowed: ${found}`;
}

/** The share that is drawn, or both bounds where they say the same to the eye; null where nothing is known yet. */
function shareOfCell({ low, high, share, estimates }, cell) {
  const sum = (shares) => shares.reduce((total, each) => total + each[cell], 0);
  if (share.some((each) => each[cell] < 0)) return null;
  const inDoubt = (branch) => !isSettled({ low: low[branch][cell], high: high[branch][cell] }, 1);
  const doubtful = share.map((_, branch) => branch).filter(inDoubt);
  const bounds = [...new Set([sum(low), sum(high)].map(partText))].join(" to ");
  if (!doubtful.length) return bounds;
  const pairs = Math.min(...doubtful.map((branch) => estimates.askedOf(branch, cell)));
  const certain = sum(low) >= 0 ? `, for certain ${bounds}` : "";
  const found = sum(share) > 2 * FAINTEST * share.length ? `about ${partText(sum(share))}` : "none found";
  return `${found} (estimated from ${grouped(pairs)} of them${certain})`;
}

/** A share of all pairs; above 1 where branches count pairs several times. */
function partText(share) {
  return share > 1 ? `${Number(share.toPrecision(3))} times all` : shareText(share, 1);
}
