// What plan/planner.py predicts, in the browser: the same formulas, on tables that docs/planner_widget.py has written.
// Names are those of plan/costs.py; a comment says where a part comes from. tests/site/test_planner.py compares the two.
"use strict";

(function (root) {
  const AXES = ["data", "stage", "fsdp", "expert", "context", "tensor"];
  const TOKENS = ["data", "fsdp", "expert", "context", "tensor"];
  const ALWAYS = ["full", "dots", "none"], BATCHED = ["full", "dots"], FULL = ["full"];
  const floordiv = (a, b) => Math.floor(a / b);
  const ceildiv = (a, b) => Math.ceil(a / b);
  const sum = (values) => values.reduce((a, b) => a + b, 0);
  const prod = (values) => values.reduce((a, b) => a * b, 1);
  const gcd = (a, b) => (b ? gcd(b, a % b) : a);

  class Refused extends Error {}

  // sharding.split_batch ------------------------------------------------------------------------------------------

  function requireMultiple(name, size, parts, over) {
    if (size % parts) {
      const near = [...new Set([Math.max(floordiv(size, parts), 1) * parts, (floordiv(size, parts) + 1) * parts])];
      throw new Refused(`cannot split ${name}=${size} ${over} (${size} % ${parts} = ${size % parts}); nearest that do: ${near.join(" or ")}`);
    }
  }

  function splitBatch(cfg) {
    const { mesh } = cfg, B = cfg.batch_size, shards = mesh.data * mesh.fsdp * mesh.expert;
    const parts = mesh.context * mesh.tensor;
    requireMultiple("the batch", B, shards, `sequences over data*fsdp*expert = ${shards} batch shards`);
    requireMultiple("the sequence", cfg.seq_len, parts, `positions over context*tensor = ${parts} devices`);
    if (mesh.context > 1) {
      const chunks = 2 * mesh.context, both = (chunks * parts) / gcd(chunks, parts);
      requireMultiple("the sequence", cfg.seq_len, both, `positions into 2 chunks for each of context=${mesh.context} devices`);
    }
    const local = floordiv(B, shards), most = mesh.stage > 1 ? 4 * mesh.stage : 1;
    const largest = (limit, whole) => { for (let n = limit; ; n--) if (whole % n === 0) return n; };
    const M = largest(most, local), each = floordiv(local, M);
    const device_batch = largest(Math.min(cfg.max_device_batch || each, each), each);
    return { shards, device_batch, microbatches: M, accumulation: floordiv(each, device_batch) };
  }

  function checkDivides(declarations, mesh) {
    for (const d of declarations) {
      d.shape.forEach((size, dim) => {
        const parts = prod(d.spec[dim].map((axis) => mesh[axis]));
        if (size % parts) {
          throw new Refused(`cannot split ${d.dims[dim]}=${size} of ${d.name} over mesh axes ${d.spec[dim].join("*")} = ${parts} devices (${size} % ${parts} = ${size % parts}); use a smaller axis`);
        }
      });
    }
  }

  // pipeline.schedules --------------------------------------------------------------------------------------------

  const op = (kind, m, chunk = 0) => ({ kind, m, chunk });
  const range = (n) => [...Array(n).keys()];

  function alternating(forward, backward, ahead) {
    ahead = Math.min(ahead, forward.length);
    const order = forward.slice(0, ahead);
    for (let i = ahead; i < forward.length; i++) order.push(forward[i], backward[i - ahead]);
    return order.concat(backward.slice(forward.length - ahead));
  }

  const SCHEDULES = {
    gpipe(S, M, v, passes) {
      const order = range(passes).flatMap((i) => {
        const numbers = range(M).map((m) => i * M + m);
        return [...numbers.map((m) => op("F", m)), ...numbers.reverse().map((m) => op("B", m))];
      });
      return { stages: S, microbatches: M * passes, chunks: 1, orders: range(S).map(() => order), turns: passes === 1 };
    },
    "1f1b"(S, M) {
      const [forward, backward] = ["F", "B"].map((kind) => range(M).map((m) => op(kind, m)));
      const orders = range(S).map((s) => alternating(forward, backward, 2 * (S - 1 - s)));
      return { stages: S, microbatches: M, chunks: 1, orders, turns: false };
    },
    interleaved(S, M, v) {
      if (M % S) throw new Refused(`interleaved sends microbatches around in groups of stage=${S}, and microbatches=${M} is no multiple of it (${M} % ${S} = ${M % S})`);
      const forward = range(M * v).map((k) => op("F", floordiv(k, S * v) * S + (k % S), floordiv(k % (S * v), S)));
      const backward = forward.map((one) => op("B", one.m, v - 1 - one.chunk));
      const orders = range(S).map((s) => alternating(forward, backward, 2 * (S - 1 - s) + (v - 1) * S));
      return { stages: S, microbatches: M, chunks: v, orders, turns: false };
    },
    zb(S, M) {
      const [forward, backward] = ["F", "B"].map((kind) => range(M).map((m) => op(kind, m)));
      const orders = range(S).map((s) => {
        const found = [], waiting = [];
        for (const one of alternating(forward, backward, 2 * (S - 1 - s))) {
          found.push(one);
          if (one.kind === "B") {
            waiting.push(op("W", one.m));
            if (waiting.length > s) found.push(waiting.shift());
          }
        }
        return [...found, ...waiting];
      });
      return { stages: S, microbatches: M, chunks: 1, orders, turns: false };
    },
  };

  const key = (one, stage) => `${one.kind}${one.m},${one.chunk},${stage}`;

  function source(one, stage, S, v) {  // [operation, stage] whose result this one needs most recently; null: none
    const place = one.chunk * S + stage;
    if (one.kind === "F") return place ? [op("F", one.m, floordiv(place - 1, S)), (place - 1) % S] : null;
    if (one.kind === "B" && place < S * v - 1) return [op("B", one.m, floordiv(place + 1, S)), (place + 1) % S];
    return [op(one.kind === "B" ? "F" : "B", one.m, one.chunk), stage];
  }

  function place(sched) {  // operations of each stage in each tick
    const { stages: S, chunks: v } = sched, at = Array(S).fill(0), done = new Map(), table = [];
    let left = sum(sched.orders.map((order) => order.length));
    let forwardLeft = sum(sched.orders.map((order) => order.filter((one) => one.kind === "F").length));
    while (left) {
      const tick = table.length, row = [], waits = sched.turns && forwardLeft > 0;
      for (let s = 0; s < S; s++) {
        const cell = [];
        while (at[s] < sched.orders[s].length) {
          const next = sched.orders[s][at[s]], last = cell[cell.length - 1];
          if (last && "FBW".indexOf(next.kind) <= "FBW".indexOf(last.kind)) break;
          if (waits && next.kind !== "F") break;
          const needed = source(next, s, S, v);
          if (needed) {
            const when = done.get(key(...needed));
            if (when === undefined || when >= tick + (needed[1] === s ? 1 : 0)) break;
          }
          done.set(key(next, s), tick);
          cell.push(next);
          at[s] += 1;
          left -= 1;
          if (next.kind === "F") forwardLeft -= 1;
        }
        row.push(cell);
      }
      if (row.every((cell) => !cell.length)) throw new Error("the schedule waits for ever");
      table.push(row);
    }
    return table;
  }

  function finished(sched) {
    sched.splits = sched.orders[0].some((one) => one.kind === "W");
    sched.table = place(sched);
    return sched;
  }

  function schedule(cfg, split, n_blocks) {
    const S = cfg.mesh.stage, v = cfg.schedule === "interleaved" && S > 1 ? 2 : 1;
    if (n_blocks % (S * v)) {
      throw new Refused(`cannot split ${n_blocks} blocks of layers over stage=${S} * chunks=${v} = ${S * v} parts (${n_blocks} % ${S * v} = ${n_blocks % (S * v)})`);
    }
    if (cfg.schedule === "gpipe" && S > 1) return finished(SCHEDULES.gpipe(S, split.microbatches, 1, split.accumulation));
    return finished(SCHEDULES[S > 1 ? cfg.schedule : "1f1b"](S, split.microbatches * split.accumulation, v));
  }

  function forwardOnly(sched) {
    const orders = sched.orders.map((order) => order.filter((one) => one.kind === "F"));
    return finished({ ...sched, orders, turns: false });
  }

  function lockStep(sched, F, B = 1, W = 0) {
    const v = sched.chunks, cost = { F: F / v, B: (sched.splits ? B : B + W) / v, W: W / v };
    return sum(sched.table.map((row) => Math.max(...row.map((cell) => sum(cell.map((one) => cost[one.kind]))))));
  }

  function buffers(sched) {  // how many slots each buffer has: pipeline.schedules.rows
    const { stages: S, chunks: v, table } = sched, PHASES = { F: 0, loss: 1, B: 2, W: 3, arrive: 4 };
    const when = new Map(), sizes = { inbox: 1, kept: 1, cotangents: 1 };
    table.forEach((row, tick) => row.forEach((cell, s) => cell.forEach((one) => when.set(key(one, s), tick))));
    const moment = (tick, phase) => 5 * tick + PHASES[phase];
    for (let s = 0; s < S; s++) {
      const lives = { inbox: [], kept: [], cotangents: [] };
      const lastUse = (one) => {
        for (const kind of ["W", "B", "F"]) {
          const tick = when.get(key(op(kind, one.m, one.chunk), s));
          if (tick !== undefined) return moment(tick, kind);
        }
      };
      for (const one of sched.orders[s]) {
        const tick = when.get(key(one, s)), needed = source(one, s, S, v);
        if (one.kind === "F") {
          if (needed) lives.inbox.push([moment(when.get(key(...needed)), "arrive"), moment(tick, "F")]);
          lives.kept.push([moment(tick, "F"), lastUse(one)]);
        } else if (one.kind === "B") {
          const atLoss = needed[1] === s && needed[0].kind === "F";
          lives.cotangents.push([moment(when.get(key(...needed)), atLoss ? "loss" : "arrive"), lastUse(one)]);
        }
      }
      for (const [name, spans] of Object.entries(lives)) {
        const busy = [];
        for (const [begin, end] of spans.sort((a, b) => a[0] - b[0] || a[1] - b[1])) {
          const free = busy.findIndex((until) => until < begin);
          busy[free < 0 ? busy.length : free] = end;
        }
        sizes[name] = Math.max(sizes[name], busy.length);
      }
    }
    return sizes;
  }

  // plan.costs: what a device does --------------------------------------------------------------------------------

  const product = (part, flops, again = FULL) => ({ product: true, part, flops, again });
  const exchange = (part, kind, axes, size, { again = BATCHED, back = true, times = 1 } = {}) => ({ part, kind, axes, size, again, back, times });

  function wireBytes(kind, size, n) {
    return size * (kind === "all-reduce" ? (2 * (n - 1)) / n : kind === "collective-permute" ? Math.min(n - 1, 1) : (n - 1) / n);
  }

  function paddedTiles(A, e, TILE) {
    const tile = Math.min(TILE, ceildiv(A, e));
    return [tile, floordiv(A - e, tile) + e];
  }

  function groupedRows(A, e, z) {
    if (z.platform === "tpu") return (ceildiv(A, z.PART) + e - 1) * z.PART;
    const [tile, tiles] = paddedTiles(A, e, z.TILE);
    return tile * tiles;
  }

  function attention(c, z) {
    const h = floordiv(c.n_heads, z.mesh.tensor), n = z.mesh.context, N = z.b * z.s, keys = z.b * z.T, rows = [];
    const ring = c.context_attention === "ring" && n > 1, pieces = n > 1 ? 2 : Math.max(floordiv(z.s, z.QUERIES), 1);
    const pairs = (z.b * z.s * z.T * (pieces + 1)) / (2 * pieces);
    const ownPairs = (z.b * z.s ** 2 * 3) / 4, otherPairs = ((z.b * z.s ** 2) / 2) * (n - 1);
    let score, value, eachKey, parts;
    if (c.attention === "mla") {
      const Q = c.d_query_latent || c.d_model;
      [score, value] = [c.d_head + c.d_rope, c.d_value];
      rows.push(product("attention", 2 * N * c.d_model * (c.d_kv_latent + c.d_rope)));
      rows.push(product("attention", 2 * N * c.d_model * c.d_query_latent));
      rows.push(product("attention", 2 * N * Q * h * score));
      eachKey = 2 * c.d_kv_latent * h * (c.d_head + value);
      parts = c.d_kv_latent + c.d_rope;
    } else {
      const g = floordiv(c.n_kv_heads, z.mesh.tensor);
      score = value = c.d_head;
      rows.push(product("attention", 2 * N * c.d_model * (h + 2 * g) * c.d_head));
      [eachKey, parts] = [0, 2 * g * c.d_head];
    }
    rows.push(product("attention", 2 * N * h * value * c.d_model));
    if (ring) {
      rows.push(product("attention", eachKey * 1.5 * N));
      rows.push(product("attention", 2 * h * (score + value) * ownPairs, BATCHED));
      rows.push(product("attention", eachKey * N * (n - 1) + 2 * h * score * otherPairs + 2 * h * value * otherPairs, BATCHED));
    } else {
      rows.push(product("attention", eachKey * keys));
      rows.push(product("attention", 2 * h * (score + value) * pairs, BATCHED));
    }
    const X = z.b * z.s * c.d_model * z.width, own = N * parts * z.width;
    rows.push(exchange("activations", "all-gather", ["tensor"], X));
    rows.push(exchange("activations", "reduce-scatter", ["tensor"], X));
    if (ring) {
      rows.push(exchange("keys", "collective-permute", ["context"], own, { times: n - 1 }));
      rows.push(exchange("keys", "collective-permute", ["context"], 8 * N, { back: false, times: n - 1 }));
    } else {
      rows.push(exchange("keys", "all-gather", ["context"], own * n));
      rows.push(exchange("keys", "all-gather", ["context"], 8 * N * n, { back: false }));
    }
    return rows;
  }

  function feedForward(c, z, hidden, part) {
    const one = floordiv(2 * z.b * z.s * c.d_model * hidden, z.mesh.tensor);
    return [product(part, one * (1 + c.swiglu)), product(part, one, [])];
  }

  function dense(c, z) {
    const X = z.b * z.s * c.d_model * z.width;
    return [
      ...attention(c, z), ...feedForward(c, z, c.d_ff, "feed-forward"),
      exchange("activations", "all-gather", ["tensor"], X),
      exchange("activations", "reduce-scatter", ["tensor"], X, { again: [] }),
    ];
  }

  function slotsPerExpert(c, T) {
    return Math.floor(Math.round(((c.capacity_factor * c.top_k * T) / c.n_experts) * 1e6) / 1e6);
  }

  function moe(c, z) {
    const N = z.b * z.s, n = z.mesh.expert, k = c.top_k, e = floordiv(c.n_experts, n), m = floordiv(c.d_expert, z.mesh.tensor);
    const X = N * c.d_model * z.width;
    const out = [
      ...attention(c, z),
      product("router", 2 * z.b * z.t * c.d_model * c.n_experts),
      exchange("activations", "all-gather", ["tensor"], X),
      exchange("routes", "all-gather", ["tensor"], 4 * N * k),
      exchange("routes", "all-gather", ["tensor"], 4 * N * k, { back: false }),
      exchange("activations", "reduce-scatter", ["tensor"], X, { again: [] }),
    ];
    let rows;
    if (c.capacity_factor) {
      const slots = slotsPerExpert(c, z.T), size = c.n_experts * z.b * slots * c.d_model * z.width;
      rows = e * n * z.b * slots;
      out.push(exchange("routes", "all-gather", ["context", "tensor"], 4 * z.b * z.T * k, { back: false }));
      out.push(exchange("routes", "all-gather", ["tensor"], 4 * N * k, { back: false }));
      out.push(exchange("tokens", "all-to-all", ["expert"], size));
      out.push(exchange("routes", "all-to-all", ["expert"], 4 * c.n_experts * z.b * slots));
      out.push(exchange("tokens", "all-to-all", ["expert"], size, { again: [] }));
    } else {
      rows = groupedRows(N * n * k, e, z);
      out.push(exchange("tokens", "all-gather", ["expert"], n * X));
      out.push(exchange("routes", "all-gather", ["expert"], 4 * n * N * k));
      out.push(exchange("routes", "all-gather", ["expert"], 4 * n * N * k, { back: false }));
      out.push(exchange("tokens", "reduce-scatter", ["expert"], n * X, { again: [] }));
    }
    out.push(product("experts", 2 * rows * c.d_model * m * (1 + c.swiglu), BATCHED));
    out.push(product("experts", 2 * rows * c.d_model * m, []));
    return c.n_shared ? [...out, ...feedForward(c, z, c.n_shared * c.d_expert, "shared experts")] : out;
  }

  const enter = (c, z) => [exchange("activations", "reduce-scatter", ["tensor"], z.b * z.s * c.d_model * z.width, { again: [] })];

  function logits(c, z) {
    const S = z.mesh.stage, n = z.mesh.tensor, rows = ceildiv(z.b * z.t, S), tokens = n * rows;
    const chunk = Math.min(c.loss_chunk, tokens), padded = ceildiv(tokens, chunk) * chunk;
    return [
      product("logits", floordiv(2 * padded * c.d_model * c.vocab_size, n), ALWAYS),
      exchange("activations", "reduce-scatter", ["stage"], rows * S * c.d_model * z.width, { again: [] }),
      exchange("activations", "all-gather", ["tensor"], tokens * c.d_model * z.width, { again: [] }),
      exchange("logits", "all-reduce", ["tensor"], 2 * 4 * padded, { again: ALWAYS, back: false }),
      exchange("logits", "all-reduce", ["tensor"], 4 * padded, { again: [], back: false }),
    ];
  }

  // plan.costs: how often -----------------------------------------------------------------------------------------

  function passes(cfg, c, sched) {
    const M = sched.microbatches, onceMore = M * sched.stages > 1 && !sched.turns && c.n_experts && c.balance_loss;
    const halves = 1 + (sched.splits ? 1 : 0);
    return { forward: M * (onceMore ? 2 : 1), again: M * halves, inputs: M * halves, weights: M };
  }

  const everywhere = (M) => ({ forward: M, again: M, inputs: M, weights: M });

  function layers(c, z) {
    const nMoe = c.n_experts ? z.blocks : 0, nDense = c.dense_prefix + z.blocks * (c.layers_per_block - (c.n_experts ? 1 : 0));
    return [[nDense, dense(c, z)], [nMoe, nMoe ? moe(c, z) : []]];
  }

  function flops(cfg, c, z, sched) {
    const found = {};
    const count = (rows, many, run) => {
      for (const row of rows.filter((one) => one.product)) {
        const times = run.forward + run.again * row.again.includes(c.remat) + run.inputs + run.weights;
        found[row.part] = (found[row.part] ?? 0) + many * times * row.flops;
      }
    };
    for (const [many, rows] of layers(c, z)) count(rows, many, passes(cfg, c, sched));
    count(logits(c, z), 1, everywhere(sched.microbatches));
    return found;
  }

  function weights(c, mesh, declarations) {
    return declarations.map((d) => {
      const held = floordiv(prod(d.shape), prod(d.spec.flat().map((axis) => mesh[axis])));
      const over = d.spec.find((axes) => axes.includes("fsdp")) ?? [];
      const narrow = over.length && !d.exact && c.compute === "bfloat16";
      const many = prod(d.shape.filter((_, dim) => "PLJ".includes(d.dims[dim])));
      return {
        ...d, held, over, joined: held * prod(over.map((axis) => mesh[axis])), width: narrow ? 2 : d.itemsize,
        replicas: AXES.filter((axis) => !d.spec.flat().includes(axis)),
        layers: floordiv(many, d.dims.includes("L") ? mesh.stage : 1),
      };
    });
  }

  function traffic(cfg, c, z, sched, split, held, rounds) {
    const run = passes(cfg, c, sched), M = sched.microbatches, once = everywhere(M), found = new Map();
    const add = (part, kind, axes, size, count) => {
      axes = AXES.filter((axis) => axes.includes(axis) && z.mesh[axis] > 1);
      if (!axes.length || !count || !size) return;
      const name = `${part} ${kind} ${axes}`, old = found.get(name) ?? { part, kind, axes, count: 0, wire_bytes: 0 };
      old.count += count;
      old.wire_bytes += count * wireBytes(kind, size, prod(axes.map((axis) => z.mesh[axis])));
      found.set(name, old);
    };
    const back = { "all-gather": "reduce-scatter", "reduce-scatter": "all-gather" };
    const activations = (rows, many, run) => {
      for (const row of rows.filter((one) => !one.product)) {
        const ahead = run.forward + run.again * row.again.includes(c.remat);
        add(row.part, row.kind, row.axes, row.size, many * row.times * ahead);
        add(row.part, back[row.kind] ?? row.kind, row.axes, row.size, many * row.times * run.inputs * row.back);
      }
    };
    for (const [many, rows] of layers(c, z)) activations(rows, many, run);
    activations(enter(c, z), 1, { forward: run.forward, again: 0, inputs: M, weights: 0 });
    activations(logits(c, z), 1, once);
    const ahead = run.forward > M ? forwardOnly(sched) : null;
    const ticks = sched.table.length * (sched.turns ? 1 : 2) + (ahead ? ahead.table.length : 0);
    if (sched.stages > 1) add("activations", "collective-permute", ["stage"], z.b * z.t * c.d_model * z.width, ticks);
    if (c.n_experts) add("statistics", "all-reduce", TOKENS, 4 * (2 * c.n_experts + 3) * z.blocks, 1);
    const sequences = split.device_batch * split.microbatches * split.accumulation;
    add("batch", "all-gather", ["context"], 6 * 4 * sequences * z.T, 1);

    const onePiece = M * sched.stages === 1;
    for (const w of held) {
      let gathers = run.forward + run.again, reductions = run.weights, reduced = w.width;
      if (w.name === "embedding_VD") [gathers, reductions] = [run.forward + M * c.tie_embeddings, M * (1 + c.tie_embeddings)];
      else if (w.name === "unembedding_DV") gathers = reductions = M;
      const size = (w.joined * w.width) / w.layers;
      if (c.gather === "step") [gathers, reductions, reduced] = [1, 1, onePiece ? w.width : 4];
      add("weights", "all-gather", w.over, size, gathers * w.layers);
      if (w.trainable) {
        add("gradients", "reduce-scatter", w.over, (size * reduced) / w.width, reductions * w.layers);
        add("replicas", "all-reduce", w.replicas, w.held * w.itemsize, 1);
      }
      if (sched.chunks > 1 && w.dims[0] === "L") {
        const part = (c.gather === "step" ? w.joined : w.held) / sched.chunks;
        add("weights", "collective-permute", ["stage"], part * w.width, rounds);
        add("gradients", "collective-permute", ["stage"], part * 4, rounds);
      }
    }
    return [...found.values()];
  }

  function bubble(cfg, c, sched) {
    const again = { none: 0, dots: 0.2, full: 1 }[c.remat], M = sched.microbatches;
    const [F, B, W] = sched.splits ? [1, again + 1, again + 2] : [1, again + 2, 0];
    let busy = M * (F + B + W), whole = lockStep(sched, F, B, W);
    if (passes(cfg, c, sched).forward > M) {
      busy += M * F;
      whole += lockStep(forwardOnly(sched), F);
    }
    return 1 - busy / whole;
  }

  // plan.costs: memory --------------------------------------------------------------------------------------------

  function kept(c, z, isMoe, remat) {
    const N = z.b * z.s, keys = z.b * z.T, f32 = 4, stream = z.b * z.t * c.d_model, whole = N * c.d_model;
    const h = floordiv(c.n_heads, z.mesh.tensor), n = z.mesh.expert, m = floordiv(c.d_expert, z.mesh.tensor);
    let latent = 0, score = c.d_head, value = c.d_head, made, rows = 0, tiles = 0;
    if (c.attention === "mla") {
      [latent, score, value] = [c.d_kv_latent + c.d_rope + c.d_query_latent, c.d_head + c.d_rope, c.d_value];
      made = keys * h * (c.d_head + value);
    } else {
      made = floordiv(N * 2 * c.n_kv_heads, z.mesh.tensor) * c.d_head;
    }
    if (isMoe && c.capacity_factor) rows = c.n_experts * z.b * slotsPerExpert(c, z.T);
    else if (isMoe) {
      rows = groupedRows(N * n * c.top_k, floordiv(c.n_experts, n), z);
      tiles = z.platform === "tpu" ? 0 : paddedTiles(N * n * c.top_k, floordiv(c.n_experts, n), z.TILE)[1];
    }
    const inner = floordiv(N * (isMoe ? c.n_shared * c.d_expert : c.d_ff), z.mesh.tensor);
    if (remat === "full") return stream * z.width;
    if (remat === "dots") return (2 * stream + whole * (inner ? 2 : 1) + N * latent + N * h * score + made + inner * (1 + c.swiglu)) * z.width;
    const pieces = z.mesh.context > 1 ? 2 : Math.max(floordiv(z.s, z.QUERIES), 1), matrices = 2 + c.swiglu;
    let scores = (z.b * h * z.s * z.T * (pieces + 1)) / (2 * pieces), heads = (N * h + keys * h) * (score + value);
    if (remat === "fused") return (2 * stream + 3 * whole + N * latent + heads + scores + matrices * (inner + rows * m) + 3 * rows * c.d_model) * z.width;
    if (c.context_attention === "ring" && z.mesh.context > 1) {
      [scores, heads] = [z.b * h * z.s ** 2 * 2, heads + z.mesh.context * N * h * 2 * (value + 2)];
    }
    return 4 * stream * f32 + (2 * stream + 3 * whole + 3 * N * latent) * z.width + heads * z.width + scores * (f32 + z.width)
      + (inner + rows * m) * (c.swiglu ? 5 : 6) * z.width + (3 * rows * c.d_model + tiles * matrices * c.d_model * m) * z.width;
  }

  function memory(cfg, c, z, sched, split, w) {
    const onePiece = sched.microbatches * sched.stages === 1, onTpu = z.platform === "tpu", whole = c.gather === "step";
    const state = sum(w.map((x) => x.held * x.itemsize));
    const sequences = split.device_batch * split.microbatches * split.accumulation;
    const there = layers(c, z).map(([many], isMoe) => [many, Boolean(isMoe)]).filter(([many]) => many);
    const saved = sum(there.map(([many, isMoe]) => many * kept(c, z, isMoe, c.remat))) / sched.chunks;
    const work = Math.max(...there.map(([, isMoe]) => kept(c, z, isMoe, onTpu ? "fused" : "none")));
    const ofLayer = Math.max(...["prefix.", "blocks.dense.", "blocks.moe."].map((part) =>
      sum(w.filter((x) => x.name.startsWith(part)).map((x) => floordiv(x.joined * x.width, x.layers)))));
    const slots = onePiece ? { inbox: 0, kept: 1, cotangents: 0 } : buffers(sched), stream = z.b * z.t * c.d_model * z.width;
    const table = Math.max(...w.filter((x) => ["embedding_VD", "unembedding_DV"].includes(x.name)).map((x) => x.joined));
    const tokens = ceildiv(z.b * z.t, z.mesh.stage) * z.mesh.tensor, each = onePiece ? null : onTpu ? 4 : 8;
    const gradients = sum(w.map((x) => (whole ? x.joined * (each ?? x.width) : x.held * 4)));
    const chunk = floordiv(Math.min(c.loss_chunk, tokens) * c.vocab_size, z.mesh.tensor) * 4;
    return {
      parameters: state, optimizer: 2 * state, batch: 5 * 4 * sequences * z.s, gradients,
      weights: whole ? sum(w.map((x) => x.joined * x.width)) : 2 * ofLayer,
      saved: (slots.kept + (onePiece ? 0 : 1)) * saved,
      pipeline: (slots.inbox + slots.cotangents) * stream,
      "at work": Math.max(work, (onTpu ? 1 : 3) * chunk + 4 * table - (onePiece && onTpu ? gradients : 0)),
    };
  }

  // plan.hardware: wires ------------------------------------------------------------------------------------------

  function switchedLink(chip, mesh, axis) {  // hardware._switched_link: GPUs in nodes of 8, in JAX's order
    const stride = prod(AXES.slice(AXES.indexOf(axis) + 1).map((one) => mesh[one])), n = mesh[axis];
    let nodes = 1;
    for (let first = 0; first < prod(AXES.map((one) => mesh[one])); first++) {
      if (floordiv(first, stride) % n) continue;
      nodes = Math.max(nodes, new Set(range(n).map((i) => floordiv(first + i * stride, 8))).size);
    }
    if (nodes === 1) return Array(3).fill(chip.link_bytes_per_s);
    const here = ceildiv(n, nodes), card = chip.dcn_bytes_per_s;
    return [Math.min(chip.link_bytes_per_s, here * card), card, (card * (n - 1)) / (n - here)];
  }

  function links(data, cfg) {  // axis: bytes per second in collectives, to a neighbour, in an all-to-all
    const chip = data.chips[cfg.chip], devices = prod(AXES.map((axis) => cfg.mesh[axis])), found = {};
    const split = AXES.filter((axis) => cfg.mesh[axis] > 1);
    if (!chip.torus_dims) {
      if (devices > 8 && devices % 8) throw new Refused(`${devices} is no number of whole nodes of 8`);
      for (const axis of split) found[axis] = switchedLink(chip, cfg.mesh, axis);
      return found;
    }
    const shape = chip.shapes[devices];
    if (!shape) throw new Refused(`this mesh has ${devices} devices; slices of ${chip.name} here have ${Object.keys(chip.shapes).join(", ")}`);
    const name = AXES.map((axis) => Math.log2(cfg.mesh[axis])).join(""), row = chip.wires[name];
    if (!row) throw new Refused(`JAX cannot lay this mesh on ${cfg.chip}:${shape}`);
    split.forEach((axis, i) => { found[axis] = data.links[row[i]].map((share) => share * chip.link_bytes_per_s); });
    return found;
  }

  // plan.planner --------------------------------------------------------------------------------------------------

  function seconds(one, cfg, c, chip, wires) {
    const found = { compute: one.hardware_flops / chip.peak_flops_per_s };
    const once = ["batch", "replicas", ...(c.gather === "step" ? ["weights", "gradients"] : [])];
    let waits = found.compute;
    for (const sent of one.traffic) {
      const which = sent.kind === "all-to-all" ? 2 : sent.kind === "collective-permute" ? 1 : 0;
      const time = sent.wire_bytes / Math.min(...sent.axes.map((axis) => wires[axis][which])), name = sent.axes.join("*");
      found[name] = (found[name] ?? 0) + time;
      if (!once.includes(sent.part) && !sent.axes.includes("stage")) waits += time;
    }
    const state = one.memory_bytes.parameters + one.memory_bytes.optimizer;
    found.optimizer = (2 * state + one.memory_bytes.parameters) / chip.hbm_bytes_per_s;
    found.bubble = (waits * one.bubble) / (1 - one.bubble);
    return found;
  }

  // cfg: {preset, chip, mesh: {axis: size}, batch_size, seq_len, schedule, remat, gather, context_attention}
  function plan(data, cfg) {
    const preset = data.presets[cfg.preset], chip = data.chips[cfg.chip], mesh = cfg.mesh;
    const c = { ...preset.model, remat: cfg.remat, gather: cfg.gather, context_attention: cfg.context_attention };
    cfg = { ...cfg, max_device_batch: preset.max_device_batch };
    try {
      const wires = links(data, cfg), split = splitBatch(cfg), s = floordiv(cfg.seq_len, mesh.context);
      checkDivides(preset.declarations, mesh);
      const sched = schedule(cfg, split, c.n_blocks), platform = chip.torus_dims ? "tpu" : "cpu";
      const z = { b: split.device_batch, T: cfg.seq_len, s, t: floordiv(s, mesh.tensor), width: c.compute === "bfloat16" ? 2 : 4,
                  blocks: floordiv(c.n_blocks, mesh.stage), mesh, platform, QUERIES: data.QUERIES, TILE: data.TILE, PART: data.PART };
      const w = weights(c, mesh, preset.declarations), devices = prod(AXES.map((axis) => mesh[axis]));
      const lookup = c.tie_embeddings ? 0 : c.vocab_size * c.d_model;
      const width = c.attention === "mla" ? c.d_head + c.d_rope + c.d_value : 2 * c.d_head;
      const perToken = 6 * (preset.params_active - lookup) + 3 * c.n_layers * c.n_heads * width * (cfg.seq_len + 1);
      const one = {
        params_total: preset.params_total, params_active: preset.params_active, devices, split,
        tokens_per_step: cfg.batch_size * cfg.seq_len,
        model_flops: (cfg.batch_size * cfg.seq_len * perToken) / devices,
        flops: flops(cfg, c, z, sched),
        memory_bytes: memory(cfg, c, z, sched, split, w),
        traffic: traffic(cfg, c, z, sched, split, w, data.rounds[mesh.stage] ?? 0),
        bubble: bubble(cfg, c, sched), microbatches: sched.microbatches, ticks: sched.table.length,
        limit_bytes: chip.memory_bytes,
      };
      one.hardware_flops = sum(Object.values(one.flops));
      one.wire_bytes = sum(one.traffic.map((x) => x.wire_bytes));
      one.wire_by_axes = {};
      for (const x of one.traffic) one.wire_by_axes[x.axes.join("*")] = (one.wire_by_axes[x.axes.join("*")] ?? 0) + x.wire_bytes;
      one.peak_bytes = sum(Object.values(one.memory_bytes));
      one.fits = one.peak_bytes <= one.limit_bytes;
      one.seconds = seconds(one, cfg, c, chip, wires);
      one.step_s = sum(Object.values(one.seconds));
      one.mfu = one.model_flops / one.step_s / chip.peak_flops_per_s;
      return one;
    } catch (error) {
      if (error instanceof Refused) return { error: error.message };
      throw error;
    }
  }

  root.AxisPlanner = { plan, AXES, SCHEDULES: Object.keys(SCHEDULES) };
  if (typeof module !== "undefined") module.exports = root.AxisPlanner;
})(typeof window === "undefined" ? globalThis : window);
