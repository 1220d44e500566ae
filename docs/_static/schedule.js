// Schedules as docs/schedule_explorer.py has written them: at which tick each stage does what. Nothing is scheduled here.
// tests/site/test_explorers.py compares what is read with pipeline/schedules.py.
"use strict";

(function (root) {
  const range = (n) => [...Array(n).keys()];
  const forms = (data, name, S, M) => data.schedules[name][`${S},${M}`] ?? null;

  // The operations of each stage, in the order of the text: {kind, microbatch, chunk, tick}.
  function operations(data, form, M) {
    const v = form.chunks, each = M * v, first = data.first.charCodeAt(0);
    return form.moments.map((text) => range(text.length).map((i) => ({
      kind: "FBW"[Math.floor(i / each)], microbatch: Math.floor((i % each) / v), chunk: i % v, tick: text.charCodeAt(i) - first })));
  }

  const label = (op) => `${op.kind}${op.microbatch}${op.chunk ? String.fromCharCode(97 + op.chunk) : ""}`;  // as pipeline.schedules has it

  // [stage][tick] -> operations, in the order in which a stage does them: F, B, W.
  function table(data, form, M) {
    return operations(data, form, M).map((ops) => range(form.ticks).map((tick) => ops.filter((op) => op.tick === tick)));
  }

  // [stage] -> what it keeps while a tick lasts: what has gone forward and still waits for its last operation.
  function kept(data, form, M, tick) {
    return operations(data, form, M).map((ops) => {
      const last = ops.some((op) => op.kind === "W") ? "W" : "B";
      const ends = new Map(ops.filter((op) => op.kind === last).map((op) => [`${op.microbatch},${op.chunk}`, op.tick]));
      return ops.filter((op) => op.kind === "F" && op.tick <= tick && ends.get(`${op.microbatch},${op.chunk}`) >= tick);
    });
  }

  root.AxisSchedule = { forms, table, kept, label };
  if (typeof module !== "undefined") module.exports = root.AxisSchedule;
})(typeof window === "undefined" ? globalThis : window);
