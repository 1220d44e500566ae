// The controls and figures of the schedule explorer; schedule.js computes the times.
"use strict";

(function () {
  const form = document.querySelector("#schedule-explorer");
  if (!form) return;
  const A = globalThis.AxisSchedule, data = globalThis.SCHEDULE_DATA, SIDES = ["schedule", "other"], ROW = 26, RIGHT = 66, LEFT = 56;
  const part = (name) => form.querySelector(`.${name}`), field = form.elements;
  const range = (n) => [...Array(n).keys()], percent = (x) => `${(100 * x).toFixed(1)}%`, units = (x) => `${Number(x.toFixed(2))} unit${x === 1 ? "" : "s"}`;
  let shown = null, timer = null;  // shown: the two schedules with their times; timer: set while playing

  const legal = (name, S, M) => A.forms(data, name, S, M) !== null;
  const times = (name, S, M, lockStep) => A.timed(data, A.forms(data, name, S, M).at(lockStep ? -1 : 0), M, lockStep);

  function read() {
    const names = SIDES.map((side) => field[side].value), S = Number(field.stages.value), lockStep = field.lock_step.checked;
    let M = Number(field.microbatches.value), why = "";
    const refused = names.find((name) => !legal(name, S, M));
    if (refused) {
      const sizes = range(field.microbatches.options.length).map((i) => i + 1).filter((n) => legal(refused, S, n));
      const near = sizes.reduce((a, b) => Math.abs(b - M) < Math.abs(a - M) ? b : a);
      why = `${refused} needs a multiple of the number of stages: ${M} is not a multiple of ${S}, so this shows ${near}. `;
      M = near;
      field.microbatches.value = String(M);
    }
    return { S, M, lockStep, why, drawings: names.map((name) => ({ name, ...times(name, S, M, lockStep) })) };
  }

  // Figures -----------------------------------------------------------------------------------------------------------

  const longest = () => Math.max(...shown.drawings.map((one) => one.makespan));

  function draw() {
    const { S, M, drawings } = shown, scale = Math.max((part("times").clientWidth - LEFT - RIGHT) / longest(), 11);
    shown.scale = scale;
    drawings.forEach((one, side) => {
      const section = form.querySelectorAll(".drawing")[side], high = S * ROW;
      section.querySelector(".idle").textContent = `${percent(one.idle)} idle`;
      section.querySelector(".about").textContent = data.says[one.name];
      const rows = one.spans.map((ops, stage) => `<text class="name" x="0" y="${stage * ROW + 17}">stage ${stage}</text>${ops.map((op) => {
        const x = LEFT + op.start * scale, wide = (op.end - op.start) * scale, size = Math.min(12, wide / String(op.microbatch).length * 1.4);
        return `<g class="op ${op.kind}${op.chunk ? " second" : ""}" data-start="${op.start}"><title>${A.label(op)}: ${Number(op.start.toFixed(2))} to ${Number(op.end.toFixed(2))}</title>
          <rect x="${x.toFixed(2)}" y="${stage * ROW + 2}" width="${Math.max(wide - 1, 0.5).toFixed(2)}" height="${ROW - 4}" rx="2"/>
          ${size > 6 ? `<text x="${(x + wide / 2 - 0.5).toFixed(2)}" y="${stage * ROW + 17}" text-anchor="middle" font-size="${size.toFixed(1)}">${op.microbatch}</text>` : ""}</g>`;
      }).join("")}<text class="stored" x="${LEFT + longest() * scale + 6}" y="${stage * ROW + 17}"></text>`).join("");
      const end = LEFT + one.makespan * scale;
      section.querySelector(".time").innerHTML = `<svg width="${LEFT + longest() * scale + RIGHT}" height="${high + 18}" role="img" aria-label="${one.name}: ${S} stages, ${M} microbatches, ${units(one.makespan)} of time, ${percent(one.idle)} idle">
        <rect class="whole" x="${LEFT}" y="0" width="${(one.makespan * scale).toFixed(2)}" height="${high}"/>${rows}
        <text class="name" x="${LEFT}" y="${high + 14}">0</text><text class="name" x="${end}" y="${high + 14}" text-anchor="end">${units(one.makespan)}</text>
        <line class="now" y1="0" y2="${high}"/></svg>`;
    });
    field.time.max = String(longest());
  }

  function show(speak = true) {  // draw the state at the time of the slider
    const at = Number(field.time.value), { drawings, scale, why } = shown;
    const words = drawings.map((one, side) => {
      const section = form.querySelectorAll(".drawing")[side], stored = A.stored(one, Math.min(at, one.makespan));
      for (const op of section.querySelectorAll(".op")) op.classList.toggle("later", Number(op.dataset.start) >= at);
      const x = (LEFT + Math.min(at, one.makespan) * scale).toFixed(2), line = section.querySelector("line.now");
      line.setAttribute("x1", x);
      line.setAttribute("x2", x);
      section.querySelectorAll(".stored").forEach((text, stage) => { text.textContent = `stores ${Number(stored[stage].toFixed(2))}`; });
      return `${one.name} stores the activations of at most ${Number(A.most(one).toFixed(2))} microbatches on a stage`;
    });
    part("at").textContent = `${Number(at.toFixed(2))} of ${units(longest())}`;
    part("said").setAttribute("aria-live", speak ? "polite" : "off");
    part("said").textContent = `${why}${words[0]}${drawings[0].name === drawings[1].name ? "" : `; ${words[1]}`}.`;
  }

  function compare() {
    const { S, M, lockStep, drawings } = shown;
    const rows = Object.keys(data.schedules).filter((name) => legal(name, S, M)).map((name) => {
      const one = times(name, S, M, lockStep), own = drawings.some((drawing) => drawing.name === name);
      return `<tr${own ? ' class="own" aria-current="true"' : ""}><th scope="row">${name}</th><td>${units(one.makespan)}</td><td>${percent(one.idle)}</td><td>${Number(A.most(one).toFixed(2))}</td></tr>`;
    });
    part("compared").innerHTML = `<table><thead><tr><th scope="col">schedule</th><th scope="col">time</th><th scope="col">idle</th>
      <th scope="col">microbatches stored</th></tr></thead><tbody>${rows.join("")}</tbody></table>`;
    const splits = drawings.some((one) => one.last === "W"), chunks = drawings.some((one) => one.chunks > 1);
    const sample = (kind, words, more = "") => `<span><svg width="20" height="14" aria-hidden="true"><g class="op ${kind}${more}"><rect width="20" height="14" rx="2"/></g></svg> ${words}</span>`;
    part("key").innerHTML = sample("F", "forward pass") + sample("B", splits ? "backward pass, or its input gradient" : "backward pass") + (splits ? sample("W", "weight gradient") : "")
      + (chunks ? sample("B", "second half of the layers", " second") : "");
  }

  // Playing -----------------------------------------------------------------------------------------------------------

  function stop() {
    cancelAnimationFrame(timer);
    timer = null;
    field.play.textContent = "play";
  }

  function play() {
    const last = longest(), seconds = Math.min(Math.max(last / 4, 3), 12);
    if (Number(field.time.value) >= last) field.time.value = "0";
    field.play.textContent = "pause";
    let before = performance.now(), at = Number(field.time.value);
    const frame = (now) => {
      at = Math.min(at + (now - before) / 1000 * last / seconds, last);
      before = now;
      field.time.value = String(at);
      if (at >= last) stop(); else timer = requestAnimationFrame(frame);
      show(timer === null);
    };
    timer = requestAnimationFrame(frame);
    show(false);
  }

  function step(by) {
    stop();
    field.time.value = String((by > 0 ? Math.floor : Math.ceil)(Number(field.time.value) + 1e-6 * Math.sign(by)) + by);
    show();
  }

  function update(time) {
    stop();
    shown = read();
    draw();
    field.time.value = String(time ?? longest());
    show();
    compare();
  }

  function remember() {
    const at = Number(field.time.value), { S, M, lockStep, drawings } = shown;
    globalThis.AxisAddress?.write({ schedule: drawings[0].name, other: drawings[1].name, stages: S, microbatches: M,
      lock_step: lockStep ? 1 : "", time: at < longest() ? Number(at.toFixed(2)) : "" });
  }

  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", (event) => { if (event.target.name === "time") { stop(); show(); } else update(); });
  for (const kind of ["change", "click"]) form.addEventListener(kind, remember);
  field.play.addEventListener("click", () => { if (timer === null) play(); else { stop(); show(); } });
  field.back.addEventListener("click", () => step(-1));
  field.on.addEventListener("click", () => step(1));
  part("times").addEventListener("click", (event) => {
    const svg = event.target.closest(".time svg");
    if (!svg) return;
    stop();
    field.time.value = String(Math.max((event.clientX - svg.getBoundingClientRect().left - LEFT) / shown.scale, 0));
    show();
  });
  let wide = part("times").clientWidth;
  new ResizeObserver(() => { if (part("times").clientWidth !== wide) { wide = part("times").clientWidth; draw(); show(false); } }).observe(part("times"));

  const asked = new URLSearchParams(location.search);  // ?schedule=1f1b&other=zb&stages=4&microbatches=8&lock_step=1&time=5
  const start = { schedule: "1f1b", other: "zb", stages: "4", microbatches: "8" };
  for (const [name, value] of Object.entries(start)) {
    const wanted = asked.get(name);
    field[name].value = [...field[name].options].some((one) => one.value === wanted) ? wanted : value;
  }
  field.lock_step.checked = asked.get("lock_step") === "1";
  update(asked.get("time") ?? undefined);
})();
