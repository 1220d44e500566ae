"""A plan as tables, and as a picture."""

import sharding
from pipeline import draw
from plan import compiled, costs, hardware
from plan.planner import STATE, Plan, amount


def compared(one: Plan, found: dict) -> list[tuple[str, str, float, float | None]]:
    """(what, unit, predicted, compiled) of what both know; the compiler stops early if a step does not fit."""
    state = sum(one.memory_bytes[part] for part in STATE)
    rows = [
        ("parameters, optimizer, batch", "bytes", state, found.get("argument_bytes")),
        ("temporary", "bytes", one.temp_bytes, found.get("temp_bytes")),
        ("peak memory", "bytes", one.peak_bytes, found.get("peak_bytes")),
        ("FLOPs", "FLOPs", one.hardware_flops, found.get("hardware_flops")),
        ("on the wire", "bytes", one.wire_bytes, found.get("wire_bytes")),
    ]
    wires, there = one.wire_by_axes, found.get("wire_by_axes", {})
    names = sorted(wires.keys() | there.keys(), key=lambda name: -max(wires.get(name, 0), there.get(name, 0)))
    rows += [(f"  over {name}", "bytes", wires.get(name, 0), there.get(name, 0) if there else None) for name in names]
    return [*rows, ("step, at best", "s", one.step_s, found.get("step_s"))]


def titled(title: str, *columns: str, words: int = 1, **more):
    """A table, of which the first columns hold words and the others numbers."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < words else "right", **more)
    return table


def tables(one: Plan, found: dict | None, console) -> None:
    """Print a plan, and what the compiler counted beside it, as tables."""
    cfg, seconds = one.cfg, one.seconds()
    console.print(f"model      {one.params_total:,} parameters, {one.params_active:,} active per token")
    devices = str(one.topology) if one.topology else f"{cfg.mesh.devices} devices of no known kind"
    console.print(f"mesh       {cfg.mesh} on {devices}")
    console.print(f"batch      {sharding.split_batch(cfg)}; {one.tokens_per_step:,} tokens a step")
    if cfg.mesh.stage > 1:
        console.print(f"pipeline   {one.sched.name}: stages wait {one.bubble:.1%} of the time")
    if one.topology:
        for number, link in enumerate(hardware.layout(cfg.mesh, one.topology).values()):
            console.print(f"{'' if number else 'wires':10} {link.note}")
        for line in hardware.check(cfg.mesh, one.topology):
            console.print(f"note       {line}")
    ratio = one.hardware_flops / one.model_flops
    console.print(f"work       {amount(one.model_flops, 'FLOPs')} a device and step, "
                  f"{ratio:.2f} times that with recomputation and padding")  # fmt: skip

    table = titled("memory of a device", "part", "predicted")
    for part, size in one.memory_bytes.items():
        table.add_row(part, amount(size, "bytes"))
    table.add_section()
    fits = "fits" if one.fits else "does not fit"
    limit = f" of {amount(one.limit_bytes, 'bytes')}: {fits}" if one.limit_bytes else ""
    table.add_row("at its fullest", amount(one.peak_bytes, "bytes") + limit)
    console.print(table)

    if seconds:
        table = titled("time of a step, nothing overlapping", "spent on", "predicted", "share")
        for part, time in seconds.items():
            table.add_row(part, amount(time, "s"), f"{time / one.step_s:.1%}")
        table.add_section()
        table.add_row("step", amount(one.step_s, "s"), f"MFU {one.mfu(one.step_s):.1%}")
        overlapped = one.overlapped_s
        table.add_row("wires hidden behind products", amount(overlapped, "s"), f"MFU {one.mfu(overlapped):.1%}")
        console.print(table)

    beside = ("compiled", "difference") if found else ()
    table = titled(" and ".join(["predicted", *beside[:1]]), "a device and step", "predicted", *beside)
    for what, unit, predicted, counted in compared(one, found or {}):
        row = [what, amount(predicted, unit)]
        if found:
            difference = f"{predicted / counted - 1:+.1%}" if counted and predicted is not None else "-"
            row += [amount(counted, unit), difference]
        table.add_row(*row)
    console.print(table)


def compiled_tables(found: dict, step: compiled.Compiled, console) -> None:
    """Print the ledger, and what should not be there."""
    table = titled("the ledger: collectives of the compiled step", "kind", "mesh axes", "comes from", "executed",
                   "on the wire", "in the background", words=3)  # fmt: skip
    groups: dict[tuple, list] = {}
    for one in step.ledger.collectives:
        groups.setdefault((one.kind, "*".join(one.axes), one.source), []).append(one)
    sent = lambda ones: sum(x.count * x.wire_bytes for x in ones)
    ranked = sorted(groups.items(), key=lambda item: -sent(item[1]))
    for names, ones in ranked[:20]:
        hidden = sent([x for x in ones if x.asynchronous]) / (sent(ones) or 1)
        table.add_row(*names, f"{sum(x.count for x in ones):,.0f}", amount(sent(ones), "bytes"), f"{hidden:.0%}")
    if rest := [x for _, ones in ranked[20:] for x in ones]:
        table.add_row("others", "", "", f"{sum(x.count for x in rest):,.0f}", amount(sent(rest), "bytes"), "")
    console.print(table)
    console.print(f"compiled   in {found['compile_s']:.1f} s (lowered in {found['lower_s']:.1f} s); "
                  f"{found['collectives']:,.0f} collectives, {found['asynchronous']:.1%} of their bytes in the "
                  f"background; {amount(found['donated_bytes'], 'bytes')} of the state are donated")  # fmt: skip


def search_table(fit: list[Plan], large: list[Plan], refused: dict[str, int], console, most: int = 20) -> None:
    table = titled(f"{len(fit)} layouts fit, the fastest first", "mesh", "schedule", "memory", "on the wire", "bubble",
                   "step", "MFU", words=2, no_wrap=True)  # fmt: skip
    for one in fit[:most]:
        name = f"{one.sched.name} M={one.sched.microbatches}" if one.cfg.mesh.stage > 1 else ""
        mfu = f"{one.mfu(one.step_s):.1%}" if one.step_s else "-"
        table.add_row(str(one.cfg.mesh), name, amount(one.peak_bytes, "bytes"), amount(one.wire_bytes, "bytes"),
                      f"{one.bubble:.1%}", amount(one.step_s, "s"), mfu)  # fmt: skip
    console.print(table)
    if large:
        console.print(f"{len(large)} layouts are too large; the smallest of them, {large[0].cfg.mesh}, would take "
                      f"{amount(large[0].peak_bytes, 'bytes')} of {amount(large[0].limit_bytes, 'bytes')}")  # fmt: skip
    for reason, many in sorted(refused.items(), key=lambda item: -item[1])[:5]:
        console.print(f"{many} refused: {reason}")


def plot(one: Plan, found: dict | None, path: str) -> None:
    """Draw memory by part, bytes on the wire by mesh axes, and the schedule into a picture file."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    staged = one.cfg.mesh.stage > 1
    figure = plt.figure(figsize=(11, 7 if staged else 4), layout="constrained")
    grid = figure.add_gridspec(2 if staged else 1, 2)
    memory, wires = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1])

    colours, base = plt.get_cmap("tab20").colors, 0.0
    for (part, size), colour in zip(one.memory_bytes.items(), colours, strict=False):
        memory.bar("predicted", size / 2**30, bottom=base, color=colour, label=part, width=0.6)
        base += size / 2**30
    if found and "argument_bytes" in found:
        memory.bar("compiled", found["argument_bytes"] / 2**30, color="#999999", label="arguments", width=0.6)
        memory.bar("compiled", (found["peak_bytes"] - found["argument_bytes"]) / 2**30, color="#cccccc", width=0.6,
                   bottom=found["argument_bytes"] / 2**30, label="temporary")  # fmt: skip
    if one.limit_bytes and one.limit_bytes < 2 * one.peak_bytes:
        memory.axhline(one.limit_bytes / 2**30, color="black", linewidth=1, linestyle="--", label="device")
    memory.set(ylabel="GiB", xlim=(-0.5, 2.4 if found else 1.4))
    has = f", which has {amount(one.limit_bytes, 'bytes')}" if one.limit_bytes else ""
    memory.set_title(f"memory of a device{has}", loc="left", size=10)
    handles, labels = memory.get_legend_handles_labels()
    memory.legend(handles[::-1], labels[::-1], frameon=False, fontsize=8, loc="center right")

    rows = [row for row in compared(one, found or {}) if row[0].startswith("  over ")]
    rows = [row for row in rows if row[2] >= 0.002 * one.wire_bytes]
    names = [what.removeprefix("  over ") for what, *_ in rows]
    for shift, label, values in (
        (-0.2, "predicted", [row[2] for row in rows]),
        (0.2, "compiled", [row[3] for row in rows]),
    ):
        if label == "predicted" or (found and "wire_by_axes" in found):
            wires.barh([i + shift for i in range(len(names))], [(x or 0) / 2**30 for x in values], 0.38, label=label)
    wires.set(yticks=range(len(names)), yticklabels=names, xlabel="GiB a step")
    wires.invert_yaxis()
    wires.legend(frameon=False, fontsize=8)
    wires.set_title("sent by a device, by mesh axes", loc="left", size=10)
    if staged:
        stages = figure.add_subplot(grid[1, :])
        draw.paint(stages, one.sched, *costs.slots(one.cfg, one.sched), inches=11)
        stages.legend(frameon=False, fontsize=8, ncols=3, loc="lower right", bbox_to_anchor=(1, 1))
    for axes in (memory, wires):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
