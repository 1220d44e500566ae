// The controls and bars of the planner page. planner_worker.js runs the planner itself, in Python.
"use strict";

(function () {
  const form = document.querySelector("#planner");
  if (!form) return;
  const data = JSON.parse(form.querySelector("script[type='application/json']").textContent), output = form.querySelector("output");
  if (location.protocol === "file:") {  // a browser then refuses to load the worker
    output.innerHTML = '<p class="verdict refused"><span>The planner cannot run in a page that is opened as a file. Run <code>make read</code> in the folder of the project, and open the address that it prints.</span></p>';
    form.dataset.state = "ready";
    return;
  }
  const AXES = ["data", "stage", "fsdp", "expert", "context", "tensor"], TYPED = ["tokens", "price", "goodput"];
  const WORK = ["schedule", "remat", "gather", "tensor_exchange", "context_attention"];
  const AXIS_COLOURS = Object.fromEntries(AXES.map((axis) => [axis, form.querySelector(`[name=${axis}]`).parentElement.style.getPropertyValue("--axis")]));
  const GRAYS = ["#4a5361", "#6b7280", "#8b93a0", "#a3abb8", "#b9c0ca", "#cdd3da", "#dfe3e8", "#eceff2"];  // a color means a mesh axis

  const number = (x, digits = 3) => x.toLocaleString("en", { maximumSignificantDigits: digits });
  const bytes = (x) => x >= 0.1 * 2 ** 30 ? `${number(x / 2 ** 30)} GiB` : x >= 0.1 * 2 ** 20 ? `${number(x / 2 ** 20)} MiB` : `${number(x / 2 ** 10)} KiB`;
  const time = (x) => x >= 1 ? `${number(x)} s` : x >= 1e-3 ? `${number(x * 1e3)} ms` : `${number(x * 1e6)} µs`;
  const percent = (x) => `${(100 * x).toFixed(1)}%`;

  const nameOf = (mesh) => AXES.filter((axis) => mesh[axis] > 1).map((axis) => `${axis}=${mesh[axis]}`).join(",") || "data=1";

  const field = form.elements, value = (name) => field[name].value.trim();

  // The planner in its worker: questions are answered one after the other ---------------------------------------------

  const waiting = new Map(), worker = new Worker(new URL("planner_worker.js", document.currentScript.src), { type: "module" });
  let asked = 0;
  worker.onmessage = ({ data: [number, answer] }) => {
    if (number === "failed") output.innerHTML = `<p class="verdict refused">The planner did not load: ${escape(answer)}</p>`;
    waiting.get(number)?.(answer);
    waiting.delete(number);
  };
  worker.onerror = (error) => { output.innerHTML = `<p class="verdict refused">The planner did not load: ${escape(error.message ?? "")}</p>`; };
  const ask = (question) => new Promise((answered) => {
    waiting.set(++asked, answered);
    worker.postMessage([asked, question]);
  });

  // The controls -----------------------------------------------------------------------------------------------------

  const sizesOf = (mesh) => new Map(mesh.split(",").map((one) => one.trim().split("=")));
  const ofSliders = () => nameOf(Object.fromEntries(AXES.map((axis) => [axis, 2 ** Number(value(axis))])));
  const devicesOf = (mesh) => AXES.reduce((n, axis) => n * (Number(sizesOf(mesh).get(axis)) || 1), 1);

  function moveSliders() {
    const sizes = sizesOf(value("mesh"));
    for (const axis of AXES) {
      const size = Number(sizes.get(axis)) || 1;
      field[axis].value = String(Math.floor(Math.log2(size)));
      form.querySelector(`[data-size="${axis}"]`).textContent = size;
    }
  }

  // Keep the kind of chips, and change their number to that of the mesh, if there is a slice of this size.
  function fitTopology() {
    const [, slices, key] = value("topology").match(/^(?:(\d+)\s*\*)?\s*([a-z0-9]+)/) ?? [], chip = data.chips[key];
    if (!Object.hasOwn(data.chips, key ?? "")) return;
    const several = slices && chip.torus_dims ? Number(slices) : 1, shape = chip.shapes[devicesOf(value("mesh")) / several];
    if (shape) field.topology.value = `${several > 1 ? `${several}*` : ""}${key}:${shape}`;
  }

  // `64 v5e` and `v5e:64` name a number of chips: return a slice of this size, v5e:8x8, or the text as it is.
  function shaped(text) {
    const [, first, key, last] = text.match(/^(?:(\d+)\s+)?([a-z]\w*)(?::(\d+))?$/) ?? [];
    const chip = Object.hasOwn(data.chips, key ?? "") ? data.chips[key] : {};
    const shape = chip.torus_dims && chip.shapes[(first ?? last) * chip.per_chip];  // shapes are by the number of devices
    return shape ? `${key}:${shape}` : text;
  }

  function read() {
    const question = { preset: value("preset"), explain: field.explain.checked ? "1" : "" };
    for (const name of ["topology", "mesh", "batch_size", "seq_len", ...WORK, ...TYPED]) question[name] = value(name);
    question.topology = shaped(question.topology);
    if (question.preset === "config") question.config = value("config") || "{}";
    return question;
  }

  function write(state) {
    const controls = new Set([...field].map((one) => one.name));  // not field[name]: form.elements also has `length`
    for (const [name, value] of Object.entries(state)) if (controls.has(name) && name !== "explain") field[name].value = value;
    if ("explain" in state) field.explain.checked = Boolean(state.explain);
    moveSliders();
  }

  function startOf(preset) {
    const { batch_size, seq_len, mesh, topology } = data.presets[preset] ?? data.presets.llama3_8b;
    return { preset, topology, mesh, batch_size, seq_len: preset in data.presets ? seq_len : "", ...Object.fromEntries(WORK.map((name) => [name, "auto"])) };
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

  function show(one, cfg) {
    const { mesh } = cfg, { chip } = one;
    if (one.error) return `<p class="verdict refused"><code>${escape(mesh)}</code></p><p>${escape(one.error)}</p>`;
    const memory = Object.entries(one.memory_bytes).sort((a, b) => b[1] - a[1]).map(([part, size], i) => [part, size, GRAYS[i], bytes(size)]);
    const wires = Object.entries(one.wire_by_axes).sort((a, b) => b[1] - a[1]).map(([axes, size]) => [axes, size, colourOf(axes), bytes(size)]);
    const names = { matmuls: "matmuls", bubble: "pipeline bubble", optimizer: "optimizer: HBM traffic",
                    "other ops": "other ops: HBM traffic" };
    const paint = { matmuls: "#6b7280", bubble: "#eceff2", optimizer: "#b9c0ca", "other ops": "#b9c0ca" };
    const timed = (seconds, step_s) => {
      const spent = Object.entries(seconds).filter(([, s]) => s > 0).sort((a, b) => b[1] - a[1])
        .map(([what, s]) => [names[what] ?? `exposed communication over ${what}`, s, paint[what] ?? colourOf(what), `${time(s)}, ${percent(s / step_s)}`]);
      return bar(spent, step_s) + legend(spent);
    };
    const { device_batch, microbatches } = one;
    const { estimate } = one, between = estimate.low ? ` (${time(estimate.low)} to ${time(estimate.high)} by ${estimate.steps} measured steps)` : "";
    const verdict = one.fits ? `fits: ${bytes(one.peak_bytes)} of ${bytes(one.limit_bytes)}` : `does not fit: ${bytes(one.peak_bytes)} of ${bytes(one.limit_bytes)}`;
    return `<p class="verdict ${one.fits ? "fits" : "refused"}"><strong>step ${time(one.step_s)}${between}, MFU ${percent(one.mfu)}</strong>
        <span>${verdict}</span></p>
      <p><code>${one.mesh}</code> on ${one.devices} ${chip.name} (${one.topology}${chip.devices_per_chip > 1 ? `, ${chip.devices_per_chip} devices a chip` : ""}). Each device has
      ${number(device_batch, 9)} sequence${device_batch > 1 ? "s" : ""} at once${microbatches > 1 ? `, ${microbatches} microbatches` : ""}.
      ${one.bubble > 1e-6 ? `The pipeline bubble is ${percent(one.bubble)}.` : ""}</p>
      <pre class="lines">${escape(one.lines.join("\n"))}</pre>
      <h3>Time of a step: ${time(one.step_s)}</h3>${timed(one.seconds, one.step_s)}
      <p>The lower bound, at the peak FLOP/s and the full speed of all links, is ${time(one.lower_bound_s)}${one.simulated_s ? `; a simulation of the compiled step would take about ${time(one.simulated_s)}` : ""}.</p>
      <h3>Memory of a device</h3>${bar(memory, Math.max(one.peak_bytes, one.limit_bytes), one.limit_bytes)}${legend(memory, (part) => data.means[part])}
      <h3>Sent by a device in a step: ${bytes(one.wire_bytes)}, of which ${bytes(one.exposed_bytes)} exposed</h3>${wires.length ? bar(wires, one.wire_bytes) + legend(wires) : "<p>Nothing.</p>"}
      <p>To get the same numbers on the command line (add <code>--compile</code> to compare them with the compiler's):</p>
      <pre>${escape(one.command)}</pre>`;
  }

  // The search: every mesh of all chips, with the other settings as they are ------------------------------------------------

  function meshes(devices, axes = AXES) {
    if (axes.length === 1) return [{ [axes[0]]: devices }];
    const sizes = [];
    for (let n = 1; n <= devices; n *= 2) sizes.push(n);
    return sizes.flatMap((n) => meshes(devices / n, axes.slice(1)).map((rest) => ({ [axes[0]]: n, ...rest })));
  }

  let searching = 0;  // number of the search that runs, so that a new one stops the old one

  async function search() {
    const cfg = read(), own = ++searching, found = [], box = form.querySelector(".found");
    const { devices, error } = await ask({ topology: cfg.topology, count: true });
    if (own !== searching) return;
    if (error) {
      box.textContent = error;
      return;
    }
    const { across = "" } = Object.fromEntries(sizesOf(cfg.mesh)), sparse = data.presets[cfg.preset]?.sparse ?? true;
    const all = meshes(devices).filter((mesh) => sparse || mesh.expert === 1);  // without experts, expert is one more fsdp
    for (const [i, mesh] of all.entries()) {
      const one = await ask({ ...cfg, mesh: nameOf(mesh) + (across && `,across=${across}`), brief: true });
      if (own !== searching) return;
      if (!one.error) found.push({ mesh, one });
      box.textContent = `${i + 1} of ${all.length} meshes ..`;
    }
    const fit = found.filter(({ one }) => one.fits).sort((a, b) => a.one.step_s - b.one.step_s), best = fit[0]?.one.step_s;
    const rows = fit.slice(0, 10).map(({ mesh, one }) => `<tr><th scope="row"><button type="button" data-mesh="${nameOf(mesh)}">${nameOf(mesh)}</button></th>
      <td>${time(one.step_s)}</td><td>+${((one.step_s / best - 1) * 100).toFixed(0)}%</td><td>${percent(one.mfu)}</td><td>${bytes(one.peak_bytes)}</td></tr>`);
    box.innerHTML = `<p>Of ${all.length} meshes of ${devices} devices, ${found.length} can run this batch with the settings above, and ${fit.length} of these fit into memory. The search plans settings that are <code>auto</code> with the least memory. Choose a mesh to plan it with the fastest settings that fit, and see the interval of its step: rows that differ by less may be equally fast.</p>`
      + (rows.length ? `<table><thead><tr><th scope="col">mesh</th><th scope="col">step</th><th scope="col">slower by</th><th scope="col">MFU</th><th scope="col">memory</th></tr></thead><tbody>${rows.join("")}</tbody></table>` : "");
  }

  function forget() {  // the results of a search are for the settings at that time
    searching += 1;
    form.querySelector(".found").textContent = "";
  }

  let last = 0;  // number of the newest update

  async function update() {
    const cfg = read(), own = ++last;
    form.querySelector(".own").hidden = cfg.preset !== "config";
    globalThis.AxisAddress?.write({ ...cfg, config: cfg.config && compact(cfg.config) });
    form.dataset.state = "busy";
    await new Promise((done) => setTimeout(done, 60));  // while a slider moves or somebody types, only the last one counts
    if (own !== last) return;
    const one = await ask(cfg);
    if (own !== last) return;
    output.innerHTML = show(one, cfg);
    form.dataset.state = "ready";
  }

  // The page's only request to another host
  async function fetchConfig() {
    const own = form.querySelector(".own"), said = form.querySelector(".fetched"), name = value("hub");
    const say = (text) => { said.textContent = text; };
    if (!/^[\w.-]+\/[\w.-]+$/.test(name)) return say(`"${name}" is not ORG/NAME, such as Qwen/Qwen3-8B.`);
    say(`asking ${own.dataset.hub} for ${name} ..`);
    try {
      const response = await fetch(`${own.dataset.hub}/${name}/resolve/main/config.json`);
      if ([401, 403].includes(response.status)) return say(`${name} does not exist, or you have to log in to read it. Then paste its config.json.`);
      if (!response.ok) return say(`${name} has no config.json there (status ${response.status}).`);
      field.config.value = await response.text();
      say(`${name}: its config.json is above.`);
      forget();
      update();
    } catch (error) {
      say(`${own.dataset.hub} cannot be reached (${error.message}). Paste the config.json of ${name} instead.`);
    }
  }

  function compact(text) {
    try {
      return JSON.stringify(JSON.parse(text));
    } catch {
      return text;
    }
  }

  form.querySelector("[name=search]").addEventListener("click", search);
  form.querySelector("[name=fetch]").addEventListener("click", fetchConfig);
  form.querySelector(".found").addEventListener("click", (event) => {
    if (!event.target.dataset.mesh) return;
    write({ mesh: event.target.dataset.mesh });
    update();
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", ({ target }) => {
    if (target.name === "preset") write(startOf(target.value));
    if (AXES.includes(target.name)) field.mesh.value = ofSliders();
    if (AXES.includes(target.name) || target.name === "mesh") moveSliders();
    if (AXES.includes(target.name)) fitTopology();
    forget();
    update();
  });

  // ?preset=llama3_8b&topology=v5p:4x4x4&mesh=fsdp=16,tensor=2&batch_size=64, and any other control by its name
  const start = Object.fromEntries(new URLSearchParams(location.search)), known = [...field.preset.options].map((one) => one.value);
  if (start.chip && !start.topology) start.topology = `${start.chip}:`;  // as in older links
  write({ ...startOf(known.includes(start.preset) ? start.preset : "moe1b"), ...start, preset: known.includes(start.preset) ? start.preset : "moe1b" });
  if (/:$|^$/.test(value("topology"))) fitTopology();
  for (const name of WORK) if (!field[name].value) field[name].value = "auto";
  update();
})();
