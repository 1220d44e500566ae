// The figure of the first page: eight devices fit one least-squares problem, each with its own rows of the data. A switch
// leaves out the sum of their gradients. Every number is computed here, while the figure plays.
"use strict";

(function () {
  const box = document.querySelector("#hero");
  if (!box) return;
  const N = 8, ROWS = 20, D = 16, F = 6, RATE = 0.3, STEPS = 100, EACH = 5;  // EACH: training steps per round of the ring
  const HOPS = 2 * N, HOP_MS = 90, still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  const range = (n) => [...Array(n).keys()], mean = (x) => x.reduce((a, b) => a + b, 0) / x.length;
  const number = (x) => x.toLocaleString("en", { maximumSignificantDigits: 2 });

  // The computation ---------------------------------------------------------------------------------------------------

  function normals(seed) {  // normally distributed numbers from a small random generator (mulberry32)
    const uniform = () => {
      seed = (seed + 0x6d2b79f5) | 0;
      let t = Math.imul(seed ^ (seed >>> 15), 1 | seed);
      t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
      return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
    };
    return () => Math.sqrt(-2 * Math.log(1 - uniform())) * Math.cos(2 * Math.PI * uniform());
  }

  const draw = normals(1), matrix = (rows, columns) => range(rows).map(() => range(columns).map(draw));
  const data = range(N).map(() => ({ x: matrix(ROWS, D), y: matrix(ROWS, F) })), first = matrix(D, F);
  const error = ({ x, y }, w) => x.map((row, i) => range(F).map((f) => row.reduce((sum, value, d) => sum + value * w[d][f], -y[i][f])));
  const loss = (rows, w) => mean(error(rows, w).flat().map((e) => e * e));

  function gradient(rows, w) {
    const e = error(rows, w);
    return w.map((row, d) => row.map((_, f) => 2 / (ROWS * F) * e.reduce((sum, one, i) => sum + rows.x[i][d] * one[f], 0)));
  }

  const start = () => ({ weights: range(N).map(() => first), printed: [], all: [] });

  function train(run, summed) {  // one step: every device applies the mean gradient, or without the sum its own gradient
    run.printed.push(mean(data.map((rows, i) => loss(rows, run.weights[i]))));
    run.all.push(mean(data.map((rows) => loss(rows, run.weights[0]))));
    const own = data.map((rows, i) => gradient(rows, run.weights[i]));
    const average = own[0].map((row, d) => row.map((_, f) => mean(own.map((g) => g[d][f]))));
    run.weights = run.weights.map((w, i) => w.map((row, d) => row.map((value, f) => value - RATE * (summed ? average : own[i])[d][f])));
  }

  // The figure --------------------------------------------------------------------------------------------------------

  const at = (i) => i < 4 ? [46 + i * 90, 44] : [46 + (7 - i) * 90, 146];  // the ring runs clockwise
  const tiles = range(N).map((i) => { const [x, y] = at(i); return `<g data-tile="${i}"><rect class="tile" x="${x - 32}" y="${y - 30}" width="64" height="60" rx="5"/>
    <rect class="rows" x="${x - 26}" y="${y - 24 + i * 3.5}" width="20" height="3.5"/><rect class="data" x="${x - 26}" y="${y - 24}" width="20" height="28"/>
    <text x="${x + 12}" y="${y - 8}" text-anchor="middle">${i}</text><text class="own" x="${x}" y="${y + 22}" text-anchor="middle"></text></g>`; }).join("");
  const [low, high, left] = [-0.9, 1.35, 34], px = (step) => left + step * 3.1, py = (value) => 14 + (high - Math.log10(value)) / (high - low) * 152;
  const grid = [0.3, 1, 3, 10].map((t) => `<line x1="${left}" x2="350" y1="${py(t)}" y2="${py(t)}"/><text x="${left - 5}" y="${py(t) + 4}" text-anchor="end">${t}</text>`).join("");
  box.innerHTML = `<div class="pictures"><svg viewBox="0 0 362 194" role="img" aria-label="eight devices in a ring">
      <path class="ring" d="M46 44H316V146H46Z"/>${tiles}<g class="sum"><circle r="11"/><text y="4" text-anchor="middle"></text></g></svg>
    <svg viewBox="0 0 362 194" role="img" aria-label="losses by training step">${grid}<text x="${left}" y="11">mean squared error</text><text x="350" y="190" text-anchor="end">${STEPS} steps</text>
      <polyline class="other"/><polyline class="all"/><polyline class="printed"/></svg></div>
    <p class="controls"><label><input type="checkbox" name="sum" checked> sum the gradients of all devices</label> <button type="button"></button></p>
    <p class="said" role="status"></p><p class="note">A tile shows which rows of the data the device has, and the loss on them.</p>`;
  const find = (name) => box.querySelector(name), toggle = find("input"), button = find("button"), runs = { true: start(), false: start() };
  let began = null, playing = false;

  const points = (values) => values.map((value, step) => `${px(step).toFixed(1)},${py(Math.max(value, 0.13)).toFixed(1)}`).join(" ");

  function show(hop) {
    const summed = toggle.checked, run = runs[summed], other = runs[!summed], done = run.printed.length, k = Math.floor(hop), [x, y] = at(k % N), [x2, y2] = at((k + 1) % N);
    find(".printed").setAttribute("points", points(run.printed));
    find(".all").setAttribute("points", points(run.all));
    find(".other").setAttribute("points", points(other.printed));
    find(".sum").setAttribute("transform", `translate(${x + (x2 - x) * (hop - k)} ${y + (y2 - y) * (hop - k)})`);
    find(".sum text").textContent = Math.min(k + 1, N);
    box.classList.toggle("apart", !summed);
    box.classList.toggle("done", !playing);
    for (const tile of box.querySelectorAll("[data-tile]")) {
      const i = Number(tile.dataset.tile);
      tile.classList.toggle("has", summed && playing && k >= N - 1 && k - N >= i - 1);
      tile.querySelector(".own").textContent = number(loss(data[i], run.weights[i]));
    }
    button.textContent = playing ? "pause" : done >= STEPS ? "play again" : "play";
    if (!done) return;
    const [printed, all] = [run.printed.at(-1), run.all.at(-1)];
    find(".said").textContent = summed ? `After ${done} steps the loss is ${number(printed)} on all rows. Now leave out the sum.`
      : `Without the sum, the run prints a loss of ${number(printed)} after ${done} steps. On all rows its loss is ${number(all)}.${other.printed.length ? ` The thin line is the run with the sum.` : ""}`;
  }

  function frame(now) {
    if (!playing) return;
    began ??= now;
    const run = runs[toggle.checked], hop = (now - began) / HOP_MS;
    while (run.printed.length < STEPS && run.printed.length % EACH < Math.min(hop / HOPS, 1) * EACH - 1) train(run, toggle.checked);
    if (hop >= HOPS) {
      do train(run, toggle.checked); while (run.printed.length % EACH);
      began = now;
    }
    playing = run.printed.length < STEPS;
    show(playing ? Math.min(hop, HOPS - 0.001) : 0);
    if (playing) requestAnimationFrame(frame);
  }

  function play(fresh) {
    if (fresh) runs[toggle.checked] = start();
    playing = !still;
    began = null;
    if (still) while (runs[toggle.checked].printed.length < STEPS) train(runs[toggle.checked], toggle.checked);
    show(0);
    if (playing) requestAnimationFrame(frame);
  }

  toggle.addEventListener("change", () => play(true));
  button.addEventListener("click", () => { if (playing) { playing = false; show(0); } else play(runs[toggle.checked].printed.length >= STEPS); });
  play(true);
})();
