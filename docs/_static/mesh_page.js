// The controls and figures of the mesh explorer; mesh.js does the arithmetic.
"use strict";

(function () {
  const form = document.querySelector("#mesh-explorer");
  if (!form) return;
  const M = globalThis.AxisMesh, { AXES } = M, data = globalThis.MESH_DATA;
  const grid = form.querySelector(".devices"), panel = form.querySelector(".device"), said = form.querySelector(".said");
  const COLOURS = Object.fromEntries(AXES.map((axis) => [axis, form.querySelector(`[name=${axis}]`).parentElement.style.getPropertyValue("--axis")]));
  let device = 0, chosen = null;  // chosen: the collective or array that is marked on the mesh

  const number = (x, digits = 3) => x.toLocaleString("en", { maximumSignificantDigits: digits });
  const bytes = (x) => x >= 2 ** 30 ? `${number(x / 2 ** 30)} GiB` : x >= 2 ** 20 ? `${number(x / 2 ** 20)} MiB` : x >= 1024 ? `${number(x / 1024)} KiB` : `${number(x)} bytes`;
  const paintOf = (axes) => axes.length !== 1 ? ["var(--ink-soft)", "var(--pst-color-background)"]
    : [COLOURS[axes[0]], ["stage", "context"].includes(axes[0]) ? "#111" : "#fff"];  // text color with enough contrast
  const model = () => data.models[form.elements.model.value];
  const read = () => Object.fromEntries(AXES.map((axis) => [axis, 2 ** Number(form.elements[axis].value)]));
  const range = (n) => [...Array(n).keys()];
  const nameOf = (mesh) => AXES.filter((axis) => mesh[axis] > 1).map((axis) => `${axis}=${mesh[axis]}`).join(",") || "one device";

  // The mesh ----------------------------------------------------------------------------------------------------------

  function fit(moved) {  // reduce axes until the mesh can be drawn, the moved axis first; return the reason
    const { most } = model(), why = [];
    for (const axis of [moved, ...AXES].filter(Boolean)) {
      const control = form.elements[axis];
      if (most[axis] && 2 ** control.value > most[axis][0]) {
        control.value = String(Math.log2(most[axis][0]));
        why.push(`${axis} can be at most ${most[axis][0]}: ${most[axis][1]}.`);
      }
      const others = M.devices(read()) / read()[axis];
      if (others * read()[axis] > data.devices) {
        control.value = String(Math.max(Math.floor(Math.log2(data.devices / others)), 0));
        why.push(`Up to ${data.devices} devices are drawn, so ${axis} is ${read()[axis]} with the other axes as they are. Reduce another axis first.`);
      }
    }
    return why.join(" ");
  }

  function columns(mesh) {  // groups along inner axes are rows, unless that needs too many rows
    let inner = 1;
    for (const axis of [...AXES].reverse()) {
      inner *= mesh[axis];
      if (mesh[axis] > 1 && inner <= 8 && M.devices(mesh) / inner <= 4) return inner;
    }
    return Math.min(M.devices(mesh), 8);
  }

  function whereOf(mesh, other) {
    const at = M.place(mesh, other);
    return AXES.filter((axis) => mesh[axis] > 1).map((axis) => `${axis} ${at[axis]}`).join(", ");
  }

  // A small figure of what a device holds: its tokens, its layers, and its shard of one matrix (experts as a strip above).
  function tile(mesh, one) {
    const { weights, activations } = model().arrays, matrix = shownMatrix(), out = [];
    const draw = (d, rows, columns, x, y, wide, high) => {
      const held = M.slices(d, mesh, one);
      const spans = (letter, length) => {
        const dim = d.dims.indexOf(letter);
        return letter ? held[dim].map((span) => span.map((at) => at / d.shape[dim] * length)) : [[0, length]];
      };
      out.push(`<rect class="whole" x="${x}" y="${y}" width="${wide}" height="${high}"/>`);
      for (const [top, bottom] of spans(rows, high)) for (const [left, right] of spans(columns, wide)) {
        out.push(`<rect class="held" x="${(x + left).toFixed(2)}" y="${(y + top).toFixed(2)}" width="${Math.max(right - left, 0.8).toFixed(2)}" height="${Math.max(bottom - top, 0.8).toFixed(2)}"/>`);
      }
    };
    draw(activations.find((d) => d.name === "x_btD"), "B", "T", 1, 1, 18, 18);
    draw(weights[0], "L", "", 22, 1, 4, 18);
    if (matrix.strip) draw(matrix, "", matrix.strip, 29, 1, 18, 3);
    draw(matrix, matrix.rows, matrix.columns, 29, matrix.strip ? 6 : 1, 18, matrix.strip ? 13 : 18);
    return `<svg viewBox="0 0 48 20" aria-hidden="true">${out.join("")}</svg>`;
  }

  const shownMatrix = () => model().arrays.weights.find((d) => d.name.startsWith("w_up"));

  function drawGrid(mesh) {
    grid.style.setProperty("--columns", columns(mesh));
    grid.innerHTML = range(M.devices(mesh)).map((one) =>
      `<button type="button" data-device="${one}" title="${whereOf(mesh, one)}">${one}${tile(mesh, one)}</button>`).join("");
    form.querySelector(".matrix").textContent = shownMatrix().name;
  }

  // Communication -------------------------------------------------------------------------------------------------

  const swatches = (axes) => axes.map((axis) => `<i style="background:${COLOURS[axis]}"></i>`).join("");

  function lineCard(one, mesh) {
    const group = M.line(mesh, one.axes, device).filter((other) => other !== device), at = M.place(mesh, device);
    const turn = one.back_kind && one.back_kind !== one.kind ? `, backward ${one.back_kind.replace(", ", " and ")}` : "";
    const ways = [one.forward && `forward ${bytes(one.forward)}`, one.back && `backward ${bytes(one.back)}`].filter(Boolean).join(", ");
    let whom = group.length > 7 ? `${group.length} others` : group.join(", ");
    if (one.name === "stages") {
      const [last, next, before] = [mesh.stage - 1, 1, -1].map((x, i) => i ? neighbour(mesh, x) : x);
      whom = [at.stage < last && `${next}, the next stage`, at.stage > 0 && `${before}, the previous stage`].filter(Boolean).join("; ");
    }
    const of = one.of.length ? ` <small>${one.of.map((name) => `<code>${name}</code>`).join(" ")}</small>` : "";
    return `<button type="button" class="card line" data-line="${one.name}" aria-pressed="false">
      <b>${swatches(one.axes)}${one.name.replace(/ over (tensor|expert|data.*)$/, "")}</b>
      <span>${one.kind}${turn}, over <em>${one.axes.join("*")}</em></span>
      <span>with ${whom}</span><span class="bytes">${ways}${one.name === "stages" ? ", once for all layers of the stage" : ""}</span>
      <span class="says">${one.says}.${of}</span></button>`;
  }

  const neighbour = (mesh, by) => M.line(mesh, ["stage"], device)[M.place(mesh, device).stage + by];

  // Arrays -----------------------------------------------------------------------------------------------------

  const whole = (x) => number(x, 9);
  const words = (ranges, size) => M.widthOf(ranges) === size ? "all" : ranges.map(([from, to]) => to - from === 1 ? whole(from) : `${whole(from)} to ${whole(to - 1)}`).join(" and ");

  function drawn(d, held, used) {  // draw an array as a rectangle; a third dim is a strip of cells above it
    const W = 132, H = d.rows ? 64 : 12, top = d.strip ? 20 : 4, out = [];
    const dim = (letter) => d.dims.indexOf(letter), size = (letter) => letter ? d.shape[dim(letter)] : 1;
    const of = (ranges, letter, length) => (letter ? ranges[dim(letter)] : [[0, 1]]).map(([from, to]) => [from / size(letter) * length, Math.max((to - from) / size(letter) * length, 0.8)]);
    const paint = (ranges, kind) => {
      for (const [y, h] of of(ranges, d.rows, H)) for (const [x, w] of of(ranges, d.columns, W)) out.push(`<rect class="${kind}" x="${(2 + x).toFixed(2)}" y="${(top + y).toFixed(2)}" width="${w.toFixed(2)}" height="${h.toFixed(2)}"/>`);
      if (d.strip) for (const [x, w] of of(ranges, d.strip, W)) out.push(`<rect class="${kind}" x="${(2 + x).toFixed(2)}" y="4" width="${w.toFixed(2)}" height="11"/>`);
    };
    if (used) paint(used, "used");
    paint(held, "held");
    out.push(`<rect class="whole" x="2" y="${top}" width="${W}" height="${H}"/>`);
    if (d.strip) {
      const n = size(d.strip);
      out.push(`<rect class="whole" x="2" y="4" width="${W}" height="11"/>`, ...range(n - 1).map((i) => `<path class="cut" d="M${2 + (i + 1) * W / n} 4v11"/>`));
    }
    return `<svg viewBox="0 0 ${W + 4} ${top + H + 3}" aria-hidden="true">${out.join("")}</svg>`;
  }

  function arrayCard(d, mesh, what) {
    const held = M.slices(d, mesh, device), joined = (d.joined ?? []).filter((axis) => mesh[axis] > 1);
    const used = joined.length ? M.slices(d, mesh, device, joined) : null, letters = [...d.dims].map((letter, i) => [letter, i]).filter(([letter]) => !"LJ".includes(letter));
    const cut = letters.filter(([, i]) => M.widthOf(held[i]) < d.shape[i]);
    const said = cut.map(([letter, i]) => `<span><code>${letter}</code> ${words(held[i], d.shape[i])} of ${whole(d.shape[i])}</span>`);
    const axesOf = letters.filter(([, i]) => d.spec[i].some((axis) => mesh[axis] > 1)).map(([letter, i]) => `${letter}: ${d.spec[i].filter((axis) => mesh[axis] > 1).join("*")}`).join("; ");
    const layout = `rows ${d.rows || "none"}, columns ${d.columns}${d.strip ? `, strip ${d.strip}` : ""}`;
    return `<button type="button" class="card array" data-array="${what} ${d.name}" aria-pressed="false" title="${layout}${axesOf ? `; split ${axesOf}` : ""}">
      <code>${d.name}</code>${drawn(d, held, used)}
      <span class="lie">${d.strip ? `<code>${d.strip}</code> above, ` : ""}${d.rows ? `<code>${d.rows}</code> down, ` : ""}<code>${d.columns}</code> across</span>
      ${said.join("") || "<span>the whole array</span>"}
      <span class="bytes">${bytes(M.bytes(d, held))}${used ? `; gathered ${bytes(M.bytes(d, used, d.width))}` : ""}</span>
      ${d.says ? `<span class="says">${d.says}</span>` : ""}</button>`;
  }

  function layers(mesh) {
    const d = model().arrays.weights[0], L = d.shape[0], [[from, to]] = M.slices(d, mesh, device)[0];
    const cells = range(L).map((i) => `<i class="${i >= from && i < to ? "held" : ""}"></i>`).join("");
    return `<p class="layers"><span>Layers ${words([[from, to]], L) === "all" ? `0 to ${L - 1}, all of them` : `${words([[from, to]], L)} of ${L}`}</span><span class="strip" aria-hidden="true">${cells}</span></p>`;
  }

  function show(mesh) {
    const one = model(), [microbatches, sequences] = one.meshes[M.key(mesh)], found = M.exchanges(one, mesh);
    const { weights, activations, cache } = one.arrays, own = weights.map((d) => M.bytes(d, M.slices(d, mesh, device)));
    const held = own.reduce((a, b) => a + b, 0), L = weights[0].shape[0] / mesh.stage, sum = (way) => found.reduce((a, x) => a + (x.name === "stages" ? 0 : x[way]), 0);
    const lines = found.length ? `<p>For one layer and a step of ${data.batch_size} sequences, this device sends ${bytes(sum("forward"))} in the forward pass and
      ${bytes(sum("back"))} in the backward pass. Select a collective to mark its devices on the mesh.</p><div class="cards">${found.map((x) => lineCard(x, mesh)).join("")}</div>`
      : "<p>Nothing, because there is only one device.</p>";
    const arrays = (list, what) => `<div class="cards">${list.map((d) => arrayCard(d, mesh, what)).join("")}</div>`;
    const where = whereOf(mesh, device);
    panel.innerHTML = `<h3>Device ${device}${where ? `: ${where}` : ""}</h3>
      <p>This device works on ${sequences} sequence${sequences > 1 ? "s" : ""} at a time${microbatches > 1 ? `, ${microbatches} times per step` : ""}. A sequence has ${number(data.seq_len, 9)} positions,
      ${mesh.context * mesh.tensor > 1 ? "which are sharded" : "all on this device"}.</p>${layers(mesh)}
      <h4>Weights and optimizer</h4><p>The filled part is the shard that this device stores. The lighter part is gathered for use, and then freed. The optimizer's two
      moments are sharded like the weights. One layer needs ${bytes(held)} for weights and ${bytes(2 * held)} for moments; the device's ${L} layer${L > 1 ? "s" : ""} need${L > 1 ? "" : "s"} ${bytes(3 * held * L)}.
      Select an array to mark the devices that store the same shard.</p>${arrays(weights, "weights")}
      <h4>Activations</h4><p>Shown for all sequences of this device in a step${microbatches > 1 ? `, of which it processes ${sequences} at a time` : ""}. A gathered
      activation exists for only one microbatch at a time.</p>${arrays(activations, "activations")}
      <h4>Communication</h4>${lines}
      <h4>Cache during generation</h4><p>For ${data.batch_size} requests of ${whole(data.seq_len)} positions. <code>context</code> shards it into contiguous positions: each device attends to its own, and the results are summed.</p>${arrays(cache, "cache")}`;
    mark(mesh);
  }

  function mark(mesh) {  // mark the devices of the chosen collective or array
    const one = model(), line = M.exchanges(one, mesh).find((x) => `line ${x.name}` === chosen), [kind, name] = (chosen ?? "").split(" ");
    const array = one.arrays[kind]?.find((d) => d.name === name);
    const group = line ? M.line(mesh, line.axes, device) : array ? M.holders(array, mesh, device) : [];
    const [paint, ink] = paintOf(line ? line.axes : []);
    grid.style.setProperty("--mark", paint);
    grid.style.setProperty("--mark-ink", ink);
    for (const cell of grid.children) {
      const here = Number(cell.dataset.device), own = here === device;
      cell.classList.toggle("marked", group.includes(here));
      cell.setAttribute("aria-pressed", String(own));
      cell.setAttribute("aria-label", `device ${here}${cell.title ? `: ${cell.title}` : ""}${group.includes(here) ? ", marked" : ""}`);
      cell.tabIndex = own ? 0 : -1;
    }
    for (const card of panel.querySelectorAll(".card")) card.setAttribute("aria-pressed", String(chosen !== null && chosen === (card.dataset.line ? `line ${card.dataset.line}` : card.dataset.array)));
    return line ? `Marked: the group of device ${device} over ${line.axes.join("*")}, devices ${group.join(", ")}.`
      : array ? (group.length > 1 ? `Marked: devices ${group.join(", ")} store the same shard of ${name}.` : `No other device stores this shard of ${name}.`) : "";
  }

  function update(moved) {
    const why = fit(moved), mesh = read();
    for (const axis of AXES) {
      form.querySelector(`[data-size="${axis}"]`).textContent = mesh[axis];
      form.elements[axis].setAttribute("aria-valuetext", `${mesh[axis]}`);
    }
    device = Math.min(device, M.devices(mesh) - 1);
    drawGrid(mesh);
    show(mesh);
    said.textContent = why || mark(mesh) || `${nameOf(mesh)}: ${M.devices(mesh)} device${M.devices(mesh) > 1 ? "s" : ""}. Select one.`;
  }

  function remember() {
    const mesh = read(), one = M.devices(mesh) > 1 ? nameOf(mesh) : "data=1";
    globalThis.AxisAddress?.write({ model: form.elements.model.value, mesh: one, device, show: chosen });
  }

  form.addEventListener("input", (event) => { update(event.target.name); remember(); });
  form.addEventListener("submit", (event) => event.preventDefault());
  const choose = (one) => { device = one; show(read()); said.textContent = mark(read()) || `Device ${device}.`; remember(); };
  grid.addEventListener("click", (event) => { if (event.target.dataset.device) choose(Number(event.target.dataset.device)); });
  grid.addEventListener("keydown", (event) => {
    const wide = columns(read()), all = M.devices(read());
    const to = { ArrowRight: device + 1, ArrowLeft: device - 1, ArrowDown: device + wide, ArrowUp: device - wide, Home: 0, End: all - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    if (to < 0 || to >= all) return;
    choose(to);
    grid.children[to].focus();
  });
  panel.addEventListener("click", (event) => {
    const card = event.target.closest(".card");
    if (!card) return;
    const it = card.dataset.line ? `line ${card.dataset.line}` : card.dataset.array;
    chosen = chosen === it ? null : it;
    said.textContent = mark(read()) || `Device ${device}.`;
    remember();
  });

  // ?model=llama3_8b&mesh=fsdp=4,tensor=2&device=3&show=line weights, or show=weights w_query_DHK
  const asked = new URLSearchParams(location.search);
  if (Object.hasOwn(data.models, asked.get("model"))) form.elements.model.value = asked.get("model");
  for (const one of (asked.get("mesh") ?? "stage=2,fsdp=2,tensor=4").split(",")) {
    const [axis, size] = one.split("=");
    if (AXES.includes(axis) && size >= 1) form.elements[axis].value = String(Math.floor(Math.log2(size)));
  }
  device = Math.max(Math.floor(Number(asked.get("device") ?? 5)) || 0, 0);
  chosen = asked.get("show");
  update();
})();
