"""Every notebook, as a reader gets it, is run to its first exercise, which is answered wrongly and rightly."""

import pytest

from docs import notebooks
from docs.notebooks import ROOT

pytestmark = pytest.mark.site

# The first exercise of each chapter: what replaces the dots of its cell in a wrong answer and in a right one, and the
# words of the checker's replies.
COUNTED = "((x_bD @ w_DF - y_bF) ** 2 * mask_b[:, None]).sum() / F"
SQUARES = "sum(jnp.sum(one**2) for one in {})".format
SCATTER = "psum_scatter({}, TENSOR, scatter_dimension=1, tiled=True)".format
DENSE = '("fsdp", "expert")'
EXPERTS = ['("stage", "expert", "fsdp", "tensor")', '("stage", "expert", "tensor", "fsdp")']
EQUAL = "[*(a == b for a, b in zip(prompt, cached, strict=False)), False].index(False)"
FIRST = {
    "00": (["width * chip.peak_flops_per_s / chip.hbm_bytes_per_s"], "Two times too many",
           ["width * chip.peak_flops_per_s / chip.hbm_bytes_per_s / 2"], "Right on three chips"),
    "01": (["x_bD"], "Those are your rows, unchanged",
           ['jax.lax.all_to_all(x_bD, "fsdp", 1, 0, tiled=True)'], "Right on 4 and 8 devices"),
    "02": ([f"{COUNTED} / mask_b.sum()"], "Each device divides by its own count",
           [f'{COUNTED} / jax.lax.psum(mask_b.sum(), "fsdp")'], "Right on 4 and 8 devices"),
    "03": ([f"jnp.sqrt({SQUARES('d')} + {SQUARES('d_gains')})"], "the norm of its own shards",
           [f"jnp.sqrt(sharding.psum({SQUARES('d')}, FSDP) + {SQUARES('d_gains')})"], "Right on two meshes"),
    "04": ([SCATTER("partial_BTD + bias_D")], "an offset grows with n",
           [f"{SCATTER('partial_BTD')} + bias_D"], "Right on 2 and 4 devices"),
    "05": (["'F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5'"], "Late. What can you run",
           ["'F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5'"], "Right: 27 units of time"),
    "06": (["mixed_HsK"], "the result for one device's keys",
           ["(lambda a_Hs: jax.lax.psum(a_Hs[..., None] * mixed_HsK, 'context') / jax.lax.psum(a_Hs, 'context')"
            "[..., None])(jnp.exp(sum_Hs - jax.lax.pmax(sum_Hs, 'context')))"], "Right, on four devices"),
    "07": (["load_nE.max()"], "That is a number of slots",
           ["load_nE.max() / load_nE.mean()"], "Right for two steps"),
    "08": (['("stage", "fsdp", "tensor", None)', '("stage", "tensor", None, "fsdp")', *EXPERTS], "Dense weights can be",
           [f'("stage", {DENSE}, "tensor", None)', f'("stage", "tensor", None, {DENSE})', *EXPERTS], "Right."),
    "09": (["3 * W * tensor_speed / (11 * N * D * fsdp_speed)"], "That is n_t squared",
           ["(3 * W * tensor_speed / (11 * N * D * fsdp_speed)) ** 0.5"], "Right. With four times the tokens"),
    "10": (['jax.lax.axis_index("context") + jnp.arange(t)'], "Devices overlap in all positions but one",
           ['jax.lax.axis_index("context") * t + jnp.arange(t)'], "Right on 4 and 8 devices"),
    "11": (["T"], "That is right for full windows",
           ["min(T, tokens - 1 - window * T)"], "Right, for windows of 64, 100 and 300"),
    "12": (["(disk.write('tmp', data), disk.rename('tmp', 'state'))"], "It survives a kill. After a power failure",
           ["(disk.write('tmp', data), disk.sync('tmp'), disk.rename('tmp', 'state'))"], "Right: always the old state"),
    "13": (["(0, B)"], "Those are all rows",
           ["(p // t * B // d, (p // t + 1) * B // d)"], "Right: processes along `tensor`"),
    "14": (["4 * layers * G * K * B * S / tensor / context"], "With `tensor=16` and 8 heads, you split heads",
           ["4 * layers * G / min(G, tensor) * K * B * S / context"], "Right, even with more devices"),
    "15": (["tuple(table.get(name) for name in names)"], "A mesh axis occurs twice",
           ["(lambda axes: tuple(axis if axis not in axes[:n] else None for n, axis in enumerate(axes)))"
            "([table.get(name) for name in names])"], "Right: every mesh axis shards at most one dim"),
    "16": (["when[1][1] - when[0][0], when[1][1] - when[0][0]"], "But is the core idle for all of that time?",
           ["when[1][1] - when[0][0], when[1][1] - when[1][0]"], "Right: 55 and 14, 52 and 2"),
    "17": (["q_first + x > k_first"], "That is the causal condition",
           ["q_first + x > k_first and k_first + X > q_first - window + 1"], "Right: no visible pair is skipped"),
    "18": ([f"{EQUAL} // page * page"], "For a prompt that is all in the cache, you compute nothing",
           [f"min({EQUAL}, len(prompt) - 1) // page * page"], "Right: 32, 16, 0 and 16"),
}  # fmt: skip


def first_exercise(cells: list) -> tuple[list, list]:
    """Return the cells up to the first exercise's check, and those that a reader runs again after an answer."""
    start = next(n for n, cell in enumerate(cells) if "## Exercise 1" in cell.source)
    end = next(n for n in range(start + 1, len(cells)) if cells[n].source.startswith("## "))
    checks = [n for n in range(start, end) if "print(check_" in cells[n].source]
    loaded = [n for n in range(start, end) if "exec(folded.code(" in cells[n].source]
    check = [*loaded, *checks][-1]  # a cell that loads a checker may print its reply, too
    answer = next(n for n in range(start, check + 1) if " = ..." in cells[n].source or "return ..." in cells[n].source)
    return cells[: check + 1], [cells[n] for n in sorted({answer, check})]


def filled(cells: list, texts: list[str]) -> list:
    """Return copies of an exercise's cells with texts in place of its dots."""
    copies = [cell.copy() for cell in cells]
    parts = copies[0].source.split(" ...")
    assert len(parts) == len(texts) + 1, f"{len(parts) - 1} places to fill in, {len(texts)} texts"
    copies[0].source = parts[0] + "".join(f" {text}{part}" for text, part in zip(texts, parts[1:], strict=True))
    return copies


def printed(cell) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


@pytest.mark.parametrize("path", [
    pytest.param(path, id=path.stem, marks=() if path.stem[:2] == "01" else pytest.mark.repeat)
    for path in notebooks.chapters()
])  # fmt: skip
def test_a_script_answers_the_first_exercise_of_a_notebook(path):
    """Catches a notebook that stops before its first exercise, a checker that fails in a reader's notebook, and one
    that gives away or refuses the right answer."""
    wrong, hint, right, praise = FIRST[path.stem[:2]]
    notebook = notebooks.read(path)
    before, again = first_exercise(notebook.cells)
    notebook.cells = [*before, *filled(again, wrong), *filled(again, right)]
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
    done = notebooks.execute(notebook, ROOT / "chapters").cells
    first, second, third = (printed(done[n]) for n in (len(before) - 1, len(done) - len(again) - 1, -1))
    assert first.startswith("Nothing there yet"), first
    assert hint in second and praise not in second, second
    assert praise in third, third
