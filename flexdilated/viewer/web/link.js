// What is seen, as the part of the address after #: whoever opens the link sees the same.

const LINKED = ["q", "k", "span", "head", "order", "block", "ranks"];

function linkOf(state) {
  const { view } = state;
  const tidy = (number) => String(Number(number.toFixed(view.scale < 1 ? 2 : 0)));
  const values = {
    q: tidy(view.q),
    k: tidy(view.k),
    span: tidy(spanOf(view)),
    head: String(state.head),
    order: state.order,
    block: String(state.block),
    ranks: state.sharding ?? "off",
  };
  return LINKED.map((name) => `${name}=${values[name]}`).join("&");
}

/** What of a link makes sense here: a number out of range, or a word that is none, is left out. */
function readLink(text, state, data) {
  const values = new URLSearchParams(text.replace(/^#/, ""));
  const number = (name, least, most) => {
    const value = values.has(name) ? Number(values.get(name)) : NaN;
    return value >= least && value <= most ? value : null;
  };
  const head = number("head", 0, data.num_heads - 1);
  if (head !== null) state.head = Math.floor(head);
  const order = values.get("order");
  if (order === "natural" || (order === "residue" && data.residue)) state.order = order;
  const block = number("block", 0, 2 ** 31);
  if (block !== null) state.block = Math.floor(block);
  if (values.get("ranks") === "off") state.sharding = null;
  if (data.ranks?.shardings[values.get("ranks")]) state.sharding = values.get("ranks");
  const [q, k] = ["q", "k"].map((name) => number(name, -(2 ** 32), 2 ** 32));
  return { q, k, span: number("span", 2 ** -10, 2 ** 32) };
}
