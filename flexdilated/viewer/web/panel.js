// The column beside the picture: the legend of branches, and why the pair at hand is allowed or not.

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

function reasonItem({ phrase, allowed, why, parts }) {
  const [className, textContent, title] = allowed ? ["mark yes", "✓ ", "allowed"] : ["mark no", "✗ ", "not allowed"];
  const mark = element("span", { className, textContent, title });
  const item = element("li", {}, element("div", { className: "rule" }, mark, element("code", { textContent: phrase })));
  if (why) item.append(element("div", { className: "why", textContent: why }));
  if (parts.length) item.append(element("ul", {}, ...parts.map(reasonItem)));
  return item;
}

/** The same in one sentence, for those who listen. */
function spokenReason(state) {
  const { title, verdict, branches } = reasonsFor(state, state.cursor);
  return `${title}: ${verdict}. ${branches.length === 1 ? branches[0].why : ""}`;
}
