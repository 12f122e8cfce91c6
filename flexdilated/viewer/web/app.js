// The page: its state, and the changes by wheel, pointers, keys and controls. Each change requests a frame.

const SLICE = 24; // milliseconds of counting in each frame
const REPAINT = 180; // milliseconds between two paintings of a picture that still changes
const LINK_AFTER = 200; // milliseconds of rest: browsers refuse addresses that change too often
const MOST_SHARES = 24e6; // most numbers of a picture; on large screens with many branches a cell is several pixels
const WHEEL = 0.0018; // doublings of the scale for one pixel of the wheel
const NUDGE = 1 / 8; // fraction of the view that one press of an arrow key moves
const CLOSE = 1 / 24; // largest number of tokens per pixel at which `goTo` shows a pair
const ARROWS = { ArrowUp: [0, -1], ArrowDown: [0, 1], ArrowLeft: [-1, 0], ArrowRight: [1, 0] };

const at = (name) => document.getElementById(name);

class App {
  constructor(data) {
    this.canvas = at("picture");
    this.context = this.canvas.getContext("2d");
    this.form = at("controls");
    this.painted = -Infinity;
    this.frameAsked = false;
    this.state = {
      data,
      program: programOf(data.program),
      outputs: data.branches.map((branch) => branch.node),
      view: new View(data.num_queries, data.num_keys),
      head: data.head,
      order: "natural",
      block: 128,
      shown: data.branches.map(() => true),
      cursor: null,
      pinned: false,
      image: null,
      before: null, // the last picture, drawn where cells are not known yet
      ratio: 1,
    };
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.setPalette());
    addEventListener("hashchange", ({ newURL }) => {
      const { hash } = new URL(newURL);
      if (hash.slice(1) !== linkOf(this.state)) this.follow(hash);
    });
    new ResizeObserver(() => this.resize()).observe(this.canvas.parentElement);
    listenToCanvas(this.canvas, this);
    listenToForm(this.form, this);
    this.palette = paletteOf(data.branches.length);
    this.follow(location.hash);
    this.setPalette();
  }

  setPalette() {
    this.palette = paletteOf(this.state.data.branches.length);
    buildLegend(this.state, this.palette, () => this.repaint());
    this.explain();
    this.repaint();
  }

  follow(hash) {
    this.measure();
    followLink(hash, this.state);
    this.settingsChanged();
  }

  /** Resize the canvas to its parent element, with one canvas pixel for each pixel of the screen. */
  measure() {
    const { state, canvas } = this;
    const { width, height } = canvas.parentElement.getBoundingClientRect();
    state.ratio = devicePixelRatio;
    const [wide, high] = [Math.max(160, Math.floor(width)), Math.max(160, Math.floor(height))];
    [canvas.width, canvas.height] = [Math.round(wide * state.ratio), Math.round(high * state.ratio)];
    [canvas.style.width, canvas.style.height] = [`${wide}px`, `${high}px`];
    [state.view.width, state.view.height] = [wide - RULER.left, high - RULER.top];
  }

  resize() {
    const { view } = this.state;
    const [width, height, whole] = [view.width, view.height, view.scale >= view.wholeScale * 0.999];
    this.measure();
    if (width !== view.width || height !== view.height) {
      view.show(view.q, view.k, whole ? view.wholeScale : view.scale);
      this.viewChanged();
    }
    drawAll(this.context, this.state, this.palette); // measuring has cleared the canvas
  }

  /** Update the page after a change of the head or of the order of tokens. */
  settingsChanged() {
    const { state } = this;
    const rate = state.order === "residue" ? state.data.residue : 1;
    state.queries = orderOf(state.data.num_queries, rate);
    state.keys = orderOf(state.data.num_keys, rate);
    state.before = state.image = null;
    fillForm(this.form, state);
    this.viewChanged();
  }

  /** Begin a new picture of the view, and update the link later. */
  viewChanged() {
    const { state } = this;
    const { view, outputs, data: { tiles } } = state;
    clearTimeout(this.linkTimer);
    this.linkTimer = setTimeout(() => history.replaceState(null, "", `#${linkOf(state)}`), LINK_AFTER);
    if (state.image?.density.isDrawn) state.before = state.image;
    const side = Math.ceil(Math.sqrt((view.width * view.height * outputs.length) / MOST_SHARES));
    const rows = cellEdges(view.q, side * view.scale, Math.ceil(view.height / side), view.numQueries);
    const columns = cellEdges(view.k, side * view.scale, Math.ceil(view.width / side), view.numKeys);
    state.image = imageOf(new Density({ ...state, tiles, grids: gridsOf(state) }, rows, columns));
    this.painted = -Infinity;
    this.explain();
    this.askFrame();
  }

  askFrame() {
    if (!this.frameAsked) requestAnimationFrame(() => this.frame());
    this.frameAsked = true;
  }

  frame() {
    this.frameAsked = false;
    const { state } = this;
    const { density } = state.image;
    const [now, wasFinished, wasDrawn] = [performance.now(), density.finished, density.isDrawn];
    density.work(now + SLICE);
    if (!wasFinished && (density.finished || density.isDrawn !== wasDrawn || now - this.painted > REPAINT)) {
      repaint(state.image, this.palette, state.shown);
      this.painted = now;
      this.explain();
    }
    if (density.isDrawn) state.before = null;
    drawAll(this.context, state, this.palette);
    this.report();
    if (!density.finished) this.askFrame();
  }

  repaint() {
    repaint(this.state.image, this.palette, this.state.shown);
    this.askFrame();
  }

  /** Write the scale and the progress below the picture. */
  report() {
    const { view, image, order } = this.state;
    const [tokens, pixels] = [view.scale, 1 / view.scale].map(Math.round);
    const size = view.scale > 1 ? `1 pixel is ${plural(tokens, "token")} a side` : `1 token is ${plural(pixels, "pixel")}`;
    const slots = order === "residue" ? " · rulers count slots" : "";
    const work = `${image.density.progress}${image.density.finished ? "" : ", in progress"}`;
    at("state").textContent = `${size} · ${work}${slots}`;
  }

  explain() {
    showReasons(this.state, this.palette);
  }

  /** Set the pair that is explained: the one under the pointer, or a pinned one. */
  setCursor(cursor, pinned) {
    Object.assign(this.state, { cursor, pinned: pinned && cursor !== null });
    this.explain();
    this.askFrame();
  }

  /** Pin a pair of slots, and move the view if the pair is outside. */
  hold(q, k, scale = this.state.view.scale) {
    const { view } = this.state;
    const cursor = { q: clamp(q, 0, view.numQueries - 1), k: clamp(k, 0, view.numKeys - 1) };
    const [x, y] = view.pixelOf(cursor);
    const isSeen = x >= 0 && y >= 0 && x < view.width && y < view.height;
    if (!isSeen || scale !== view.scale) view.centreOn(cursor, scale);
    this.setCursor(cursor, true);
    const { title, verdict, notes } = reasonsFor(this.state);
    at("spoken").textContent = `${title}: ${verdict}. ${notes[0]}.`;
    this.viewChanged();
  }

  /** Move the pinned pair by one pair, or by one pixel if that is more. */
  moveCursor(right, down) {
    const { view, cursor } = this.state;
    const by = Math.max(1, Math.round(view.scale));
    const from = cursor ?? view.slotsAt(view.width / 2, view.height / 2);
    this.hold(from.q + down * by, from.k + right * by);
  }

  /** Show the pair of these positions from nearby. */
  goTo(query, key) {
    const { view, queries, keys } = this.state;
    if (!Number.isInteger(query) || !Number.isInteger(key)) return;
    const slot = (order, position) => order.slot(clamp(position, 0, order.numTokens - 1));
    this.hold(slot(queries, query), slot(keys, key), Math.min(view.scale, CLOSE));
  }

  /** Call a method of the view, such as "zoomAt", with these arguments; begin a new picture. */
  look(method, ...how) {
    this.state.view[method](...how);
    this.viewChanged();
  }

  zoom(factor) {
    this.look("zoomAt", factor, this.state.view.width / 2, this.state.view.height / 2);
  }
}

/** Grid of tiles of each branch for the head; null in residue order, or if the page has no grid for the head. */
function gridsOf({ data: { tiles }, head, order }) {
  return tiles.grid_of.map((heads) => (order === "natural" ? tiles.grids[heads[head]] ?? null : null));
}

function listenToCanvas(canvas, app) {
  const { view } = app.state;
  const held = new Map(); // map from pointer id to [x, y], for pressed pointers
  let moved = 0;
  const placeOf = (event) => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left - RULER.left, event.clientY - box.top - RULER.top];
  };
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const lines = event.deltaMode === WheelEvent.DOM_DELTA_LINE ? 24 : 1;
    app.look("zoomAt", 2 ** (-event.deltaY * lines * WHEEL * (event.ctrlKey ? 4 : 1)), ...placeOf(event));
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => pressKey(event, app) && event.preventDefault());
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    held.set(event.pointerId, placeOf(event));
    if (held.size === 1) moved = 0;
  });
  canvas.addEventListener("pointermove", (event) => {
    const place = placeOf(event);
    if (!held.has(event.pointerId)) return app.state.pinned || app.setCursor(view.slotsAt(...place), false);
    const from = grip(held);
    moved += Math.hypot(...place.map((to, axis) => to - held.get(event.pointerId)[axis]));
    held.set(event.pointerId, place);
    const to = grip(held);
    view.panBy(from.x - to.x, from.y - to.y);
    app.look("zoomAt", from.apart && to.apart ? to.apart / from.apart : 1, to.x, to.y);
  });
  const release = (event) => {
    const last = held.get(event.pointerId);
    held.delete(event.pointerId);
    if (!last || held.size || moved >= 4 || event.type !== "pointerup") return;
    app.setCursor(app.state.pinned ? null : view.slotsAt(...last), true);
  };
  for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, release);
  canvas.addEventListener("pointerleave", () => held.size || app.state.pinned || app.setCursor(null, false));
}

/** Midpoint of the pressed pointers, and their distance `apart`, 0 for one pointer. Dragging and pinching use both. */
function grip(held) {
  const [first, second = first] = [...held.values()];
  const apart = Math.hypot(first[0] - second[0], first[1] - second[1]);
  return { x: (first[0] + second[0]) / 2, y: (first[1] + second[1]) / 2, apart };
}

/** Act on a pressed key; return false if it has no action. */
function pressKey(event, app) {
  if (event.ctrlKey || event.metaKey || event.altKey) return false;
  const { view, cursor } = app.state;
  const arrow = ARROWS[event.key];
  if (arrow && event.shiftKey) app.moveCursor(...arrow);
  else if (arrow) app.look("panBy", arrow[0] * view.width * NUDGE, arrow[1] * view.height * NUDGE);
  else if (event.key === "+" || event.key === "=") app.zoom(Math.SQRT2);
  else if (event.key === "-" || event.key === "_") app.zoom(Math.SQRT1_2);
  else if (event.key === "0" || event.key === "Home") app.look("showWhole");
  else if (event.key === "Enter" && cursor) app.look("centreOn", cursor, view.scale / 4);
  else if (event.key === "Escape") app.setCursor(null, false);
  else return false;
  return true;
}

function listenToForm(form, app) {
  const { state } = app;
  const { head, block, query, key } = form.elements;
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    app.goTo(Number(query.value || NaN), Number(key.value || NaN));
  });
  form.addEventListener("change", ({ target }) => {
    if (target === query || target === key) return;
    const chosen = Math.floor(Number(head.value));
    if (chosen >= 0 && chosen < state.data.num_heads) state.head = chosen;
    if (target.name === "order") Object.assign(state, { order: target.value, cursor: null, pinned: false });
    state.block = Number(block.value);
    if (target === block) app.viewChanged();
    else app.settingsChanged();
  });
  const press = (name, action) => form.querySelector(`[data-press=${name}]`).addEventListener("click", action);
  press("in", () => app.zoom(2));
  press("out", () => app.zoom(0.5));
  press("whole", () => app.look("showWhole"));
}

/** Show the state in the fields. */
function fillForm({ elements }, { data, head, order, block }) {
  elements.head.value = String(head);
  elements.head.max = String(data.num_heads - 1);
  elements.order.value = order;
  const isOffered = [...elements.block.options].some((option) => Number(option.value) === block);
  if (!isOffered) elements.block.add(new Option(grouped(block), String(block)));
  elements.block.value = String(block);
}

/** Write the pattern and its sizes, and hide controls that have no meaning for it. */
function describePage(data) {
  const [queries, keys] = [data.num_queries, data.num_keys].map((each) => shortTokens(each));
  const sizes = queries === keys ? `${queries} tokens` : `${queries} queries, ${keys} keys`;
  at("pattern").textContent = at("pattern").title = data.phrase; // the header shows two lines of it
  at("sizes").textContent = `${sizes}, ${plural(data.num_heads, "head")}`;
  at("residue").textContent = `residue, R = ${data.residue}`;
  at("heads").hidden = data.num_heads === 1;
  at("orders").hidden = !data.residue;
  at("often").hidden = data.branches.length < 2;
}

/** The page's data: JSON that is deflated and written in base64. */
async function readData() {
  const packed = Uint8Array.from(atob(at("data").textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

readData().then((data) => {
  describePage(data);
  globalThis.viewer = new App(data); // for the console, and for tests
});
