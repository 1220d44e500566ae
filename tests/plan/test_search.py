"""What `--search` prints below its table: the commands for the first layout, or how many devices are needed."""

import json
import math
import re
import shlex

import main as main_command
from config import preset
from plan.__main__ import main


def test_a_search_ends_with_the_commands_for_its_first_layout(capsys, tmp_path):
    """Catches a command that cannot be pasted, that loses a setting or a value, and one that plans another layout."""
    (tmp_path / "run.json").write_text(json.dumps(preset("deep", **{"model.n_experts": 0}).to_dict()))
    argv = ["--config", str(tmp_path / "run.json"), "--optim.adamw", "b1=0.8", "--model.tie_embeddings",
            "--search=2", "--topology", "h100:2", "--batch_tokens", "4096", "--mesh", "data=1", "--work.schedule",
            "interleaved:4", "--memory", "9", "--data.path", "two words",
            "--json", str(tmp_path / "found.json")]  # fmt: skip
    assert main(argv) == 0
    first, *others = json.loads((tmp_path / "found.json").read_text())["layouts"]
    assert {one["schedule"] for one in (first, *others) if "stage=" in one["mesh"]} == {"interleaved:4"}
    planned, trained = (shlex.split(line[11:]) for line in capsys.readouterr().out.splitlines()[-2:])
    assert (planned[:3], trained[:2]) == (["python", "-m", "plan"], ["python", "main.py"])
    cfg = main_command.parse(trained[2:])
    assert (str(cfg.mesh), cfg.optim.adamw, cfg.data.path) == (first["mesh"], "b1=0.8", "two words")
    assert cfg.model.tie_embeddings and cfg.data.tokens_per_step == 4096
    assert main([*planned[3:], "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    for name in ("mesh", "step_s", "peak_bytes"):
        assert found[name] == first[name]


def test_a_narrow_terminal_cuts_nothing(capsys, monkeypatch):
    """Catches columns that are cut to dots, and a mark of width 0."""
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["laptop", "--topology", "v4:2x2x2", "--data.batch_size", "32"]) == 0
    out = capsys.readouterr().out
    assert "…" not in out and "│ = │" in out and re.search(r"\n= \d+ layouts? may be as fast as the fastest", out)


def test_a_search_without_a_layout_that_fits_has_no_table(capsys):
    """Catches an empty table, and a number of devices that does not follow from what is missing."""
    assert (
        main(["dense_124m", "--data.batch_size", "8", "--topology", "h100:2", "--search", "2", "--memory", "0.5"]) == 1
    )
    out = capsys.readouterr().out
    assert "no layout fits\n" in out and "┃" not in out and "main.py" not in out
    least = re.search(r"devices +you need at least about (\d+) of these chips", out)[1]
    need, limit = map(float, re.search(r"needs ([\d.]+) GiB of ([\d.]+) GiB", out).groups())
    assert int(least) == math.ceil(2 * need / limit) > 2
