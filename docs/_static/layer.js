// Reads docs/_static/layer_timeline.json: which case the switches select, where its bars are, and what they mean. Nothing is
// simulated here. tests/site/test_layer_timeline.py compares the bars with the file.
"use strict";

(function (root) {
  const CORE = "core", WAITING = "waiting for ";

  // Return the case of these switches; if there is none, a case with the switch that moved last and most of the others.
  function choose(data, asked, moved = "on") {
    const same = (name) => data.switches.filter((one) => data.cases[name].switches[one] === asked[one]).length;
    const must = [...new Set(["on", moved])].filter((one) => asked[one] !== undefined);
    let names = Object.keys(data.cases).filter((name) => must.every((one) => data.cases[name].switches[one] === asked[one]));
    if (!names.length) names = Object.keys(data.cases);
    return names.reduce((best, name) => same(name) > same(best) ? name : best);
  }

  const on = (data, name) => Object.keys(data.cases).filter((one) => data.cases[one].switches.on === data.cases[name].switches.on);

  // Return the values of a switch for this model and slice.
  const options = (data, name, which) => [...new Set((which === "on" ? Object.keys(data.cases) : on(data, name)).map((one) => data.cases[one].switches[which]))];

  // Return the bars of one pass of a layer: the core first, then each mesh axis. Collectives in flight at once have separate rows.
  function bars(layer) {
    const ends = {};
    return layer.events.map(([start, end, number, bytes]) => {
      const [lane, what, scope, line] = layer.words[number], rows = ends[lane] ??= [];
      let row = lane === CORE ? 0 : rows.findIndex((last) => last <= start + 0.02);
      if (row < 0) row = rows.length;
      rows[row] = end;
      const kind = what.startsWith(WAITING) ? "waiting" : lane === CORE ? what : "sends";
      return { start, end, lane, row, kind, what, scope, line, bytes };
    });
  }

  // Return [{lane, rows}], the core first.
  function lanes(found) {
    const rows = new Map();
    for (const bar of found) rows.set(bar.lane, Math.max(rows.get(bar.lane) ?? 1, bar.row + 1));
    return [...rows].map(([lane, n]) => ({ lane, rows: n }));
  }

  // Return, for each mesh axis, the microseconds with a collective in flight, and how many of them the core waits. The core
  // may wait for another collective: then this one overlaps with the waiting.
  function busy(found) {
    const all = {}, last = {}, waiting = found.filter((bar) => bar.kind === "waiting");
    for (const bar of found.filter((one) => one.lane !== CORE).sort((a, b) => a.start - b.start)) {
      const from = Math.max(bar.start, last[bar.lane] ?? 0), until = Math.max(bar.end, from), sums = all[bar.lane] ??= { busy: 0, waited: 0 };
      sums.busy += until - from;
      sums.waited += waiting.reduce((sum, one) => sum + Math.max(Math.min(one.end, until) - Math.max(one.start, from), 0), 0);
      last[bar.lane] = until;
    }
    return all;
  }

  const waits = (causes) => Object.entries(causes).filter(([cause]) => !["matmuls", "other ops", "copies"].includes(cause));
  const sum = (pairs) => pairs.reduce((all, [, us]) => all + us, 0);

  // Return the microseconds of one pass of a layer, or of a step: waiting in total, for each axis, and computing.
  function parts(causes) {
    return { waiting: sum(waits(causes)), matmuls: causes.matmuls ?? 0, other: (causes["other ops"] ?? 0) + (causes.copies ?? 0),
             waits: waits(causes).sort((a, b) => b[1] - a[1]) };
  }

  const number = (x) => x >= 100 ? x.toFixed(0) : x >= 10 ? x.toFixed(1) : x >= 1 ? x.toFixed(2) : x.toFixed(3);
  const ms = (us) => `${number(us / 1000)} ms`;
  const seconds = (us) => `${(us / 1e6).toFixed(3)} s`;
  const size = (bytes) => bytes >= 1e9 ? `${number(bytes / 1e9)} GB` : bytes >= 1e6 ? `${number(bytes / 1e6)} MB` : `${number(bytes / 1e3)} kB`;

  // Describe a bar: [a sentence, the source line of the model if there is one].
  function words(bar, way) {
    const again = bar.scope.startsWith("computed again"), gradient = way === "back" && bar.line && !again;
    const when = `${ms(bar.end - bar.start)}, from ${(bar.start / 1000).toFixed(2)} to ${(bar.end / 1000).toFixed(2)} ms`;
    const does = bar.kind === "waiting" ? `${bar.what}: ${bar.scope.split("/").pop() || "a collective"}` : bar.kind === "sends" ? `${bar.what} over ${bar.lane.replaceAll("*", " and ")}` : bar.what;
    const sends = bar.bytes ? `, ${size(bar.bytes)} sent per device` : "";
    const from = bar.line ? `${again ? "computed again: " : gradient ? "gradient of " : ""}${bar.line}` : bar.kind === "copies" ? "between memories" : "added by the compiler";
    return [`${does}${sends}. ${when}.`, from];
  }

  root.AxisLayer = { choose, on, options, bars, lanes, busy, parts, words, ms, seconds };
  if (typeof module !== "undefined") module.exports = root.AxisLayer;
})(typeof window === "undefined" ? globalThis : window);
