"""Draw the figures of the first pages as SVG. They use the text color of the page, light or dark, at any width."""

import math

import numpy as np

COLOURS = {"data": "#8c6d4f", "stage": "#e08a1e", "fsdp": "#3f74b5", "expert": "#9a5fb0", "context": "#3f9a4d",
           "tensor": "#cf4446"}  # as chapters/lesson.py has them, without importing JAX  # fmt: skip
N = 4  # devices along the axis of a figure

# axis: (how tokens are cut, how weights are cut, what moves)
CUTS = {
    "data": ("rows", "whole", "gradients are all-reduced once per step"),
    "fsdp": ("rows", "bands", "weights are all-gathered before use, and gradients reduce-scattered"),
    "tensor": ("columns", "parts", "activations are all-gathered and reduce-scattered in every layer"),
    "context": ("columns", "bands", "devices send each other the keys and values of their positions"),
    "expert": ("rows", "experts", "tokens are sent to their experts, and the results back"),
    "stage": ("whole", "layers", "activations are sent to the next stage"),
}
SAYS = {
    "data": "different sequences and the same weights",
    "fsdp": "different sequences and different shards of every matrix",
    "tensor": "different attention heads and hidden units of every layer",
    "context": "different positions of the same sequences",
    "expert": "different sequences and different experts",
    "stage": "different layers",
}


def rectangle(x, y, w, h, colour, filled: bool) -> str:
    paint = f'fill="{colour}"' if filled else 'fill="currentColor" fill-opacity="0.07"'
    return (f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" {paint} stroke="currentColor" '
            'stroke-opacity="0.45" stroke-width="0.8"/>')  # fmt: skip


def tokens(cut: str, colour: str) -> list[str]:
    """Draw B sequences of T positions. The filled part is on device 0."""
    x, y, side = 8, 24, 84
    if cut == "whole":
        return [rectangle(x, y, side, side, colour, True)]
    step, out = side / N, []
    for i in range(N):
        place = (x, y + i * step, side, step) if cut == "rows" else (x + i * step, y, step, side)
        out.append(rectangle(*place, colour, i == 0))
    return out


def weights(cut: str, colour: str) -> list[str]:
    """Draw the matrices of four layers; with experts, each layer is four of them."""
    x, width, height, out = 112, 84, 18, []
    for layer in range(4):
        y = 24 + layer * 22
        if cut in ("whole", "layers"):
            out.append(rectangle(x, y, width, height, colour, cut == "whole" or layer == 0))
        elif cut == "bands":  # shards of the first dim
            out += [rectangle(x, y + i * height / N, width, height / N, colour, i == 0) for i in range(N)]
        elif cut == "parts":  # shards of the last dim
            out += [rectangle(x + i * width / N, y, width / N, height, colour, i == 0) for i in range(N)]
        else:
            gap = width / N
            out += [rectangle(x + i * gap + 1, y, gap - 2, height, colour, i == 0) for i in range(N)]
    return out


def axis_picture(axis: str) -> str:
    colour, (cut_tokens, cut_weights, moves) = COLOURS[axis], CUTS[axis]
    label = lambda x, text: f'<text x="{x}" y="16" font-size="11" fill="currentColor">{text}</text>'
    body = [label(8, "tokens"), label(112, "weights"), *tokens(cut_tokens, colour), *weights(cut_weights, colour)]
    alt = f"{axis}: its devices hold {SAYS[axis]}; communication: {moves}"
    return (f'<figure class="axis"><svg viewBox="0 0 204 116" role="img" aria-label="{alt}">{"".join(body)}</svg>'
            f'<figcaption><code style="--axis:{colour}">{axis}</code>: its devices hold {SAYS[axis]}. '
            f"<span>Communication: {moves}.</span></figcaption></figure>")  # fmt: skip


def axes() -> str:
    """Draw the six axes. The filled area of the tokens and of the weights is on the first of four devices."""
    return f'<div class="axes">{"".join(axis_picture(axis) for axis in CUTS)}</div>'


# A ring, step by step -------------------------------------------------------------------------------------------------

CELL, ROW = 44, 34  # of the picture of a ring: a part's width, a device's height


def arrives(device: int, part: int) -> int:
    """Return the step of a ring all-gather in which a chunk reaches a device; its own is there in step 0."""
    return (device - part) % N


def terms(device: int, part: int) -> int:
    """Count the terms in a chunk of a ring reduce-scatter after a device has added its own; N: the sum is complete."""
    return (device - part - 1) % N + 1


def cell(device: int, part: int, words: str, style: str, opacity: float = 1.0) -> str:
    """Draw one chunk on one device. It arrives from the device above; on the first device, from the last."""
    x, y, away = 62 + part * CELL, 24 + device * ROW, -ROW if device else (N - 1) * ROW
    ground = f'<rect x="{x}" y="{y}" width="{CELL - 6}" height="{ROW - 10}" class="ground"/>'  # covers the chunk below
    box = (f'<rect x="{x}" y="{y}" width="{CELL - 6}" height="{ROW - 10}" rx="3" fill="{COLOURS["fsdp"]}" '
           f'fill-opacity="{opacity:.2f}" stroke="{COLOURS["fsdp"]}"/>')  # fmt: skip
    ink = "currentColor" if opacity < 0.7 else "#fff"
    text = (f'<text x="{x + CELL / 2 - 3}" y="{y + 16.5}" font-size="12" font-weight="600" text-anchor="middle" '
            f'fill="{ink}">{words}</text>')  # fmt: skip
    return f'<g class="{style}" style="--from:{away}px">{ground}{box}{text}</g>'


def ring_picture(kind: str, cells: list[str], alt: str, caption: str) -> str:
    label = lambda x, y, size, text: f'<text x="{x}" y="{y}" font-size="{size}" fill="currentColor">{text}</text>'
    devices = [label(4, 24 + d * ROW + 16, 11.5, f"device {d}") for d in range(N)]
    heads = [label(62 + p * CELL, 14, 10, f"chunk {p}") for p in range(N)]  # as wide as a chunk in a wide font
    slots = [f'<rect x="{62 + p * CELL}" y="{24 + d * ROW}" width="{CELL - 6}" height="{ROW - 10}" rx="3" fill="none" '
             'stroke="currentColor" stroke-opacity="0.3" stroke-dasharray="3 3"/>'
             for d in range(N) for p in range(N)]  # fmt: skip
    return (f'<figure class="ring"><svg viewBox="0 0 240 160" role="img" aria-label="{alt}">'
            f'{"".join([*devices, *heads, *slots, *cells])}</svg>'
            f'<figcaption><code>{kind}</code> {caption}</figcaption></figure>')  # fmt: skip


def ring_steps() -> str:
    """Animate a ring all-gather and a ring reduce-scatter; a checkbox stops the animation."""
    every = [(device, part) for device in range(N) for part in range(N)]
    gather = [cell(d, p, str(arrives(d, p)), f"comes{arrives(d, p)}") for d, p in every]
    # Later steps are painted over earlier ones: what a device adds is covered by the sum.
    scatter = [cell(d, p, "1", f"leaves{terms(d, p)}", 1 / N) for d, p in every]
    scatter += [cell(d, p, str(k), f"comes{k - 1} leaves{k}", k / N) for k in range(2, N + 1) for d, p in every
                if terms(d, p) == k]  # fmt: skip
    gathers = ring_picture(
        "all-gather", gather,
        "Four devices, each with one chunk at first. In each of three steps every device sends the chunk that it "
        "received last to the next device. After that, all devices have all four chunks",
        "Each device starts with one chunk of an array, and forwards the chunk that it received last. The number is "
        f"the step in which a chunk arrives. After {N - 1} steps of a quarter each, every device has the whole array.",
    )  # fmt: skip
    scatters = ring_picture(
        "reduce-scatter", scatter,
        "Four devices, each with its own term of all four chunks. In each of three steps every device sends a partial "
        "sum to the next device, which adds its own term. After that, each device has one chunk, summed over all four",
        "Each device has its own term of every chunk. A partial sum travels around the ring, and each device adds its "
        f"term. The number counts the terms. After {N - 1} steps of a quarter each, device p has the complete sum of "
        "chunk p.")  # fmt: skip
    toggle = '<label><input type="checkbox" checked> animate</label>'
    return f'<div class="rings">{toggle}{gathers}{scatters}</div>'


# A broken run whose loss goes down ---------------------------------------------------------------------------------


def broken_run(steps: int = 100, rate: float = 0.3):
    """Fit least squares on 8 devices, with and without the all-reduce of gradients; return the losses.

    The run without the all-reduce has two losses: the reported loss, and the true loss on all rows.
    """
    n, B, D, F = 8, 160, 16, 6
    rng = np.random.default_rng(0)
    x, y, w = (rng.normal(size=size) for size in ((n, B // n, D), (n, B // n, F), (D, F)))
    copies, right, out = np.stack([w] * n), w, {"correct": [], "reported": [], "true": []}
    loss = lambda w: float(((x @ w - y) ** 2).mean())
    gradient = lambda w: 2 * np.swapaxes(x, 1, 2) @ (x @ w - y) / (B // n * F)
    for _ in range(steps):
        out["correct"].append(loss(right))
        out["reported"].append(loss(copies))
        out["true"].append(loss(copies[0]))
        right = right - rate * gradient(right).mean(0)
        copies = copies - rate * gradient(copies)
    return out


def falling_loss() -> str:
    """Draw the figure of the first page: the run without the all-reduce reports the lower loss."""
    found = broken_run()
    low, high = math.log10(min(found["reported"])) - 0.05, math.log10(max(found["true"])) + 0.1
    x = lambda step: 44 + step * 3.1
    y = lambda loss: 20 + (high - math.log10(loss)) / (high - low) * 140
    line = lambda values, style: (
        f'<polyline fill="none" stroke-linejoin="round" {style} points="'
        + " ".join(f"{x(i):.1f},{y(v):.1f}" for i, v in enumerate(values)) + '"/>')  # fmt: skip
    text = lambda px, py, words, anchor="start": (
        f'<text x="{px:.0f}" y="{py:.0f}" font-size="12.5" fill="currentColor" text-anchor="{anchor}">{words}</text>'
    )
    ticks = [10.0**k for k in range(math.ceil(low), math.floor(high) + 1)]
    body = [
        *(f'<line x1="44" x2="354" y1="{y(t):.1f}" y2="{y(t):.1f}" stroke="currentColor" stroke-opacity="0.15"/>'
          + text(38, y(t) + 4, f"{t:g}", anchor="end") for t in ticks),
        line(found["correct"], 'stroke="currentColor" stroke-width="2"'),
        line(found["reported"], 'stroke="currentColor" stroke-opacity="0.45" stroke-width="4"'),
        line(found["true"], 'stroke="currentColor" stroke-opacity="0.45" stroke-width="4" stroke-dasharray="7 4"'),
        text(354, y(found["correct"][-1]) - 8, "correct run", anchor="end"),
        text(354, y(found["reported"][-1]) + 16, "no all-reduce: the loss it prints", anchor="end"),
        text(354, y(found["true"][-1]) - 8, "no all-reduce: its loss on all rows", anchor="end"),
        text(44, 12, "mean squared error"), text(354, 194, "100 steps", anchor="end"),
    ]  # fmt: skip
    numbers = (f"After 100 steps the loss of the correct run is {found['correct'][-1]:.2f}. The broken run prints "
               f"{found['reported'][-1]:.2g}, but its loss on all rows is {found['true'][-1]:.1f}.")  # fmt: skip
    return (
        f'<figure class="falling"><svg viewBox="0 0 360 200" role="img" aria-label="{numbers}">{"".join(body)}</svg>'
        f"<figcaption>{numbers} Both runs solve the same least-squares problem on 8 devices.</figcaption>"
        "</figure>"
    )


def hero() -> str:
    """Return the interactive figure of the first page; without JavaScript the drawing of `falling_loss` stays."""
    return (
        f'<div id="hero" style="--axis:{COLOURS["data"]}">{falling_loss()}</div><script src="_static/hero.js"></script>'
    )


# Planned beside published ---------------------------------------------------------------------------------------------

CHIP_MARKS = ("v4", "v5e", "v5p", "v6e", "v3 or tpu7x")


def published_svg_mark(chip: str, x: float, y: float, title: str) -> str:
    inside = f"<title>{title}</title>"
    paint = 'fill="currentColor" fill-opacity="0.75"'
    if chip == "v6e":
        return f'<path d="M{x:.1f} {y - 5.5:.1f} l5.5 5.5 -5.5 5.5 -5.5 -5.5 z" {paint}>{inside}</path>'
    if chip == "v4":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" {paint}>{inside}</circle>'
    if chip == "v5e":
        return f'<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8" {paint}>{inside}</rect>'
    if chip == "v5p":
        return f'<path d="M{x:.1f} {y - 5.5:.1f} l5.2 9 h-10.4 z" {paint}>{inside}</path>'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="none" stroke="currentColor">{inside}</circle>'


def planned_and_published() -> str:
    """Draw planned against published steps as SVG, with the name and the error of each run as its tooltip."""
    from bench import published, speeds  # imported here, so that drawing the other figures stays fast

    kind, every = "dense, one slice", published.plan_rows(*published.ON_TPUS)
    rows = [row for row in every if row.kind == kind]
    low, high, left, top, side = math.log10(2), math.log10(150), 46, 10, 260
    place = lambda seconds: (math.log10(seconds) - low) / (high - low) * side
    x, y = lambda seconds: left + place(seconds), lambda seconds: top + side - place(seconds)
    text = lambda px, py, words, anchor="middle", more="": (
        f'<text x="{px:.0f}" y="{py:.0f}" font-size="12" fill="currentColor" text-anchor="{anchor}" {more}>'
        f"{words}</text>")  # fmt: skip
    thin = 'stroke="currentColor" stroke-opacity="0.15"'
    body = [f'<line x1="{x(2)}" y1="{y(2)}" x2="{x(150)}" y2="{y(150)}" stroke="currentColor" stroke-opacity="0.5"/>']
    for tick in (2, 5, 10, 20, 50, 100):
        body += [f'<line x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{top}" y2="{top + side}" {thin}/>',
                 f'<line x1="{left}" x2="{left + side}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" {thin}/>',
                 text(x(tick), top + side + 16, tick), text(left - 6, y(tick) + 4, tick, "end")]  # fmt: skip
    for row in rows:
        times = f"planned {row.estimate.seconds:.1f} s, published {row.measured_s:.1f} s, {row.ratio - 1:+.1%}"
        mark = published_svg_mark(row.one.topology.chip.key, x(row.measured_s), y(row.estimate.seconds),
                                  f"{row.name} on {row.topology}: {times}")  # fmt: skip
        body.append(mark)
    for n, chip in enumerate(CHIP_MARKS):
        body += [published_svg_mark(chip, left + 14, top + 16 + 18 * n, f"TPU {chip}"),
                 text(left + 26, top + 20 + 18 * n, f"TPU {chip}", "start")]  # fmt: skip
    body += [
        text(left + side / 2, top + side + 34, "published, seconds per step"),
        text(0, 0, "planned, seconds per step", more=f'transform="translate(12 {top + side / 2}) rotate(-90)"'),
    ]
    number, mean, _, worst, _ = published.errors(published.trials(rows))
    _, unseen, *_ = published.errors(one for one in speeds.leave_out(every) if one.row.kind == kind)
    alt = (
        f"Planned against published seconds per step of {number} runs. Most dots are close to the diagonal. The mean "
        f"error is {mean:.1%}, the largest {worst:.1%}"
    )
    caption = (f"<strong>{number} published steps: mean error {mean:.1%}, largest {worst:.1%}.</strong> Each dot is a "
               "step of a dense model that others measured on one TPU slice. With constants that were fitted without "
               f"the source of a step, the mean error is {unseen:.1%}.")  # fmt: skip
    return (
        f'<figure class="falling"><svg viewBox="0 0 330 310" role="img" aria-label="{alt}">{"".join(body)}</svg>'
        f"<figcaption>{caption}</figcaption></figure>"
    )
