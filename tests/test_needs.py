"""Tests of settings without effect: every flag changes the program, the plan, the data or a file, or is refused."""

import functools
import re
from pathlib import Path
from typing import get_args

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import config
import dataset
import local_steps
import main
import model
import optimizer
import sharding
from architectures import declare
from config import Config, needs, preset, replace
from config.fields import hints
from data import prepare
from pipeline import step
from plan import __main__ as plan_command, planner
from tests import helpers
from utils import UserError

ROOT = Path(__file__).parent.parent

# One or several values of each setting that is not a choice; moments are not in the dtype of the parameters.
VALUES = {
    "model.vocab_size": 288, "model.d_model": 48, "model.n_layers": 4, "model.encoder_layers": 3, "model.n_heads": 8,
    "model.n_kv_heads": 1, "model.d_head": 8, "model.d_rope": 8, "model.d_value": 16, "model.d_query_latent": 22,
    "model.d_kv_latent": 16, "model.rope_dims": 2, "model.rope_theta": 5e5, "model.rope_scaling": "llama3:8:1:4:64",
    "model.window": ["5", "5:2", "5:2:30"], "model.softmax": ["sinks", "cap:0.5:0", "cap:0:0.5"],
    "model.bias": ["feed_forward", "logits", "attention", "experts"], "model.no_rope_every": 2, "model.d_ff": 48,
    "model.n_experts": 16, "model.top_k": 3, "model.n_shared": 1,
    "model.d_expert": 32, "model.moe_every": 2, "model.dense_prefix": 1, "model.expert_groups": [(2, 1), (4, 3)],
    "model.routed_scaling": 2.0, "model.balance_loss": 0.5, "model.balance_rate": 0.0, "model.z_loss": 0.1,
    "model.label_smoothing": 0.1, "model.capacity_factor": 1.0, "model.dropout": 0.1, "model.norm_eps": 1e-3,
    "work.remat": "full", "work.loss_chunk": 8, "work.microbatches": 2, "work.device_batch": 1,
    "work.schedule": ["gpipe", "1f1b", "zb", "interleaved", "interleaved:4"],
    "optim.lr": 1.0, "optim.schedule": ["rsqrt", "cosine:0.7", "wsd:0.5", "wsd:0.2:0.7"],
    "optim.warmup_steps": 7, "optim.adamw": ["b1=0.5", "b2=0.6", "eps=1e-3", "moments=bfloat16"],
    "optim.muon": ["momentum=0.5", "steps=3", "rms=0.3"], "optim.weight_decay": 0.7,
    "optim.clip_norm": 0.5, "optim.frozen": "embedding_VD",
    "optim.outer": ["every=4", "every=8,lr=0.2", "every=8,momentum=0.3", "every=8,fragments=2"],
    "data.mixture": "a=0.5,b=0.5", "data.seq_len": 16, "data.input_len": 24, "data.objective": "span:0.5:2",
    "data.batch_size": 6, "data.skip": "1:3",
    "data.packing": ["windows", "documents", "windows,ordered", "windows,unmasked"],
}  # fmt: skip


def settings_of(group: str) -> list[str]:
    return [f"{group}.{name}" for name in hints(type(getattr(Config(), group)))]


def values(cfg: Config, name: str) -> list:
    """Return values of a setting that differ from its value in `cfg`."""
    group, _, last = name.partition(".")
    hint, before = hints(type(getattr(cfg, group)))[last], needs.read(cfg, name)
    kind = get_args(hint)[0] if hasattr(hint, "__metadata__") else hint
    if kind is bool:
        return [not before]
    given = VALUES.get(name, [*get_args(kind)])
    return [x for x in (given if isinstance(given, list) else [given]) if x not in (before, "auto")]


def as_text(function, *args) -> str:
    """Return the program of a function with its constants, without addresses of Python objects."""
    traced = jax.make_jaxpr(function)(*args)
    return re.sub("0x[0-9a-f]+", "", str(traced)) + str([np.asarray(x).tolist() for x in traced.consts])


def check(bases: dict[str, Config], names: list[str], has_effect, same_result=()) -> None:
    """Check that each value changes what `has_effect` compares or is refused, and that each setting has an effect.

    same_result  settings whose program differs although it computes the same
    """
    idle = set(names)
    for title, base in bases.items():
        refused, silent = {}, []
        for name, value in [(one, value) for one in names for value in values(base, one)]:
            try:
                changed = replace(base, **{name: value})
                if needs.unmet(changed, name):
                    refused |= {name: value} if name not in same_result else {}
                    continue
                silent += [] if has_effect(base, changed) else [f"{name}={value!r}"]
                idle -= {name}
            except UserError:  # refused for another reason
                continue
        assert not silent, f"{title}: no effect, and not refused"
        some = [refused] if has_effect is changes_program else [{name: value} for name, value in refused.items()]
        for one in some:  # a program takes long to trace
            assert not has_effect(base, replace(base, **one)), f"{title}: {one} has an effect"
    assert not idle, "no base shows an effect"


@functools.cache
def program(cfg: Config) -> str:
    """Return the forward pass and the loss of one device."""
    key = lambda number: jax.random.fold_in(jax.random.key(cfg.run.seed), number)

    def loss(params, batch, number):
        w = step.ready_for_autodiff(params, cfg.at_work)
        return model.loss(cfg.at_work, step.forward_sums(w, cfg, batch, key(number)))

    mapped = step.on_mesh(cfg, sharding.make_mesh(cfg.mesh), loss, (P(), model.metric_specs(cfg.model)))
    return as_text(mapped, sharding.shapes(declare(cfg.model)), helpers.random_batch(cfg, 0), np.int32(0))


def changes_program(a: Config, b: Config) -> bool:
    shapes = [sharding.flatten_named(sharding.shapes(declare(cfg.model))) for cfg in (a, b)]
    return shapes[0] != shapes[1] or program(a) != program(b)


@functools.cache
def plan(cfg: Config) -> dict:
    return planner.plan(cfg).to_json()


def changes_plan(a: Config, b: Config) -> bool:
    return plan(a) != plan(b)


@functools.cache
def update(cfg: Config) -> str:
    """Return the optimizer's update, and the outer step of local steps."""
    params, chain = sharding.shapes(declare(cfg.model)), optimizer.make_optimizer(cfg)
    text = as_text(chain.update, params, jax.eval_shape(chain.init, params), params)
    if cfg.optim.outer:
        mesh = sharding.make_mesh(cfg.mesh)
        outer = local_steps.outer_step(cfg, mesh, declare(cfg.model)).function
        state = optimizer.state_shapes(cfg)
        text += as_text(outer, state.params, state.optimizer, state.replicas.params)
    return text


def changes_update(a: Config, b: Config) -> bool:
    return changes_plan(a, b) or update(a) != update(b)


def changes_data(a: Config, b: Config) -> bool:
    batches = [[dataset.batch(cfg, number) for number in range(2)] for cfg in (a, b)]
    return str(jax.tree.map(np.ndarray.tolist, batches[0])) != str(jax.tree.map(np.ndarray.tolist, batches[1]))


def one(name: str, **settings) -> Config:
    """Return a preset with one short batch."""
    return preset(name, **{"data.seq_len": 8, "data.batch_size": 2} | settings)


MODELS = {
    "experts": one("tiny", **{"model.n_layers": 2, "model.dense_prefix": 0, "model.moe_every": 1,
                              "model.expert_groups": (4, 2)}),
    "dense": one("tiny", **{"model.n_layers": 1, "model.dense_prefix": 0, "model.n_experts": 0,
                            "model.attention": "gqa", "data.objective": "prefix"}),
    "encoder": one("t5_tiny", **{"model.n_layers": 1, "model.encoder_layers": 1}),
}  # fmt: skip
# A model with an encoder multiplies RoPE's angles by 0, and a causal batch has no inputs for prefix_lm.
SAME_RESULT = "model.rope_theta", "model.rope_dims", "model.no_rope_every", "model.prefix_lm"


def test_a_setting_of_the_model_changes_the_program_or_is_refused():
    """Catches a flag that trains the unchanged model under another name, and one that is refused although it works."""
    check(MODELS, settings_of("model"), changes_program, SAME_RESULT)
    single = one("tiny", **{"model.top_k": 1})
    assert needs.unmet(single, "model.normalize_gates")
    assert not changes_program(single, replace(single, **{"model.normalize_gates": False}))


def deep(mesh: str, **work) -> Config:
    plain = {"gather": "layer", "tensor_exchange": "gather", "context_attention": "gather", "remat": "none",
             "expert_exchange": "gathered", "context_layout": "positions"} | work  # fmt: skip
    work = {f"work.{name}": value for name, value in plain.items()}
    return preset("deep", mesh=mesh, **{"data.batch_size": 32} | work)


MESHES = {
    "stages": deep("stage=2,fsdp=2,tensor=2", schedule="1f1b"),
    "chunks": deep("stage=2", schedule="interleaved"),
    "context": deep("context=2"),
    "experts": deep("expert=2"),
    "replicas": deep("data=2"),
    "matrices": replace(deep("fsdp=2", muon_layout="owner"), **{"optim.name": "muon"}),
}


def test_an_execution_setting_changes_the_plan_or_is_refused():
    """Catches `--work.tensor_exchange ring` on a mesh without tensor: a comparison of two equal programs."""
    check(MESHES, [name for name in settings_of("work") if name != "work.context_layout"], changes_plan)
    dealt = deep("context=2", context_layout="documents")
    assert changes_program(MESHES["context"], dealt), "the plan does not know the documents, but the program does"


def test_an_axis_of_the_mesh_changes_the_plan():
    """Catches an axis that is only a name."""

    def plan_on(topology: str, **mesh) -> dict:
        sizes = {"data": 2, "stage": 2, "fsdp": 2} | mesh
        cfg = deep(",".join(f"{axis}={size}" for axis, size in sizes.items()))
        return planner.plan(cfg, topology).to_json() | {"mesh": ""}

    doubled = {axis: {axis: 4 if axis in ("data", "stage", "fsdp") else 2} for axis in config.AXES}
    plans = [plan_on("2*v4:2x4x1", **sizes) for sizes in doubled.values()]
    assert all(a != b for number, a in enumerate(plans) for b in plans[:number])
    assert plan_on("2*v4:2x2x1") != plan_on("2*v4:2x2x1", across="fsdp")


small = functools.partial(one, "tiny", **{"model.n_layers": 1, "model.dense_prefix": 0, "model.n_experts": 0})
OPTIMIZERS = {
    "adamw": small(),
    "points": small(**{"optim.name": "adafactor", "optim.schedule": "0:1,9:0"}),
    "muon": small(**{"optim.name": "muon"}),
    "local steps": small(mesh="data=2", **{"optim.outer": "every=8", "optim.schedule": "wsd"}),
    "replicas": small(mesh="data=2"),
}


def test_a_setting_of_the_optimizer_changes_the_update_or_is_refused():
    """Catches a `momentum` of `--optim.outer` that nothing reads, and `--optim.adamw` with Adafactor."""
    check(OPTIMIZERS, settings_of("optim"), changes_update)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """Tokens in two folders, in documents of several lengths."""
    folder = tmp_path_factory.mktemp("needs")
    for name, word in (("a", "so it goes, "), ("b", "and on, ")):
        for number in range(9):
            (folder / f"{name}{number}.txt").write_text(word * (1 + number % 4))
        source = f"text:{folder}/{name}*.txt"
        prepare.prepare(prepare.Arguments(str(folder / "tokens" / name), source, val_share=0.3))
    return folder / "tokens"


def test_a_setting_of_the_data_changes_the_batches_or_is_refused(tokens):
    """Catches `--data.packing documents` for an objective that always packs, and a mixture that is not read."""
    VALUES["data.path"] = str(tokens / "b")
    bases = {
        "causal": preset("tiny", **{"data.path": str(tokens / "a"), "data.seq_len": 32, "data.batch_size": 4}),
        "span": preset("t5_tiny", **{"data.path": str(tokens / "a"), "data.seq_len": 32, "data.batch_size": 4}),
        "mixture": preset("tiny", **{"data.path": str(tokens), "data.mixture": "a=0.9,b=0.1", "data.batch_size": 4}),
    }
    check(bases, settings_of("data"), changes_data)
    assert needs.unmet(preset("t5_tiny", **{"data.objective": "task"}), "data.packing")


def test_a_setting_of_the_run_is_read():
    """Catches a flag that nothing reads. Each is written to config.json, so the files of a run cannot show it."""
    folders = [path for path in ROOT.iterdir() if path.is_dir() and path.name not in ("config", "tests", ".venv")]
    files = [*ROOT.glob("*.py"), *(path for folder in folders for path in folder.glob("*.py"))]
    code = "\n".join(path.read_text() for path in files)
    properties = {"run.profile": "profiled_steps"}
    for name in settings_of("run"):
        assert re.search(rf"\brun\.{properties.get(name, name[4:])}\b", code), name


REFUSED = [  # flags -> the end of the error
    ("laptop --model.n_kv_heads 2", "model.n_kv_heads=2 has no effect: only attention='gqa' uses it, and "
     "model.attention is 'mla' here; add --model.attention gqa or drop it"),
    ("laptop --model.rope-dims=8", "model.rope_dims=8 has no effect: only attention='gqa' uses it, and "),
    ("dense_124m --model.d_kv_latent 32", "model.d_kv_latent=32 has no effect: only attention='mla' uses it, and "),
    ("laptop --model.n_experts 0 --model.top_k 4", "model.top_k=4 has no effect: only a model with experts uses it, "
     "and model.n_experts is 0 here; add --model.n_experts 8 or drop it"),
    ("laptop --model.bias attention,logits", "model.bias='attention,logits' has no effect: only attention='gqa' "
     "(attention) uses it, and model.attention is 'mla' here; add --model.attention gqa or drop it"),
    ("laptop --model.softmax sinks", "model.softmax='sinks' has no effect: only attention='gqa' (sinks) uses it, and "
     "model.attention is 'mla' here; add --model.attention gqa or drop it"),
    ("laptop --model.n_experts 0 --model.bias experts", "only a model with experts (experts) uses it, and "
     "model.n_experts is 0 here; add --model.n_experts 8 or drop it"),
    ("mixtral_8x7b --model.bias feed_forward", "only a model with dense layers or shared experts (feed_forward) uses "
     "it, and model.n_shared is 0 here; add --model.n_shared 1 or drop it"),
    ("laptop --mesh fsdp=2 --work.schedule 1f1b", "work.schedule='1f1b' has no effect: only a mesh with several "
     "devices along stage uses it, and the mesh is fsdp=2; add stage=2 to --mesh or drop it"),
]  # fmt: skip


@pytest.mark.parametrize("typed, why", REFUSED)
def test_a_flag_without_effect_names_the_flag_that_uses_it(typed, why):
    """Catches an ablation of nothing, which differs from the other run only by its name."""
    with pytest.raises(UserError, match=re.escape(why)):
        main.parse(typed.split())
    with pytest.raises(UserError, match=re.escape(why)):
        plan_command.parse(typed.split())


@pytest.mark.parametrize("typed", [
    "laptop --model.n_kv_heads 4",  # the value that the preset has
    "laptop --model.n_heads 8",  # n_kv_heads follows
    "tiny --model.n_experts 0",  # the preset's top_k has no effect now
    "laptop --model.attention gqa --model.n_kv_heads 2",
])  # fmt: skip
def test_a_value_that_no_flag_changes_may_be_without_effect(typed):
    """Catches a preset, or a run's own settings, that no flag can change without a refusal."""
    main.parse(typed.split())


def test_a_search_of_meshes_accepts_settings_of_other_meshes():
    """Catches `python -m plan --search` that refuses a schedule because the command line has no mesh."""
    plan_command.parse("moe1b --topology v4:4x4x2 --search 32 --mesh fsdp=32 --work.schedule 1f1b".split())
    with pytest.raises(UserError, match=r"model\.n_kv_heads=2 has no effect"):
        plan_command.parse("moe1b --topology v4:4x4x2 --search 32 --model.n_kv_heads 2".split())
