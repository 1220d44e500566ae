"""Compare random meshes and models with one device: run `tests.parity` on random cases.

    python -m tests.fuzz --seed 3 --count 60
    python -m tests.fuzz --seed 3 --only 17      # repeat one case and show its output

A case is a mesh of 2 to 8 simulated devices, a model, and execution settings, which the seed and the case number
determine. Each case runs in its own process, so a case that hangs or crashes is one line here. In some cases one number
of the model is as small as it may be; such a case may be refused. Exit status 0: all other cases agree with one device;
1: some do not, and their commands are printed.
"""

import contextlib
import json
import math
import random
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import tyro

from config import AXES, MeshConfig, ModelConfig, needs, preset
from config.fields import hints
from utils import UserError, exit_status

ROOT = Path(__file__).parent.parent


def draw_mesh(rng: random.Random) -> MeshConfig:
    """Draw a mesh of up to three axes and at most 8 devices."""
    sizes = {}
    for axis in rng.sample(AXES, rng.choice((1, 2, 2, 3, 3, 3))):
        room = 8 // math.prod(sizes.values())
        if room > 1:
            sizes[axis] = rng.choice([n for n in (2, 2, 2, 3, 4, 8) if n <= room])
    return MeshConfig(**sizes)


def draw_features(rng: random.Random, mesh: MeshConfig, model: dict, work: dict, rest: dict) -> None:
    """Draw features that came later, so that older seeds still give the same values for the others."""
    pick, context, n_experts = lambda *values: rng.choice(values), mesh.context, model["n_experts"]
    if context > 1 and rng.random() < 1 / 3:
        work["context_attention"] = "all_to_all"
        model |= {name: context * model[name] for name in ("n_heads", "n_kv_heads")}
    if rng.random() < 1 / 2:
        model |= {"norm": "layer", "bias": pick("feed_forward,logits", "")}
        if model["attention"] == "gqa":
            model |= {"rope_dims": 2, "parallel_residual": not n_experts}
    if not n_experts and context == 1 and rng.random() < 1 / 2:
        model |= {"encoder_layers": mesh.stage * pick(1, 2), "attention": "gqa", "norm": "rms", "dense_prefix": 0,
                  "n_layers": mesh.stage * pick(1, 2), "activation": "geglu", "parallel_residual": False}  # fmt: skip
        work |= {"schedule": pick("gpipe", "1f1b")}
        if "," in work["remat"]:
            work["remat"] = "branches"  # an encoder-decoder has no list of results to save
        rest["data.input_len"] = mesh.tensor * pick(7, 11)
    elif rng.random() < 1 / 4:
        model["prefix_lm"], rest["data.objective"] = True, "prefix"
    if not model.get("encoder_layers") and rng.random() < 1 / 3:
        model["rope_scaling"] = pick("llama3:8:1:4:64", "yarn:4:1:32:4096", "yarn:40:1:32:4096:1:0.7")
        model |= {"qk_norm": True} if model["attention"] == "gqa" else {}
    if not model.get("encoder_layers") and not model.get("prefix_lm") and rng.random() < 1 / 3:
        model["window"] = pick("2", "3", "5") + pick("", ":2", ":3")
        model |= {"softmax": "sinks"} if model["attention"] == "gqa" else {}
    if not model.get("encoder_layers") and model.get("norm") != "layer" and rng.random() < 1 / 3:
        model["norm"] = "sandwich"
        if model.get("window", "").count(":") == 1:
            model |= {"window": f"{model['window']}:500", "rope_scaling": pick("", "linear:3")}
    if rng.random() < 1 / 3:
        has_biases = model["attention"] == "gqa" and not model.get("encoder_layers")
        parts = [model.get("bias"), "attention" * has_biases, "experts" * bool(n_experts)]
        model["bias"] = ",".join(filter(None, parts))
        model["activation"] = {"swiglu": "swiglu_clamped"}.get(model["activation"], model["activation"])
        if "yarn" in model.get("rope_scaling", ""):
            model["rope_scaling"] = model["rope_scaling"].replace("yarn", "yarn_exact")
    if not model.get("encoder_layers") and not model.get("prefix_lm") and rng.random() < 1 / 3:
        model["softmax"] = pick("cap:0.7:0", "cap:0:0.8", "cap:0.7:0.8")


def draw(seed: int) -> dict:
    """Draw dotted settings for the preset `tiny` that are valid on their mesh."""
    rng = random.Random(seed)
    pick = lambda *values: rng.choice(values)
    mesh = draw_mesh(rng)
    sliced, tensor, context = mesh.fsdp * mesh.expert * mesh.context, mesh.tensor, mesh.context
    some = lambda unit, *counts: unit * pick(*counts)  # a multiple of unit
    # Not too narrow: rounding would dominate a norm of 5 numbers.
    wide = lambda *least: -(-pick(*least) // sliced) * sliced

    n_experts = pick(0, some(mesh.expert, 2, 4, 5))
    prefix, every = (pick(0, 1), pick(1, 2)) if n_experts else (pick(0, 0, 1), 1)
    schedule = pick("gpipe", "1f1b", "interleaved", "zb")
    chunks = pick(1, 2) if schedule == "interleaved" and mesh.stage > 1 else 1
    schedule += f":{chunks}" * (schedule == "interleaved")
    microbatches = mesh.stage * pick(1, 2) if mesh.stage > 1 else pick(0, 1, 2)
    kv_heads, seq_len = some(tensor, 1, 2), some(math.lcm(2 * context, context * tensor), 2, 3, 5)
    experts = {
        "n_experts": n_experts, "top_k": pick(2, 3) if n_experts > 2 else 2, "n_shared": pick(0, 1, 2),
        "d_expert": some(tensor, 3, 8, 14), "moe_every": every, "router": pick("sigmoid", "softmax"),
        "routed_scaling": pick(1.0, 2.5), "balance_loss": pick(0.0, 0.01, 0.7), "balance_rate": pick(0.0, 0.01),
        "capacity_factor": pick(0.0, 0.0, 1.0),
    } if n_experts else {"n_experts": 0, "moe_every": 1}  # fmt: skip
    model = {
        "vocab_size": some(tensor, 36, 55, 70), "d_model": wide(18, 26, 40), "dense_prefix": prefix,
        "n_layers": prefix + every * mesh.stage * chunks * pick(1, 1, 2), "attention": pick("mla", "mla", "gqa"),
        "n_heads": kv_heads * pick(1, 2), "n_kv_heads": kv_heads, "d_head": pick(2, 4, 10), "d_rope": pick(2, 6),
        "d_value": pick(3, 8), "d_query_latent": pick(0, wide(9, 16)), "d_kv_latent": wide(8, 22),
        "d_ff": some(tensor, 9, 16), "activation": pick("swiglu", "gelu"), "no_rope_every": pick(0, 2, 3),
        "tie_embeddings": pick(True, False), "dropout": pick(0.0, 0.3),
    } | experts  # fmt: skip
    work = {
        "remat": pick("none", "dots", "branches", "full", "keys,attention,hidden"),
        "gather": pick("layer", "step"),
        "tensor_exchange": pick("ring", "gather"), "context_attention": pick("gather", "ring"),
        "expert_exchange": random.Random(f"exchange {seed}").choice(("gathered", "routed")),
        "loss_chunk": pick(32, 1024), "device_batch": pick("auto", "auto", 1),
        "schedule": schedule if mesh.stage > 1 else "gpipe", "microbatches": microbatches or "auto",
    }  # fmt: skip
    rest = {
        "data.seq_len": seq_len,
        "data.batch_size": some(mesh.batch_shards * max(microbatches, 1), 2, 3),  # the last row has no target
        "data.packing": pick("windows", "windows,unmasked"), "run.seed": pick(0, 1, 2),
    }  # fmt: skip
    if n_experts and n_experts > model["top_k"] * seq_len:
        model["capacity_factor"] = 0.0  # at 1.0 an expert would have no slot, which is refused
    draw_features(rng, mesh, model, work, rest)
    dotted = lambda group, values: {f"{group}.{name}": value for name, value in values.items()}
    return {"mesh": str(mesh)} | dotted("model", model) | dotted("work", work) | rest


def draw_least(seed: int, settings: dict) -> dict:
    """Draw, in a quarter of the cases, the least value of a setting of the model. It must work, or be refused."""
    rng = random.Random(-1 - seed)
    names = [name for name, hint in hints(ModelConfig).items() if getattr(hint, "__origin__", None) is int]
    name = rng.choice(names)
    least = 0 if hints(ModelConfig)[name].__metadata__[0].holds(0) else 1
    return {f"model.{name}": least} if rng.random() < 1 / 4 and settings.get(f"model.{name}") != least else {}


def flags(settings: dict) -> list[str]:
    """Convert dotted settings to command-line flags, without settings that have no effect: a flag would be refused."""
    words = []
    with contextlib.suppress(UserError):  # `draw_least` draws settings that are refused
        cfg = preset("tiny", **settings)
        settings = {name: value for name, value in settings.items() if name == "mesh" or not needs.unmet(cfg, name)}
    for name, value in settings.items():
        group, _, last = name.rpartition(".")
        on_or_off = [f"--{name}" if value else f"--{group}.no_{last}"]
        words += on_or_off if isinstance(value, bool) else [f"--{name}", str(value)]
    return words


@dataclass(frozen=True)
class Arguments:
    """Compare random meshes and models with one device."""

    seed: int = 0  # random seed of the cases
    count: int = 20  # number of cases
    only: int = -1  # number of the only case to run; -1: all
    jobs: int = 2  # parallel processes
    timeout: float = 300.0  # seconds until a case counts as hanging
    json: bool = False  # print one line of JSON per case instead of a table


def run(number: int, args: Arguments) -> dict:
    """Run a case in its own process. Return the result of `tests.parity`, or how the process ended."""
    settings = draw(1000 * args.seed + number)
    least = draw_least(1000 * args.seed + number, settings)
    words = ["-m", "tests.parity", "tiny", *flags(settings | least)]
    begin = time.perf_counter()
    about = {"case": number, "mesh": settings["mesh"], "command": shlex.join(["python", *words])}
    try:
        done = subprocess.run([sys.executable, *words, "--json"], cwd=ROOT, capture_output=True, text=True,
                              timeout=args.timeout, check=False)  # fmt: skip
    except subprocess.TimeoutExpired:
        return about | {"seconds": args.timeout, "verdict": "hangs"}
    about["seconds"] = time.perf_counter() - begin
    if least and done.returncode == UserError.status and done.stderr.count("\n") == 1:
        return about | {"verdict": "refused"}
    if done.returncode not in (0, 1) or not done.stdout:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return about | {"verdict": f"status {done.returncode}: {last}"}
    found = json.loads(done.stdout)
    return about | found | {"verdict": "equal" if found["ok"] else "DIFFERENT"}


@exit_status
def main(argv: list[str] | None = None) -> int:
    args = tyro.cli(Arguments, args=argv, prog="python -m tests.fuzz", description=__doc__, use_underscores=True)
    if args.only >= 0:
        from tests import parity  # imports JAX

        settings = draw(1000 * args.seed + args.only)
        return parity.main(["tiny", *flags(settings | draw_least(1000 * args.seed + args.only, settings))])
    results = []
    with ThreadPoolExecutor(args.jobs) as pool:
        for found in pool.map(lambda number: run(number, args), range(args.count)):
            results.append(found)
            worst = f"{found['grad_rel']:.1e} {found['worst_param']}" if "grad_rel" in found else ""
            line = f"{found['case']:4} {found['seconds']:4.0f} s  {found['mesh']:32} {found['verdict']:9} {worst}"
            print(json.dumps(found) if args.json else line, flush=True)
    bad = [found for found in results if found["verdict"] not in ("equal", "refused")]
    for found in bad:
        print(f"\ncase {found['case']}: {found['verdict']}\n  {found['command']}", file=sys.stderr)
    if not args.json:
        equal = sum(found["verdict"] == "equal" for found in results)
        refused = f", {len(results) - len(bad) - equal} are refused" * (equal + len(bad) < len(results))
        print(f"\n{equal} of {len(results)} cases match the single-device result{refused}.")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
