// The controls and bars of the planner page; planner.js evaluates the formulas.
"use strict";

(function () {
  const form = document.querySelector("#planner");
  if (!form) return;
  const { plan, ownModel, readConfig, AXES } = globalThis.AxisPlanner, data = globalThis.PLANNER_DATA, output = form.querySelector("output");
  const AXIS_COLOURS = Object.fromEntries(AXES.map((axis) => [axis, form.querySelector(`[name=${axis}]`).parentElement.style.getPropertyValue("--axis")]));
  const GRAYS = ["#4a5361", "#6b7280", "#8b93a0", "#a3abb8", "#b9c0ca", "#cdd3da", "#dfe3e8", "#eceff2"];  // a color means a mesh axis
  const MEANS = { parameters: "this device's shards", optimizer: "two moments of each parameter", gradients: "of the shards, or unsharded if gathered once a step",
                  weights: "gathered for use", saved: "activations for the backward pass", pipeline: "activations between stages",
                  "at work": "one layer, or logits, while it is computed", batch: "tokens" };

  const number = (x, digits = 3) => x.toLocaleString("en", { maximumSignificantDigits: digits });
  const bytes = (x) => x >= 0.1 * 2 ** 30 ? `${number(x / 2 ** 30)} GiB` : x >= 0.1 * 2 ** 20 ? `${number(x / 2 ** 20)} MiB` : `${number(x / 2 ** 10)} KiB`;
  const time = (x) => x >= 1 ? `${number(x)} s` : x >= 1e-3 ? `${number(x * 1e3)} ms` : `${number(x * 1e6)} µs`;
  const percent = (x) => `${(100 * x).toFixed(1)}%`;

  const nameOf = (mesh) => AXES.filter((axis) => mesh[axis] > 1).map((axis) => `${axis}=${mesh[axis]}`).join(",") || "data=1";

  const ownFields = [...form.querySelectorAll(".own .selects input")], value = (name) => form.elements[name].value;

  function read() {
    const cfg = { mesh: Object.fromEntries(AXES.map((axis) => [axis, 2 ** Number(value(axis))])) };
    for (const name of ["preset", "chip", "schedule", "remat", "gather", "tensor_exchange", "context_attention"]) cfg[name] = value(name);
    for (const name of ["batch_size", "seq_len"]) cfg[name] = Number(value(name));
    if (cfg.preset !== "own") return cfg;
    const numbers = ownFields.filter((one) => one.type === "number").map((one) => [one.name, one.value]);
    return { ...cfg, ...ownModel(Object.fromEntries(numbers), form.elements.tied.checked) };
  }

  function write(cfg) {
    for (const [name, value] of Object.entries(cfg)) if (form.elements[name]) choose(form.elements[name], String(value));
    for (const axis of AXES) form.elements[axis].value = String(Math.log2(cfg.mesh[axis]));
  }

  function choose(control, value) {  // a preset's batch of 480 is not in the list, so it is added
    if (control.tagName === "SELECT" && ![...control.options].some((one) => one.value === value)) {
      control.add(new Option(Number(value).toLocaleString("en"), value));
    }
    control.value = value;
  }

  function startOf(name, chip) {
    const { start: least, mesh, batch_size, seq_len } = data.presets[name] ?? data.presets.llama3_8b;
    const start = { laptop: { fsdp: 4 }, dense_124m: { fsdp: 16 }, llama3_8b: { fsdp: 32 }, llama3_70b: { fsdp: 64 }, own: { fsdp: 64 },
                    mixtral_8x7b: { fsdp: 32, tensor: 2 }, deepseek_v3: { fsdp: 32, tensor: 4 } }[name] ?? {};
    const size = { dense_124m: 512, llama3_8b: 64, llama3_70b: 64, own: 64, mixtral_8x7b: 64, deepseek_v3: 64 }[name] ?? batch_size;
    return { preset: name, chip, mesh: { ...mesh, ...start }, batch_size: size, seq_len, schedule: "gpipe", ...least };
  }

  const escape = (text) => text.replace(/[&<>]/g, (sign) => `&#${sign.charCodeAt(0)};`);

  function bar(parts, whole, limit) {
    const pieces = parts.filter(([, size]) => size / whole > 0.001).map(([name, size, colour, text]) =>
      `<i style="width:${((100 * size) / whole).toFixed(2)}%;background:${colour}" title="${name}: ${text}"></i>`);
    const mark = limit ? `<em style="left:${Math.min(100, (100 * limit) / whole).toFixed(2)}%"></em>` : "";
    return `<div class="bar">${pieces.join("")}${mark}</div>`;
  }

  function legend(parts, note = () => "") {
    const rows = parts.filter(([, size]) => size > 0).map(([name, , colour, text]) =>
      `<tr><td><i style="background:${colour}"></i>${name}</td><td>${text}</td><td>${note(name)}</td></tr>`);
    return `<table class="legend">${rows.join("")}</table>`;
  }

  const colourOf = (axes) => AXIS_COLOURS[axes.split("*")[0]] ?? "#7d7d7d";

  const planOf = (cfg) => (cfg.error ? cfg : plan(data, cfg));

  function show(one, cfg) {
    const preset = data.presets[cfg.preset], chip = data.chips[cfg.chip];
    const mesh = nameOf(cfg.mesh);
    if (one.error) return `<p class="verdict refused"><code>${mesh}</code></p><p>${escape(one.error)}</p>`;
    const memory = Object.entries(one.memory_bytes).sort((a, b) => b[1] - a[1]).map(([part, size], i) => [part, size, GRAYS[i], bytes(size)]);
    const wires = Object.entries(one.wire_by_axes).sort((a, b) => b[1] - a[1]).map(([axes, size]) => [axes, size, colourOf(axes), bytes(size)]);
    const names = { compute: "matmuls", products: "matmuls", bubble: "pipeline bubble", optimizer: "optimizer: HBM traffic",
                    "other ops": "other ops: HBM traffic" };
    const paint = { compute: "#6b7280", products: "#6b7280", bubble: "#eceff2", optimizer: "#b9c0ca", "other ops": "#b9c0ca" };
    const timed = (seconds, step_s) => {
      const spent = Object.entries(seconds).filter(([, s]) => s > 0).sort((a, b) => b[1] - a[1])
        .map(([what, s]) => [names[what] ?? `exposed communication over ${what}`, s, paint[what] ?? colourOf(what), `${time(s)}, ${percent(s / step_s)}`]);
      return bar(spent, step_s) + legend(spent);
    };
    const { device_batch, microbatches } = one.split;
    const expected = one.expected
      ? `<h3>Expected time of a step: ${time(one.likely_s)}, MFU ${percent(one.likely_mfu)}</h3>${timed(one.expected, one.likely_s)}`
      : `<p>How long a compiled step takes on a GPU is not modeled here, so only the roofline is shown.</p>`;
    // The page's settings as flags, because each of them defaults to auto on the command line.
    const pinned = ["remat", "gather", ...(cfg.mesh.tensor > 1 ? ["tensor_exchange"] : []),
                    ...(cfg.mesh.context > 1 ? ["context_attention"] : [])];
    const own = Object.entries(cfg.sizes ?? {}).map(([name, size]) => ` --model.${name} ${size}`).join("") + (cfg.tied ? " --model.tie_embeddings" : "");
    const flags = own + pinned.map((name) => ` --work.${name} ${cfg[name]}`).join("")
      + (cfg.batch_size !== preset.batch_size ? ` --data.batch_size ${cfg.batch_size}` : "")
      + (cfg.seq_len !== preset.seq_len ? ` --data.seq_len ${cfg.seq_len}` : "")
      + (cfg.mesh.stage > 1 ? ` --work.schedule ${cfg.schedule}${cfg.schedule === "interleaved" ? " --work.chunks 2" : ""}` : "");
    const verdict = one.fits ? `fits: ${bytes(one.peak_bytes)} of ${bytes(one.limit_bytes)}` : `does not fit: ${bytes(one.peak_bytes)} of ${bytes(one.limit_bytes)}`;
    return `<p class="verdict ${one.fits ? "fits" : "refused"}"><strong>${one.expected ? "expected" : "at best"}: step ${time(one.likely_s)}, MFU ${percent(one.likely_mfu)}</strong>
        <span>${verdict}</span></p>
      <p><code>${mesh}</code> on ${one.devices} ${chip.name}${chip.torus_dims ? ` (${cfg.chip}:${chip.shapes[one.devices]}${chip.devices_per_chip > 1 ? `, ${chip.devices_per_chip} devices a chip` : ""})` : ", of whose memory JAX takes 75%"}. Each device has
      ${number(device_batch, 9)} sequence${device_batch > 1 ? "s" : ""} at once${microbatches > 1 ? `, ${microbatches} microbatches` : ""}.
      ${cfg.mesh.stage > 1 ? `The pipeline bubble is ${percent(one.bubble)}.` : ""}</p>
      ${expected}
      <h3>${one.expected ? "Roofline (at best)" : "Time of a step, at best (roofline)"}: ${time(one.step_s)}, MFU ${percent(one.mfu)}</h3>${timed(one.seconds, one.step_s)}
      <h3>Memory of a device</h3>${bar(memory, Math.max(one.peak_bytes, one.limit_bytes), one.limit_bytes)}${legend(memory, (part) => MEANS[part])}
      <h3>Sent by a device in a step: ${bytes(one.wire_bytes)}, of which ${bytes(one.exposed_bytes)} exposed</h3>${wires.length ? bar(wires, one.wire_bytes) + legend(wires) : "<p>Nothing.</p>"}
      <p>To get the same numbers on the command line (add <code>--compile</code> to compare them with the compiler's):</p>
      <pre>python -m plan ${cfg.preset} --topology ${cfg.chip}:${chip.shapes[one.devices] ?? one.devices} --mesh ${mesh}${flags}</pre>`;
  }

  // The search: every mesh of as many devices, with the other settings as they are ----------------------------------------

  function meshes(devices, axes = AXES) {
    if (axes.length === 1) return [{ [axes[0]]: devices }];
    const sizes = [];
    for (let n = 1; n <= devices; n *= 2) sizes.push(n);
    return sizes.flatMap((n) => meshes(devices / n, axes.slice(1)).map((rest) => ({ [axes[0]]: n, ...rest })));
  }

  let searching = 0;  // number of the search that runs, so that a new one stops the old one

  async function search() {
    const cfg = read();
    if (cfg.error) return;
    const own = ++searching, devices = AXES.reduce((n, axis) => n * cfg.mesh[axis], 1), found = [];
    const sparse = data.presets[cfg.preset].dims.some(([, letter]) => letter === "E");  // without experts, expert is one more fsdp
    const all = meshes(devices).filter((mesh) => sparse || mesh.expert === 1);
    const box = form.querySelector(".found");
    for (let i = 0; i < all.length; i++) {
      const one = plan(data, { ...cfg, mesh: all[i] });
      if (!one.error) found.push({ mesh: all[i], one });
      if (i % 40 === 39) {
        box.textContent = `${i + 1} of ${all.length} meshes ..`;
        await new Promise((done) => setTimeout(done));
        if (own !== searching) return;
      }
    }
    const fit = found.filter(({ one }) => one.fits).sort((a, b) => a.one.likely_s - b.one.likely_s), best = fit[0]?.one.likely_s;
    const rows = fit.slice(0, 10).map(({ mesh, one }) => `<tr><th scope="row"><button type="button" data-mesh="${nameOf(mesh)}">${nameOf(mesh)}</button></th>
      <td>${time(one.likely_s)}</td><td>+${((one.likely_s / best - 1) * 100).toFixed(0)}%</td><td>${percent(one.likely_mfu)}</td><td>${bytes(one.peak_bytes)}</td></tr>`);
    box.innerHTML = `<p>Of ${all.length} meshes of ${devices} devices, ${found.length} can run this batch with the settings above, and ${fit.length} of these fit into memory.</p>`
      + (rows.length ? `<table><thead><tr><th scope="col">mesh</th><th scope="col">step</th><th scope="col">slower by</th><th scope="col">MFU</th><th scope="col">memory</th></tr></thead><tbody>${rows.join("")}</tbody></table>` : "");
  }

  function forget() {  // the results of a search are for the settings at that time
    searching += 1;
    form.querySelector(".found").textContent = "";
  }

  form.querySelector("[name=search]").addEventListener("click", search);
  form.querySelector(".found").addEventListener("click", (event) => {
    const mesh = event.target.dataset.mesh;
    if (!mesh) return;
    const sizes = new Map(mesh.split(",").map((one) => one.split("=")));
    for (const axis of AXES) form.elements[axis].value = String(Math.log2(Number(sizes.get(axis) ?? 1)));
    update();
    remember();
  });

  function update() {
    const cfg = read(), one = planOf(cfg);
    form.querySelector(".own").hidden = value("preset") !== "own";
    for (const axis of AXES) form.querySelector(`[data-size="${axis}"]`).textContent = cfg.mesh[axis];
    output.innerHTML = show(one, cfg);
    const count = (x) => x.toLocaleString("en");
    form.querySelector(".own-size").textContent = one.error ? "" : `${count(one.params_total)} parameters, ${count(one.params_active)} active per token.`;
  }

  function remember() {
    const { mesh, sizes, tied, error, ...rest } = read(), preset = value("preset");
    const own = preset === "own" ? Object.fromEntries(ownFields.map((one) => [one.name, one.type === "checkbox" ? one.checked || "" : one.value])) : {};
    globalThis.AxisAddress?.write({ ...rest, preset, mesh: nameOf(mesh), ...own });
  }

  // ?preset=llama3_8b&chip=v5p&mesh=fsdp=16,tensor=2&batch_size=64, and any other control by its name
  function start() {
    const asked = new URLSearchParams(location.search);
    const known = (name, choices, or) => choices.includes(asked.get(name)) ? asked.get(name) : or;
    const cfg = startOf(known("preset", [...Object.keys(data.presets), "own"], "moe1b"), known("chip", Object.keys(data.chips), "v4"));
    for (const field of cfg.preset === "own" ? ownFields : []) {
      if (field.type === "checkbox") field.checked = asked.has(field.name);
      else if (asked.has("d_model")) field.value = asked.get(field.name) ?? "";
    }
    for (const name of ["schedule", "remat", "gather", "tensor_exchange", "context_attention"]) {
      cfg[name] = known(name, [...form.elements[name].options].map((one) => one.value), cfg[name]);
    }
    for (const name of ["batch_size", "seq_len"]) if (Number(asked.get(name)) >= 1) cfg[name] = Math.floor(Number(asked.get(name)));
    if (asked.get("mesh")) {
      const sizes = new Map(asked.get("mesh").split(",").map((one) => one.split("=")));
      cfg.mesh = Object.fromEntries(AXES.map((axis) => [axis, 2 ** Math.min(Math.max(Math.floor(Math.log2(Number(sizes.get(axis)) || 1)), 0), 7)]));
    }
    return cfg;
  }

  form.addEventListener("input", (event) => {
    if (event.target.matches("textarea")) {  // fill in the numbers
      const found = readConfig(event.target.value), said = form.querySelector(".own-model");
      said.textContent = found.error ?? ["The numbers above are those of this file", ...found.notes].join("; ") + ".";
      if (found.error) return;
      for (const field of ownFields) if (field.type === "number") field.value = found.sizes[field.name];
      form.elements.tied.checked = found.tied;
    }
    if (event.target.name === "preset") write(startOf(event.target.value, form.elements.chip.value));
    forget();
    update();
    remember();
  });
  write(start());
  update();
})();
