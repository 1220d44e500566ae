// Copy buttons on blocks of code, and tables that can be scrolled by keyboard. No library, no other host.
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
    const session = lines.some((line) => line.startsWith("$ "));  // of what is printed, nothing is copied
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

function start() {
  const blocks = document.querySelectorAll(".bd-article div.highlight");
  [...blocks].filter((block) => !block.closest(".cell_output")).forEach(withCopyButton);
  document.querySelectorAll(".bd-article .cell_output pre").forEach((pre) => {
    if (pre.innerText.trimEnd().split("\n").length < 3) pre.classList.add("sentence");  // a sentence wraps, a table scrolls
  });
  document.querySelectorAll(".bd-article pre").forEach((pre) => {
    if (pre.scrollWidth > pre.clientWidth) pre.tabIndex = 0;
  });
}

if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
else start();
