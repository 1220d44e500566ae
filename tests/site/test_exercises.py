"""Tests of the exercises that a chapter's page checks, in a headless Chromium."""

import json

import pytest

from docs.in_exercises import programs
from tests.site.browser import evaluate

pytestmark = pytest.mark.site

PAGE = "chapters/{}.html"
SOLVE = """
const boxes = [...document.querySelectorAll(".exercise")];
const solve = async (number, answer) => {
  const box = boxes[number - 1], text = box.querySelector("textarea"), said = box.querySelector(".said");
  if (!box.querySelector(".solve").checkVisibility()) box.querySelector("button").click();
  if (answer !== null) {
    text.value = answer;
    text.dispatchEvent(new Event("input"));
  }
  box.querySelector("form").requestSubmit();
  await new Promise((done) => setTimeout(done, 100));
  while (/^(Loading|Checking)/.test(said.textContent)) await new Promise((done) => setTimeout(done, 50));
  return said.textContent;
};
"""
COLUMNS = """def to_columns(x_bD):
    return jax.lax.all_to_all(x_bD, "fsdp", 1, 0, tiled=True)


print(check_to_columns(to_columns))
"""
RIGHT = {
    "01_sharding": (1, COLUMNS, "Right on 4 and 8 devices; on 8, a device sends 1,344 bytes."),
    "02_gradients": (2, """def pair_backward(d_y_BD, x_BD, w_Df, v_fD):
    d_h_Bf = d_y_BD @ v_fD.T
    return jax.lax.psum(d_h_Bf @ w_Df.T, "tensor"), x_BD.T @ d_h_Bf, (x_BD @ w_Df).T @ d_y_BD


print(check_pair(pair_backward))
""", "Right on 2 and 4 devices, with one psum."),
    "18_serve_at_scale": (1, """def reused_tokens(prompt, cached, page):
    same = [*(a == b for a, b in zip(prompt, cached, strict=False)), False].index(False)
    return min(same, len(prompt) - 1) // page * page


print(check_hits(reused_tokens))
""", "Right: 32, 16, 0 and 16."),
}  # fmt: skip


@pytest.mark.parametrize("chapter", RIGHT)
def test_a_reader_solves_an_exercise_on_the_page(chapter):
    """Catches an exercise without a box, a checker that does not run in Pyodide, and an answer that is lost."""
    number, right, reply = RIGHT[chapter]
    script = f"""{SOLVE}
      const first = boxes[0].querySelector(".solve").checkVisibility(), untouched = [];
      for (const number of [1, 2, 3]) untouched.push(await solve(number, null));
      const said = await solve({number}, {json.dumps(right)}), stored = localStorage.getItem("axis {chapter} {number}");
      boxes[{number - 1}].querySelectorAll("form button")[1].click();
      const again = boxes[{number - 1}].querySelector("textarea").value;
      return {{ boxes: boxes.length, first, untouched, said, stored, again }};"""
    [seen] = evaluate({"page": PAGE.format(chapter), "script": script})
    assert seen["boxes"] == 3 and not seen["first"]
    assert seen["untouched"] == ["Nothing there yet: replace the dots with your answer."] * 3
    assert (seen["said"], seen["stored"]) == (reply, right)
    assert seen["again"] == programs.exercises(chapter)[number - 1].cell


def test_a_wrong_answer_gets_its_hint_and_a_loop_is_stopped():
    """Catches another hint than in the notebook, an error as a traceback, and a loop that blocks the page for ever."""
    wrong = COLUMNS.replace("1, 0, tiled", "0, 1, tiled")
    script = f"""{SOLVE}
      const hint = await solve(1, {json.dumps(wrong)}), error = await solve(1, "x = 1\\n1 / 0");
      const check = boxes[0].querySelector("form button"), text = boxes[0].querySelector("textarea");
      const endless = solve(1, "while True:\\n    pass");
      await new Promise((done) => setTimeout(done, 500));
      const label = check.textContent;
      boxes[0].querySelector("form").requestSubmit();
      const stopped = await endless, after = await solve(1, {json.dumps(COLUMNS)});
      text.value = "def f(x):";
      text.setSelectionRange(9, 9);
      text.dispatchEvent(new KeyboardEvent("keydown", {{ key: "Enter", cancelable: true }}));
      return {{ hint, error, label, stopped, after, typed: text.value, idle: check.textContent }};"""
    [seen] = evaluate({"page": PAGE.format("01_sharding"), "script": script})
    assert seen["hint"] == "You split the rows again. Which dim is whole before? After?"
    assert seen["error"] == "ZeroDivisionError in line 2: division by zero"
    assert (seen["label"], seen["stopped"], seen["idle"]) == ("stop", "Stopped.", "check")
    assert seen["after"] == RIGHT["01_sharding"][2]
    assert seen["typed"] == "def f(x):\n    "
