// Evaluates the predictions of plan/planner.py in the browser. docs/planner_formulas.py writes the formulas of each preset,
// and tables of schedules, kernels and links. This file splits the batch, rejects meshes that do not fit, and evaluates.
// tests/site/test_planner.py compares the results with Python's.
"use strict";

(function (root) {
  const AXES = ["data", "stage", "fsdp", "expert", "context", "tensor"];
  const sum = (values) => values.reduce((a, b) => a + b, 0);
  const prod = (values) => values.reduce((a, b) => a * b, 1);
  const pick = (names, from) => names.map((name) => from[name]);

  class Refused extends Error {}

  function require(condition, text) {
    if (!condition) throw new Refused(text);
  }

  // Splitting the batch, with the error messages of pipeline/fit.py and pipeline/step.py --------------------------

  function requireMultiple(name, size, parts, over) {
    const whole = Math.floor(size / parts), near = [...new Set([Math.max(whole, 1) * parts, (whole + 1) * parts])];
    require(size % parts === 0, `cannot split ${name}=${size} ${over} (${size} % ${parts} = ${size % parts}); use ${name}=${near.join(" or ")}`);
  }

  function splitBatch({ mesh, batch_size, seq_len }) {
    const shards = prod(pick(["data", "fsdp", "expert"], mesh)), parts = mesh.context * mesh.tensor;
    requireMultiple("data.batch_size", batch_size, shards, `sequences over data*fsdp*expert = ${shards} batch shards`);
    requireMultiple("data.seq_len", seq_len, parts, `positions over context*tensor = ${parts} devices`);
    if (mesh.context > 1) {  // sizes are powers of two, so the larger one is a multiple of the other
      requireMultiple("data.seq_len", seq_len, Math.max(2 * mesh.context, parts), `positions into 2 chunks for each of context=${mesh.context} devices`);
    }
    const local = batch_size / shards;
    let microbatches = mesh.stage > 1 ? 4 * mesh.stage : 1;
    while (local % microbatches) microbatches -= 1;
    return { microbatches, device_batch: local / microbatches };
  }

  // The sizes of a model that is no preset (`cfg.sizes`) replace those of the preset of the same kind.
  const sizesOf = (preset, cfg) => (cfg.sizes ? { ...cfg.sizes, n_blocks: cfg.sizes.n_layers } : preset.sizes);

  function requireFit(preset, cfg) {
    const { mesh } = cfg, sizes = sizesOf(preset, cfg);
    for (const [name, letter, of, axes] of preset.dims) {
      const parts = prod(pick(axes, mesh)), size = sizes[of] ?? of;
      require(size % parts === 0, `cannot split ${letter}=${size} of ${name} over mesh axes ${axes.join("*")} = ${parts} devices (${size} % ${parts} = ${size % parts})`);
    }
    const setting = preset.heads, heads = sizes[setting], shares = mesh.tensor * mesh.context;
    require(mesh.context === 1 || cfg.context_attention !== "all_to_all" || heads % shares === 0,
      `work.context_attention=all_to_all: model.${setting}=${heads} does not split over tensor*context = ${mesh.tensor}*${mesh.context} = ${shares} devices (${heads} % ${shares} = ${heads % shares})`);
    const chunks = cfg.schedule === "interleaved" && mesh.stage > 1 ? 2 : 1, n = sizes.n_blocks, parts = mesh.stage * chunks;
    require(n % parts === 0, `cannot split ${n} blocks of layers over stage=${mesh.stage} * work.chunks=${chunks} = ${parts} parts (${n} % ${parts} = ${n % parts})`);
  }

  // Links: the bandwidth of each axis and of groups of axes, as in hardware.link -------------------------------------------

  function links(data, cfg) {
    const chip = data.chips[cfg.chip], { mesh } = cfg, devices = prod(pick(AXES, mesh)), shape = chip.shapes[devices];
    require(shape, `this mesh has ${devices} devices; slices of ${chip.name} here have ${Object.keys(chip.shapes).join(", ")}`);
    const row = chip.links[AXES.map((axis) => Math.log2(mesh[axis])).join("")];
    const split = data.groups.map((group) => group.filter((axis) => mesh[axis] > 1)).filter((group) => group.length > 1);
    const names = new Set([...AXES.filter((axis) => mesh[axis] > 1), ...split.map((group) => group.join("*"))]);
    return Object.fromEntries([...names].flatMap((name, i) =>
      data.links[row[i]].map((share, kind) => [`${name} ${kind}`, share * chip.link_bytes_per_s])));
  }

  // overlap/weights.py: the slices of a vocabulary of v ids, and the ids per slice, for a loss over n tokens
  function vocabularySlices(chunk, n, v) {
    const least = Math.ceil(n / chunk);
    let slices = least;
    while (slices <= 2 * least && v % slices) slices += 1;
    const words = Math.ceil(v / (slices <= 2 * least ? slices : least));
    return [Math.ceil(v / words), words];
  }

  // Formulas: plan/formulas.py -----------------------------------------------------------------------------------------

  const OPERATORS = {
    "+": (x, y) => x + y, "-": (x, y) => x - y, "*": (x, y) => (x === 0 || y === 0 ? 0 : x * y), "/": (x, y) => (x === 0 ? 0 : x / y),
    "//": (x, y) => Math.floor(x / y), "%": (x, y) => x % y, max: Math.max, min: Math.min,
    ">": (x, y) => Number(x > y), "=": (x, y) => Number(x === y), not: (x) => Number(!x), where: (is, x, y) => (is ? x : y),
  };

  function evaluate({ operations, results }, letters, tables) {
    const values = [], value = (x) => (Array.isArray(x) ? values[x[0]] : x);
    for (const [op, ...args] of operations) {
      if (op === "letter" || op === "flag") values.push(letters[args[0]] ?? 1);  // a link that the mesh lacks is never used
      else if (op === "is") values.push(Number(letters[args[0]] === args[1]));
      else if (op === "look" && args[0] === "vocabulary_slices") values.push(vocabularySlices(...args.slice(2).map(value))[args[1]]);
      else if (op === "look") values.push(tables[args[0]][args.slice(2).map(value).join(" ")]?.[args[1]] ?? NaN);
      else values.push(OPERATORS[op](...args.map(value)));
    }
    const parts = (of) => Object.entries(of).map(([name, x]) => [name, value(x)]).filter(([, x]) => x !== 0);
    const whole = (of) => (Array.isArray(of) || typeof of === "number" ? value(of) : Object.fromEntries(parts(of)));
    return Object.fromEntries(Object.entries(results).map(([name, of]) => [name, whole(of)]));
  }

  // cfg: {preset, chip, mesh: {axis: size}, batch_size, seq_len, schedule, remat, gather, tensor_exchange, context_attention},
  // and for a model that is no preset {sizes, tied}, from ownModel; `preset` is then a preset of the same kind
  function plan(data, cfg) {
    const preset = data.presets[cfg.preset], chip = data.chips[cfg.chip], { mesh } = cfg;
    try {
      const speeds = links(data, cfg), split = splitBatch(cfg);
      requireFit(preset, cfg);
      const sched = data.schedules[`${mesh.stage > 1 ? cfg.schedule : "1f1b"} ${mesh.stage} ${split.microbatches}`];
      require(sched, `this page knows pipelines of at most 32 stages, not stage=${mesh.stage}`);
      require(typeof sched !== "string", sched);
      const on_tpu = chip.torus_dims > 0;
      const letters = { ...sizesOf(preset, cfg), ...cfg, ...mesh, ...speeds, ...split, ...sched, ...chip, chip: data.hides.includes(cfg.chip) ? cfg.chip : "", platform: on_tpu ? "tpu" : "cpu" };
      const one = { ...evaluate(data.formulas[preset.formulas + (cfg.tied ? " tied" : "")], letters, data.tables), split, devices: prod(pick(AXES, mesh)), limit_bytes: chip.memory_bytes };
      if (!on_tpu) one.expected = null;
      one.fits = one.peak_bytes <= one.limit_bytes;
      one.mfu = one.model_flops / one.step_s / chip.peak_flops_per_s;
      one.likely_s = one.expected ? sum(Object.values(one.expected)) : one.step_s;
      one.likely_mfu = one.model_flops / one.likely_s / chip.peak_flops_per_s;
      return one;
    } catch (error) {
      if (error instanceof Refused) return { error: error.message };
      throw error;
    }
  }

  // A model that is no preset. Its numbers have the names of `python -m plan --model.NAME`, and of config.json. ----------

  const MODEL_TYPES = ["llama", "mistral", "qwen2", "mixtral"], WIDEST_HEAD = 256, MOST = 1e7;
  const NAMES = {
    d_model: "hidden_size", n_layers: "num_hidden_layers", n_heads: "num_attention_heads", n_kv_heads: "num_key_value_heads", d_head: "head_dim",
    d_ff: "intermediate_size", vocab_size: "vocab_size", n_experts: "num_local_experts", top_k: "num_experts_per_tok",
  };
  const OPTIONAL = ["n_kv_heads", "d_head", "n_experts", "top_k"];

  // Return {sizes} of a config.json of Hugging Face, with `tied` and notes on what the plan does not count, or {error}.
  function readConfig(text) {
    let read;
    try {
      read = JSON.parse(text);
    } catch (error) {
      return { error: `This is not valid JSON: ${error.message}.` };
    }
    const { model_type: type, hidden_act: activation } = read ?? {}, elsewhere = "use python -m plan for other models";
    if (type && !MODEL_TYPES.includes(type)) return { error: `model_type ${type}: this page plans ${MODEL_TYPES.join(", ")}; ${elsewhere}.` };
    if (activation && activation !== "silu") return { error: `hidden_act ${activation}: this page plans silu (SwiGLU); ${elsewhere}.` };
    const missing = Object.keys(NAMES).filter((name) => !OPTIONAL.includes(name) && !read?.[NAMES[name]]).map((name) => NAMES[name]);
    if (missing.length) return { error: `Missing: ${missing.join(", ")}.` };
    const notes = [];
    if (type === "qwen2" || read.attention_bias || read.mlp_bias) notes.push("biases are not counted");
    if (read.sliding_window && read.use_sliding_window !== false) notes.push(`attention is planned for the whole sequence, not for a sliding window of ${read.sliding_window} positions`);
    if (read.quantization_config) notes.push("the weights are not quantized");
    return { sizes: Object.fromEntries(Object.entries(NAMES).map(([name, theirs]) => [name, read[theirs] ?? ""])), tied: Boolean(read.tie_word_embeddings), notes };
  }

  // Return {preset, sizes, tied} for `plan`, from the numbers of a model ("": not given), or {error}.
  function ownModel({ n_experts, top_k, d_ff, ...given }, tied) {
    const sizes = Object.fromEntries(Object.entries({ ...given, d_ff }).map(([name, size]) => [name, Number(size)])), E = Number(n_experts);
    sizes.n_kv_heads ||= sizes.n_heads;
    sizes.d_head ||= sizes.d_model / sizes.n_heads;
    if (E) Object.assign(sizes, { n_experts: E, top_k: Number(top_k) || 2, d_expert: sizes.d_ff });
    const { n_heads: H, n_kv_heads: G, d_head: K } = sizes;
    const wrong = Object.keys(sizes).find((name) => !Number.isInteger(sizes[name]) || sizes[name] < 1 || sizes[name] > MOST);
    if (wrong) return { error: `${wrong}=${sizes[wrong]}: must be a whole number from 1 to ${MOST.toLocaleString("en")}.` };
    if (H % G) return { error: `n_heads=${H}: must be a multiple of n_kv_heads (${H} % ${G} = ${H % G}).` };
    if (K % 2 || K > WIDEST_HEAD) return { error: `d_head=${K}: must be even, and on this page at most ${WIDEST_HEAD}.` };
    if (E && sizes.top_k > E) return { error: `top_k=${sizes.top_k}: must be between 1 and n_experts=${E}.` };
    if (E && tied) return { error: "Models with experts are planned here with separate embedding and LM head; use python -m plan for tied ones." };
    if (E) delete sizes.d_ff;
    return { preset: E ? "mixtral_8x7b" : "llama3_8b", sizes, tied: Boolean(tied) };
  }

  root.AxisPlanner = { plan, ownModel, readConfig, AXES };
  if (typeof module !== "undefined") module.exports = root.AxisPlanner;
})(typeof window === "undefined" ? globalThis : window);
