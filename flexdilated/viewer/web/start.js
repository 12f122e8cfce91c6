// The pattern is in the page, as JSON that is deflated and written in base64.

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
