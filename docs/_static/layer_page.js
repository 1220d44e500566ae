// The switches and figures of the layer timeline; layer.js finds the bars.
"use strict";

(function () {
  const form = document.querySelector("#layer-timeline");
  if (!form) return;
  const A = globalThis.AxisLayer, data = globalThis.LAYER_DATA, WAYS = { forward: "forward pass", back: "backward pass" };
  const part = (name) => form.querySelector(`.${name}`), field = form.elements;
  const ROW = 20, CORE = 30, GAP = 8, AXIS = 22;  // pixels
  let name = null, shown = {};  // way -> {bars, chosen}
  const text = (x) => x.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;").replaceAll('"', "&quot;");
  const percent = (x) => `${(100 * x).toFixed(1)}%`;

  // Switches ----------------------------------------------------------------------------------------------------------

  function read(moved) {
    const asked = Object.fromEntries(data.switches.map((one) => [one, field[one].value]));
    name = A.choose(data, asked, moved);
    for (const one of data.switches) {
      const there = A.options(data, name, one), now = data.cases[name].switches[one];
      field[one].innerHTML = there.map((value) => `<option value="${value}">${value}</option>`).join("");
      field[one].value = now;
      field[one].disabled = there.length === 1;
    }
  }

  // Figures ----------------------------------------------------------------------------------------------------------

  const height = (lane) => lane.lane === "core" ? CORE : lane.rows * ROW;

  function ticks(us, width) {  // labels in milliseconds: 1, 2 or 5 times a power of ten, at least 55 pixels apart
    const least = us / 1000 / Math.max(width / 55, 1), ten = 10 ** Math.floor(Math.log10(least));
    const step = [1, 2, 5, 10].map((n) => n * ten).find((n) => n >= least);
    return [...Array(Math.floor(us / 1000 / step + 1e-9) + 1).keys()].map((i) => Number((i * step).toFixed(6)));
  }

  // Both passes, and all cases of a model and slice, have the same scale: a layer that takes longer is wider.
  const longest = () => Math.max(...A.on(data, name).flatMap((one) => Object.values(data.cases[one].layers).map((layer) => layer.us)));

  function picture(way) {
    const layer = data.cases[name].layers[way], { bars } = shown[way], lanes = A.lanes(bars);
    const names = lanes.map((lane) => `<span style="height: ${height(lane) + GAP}px">${lane.lane.replaceAll("*", "<br>")}</span>`).join("");
    part("ways").querySelector(`[data-way="${way}"] .lanes`).innerHTML = `${names}<span>ms</span>`;
    const box = part("ways").querySelector(`[data-way="${way}"] .time`);
    const full = box.clientWidth * 2 ** Number(field.zoom.value), scale = (full - 8) / longest(), width = Math.max(layer.us * scale, 40) + 8;
    let y = 0;
    const tops = new Map(lanes.map((lane) => { const top = y; y += height(lane) + GAP; return [lane.lane, top]; }));
    const rects = bars.map((bar, i) => {
      const high = bar.lane === "core" ? CORE : ROW - 4, top = tops.get(bar.lane) + bar.row * ROW;
      const colour = bar.kind === "sends" ? ` style="fill: var(--${bar.lane.includes("*") ? "both" : bar.lane})"` : "";
      const place = `x="${(bar.start * scale).toFixed(2)}" y="${top}" width="${Math.max((bar.end - bar.start) * scale, 0.4).toFixed(2)}" height="${high}"`;
      return `<rect ${place} data-bar="${i}" class="${bar.kind.replace(" ", "-")}"${colour}/>`;
    }).join("");
    const marks = ticks(layer.us, layer.us * scale).map((ms) => { const x = (ms * 1000 * scale).toFixed(1);
      return `<line x1="${x}" x2="${x}" y1="0" y2="${y}"/><text x="${x}" y="${y + 14}"${ms ? ' text-anchor="middle"' : ""}>${ms}</text>`; }).join("");
    const hatch = `<defs><pattern id="waits-${way}" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect width="6" height="6" class="ground"/><rect width="3" height="6" class="stripe"/></pattern></defs>`;
    box.innerHTML = `<svg width="${width.toFixed(1)}" height="${y + AXIS}" aria-hidden="true" style="--hatch: url(#waits-${way})">${hatch}<g class="marks">${marks}</g>${rects}<rect class="chosen" width="0" height="0"/></svg>`;
    mark(way);
  }

  function draw() {
    const made = data.cases[name];
    part("ways").innerHTML = Object.keys(WAYS).map((way) => {
      const layer = made.layers[way], found = A.parts(layer.own_us);
      shown[way] = { bars: A.bars(layer), chosen: null };
      const busy = Object.entries(A.busy(shown[way].bars)).map(([axis, one]) => `<b>${axis.replaceAll("*", " and ")}</b> is busy for ${A.ms(one.busy)}, ${one.busy - one.waited < 0.5 ? "none of it overlapped" : `${A.ms(one.busy - one.waited)} of it overlapped`}`);
      return `<section data-way="${way}"><h4>Layer ${WAYS[way]}, ${layer.times} times per step, ${A.ms(layer.us)} each</h4>
        <p class="sum">The core ${found.waiting < 0.5 ? "never waits" : `waits ${A.ms(found.waiting)}, ${percent(found.waiting / layer.us)}`}; matmuls take ${A.ms(found.matmuls)}, other operations ${A.ms(found.other)}. ${busy.join("; ") || "Its links are idle"}.</p>
        <div class="timeline"><div class="lanes" aria-hidden="true"></div>
        <div class="time" tabindex="0" role="group" aria-roledescription="timeline" aria-label="layer ${WAYS[way]}: use the arrow keys to move between bars"></div></div></section>`;
    }).join("");
    const step = A.parts(made.causes_us), list = step.waits.filter(([, us]) => us >= 500).map(([axis, us]) => `${A.seconds(us)} for ${axis.replaceAll("*", " and ")}`).join(", ");
    part("facts").innerHTML = `A simulated step takes <b class="step">${A.seconds(made.step_us)}</b>, and waits for <b class="waiting">${A.seconds(step.waiting)}</b> of it (${percent(step.waiting / made.step_us)})${list ? `: ${list}` : ""};
      ${made.tokens.toLocaleString("en")} tokens per chip. <em>Simulated from the compiler's schedule, not measured on a chip.</em>`;
    part("note").innerHTML = `Compiled by libtpu ${made.made.libtpu} for JAX ${made.made.jax} on ${made.made.date}. To print the same step with every source line: <code>${text(made.command)}</code>. Events of the core shorter than half a microsecond are not drawn.
      <a href="_static/layer_timeline.json" download>Download the events as JSON</a>.`;
    const axes = [...new Set(Object.values(shown).flatMap(({ bars }) => bars.map((bar) => bar.lane)))].filter((lane) => lane !== "core");
    part("key").innerHTML = [["matmuls", "matmuls"], ["other-ops", "other ops"], ["copies", "copies"], ["waiting", "waiting"]].map(([kind, says]) => `<span><i class="${kind}"></i>${says}</span>`).join("")
      + axes.map((lane) => `<span><i style="background: var(--${lane.includes("*") ? "both" : lane})"></i>in flight over ${lane.replaceAll("*", " and ")}</span>`).join("");
    compare();
    say(null);
    for (const way in WAYS) picture(way);
  }

  function compare() {
    const differ = data.switches.slice(2).filter((one) => A.options(data, name, one).length > 1);
    const rows = A.on(data, name).map((one) => {
      const made = data.cases[one], step = A.parts(made.causes_us), s = made.switches, layers = Object.values(made.layers).map((layer) => `<td>${A.ms(layer.us)}</td>`).join("");
      return `<tr${one === name ? ' class="own" aria-current="true"' : ""}><th scope="row"><a href="?case=${one}">${s.mesh}</a> ${differ.map((which) => s[which]).filter((value) => value !== "none").join(", ")}</th><td>${A.seconds(made.step_us)}</td><td>${A.seconds(step.waiting)}</td>${layers}</tr>`;
    });
    const head = [["mesh", ...differ].join(", "), "step", "waiting", "layer forward", "layer backward"].map((one) => `<th scope="col">${one}</th>`).join("");
    part("compared").innerHTML = `<table><thead><tr>${head}</tr></thead><tbody>${rows.join("")}</tbody></table>`;
  }

  // The selected bar -----------------------------------------------------------------------------------------------------

  function mark(way) {
    const { chosen } = shown[way], box = part("ways").querySelector(`[data-way="${way}"] .time`), frame = box.querySelector(".chosen");
    const bar = chosen === null ? null : box.querySelector(`[data-bar="${chosen}"]`);
    for (const side of ["x", "y", "width", "height"]) frame.setAttribute(side, bar?.getAttribute(side) ?? "0");
    return bar && { box, left: Number(bar.getAttribute("x")), width: Number(bar.getAttribute("width")) };
  }

  function say(way, speak = false) {
    const said = part("said");
    said.setAttribute("aria-live", speak ? "polite" : "off");
    if (way === null || shown[way].chosen === null) { said.textContent = "Point at a bar, or move between bars with the arrow keys."; return; }
    const [head, line] = A.words(shown[way].bars[shown[way].chosen], way);
    said.innerHTML = `<b>${text(head)}</b> <code>${text(line)}</code>`;
  }

  function choose(way, i, speak) {
    for (const other in WAYS) if (other !== way && shown[other].chosen !== null) { shown[other].chosen = null; mark(other); }
    shown[way].chosen = i;
    const at = mark(way);
    if (at && speak && (at.left < at.box.scrollLeft || at.left + at.width > at.box.scrollLeft + at.box.clientWidth)) {
      at.box.scrollLeft = at.left - (at.box.clientWidth - Math.min(at.width, at.box.clientWidth)) / 2;
    }
    say(way, speak);
  }

  // The next bar of a row, or the bar of the next row that is nearest in time.
  function next(way, key) {
    const { bars, chosen } = shown[way], order = A.lanes(bars).flatMap(({ lane, rows }) => [...Array(rows).keys()].map((row) => `${lane} ${row}`));
    if (key === "Home" || key === "End" || chosen === null) {
      const own = bars.map((bar, i) => i).filter((i) => bars[i].lane === (chosen === null ? "core" : bars[chosen].lane) && bars[i].row === (chosen === null ? 0 : bars[chosen].row));
      return own.at(key === "End" ? -1 : 0);
    }
    const now = bars[chosen], row = `${now.lane} ${now.row}`, side = { ArrowLeft: -1, ArrowRight: 1 }[key];
    const wanted = side ? row : order[order.indexOf(row) + (key === "ArrowDown" ? 1 : -1)];
    const there = bars.map((bar, i) => i).filter((i) => `${bars[i].lane} ${bars[i].row}` === wanted);
    if (!there.length) return chosen;
    if (side) return there[Math.min(Math.max(there.indexOf(chosen) + side, 0), there.length - 1)];
    const apart = (i) => Math.max(bars[i].start - now.end, now.start - bars[i].end) + Math.abs(bars[i].start - now.start) * 1e-6;
    return there.reduce((best, i) => apart(i) < apart(best) ? i : best);
  }

  const of = (event) => event.target.closest?.("[data-way]")?.dataset.way;

  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", (event) => {
    if (event.target.name === "zoom") for (const way in WAYS) picture(way);
    else { read(event.target.name); draw(); globalThis.AxisAddress?.write({ case: name }); }
  });
  for (const kind of ["pointerover", "click"]) {
    part("ways").addEventListener(kind, (event) => { if (event.target.dataset.bar) choose(of(event), Number(event.target.dataset.bar), false); });
  }
  part("ways").addEventListener("keydown", (event) => {
    if (!["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End"].includes(event.key)) return;
    event.preventDefault();
    choose(of(event), next(of(event), event.key), true);
  });
  part("ways").addEventListener("focusin", (event) => { const way = of(event); if (way && shown[way].chosen === null && event.target.matches(":focus-visible")) choose(way, 0, true); });
  let wide = part("ways").clientWidth;
  new ResizeObserver(() => { if (part("ways").clientWidth !== wide) { wide = part("ways").clientWidth; for (const way in WAYS) picture(way); } }).observe(part("ways"));

  const asked = new URLSearchParams(location.search).get("case");  // ?case=v5p_ring
  const first = Object.hasOwn(data.cases, asked) ? data.cases[asked] : Object.values(data.cases)[0];
  for (const one of data.switches) field[one].value = first.switches[one];
  read();
  draw();
})();
