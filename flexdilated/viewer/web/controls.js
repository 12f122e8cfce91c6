// Wheel, pointers, keys and buttons: each turns into a change of the view, the pair at hand or a setting.

const WHEEL = 0.0018; // of a doubling, for one pixel of the wheel

function listenToCanvas(canvas, app) {
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const lines = event.deltaMode === WheelEvent.DOM_DELTA_LINE ? 24 : 1;
    const [x, y] = placeOf(canvas, event);
    zoomAt(app.state.view, 2 ** (-event.deltaY * lines * WHEEL * (event.ctrlKey ? 4 : 1)), x, y);
    app.viewChanged();
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    if (pressKey(event, app)) event.preventDefault();
  });
  listenToPointers(canvas, app);
}

/** Pixels from the top left corner of the matrix. */
function placeOf(canvas, event) {
  const box = canvas.getBoundingClientRect();
  return [event.clientX - box.left - RULER.left, event.clientY - box.top - RULER.top];
}

function listenToPointers(canvas, app) {
  const held = new Map(); // pointers that are down, and where they are
  let moved = 0;
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    held.set(event.pointerId, placeOf(canvas, event));
    if (held.size === 1) moved = 0;
  });
  canvas.addEventListener("pointermove", (event) => {
    const place = placeOf(canvas, event);
    if (!held.has(event.pointerId)) return app.pointAt(...place);
    const before = new Map(held);
    held.set(event.pointerId, place);
    moved += Math.hypot(...place.map((at, axis) => at - before.get(event.pointerId)[axis]));
    follow(before, held, app);
  });
  const release = (event) => {
    const last = held.get(event.pointerId);
    held.delete(event.pointerId);
    if (last && !held.size && moved < 4 && event.type === "pointerup") app.pin(...last);
  };
  for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, release);
  canvas.addEventListener("pointerleave", () => held.size || app.pointAt(null, null));
}

/** One pointer drags; two pinch, about the point between them. */
function follow(before, held, app) {
  const [from, to] = [before, held].map((places) => {
    const [first, second] = [...places.values()];
    const last = second ?? first;
    const apart = Math.hypot(first[0] - last[0], first[1] - last[1]);
    return { x: (first[0] + last[0]) / 2, y: (first[1] + last[1]) / 2, apart };
  });
  panBy(app.state.view, from.x - to.x, from.y - to.y);
  if (from.apart && to.apart) zoomAt(app.state.view, to.apart / from.apart, to.x, to.y);
  app.viewChanged();
}

const ARROWS = { ArrowUp: [0, -1], ArrowDown: [0, 1], ArrowLeft: [-1, 0], ArrowRight: [1, 0] };

/** Whether the key means anything here. */
function pressKey(event, app) {
  if (event.ctrlKey || event.metaKey || event.altKey) return false;
  const { view } = app.state;
  const arrow = ARROWS[event.key];
  if (arrow && event.shiftKey) app.moveCursor(...arrow);
  else if (arrow) panBy(view, arrow[0] * view.width * NUDGE, arrow[1] * view.height * NUDGE);
  else if (event.key === "+" || event.key === "=") app.zoom(ZOOM_STEP);
  else if (event.key === "-" || event.key === "_") app.zoom(1 / ZOOM_STEP);
  else if (event.key === "0" || event.key === "Home") showWhole(view);
  else if (event.key === "Enter" && app.state.cursor) app.approach();
  else if (event.key === "Escape") app.unpin();
  else return false;
  app.viewChanged();
  return true;
}

/** The form above the picture: its fields show the state, and change it. */
function listenToForm(form, app) {
  const { state } = app;
  const on = (name, change) => form.elements[name].addEventListener("change", (event) => change(event.target.value));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    app.goTo(form.elements.query.value, form.elements.key.value);
  });
  on("head", (value) => app.chooseHead(value));
  for (const button of form.elements.order) button.addEventListener("change", () => app.chooseOrder(button.value));
  on("block", (value) => app.chooseBlock(Number(value)));
  if (state.data.ranks) on("ranks", (value) => app.chooseRanks(value));
  const press = (name, action) => form.querySelector(`[data-press=${name}]`).addEventListener("click", action);
  press("in", () => (app.zoom(2), app.viewChanged()));
  press("out", () => (app.zoom(0.5), app.viewChanged()));
  press("whole", () => (showWhole(state.view), app.viewChanged()));
}

/** What the fields show. */
function fillForm(form, { data, head, order, block, sharding }) {
  form.elements.head.value = String(head);
  form.elements.head.max = String(data.num_heads - 1);
  form.elements.order.value = order;
  const sizes = [...form.elements.block.options].map((option) => Number(option.value));
  if (!sizes.includes(block)) form.elements.block.add(new Option(grouped(block), String(block)));
  form.elements.block.value = String(block);
  if (data.ranks) form.elements.ranks.value = sharding ?? "off";
}
