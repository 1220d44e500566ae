"""The figure of README: one model, trained on eight meshes, has the same losses as on one device."""

import dataclasses
import sys
from pathlib import Path

import tyro

from devices import simulate_devices
from utils import exit_status

HELP = """e.g. python -m docs.eight_meshes

Train one model on eight meshes of 8 simulated devices, and draw the losses into docs/eight_meshes.png. Needs the tokens
of `make train`. Takes 10 to 25 minutes on 2 cores."""

PICTURE = Path(__file__).parent / "eight_meshes.png"
MESHES = ("data=8", "fsdp=8", "expert=8", "context=8", "fsdp=2,tensor=4", "fsdp=4,stage=2", "fsdp=2,stage=2,tensor=2",
          "data=2,expert=2,context=2")  # fmt: skip
COLORS = ("#8c6d4f", "#3f74b5", "#9a5fb0", "#3f9a4d", "#cf4446", "#e08a1e", "#56b4e9", "#cc79a7")


def train(mesh_name: str, steps: int) -> tuple[list[float], float]:
    """Train the `laptop` preset on a mesh; return its losses and the share of the parameters that a device stores."""
    import jax

    import config
    import dataset
    import optimizer
    import sharding

    cfg = config.preset("laptop", mesh=mesh_name)
    mesh = sharding.make_mesh(cfg.mesh)
    state = optimizer.init(cfg, mesh)
    total = sum(x.nbytes for x in jax.tree.leaves(state.params))
    stored = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state.params))
    step, losses = optimizer.train_step(cfg, mesh), []
    for number in range(steps):
        state, metrics = step(state, sharding.put(dataset.batch(cfg, number), mesh))
        losses.append(float(metrics["loss"]))
    return losses, stored / total


def draw(one_device: list[float], runs: dict[str, tuple[list[float], float]]) -> None:
    """Draw the nine loss curves, and for each mesh the share of the parameters that each device stores."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Rectangle

    figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 3.9), width_ratios=(1, 1.4), layout="constrained")
    steps = range(1, len(one_device) + 1)
    for k, (name, (losses, _)) in enumerate(runs.items()):  # wide lines first, so that every color stays visible
        left.plot(steps, losses, color=COLORS[k], linewidth=2 * (len(runs) - k) + 1, label=name)
    left.plot(steps, one_device, color="black", linewidth=1, linestyle="--", label="one device")
    left.set(xlabel="step", ylabel="loss (nats per token)")
    left.set_title("Nine runs, one loss curve", loc="left", fontsize=11, fontweight="bold")
    left.spines[["top", "right"]].set_visible(False)
    left.legend(handles=left.lines[-1:], frameon=False)
    right.set(xlim=(0, 25.5), ylim=(len(runs) + 0.15, -1.1))
    right.axis("off")
    heads = {0: "mesh", 11: "share of the parameters\nthat each device stores", 25.5: "largest loss\ndifference"}
    for x, text in heads.items():
        right.text(x, -0.25, text, ha="right" if x > 25 else "left", va="bottom", fontsize=9, fontweight="bold")
    for row, (name, (losses, share)) in enumerate(runs.items()):
        middle = row + 0.5
        right.text(0, middle, name, va="center", fontsize=9.5, family="monospace", color=COLORS[row])
        for device in range(8):
            x, y, height = 11 + device * 1.05, row + 0.12, 0.76
            right.add_patch(Rectangle((x, y + height * (1 - share)), 0.85, height * share, color=COLORS[row]))
            right.add_patch(Rectangle((x, y), 0.85, height, fill=False, edgecolor="0.4", linewidth=0.8))
        right.text(19.7, middle, f"{share:.0%}", va="center", fontsize=9)
        off = max(abs(mine - one) for mine, one in zip(losses, one_device, strict=True))
        right.text(25.5, middle, f"{off:.0e}", va="center", ha="right", fontsize=9)
    figure.savefig(PICTURE, dpi=110)


@dataclasses.dataclass
class Arguments:
    steps: int = 40  # training steps per mesh


@exit_status
def main() -> None:
    args = tyro.cli(Arguments, prog="python -m docs.eight_meshes", description=HELP)
    simulate_devices(8)
    one_device, _ = train("data=1", args.steps)
    runs = {}
    for name in MESHES:
        runs[name] = train(name, args.steps)
        off = max(abs(mine - one) for mine, one in zip(runs[name][0], one_device, strict=True))
        print(f"{name:26} last loss {runs[name][0][-1]:.4f}, largest difference {off:.1e}, stores {runs[name][1]:.1%}",
              flush=True)  # fmt: skip
    draw(one_device, runs)
    print(f"wrote {PICTURE.parent.name}/{PICTURE.name}")


if __name__ == "__main__":
    sys.exit(main())
