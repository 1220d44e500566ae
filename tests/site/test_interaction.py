"""Tests of what the site's pages do when a reader uses them, in a headless Chromium."""

import pytest

from tests.site.browser import evaluate

pytestmark = pytest.mark.site

# Predictions ----------------------------------------------------------------------------------------------------------

CHAPTER = "chapters/03_fsdp.html"
TYPE = """
const folds = [...document.querySelectorAll("details.answer")], box = folds[0].closest(".prediction");
const output = folds[0].querySelector(".cell_output"), wanted = output.textContent.match(/: (-?[\\d,.]*\\d)/)[1];
const visible = () => output.checkVisibility();
const hidden = folds.every((fold) => !fold.open) && !visible();
const inside = [...folds[0].children].map((one) => one.tagName);
const answer = (text) => {
  box.querySelector("input").value = text;
  box.querySelector("form").requestSubmit();
  return { said: box.querySelector("[role=status]").textContent, open: folds[0].open };
};
const twice = String(2 * Number(wanted.replaceAll(",", "")));
return { hidden, inside, folds: folds.length, wanted, word: answer("many"), twice: answer(twice),
         right: answer(wanted), visible: visible() };
"""


def test_an_answer_is_folded_until_the_reader_predicts():
    """Catches an answer that is visible at once, and a verdict that differs from the printed number."""
    [seen] = evaluate({"page": CHAPTER, "script": TYPE})
    assert seen["hidden"]
    assert seen["folds"] >= 2
    assert seen["inside"][:2] == ["SUMMARY", "DIV"]
    assert not {*seen["inside"]} & {"SECTION", "BLOCKQUOTE", "H2"}
    assert seen["word"] == {"said": "Type a number.", "open": False}
    assert seen["twice"]["open"]
    assert "2 times as much" in seen["twice"]["said"]
    assert seen["right"]["said"].startswith(f"Right: {seen['wanted']}")
    assert seen["visible"]


def test_nothing_is_folded_without_javascript():
    """Catches an answer that a reader without JavaScript can never open."""
    script = """const outputs = [...document.querySelectorAll(".cell_output")].filter((one) => !one.closest("details"));
      return { folds: document.querySelectorAll("details.answer").length,
               visible: outputs.length > 9 && outputs.every((one) => one.checkVisibility()) };"""
    [seen] = evaluate({"page": CHAPTER, "scripting": False, "script": script})
    assert seen == {"folds": 0, "visible": True}


def test_printing_opens_every_fold():
    """Catches a printed page without its answers and solutions, and folds that stay open on the screen."""
    script = """const all = [...document.querySelectorAll(".bd-article details")];
      const open = () => all.filter((one) => one.open).length;
      const before = open();
      dispatchEvent(new Event("beforeprint"));
      const printed = open();
      dispatchEvent(new Event("afterprint"));
      return { before, printed, after: open(), all: all.length };"""
    [seen] = evaluate({"page": CHAPTER, "script": script})
    assert seen["printed"] == seen["all"] > seen["before"] == seen["after"]
