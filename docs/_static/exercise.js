// Exercises that the page checks itself: exercise_worker.js runs the chapter's checkers in Pyodide, with an emulation of JAX.
"use strict";

(function () {
  const list = document.querySelector("#exercises");
  if (!list || location.protocol === "file:") return;  // a browser loads no worker into a page that is opened as a file
  const exercises = Object.entries(JSON.parse(list.textContent)), address = new URL("exercise_worker.js", document.currentScript.src);

  // One worker for the page. A loop without an end is stopped by ending it.
  const waiting = new Map();
  let worker = null, asked = 0;
  function ask(name, text) {
    if (!worker) {
      worker = new Worker(address, { type: "module" });
      worker.onmessage = ({ data: [number, answer] }) => {
        for (const one of number === "failed" ? [...waiting.keys()] : [number]) {
          waiting.get(one)?.(answer);
          waiting.delete(one);
        }
      };
      worker.onerror = (error) => stop(`Python could not be loaded: ${error.message ?? ""}`);
    }
    return new Promise((answered) => {
      waiting.set(++asked, answered);
      worker.postMessage([asked, name, text]);
    });
  }
  function stop(why) {
    worker?.terminate();
    worker = null;
    for (const answered of waiting.values()) answered(why);
    waiting.clear();
  }

  const stored = {  // what the reader has typed, if the browser lets pages store something
    get: (name) => { try { return localStorage.getItem(`axis ${name}`); } catch { return null; } },
    set: (name, text) => { try { localStorage.setItem(`axis ${name}`, text); } catch { /* then it is lost with the page */ } },
  };

  function element(tag, settings, ...children) {
    const found = Object.assign(document.createElement(tag), settings);
    found.append(...children);
    return found;
  }

  function offer(cell, name, given) {
    const open = element("button", { type: "button", textContent: "Solve it on this page" });
    const text = element("textarea", { value: stored.get(name) ?? given, spellcheck: false, wrap: "off" });
    const check = element("button", { type: "submit", textContent: "check" }), reset = element("button", { type: "button", textContent: "start again" });
    const said = element("pre", { className: "said" });
    const note = element("p", {}, "Python runs in your browser here, with an emulation of JAX on as many devices as the exercise needs. It is 14 MB, and loads once. Ctrl-Enter checks too.");
    const box = element("form", { className: "solve", hidden: true }, text, element("p", {}, check, " ", reset), said, note);
    said.setAttribute("role", "status");
    text.setAttribute("aria-label", "your answer");
    const fit = () => { text.rows = text.value.split("\n").length + 1; };
    fit();

    let running = false;
    async function run() {
      if (running) return stop("Stopped.");
      running = true;
      check.textContent = "stop";
      said.textContent = worker ? "Checking .." : "Loading Python ..";
      said.textContent = await ask(name, text.value);
      check.textContent = "check";
      running = false;
    }

    open.addEventListener("click", () => { open.hidden = true; box.hidden = false; text.focus(); });
    box.addEventListener("submit", (event) => { event.preventDefault(); run(); });
    reset.addEventListener("click", () => { text.value = given; stored.set(name, given); fit(); said.textContent = ""; });
    text.addEventListener("input", () => { stored.set(name, text.value); fit(); });
    text.addEventListener("keydown", (event) => {
      if (event.key !== "Enter") return;
      if (event.ctrlKey || event.metaKey) { event.preventDefault(); run(); return; }
      const line = text.value.slice(0, text.selectionStart).split("\n").at(-1);  // keep its indentation
      event.preventDefault();
      text.setRangeText(`\n${line.match(/^ */)[0]}${line.trimEnd().endsWith(":") ? "    " : ""}`, text.selectionStart, text.selectionEnd, "end");
      text.dispatchEvent(new Event("input"));
    });
    cell.after(element("div", { className: "exercise" }, open, box));
  }

  for (const cell of document.querySelectorAll("div.cell")) {
    const text = cell.querySelector(".cell_input pre")?.innerText.trimEnd();
    const [name, { cell: given }] = exercises.find(([, one]) => one.place.trimEnd() === text) ?? ["", {}];
    if (name) offer(cell, name, given);
  }
})();
