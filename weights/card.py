"""Write the model card of a folder of weights: README.md, with the metadata header of the Hugging Face hub."""

import json
import math
from pathlib import Path
from typing import Annotated

import tyro

from config import Affects, affecting
from utils import UserError
from weights.folders import Folder

Scores = Annotated[str, tyro.conf.arg(metavar="FILE", help="JSON file of an evaluation, for the model card")]
SETTINGS = ("model", "data", "optim", "mesh")


def read_scores(path: str) -> dict[tuple[str, str], float]:
    """Read the numbers of an evaluation's JSON: {(data set, metric): number}. Groups can be nested.

    Raises: UserError if the file doesn't exist, isn't JSON, or has no number.
    """
    if not path:
        return {}
    try:
        scores = dict(_numbers(json.loads(Path(path).read_text()), ()))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"--scores {path}: {getattr(error, 'strerror', None) or f'not JSON: {error}'}") from error
    if not scores:
        raise UserError(f'--scores {path} has no number; it should look like {{"task": {{"accuracy": 0.5}}}}')
    return scores


def _numbers(values, at: tuple[str, ...]):
    if isinstance(values, dict | list):
        for name, value in values.items() if isinstance(values, dict) else enumerate(values):
            yield from _numbers(value, (*at, str(name)))
    elif isinstance(values, int | float) and not isinstance(values, bool) and abs(values) < 1e308:
        yield (" ".join(at[:-1]), at[-1] if at else "score"), values


def last_rows(run: str | Path, about: dict, step: int | None) -> dict[str, dict]:
    """Return the last row of each kind (train, eval, ..) up to a step in metrics.jsonl, or the copies `slim` made."""
    rows, folder = dict(about.get("slim", {}).get("rows", {})), Folder(run)
    if step is not None and folder.has("metrics.jsonl"):
        for line in folder.read("metrics.jsonl").decode().splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue  # a kill truncated the last line
            if row.get("step", math.inf) <= step:
                rows[row["kind"]] = row
    return rows


def header(name: str, scores: dict, hf: dict | None) -> str:
    """Return the hub's YAML header. Values are JSON, which is valid YAML."""
    values = {"library_name": "transformers" if hf else "jax", "pipeline_tag": "text-generation",
              "tags": ["axis-by-axis", *([hf["model_type"]] if hf else [])]}  # fmt: skip
    if scores:
        on = lambda data: {"name": data or "validation", "type": data or "validation"}
        results = [{"task": {"type": "text-generation"}, "dataset": on(data),
                    "metrics": [{"type": measure, "value": value}]}
                   for (data, measure), value in scores.items()]  # fmt: skip
        values["model-index"] = [{"name": name, "results": results}]
    lines = [f"{key}: {json.dumps(value)}" for key, value in values.items()]
    return "\n".join(["---", *lines, "---"])


def table(head: tuple[str, ...], rows: list[tuple]) -> str:
    line = lambda cells: "| " + " | ".join(str(cell).replace("|", r"\|") for cell in cells) + " |"
    return "\n".join([line(head), line(["---"] * len(head)), *map(line, rows)])


def training_facts(about: dict, rows: dict, step: int | None) -> list[tuple[str, str]]:
    """Return rows (name, value) about the training that produced the parameters."""
    steps, data = about.get("config", {}).get("run", {}).get("steps"), about.get("data") or {}
    known = [("data", _describe(data["source"])), ("tokenizer", _describe(data["tokenizer"]))] if data else []
    known += [("steps", f"{step:,} of {steps:,}")] if step is not None else []
    train, evaluation = rows.get("train", {}), rows.get("eval", {})
    known += [("tokens seen", f"{train['tokens']:,}")] if "tokens" in train else []
    known += [(f"training loss, step {train['step']:,}", f"{train['loss']:.4f} nats per token")] if train else []
    if evaluation:
        known.append((f"validation loss, step {evaluation['step']:,}", f"{evaluation['loss']:.4f} nats per token"))
        if math.isfinite(bits := evaluation.get("bits_per_byte") or math.nan):
            known.append(("validation, bits per byte", f"{bits:.4f}"))
    return known


def _describe(value) -> str:
    """Format the source or tokenizer in a manifest (for a mixture, all of them), without hashes and folders."""
    if isinstance(value, dict):
        value = value.get("name") or ", ".join(f"{name}: {_describe(x)}" for name, x in value.items())
    kind, colon, place = str(value).partition(":")
    return f"{kind}{colon}{Path(place).name}" if colon and Path(place).is_absolute() else str(value)


USAGE = """```
python -m generate DIR --prompt "def "
python main.py --init-from DIR ..
python -m weights to-hf DIR --out HF
```"""


def render_card(run, *facts) -> str:
    """Return the card, as `_render_card`. Raises: UserError if a file of the run has a value of another type."""
    try:
        return _render_card(run, *facts)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"{run}: config.json or metrics.jsonl is damaged, and the model card needs both: {error!r}"
                        ) from error  # fmt: skip


def _render_card(run, about: dict, declared: dict, step: int | None, scores: dict, hf: dict | None = None) -> str:
    """Return the card. hf: the config.json of a Hugging Face folder, or None for a folder in our format."""
    step = about.get("slim", {}).get("step") if step is None else step
    name = about.get("config", {}).get("run", {}).get("name") or Path(str(run)).name
    parameters = f"{sum(d.size for d in declared.values()):,} parameters"
    kind = "Seq2SeqLM" if (hf or {}).get("is_encoder_decoder") else "CausalLM"
    use = f"```python\ntransformers.AutoModelFor{kind}.from_pretrained(DIR)\n```" if hf else USAGE
    parts = [header(name, scores, hf), f"# {name}", f"A language model of {parameters}, by Axis by Axis.", use]
    if known := training_facts(about, last_rows(run, about, step), step):
        parts += ["## Training", table(("", ""), known)]
    if scores:
        rows = [(on, measure, f"{value:g}") for (on, measure), value in scores.items()]
        parts += ["## Scores", table(("on", "measure", ""), rows)]
    if settings := {part: about["config"][part] for part in SETTINGS if part in about.get("config", {})}:
        places = affecting(Affects.RUN)  # settings of one machine
        shared = {part: {n: x for n, x in of.items() if f"{part}.{n}" not in places} for part, of in settings.items()}
        parts += ["## Settings", f"```json\n{json.dumps(shared, indent=1)}\n```"]
    return "\n\n".join(parts) + "\n"
