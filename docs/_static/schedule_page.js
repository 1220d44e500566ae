// The controls and the table of the schedule explorer; schedule.js reads.
"use strict";

(function () {
  const form = document.querySelector("#schedule-explorer");
  if (!form) return;
  const A = globalThis.AxisSchedule, data = globalThis.SCHEDULE_DATA;
  const part = (name) => form.querySelector(`.${name}`), field = form.elements;
  const range = (n) => [...Array(n).keys()], percent = (x) => `${(100 * x).toFixed(1)}%`;
  let shown = null, timer = null;  // shown: what is drawn; timer: while it plays

  function read() {
    const name = field.schedule.value, S = Number(field.stages.value);
    let M = Number(field.microbatches.value), why = "", there = A.forms(data, name, S, M);
    if (!there) {
      const legal = range(field.microbatches.options.length).map((i) => i + 1).filter((n) => A.forms(data, name, S, n));
      const near = legal.reduce((a, b) => Math.abs(b - M) < Math.abs(a - M) ? b : a);
      why = `${name} needs a multiple of the number of stages: ${M} is not a multiple of ${S}, so this shows ${near}. `;
      M = near;
      field.microbatches.value = String(M);
      there = A.forms(data, name, S, M);
    }
    field.form.disabled = there.length === 1;
    const one = there.at(field.form.value === "run" ? -1 : 0);
    return { name, S, M, one, why, same: there.length === 1 };
  }

  // The table ---------------------------------------------------------------------------------------------------------

  const paint = (op) => `<span class="op ${op.kind}${op.chunk ? " later" : ""}">${op.microbatch}</span>`;

  function draw() {
    const { S, M, one } = shown, cells = A.table(data, one, M);
    const head = range(one.ticks).map((tick) => `<th scope="col" data-tick="${tick}">${tick}</th>`).join("");
    const rows = range(S).map((stage) => `<tr><th scope="row">stage ${stage}</th>${cells[stage].map((ops, tick) =>
      `<td data-tick="${tick}" title="${ops.map(A.label).join(" ") || "idle"}">${ops.map(paint).join("")}</td>`).join("")}</tr>`).join("");
    part("ticks").innerHTML = `<table><thead><tr><th scope="col">tick</th>${head}</tr></thead><tbody>${rows}</tbody></table>`;
    shown.cells = cells;
    field.tick.max = String(one.ticks - 1);
  }

  function show(speak = true) {  // the table up to a tick
    const tick = Number(field.tick.value), { S, M, one, cells, why } = shown;
    for (const cell of part("ticks").querySelectorAll("[data-tick]")) {
      const at = Number(cell.dataset.tick);
      cell.className = at === tick ? "now" : at > tick ? "later" : "";
    }
    const now = part("ticks").querySelector("th.now"), box = part("ticks"), stem = box.querySelector("tbody th").offsetWidth;
    if (now.offsetLeft + now.offsetWidth > box.scrollLeft + box.clientWidth || now.offsetLeft - stem < box.scrollLeft) {
      box.scrollLeft = Math.max(now.offsetLeft - stem - (box.clientWidth - stem) / 2, 0);
    }
    part("at").textContent = `tick ${tick} of ${one.ticks - 1}`;
    field.tick.setAttribute("aria-valuetext", `tick ${tick}`);
    const idle = cells.flatMap((row) => row.slice(0, tick + 1)).filter((ops) => !ops.length).length, all = S * (tick + 1);
    const doing = cells.map((row, stage) => `stage ${stage} ${row[tick].map(A.label).join(" ") || "idle"}`).join(", ");
    part("said").setAttribute("aria-live", speak ? "polite" : "off");
    part("said").textContent = `${why}${S > 4 ? "" : `In tick ${tick}: ${doing}. `}Idle so far: ${idle} of ${all} cells.`;
    const kept = A.kept(data, one, M, tick), unit = one.chunks > 1 ? "counts half of a stage's layers" : "";
    part("kept").innerHTML = kept.map((ops, stage) => `<p><span>stage ${stage}</span><b>${ops.length}</b><span class="held">${ops.map(paint).join("")}</span></p>`).join("")
      + `<p class="most">At most ${one.live} on one stage during the step${unit ? `; each ${unit}` : ""}.</p>`;
  }

  function compare() {
    const { S, M, name, one } = shown;
    const rows = Object.keys(data.schedules).flatMap((other) => (A.forms(data, other, S, M) ?? []).map((x, i, all) => {
      const form = all.length === 1 ? "both" : ["published", "run here"][i];
      return `<tr${x === one ? ' class="own" aria-current="true"' : ""}><th scope="row">${other}</th><td>${form}</td><td>${percent(x.idle[0])}</td><td>${percent(x.idle[1])}</td>
        <td>${x.live}${x.chunks > 1 ? " halves" : ""}</td><td>${x.ticks}</td></tr>`;
    }));
    part("compared").innerHTML = `<table><thead><tr><th scope="col">schedule</th><th scope="col">form</th><th scope="col">idle, alone</th>
      <th scope="col">idle, in lock-step</th><th scope="col">stored activations</th><th scope="col">ticks</th></tr></thead><tbody>${rows.join("")}</tbody></table>`;
    part("about").textContent = data.says[name];
    part("facts").innerHTML = `Idle <b>${percent(one.idle[0])}</b> alone, <b>${percent(one.idle[1])}</b> in lock-step; a stage stores the activations of at most
      <b>${one.live}</b> microbatches${one.chunks > 1 ? ", each of half its layers" : ""}; <b>${one.ticks}</b> ticks.`;
    const key = { F: "forward pass", B: one.moments[0].length > 2 * M * one.chunks ? "input gradient" : "backward pass", W: "weight gradient" };
    const kinds = one.moments[0].length > 2 * M * one.chunks ? "FBW" : "FB";
    part("key").innerHTML = [...kinds].map((kind) => `<span><span class="op ${kind}">${kind}</span> ${key[kind]}</span>`).join("")
      + (one.chunks > 1 ? '<span><span class="op F later">F</span><span class="op B later">B</span> second half of the layers</span>' : "");
  }

  // Playing -----------------------------------------------------------------------------------------------------------

  function stop() {
    clearInterval(timer);
    timer = null;
    field.play.textContent = "play";
  }

  function play() {
    const last = Number(field.tick.max);
    if (Number(field.tick.value) === last) field.tick.value = "0";
    field.play.textContent = "pause";
    timer = setInterval(() => {
      field.tick.value = String(Number(field.tick.value) + 1);
      if (Number(field.tick.value) >= last) stop();
      show(timer === null);
    }, Math.min(Math.max(20_000 / (last + 1), 250), 700));
    show(false);
  }

  function step(by) {
    stop();
    field.tick.value = String(Number(field.tick.value) + by);
    show();
  }

  function update(tick) {
    stop();
    shown = read();
    draw();
    field.tick.value = String(tick ?? shown.one.ticks - 1);
    show();
    compare();
  }

  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", (event) => { if (event.target.name === "tick") step(0); else update(); });
  field.play.addEventListener("click", () => { if (timer === null) play(); else { stop(); show(); } });
  field.back.addEventListener("click", () => step(-1));
  field.on.addEventListener("click", () => step(1));
  part("ticks").addEventListener("click", (event) => {
    const cell = event.target.closest("[data-tick]");
    if (cell) { field.tick.value = cell.dataset.tick; step(0); }
  });

  const asked = new URLSearchParams(location.search);  // ?schedule=1f1b&stages=4&microbatches=8&form=run&tick=5
  const start = { schedule: "1f1b", stages: "4", microbatches: "8", form: "published" };
  for (const [name, value] of Object.entries(start)) {
    const wanted = asked.get(name);
    field[name].value = [...field[name].options].some((one) => one.value === wanted) ? wanted : value;
  }
  update(asked.get("tick") ?? undefined);
})();
