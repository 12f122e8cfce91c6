// The page: its state, and a frame at a time what follows from it.

const SLICE = 24; // milliseconds of counting a frame
const REPAINT = 180; // milliseconds between two looks at a picture that still changes
const LINK_EVERY = 400; // milliseconds: browsers refuse addresses that change more often for long
const MOST_SHARES = 24e6; // numbers of a picture: on large screens with many branches a cell is several pixels

class App {
  constructor(data) {
    this.canvas = document.getElementById("picture");
    this.context = this.canvas.getContext("2d");
    this.form = document.getElementById("controls");
    this.state = {
      data,
      program: programOf(data.program),
      outputs: data.branches.map((branch) => branch.node),
      view: viewport(data.num_queries, data.num_keys),
      head: data.head,
      order: "natural",
      block: 128,
      sharding: data.ranks?.first ?? null,
      shown: data.branches.map(() => true),
      cursor: null,
      pinned: false,
      image: null,
      before: null,
      ratio: 1,
    };
    this.painted = 0;
    this.frameAsked = false;
    this.linked = -Infinity;
  }

  start() {
    this.setPalette();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => (this.setPalette(), this.restart()));
    this.followLink(location.hash);
    addEventListener("hashchange", ({ newURL }) => {
      const { hash } = new URL(newURL);
      if (hash.slice(1) !== linkOf(this.state)) this.followLink(hash);
    });
    new ResizeObserver(() => this.resize()).observe(this.canvas.parentElement);
    listenToCanvas(this.canvas, this);
    listenToForm(this.form, this);
  }

  setPalette() {
    const { data, shown } = this.state;
    this.palette = paletteOf(document.documentElement, Math.max(1, data.branches.length));
    const changed = (branch, on) => ((shown[branch] = on), this.repaint());
    buildLegend(document.getElementById("legend"), data, this.palette, shown, changed);
    drawScale(document.getElementById("scale"), this.palette);
  }

  followLink(hash) {
    const { state } = this;
    this.measure();
    const { q, k, span } = readLink(hash, state, state.data);
    showWhole(state.view);
    if (span !== null) {
      setSpan(state.view, span);
      [state.view.q, state.view.k] = [q ?? 0, k ?? 0];
      keepInside(state.view);
    }
    this.settingsChanged();
  }

  /** The canvas fills its place, pixel by pixel of the screen. */
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
    const [width, height] = [view.width, view.height];
    const whole = view.scale >= wholeScale(view) * 0.999;
    this.measure();
    if (width === view.width && height === view.height) return;
    if (whole) showWhole(view);
    keepInside(view);
    this.viewChanged();
  }

  /** Head, order or ranks are others. */
  settingsChanged() {
    const { state } = this;
    const { data, order } = state;
    const rate = order === "residue" ? data.residue : 1;
    state.queries = orderOf(data.num_queries, rate);
    state.keys = orderOf(data.num_keys, rate);
    state.image = state.before = null;
    fillForm(this.form, state);
    this.viewChanged();
  }

  viewChanged() {
    this.writeLink();
    this.restart();
  }

  writeLink() {
    clearTimeout(this.linkTimer);
    const wait = this.linked + LINK_EVERY - performance.now();
    if (wait > 0) {
      this.linkTimer = setTimeout(() => this.writeLink(), wait);
      return;
    }
    const link = linkOf(this.state);
    if (location.hash.slice(1) === link) return;
    history.replaceState(null, "", `#${link}`);
    this.linked = performance.now();
  }

  /** Count the cells of the view; until they are known, what was seen before stands in for them. */
  restart() {
    const { state } = this;
    const { view } = state;
    if (state.image?.density.isDrawn()) state.before = keepsake(state.image);
    const side = Math.ceil(Math.sqrt((view.width * view.height * state.outputs.length) / MOST_SHARES));
    const rows = cellEdges(view.q, side * view.scale, Math.ceil(view.height / side), view.numQueries);
    const columns = cellEdges(view.k, side * view.scale, Math.ceil(view.width / side), view.numKeys);
    state.image = imageOf(new Density({ ...state, tiles: state.data.tiles, grids: gridsOf(state) }, rows, columns));
    this.painted = -Infinity;
    this.explain();
    this.askFrame();
  }

  askFrame() {
    if (this.frameAsked) return;
    this.frameAsked = true;
    requestAnimationFrame(() => this.frame());
  }

  frame() {
    this.frameAsked = false;
    const { state } = this;
    const { density } = state.image;
    const now = performance.now();
    const wasDrawn = density.isDrawn();
    const changed = density.work(now + SLICE);
    const complete = !wasDrawn && density.isDrawn();
    if (changed && (complete || density.finished || now - this.painted > REPAINT)) {
      repaint(state.image, this.palette, state.shown);
      this.painted = now;
      this.explain();
    }
    if (density.isDrawn()) state.before = null;
    drawAll(this.context, state, this.palette);
    this.report();
    if (!density.finished) this.askFrame();
  }

  repaint() {
    repaint(this.state.image, this.palette, this.state.shown);
    this.askFrame();
  }

  report() {
    const { view, image, sharding } = this.state;
    const note = document.getElementById("rank-note");
    note.hidden = !sharding;
    if (sharding) note.textContent = rankLegend(this.state);
    const { density } = image;
    const [tokens, pixels] = [grouped(Math.round(view.scale)), Math.round(1 / view.scale)];
    const size = view.scale > 1 ? `1 pixel is ${tokens} tokens a side` : `1 token is ${plural(pixels, "pixel")}`;
    const pairs = density.samples ? ` from ${grouped(density.asked(0, 0))} pairs a pixel` : "";
    const work = `${workText(density)}${pairs}${density.finished ? "" : ", in progress"}`;
    const fine = sharding && areRanksTooFine(this.state) ? ", and ranks are too fine to draw" : "";
    const order = this.state.order === "residue" ? ` · rulers count slots${fine}` : "";
    document.getElementById("state").textContent = `${size} · ${work}${order}`;
  }

  explain() {
    showReasons(document.getElementById("reasons"), this.state, this.palette);
  }

  pointAt(x, y) {
    const { state } = this;
    if (state.pinned) return;
    state.cursor = x === null ? null : this.slotsAt(x, y);
    this.explain();
    this.askFrame();
  }

  slotsAt(x, y) {
    const { view } = this.state;
    if (x < 0 || y < 0) return null;
    const q = slotUnder(view.q, view.scale, y, view.numQueries);
    const k = slotUnder(view.k, view.scale, x, view.numKeys);
    return q === null || k === null ? null : { q, k };
  }

  pin(x, y) {
    const { state } = this;
    if (state.pinned) return this.unpin();
    state.cursor = this.slotsAt(x, y);
    state.pinned = state.cursor !== null;
    this.explain();
    this.askFrame();
  }

  unpin() {
    this.state.pinned = false;
    this.state.cursor = null;
    this.explain();
    this.askFrame();
  }

  /** By one pair, or one pixel where that is more; the view follows. */
  moveCursor(right, down) {
    const { state } = this;
    const { view } = state;
    const by = Math.max(1, Math.round(view.scale));
    const middle = (start, pixels) => Math.floor(start + (pixels * view.scale) / 2);
    const from = state.cursor ?? { q: middle(view.q, view.height), k: middle(view.k, view.width) };
    this.hold(from.q + down * by, from.k + right * by);
  }

  hold(q, k) {
    const { state } = this;
    const { view } = state;
    state.cursor = { q: clamp(q, 0, view.numQueries - 1), k: clamp(k, 0, view.numKeys - 1) };
    state.pinned = true;
    const [x, y] = [(state.cursor.k - view.k) / view.scale, (state.cursor.q - view.q) / view.scale];
    if (x < 0 || y < 0 || x >= view.width || y >= view.height) centreOn(view, state.cursor.q, state.cursor.k);
    document.getElementById("spoken").textContent = spokenReason(state);
  }

  /** Closer to the pair at hand, in the end pair by pair. */
  approach() {
    const { view, cursor } = this.state;
    view.scale /= 4;
    keepInside(view);
    centreOn(view, cursor.q, cursor.k);
  }

  /** The pair of these positions. */
  goTo(query, key) {
    const { state } = this;
    const [q, k] = [Number(query), Number(key)];
    if (!Number.isInteger(q) || !Number.isInteger(k)) return;
    const { view } = state;
    if (view.scale > 1 / 24) view.scale = 1 / 24;
    const slot = (order, position, tokens) => order.slot(clamp(position, 0, tokens - 1));
    this.hold(slot(state.queries, q, view.numQueries), slot(state.keys, k, view.numKeys));
    keepInside(view);
    centreOn(view, state.cursor.q, state.cursor.k);
    this.viewChanged();
  }

  zoom(factor) {
    const { view } = this.state;
    zoomAt(view, factor, view.width / 2, view.height / 2);
  }

  chooseHead(text) {
    const { state } = this;
    const head = Math.floor(Number(text));
    if (head >= 0 && head < state.data.num_heads) state.head = head;
    this.settingsChanged();
  }

  chooseOrder(order) {
    this.state.order = order;
    this.state.cursor = null;
    this.state.pinned = false;
    this.settingsChanged();
  }

  chooseBlock(block) {
    this.state.block = block;
    this.viewChanged();
  }

  chooseRanks(name) {
    this.state.sharding = name === "off" ? null : name;
    this.viewChanged();
  }
}

/** What is known of tiles of each branch for the head: nothing where slots are in another order. */
function gridsOf({ data, head, order }) {
  const { grids, grid_of: gridOf } = data.tiles;
  return gridOf.map((heads) => (order === "natural" ? grids[heads[head]] ?? null : null));
}

/** The page's data: JSON that is deflated and written in base64. */
async function readData() {
  const text = atob(document.getElementById("data").textContent);
  const packed = Uint8Array.from(text, (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

/** What a pattern is called, how large it is, and which of the controls mean anything for it. */
function describePage(data) {
  const [queries, keys] = [data.num_queries, data.num_keys].map(shortTokens);
  const sizes = queries === keys ? `${queries} tokens` : `${queries} queries, ${keys} keys`;
  const pattern = document.getElementById("pattern");
  pattern.textContent = pattern.title = data.phrase; // the header shows two lines of it
  document.getElementById("sizes").textContent = `${sizes}, ${plural(data.num_heads, "head")}`;
  document.getElementById("heads").hidden = data.num_heads === 1;
  document.getElementById("orders").hidden = !data.residue;
  document.getElementById("residue").textContent = data.residue ? `residue, R = ${data.residue}` : "";
  document.getElementById("rank-choice").hidden = !data.ranks;
  document.getElementById("often").hidden = data.branches.length < 2;
}

readData().then((data) => {
  describePage(data);
  const app = new App(data);
  app.start();
  globalThis.viewer = app; // for the console, and for tests
});
