// What plan/planner.py predicts, in the browser: the same formulas, on tables that docs/planner_widget.py has written.
// Names are those of plan/costs.py; a comment says where a part comes from. tests/site/test_planner.py compares the two.
"use strict";

(function (root) {
  const AXES = ["data", "stage", "fsdp", "expert", "context", "tensor"];
  const TOKENS = ["data", "fsdp", "expert", "context", "tensor"];
  const WHOLE = ["full", "branches"], BATCHED = [...WHOLE, "dots"], ALWAYS = [...BATCHED, "none"];  // remat policies
  const floordiv = (a, b) => Math.floor(a / b);
  const ceildiv = (a, b) => Math.ceil(a / b);
  const sum = (values) => values.reduce((a, b) => a + b, 0);
  const prod = (values) => values.reduce((a, b) => a * b, 1);
  const gcd = (a, b) => (b ? gcd(b, a % b) : a);

  class Refused extends Error {}

  // pipeline.fit.split_batch ------------------------------------------------------------------------------------------

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

  // plan.hiding ---------------------------------------------------------------------------------------------------

  function madeOf(kind, axes, z) {
    const split = AXES.filter((axis) => z.mesh[axis] > 1), chips = prod(split.map((axis) => z.mesh[axis]));
    const everywhere = axes.length === split.length && chips > 4;
    return z.platform === "tpu" && kind === "reduce-scatter" && everywhere ? "all-reduce" : kind;
  }

  function scatterOf(dims, width, z) {
    const byHead = dims.includes("H") || dims.includes("G"), part = width % 128, uneven = part && 128 % width;
    const cut = { VD: width < 128 && uneven, DV: part }[dims] ?? (byHead && uneven);
    return z.platform === "tpu" && cut ? "all-reduce" : "reduce-scatter";
  }

  const HIDES = { v4: ["gathers", "rings"], v5e: ["gathers"], v5p: ["scatters", "rings"], v6e: ["gathers", "scatters", "rings"] };

  function exposed(c, z, kind, axes, when, of) {
    const hides = HIDES[z.chip], n = prod(axes.map((axis) => z.mesh[axis])), wide = c.d_model >= 2048;
    if (!hides || !of) return 1;
    if (axes.join() === "tensor") {
      if (kind === "reduce-scatter" || (kind === "collective-permute" && !hides.includes("rings") && !(z.chip === "v5e" && z.mesh.stage > 1))) return 1;
      if (kind === "all-gather") return Number(when === "forward" || (when === "again" && WHOLE.includes(c.remat)));
      const inARow = c.remat !== "none" ? { "feed-forward": floordiv(n, 2) - 1 } : { "attention's sums": floordiv(n, 2) };
      return when === "forward" && !wide ? (inARow[of] ?? 0) / (n - 1) : 0;
    }
    if (!["weights", "experts", "vocabulary"].includes(of)) return 1;
    if (kind !== "all-gather") return Number(!hides.includes("scatters"));
    if (!hides.includes("gathers")) return 1;
    return of === "experts" ? (when === "forward" ? 1 : wide ? 2 : 0) / 3 : 0;
  }

  // plan.costs: what a device does --------------------------------------------------------------------------------

  const exchange = (part, kind, axes, size, { again = BATCHED, back = true, times = 1, of = "layer" } = {}) =>
    ({ part, kind, axes, size, again, back, times, of });

  function product(part, z, rows, inner, columns, { tables = 1, again = WHOLE } = {}) {
    const arrays = rows * inner + tables * inner * columns + rows * columns;
    return { product: true, part, flops: 2 * rows * inner * columns, hbm_bytes: arrays * z.width, again };
  }

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

  // kernels.attention: blocks of queries meet blocks of keys
  const tpuBlock = (s, S, starts) => [512, 256].find((block) => block <= Math.min(floordiv(s, starts[0].length), floordiv(S, 4))) ?? 128;

  function equalBlock(s, starts, BLOCK) {
    const chunk = floordiv(s, starts[0].length);
    return ceildiv(chunk, ceildiv(chunk, BLOCK));
  }

  const met = new Map();  // it is asked often, and long sequences have many blocks

  function blocksMet(s, S, starts, K, U, z) {  // visits of a head, forward and backward, the size of a block, spans
    const name = [s, S, starts.join(";"), K, U, z.platform, z.width].join(" ");
    if (!met.has(name)) met.set(name, countBlocks(s, S, starts, K, U, z));
    return met.get(name);
  }

  function countBlocks(s, S, starts, K, U, z) {
    const onTpu = z.platform === "tpu", block = onTpu ? tpuBlock(s, S, starts) : equalBlock(s, starts, z.BLOCK);
    const lanes = sum([K, U].map((width) => 128 * ceildiv(width, 128)));
    const spans = onTpu ? ceildiv(ceildiv(S, Math.max(floordiv(z.VMEM_BYTES, (4 + z.width) * lanes * block), 1)), block) : 1;
    const span = onTpu ? ceildiv(S, spans * block) : ceildiv(S, block), chunk = floordiv(s, starts[0].length);
    const counts = starts.map((chunks) => {
      let ahead = 0, back = 0;
      for (let first = 0; first < s; first += block) {
        const end = Math.min(first + block, s), ends = chunks.flatMap((start, i) => {  // the last place in each chunk
          const last = Math.min(end, (i + 1) * chunk) - 1;
          return last >= Math.max(first, i * chunk) ? [start + last - i * chunk] : [];
        });
        const keys = Math.min(floordiv(Math.max(...ends), block) + 1, ceildiv(S, block));
        ahead += keys;
        for (let at = 0; at < ceildiv(S, block); at += span) back += Math.max(Math.min(keys - at, span), 1);
      }
      return [ahead, back];
    });
    const most = (i) => Math.max(...counts.map((one) => one[i]));
    return [most(0), onTpu ? most(1) : most(0), block, spans];
  }

  function mixing(c, z, way, [h, g, K, U]) {
    let n = z.mesh.context, s = z.s;
    const again = BATCHED;
    if (way === "all_to_all") [s, h, g, n] = [z.T, floordiv(h, n), floordiv(g, n), 1];
    const meeting = (s, S, starts, times) => {
      const [ahead, back, block, spans] = blocksMet(s, S, starts, K, U, z), all = times * z.b;
      const moved = h * (z.width * (ahead * block + s) * (K + U) + 4 * s);
      const movedBack = h * (z.width * (back * block * (K + U) + spans * s * (2 * K + U)) + 8 * spans * s) + g * z.width * S * (K + U);
      return { product: true, part: "attention", flops: all * 2 * h * ahead * block ** 2 * (K + U), hbm_bytes: all * moved, again,
               back: [all * 2 * h * back * block ** 2 * (3 * K + 2 * U), all * movedBack] };
    };
    if (way !== "ring") {
      const starts = n === 1 ? [[0]] : range(n).map((i) => [floordiv(i * s, 2), floordiv((2 * n - 1 - i) * s, 2)]);
      const one = meeting(s, z.T, starts, 1);
      if (z.platform !== "tpu" && BATCHED.includes(c.remat) && z.T <= z.BLOCK && n === 1) one.back[0] -= 2 * h * K * s * z.T * z.b;
      return [one];
    }
    const others = meeting(floordiv(s, 2), s, [[s]], n - 1);
    others.back = [others.back[0] + others.flops, others.back[1] + others.hbm_bytes];
    return [meeting(s, s, [[0]], 1), others];
  }

  function overTensor(c, z, kind, size, more) {
    const n = z.mesh.tensor;
    if (c.tensor_exchange === "gather") return exchange("activations", kind, ["tensor"], size, more);
    return exchange("activations", "collective-permute", ["tensor"], size / n, { ...more, times: n - 1 });
  }

  const arriving = (c, z, size, more = {}) => overTensor(c, z, "all-gather", size, more);
  const leaving = (c, z, size, again = [], more = {}) => overTensor(c, z, "reduce-scatter", size, { again, ...more });

  const overContext = (c, z) => (z.mesh.context > 1 ? c.context_attention : "gather");

  function attention(c, z) {
    const h = floordiv(c.n_heads, z.mesh.tensor), n = z.mesh.context, N = z.b * z.s, keys = z.b * z.T, rows = [];
    const g = c.attention === "mla" ? h : floordiv(c.n_kv_heads, z.mesh.tensor), way = overContext(c, z);
    let score = c.d_head, value = c.d_head, arrives = c.d_model, parts = 2 * g * c.d_head;
    if (c.attention === "mla") {
      const Q = c.d_query_latent || c.d_model, latent = c.d_query_latent + c.d_kv_latent + c.d_rope;
      [score, value, parts] = [c.d_head + c.d_rope, c.d_value, c.d_kv_latent + c.d_rope];
      const sends = c.d_query_latent && latent < c.d_model;
      rows.push(product("attention", z, z.b * (sends ? z.t : z.s), c.d_model, latent));
      rows.push(product("attention", z, N, Q, h * score));
      if (sends) arrives = latent;
      const made = (keys) => product("attention", z, keys, c.d_kv_latent, h * (c.d_head + value));
      rows.push(made(way === "gather" ? keys : N));
      if (way === "ring") {
        const others = made((n - 1) * N);
        rows.push({ ...others, again: BATCHED, back: [3 * others.flops, 3 * others.hbm_bytes] });
      }
    } else {
      rows.push(product("attention", z, N, c.d_model, (h + 2 * g) * c.d_head));
    }
    const needs = c.parallel_residual ? [] : ["full", "dots"];
    rows.push(product("attention", z, N, h * value, c.d_model, { again: needs.slice(0, 1) }), ...mixing(c, z, way, [h, g, score, value]));
    rows.push(arriving(c, z, N * arrives * z.width));
    rows.push(leaving(c, z, N * c.d_model * z.width, needs, { of: "attention's sums" }));
    const own = N * parts * z.width;
    if (way === "ring") {
      rows.push(exchange("keys", "collective-permute", ["context"], own, { times: n - 1 }));
      rows.push(exchange("keys", "collective-permute", ["context"], 4 * N, { back: false, times: n - 1 }));
    } else {
      if (way === "gather") rows.push(exchange("keys", "all-gather", ["context"], own * n));
      else for (const numbers of [h * score, g * score, g * value, h * value]) rows.push(exchange("heads", "all-to-all", ["context"], N * numbers * z.width));
      rows.push(exchange("keys", "all-gather", ["context"], 4 * N * n, { back: false }));
    }
    return rows;
  }

  function feedForward(c, z, hidden, part) {
    const N = z.b * z.s, f = floordiv(hidden, z.mesh.tensor);
    return [product(part, z, N, c.d_model, f * (1 + c.swiglu)), product(part, z, N, f, c.d_model, { again: [] })];
  }

  function dense(c, z) {
    const X = z.b * z.s * c.d_model * z.width;
    const rows = [...attention(c, z), ...feedForward(c, z, c.d_ff, "feed-forward")];
    return c.parallel_residual ? rows : [...rows, arriving(c, z, X, { of: "feed-forward" }), leaving(c, z, X)];
  }

  function slotsPerExpert(c, T) {
    return Math.floor(Math.round(((c.capacity_factor * c.top_k * T) / c.n_experts) * 1e6) / 1e6);
  }

  function moe(c, z) {
    const N = z.b * z.s, n = z.mesh.expert, k = c.top_k, e = floordiv(c.n_experts, n), m = floordiv(c.d_expert, z.mesh.tensor);
    const X = N * c.d_model * z.width;
    const out = [
      ...attention(c, z),
      product("router", z, z.b * z.t, c.d_model, c.n_experts),
      arriving(c, z, X, { of: "feed-forward" }),
      exchange("routes", "all-gather", ["tensor"], 4 * N * k),
      exchange("routes", "all-gather", ["tensor"], 4 * N * k, { back: false }),
      leaving(c, z, X),
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
    out.push(product("experts", z, rows, c.d_model, m * (1 + c.swiglu), { tables: e, again: BATCHED }));
    out.push(product("experts", z, rows, m, c.d_model, { tables: e, again: [] }));
    return c.n_shared ? [...out, ...feedForward(c, z, c.n_shared * c.d_expert, "shared experts")] : out;
  }

  const SLICED = ["fsdp", "expert", "context"];
  const tokensGo = (c, z) => c.gather === "layer" && z.b * z.s < floordiv(c.vocab_size, z.mesh.tensor);

  function enter(c, z) {
    const rows = [exchange("activations", "reduce-scatter", ["tensor"], z.b * z.s * c.d_model * z.width, { again: [] })];
    if (tokensGo(c, z)) rows.push(
      exchange("routes", "all-gather", SLICED, 4 * z.b * z.s * prod(SLICED.map((axis) => z.mesh[axis])), { again: [], back: false }),
      exchange("activations", "all-to-all", SLICED, z.b * z.t * c.d_model * z.width, { again: [] }));
    return rows;
  }

  function vocabularySlices(c, n, v) {  // model.vocabulary_slices
    const least = ceildiv(n, c.loss_chunk), equal = range(least + 1).map((i) => least + i).find((many) => v % many === 0);
    const words = ceildiv(v, equal ?? least);
    return [ceildiv(v, words), words];
  }

  const logitsTokens = (z) => ceildiv(z.b * z.t, z.mesh.stage) * z.mesh.tensor;

  function logits(c, z) {
    const n = z.mesh.tensor, tokens = logitsTokens(z), X = tokens * c.d_model * z.width;
    const [slices, words] = vocabularySlices(c, tokens, floordiv(c.vocab_size, n));
    const one = product("logits", z, tokens, c.d_model, words, { again: [] });
    return [
      { ...one, flops: (slices - 1) * one.flops, hbm_bytes: (slices - 1) * one.hbm_bytes, again: ALWAYS },
      one,
      exchange("activations", "reduce-scatter", ["stage"], floordiv(X, n) * z.mesh.stage, { again: [] }),
      exchange("activations", "all-gather", ["tensor"], X, { again: [] }),
      exchange("logits", "all-reduce", ["tensor"], 3 * 4 * tokens, { again: [], back: false }),
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

  function work(cfg, c, z, sched) {
    const count = (many, run) => (row) => {
      const ahead = run.forward + run.again * row.again.includes(c.remat), [backFlops, backBytes] = row.back ?? [];
      const whole = (x, given) => many * (ahead * x + (given === undefined ? x * (run.inputs + run.weights) : given * run.inputs));
      return { part: row.part, flops: whole(row.flops, backFlops), hbm_bytes: whole(row.hbm_bytes, backBytes) };
    };
    const products = (rows) => rows.filter((one) => one.product), run = passes(cfg, c, sched);
    return [...layers(c, z).flatMap(([many, rows]) => products(rows).map(count(many, run))),
            ...products(logits(c, z)).map(count(1, everywhere(sched.microbatches)))];
  }

  function weights(c, mesh, declarations) {
    return declarations.map((d) => {
      const held = floordiv(prod(d.shape), prod(d.spec.flat().map((axis) => mesh[axis])));
      const over = d.spec.find((axes) => axes.includes("fsdp")) ?? [];
      const narrow = over.length && !d.exact && c.compute === "bfloat16";
      const many = prod(d.shape.filter((_, dim) => "PLJ".includes(d.dims[dim])));
      return {
        ...d, held, over, slice: floordiv(d.shape[d.spec.indexOf(over)] ?? 0, prod(over.map((axis) => mesh[axis]))), parts: prod(over.map((axis) => mesh[axis])), joined: held * prod(over.map((axis) => mesh[axis])), width: narrow ? 2 : d.itemsize,
        replicas: AXES.filter((axis) => !d.spec.flat().includes(axis)),
        layers: floordiv(many, d.dims.includes("L") ? mesh.stage : 1),
      };
    });
  }

  function traffic(cfg, c, z, sched, split, held, rounds) {
    const run = passes(cfg, c, sched), M = sched.microbatches, once = everywhere(M), found = new Map();
    const rare = ["batch", "replicas", ...(c.gather === "step" ? ["weights", "gradients"] : [])];
    const add = (part, kind, axes, size, count, when = "once", of = "") => {
      axes = AXES.filter((axis) => axes.includes(axis) && z.mesh[axis] > 1);
      kind = madeOf(kind, axes, z);
      if (!axes.length || !count || !size) return;
      const name = `${part} ${kind} ${axes}`, in_a_slot = !rare.includes(part) && !axes.includes("stage");
      const old = found.get(name) ?? { part, kind, axes, count: 0, wire_bytes: 0, exposed_bytes: 0, in_a_slot };
      const wire = count * wireBytes(kind, size, prod(axes.map((axis) => z.mesh[axis])));
      old.count += count;
      old.wire_bytes += wire;
      old.exposed_bytes += wire * exposed(c, z, kind, axes, when, of);
      found.set(name, old);
    };
    const back = { "all-gather": "reduce-scatter", "reduce-scatter": "all-gather" };
    const activations = (rows, many, run, inside = true) => {
      for (const row of rows.filter((one) => !one.product)) {
        const times = many * row.times, more = (when) => (inside ? [when, row.of] : []);
        add(row.part, row.kind, row.axes, row.size, times * run.forward, ...more("forward"));
        add(row.part, row.kind, row.axes, row.size, times * run.again * row.again.includes(c.remat), ...more("again"));
        add(row.part, back[row.kind] ?? row.kind, row.axes, row.size, times * run.inputs * row.back, ...more("back"));
      }
    };
    for (const [many, rows] of layers(c, z)) activations(rows, many, run);
    activations(enter(c, z), 1, { forward: run.forward, again: 0, inputs: M, weights: 0 }, false);
    activations(logits(c, z), 1, once, false);
    const ahead = run.forward > M ? forwardOnly(sched) : null;
    const ticks = sched.table.length * (sched.turns ? 1 : 2) + (ahead ? ahead.table.length : 0);
    if (sched.stages > 1) add("activations", "collective-permute", ["stage"], z.b * z.t * c.d_model * z.width, ticks);
    if (c.n_experts) add("statistics", "all-reduce", TOKENS, 4 * (2 * c.n_experts + 3) * z.blocks, 1);
    const sequences = split.device_batch * split.microbatches * split.accumulation;
    add("batch", "all-gather", ["context"], 6 * 4 * sequences * z.T, 1);

    for (const w of held) ofWeights(w, c, z, sched, run, rounds, add);
    return [...found.values()];
  }

  function uses(w, c, z, sched, run) {
    const M = sched.microbatches, found = [];
    const use = (ahead, again, back, dims, size, times, of = "") => found.push({ ahead, again, back, dims, size, times, of });
    if (c.gather === "step") {
      use(1, 0, 1, w.dims, w.joined / w.layers, w.layers);
      return found;
    }
    if (w.name.startsWith("blocks.") || w.name.startsWith("prefix.")) {
      use(run.forward, run.again, run.weights, w.dims, w.joined / w.layers, w.layers, w.dims.includes("E") ? "experts" : "weights");
    }
    if (w.name === "embedding_VD" && !tokensGo(c, z)) use(run.forward, 0, M, w.dims, w.joined, 1);
    if (w.name === (c.tie_embeddings ? "embedding_VD" : "unembedding_DV")) {
      const v = floordiv(c.vocab_size, z.mesh.tensor), [slices, words] = vocabularySlices(c, logitsTokens(z), v);
      use(M, 0, M, "DV", (w.joined / v) * words, slices - 1, "vocabulary");
      use(M, 0, M, "DV", (w.joined / v) * words, 1);
    }
    return found;
  }

  function ofWeights(w, c, z, sched, run, rounds, add) {
    const once = c.gather === "step", inFloat32 = once && sched.microbatches * sched.stages > 1;
    for (const { ahead, again, back, dims, size, times, of } of uses(w, c, z, sched, run)) {
      add("weights", "all-gather", w.over, size * w.width, ahead * times, "forward", of);
      add("weights", "all-gather", w.over, size * w.width, again * times, "again", of);
      if (!w.trainable) continue;
      add("gradients", once ? "reduce-scatter" : scatterOf(dims, w.slice, z), w.over, size * (inFloat32 ? 4 : w.width), back * times, "back", of);
    }
    if (w.trainable) add("replicas", "all-reduce", w.replicas, w.held * w.itemsize, 1);
    if (sched.chunks > 1 && w.dims[0] === "L") {
      const part = (c.gather === "step" ? w.joined : w.held) / sched.chunks;
      add("weights", "collective-permute", ["stage"], part * w.width, rounds);
      add("gradients", "collective-permute", ["stage"], part * 4, rounds);
    }
  }

  function bubble(cfg, c, sched) {
    const again = WHOLE.includes(c.remat) ? 1 : { none: 0, dots: 0.2 }[c.remat], M = sched.microbatches;
    const [F, B, W] = sched.splits ? [1, again + 1, again + 2] : [1, again + 2, 0];
    let busy = M * (F + B + W), whole = lockStep(sched, F, B, W);
    if (passes(cfg, c, sched).forward > M) {
      busy += M * F;
      whole += lockStep(forwardOnly(sched), F);
    }
    return Math.max(1 - busy / whole, 0);  // rounding
  }

  // plan.memory ---------------------------------------------------------------------------------------------------

  function kept(c, z, isMoe, remat, onePiece = false) {
    const N = z.b * z.s, f32 = 4, stream = z.b * z.t * c.d_model, whole = N * c.d_model, contexts = z.mesh.context;
    const way = overContext(c, z), keys = way === "gather" ? z.b * z.T : N;
    const h = floordiv(c.n_heads, z.mesh.tensor), n = z.mesh.expert, m = floordiv(c.d_expert, z.mesh.tensor);
    let latent = 0, score = c.d_head, value = c.d_head, g = h, made, rows = 0, tiles = 0;
    if (c.attention === "mla") {
      [latent, score, value] = [c.d_kv_latent + c.d_rope + c.d_query_latent, c.d_head + c.d_rope, c.d_value];
      made = keys * h * (c.d_head + value);
    } else {
      g = floordiv(c.n_kv_heads, z.mesh.tensor);
      made = N * 2 * g * c.d_head;
    }
    if (isMoe && c.capacity_factor) rows = c.n_experts * z.b * slotsPerExpert(c, z.T);
    else if (isMoe) {
      rows = groupedRows(N * n * c.top_k, floordiv(c.n_experts, n), z);
      tiles = z.platform === "tpu" ? 0 : paddedTiles(N * n * c.top_k, floordiv(c.n_experts, n), z.TILE)[1];
    }
    const inner = floordiv(N * (isMoe ? c.n_shared * c.d_expert : c.d_ff), z.mesh.tensor), matrices = 2 + c.swiglu;
    const branches = c.parallel_residual ? 1 : 2;
    if (WHOLE.includes(remat)) return (remat === "branches" ? branches : 1) * stream * z.width;
    const onTpu = z.platform === "tpu", narrow = c.d_model < 2048;
    const less = onTpu && c.attention === "gqa" && !(onePiece && narrow) ? stream + whole : 0;
    const copies = onTpu && c.attention === "mla" && onePiece ? keys * h * c.d_rope : 0;
    if (remat === "dots") return (branches * stream + whole * (inner ? 2 : 1) - less + N * latent + N * h * score + made + copies + inner * (1 + c.swiglu)) * z.width;
    let attended = (N * h + keys * g) * (score + value) * z.width + N * h * f32;
    if (way === "all_to_all") attended += N * h * value * z.width;
    if (way === "ring") attended += (contexts - 1) * N * h * (value + 1) * f32;
    if (remat === "fused") return attended + (branches * stream + (2 * branches - 1) * whole + N * latent + matrices * (inner + rows * m) + 3 * rows * c.d_model) * z.width;
    return 2 * branches * stream * f32 + (branches * stream + (2 * branches - 1) * whole + 3 * N * latent) * z.width + attended
      + (inner + rows * m) * (c.swiglu ? 5 : 6) * z.width + (3 * rows * c.d_model + tiles * matrices * c.d_model * m) * z.width;
  }

  function memory(cfg, c, z, sched, split, w) {
    const onePiece = sched.microbatches * sched.stages === 1, onTpu = z.platform === "tpu", whole = c.gather === "step";
    const state = sum(w.map((x) => x.held * x.itemsize));
    const sequences = split.device_batch * split.microbatches * split.accumulation;
    const there = layers(c, z).map(([many], isMoe) => [many, Boolean(isMoe)]).filter(([many]) => many);
    const saved = sum(there.map(([many, isMoe]) => many * kept(c, z, isMoe, c.remat, onePiece))) / sched.chunks;
    const work = Math.max(...there.map(([, isMoe]) => kept(c, z, isMoe, onTpu ? "fused" : "none")));
    const ofLayer = Math.max(...["prefix.", "blocks.dense.", "blocks.moe."].map((part) =>
      sum(w.filter((x) => x.name.startsWith(part)).map((x) => floordiv(x.joined * x.width, x.layers)))));
    const slots = onePiece ? { inbox: 0, kept: 1, cotangents: 0 } : buffers(sched), stream = z.b * z.t * c.d_model * z.width;
    const table = Math.max(...w.filter((x) => ["embedding_VD", "unembedding_DV"].includes(x.name)).map((x) => x.joined * x.width));
    const tokens = logitsTokens(z), each = onePiece ? null : onTpu ? 4 : 8;
    const gradients = sum(w.map((x) => (whole ? x.joined * (each ?? x.width) : x.held * 4)));
    const logitsBytes = tokens * vocabularySlices(c, tokens, floordiv(c.vocab_size, z.mesh.tensor))[1] * 4;
    return {
      parameters: state, optimizer: 2 * state, batch: 5 * 4 * sequences * z.s, gradients,
      weights: whole ? sum(w.map((x) => x.joined * x.width)) : 2 * ofLayer,
      saved: (slots.kept + (onePiece ? 0 : 1)) * saved,
      pipeline: (slots.inbox + slots.cotangents) * stream,
      "at work": Math.max(work, (onTpu ? 1 : 3) * logitsBytes + table - (onePiece && onTpu ? gradients : 0)),
    };
  }

  // plan.hardware: wires ------------------------------------------------------------------------------------------

  function switchedLink(chip, mesh, axes) {  // hardware._switched_link: GPUs in nodes, in JAX's order
    const stride = (axis) => prod(AXES.slice(AXES.indexOf(axis) + 1).map((one) => mesh[one]));
    const n = prod(axes.map((axis) => mesh[axis])), reached = new Map();  // the first of a group: its nodes
    for (let device = 0; device < prod(AXES.map((one) => mesh[one])); device++) {
      const first = device - sum(axes.map((axis) => floordiv(device, stride(axis)) % mesh[axis] * stride(axis)));
      reached.set(first, (reached.get(first) ?? new Set()).add(floordiv(device, chip.domain)));
    }
    const nodes = Math.max(...[...reached.values()].map((one) => one.size));
    if (nodes === 1) return Array(3).fill(chip.link_bytes_per_s);
    const here = ceildiv(n, nodes), card = chip.dcn_bytes_per_s;
    return [Math.min(chip.link_bytes_per_s, here * card), card, (card * (n - 1)) / (n - here)];
  }

  function groups(data, mesh) {  // planner_widget.groups
    const split = data.groups.map((group) => group.filter((axis) => mesh[axis] > 1));
    return [...new Set(split.filter((group) => group.length > 1).map((group) => group.join("*")))];
  }

  function links(data, cfg) {  // axis, or axes: bytes per second in collectives, to a neighbour, in an all-to-all
    const chip = data.chips[cfg.chip], devices = prod(AXES.map((axis) => cfg.mesh[axis])), found = {};
    const split = [...AXES.filter((axis) => cfg.mesh[axis] > 1), ...groups(data, cfg.mesh)];
    if (!chip.torus_dims) {
      if (devices > chip.domain && devices % chip.domain) throw new Refused(`${devices} is no number of whole nodes of ${chip.domain}`);
      for (const axes of split) found[axes] = switchedLink(chip, cfg.mesh, axes.split("*"));
      return found;
    }
    const shape = chip.shapes[devices];
    if (!shape) throw new Refused(`this mesh has ${devices} devices; slices of ${chip.name} here have ${Object.keys(chip.shapes).join(", ")}`);
    const name = AXES.map((axis) => Math.log2(cfg.mesh[axis])).join(""), row = chip.wires[name];
    if (!row) throw new Refused(`JAX cannot lay this mesh on ${cfg.chip}:${shape}`);
    split.forEach((axes, i) => { found[axes] = data.links[row[i]].map((share) => share * chip.link_bytes_per_s); });
    return found;
  }

  // plan.planner --------------------------------------------------------------------------------------------------

  function speedOf({ kind }, axes, [all, neighbour, allToAll], n) {
    if (kind !== "collective-permute") return kind === "all-to-all" ? allToAll : all;
    return Math.min(all, neighbour * (axes === "tensor" ? (n - 1) / floordiv(n, 2) : 1));
  }

  function seconds(one, mesh, chip, wires) {
    const compute = sum(one.work.map((x) => Math.max(x.flops / chip.peak_flops_per_s, x.hbm_bytes / chip.hbm_bytes_per_s)));
    const found = { compute }, hidden = {};
    let waits = compute;
    for (const sent of one.traffic) {
      const name = sent.axes.join("*"), speed = speedOf(sent, name, wires[name], mesh.tensor);
      found[name] = (found[name] ?? 0) + sent.exposed_bytes / speed;
      hidden[name] = (hidden[name] ?? 0) + (sent.wire_bytes - sent.exposed_bytes) / speed;
      if (sent.in_a_slot) waits += sent.exposed_bytes / speed;
    }
    for (const [name, time] of Object.entries(hidden)) {
      found[name] += Math.max(time - compute, 0);
      waits += Math.max(time - compute, 0);
    }
    const state = one.memory_bytes.parameters + one.memory_bytes.optimizer;
    found.optimizer = (2 * state + one.memory_bytes.parameters) / chip.hbm_bytes_per_s;
    found.bubble = (waits * one.bubble) / (1 - one.bubble);
    return found;
  }

  // cfg: {preset, chip, mesh: {axis: size}, batch_size, seq_len, schedule, remat, gather, tensor_exchange, context_attention}
  function plan(data, cfg) {
    const preset = data.presets[cfg.preset], chip = data.chips[cfg.chip], mesh = cfg.mesh;
    const c = { ...preset.model, remat: cfg.remat, gather: cfg.gather, tensor_exchange: cfg.tensor_exchange, context_attention: cfg.context_attention };
    cfg = { ...cfg, max_device_batch: preset.max_device_batch };
    try {
      const wires = links(data, cfg), split = splitBatch(cfg), s = floordiv(cfg.seq_len, mesh.context);
      checkDivides(preset.declarations, mesh);
      const heads = c.attention === "mla" ? c.n_heads : c.n_kv_heads, shares = mesh.tensor * mesh.context;
      if (overContext(c, { mesh }) === "all_to_all" && heads % shares) {
        throw new Refused(`${heads} heads that have keys do not split over tensor*context = ${shares} devices; send keys in turn`);
      }
      const sched = schedule(cfg, split, c.n_blocks), platform = chip.torus_dims ? "tpu" : "cpu";
      const z = { b: split.device_batch, T: cfg.seq_len, s, t: floordiv(s, mesh.tensor), width: c.compute === "bfloat16" ? 2 : 4,
                  blocks: floordiv(c.n_blocks, mesh.stage), mesh, platform, chip: cfg.chip, BLOCK: data.BLOCK, VMEM_BYTES: data.VMEM_BYTES, TILE: data.TILE, PART: data.PART };
      const w = weights(c, mesh, preset.declarations), devices = prod(AXES.map((axis) => mesh[axis]));
      const lookup = c.tie_embeddings ? 0 : c.vocab_size * c.d_model;
      const width = c.attention === "mla" ? c.d_head + c.d_rope + c.d_value : 2 * c.d_head;
      const perToken = 6 * (preset.params_active - lookup) + 3 * c.n_layers * c.n_heads * width * (cfg.seq_len + 1);
      const one = {
        params_total: preset.params_total, params_active: preset.params_active, devices, split,
        tokens_per_step: cfg.batch_size * cfg.seq_len,
        model_flops: (cfg.batch_size * cfg.seq_len * perToken) / devices,
        work: work(cfg, c, z, sched),
        memory_bytes: memory(cfg, c, z, sched, split, w),
        traffic: traffic(cfg, c, z, sched, split, w, data.rounds[mesh.stage] ?? 0),
        bubble: bubble(cfg, c, sched), microbatches: sched.microbatches, ticks: sched.table.length,
        limit_bytes: chip.memory_bytes,
      };
      one.flops = {};
      for (const x of one.work) one.flops[x.part] = (one.flops[x.part] ?? 0) + x.flops;
      one.hardware_flops = sum(Object.values(one.flops));
      one.exposed_bytes = sum(one.traffic.map((x) => x.exposed_bytes));
      one.wire_bytes = sum(one.traffic.map((x) => x.wire_bytes));
      one.wire_by_axes = {};
      for (const x of one.traffic) one.wire_by_axes[x.axes.join("*")] = (one.wire_by_axes[x.axes.join("*")] ?? 0) + x.wire_bytes;
      one.peak_bytes = sum(Object.values(one.memory_bytes));
      one.fits = one.peak_bytes <= one.limit_bytes;
      one.seconds = seconds(one, mesh, chip, wires);
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
