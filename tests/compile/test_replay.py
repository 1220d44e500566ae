"""`python -m plan.replay` on programs that were not written for this project, and on what it has to refuse.

fixtures/ has the text of each program, with other paths: two that the files beside it lower, and three steps of MaxText
0.2.5, compiled by `python -m maxtext.trainers.pre_train.train_compile base.yml remat_policy=full` with JAX 0.12.0.1,
libtpu 0.0.52 and these settings:

- compile_topology=v5e-16 model_name=llama2-7b per_device_batch_size=4 max_target_length=2048 ici_fsdp_parallelism=16,
  from a dump
- compile_topology=v5p-32 model_name=mixtral-8x7b per_device_batch_size=4 max_target_length=4096 ici_fsdp_parallelism=16
  sparse_matmul=true megablox=true, from `as_text()`
- compile_topology=v5p-32 model_name=llama3.1-8b per_device_batch_size=1 max_target_length=32768
  ici_fsdp_parallelism=4 ici_context_parallelism=4 packing=false, from `as_text()`

The last two have the options SPARSECORE of `compile/options.py` as compile_xla_flags, which are from MaxText's own
benchmarks. This libtpu refuses the options of MaxText's v5p recipes, which fuse all-gathers with matmuls.
"""

import gzip
import json
import lzma
import re
from pathlib import Path

import pytest

from compile.hlo import Program
from plan import replay
from plan.simulate import live

FIXTURES = Path(__file__).parent / "fixtures"
NAMES = ("flash_attention", "flax_lm", "maxtext_llama2_7b", "maxtext_mixtral_8x7b", "maxtext_llama3_8b_32k")
FLASH, FLAX, MAXTEXT, MIXTRAL, LONG = (str(FIXTURES / f"{name}.hlo.xz") for name in NAMES)


def text(path: str) -> str:
    return lzma.decompress(Path(path).read_bytes()).decode()


def command(capsys, *argv: str) -> tuple[int, str, str]:
    status = replay.main([*map(str, argv)])
    return status, *capsys.readouterr()


def numbers(capsys, *argv: str) -> dict:
    status, out, err = command(capsys, *argv, "--json")
    assert (status, err) == (0, "")
    return json.loads(out)


# Other people's programs ----------------------------------------------------------------------------------------------


def test_the_flash_attention_of_jax(capsys):
    """Catches FLOPs that differ from those derived by hand, and a source line of JAX instead of the user's."""
    found = numbers(capsys, FLASH, "--topology", "v5p:2x2x2")
    assert (found["devices"], found["sent"]) == (1, [])
    einsum = 2 * 4 * 2048 * 2048 * (2 * 128)  # and two of the same size in the backward pass
    kernel = found["flops"] - 3 * einsum
    assert (
        0 < kernel < 2 * 2 * 4 * 2 * 2048 * 2048 * 128 * 1.1
    )  # forward, by JAX's estimate; none for its backward pass
    assert len(found["unknown"]) == 2 and all("flash_mha_bwd" in name for name in found["unknown"])
    assert all(line["source"].startswith("flash_attention.py:") for line in found["lines"] if line["matmuls_s"])
    most, *_ = found["lines"]
    assert most["source"].endswith(" in lower.loss")
    assert sum(line["matmuls_s"] for line in found["lines"]) == pytest.approx(found["seconds"]["matmuls"])


def test_a_flax_program_without_sharding_constraints(capsys):
    """Catches a mesh that is not found in the device groups, and exposed seconds that no line accounts for."""
    found = numbers(capsys, FLAX, "--topology", "v5e:4x4")
    assert (found["mesh"], found["mesh_inferred"], found["devices"]) == ("a=4,b=4", True, 16)
    exposed = {cause: s for cause, s in found["seconds"].items() if cause not in replay.CAUSES}
    assert set(exposed) >= {"a", "b"} and exposed["a"] > 0.4 * found["step_s"]  # activations are summed over `data`
    lines = found["lines"]
    assert sum(line["exposed_s"] for line in lines) == pytest.approx(sum(exposed.values()))
    assert sum(line["matmuls_s"] for line in lines) == pytest.approx(found["seconds"]["matmuls"])
    assert sum(line["matmuls_s"] + line["other_s"] + line["exposed_s"] for line in lines) == pytest.approx(
        found["step_s"]
    )
    assert (
        found["unordered"]
        and "simulated CPU devices could deadlock" in command(capsys, FLAX, "--topology", "v5e:4x4")[1]
    )


def test_a_step_of_maxtext(capsys):
    """Catches operands in the notation of newer compilers (x#1), and lines of Python's launcher instead of MaxText's.

    16 devices process 4 sequences of 2,048 tokens each, with remat=full: at least 8 FLOPs per parameter and token, of
    6,607 million parameters that multiply.
    """
    found = numbers(capsys, MAXTEXT, "--topology", "v5e:4x4", "--mesh", "fsdp=16")
    matmuls = 8 * 6.607e9 * 4 * 2048
    assert 0.9 * matmuls < found["flops"] < 1.1 * matmuls
    assert matmuls / 197e12 < found["step_s"] < 1.5 * matmuls / 197e12
    note = "matmuls take their time at the peak, for lack of estimated cycles; compare with --at_peak"
    said = [command(capsys, file, "--topology", topology)[1].replace("\n", " ")
            for file, topology in ((MAXTEXT, "v5e:4x4"), (FLASH, "v5p:2x2x2"))]  # fmt: skip
    assert not found["estimated_cycles"] and [note in text for text in said] == [True, False]
    assert [bool(re.search(r"cycles +\S+ m?s if other operations take", text)) for text in said] == [False, True]
    assert found["by_cycles"] == {"step_s": found["step_s"], "other_s": found["seconds"]["other ops"]}
    assert found["lines"][0]["source"].startswith("linears.py:") and "splash_mha" in "".join(found["unknown"])
    assert {row["kind"] for row in found["sent"]} == {"collective-permute", "all-gather", "all-to-all", "all-reduce"}


def test_a_mixture_of_experts_of_maxtext():
    """Catches experts' kernels without FLOPs, and collectives and gathers of a SparseCore that do not count.

    16 devices process 4 sequences of 4,096 tokens each. Of a layer, a token uses 2 experts and the attention. The
    backward pass computes all matmuls again. Attention kernels declare no FLOPs.
    """
    found, _ = replay.measure(replay.Arguments(MIXTRAL, "v5p:2x2x4", "fsdp=16", at_peak=True))
    expert, attention, logits, router = 4096 * 14_336, 2 * 4096 * (4096 + 1024), 4096 * 32_000, 4096 * 8
    flops = 2 * 4 * 4096 * (32 * (2 * 12 * expert + 4 * (attention + router)) + 3 * logits)
    assert found["flops"] == pytest.approx(flops, rel=0.01)
    experts = sum(line["matmuls_s"] for line in found["lines"] if line["source"].endswith(" in gmm"))
    assert experts == pytest.approx(2 * 4 * 4096 * 32 * 2 * 12 * expert / 459e12)
    weights = 32 * (8 * 3 * expert + attention) + 2 * logits
    sent = {kind: sum(row["wire_bytes"] for row in found["sent"] if row["kind"] == kind)
            for kind in ("all-gather", "all-reduce")}  # fmt: skip
    # Forward and backward pass gather bf16 weights. The compiler sums their gradients with all-reduces.
    assert sent == pytest.approx(dict.fromkeys(sent, 2 * 2 * weights * 15 / 16), rel=0.05)
    # 1.6 ms of copies; the rest are waits for gathers of a SparseCore, most of whose time is overlapped
    assert 0.003 < found["seconds"]["copies"] < 0.01


def test_a_long_sequence_of_maxtext():
    """Catches an axis `context` without its own collectives, and a step that takes less time than its matmuls.

    Each group of 4 devices along `context` processes 4 sequences of 32,768 tokens. The backward pass computes all
    matmuls again but the last of a layer. Attention kernels declare no FLOPs.
    """
    found, _ = replay.measure(replay.Arguments(LONG, "v5p:2x2x4", "fsdp=4,context=4", at_peak=True))
    attention, hidden, logits = 2 * 4096 * (4096 + 1024), 4096 * 14_336, 4096 * 128_256
    flops = 2 * 4 * 8192 * (32 * (4 * attention + 11 * hidden) + 3 * logits)
    assert found["flops"] == pytest.approx(flops, rel=0.01)
    assert flops / 459e12 < found["step_s"] < 1.3 * flops / 459e12
    # All-gather of keys and values over `context` in both passes, and the sums of their gradients
    keys = 2 * 32 * 4 * 32_768 * 2 * 1024 * 3 // 4
    sent = {row["kind"]: row["wire_bytes"] for row in found["sent"] if row["axes"] == "context"}
    assert sent == pytest.approx({"all-gather": 2 * keys, "reduce-scatter": keys}, rel=0.01)


# Bytes of HBM that the compiler reports for each program: `memory_analysis().peak_memory_in_bytes`, or its dump
PEAKS = {FLASH: 81_789_984, FLAX: 3_648_221_184, MAXTEXT: 12_302_246_400, MIXTRAL: 64_549_613_856, LONG: 34_288_137_472}


@pytest.mark.parametrize("path", PEAKS, ids=lambda path: Path(path).name)
def test_the_estimated_peak_is_near_the_compilers(path):
    """Catches arrays that are never freed, updates in place that count twice, and on-chip arrays that count."""
    assert live.peak_bytes(Program(text(path))) == pytest.approx(PEAKS[path], rel=0.12)


def test_a_dumps_report_has_the_peak(capsys, tmp_path):
    """Catches an estimate where the compiler's own number is in the file beside the program."""
    stem = tmp_path / "module_0001.jit_loss.cl_1"
    Path(f"{stem}.after_codegen.txt.gz").write_bytes(gzip.compress(text(FLASH).encode()))
    report = (
        "Memory Space: vmem (color=1)\nTotal bytes: 7\nMemory Space: default (color=0)\nTotal bytes: 12345 (12KiB)\n"
    )
    Path(f"{stem}.after_optimizations-memory-usage-report.txt").write_text(report)
    found = numbers(capsys, f"{stem}.after_codegen.txt.gz", "--topology", "v5p:2x2x2")
    assert (found["peak_bytes"], found["peak_estimated"]) == (12345, False)


ONE = """HloModule jit_f, is_scheduled=true

ENTRY %main (x: f32[256,128]) -> f32[256,128] {
  %x = f32[256,128]{1,0:T(8,128)} parameter(0)
  ROOT %t = f32[256,128]{1,0:T(8,128)} tanh(%x), metadata={op_name="jit(f)/tanh" source_file="/u/f.py" source_line=7}
}
"""  # fmt: skip


def test_a_program_for_one_device_needs_no_mesh(capsys, tmp_path):
    """Catches a refusal because no topology has one device, and a wrong time: 2 * 128 KiB at 8.1e11 bytes/s."""
    (tmp_path / "f.hlo").write_text(ONE)
    found = numbers(capsys, tmp_path / "f.hlo", "--topology", "v5e:2x2")
    assert found["seconds"] == {"other ops": pytest.approx(2 * 4 * 256 * 128 / 8.1e11)}
    assert [line["source"] for line in found["lines"]] == ["f.py:7"] and found["peak_bytes"] == 2 * 4 * 256 * 128
    assert "on 1 device of v5e:2x2" in command(capsys, tmp_path / "f.hlo", "--topology", "v5e:2x2")[1]


GROUPS = {  # device groups of the collectives of a program with 16 devices -> the mesh
    "": "a=16",
    "{{0,1,2,3},{4,5,6,7},{8,9,10,11},{12,13,14,15}}": "a=4,b=4",
    "[8,2]<=[2,2,4]T(0,2,1)": "a=2,b=2,c=4",  # 0 and 4
    "[2,8]<=[2,2,2,2]T(1,0,2,3)": "a=2,b=2,c=4",  # 0 to 3 and 8 to 11
    "{{0,1,3},{2,4,5}}": "a=16",  # along no axes
}


@pytest.mark.parametrize("groups", GROUPS)
def test_the_mesh_follows_from_device_groups(groups):
    """Catches a mesh axis that is missing, or of the wrong size, if groups skip an axis."""
    line = f"  %g = f32[16] all-reduce(%x), replica_groups={groups}, to_apply=%add\n" if groups else ""
    program = Program(f"HloModule m\n\nENTRY %main (x: f32[16]) -> f32[16] {{\n  %x = f32[16] parameter(0)\n{line}"
                      "  ROOT %t = f32[16] tanh(%x)\n}\n")  # fmt: skip
    assert str(replay.infer_mesh(program, 16)) == GROUPS[groups]


# Refusals -------------------------------------------------------------------------------------------------------------

REFUSED = {  # change of the text -> the error
    "an opcode": (("tanh(", "frobnicate("), "does not know opcode frobnicate"),
    "a collective that is not counted": (("tanh(", "ragged-all-to-all("), "does not know opcode ragged-all-to-all"),
    "not scheduled": (("=true", "=false"), "the program is not scheduled; pass compiled.as_text()"),
    "a program for CPUs": ((":T(8,128)", ""), "the program was compiled for CPUs or GPUs"),
    "other devices": (("=true", "=true, num_partitions=16"), "compiled for 16 devices (num_partitions=16), but"),
    "pmap": (("=true", "=true, replica_count=4"), "the program has 4 replicas, as pmap makes; use jax.jit"),
    "several slices": (("tanh(", '_xla_megascale_transfer_type="X" tanh('), "the program sends data between slices"),
    "StableHLO": (("HloModule", "module @"), "not a compiled program, whose text begins with HloModule"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_simulated_is_refused_in_one_line(name, capsys, tmp_path):
    """Catches a simulation of a program that is not understood, and a traceback."""
    change, message = REFUSED[name]
    (tmp_path / "f.hlo").write_text(ONE.replace(*change))
    status, out, err = command(capsys, tmp_path / "f.hlo", "--topology", "v5e:2x2")
    assert (status, out) == (2, "") and err.startswith(f"error: {tmp_path}/f.hlo: ") and err.count("\n") == 1
    assert message in err


WRONG_FLAGS = {
    "--topology h100:8": "topology 'h100:8': only v4, v5e, v5p, v6e, tpu7x can be simulated",
    "--topology v5p:2x2x2 --mesh heads=4": "mesh heads=4 has 4 devices, and the program was compiled for 1",
    "--topology v5p:2x2x2 --latency_us -1": "--latency_us -1.0: must be at least 0",
    "--topology v5p:2x2x2 --plot layer.txt": "layer.txt: cannot write a figure",
}


@pytest.mark.parametrize("flags", WRONG_FLAGS)
def test_wrong_flags_are_refused_in_one_line(flags, capsys):
    """Catches a traceback, and a figure that cannot be written only after the simulation."""
    status, out, err = command(capsys, FLASH, *flags.split())
    assert (status, out) == (2, "") and WRONG_FLAGS[flags] in err and err.count("\n") == 1


def test_a_protocol_buffer_is_refused(capsys, tmp_path):
    """Catches a traceback for the .pb file of a dump."""
    (tmp_path / "f.pb").write_bytes(b"\x80\x81")
    status, _, err = command(capsys, tmp_path / "f.pb", "--topology", "v5e:2x2")
    assert status == 2 and "is not text; pass the text of a program, not its protocol buffer" in err


def test_the_plot_is_drawn(capsys, tmp_path):
    """Catches a program in which a single computation takes time, so there is no second panel to draw."""
    status, _, err = command(capsys, FLASH, "--topology", "v5p:2x2x2", "--plot", tmp_path / "a.svg")
    assert status == 0 and "drew" in err and "jit_loss on v5p:2x2x2" in (tmp_path / "a.svg").read_text()
