// The column beside the picture: the legend of branches, and what each part of the rule says of the pair at hand.

const HINT = "Point at a pair, or focus the picture and press Shift with an arrow key: it is explained here.";

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

/** One line a branch, each with a box that hides it; `changed` is called with what is shown. */
function buildLegend(place, data, palette, shown, changed) {
  const lines = data.branches.map((branch, index) => {
    const box = element("input", { type: "checkbox", checked: shown[index] });
    box.addEventListener("change", () => changed(index, box.checked));
    const phrase = element("code", { textContent: branch.phrase });
    return element("li", {}, element("label", {}, box, swatch(palette, index), phrase));
  });
  place.replaceChildren(...lines);
}

function swatch(palette, branch) {
  const made = element("span", { className: "swatch", ariaHidden: "true" });
  made.style.background = `rgb(${palette.hues[branch].join(" ")})`;
  return made;
}

/** The shades of densities, as a strip of colour. */
function drawScale(canvas, palette) {
  const context = canvas.getContext("2d");
  const [least, out] = [-4, [0, 0, 0]]; // powers of ten
  for (let x = 0; x < canvas.width; x++) {
    colourOf([10 ** (least * (1 - x / (canvas.width - 1)))], palette, out);
    context.fillStyle = `rgb(${out.join(" ")})`;
    context.fillRect(x, 0, 1, canvas.height);
  }
}

function showReasons(place, state, palette) {
  const { cursor } = state;
  if (!cursor) {
    place.replaceChildren(element("p", { className: "hint", textContent: HINT }));
    return;
  }
  const reasons = reasonsFor(state, cursor);
  const branches = reasons.branches.map((branch, index) => branchItem(branch, palette, index));
  const notes = [...reasons.notes, cellNote(state)].filter(Boolean);
  place.replaceChildren(
    element("h3", { textContent: reasons.title }),
    element("p", { className: reasons.allowing ? "verdict yes" : "verdict no", textContent: reasons.verdict }),
    ...notes.map((note) => element("p", { className: "note", textContent: note })),
    element("ol", { className: "branches" }, ...branches),
  );
}

function branchItem(branch, palette, index) {
  const item = reasonItem(branch);
  item.firstChild.prepend(swatch(palette, index));
  return item;
}

function reasonItem({ phrase, allowed, parts }) {
  const [className, textContent, title] = allowed ? ["mark yes", "✓ ", "allowed"] : ["mark no", "✗ ", "not allowed"];
  const mark = element("span", { className, textContent, title });
  const code = element("code", { textContent: phrase });
  const item = element("li", {}, element("div", { className: "rule" }, mark, code));
  if (parts.length) item.append(element("ul", {}, ...parts.map(reasonItem)));
  return item;
}

/** The same in one sentence, for those who listen. */
function spokenReason(state) {
  const { title, verdict, notes } = reasonsFor(state, state.cursor);
  return `${title}: ${verdict}. ${notes[0]}.`;
}

/** What the page says of a pair of slots. */
function reasonsFor(state, cursor) {
  const { queries, keys, data } = state;
  const [q, k] = [queries.position(cursor.q), keys.position(cursor.k)];
  const branches = answersFor(state, q, k);
  const allowing = branches.filter((branch) => branch.allowed).length;
  const inResidues = state.order === "residue";
  const slots = inResidues ? `slots ${grouped(cursor.q)} and ${grouped(cursor.k)} of the residue-major order` : "";
  const heads = data.num_heads > 1 ? `head ${state.head} of ${data.num_heads}` : "";
  return {
    title: `query ${grouped(q)}, key ${grouped(k)}`,
    verdict: verdictOf(allowing, branches.length),
    allowing,
    notes: [distanceText(q, k), slots, heads, rankNote(state, q, k)],
    branches,
  };
}

/** Whether each branch allows a pair, and each part of it that is for this head. */
function answersFor({ data, program, head }, q, k) {
  const answer = ({ phrase, node, parts }) => {
    const needed = neededFor(program, [node]);
    const [[found]] = evaluate(program, [node], needed, head, Float64Array.of(q), Float64Array.of(k));
    const here = parts.filter(({ heads }) => heads?.includes(head) ?? true);
    return { phrase, allowed: found === 1, parts: here.map(answer) };
  };
  return data.branches.map(answer);
}

function verdictOf(allowing, branches) {
  if (!allowing) return "not allowed";
  return branches === 1 ? "allowed" : `allowed by ${allowing} of ${branches} branches: weight ${allowing}`;
}

function distanceText(q, k) {
  if (k === q) return "the key is the query itself";
  return `the key comes ${plural(Math.abs(q - k), "token")} ${k > q ? "after" : "before"} the query`;
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
  const { rows, columns, width, height } = image.density;
  const [row, column] = [firstAbove(rows, cursor.q) - 1, firstAbove(columns, cursor.k) - 1];
  if (row < 0 || column < 0 || row >= height || column >= width) return null;
  const size = `${grouped(rows[row + 1] - rows[row])} × ${grouped(columns[column + 1] - columns[column])}`;
  const found = shareOfCell(image.density, row, column);
  return found && `the pixel stands for ${size} pairs; allowed: ${found}`;
}

/** The share that is drawn, marked where it is a sample; null where nothing is known yet. */
function shareOfCell(density, row, column) {
  const cell = row * density.width + column;
  if (density.share.some((each) => each[cell] < 0)) return null;
  const share = density.share.reduce((total, each) => total + each[cell], 0);
  if (density.certain.every((each) => each[cell])) {
    const [high, wide] = density.tiles.sides.map(grouped);
    return partText(share) + (share > 0 && density.coarse ? ` (counted in tiles of ${high} × ${wide})` : "");
  }
  const found = share > 2 * FAINTEST * density.share.length ? `about ${partText(share)}` : "none found";
  return `${found} (sampled: ${grouped(density.asked(row, column))} of them)`;
}

/** A share of all pairs; above 1 where branches count pairs several times. */
function partText(share) {
  return share > 1 ? `${Number(share.toPrecision(3))} times all` : shareText(share, 1);
}
