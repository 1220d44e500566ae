"""The figure at the top of a chapter: one layer of Llama 3 8B on eight devices, before and after a technique.

Each chapter computes the bytes and times itself, from the sizes below. Times are at peak speed; nothing is measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt

from chapters.lesson import COLORS, NEUTRAL
from plan.chips import hardware

DEVICES, TOKENS = 8, 65_536  # one node of eight H100, and the tokens of a step: 16 sequences of 4,096
D, F, H, G, K = 4096, 14_336, 32, 8, 128  # width, hidden width, query heads, KV heads, head dim
PARAMETERS = 2 * D * H * K + 2 * D * G * K + 3 * D * F  # of one layer, without its two norms: 218,103,808
CHIP = hardware.CHIPS["h100"]
PARTS = {"weights": "#4a4a4a", "gradients": "#8b8b8b", "optimizer state": "#b3b3b3", "activations": "#dddddd", "scores": "#8b8b8b",
         "KV cache": "#b3b3b3", "snapshot in host memory": "#dddddd", "text read": "#8b8b8b",
         "computes": "#8b8b8b", "waits": "#dddddd", "sum": "#4a4a4a"}  # fmt: skip
ON_HOST = ("snapshot in host memory",)  # parts that are not in a device's memory: hatched bars next to those of devices


def compute_ms(flops: float) -> float:
    """Milliseconds that one H100 needs for these FLOPs at its bf16 peak of 989 TFLOP/s."""
    return 1e3 * flops / CHIP.peak_flops_per_s


def network_ms(sent_bytes: float) -> float:
    """Milliseconds that one H100 needs to send these bytes over NVLink, at 450 GB/s in one direction."""
    return 1e3 * sent_bytes / CHIP.link_bytes_per_s


@dataclass(frozen=True)
class Scene:
    """One half of the figure.

    memory  GiB per device (or another unit) for each name in PARTS: one number if all devices hold the same, or a
            number per device
    compute, network  what the busiest device does: (label, start in ms, length in ms), and the name of a mesh axis if
                      the bar gets that axis's color
    """

    title: str
    memory: dict[str, float | Sequence[float]]
    compute: Sequence[tuple]
    network: Sequence[tuple]


def before_after(
    before: Scene, after: Scene, title: str, axis: str = "", rows=("compute", "network"), units=("GiB", "ms"),
    places: str = "device",
) -> None:  # fmt: skip
    """Draw memory bars per device above, and a timeline with a compute and a communication row below.

    axis    mesh axis whose color the second row gets; gray without one
    rows    labels of the two rows, if they are not compute and communication
    units   labels of the axis of the bars, and of the time axis
    places  what each bar belongs to, such as "host"
    """
    figure = plt.figure(figsize=(6.6, 4.5))
    above, below = figure.subfigures(2, 1, height_ratios=(3, 1.8))
    memory = above.subplots(1, 2, sharex=True, sharey=True)
    timelines = below.subplots(1, 2, sharex=True, sharey=True)
    for left, right, scene in zip(memory, timelines, (before, after), strict=True):
        _draw_memory(left, scene)
        _draw_timeline(right, scene, COLORS.get(axis, NEUTRAL), rows)
        left.set_xlabel(places)
        right.set_xlabel(units[1])
    memory[0].set_ylabel(units[0])
    names = [name for name in PARTS if name in before.memory or name in after.memory]
    boxes = [
        plt.Rectangle((0, 0), 1, 1, facecolor=PARTS[name], edgecolor="black", lw=0.6, hatch=_hatch(name))
        for name in names
    ]
    above.legend(boxes, names, loc="outside lower center", ncols=len(names), fontsize=9)
    figure.suptitle(title, x=0.02, ha="left")


def _hatch(name: str) -> str | None:
    return "////" if name in ON_HOST else None


def _draw_memory(axes, scene: Scene) -> None:
    below = [0.0] * DEVICES
    width = 0.5 if any(name in scene.memory for name in ON_HOST) else 0.8
    for name, colour in PARTS.items():
        sizes = scene.memory.get(name, 0.0)
        sizes = [float(x) for x in sizes] if isinstance(sizes, Sequence) else [float(sizes)] * DEVICES
        look = dict(color=colour, edgecolor="black", lw=0.6, hatch=_hatch(name))
        if name in ON_HOST:
            axes.bar([n + 0.4 for n in range(DEVICES)], sizes, 0.3, **look)
            continue
        axes.bar(range(DEVICES), sizes, width, below, **look)
        below = [a + b for a, b in zip(below, sizes, strict=True)]
    axes.set(title=scene.title, xticks=range(DEVICES))


def _draw_timeline(axes, scene: Scene, colour: str, rows) -> None:
    for row, (bars, fill) in enumerate(((scene.compute, NEUTRAL), (scene.network, colour))):
        for label, start, length, *axis in bars:
            look = dict(facecolor=COLORS[axis[0]] if axis else fill, alpha=0.6, edgecolor="black", lw=0.6)
            axes.broken_barh([(start, length)], (row - 0.38, 0.76), **look)
            axes.text(start + length / 2, row, label, ha="center", va="center", fontsize=8)
    axes.set(yticks=(0, 1), yticklabels=rows, ylim=(1.6, -0.6))
