"""Print a plan as tables, and draw it as a figure."""

import math

import utils
from compile import ledger
from config.fields import parse_outer
from pipeline import draw, fit, schedules
from plan.answer import at_scale, auto, inference, planning
from plan.chips import hardware, hiding
from plan.chips.units import amount
from plan.count import costs
from plan.count.matrices import MUON
from plan.count.step import STATE
from plan.time import offload, tiers
from plan.time.plan import Plan
from plan.time.terms import MATMULS, OTHERS
from plan.trace import compiled


def compare(plan: Plan, found: dict) -> list[tuple[str, str, float, float | None]]:
    """List (quantity, unit, predicted, compiled); compiled is None if the compiler stopped because of memory."""
    state = sum(plan.memory_bytes.get(part, 0) for part in STATE)
    rows = [
        ("parameters, optimizer, batch", "bytes", state, found.get("argument_bytes")),
        ("temporary", "bytes", plan.temp_bytes, found.get("temp_bytes")),
        ("peak memory", "bytes", plan.peak_bytes, found.get("peak_bytes")),
        ("FLOPs", "FLOPs", plan.hardware_flops, found.get("hardware_flops")),
        ("bytes sent", "bytes", plan.wire_bytes, found.get("wire_bytes")),
    ]
    planned, counted = plan.wire_by_axes, found.get("wire_by_axes", {})
    names = sorted(planned.keys() | counted.keys(), key=lambda name: -max(planned.get(name, 0), counted.get(name, 0)))
    between = tiers.between_nodes_by_axes(plan)
    for name in names:
        rows.append((f"  over {name}", "bytes", planned.get(name, 0), counted.get(name, 0) if counted else None))
        if name in between:
            rows.append(("    of it between nodes", "bytes", between[name], None))
    rows += [("  exposed", "bytes", plan.exposed_bytes, found.get("exposed_bytes"))]
    return rows + [("lower bound", "s", plan.lower_bound_s, found.get("lower_bound_s"))] * bool(found)


def make_table(title: str, *columns: str, words: int = 1, **more):
    """Make a table whose first `words` columns are left-aligned text and whose other columns are numbers."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < words else "right", **more)
    return table


def make_console(quiet: bool):
    """Return the console of a command. It cuts nothing: on a narrow terminal, the lines of wide tables wrap."""
    from rich.console import Console

    console = Console(quiet=quiet, highlight=False)
    console.width = max(console.width, 200)
    return console


def link_lines(mesh, topology: hardware.Topology | None) -> list[str]:
    """Return the lines that describe the links of the axes of a mesh."""
    links = hardware.layout(mesh, topology).values() if topology else ()
    return [f"{'' if number else 'links':10} {link.note}" for number, link in enumerate(links)]


def answer(plan: Plan) -> list[str]:
    """Return the first lines of a plan: the seconds of a step, and whether it fits."""
    fits = "" if plan.fits is None else ": fits" if plan.fits else ": does not fit"
    limit = f" of {amount(plan.limit_bytes, 'bytes')}{fits}" if plan.limit_bytes else ""
    step = [f"step       {plan.estimate}; MFU {plan.mfu(plan.step_s):.1%}"] if plan.estimate else []
    return [*step, f"memory     {amount(plan.peak_bytes, 'bytes')}{limit}"]


def heading(plan: Plan) -> list[str]:
    """Return the lines below the answer: the model, the mesh and its links, and what to know about them."""
    cfg, ratio = plan.cfg, plan.hardware_flops / plan.model_flops
    lines = [
        f"model      {plan.params_total:,} parameters, {plan.params_active:,} active per token",
        f"mesh       {cfg.mesh} on {plan.topology or f'{cfg.mesh.devices} devices of unknown kind'}",
        f"batch      {fit.split_batch(cfg)}; {plan.tokens_per_step:,} tokens per step",
        f"settings   {auto.settings_text(plan)}",
    ]
    if cfg.mesh.stage > 1:
        lines.append(f"pipeline   {plan.sched.name}: stages wait {plan.bubble:.1%} of the time")
    if plan.topology:
        lines += link_lines(cfg.mesh, plan.topology)
        notes = hardware.check(cfg.mesh, plan.topology) + hardware.chip_notes(plan.topology)
        notes += hiding.notes(plan.topology.chip) + tiers.notes(plan, plan.step_s)
        lines += [f"note       {line}" for line in notes]
    if copied := offload.step_bytes(plan):
        chip, chips = plan.topology.chip, plan.topology.chips // plan.topology.hosts
        lines.append(f"offload    {amount(copied, 'bytes')} per device and step go to the host and back, each at "
                     f"{offload.bytes_per_s(chip) / 1e9:g} GB/s; a host of {chips} chips stores "
                     f"{amount(offload.host_bytes(plan), 'bytes')}")  # fmt: skip
    if flops := plan.flops.get(MUON):
        sent = sum(row.wire_bytes for row in plan.traffic if row.part == MUON)
        lines.append(f"muon       {amount(flops, 'FLOPs')} per device and step for Newton-Schulz, and "
                     f"{amount(sent, 'bytes')} sent")  # fmt: skip
    if every := parse_outer(cfg.optim.outer).every:
        lines.append(f"local      each of {cfg.mesh.data} replicas takes {every} steps alone, then an outer step; the "
                     f"bytes over data are those of an outer step, divided by {every}")  # fmt: skip
    lines.append(f"compute    {amount(plan.model_flops, 'FLOPs')} per device and step; "
                 f"with recomputation and padding, {ratio:.2f} times as many")  # fmt: skip
    return lines + ([balance_line(plan)] if plan.balance_pass is not None else [])


def tables(plan: Plan, found: dict | None, better: tuple[dict, Plan] | None, why: bool, console) -> None:
    """Print a plan as tables, with the compiler's counts (`found`) and faster settings (`better`), if given.

    why  show the lower bound and the simulated time beside the seconds of the step
    """
    for line in heading(plan):
        console.print(line, soft_wrap=True)

    table = make_table("memory per device", "part", "predicted")
    for part, size in plan.memory_bytes.items():
        table.add_row(part, amount(size, "bytes"))
    table.add_section()
    table.add_row("peak", amount(plan.peak_bytes, "bytes"))
    console.print(table)

    if plan.estimate:
        console.print(time_table(plan, why))
        if why:
            console.print(TIMES, soft_wrap=True)
        if better:
            console.print(suggestion(plan, *better), soft_wrap=True)

    columns = ("compiled", "difference") if found else ()
    table = make_table(" and ".join(["predicted", *columns[:1]]), "per device and step", "predicted", *columns)
    for name, unit, predicted, counted in compare(plan, found or {}):
        row = [name, amount(predicted, unit)]
        if found:
            difference = f"{predicted / counted - 1:+.1%}" if counted and predicted is not None else "-"
            row += [amount(counted, unit), difference]
        table.add_row(*row)
    console.print(table)
    tiers_table(plan, console)


TIMES = """\
The lower bound is a roofline: matmuls at the peak FLOP/s, links at their full speed, and on GPUs no overlap, so there
it may exceed the step. The simulated time predicts, with formulas, what a simulation of the compiled program gives; on
GPUs there is none. The step is the best estimate: it multiplies the costs of the simulated step (on GPUs, of the lower
bound) by constants fitted to measured steps."""


def time_table(plan: Plan, why: bool):
    """Return a table of the seconds of a step by cause; `why` adds the lower bound and the simulated time."""
    bound = {MATMULS if cause == "compute" else cause: time for cause, time in plan.lower_bound().items()}
    times = ({"lower bound": bound} | ({"simulated": plan.simulated} if plan.simulated else {})) if why else {}
    times |= {"step": plan.causes}
    table = make_table("time of a step", "spent on", *times, "share of the step")
    for cause in dict.fromkeys(cause for one in times.values() for cause in one):
        cells = (amount(one.get(cause), "s") for one in times.values())
        table.add_row(cause, *cells, f"{plan.causes.get(cause, 0) / plan.step_s:.1%}")
    table.add_section()
    table.add_row("all", *(amount(sum(one.values()), "s") for one in times.values()), "100%")
    return table


def tiers_table(plan: Plan, console, most: int = 10) -> None:
    """Print the algorithms of NCCL with their bytes and steps by tier, if any group of GPUs spans nodes."""
    found = sorted(tiers.algorithms(plan), key=lambda row: -row["wire_bytes"])
    if not any(row["between_bytes"] for row in found):
        return
    title = "collectives by tier, those that send the most first; steps in nodes + between, and latency, of one"
    table = make_table(title, "part", "collective", "algorithm", "steps", "sent", "between nodes",
                       "latency", words=3)  # fmt: skip
    for row in found[:most]:
        table.add_row(row["part"], f"{row['count']:,.0f} x {row['kind']} over {row['axes']}", row["name"],
                      f"{row['steps_inside']} + {row['steps_between']}", amount(row["wire_bytes"], "bytes"),
                      amount(row["between_bytes"], "bytes"), f"{1e6 * row['latency_s']:,.1f} us")  # fmt: skip
    console.print(table)


def balance_line(plan: Plan) -> str:
    """Return the line about the balance loss's extra forward pass, and how to avoid it."""
    of = "step" if plan.step_s else "FLOPs"
    return (f"balance    balance loss: one more forward pass, {plan.balance_pass:+.0%} of the {of}; none with "
            "--model.balance_loss 0 --model.balance_rate 0.001, or with one accumulation pass of GPipe")  # fmt: skip


def suggestion(plan: Plan, changed: dict[str, str], other: Plan) -> str:
    """Return the line that suggests settings that make the step faster, or make it fit."""
    flags = " ".join(f"--{name} {value}" for name, value in changed.items())
    less = f"{1 - other.step_s / plan.step_s:.0%} less" if plan.fits else "and it fits"
    return f"try        {flags}: {amount(other.step_s, 's')}, {less}; peak memory {amount(other.peak_bytes, 'bytes')}"


def sum_collectives(collectives: list[ledger.Collective], *fields: str) -> dict[tuple, list[float]]:
    """Sum [executions, bytes sent, exposed bytes] by some fields of compiled collectives, most bytes first."""
    totals = {}
    for one in collectives:
        values = (getattr(one, name) for name in fields)
        key = tuple("*".join(value) if isinstance(value, tuple) else value for value in values)
        sent = one.count * one.wire_bytes
        sums = zip(totals.get(key, (0, 0, 0)), (one.count, sent, sent * (not one.hidden)), strict=True)
        totals[key] = [old + new for old, new in sums]
    return dict(sorted(totals.items(), key=lambda item: -item[1][1]))


def compiled_tables(found: dict, step: compiled.Compiled, console, most: int = 20) -> None:
    """Print the collectives of a compiled step, and kernels of unknown FLOPs."""
    table = make_table("the ledger: collectives of the compiled step", "kind", "mesh axes", "source", "executed",
                   "bytes sent", "exposed", words=3)  # fmt: skip
    ranked = [*sum_collectives(step.ledger.collectives, "kind", "axes", "source").items()]
    rest = [sums for _, sums in ranked[most:]]
    others = [(("others", "", ""), [sum(column) for column in zip(*rest, strict=True)])] * bool(rest)
    for names, (count, sent, waits) in ranked[:most] + others:
        table.add_row(*names, f"{count:,.0f}", amount(sent, "bytes"), amount(waits, "bytes"))
    console.print(table)
    console.print(
        f"compiled   in {found['compile_s']:.1f} s (lowered in {found['lower_s']:.1f} s); "
        f"{amount(found['donated_bytes'], 'bytes')} of the state is donated"
    )
    console.print(f"sent       {found['collectives']:,.0f} collectives send {amount(found['wire_bytes'], 'bytes')}: "
                  f"{amount(found['hidden_bytes'], 'bytes')} overlapped with matmuls, and "
                  f"{amount(found['exposed_bytes'], 'bytes')} exposed")  # fmt: skip
    if found["unknown"]:
        console.print(f"unknown    {unknown_kernels(found['unknown'])}")


def unknown_kernels(unknown: dict[str, float]) -> str:
    """List the kernels that declare no FLOPs and therefore count as 0."""
    names = ", ".join(f"{times:,.0f} x {name}" for name, times in unknown.items())
    return f"FLOPs of {len(unknown)} kernel{'s' * (len(unknown) > 1)}: {names}"


def schedule_label(plan: Plan) -> str:
    """Return the schedule and the number of microbatches; "" without a pipeline."""
    return f"{plan.sched.name} M={plan.sched.microbatches}" if plan.cfg.mesh.stage > 1 else ""


def search_table(fit: list[Plan], large: list[Plan], refused: dict[str, int], better, console, most: int = 20) -> None:
    """Print the layouts that fit, why others do not, and settings that are `better` for the first one, if any."""
    fastest = min(fit, key=planning.time_of, default=None)
    shown = f", {most} of them" if len(fit) > most else ""
    columns = "mesh", "schedule", "memory", "bytes sent", "bubble", "step", "", "MFU"
    table = make_table(f"{len(fit)} layouts fit{shown}", *columns, words=2, no_wrap=True)
    for one in fit[:most]:
        mfu = f"{one.mfu(one.step_s):.1%}" if one.step_s else "-"
        table.add_row(str(one.cfg.mesh), schedule_label(one), amount(one.peak_bytes, "bytes"),
                      amount(one.wire_bytes, "bytes"), f"{one.bubble:.1%}", amount(one.step_s, "s"),
                      "=" * one.as_fast_as(fastest), mfu)  # fmt: skip
    console.print(table if fit else "no layout fits")
    if fit and fastest.step_s:
        many = sum(one.as_fast_as(fastest) for one in fit)
        console.print(f"= {many} layout{'s' * (many > 1)} may be as fast as the fastest, within the errors of measured "
                      f"steps. Those that are at most {planning.MIN_SAVING:.0%} slower come first, sorted by memory "
                      "(in tenths of a device's), number of axes and time."
                      + " --verify 5 compiles the first 5, and compares them." * bool(fastest.simulated),
                      soft_wrap=True)  # fmt: skip
    if large and not fit:
        state = sum(large[0].memory_bytes[part] for part in ("parameters", "optimizer", "gradients"))
        smaller = "a smaller model" if state > large[0].limit_bytes else "a smaller batch or model"
        console.print(
            f"devices    you need at least about {planning.devices_needed(large):,} of these chips, or {smaller}"
        )
    if fit and fit[0].cfg.optim.outer:
        console.print("note       with local steps, data is the number of replicas, which changes the loss")
    smallest = (large[0].cfg.mesh, large[0].peak_bytes, large[0].limit_bytes) if large else ()
    print_memory_note(fit + large, console)
    print_rejected(len(large), smallest, refused, console)
    if better:
        console.print(suggestion((fit or large)[0], *better), soft_wrap=True)


def print_memory_note(plans: list, console) -> None:
    """Print which part of a GPU's memory limits a search, unless --memory gave the limit."""
    for one in plans[:1]:
        if one.topology and one.topology.chip.domain and one.limit_bytes == one.topology.chip.memory_bytes:
            console.print(f"note       {hardware.memory_note(one.topology.chip)}", soft_wrap=True)


def print_rejected(too_large: int, smallest: tuple, refused: dict[str, int], console) -> None:
    """Print how many layouts of a search are too large or not possible.

    smallest  mesh, bytes and limit of the layout that needs the least memory of those that are too large
    """
    if too_large:
        mesh, need, limit = smallest
        console.print(f"{too_large} layouts are too large; the smallest of them, {mesh}, needs "
                      f"{amount(need, 'bytes')} of {amount(limit, 'bytes')}")  # fmt: skip
    for reason, many in sorted(refused.items(), key=lambda item: -item[1])[:5]:
        console.print(f"{many} layout{'s are' if many > 1 else ' is'} not possible: {reason}")


# Inference ------------------------------------------------------------------------------------------------------------


def inference_tables(plan: inference.Plan, asked: tuple[int, ...], console) -> None:
    """Print the cost of inference: the cache, what fits, prefill and decode by part of the model, and by batch size."""
    cfg, batches, (total, active) = plan.cfg, plan.batches(asked), costs.parameters(plan.cfg.model)
    for line in (f"model      {total:,} parameters, {active:,} active per token",
                 f"mesh       {cfg.mesh} on {plan.topology or f'{cfg.mesh.devices} devices of unknown kind'}",
                 *inference_lines(plan, batches[-1]), *link_lines(cfg.mesh, plan.topology)):  # fmt: skip
        console.print(line, soft_wrap=True)
    of_chip = hardware.chip_notes(plan.topology) if plan.topology else []
    for line in plan.notes() + [line for line in of_chip if "--compile" not in line]:
        console.print(f"note       {line}", soft_wrap=True)
    last = batches[-1]
    of_prompts = f"prompts of {plan.request.prompt:,} tokens, {plan.request.piece:,} at a time; per device"
    part_table(plan, last, "prefill", f"prefill, batch {last:,}: {of_prompts}", console)
    part_table(plan, last, "decode", f"decode, batch {last:,}: one token per sequence; per device", console)
    columns = ("batch", "memory", "first tokens", "step", "tokens/s", "per seq.", "with prefill", "bound by")
    table = make_table("by batch size: memory per device, tokens/s of all sequences", *columns, words=0)
    for found in map(plan.batch_summary, batches):
        memory = amount(found["memory_bytes"], "bytes") + " too large" * (found["fits"] is False)
        names = ("tokens_per_s", "sequence_tokens_per_s", "with_prefill_tokens_per_s")
        rates = [f"{found[name]:,.1f}" if name in found else "-" for name in names]
        table.add_row(f"{found['batch']:,}", memory, amount(found.get("first_token_s"), "s"),
                      amount(found.get("step_s"), "s"), *rates, found.get("bound_by", "-"))  # fmt: skip
    console.print(table)


def inference_search_table(fit: list, large: list, refused: dict[str, int], console, most: int = 20) -> None:
    """Print the meshes on which a batch fits, the shortest decode step first, and why other meshes are rejected."""
    batch = (fit or large or [(None, {"batch": 1})])[0][1]["batch"]
    table = make_table(f"{len(fit)} layouts fit a batch of {batch:,}; the shortest decode step first", "mesh", "memory",
                       "first tokens", "step", "tokens/s", "bound by", words=1, no_wrap=True)  # fmt: skip
    for one, found in fit[:most]:
        table.add_row(str(one.cfg.mesh), amount(found["memory_bytes"], "bytes"), amount(found["first_token_s"], "s"),
                      amount(found["step_s"], "s"), f"{found['tokens_per_s']:,.1f}", found["bound_by"])  # fmt: skip
    console.print(table)
    print_memory_note([one for one, _ in fit + large], console)
    smallest = [(one.cfg.mesh, found["memory_bytes"], one.usable_bytes) for one, found in large[:1]]
    print_rejected(len(large), *(smallest or [()]), refused, console)


def inference_lines(plan: inference.Plan, batch: int) -> list[str]:
    """Describe the request, the size of the cache, how many sequences fit, and from which batch FLOPs bound a step."""
    request, most = plan.request, plan.largest_batch
    found = [f"request    prompts of {request.prompt:,} tokens, answers of {request.answer:,}; weights in "
             f"{request.weights_dtype}, cache in {request.cache_dtype}",
             f"cache      {plan.token_bytes:,} bytes per token, {amount(plan.sequence_bytes, 'bytes')} "
             f"per sequence; {amount(plan.cache_bytes(plan.unit), 'bytes')} of it on each device"]  # fmt: skip
    if most is not None:
        found.append(f"fit        {most:,} sequences, plus {amount(plan.weights_bytes(), 'bytes')} of weights on "
                     f"each device; a tenth of its {amount(plan.limit_bytes, 'bytes')} stays free")  # fmt: skip
    if plan.bounds:
        bound = {what: f"at {n:,} sequences or more" if n else "never" for what, n in plan.bounds.items()}
        first = min((n for n in plan.bounds.values() if n), default=math.inf)
        full = f"; memory is already full at {most:,}" if most and most < first else ""
        found.append(f"FLOPs      take longer than reading the weights: {bound['matmuls']}; longer than reading "
                     f"weights and cache: {bound['step']}{full}")  # fmt: skip
    answers = at_scale.numbers_at_scale(plan, batch).items()
    return found + [f"{name:10} {at_scale.TEXT[name].format(**one)}" for name, one in answers]


def part_table(plan: inference.Plan, batch: int, phase: str, title: str, console) -> None:
    """Print the cost of prefill or decode by part of the model."""
    columns = ("weights moved", "cache moved", "FLOPs", "bytes sent", "time", "bound by")
    table, rows = make_table(title, "part", *columns), plan.rows(batch, phase)
    all_of = inference.Row("all", *(sum(getattr(row, name) for row in rows) for name in (
        "flops", "weight_bytes", "cache_bytes")), [sent for row in rows for sent in row.exchanges])  # fmt: skip
    for row in (*rows, all_of):
        if row is all_of:
            table.add_section()
        time = plan.seconds(batch, phase) if row is all_of else plan.speed_known and plan.row_seconds(row)
        moved = (row.weight_bytes, row.cache_bytes, inference.sent_bytes(row, plan.cfg))
        weights, cache, sent = (amount(size or None, "bytes") for size in moved)
        table.add_row(row.part, weights, cache, amount(row.flops or None, "FLOPs"), sent,
                      amount(sum(time.values()) if time else None, "s"),
                      inference.dominant_cause(time) if time else "-")  # fmt: skip
    console.print(table)


def plot_inference(plan: inference.Plan, asked: tuple[int, ...], path: str) -> None:
    """Draw tokens per second, the seconds of a step by cause, and the time to the first token, by batch size."""
    found = [plan.batch_summary(batch) for batch in plan.batches(asked)]
    batches = [row["batch"] for row in found]
    figure = utils.new_picture(figsize=(12, 3.9), dpi=150)
    rate, step, first = figure.subplots(1, 3)
    rate.loglog(batches, [row["tokens_per_s"] for row in found], "o-", label="all sequences")
    rate.loglog(batches, [row["sequence_tokens_per_s"] for row in found], "s--", label="per sequence")
    rate.set_title("tokens/s", loc="left", size=10)
    places, floor = range(len(found)), [0.0] * len(found)
    for cause in inference.CAUSES:
        times = [1e3 * row["seconds"][cause] for row in found]
        step.bar(places, times, 0.8, bottom=floor, label=cause)
        floor = [low + time for low, time in zip(floor, times, strict=True)]
    step.set(xticks=places)
    step.set_xticklabels([f"{batch:,}" for batch in batches], rotation=45, ha="right")
    step.set_title("ms per decode step", loc="left", size=10)
    first.loglog(batches, [row["first_token_s"] for row in found], "o-")
    first.set_title("s until every sequence has its first token", loc="left", size=10)
    for axes in (rate, first):
        limits = ("memory is full", plan.largest_batch), ("matmuls bound by FLOPs", plan.bounds["matmuls"])
        for name, batch in limits:
            if batch and batch <= 2 * batches[-1]:
                axes.axvline(batch, linewidth=1, linestyle=":" if "FLOPs" in name else "--", color="black", label=name)
    for axes in (rate, step, first):
        axes.set_xlabel("sequences")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    figure.suptitle(f"{plan.cfg.run.name}: mesh {plan.cfg.mesh} on {plan.topology}, prompts of {plan.request.prompt:,} "
                    f"and answers of {plan.request.answer:,} tokens", x=0.01, ha="left")  # fmt: skip
    figure.savefig(path)


# Figures --------------------------------------------------------------------------------------------------------------

FIXED = (MATMULS, OTHERS, "optimizer", offload.CAUSE, "bubble")  # causes that are not communication over mesh axes


def scale(largest_bytes: float) -> tuple[int, str]:
    """Return the unit that `amount` uses for this size, in bytes and as a name."""
    return (2**30, "GiB") if largest_bytes >= 2**30 / 10 else (2**20, "MiB")


def plot(plan: Plan, found: dict | None, path: str) -> None:
    """Draw memory by part, bytes sent by mesh axes, and the pipeline schedule to an image file."""
    staged, wired = plan.cfg.mesh.stage > 1, bool(plan.wire_bytes)
    figure = utils.new_picture(figsize=(11 if wired else 5.5, 7.3 if staged else 4), dpi=150)
    grid = figure.add_gridspec(1 + staged, 1 + wired, width_ratios=(3, 4)[: 1 + wired])
    plot_memory(figure.add_subplot(grid[0, 0]), plan, found)
    if wired:
        plot_traffic(figure.add_subplot(grid[0, 1]), plan, found)
    if staged:
        plot_schedule(figure.add_subplot(grid[1, :]), plan)
    on = f" on {plan.topology}" if plan.topology else ""
    figure.suptitle(f"{plan.cfg.run.name}: mesh {plan.cfg.mesh}{on}, {plan.tokens_per_step:,} tokens per step",
                    x=0.01, ha="left")  # fmt: skip
    figure.savefig(path)


def plot_memory(axes, plan: Plan, found: dict | None) -> None:
    """Draw a bar of the predicted memory, by part, and a bar of the compiled memory."""
    from matplotlib import colormaps

    bars = [("predicted", part, size, colour) for (part, size), colour in
            zip(plan.memory_bytes.items(), colormaps["tab20"].colors, strict=False) if size]  # fmt: skip
    if found and "argument_bytes" in found:
        arguments = found["argument_bytes"]
        bars += [("compiled", "arguments", arguments, "#999999"),
                 ("compiled", "temporary", found["peak_bytes"] - arguments, "#cccccc")]  # fmt: skip
    tops: dict[str, float] = {}
    unit, name = scale(plan.peak_bytes)
    for column, part, size, colour in bars:
        axes.bar(column, size / unit, bottom=tops.get(column, 0), color=colour, label=part, width=0.6)
        tops[column] = tops.get(column, 0) + size / unit
    if plan.limit_bytes and plan.limit_bytes < 2 * plan.peak_bytes:
        axes.axhline(plan.limit_bytes / unit, color="black", linewidth=1, linestyle="--", label="device")
    axes.set(ylabel=name, xlim=(-0.5, len(tops) - 0.5))
    limit = f" of {amount(plan.limit_bytes, 'bytes')}" if plan.limit_bytes else ""
    axes.set_title(f"memory per device{limit}", loc="left", size=10)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    axes.spines[["top", "right"]].set_visible(False)


def plot_traffic(axes, plan: Plan, found: dict | None) -> None:
    """Draw the predicted bytes, and those of the compiled step, for each group of mesh axes."""
    rows = [row for row in compare(plan, found or {}) if row[0].startswith("  over ")]
    rows = [row for row in rows if row[2] >= 0.002 * plan.wire_bytes]
    series = {"predicted": [row[2] for row in rows]}
    if found and "wire_by_axes" in found:
        series["compiled"] = [row[3] or 0 for row in rows]
    high, (unit, name) = 0.8 / len(series), scale(max(map(max, series.values())))
    for number, (label, values) in enumerate(series.items()):
        places = [place + (number - (len(series) - 1) / 2) * high for place in range(len(rows))]
        bars = axes.barh(places, [x / unit for x in values], 0.95 * high, label=label)
        axes.bar_label(bars, [amount(x, "bytes") for x in values], padding=3, size=8)
    alone = 0.5 * (len(rows) == 1)  # a single bar does not fill the panel
    axes.set(yticks=range(len(rows)), yticklabels=[row[0].removeprefix("  over ") for row in rows],
             xlabel=f"{name} per step", xlim=(0, 1.2 * max(map(max, series.values())) / unit),
             ylim=(len(rows) - 0.5 + alone, -0.5 - alone))  # fmt: skip
    if len(series) > 1:
        axes.legend(frameon=False, fontsize=8, loc="lower right")
    axes.set_title("bytes sent per device, by mesh axes", loc="left", size=10)
    axes.spines[["top", "right"]].set_visible(False)


def plot_schedule(axes, plan: Plan) -> None:
    """Draw the work of each stage, in lock-step."""
    cfg, sched = plan.cfg, plan.sched
    form = "as executed, in lock-step"
    if costs.has_balance_pass(cfg, sched):
        form += ", after an extra forward pass of all microbatches for the balance loss"
    draw.paint_spans(axes, sched, schedules.in_lock_step(sched, *costs.slots(cfg, sched)), 10, form)
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="lower right", bbox_to_anchor=(1, 1))


def plot_search(fit: list[Plan], path: str, most: int = 20) -> None:
    """Draw the step time by cause, for the first layouts of a search, to an image file."""
    fit = fit[:most]
    figure = utils.new_picture(figsize=(11, 1.4 + 0.28 * len(fit)), dpi=150)
    axes, ends = figure.subplots(), [0.0] * len(fit)
    cause = lambda part: part if part in FIXED else "communication"
    for name in (*FIXED[:2], "communication", *FIXED[2:]):
        times = [1e3 * sum(s for part, s in one.causes.items() if cause(part) == name) for one in fit]
        if not any(times):
            continue
        bars = axes.barh(range(len(fit)), times, 0.8, left=ends, label=name)
        ends = [end + time for end, time in zip(ends, times, strict=True)]
    axes.bar_label(bars, [f"MFU {one.mfu(one.step_s):.1%}" for one in fit], padding=3, size=8)
    axes.set(yticks=range(len(fit)), yticklabels=[f"{one.cfg.mesh} {schedule_label(one)}".strip() for one in fit],
             xlabel="milliseconds per step")  # fmt: skip
    axes.set(xlim=(0, 1.12 * max(ends)), ylim=(len(fit) - 0.5, -0.5))
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(ncols=4, frameon=False, fontsize=8, loc="outside lower right")
    axes.set_title(f"{fit[0].cfg.run.name} on {fit[0].topology}, {fit[0].tokens_per_step:,} tokens per step: "
                   f"the {len(fit)} fastest layouts", loc="left", size=10)  # fmt: skip
    figure.savefig(path)
