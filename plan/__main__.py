"""Plan a configuration from the command line. HELP describes the usage."""

import json
import math
import os
import shlex
import sys
import textwrap
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Literal

from config import AUTO, HUB_NAMES, PRESETS, Affects, Config, Count, affecting, flags, preset
from config.fields import DTypeOrAuto
from devices import use_devices
from plan import without_jax
from utils import UserError, check_picture, exit_status, parse_early

HELP = """e.g. python -m plan llama3_8b --topology v4:4x4x4   # which mesh of these chips is the fastest that fits?
     python -m plan llama3_70b --topology v5p:8x8x8,64*h100 --tokens 15T --price v5p=4.2,h100=2.5   # and what it costs
     python -m plan Qwen3-8B/config.json --topology v5p:4x4x4   # the same for a model of Hugging Face
     python -m plan moe1b --topology v4:4x4x2 --search 32 --verify 5   # compile the first 5 meshes, and compare
     python -m plan moe1b --topology v4:4x4x2              # plan one mesh, that of the preset or of --mesh
     python -m plan moe1b --topology v4:4x4x2 --compile    # compare with the TPU compiler; needs no TPU
     python -m plan moe1b --topology v4:4x4x2 --why        # compare with the traced step, line by line
     python -m plan moe1b --topology v4:4x4x2 --max_batch  # the largest batch that fits, found by compiling
     python -m plan laptop --mesh fsdp=4 --parameters      # every parameter, its shape and its shard on a device
     python -m plan laptop --mesh fsdp=4 --compile         # without a topology: simulated CPU devices
     python -m plan llama3_8b --inference --topology v5e:2x4 --mesh tensor=8 --prompt 2048 --answer 256
     python -m plan llama3_70b --inference --topology v5e:8x8 --search 64 --token_ms 60

Predict memory, communication and step time before you pay for accelerators; with --inference, for text generation.

The planner evaluates formulas; --compile compares them with the compiler's counts. Exit status 1: it does not fit.

Presets:"""


@dataclass(frozen=True)
class Arguments(flags.Arguments):
    # the devices: v4:4x4x2, v5p:4x4x4, v5e:4x4, h100:16 ...; empty: speed and memory are unknown. Several, separated by
    # commas: search each of them, and compare
    topology: str = ""
    compile: bool = False  # compile the step, for the topology's TPUs or for simulated CPU devices, and compare
    hlo: str = ""  # --compile: write the text of the compiled step to this file, for python -m plan.replay
    # fp8: the matmuls of layers with weights at twice the speed, on chips that have it; training itself has no FP8
    precision: Literal["bf16", "fp8"] = "bf16"
    # plan every mesh of this many devices, and rank those that fit; not needed if --topology has several devices and
    # no mesh is given
    search: int = 0
    # with a search on TPUs: compile its first N layouts, a minute or more each, and rank them by the simulated seconds
    verify: Count = 0
    max_batch: bool = False  # find the largest batch that fits, by compiling
    parameters: bool = False  # list every parameter: shape, dtype, the mesh axes that shard it, and its local shard
    why: bool = False  # explain the plan: compare the FLOPs and bytes of each line of the model with the traced step
    explain: bool = False  # name the three largest losses of the plan, and what would recover each
    tokens: str = ""  # tokens to train on, such as 15T or 15e12: print days, chip hours and dollars
    # --tokens, --token_ms, or several topologies: dollars per chip hour, such as 2.1, or v5p=4.2,h100=2.1
    price: str = ""
    # --tokens: fraction of the time in which the run makes progress, such as 0.95, or what it follows from:
    # mtbf=50000,disk=1,restart=600 (hours between failures of one chip, GB/s of one host's disk, seconds)
    goodput: str = ""
    # a file that python -m plan.profile --calibrate or python -m bench.report wrote: fit the step to it
    constants: str = ""
    # steps that you measured here, to fit the step to, with what differs from the plan:
    # 'mesh=fsdp=8 batch=64 step=3.41'; separate several with ;
    measured: str = ""
    # GPUs: the trainer whose measured steps are used, such as megatron, llm-foundry or torchtitan; empty: any trainer
    trainer: str = ""
    memory: float = 0.0  # memory of a device in GiB; 0: the memory of its chip
    json: str = ""  # write the numbers to this file as JSON; -: print only the JSON
    # draw memory, communication and schedule (or the layouts of a search, or inference by batch size) to this png, svg
    # or pdf file
    plot: str = ""
    inference: bool = False  # plan inference instead of training: KV cache, sequences that fit, tokens/s
    prompt: Count = 0  # --inference: tokens per prompt; 0: three quarters of data.seq_len
    answer: Count = 0  # --inference: generated tokens per sequence; 0: a quarter of data.seq_len
    piece: Count = 64  # --inference: prompt tokens per prefill chunk
    shared: Count = 0  # --inference: first tokens of every prompt that are equal and in a prefix cache, so not computed
    weights_dtype: DTypeOrAuto = AUTO  # --inference: dtype of the stored weights; auto: the dtype of activations
    cache_dtype: DTypeOrAuto = AUTO  # --inference: dtype of the KV cache; auto: the dtype of activations
    # --inference: milliseconds per generated token, such as 20: with --search or several topologies, find the cheapest
    # layout that is this fast; its cost is in dollars with --price, else in chip seconds
    token_ms: str = ""
    # --inference: batch sizes; none: powers of two up to the largest batch that fits, but 1 sequence with --search
    batch: tuple[int, ...] = ()

    @property
    def limit_bytes(self) -> int | None:
        return round(self.memory * 2**30) or None

    @property
    def asked(self):  # -> budget.Asked
        return budget.Asked(budget.parse_tokens(self.tokens), self.price, self.goodput)

    @property
    def searches(self) -> bool:
        """Whether the command tries meshes: if it has topologies, but neither a mesh nor a mode that needs one."""
        one_plan = any(getattr(self, name) for name in ("compile", "max_batch", "why", "parameters", "inference"))
        return bool(self.search) or (bool(self.topology) and self.mesh.devices == 1 and not one_plan)


def parse(argv: list[str], start: Config | None = None) -> tuple[Config, Arguments]:
    """Parse `[PRESET | FOLDER | config.json | --config FILE] [--flags]`. The first word sets the defaults of the flags.

    start  the settings of the folder or config.json of Hugging Face that is the first word
    """
    lines = [f"  {name:13} {what}" for name, (what, _) in PRESETS.items()]
    if {"-h", "--help"} & {*argv}:
        lines += ["", "The model_type of a config.json may be", *model_types()]
    cfg, args = flags.command_line(argv, "python -m plan", "\n".join((HELP, *lines)), arguments=Arguments, start=start,
                                   mesh_known=lambda args: not args.searches)  # fmt: skip
    if args.memory and not 0 < args.memory < math.inf:
        raise UserError(f"--memory {args.memory:g}: should be above 0, in GiB; 0 is the memory of the chip")
    return flags.batch_of_tokens(cfg, args.batch_tokens, not args.searches), args


def model_types() -> list[str]:
    """List the model types that the planner reads, in lines of text."""
    without_jax.begin()  # otherwise the next line would import JAX
    from weights import published

    kinds = ", ".join(sorted(published.PLANNED | published.families.FAMILIES))
    return textwrap.wrap(kinds, 116, initial_indent="  ", subsequent_indent="  ")


def by_preset(argv: list[str]) -> list[str]:
    """Replace a name on the Hugging Face hub by the preset of the same model."""
    return [HUB_NAMES.get(argv[0], argv[0]), *argv[1:]]


parse_preset = lambda argv: parse(by_preset(argv)) if argv and not flags.model_file(by_preset(argv)) else None
EARLY = parse_early(parse_preset) if __name__ == "__main__" else None
with_jax = {"--compile", "--max_batch", "--max-batch", "--verify", "--why"} & {x.partition("=")[0] for x in sys.argv}
if __name__ == "__main__" and not with_jax:  # these trace or compile a step
    without_jax.begin()

from plan import planner, verify
from plan.answer import budget, explain, front, inference, own_steps, parameter_list, planning, serving, show, why
from plan.answer.at_scale import numbers_at_scale
from plan.chips import constants, hardware
from plan.count.costs import parameters
from plan.count.step import is_tpu
from plan.time import measured
from progress import print_to_stderr, track
from weights import published


def presets() -> None:
    """Print every preset's size as a Markdown table."""
    for name, (what, _) in PRESETS.items():
        total, active = parameters(preset(name).model)
        print(f"| `{name}` | {what} | {total:,} | {active:,} |")


def draw(args: Arguments, plot, *about) -> None:
    """Draw a figure with plot(*about, path), if --plot asks for one."""
    if args.plot:
        plot(*about, args.plot)
        print_to_stderr(f"drew {args.plot}")


def bar(args: Arguments):
    return planning.untracked if args.json == "-" else track


def check(cfg: Config, args: Arguments, topology: hardware.Topology | None) -> None:
    """Raises: UserError for flags that are mutually exclusive, no mesh, and for a figure that cannot be written."""
    modes = [name for name in ("search", "max_batch", "why", "compile", "parameters") if getattr(args, name)]
    if len(modes) > 1 and modes != ["max_batch", "compile"]:  # --max_batch compiles anyway
        raise UserError(f"{' and '.join(f'--{name}' for name in modes)} are mutually exclusive; pass one of them")
    n, chip = (topology.devices, topology.chip) if topology else (0, None)
    if args.search and args.search != n:
        has = f"--topology {topology} has {n}" if topology else "there is no --topology"
        ways = [f"--search {n}"] * bool(n) + [f"a --topology with {args.search} devices"] * (args.search > 0)
        raise UserError(f"--search {args.search} plans meshes of {args.search} devices, but {has}; pass "
                        f"{' or '.join(ways or ['a positive number of devices'])}")  # fmt: skip
    if args.plot:
        check_picture(args.plot)
    budget.parse_tokens(args.tokens)
    folder, known = Path(args.hlo).resolve().parent, chip and chip.peak_flops_per_s
    of_price = "--token_ms; add --token_ms 20" if args.inference else "--tokens or several topologies; add --tokens 15T"
    refusals = [
        (cfg.mesh.devices == 1 < n and not args.searches and not args.search,
         f"--topology {topology} has {n} devices, and mesh {cfg.mesh} has one; pass a --mesh of {n} devices"),
        *((getattr(args, name) and not known, f"--{name} needs a chip: pass a --topology of TPUs or GPUs")
          for name in OF_CHIP),
        *((getattr(args, name) and (args.max_batch or args.parameters),
           f"--{name} has no effect with --max_batch or --parameters; drop one of the two") for name in OF_CHIP),
        (args.precision == "fp8" and not known, "--precision fp8 needs a chip: pass a --topology of TPUs or GPUs"),
        (args.constants and args.measured,
         "--constants and --measured both fit the plan to measured steps; pass one of them"),
        (args.price and not (args.tokens or args.token_ms),
         f"--price has an effect only with {of_price} or drop --price"),
        (args.goodput and not args.tokens, GOODPUT_ALONE),
        (args.verify and not (args.searches and is_tpu(chip)),
         f"--verify {args.verify} compiles the first layouts of a search for their TPU; " + (
             f"add --search {n}" if is_tpu(chip) else "pass a --topology of TPUs")),
        *((getattr(args, name) and args.max_batch,
           f"--{name} has no effect with --max_batch; drop one of the two") for name in ("tokens", "explain")),
        (args.hlo and not args.compile,
         f"--hlo {args.hlo}: only --compile compiles the step; add --compile, or drop --hlo"),
        (args.hlo and not folder.is_dir(),
         f"--hlo {args.hlo}: the folder {Path(args.hlo).parent} does not exist; create it"),
        (args.plot and args.max_batch,
         "--plot: --max_batch finds a single number, so there is nothing to draw; drop one of them"),
        (args.plot and args.search and not known,
         f"--plot with --search plots step time, but the speed of {chip and chip.name} is unknown; pass a --topology "
         "of TPUs or GPUs"),
    ]  # fmt: skip
    for refused, message in refusals:
        if refused:
            raise UserError(message)


GOODPUT_ALONE = "--goodput has an effect only with --tokens; add --tokens 15T or drop --goodput"
OF_CHIP = "constants", "measured", "trainer"  # flags that tell how long a step takes on a chip
INFERENCE_FLAGS = ("prompt", "answer", "piece", "shared", "weights_dtype", "cache_dtype", "token_ms", "batch")


def check_effect(argv: list[str], answers: bool) -> None:
    """Raises: UserError for a training flag with --inference, or an inference flag without it."""
    given = [word[2:].partition("=")[0].replace("-", "_") for word in argv if word.startswith("--")]
    training = {"max_batch", "parameters", "why", "compile", "explain", "tokens", "batch_tokens", "precision", *OF_CHIP,
                *affecting(Affects.TRAINING, Affects.ORDER)}  # fmt: skip
    for name in given:
        if answers and (name in training or name.startswith("work.")):
            raise UserError(f"--{name} has no effect with --inference; drop one of the two")
        if not answers and name in INFERENCE_FLAGS:
            raise UserError(f"--{name} has an effect only with --inference; add --inference or drop --{name}")


def request_of(cfg: Config, args: Arguments) -> inference.Request:
    T = cfg.data.seq_len
    return inference.Request(args.prompt or max(3 * T // 4, 1), args.answer or max(T // 4, 1), args.weights_dtype,
                             args.cache_dtype, args.piece, args.shared)  # fmt: skip


def run_inference(cfg: Config, args: Arguments, topology: hardware.Topology | None, console) -> tuple[dict, int]:
    """Plan inference. Returns the numbers for JSON and the exit status: 1 if a batch does not fit."""
    request = request_of(cfg, args)
    if args.token_ms:
        return search_offers(cfg, args, [topology], request, console)
    if args.search:
        return search_inference(cfg, args, topology, request, console)
    plan = inference.plan(cfg, topology, request, args.limit_bytes)
    if args.plot and not plan.speed_known:
        raise UserError("--plot with --inference plots time, but the speed of these devices is unknown; pass a "
                        "--topology of TPUs or GPUs")  # fmt: skip
    show.inference_tables(plan, args.batch, console)
    draw(args, show.plot_inference, plan, args.batch)
    if plan.largest_batch == 0:
        print_to_stderr(f"error: {plan.refusal()}")
    numbers = plan.to_json(args.batch) | {"at_scale": numbers_at_scale(plan, plan.batches(args.batch)[-1])}
    return numbers, 1 if any(row["fits"] is False for row in numbers["batches"]) else 0


def search_inference(cfg: Config, args: Arguments, topology, request, console) -> tuple[dict, int]:
    """Rank all meshes by the time of a decode step. Returns the numbers for JSON, and 1 if the batch fits on none."""
    if len(args.batch) > 1 or args.plot or not topology.chip.peak_flops_per_s:
        raise UserError("--search with --inference ranks meshes by the time of a decode step: pass one --batch and a "
                        "--topology of TPUs or GPUs, and no --plot")  # fmt: skip
    batch = (args.batch or (1,))[0]
    fit, large, refused = inference.search(cfg, topology, request, args.limit_bytes, batch, bar(args))
    show.inference_search_table(fit, large, refused, console)
    layouts = [{"mesh": str(one.cfg.mesh)} | summary for one, summary in fit]
    return {"layouts": layouts, "too_large": len(large), "refused": refused}, 0 if fit else 1


def search_offers(cfg: Config, args: Arguments, topologies, request, console) -> tuple[dict, int]:
    """Search for the cheapest layout that is fast enough. Returns the numbers for JSON, and 1 if there is none."""
    token_s = budget.number(args.token_ms, "--token_ms", "milliseconds per generated token, such as 20") / 1e3
    several = len(topologies) > 1
    if not (args.search or several) or args.batch or args.plot:
        raise UserError("--token_ms finds the largest batch of every mesh: pass --search N or several topologies, and "
                        "no --batch or --plot")  # fmt: skip
    if several and not args.price and len({one.chip.key for one in topologies}) > 1:
        raise UserError("--token_ms compares the costs of different chips: add --price, such as "
                        f"{','.join(f'{one.chip.key}=DOLLARS' for one in topologies)}")  # fmt: skip
    found = serving.search(cfg, topologies, request, args.limit_bytes, token_s, args.price, bar(args))
    serving.print_offers(found, token_s, console)
    return {"token_ms": 1e3 * token_s, **found.to_json()}, 0 if found.fast else 1


def with_knowledge(cfg: Config, args: Arguments, topology: hardware.Topology | None) -> hardware.Topology | None:
    """Return the topology with what --constants, --trainer and --measured tell about the time of a step."""
    if args.trainer:
        if not topology.chip.domain:
            raise UserError(f"--trainer {args.trainer} has an effect only on GPUs; drop it for {topology}")
        topology = replace(topology, trainer=args.trainer)
        measured.check_trainer(topology)
    if args.measured:
        return own_steps.learn(topology, args.measured, cfg)
    if not args.constants:
        return topology
    given = constants.load(args.constants)
    learn = own_steps.learn_report if "parts" in given else constants.learn
    return learn(topology, given, args.constants)


def read_topology(text: str, args: Arguments) -> hardware.Topology:
    topology = hardware.Topology.parse(text)
    if args.precision == "fp8" and not topology.chip.fp8:
        having = ", ".join(key for key, chip in hardware.CHIPS.items() if chip.fp8)
        raise UserError(f"--precision fp8: {topology.chip.name} has no FP8 matmuls; drop it, or use one of {having}")
    return replace(topology, fp8=args.precision == "fp8")


def compare_topologies(cfg: Config, args: Arguments, console) -> tuple[dict, int]:
    """Search several topologies. Returns the Pareto front for JSON and the exit status."""
    topologies = [read_topology(text, args) for text in args.topology.split(",")]
    modes = "compile", "search", "max_batch", "parameters", "why", "explain", "constants", "hlo", "measured", "verify"
    modes += ("inference",) * (not args.token_ms)
    if given := [name for name in modes if getattr(args, name)]:
        raise UserError(f"--{given[0]} describes one topology; pass one of them, such as --topology {topologies[0]}, "
                        f"or drop --{given[0]}")  # fmt: skip
    if args.goodput and not args.tokens:
        raise UserError(GOODPUT_ALONE)
    if args.plot:
        check_picture(args.plot)
    if args.inference:
        return search_offers(cfg, args, topologies, request_of(cfg, args), console)
    if args.trainer and not any(topology.chip.domain for topology in topologies):
        raise UserError(f"--trainer {args.trainer} has an effect only on GPUs; drop it for {args.topology}")
    topologies = [with_knowledge(cfg, args, one) if one.chip.domain else one for one in topologies]
    answers = front.answers(cfg, topologies, args.asked, args.limit_bytes, bar(args))
    best = front.pareto([layout for answer in answers for layout in answer.layouts])
    for line in front.lines(answers):
        console.print(line, soft_wrap=True)
    show.print_memory_note([x.first.plan for x in answers if x.first and x.topology.chip.domain], console)
    if args.tokens and not args.goodput:
        console.print("note       days and dollars are those of a run that never stops; --goodput counts failures")
    if best:
        front.print_front(best, console)
        draw(args, front.plot_front, best, [answer.first for answer in answers if answer.first])
    to_json = lambda found: [one.to_json() for one in found]
    return {"answers": to_json(answers), "front": to_json(best)}, 0 if best else 1


def better_json(better) -> dict:
    """Convert the result of `planner.faster` to JSON."""
    if not better:
        return {}
    changed, other = better
    return {"faster": {"settings": changed, "step_s": other.step_s, "peak_bytes": other.peak_bytes}}


def search_meshes(cfg: Config, args: Arguments, topology, console) -> tuple[dict, int]:
    """Rank all meshes by the time of a step. Returns the numbers for JSON, and 1 if none fits."""
    fit, large, refused = planner.search(cfg, topology, args.limit_bytes, bar(args))
    verified, ranked, about = verify.verify_all(fit[: args.verify], bar(args)), fit, {}
    fit = [one.plan for one in verified if one.seconds] + fit[args.verify :]
    better = planner.faster_layout((fit or large)[0]) if fit or large else None
    if fit:
        console.print(f"mesh       {fit[0].cfg.mesh} {show.schedule_label(fit[0])}".rstrip() + f" on {topology}")
        about = about_run(fit[0], args, console)
    show.search_table(ranked, large, refused, better if ranked[:1] == fit[:1] else None, console)
    if verified:
        verify.print_table(verified, console)
        about["verified"] = [one.to_json() for one in verified]
    names = ("mesh", "step_s", "mfu", "bubble", "peak_bytes", "wire_bytes", "fits")
    if fit:
        draw(args, show.plot_search, ranked)
    short = lambda one: {name: value for name, value in one.to_json().items() if name in names} | {
        "schedule": one.cfg.work.schedule, "microbatches": one.sched.microbatches}  # fmt: skip
    numbers = {"layouts": [short(one) for one in fit], "too_large": len(large), "refused": refused}
    return numbers | better_json(better) | about, 0 if fit else 1


def about_run(plan: planner.Plan, args: Arguments, console) -> dict:
    """Print the answer of a plan: its step, its memory, with --tokens its cost and with --explain its losses. Returns
    the last two for JSON."""
    cost = budget.budget(plan, args.asked)
    lost = explain.explain(plan) if args.explain else None
    lines = show.answer(plan) + (budget.lines(cost, plan) if cost else [])
    lines += explain.lines(lost, plan) if lost else []
    for line in lines:
        console.print(line, soft_wrap=True)
    return ({"budget": asdict(cost)} if cost else {}) | ({"losses": [asdict(loss) for loss in lost]} if lost else {})


def next_commands(argv: list[str], layout: dict) -> list[str]:
    """Return the lines with the commands that plan and train a layout of a search. `argv`: the words of the search."""
    groups = []  # a flag and its values
    for word in argv:
        if word.startswith("--") or not groups:
            groups.append([word])
        else:
            groups[-1].append(word)
    own = {field.name for field in fields(Arguments)} - {field.name for field in fields(flags.Arguments)}
    dropped = {"search", "verify", "plot", "json", "mesh", "work.schedule"}
    chosen = ["--mesh", layout["mesh"]] + ["--work.schedule", layout["schedule"]] * ("stage=" in layout["mesh"])

    def command(without: set[str]) -> str:
        name = lambda group: group[0].partition("=")[0].removeprefix("--").replace("-", "_")
        return shlex.join([word for group in groups if name(group) not in without for word in group] + chosen)

    return [f"plan       python -m plan {command(dropped)}", f"train      python main.py {command(dropped | own)}"]


def run(cfg: Config, args: Arguments) -> tuple[dict, int]:
    """Run the mode that the flags select. Returns the numbers for JSON and the exit status: 1 if it does not fit."""
    console = show.make_console(args.json == "-")
    if "," in args.topology:
        return compare_topologies(cfg, args, console)
    topology = read_topology(args.topology, args) if args.topology else None
    check(cfg, args, topology)
    topology = with_knowledge(cfg, args, topology)
    if args.parameters:
        for line in parameter_list.lines(cfg):
            console.print(line, soft_wrap=True, markup=False)
        return {"mesh": str(cfg.mesh), "parameters": [asdict(one) for one in parameter_list.parameters(cfg)]}, 0
    if args.inference:
        return run_inference(cfg, args, topology, console)
    if (args.compile or args.max_batch) and not is_tpu(topology and topology.chip):
        use_devices(cfg.mesh.devices)
    if args.search or (args.searches and topology.devices > 1):
        return search_meshes(cfg, args, topology, console)
    if args.max_batch:
        most, too_many = planner.largest_batch(cfg, topology, args.limit_bytes, print_to_stderr)
        console.print(f"{most} sequences fit ({most * cfg.data.seq_len:,} tokens), {too_many} do not")
        return {"max_batch": most, "too_large": too_many}, 0

    plan = planner.plan(cfg, topology, args.limit_bytes)
    about = about_run(plan, args, console)
    found, step = planner.compile_plan(plan, print_to_stderr) if args.compile else (None, None)
    better = planner.faster(plan)
    show.tables(plan, found, better, args.why, console)
    if step:
        show.compiled_tables(found, step, console)
    if step and args.hlo:
        Path(args.hlo).write_text(step.step.as_text(), encoding="utf-8")
        print_to_stderr(f"wrote {args.hlo}")
    rows = why.compare(plan) if args.why else None
    if rows:
        why.print_why(plan, rows, console)
    draw(args, show.plot, plan, found)
    for problem in (found or {}).get("unexpected", []):
        print_to_stderr(f"error: {problem}")
    if found and "error" in found:
        print_to_stderr(f"error: {found['error']}")
    fits = plan.fits if found is None else found["fits"] and not found.get("unexpected")
    more = ({"compiled": found} if found else {}) | ({"why": why.to_json(rows)} if rows else {})
    return plan.to_json() | better_json(better) | about | more, 1 if fits is False else 0


@exit_status
def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if not argv:
        presets()
        return 0
    argv = by_preset(argv)
    source = published.read(file) if (file := flags.model_file(argv)) else None
    cfg, args = EARLY or parse(argv, source and source.config)
    check_effect(argv, args.inference)
    if source and args.json != "-":
        print(*source.lines(), sep="\n")
    numbers, status = run(cfg, args)
    if "layouts" in numbers and not args.inference and status == 0 and args.json != "-":
        print(*next_commands(argv, numbers["layouts"][0]), sep="\n")
    numbers |= {"config_json": source.to_json()} if source else {}
    if args.json == "-":
        print(json.dumps(numbers))
    elif args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(numbers, file, indent=1)
        print_to_stderr(f"wrote {args.json}")
    return status


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.exit(without_jax.retry(main))
