// Times the schedules that docs/schedule_explorer.py writes. That file says in which tick a stage runs each operation; this
// one says when each operation starts and ends. tests/site/test_explorers.py compares the times with pipeline/schedules.py.
"use strict";

(function (root) {
  const range = (n) => [...Array(n).keys()], KINDS = "FBW";
  const forms = (data, name, S, M) => data.schedules[name][`${S},${M}`] ?? null;

  // Return the operations of each stage in the order in which it runs them: {kind, microbatch, chunk, tick}.
  function operations(data, form, M) {
    const v = form.chunks, each = M * v, first = data.first.charCodeAt(0);
    return form.moments.map((text) => range(text.length).map((i) => ({
      kind: KINDS[Math.floor(i / each)], microbatch: Math.floor((i % each) / v), chunk: i % v, tick: text.charCodeAt(i) - first,
    })).sort((a, b) => a.tick - b.tick || KINDS.indexOf(a.kind) - KINDS.indexOf(b.kind)));
  }

  const label = (op) => `${op.kind}${op.microbatch}${op.chunk ? String.fromCharCode(97 + op.chunk) : ""}`;  // as pipeline/schedules.py
  const key = (kind, microbatch, chunk, stage) => `${kind} ${microbatch} ${chunk} ${stage}`;

  // Return the operation that this one waits for, or null if a microbatch enters the pipeline here.
  function required({ kind, microbatch, chunk }, stage, S, v) {
    const place = chunk * S + stage;
    if (kind === "F") return place ? key("F", microbatch, Math.floor((place - 1) / S), (place - 1) % S) : null;
    if (kind === "B" && place < S * v - 1) return key("B", microbatch, Math.floor((place + 1) / S), (place + 1) % S);
    return key(kind === "B" ? "F" : "B", microbatch, chunk, stage);
  }

  // Return when each stage runs each operation, in units of a forward pass of a stage; an input gradient and a weight
  // gradient take one unit each. In lock-step all stages wait for each other after every tick; otherwise a stage continues
  // as soon as its inputs are there. Sending takes no time.
  function timed(data, form, M, lockStep) {
    const todo = operations(data, form, M), S = todo.length, v = form.chunks, splits = todo[0].some((op) => op.kind === "W");
    const cost = { F: 1 / v, B: (splits ? 1 : 2) / v, W: 1 / v }, ends = new Map(), spans = todo.map(() => []);
    const run = (stage, op, start) => {
      const end = start + cost[op.kind];
      ends.set(key(op.kind, op.microbatch, op.chunk, stage), end);
      spans[stage].push({ ...op, start, end });
      return end;
    };
    if (lockStep) {
      let begin = 0;
      for (let tick = 0; tick <= Math.max(...todo.flat().map((op) => op.tick)); tick++) {
        begin = Math.max(...todo.map((ops, stage) => ops.filter((op) => op.tick === tick).reduce((at, op) => run(stage, op, at), begin)));
      }
    } else {
      const next = range(S).fill(0), free = range(S).fill(0);
      for (let left = todo.flat().length; left;) {
        for (const stage of range(S)) {
          for (let op; (op = todo[stage][next[stage]]); next[stage]++, left--) {
            const needed = required(op, stage, S, v);
            if (needed && !ends.has(needed)) break;
            free[stage] = run(stage, op, Math.max(free[stage], needed ? ends.get(needed) : 0));
          }
        }
      }
    }
    const makespan = Math.max(...ends.values());
    return { spans, makespan, idle: 1 - 3 * M / makespan, chunks: v, last: splits ? "W" : "B" };
  }

  // Return how many microbatches' activations each stage stores at a time, in units of all its layers.
  function stored({ spans, chunks, last }, at) {
    const done = (ops, kind, time) => ops.filter((op) => op.kind === kind && op[time] <= at + 1e-9).length;
    return spans.map((ops) => (done(ops, "F", "start") - done(ops, last, "end")) / chunks);
  }

  const most = (found) => Math.max(...found.spans.flat().filter((op) => op.kind === "F").flatMap((op) => stored(found, op.start)));

  root.AxisSchedule = { forms, timed, stored, most, label };
  if (typeof module !== "undefined") module.exports = root.AxisSchedule;
})(typeof window === "undefined" ? globalThis : window);
