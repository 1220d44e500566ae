"""What a setting needs to have an effect, and the refusal of settings that have none.

A setting declares it in its type: with `Annotated[Size, EXPERTS]`, the setting changes nothing in a model without
experts. A preset or a file may have such a value, because other flags may change the model. A flag may not: whoever
passes it expects another result.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from config.fields import hints, parse_objectives, parse_packing, parse_schedule, parse_window
from utils import UserError


class Needs(NamedTuple):
    """A condition for a setting to have an effect. An error suggests to set `name` to `value`."""

    name: str  # another setting
    value: Any  # a value of it with which the condition holds, or fn(Config) -> such a value
    user: str = ""  # what uses the setting; empty: that value alone
    test: Callable[[Any], bool] | None = None  # whether a Config fulfills the condition; None: compare with `value`

    def is_met(self, cfg) -> bool:
        return self.test(cfg) if self.test else read(cfg, self.name) == self.value


def of_mesh(axis: str) -> Needs:
    """Return the condition that an axis of the mesh has several devices."""
    user = f"a mesh with several devices along {axis}"
    return Needs(f"mesh.{axis}", 2, user, lambda cfg: cfg.mesh.sizes[axis] > 1)


GQA, MLA = Needs("model.attention", "gqa"), Needs("model.attention", "mla")
ROPE = (
    Needs("model.encoder_layers", 0, "a model without an encoder", lambda cfg: not cfg.model.encoder_layers),
    Needs("model.no_rope_every", 0, "a model with RoPE", lambda cfg: cfg.model.no_rope_every != 1),
)
EXPERTS = Needs("model.n_experts", 8, "a model with experts", lambda cfg: cfg.model.n_experts > 0)
SEVERAL_EXPERTS = EXPERTS, Needs("model.top_k", 2, "model.top_k above 1", lambda cfg: cfg.model.top_k > 1)
NO_CAPACITY = Needs("model.capacity_factor", 0, "a model without a capacity",
                    lambda cfg: not cfg.model.n_experts or not cfg.model.capacity_factor)  # fmt: skip
NO_WINDOW = Needs("model.window", '""', "a model without sliding windows", lambda cfg: not cfg.model.window)
LONGER = Needs("data.seq_len", lambda cfg: 2 * parse_window(cfg.model.window).size, "a sequence longer than the window",
               lambda cfg: parse_window(cfg.model.window).size < cfg.data.seq_len)  # fmt: skip
DROPLESS = EXPERTS, NO_CAPACITY
DENSE_LAYERS = Needs("model.dense_prefix", 1, "a model with dense layers", lambda cfg: cfg.model.has_dense_layers)


def of_part(name: str, part: str, need: Needs) -> Needs:
    """Return the condition `need`, which holds for all values of a list such as `model.bias` without this part."""
    user = f"{need.user or f'attention={need.value!r}'} ({part})"
    return need._replace(user=user, test=lambda cfg: part not in read(cfg, name).split(",") or need.is_met(cfg))


FEED_FORWARD = Needs("model.n_shared", 1, "a model with dense layers or shared experts",
                     lambda cfg: cfg.model.has_dense_layers or cfg.model.n_shared > 0)  # fmt: skip
BIASED = tuple(of_part("model.bias", *part) for part in
               (("feed_forward", FEED_FORWARD), ("attention", GQA), ("experts", EXPERTS)))  # fmt: skip
SINKS = of_part("model.softmax", "sinks", GQA)
INPUTS = Needs("data.objective", "prefix", "an objective with inputs", lambda cfg: cfg.data.objective != "causal")
TEXTS = Needs("data.objective", "causal", "an objective besides 'task'",
              lambda cfg: {*parse_objectives(cfg.data.objective)} != {"task"})  # fmt: skip
MASKED = Needs("data.packing", "windows", "a batch in which no token attends to other documents",
               lambda cfg: not parse_packing(cfg.data.packing).unmasked)  # fmt: skip
ADAMW = Needs("optim.name", "adamw", "AdamW or Muon", lambda cfg: cfg.optim.name != "adafactor")
MUON = Needs("optim.name", "muon")
WARMUP = Needs("optim.schedule", "cosine", "a schedule with a name",
               lambda cfg: parse_schedule(cfg.optim.schedule).kind != "points")  # fmt: skip
REPLICAS, STAGES, EXPERT, CONTEXT, TENSOR = map(of_mesh, ("data", "stage", "expert", "context", "tensor"))


def read(cfg, name: str):
    """Return the value of a setting by its dotted name."""
    group, _, setting = name.partition(".")
    return getattr(getattr(cfg, group), setting)


def unmet(cfg, name: str) -> Needs | None:
    """Return the first condition of a setting that `cfg` does not fulfill; None: the setting has an effect."""
    group, _, setting = name.partition(".")
    declared = getattr(hints(type(getattr(cfg, group)))[setting], "__metadata__", ())
    return next((one for one in declared if isinstance(one, Needs) and not one.is_met(cfg)), None)


def refuse_unused(cfg, names: Iterable[str], mesh_known: bool = True) -> None:
    """Raises: UserError for the first of these settings that has no effect on the model, the mesh or the data.

    mesh_known  False: a search tries other meshes than that of `cfg`
    """
    for name in names:
        need = unmet(cfg, name)
        if need is None or (need.name.startswith("mesh.") and not mesh_known):
            continue
        group, _, other = need.name.partition(".")
        value = need.value(cfg) if callable(need.value) else need.value
        flag, has = f"add --{need.name} {value}", f"{need.name} is {read(cfg, need.name)!r} here"
        if group == "mesh":
            flag, has = f"add {other}={need.value} to --mesh", f"the mesh is {cfg.mesh}"
        raise UserError(f"{name}={read(cfg, name)!r} has no effect: only {need.user or f'{other}={need.value!r}'} uses "
                        f"it, and {has}; {flag} or drop it")  # fmt: skip
