// Copy buttons, folded answers of predictions, and tables that scroll by keyboard. Uses no library and no other host.
"use strict";

function withCopyButton(block) {
  const pre = block.querySelector("pre");
  if (!pre) return;
  const button = document.createElement("button");
  button.className = "copy";
  button.type = "button";
  button.textContent = "copy";
  button.addEventListener("click", async () => {
    const lines = pre.innerText.split("\n");
    const session = lines.some((line) => line.startsWith("$ "));  // copy the commands, not their output
    const text = session ? lines.filter((line) => line.startsWith("$ ")).map((line) => line.slice(2)).join("\n") : pre.innerText;
    try {
      await navigator.clipboard.writeText(text.trimEnd() + "\n");
      button.textContent = "copied";
    } catch {
      getSelection().selectAllChildren(pre);
      button.textContent = "press Ctrl-C";
    }
    setTimeout(() => { button.textContent = "copy"; }, 1500);
  });
  block.append(button);
}

// Write the state of an interactive page into its address, so that a copied link shows the same state. Values equal to
// undefined or "" are left out.
globalThis.AxisAddress = {
  write(state) {
    const kept = Object.entries(state).filter(([, value]) => value !== undefined && value !== "" && value !== null);
    const text = kept.map(([name, value]) => `${name}=${encodeURIComponent(value).replaceAll("%3D", "=").replaceAll("%2C", ",").replaceAll("%20", "+")}`).join("&");
    history.replaceState(null, "", `${location.pathname}?${text}${location.hash}`);
  },
};

// Predictions: a cell that calls lesson.predicted prints the answer, and the markdown below it explains the answer. Both
// are folded until the reader types a number or opens the fold. Without JavaScript everything is visible.

const NUMBER = String.raw`-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?`;

// The answers that a cell prints: [{what, value, text, within}], one per call of lesson.predicted. If the label of a call is
// not a plain string, the next line of the form "label: number unit." is its answer.
function answersOf(code, output) {
  const printed = output.split("\n").flatMap((line) => {
    const found = line.match(`^(.*?): (${NUMBER})( [^.,(]*)?(?:\\.(?: \\(.*\\))?|, as .*|\\. You .*)$`);
    return found ? [{ what: found[1], value: Number(found[2].replaceAll(",", "")), text: `${found[2]}${found[3] ?? ""}`.trim() }] : [];
  });
  return code.split("lesson.predicted(").slice(1).flatMap((call) => {
    const label = call.match(/^\s*"([^"]+)"/)?.[1], at = label ? printed.findIndex((one) => one.what === label) : 0;
    const [answer] = at < 0 ? [] : printed.splice(at, 1);
    return answer ? [{ ...answer, within: Number(call.match(/within=([\d.]+)/)?.[1] ?? 0.005) }] : [];
  });
}

// The same verdict as lesson.predicted prints in a notebook.
function verdict({ value, text, within }, typed) {
  const guess = Number(typed.replaceAll(/[,_\s%]/g, ""));
  if (!typed.trim() || Number.isNaN(guess)) return { text: "Type a number.", right: null };
  if (Math.abs(guess - value) <= within * Math.abs(value)) return { text: `Right: ${text}.`, right: true };
  const times = value ? `, ${(guess / value).toLocaleString("en", { maximumSignificantDigits: 3 })} times as much` : "";
  return { text: `It is ${text}. You predicted ${guess.toLocaleString("en")}${times}.`, right: false };
}

function foldAnswer(cell) {
  const output = cell.querySelector(".cell_output"), answers = answersOf(cell.querySelector(".cell_input").textContent, output?.textContent ?? "");
  if (!answers.length) return;
  const box = document.createElement("div"), fold = document.createElement("details"), summary = document.createElement("summary");
  box.className = "prediction";
  fold.className = "answer";
  summary.textContent = "Show the answer";
  fold.append(summary);
  for (const answer of answers) {
    const form = document.createElement("form"), label = document.createElement("label"), input = document.createElement("input"), said = document.createElement("span");
    label.append(answers.length > 1 ? `Your prediction for \u201c${answer.what}\u201d: ` : "Your prediction: ", input);
    Object.assign(input, { type: "text", inputMode: "decimal", autocomplete: "off", size: 10, placeholder: "a number" });
    said.setAttribute("role", "status");
    form.append(label, said);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const found = verdict(answer, input.value);
      said.textContent = found.text;
      said.className = found.right ? "right" : "";
      if (found.right !== null && answers.every((_, i) => i === answers.indexOf(answer) || box.querySelectorAll("input")[i].value)) fold.open = true;
    });
    box.append(form);
  }
  const rest = [];
  for (let next = cell.nextElementSibling; next && !next.matches("section, h1, h2, h3, h4, .cell, blockquote, details, .admonition"); next = next.nextElementSibling) rest.push(next);
  cell.after(box);
  fold.append(output, ...rest);
  box.append(fold);
}

function foldAnswers() {
  for (const cell of document.querySelectorAll(".bd-article .cell")) {
    if (cell.querySelector(".cell_input")?.textContent.includes("lesson.predicted(")) foldAnswer(cell);
  }
  const openTarget = () => {  // a link into a closed fold opens it
    const fold = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)))?.closest("details.answer");
    if (fold) fold.open = true;
  };
  addEventListener("hashchange", openTarget);
  openTarget();
}

// Printing opens every fold: answers, solutions and hidden code.
let closed = [];
addEventListener("beforeprint", () => {
  closed = [...document.querySelectorAll(".bd-article details:not([open])")];
  for (const fold of closed) fold.open = true;
});
addEventListener("afterprint", () => { for (const fold of closed) fold.open = false; });

function start() {
  const blocks = document.querySelectorAll(".bd-article div.highlight");
  [...blocks].filter((block) => !block.closest(".cell_output")).forEach(withCopyButton);
  document.querySelectorAll(".bd-article .cell_output pre").forEach((pre) => {
    if (pre.innerText.trimEnd().split("\n").length < 3) pre.classList.add("sentence");  // short output wraps, a table scrolls
  });
  foldAnswers();
  document.querySelectorAll(".bd-article pre").forEach((pre) => {
    if (pre.scrollWidth > pre.clientWidth) pre.tabIndex = 0;
  });
}

if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
else start();
