// The column next to the picture: the legend of branches, and the reasons for the pair under the cursor.

const HINT = "Point at a pair, or focus the picture and press Shift with an arrow key: it is explained here.";

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

const codeOf = (textContent, className = "") => element("code", { textContent, className });
const noteOf = (...children) => element("p", { className: "note" }, ...children);

/** Fill the legend: one line for each branch, with a box that shows or hides the branch and calls `changed`. */
function buildLegend({ data, shown }, palette, changed) {
  const lines = data.branches.map((branch, index) => {
    const box = element("input", { type: "checkbox", checked: shown[index] });
    box.addEventListener("change", () => ((shown[index] = box.checked), changed()));
    return element("li", {}, element("label", {}, box, swatch(palette, index), codeOf(branch.phrase)));
  });
  at("legend").replaceChildren(...lines);
  const canvas = at("scale");
  const context = canvas.getContext("2d");
  for (let x = 0; x < canvas.width; x++) {
    context.fillStyle = `rgb(${colorOf([10 ** (4 * (x / (canvas.width - 1) - 1))], palette).join(" ")})`;
    context.fillRect(x, 0, 1, canvas.height);
  }
}

function swatch(palette, branch) {
  const made = element("span", { className: "swatch", ariaHidden: "true" });
  made.style.background = `rgb(${palette.hues[branch].join(" ")})`;
  return made;
}

function showReasons(state, palette) {
  const place = at("reasons");
  if (!state.cursor) return place.replaceChildren(element("p", { className: "hint", textContent: HINT }));
  const { title, verdict, allowed, notes, branches } = reasonsFor(state);
  const items = branches.map(reasonItem);
  items.forEach((item, branch) => item.firstChild.prepend(swatch(palette, branch)));
  place.replaceChildren(
    element("h3", { textContent: title }),
    element("p", { className: `verdict ${allowed ? "yes" : "no"}`, textContent: verdict }),
    ...notes.filter(Boolean).map((note) => noteOf(note)),
    element("ol", { className: "branches" }, ...items),
    ...commandFor(state),
  );
}

/** [note with the command line that explains the pair]; [] if the pattern cannot be written in a command. */
function commandFor({ data, queries, keys, cursor, head }) {
  if (!data.command) return [];
  const pair = `--query ${queries.position(cursor.q)} --key ${keys.position(cursor.k)} --head ${head}`;
  return [noteOf("The same with the blocks that hold the pair: ", codeOf(`${data.command} ${pair}`, "command"))];
}

function reasonItem({ phrase, allowed, text, parts }) {
  const [kind, textContent, title] = allowed ? ["yes", "✓ ", "allowed"] : ["no", "✗ ", "not allowed"];
  const mark = element("span", { className: `mark ${kind}`, textContent, title });
  const item = element("li", {}, element("div", { className: "rule" }, mark, codeOf(phrase)));
  if (text) item.append(element("div", { className: "why", textContent: text }));
  if (parts.length) item.append(element("ul", {}, ...parts.map(reasonItem)));
  return item;
}

/** Texts about the pair under the cursor, and about its cell. */
function reasonsFor(state) {
  const { queries, keys, data, cursor, order, head } = state;
  const [q, k] = [queries.position(cursor.q), keys.position(cursor.k)];
  const branches = answersFor(state, q, k);
  const weight = branches.filter(({ allowed }) => allowed).length;
  const [single, of] = [branches.length === 1, `${weight} of ${branches.length} branches: weight ${weight}`];
  const before = `the key comes ${plural(Math.abs(q - k), "token")} ${k > q ? "after" : "before"} the query`;
  const slots = `slots ${grouped(cursor.q)} and ${grouped(cursor.k)} of the residue-major order`;
  return {
    title: `query ${grouped(q)}, key ${grouped(k)}`,
    verdict: !weight ? "not allowed" : single ? "allowed" : `allowed by ${of}`,
    allowed: weight > 0,
    notes: [
      k === q ? "the key is the query itself" : before,
      order === "residue" ? slots : "",
      data.num_heads > 1 ? `head ${head} of ${data.num_heads}` : "",
      cellNote(state),
    ],
    branches,
  };
}

/** For each branch: its text, true if it allows the pair, the reason, and such answers for the parts that decide. */
function answersFor({ data, program, head }, q, k) {
  const valueOf = (node) => {
    const needed = neededFor(program, [node]);
    return evaluate(program, [node], needed, head, Float64Array.of(q), Float64Array.of(k))[0][0];
  };
  const answer = ({ phrase, node, reason, parts }) => {
    let said = reason;
    while ("node" in said) said = valueOf(said.node) ? said.yes : said.no;
    const text = said.text?.map((piece) => (typeof piece === "number" ? valueOf(piece) : piece)).join("") ?? "";
    return { phrase, allowed: valueOf(node) === 1, text, parts: said.parts.map((part) => answer(parts[part])) };
  };
  return data.branches.map(answer);
}

/** Text with the share of allowed pairs in the cell under the cursor; "" for single pairs and cells not drawn yet. */
function cellNote({ image: { density }, view, cursor }) {
  const { rows, columns, width, height, share } = density;
  const row = rows.findLastIndex((edge) => edge <= cursor.q);
  const column = columns.findLastIndex((edge) => edge <= cursor.k);
  if (view.scale <= 1 || row < 0 || column < 0 || row >= height || column >= width) return "";
  const cell = row * width + column;
  if (share.some((each) => each[cell] < 0)) return "";
  const total = share.reduce((sum, each) => sum + each[cell], 0);
  let allowed = shareText(total);
  if (!density.isCertain(cell)) {
    const met = total > 2 * FAINTEST * share.length;
    allowed = `${met ? `about ${allowed}` : "none found"} (sampled: ${grouped(density.asked(row, column))} of them)`;
  } else if (total && density.coarse) {
    allowed += ` (counted in tiles of ${density.tiles.sides.map(grouped).join(" × ")})`;
  }
  const size = `${grouped(rows[row + 1] - rows[row])} × ${grouped(columns[column + 1] - columns[column])}`;
  return `the pixel stands for ${size} pairs; allowed: ${allowed}`;
}
