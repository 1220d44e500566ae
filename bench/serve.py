"""Compare tokens/s of the serving engine with transformers' `generate`, on the same weights and cores, in one process.

`python -m bench.serve` saves a small Llama with random parameters in the format of transformers, converts it as
`python -m weights from-hf` does, and continues the same prompts greedily with both, in turn. Both use float32 and all
cores. The engine has one slot per prompt and samples as in serving: one step per token, and each token is returned to
Python. The benchmark also compares the tokens. They can differ occasionally, because float32 sums have a different
order; all later tokens of that sequence then differ as well.

Compilation is timed separately. Other load on the machine slows both down, so each round measures both in turn, and the
printed ratio is the median over the rounds.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

from config import Size, check
from utils import UserError, exit_status


@dataclass(frozen=True)
class Arguments:
    batches: tuple[int, ...] = (1, 8, 32)  # numbers of prompts to continue together
    prompt: Size = 64  # tokens per prompt
    answer: Size = 64  # tokens to generate per prompt
    rounds: Size = 5  # number of measurements of each, in turn
    layers: Size = 8  # number of layers of the model
    width: Size = 384  # width of the model
    json: bool = False  # print one line of JSON for each batch


def make_model(args: Arguments, folder: Path):
    """Create a transformers Llama with random parameters, and save it to a folder."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=4096, hidden_size=args.width, intermediate_size=3 * args.width, num_hidden_layers=args.layers,
        num_attention_heads=args.width // 64, num_key_value_heads=args.width // 64, initializer_range=0.1,
        max_position_embeddings=args.prompt + args.answer, bos_token_id=None, eos_token_id=None, pad_token_id=None,
        tie_word_embeddings=False)  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


def transformers_generate(model, prompts_BT: np.ndarray, answer: int) -> Callable[[], np.ndarray]:
    """Return a function that continues the prompts with transformers."""
    import torch

    ids = torch.tensor(prompts_BT, dtype=torch.int64)

    def run() -> np.ndarray:
        with torch.inference_mode():
            found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=answer,
                                   min_new_tokens=answer, do_sample=False)  # fmt: skip
        return found[:, ids.shape[1] :].numpy()

    return run


def engine_generate(run_directory: Path, prompts_BT: np.ndarray, answer: int) -> Callable[[], np.ndarray]:
    """Return a function that continues the prompts with the engine."""
    import model
    import sharding
    from config import Config
    from generate.engine import Engine, Job
    from generate.request import Request
    from weights import convert

    cfg = Config.from_dict(json.loads((run_directory / "config.json").read_text())["config"])
    mesh = sharding.make_mesh("")
    params = convert.load_weights(run_directory, model.declare(cfg.model), mesh)
    B, T = prompts_BT.shape
    engine = Engine(cfg, params, mesh, vocabulary=cfg.model.vocab_size, end=-1, slots=B, context=T + answer, piece=T)

    def run() -> np.ndarray:
        jobs = [engine.submit(Job(prompt, Request(temperature=0), answer)) for prompt in prompts_BT.tolist()]
        while not engine.idle:
            engine.step()
        return np.array([[token.id for token in job.tokens] for job in jobs])

    return run


def time_call(run: Callable[[], np.ndarray]) -> tuple[float, np.ndarray]:
    begin = time.perf_counter()
    found = run()
    return time.perf_counter() - begin, found


def measure(args: Arguments, model, run_directory: Path, batch: int) -> dict:
    """Time both in turn, after a first call that compiles."""
    prompts_BT = np.random.default_rng(batch).integers(0, model.config.vocab_size, (batch, args.prompt))
    mine, other = (
        engine_generate(run_directory, prompts_BT, args.answer),
        transformers_generate(model, prompts_BT, args.answer),
    )
    (compile_s, got), (_, want) = time_call(mine), time_call(other)
    seconds = [(time_call(mine)[0], time_call(other)[0]) for _ in range(args.rounds)]
    best_s, their_s = map(min, zip(*seconds, strict=True))
    tokens = batch * args.answer
    return {"batch": batch, "ours_tokens_per_s": tokens / best_s, "theirs_tokens_per_s": tokens / their_s,
            "ratio": statistics.median(b / a for a, b in seconds), "compile_s": compile_s - best_s,
            "same_tokens": float(np.mean(got == want))}  # fmt: skip


HELP = """e.g. python -m bench.serve --batches 1 8 --rounds 3

Compare tokens/s of the engine with transformers' `generate`, on the same weights; needs extra-parity and torch."""


@exit_status
def main(argv: list[str] | None = None) -> None:
    args = tyro.cli(Arguments, args=argv, prog="python -m bench.serve", description=HELP, use_underscores=True)
    check(args)
    os.environ["JAX_PLATFORMS"] = "cpu"
    try:
        import torch
        import transformers
    except ModuleNotFoundError as error:
        raise UserError(f"{error}; install transformers with: make extra-parity; pyproject.toml says how to install "
                        "torch") from error  # fmt: skip
    from weights import convert

    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(args, Path(folder) / "hf")
        convert.from_hf(f"{folder}/hf", f"{folder}/run")
        if not args.json:
            print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {torch.get_num_threads()} threads; "
                  f"prompts of {args.prompt} tokens, answers of {args.answer}")  # fmt: skip
            print(f"{'batch':>5} {'ours':>12} {'transformers':>16} {'ratio':>6} {'compile':>8} {'same tokens':>12}")
        for batch in args.batches:
            row = measure(args, model, Path(folder) / "run", batch)
            if args.json:
                print(json.dumps(row), flush=True)
                continue
            print(f"{row['batch']:5} {row['ours_tokens_per_s']:8,.0f} tok/s {row['theirs_tokens_per_s']:10,.0f} tok/s "
                  f"{row['ratio']:6.2f} {row['compile_s']:6.1f} s {row['same_tokens']:11.1%}", flush=True)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
