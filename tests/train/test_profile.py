"""`--run.profile` records steps, and `python -m plan.profile` tells on what their time was spent."""

import gzip
import json
from types import SimpleNamespace

import pytest

import main
from compile.hlo import Program
from config import preset
from plan import __main__ as plan_command, planner, profile
from plan.profile import Event
from plan.time import measured
from tests.train.small_run import flags
from utils import UserError

SIZES = {"data": 2, "model": 2}
TEXT = """HloModule jit_step, is_scheduled=true, num_partitions=4

%multiplied (x.1: f32[5,7], w.1: f32[7,3]) -> f32[5,3] {
  %x.1 = f32[5,7] parameter(0)
  %w.1 = f32[7,3] parameter(1)
  ROOT %dot.1 = f32[5,3] dot(%x.1, %w.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (p.2: f32[5,7]) -> f32[5,7] {
  %p.2 = f32[5,7] parameter(0)
  ROOT %tanh.2 = f32[5,7] tanh(%p.2), metadata={source_file="/u/model.py" source_line=3}
}

%condition (p.3: f32[5,7]) -> pred[] {
  %p.3 = f32[5,7] parameter(0)
  ROOT %true.3 = pred[] constant(true)
}

ENTRY %main (x: f32[5,7], w: f32[7,3]) -> f32[5,3] {
  %x = f32[5,7] parameter(0)
  %w = f32[7,3] parameter(1)
  %start = (f32[7,3], f32[14,3]) all-gather-start(%w), replica_groups={{0,1},{2,3}}, dimensions={0}, metadata={source_file="/u/model.py" source_line=9}
  %loop = f32[5,7] while(%x), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %fusion = f32[5,3] fusion(%loop, %w), kind=kOutput, calls=%multiplied, metadata={source_file="/u/model.py" source_line=5}
  %done = f32[14,3] all-gather-done(%start)
  ROOT %sum = f32[5,3] all-reduce(%fusion), replica_groups={{0,2},{1,3}}, to_apply=%add, metadata={source_file="/u/model.py" source_line=7}
}
"""  # noqa: E501
CAUSES = profile.Causes(Program(TEXT), SIZES)


def attribute(*events, steps=1, devices=1, step_s=0.0) -> tuple[dict, dict]:
    """Return milliseconds by cause, and by line and cause, of (name, start, end) or (name, start, end, device)."""
    found = [Event(str(more[3:]), 1e6 * more[1], 1e6 * more[2], more[0]) for more in events]
    spent = profile.seconds_by_instruction(found, CAUSES.priority)
    causes, lines = profile.measured(spent, CAUSES, steps * devices, step_s)
    ms = lambda row: {name: pytest.approx(1e3 * s) for name, s in row.items() if s}
    return ms(causes), {line: ms(row) for line, row in lines.items()}


def test_every_instruction_has_its_cause_and_line():
    """Catches a matmul inside a fusion that counts as another operation, and the end of a collective without a line."""
    causes, lines = attribute(("start", 0, 1), ("tanh.2", 1, 4), ("fusion", 4, 9), ("done", 9, 16), ("sum", 16, 27))
    assert causes == {"matmuls": 5, "other ops": 3, "model": 1 + 7, "data": 11}
    assert lines == {"model.py:3": {"other_s": 3}, "model.py:5": {"matmuls_s": 5}, "model.py:9": {"exposed_s": 8},
                     "model.py:7": {"exposed_s": 11}}  # fmt: skip


def test_a_loop_has_only_the_time_that_its_body_does_not_have():
    """Catches time that counts for a loop and again for the instructions in it."""
    assert attribute(("loop", 0, 10), ("tanh.2", 1, 4), ("tanh.2", 5, 7))[0] == {"other ops": 10}
    assert attribute(("loop", 0, 10), ("fusion", 1, 4))[0] == {"other ops": 7, "matmuls": 3}


def test_communication_is_exposed_only_while_nothing_computes():
    """Catches a collective on a second stream whose whole time counts as exposed, or hides a matmul."""
    assert attribute(("sum", 0, 10), ("fusion", 2, 7), ("tanh.2", 9, 12))[0] == {
        "data": 4,
        "matmuls": 5,
        "other ops": 3,
    }
    assert attribute(("fusion", 0, 10), ("sum", 2, 7))[0] == {"matmuls": 10}


def test_kernels_in_a_cuda_graph_have_causes(monkeypatch):
    """Catches kernels that are lost because their event names a command buffer instead of an instruction."""
    kernels = ("nvjet_sm90_tst_128x160", "ncclDevKernel_AllReduce_Sum_bf16", "memcpy128", "tanh_2", "cub::Sort")
    stats = {"hlo_op": "command_buffer_9", "hlo_module": "jit_step"}
    other = SimpleNamespace(
        name="tanh_2", start_ns=0, duration_ns=1e6, stats={"hlo_op": "tanh.2", "hlo_module": "jit_eval"}
    )
    events = [SimpleNamespace(name=name, start_ns=8e6 * n, duration_ns=(1 + n) * 1e6, stats=stats)
              for n, name in enumerate(kernels)]  # fmt: skip
    line = SimpleNamespace(name="Stream #14", events=[other, *events])
    trace = SimpleNamespace(planes=[SimpleNamespace(name="/device:GPU:0", lines=[line])])
    monkeypatch.setattr(profile.jax.profiler.ProfileData, "from_file", lambda path: trace)
    found = [(e.name, 1e-6 * e.start_ns, 1e-6 * e.end_ns) for e in profile.read_events("x", Program(TEXT))]
    causes, lines = attribute(*found)
    assert causes == {"matmuls": 1, "?": 2, "other ops": 3 + 4 + 5}
    assert lines["model.py:3"] == {"other_s": 4} and lines["kernel nvjet_sm90_tst_128x160"] == {"matmuls_s": 1}


def test_a_tpus_instructions_are_on_one_line_of_its_trace(monkeypatch):
    """Catches steps, or asynchronous copies in flight, that count as time of the core."""
    event = lambda name, start: SimpleNamespace(name=name, start_ns=1e6 * start, duration_ns=1e6, stats=())
    lines = [SimpleNamespace(name="Steps", events=[event("0", 0)]),
             SimpleNamespace(name="XLA Ops", events=[event("%fusion = f32[5,3] fusion(%loop)", 0), event("sum", 3)]),
             SimpleNamespace(name="Async XLA Ops", events=[event("start", 0)])]  # fmt: skip
    trace = SimpleNamespace(planes=[SimpleNamespace(name="/device:TPU:0", lines=lines)])
    monkeypatch.setattr(profile.jax.profiler.ProfileData, "from_file", lambda path: trace)
    assert [event.name for event in profile.read_events("x", Program(TEXT))] == ["fusion", "sum"]


def test_seconds_are_for_one_step_of_one_device():
    """Catches devices whose events hide each other, sums over steps, and idle time of only one device."""
    events = [("fusion", 0, 4, 0), ("fusion", 1, 3, 1), ("fusion", 10, 14, 0), ("sum", 10, 16, 1)]
    assert attribute(*events, steps=2, devices=2, step_s=9e-3)[0] == {"matmuls": 2.5, "data": 1.5, "idle": 5}


@pytest.mark.parametrize("text", ["20", "23:20", "0:3", "20:", "20:99"])
def test_steps_that_cannot_be_recorded_are_refused(text):
    """Catches a profile that never starts."""
    with pytest.raises(UserError, match=f"run.profile='{text}': use FIRST:LAST, as in 20:23, with 1 <= FIRST <= LAST"):
        preset("tiny", **{"run.profile": text, "run.steps": 60})
    assert preset("tiny", **{"run.profile": "7:7", "run.steps": 7}).run.profiled_steps == (7, 7)


def test_a_run_records_its_steps(home, tmp_path, capsys):
    """Catches a profiler that records other steps or never stops, a program that does not belong to the trace, and a
    table without matmuls or collectives."""
    short = ["--run.steps", "6", "--run.profile", "3:5", "--run.checkpoint_every", "6"]
    axes = ["--mesh", "fsdp=4,tensor=2", "--devices", "8"]
    assert main.main([*flags(home, tmp_path), *short, *axes]) == 0
    folder = tmp_path / "small/profile/process-00"
    about = json.loads((folder / "steps.json").read_text())
    assert (about["first"], about["last"], about["devices"], about["topology"]) == (3, 5, 8, "")
    assert f"steps 3 to 5 in {folder}" in capsys.readouterr().out
    assert profile.main([str(tmp_path / "small"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    seconds = found["measured"]
    assert found["steps"] == [3, 5] and found["planned"] is None and found["simulated"] is None
    assert {"matmuls", "other ops", "fsdp", "tensor", "idle"} <= set(seconds) and min(seconds.values()) >= 0
    assert sum(seconds.values()) == pytest.approx(found["step_s"])
    ours = [line["source"] for line in found["lines"] if line["measured_s"]]
    assert any(line.startswith("model.py:") for line in ours)
    assert profile.main([str(tmp_path / "small")]) == 0
    printed = capsys.readouterr().out
    assert "open it at https://ui.perfetto.dev" in printed and "exposed communication over fsdp" in printed


def test_a_run_without_a_profile_names_the_flag(tmp_path, capsys):
    """Catches a traceback."""
    assert profile.main([str(tmp_path / "x")]) == 2
    assert f"error: {tmp_path}/x has no run: it has no config.json" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps({"config": preset("tiny").to_dict()}))
    assert profile.main([str(tmp_path)]) == 2
    assert (
        "has no profile; record steps 20 to 23 with: python main.py .. --run.profile 20:23" in capsys.readouterr().err
    )


WORK = {"data.batch_size": 32, "data.seq_len": 1024, "work.remat": "full", "work.gather": "layer"}
CFG = preset("dense_124m", mesh="fsdp=2,tensor=2", **WORK)


def record_run(folder, topology, monkeypatch, matmuls_s, others_s, exposed_s, step_s):
    """Write the profile of a run of CFG, whose trace has these seconds for each of 2 steps and 4 devices."""
    process = folder / "profile/process-00"
    trace = process / "plugins/profile/2026_11_28_03_20_11/host.xplane.pb"
    trace.parent.mkdir(parents=True)
    trace.touch()
    (folder / "config.json").write_text(json.dumps({"config": CFG.to_dict()}))
    about = {"first": 3, "last": 4, "seconds": 2 * step_s, "devices": 4, "topology": topology}
    (process / "steps.json").write_text(json.dumps(about))
    (process / "step.hlo.gz").write_bytes(gzip.compress(TEXT.encode()))
    parts = (("fusion", matmuls_s), ("tanh.2", others_s), ("sum", exposed_s))
    starts = [0.0, matmuls_s, matmuls_s + others_s]
    events = [Event(str(device), 1e9 * (step * step_s + start), 1e9 * (step * step_s + start + time), name)
              for device in range(4) for step in range(2)
              for start, (name, time) in zip(starts, parts, strict=True)]  # fmt: skip
    monkeypatch.setattr(profile, "read_events", lambda path, program: events)
    monkeypatch.setattr(profile, "simulate", lambda *_: SimpleNamespace(causes={}, lines=[]))
    monkeypatch.setattr(profile.replay, "seconds_by_line", lambda *_: [])


@pytest.mark.parametrize("topology", ["v4:2x2x1", "h100:4"])
def test_a_plan_with_the_constants_of_a_run_takes_as_long_as_the_run(tmp_path, capsys, monkeypatch, topology):
    """Catches constants of one cause fitted to another, an interval without errors, and a file that is ignored."""
    run, file = tmp_path / "run", tmp_path / "constants.json"
    one = planner.plan(CFG, topology)
    parts = measured.causes(one, one.simulated)
    matmuls, others, wanted = 1.5 * parts["matmuls"], 3 * parts["other ops"], {"matmuls": 0.5, "others": 2.0}
    assert parts["bubble"] == 0
    planned = one.estimate.seconds + 0.5 * parts["matmuls"] + 2 * parts["other ops"]
    step_s = 1.25 * planned
    record_run(run, topology, monkeypatch, matmuls, others, 0.1 * planned, step_s)
    assert profile.main([str(run), "--calibrate", str(file)]) == 0
    printed = capsys.readouterr().out
    assert f"--topology {topology} --constants {file}" in printed and "devices wait +20.0% of the step" in printed
    found = json.loads(file.read_text())
    assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=1e-4)
    assert found["waits"] == pytest.approx(0.2, rel=1e-4) and found["step_s"] == pytest.approx(step_s)
    flags = [f"--{name}={value}" for name, value in WORK.items()]
    words = [
        "dense_124m",
        "--topology",
        topology,
        "--mesh",
        str(CFG.mesh),
        *flags,
        "--constants",
        str(file),
        "--json",
        "-",
    ]
    assert plan_command.main(words) == 0
    real = json.loads(capsys.readouterr().out)["estimate"]
    assert real["seconds"] == pytest.approx(step_s, rel=1e-3)
    assert (real["low"], real["high"], real["steps"]) == (None, None, 0)
    assert plan_command.main([*words[:-2], "--tokens", "1e9"]) == 0
    printed = capsys.readouterr().out
    said = f"with constants from steps 3 to 4 of {run}, 2026-11-28, {CFG.mesh} on {topology}; one run gives no interval"
    assert said in printed and "hours, " in printed, "a budget without an interval"


def test_a_run_without_a_plan_gives_no_constants(tmp_path, capsys, monkeypatch):
    """Catches a file with constants of nothing."""
    record_run(tmp_path / "run", "", monkeypatch, 1e-3, 1e-3, 1e-3, 4e-3)
    file = tmp_path / "constants.json"
    assert profile.main([str(tmp_path / "run"), "--calibrate", str(file)]) == 2
    assert capsys.readouterr().err == (
        f"error: --calibrate: {tmp_path}/run ran on devices whose speed is unknown, so it has no plan; record a run on "
        "TPUs or GPUs\n"
    )
    with pytest.raises(UserError, match="the trace has no matmuls, so nothing can be fitted"):
        measured.fit_run(one := planner.plan(CFG, "v4:2x2x1"), one.simulated, {"other ops": 1.0}, 1.0)
    assert not file.exists()
