"""Both programs of a race have the same shapes, and the command refuses what it cannot race."""

import json
import math
import re

import pytest

from bench import peers
from config import preset
from plan import replay
from plan.count import costs


@pytest.mark.parametrize("name", peers.PEERS)
def test_both_programs_have_the_same_shapes(name):
    """Catches settings with another number of parameters or tokens than the other trainer's program."""
    peer = peers.PEERS[name]
    ours = preset(peer.preset, **peer.settings, mesh=peer.mesh)
    header = replay.read_text(str(peers.FIXTURES / peer.file)).partition("\n")[0]
    arguments = re.search(r"entry_computation_layout=\{\((.*?)\)->", header)[1]
    arrays = [(dtype, [*map(int, filter(None, sizes.split(",")))])
              for dtype, sizes in re.findall(r"\b([a-z]+\d+)\[([\d,]*)\]", arguments)]  # fmt: skip
    floats = sum(math.prod(sizes) for dtype, sizes in arrays if dtype == "f32")
    assert ours.mesh.devices * floats == pytest.approx(3 * costs.parameters(ours.model)[0], rel=0.001), (
        "parameters and both moments"
    )
    tokens = {math.prod(sizes) for dtype, sizes in arrays if dtype == "s32" and len(sizes) == 2}
    assert tokens == {ours.data.batch_size * ours.data.seq_len // ours.mesh.devices}


def test_a_race_gives_the_other_attention_the_time_of_ours(capsys, monkeypatch):
    """Catches kernels that count as other matmuls too, and a second total that adds our attention to theirs."""
    peer = peers.PEERS["mixtral_8x7b"]
    monkeypatch.setattr(peers, "KERNELS", {peers.ATTENTION: "in gmm", peers.EXPERTS: "wrap_flash_attention"})
    monkeypatch.setattr(peers, "check_ours", lambda *_: None)
    assert not peers.main(["mixtral_8x7b", "--hlo", str(peers.FIXTURES / peer.file), "--json"])
    found = json.loads(capsys.readouterr().out)
    ours, theirs = found["ours"], found[peer.trainer]
    causes = [*peer.kernels, *replay.CAUSES.values(), "exposed communication"]
    assert ours["step"] == theirs["step"] == pytest.approx(sum(theirs[name] for name in causes))
    assert theirs[peers.ATTENTION] == ours[peers.EXPERTS] and theirs["matmuls"] == pytest.approx(ours["matmuls"])
    slower = ours[peers.ATTENTION] - theirs[peers.ATTENTION]
    assert slower > 1
    at_peak, estimated = ({name: side[label] for name, side in (("ours", ours), ("theirs", theirs))}
                          for label in list(theirs)[-2:])  # fmt: skip
    assert at_peak == pytest.approx({"ours": ours["step"], "theirs": theirs["step"] + slower})
    assert estimated["theirs"] - estimated["ours"] == pytest.approx(slower) and estimated["ours"] > ours["step"]


THEIRS = peers.FIXTURES / peers.PEERS["llama2_7b"].file
WRONG = {
    "mixtral": "unknown program 'mixtral'; did you mean 'mixtral_8x7b'? known: llama2_7b, mixtral_8x7b, llama3_8b_32k",
    "--hlo step.hlo": "--hlo has one step; name its program (llama2_7b, mixtral_8x7b, llama3_8b_32k): bench.peers "
    "PROGRAM --hlo FILE",
    "llama2_7b mixtral_8x7b --hlo step.hlo": "--hlo has one step; name its program (",
    f"llama2_7b --hlo {THEIRS}": f"--hlo {THEIRS}: not our step with these shapes; this writes it: python -m plan "
    "llama3_8b --topology v5e:4x4 --mesh fsdp=16 --work.remat full",
}


@pytest.mark.parametrize("flags", WRONG)
def test_what_cannot_be_raced_is_refused_in_one_line(flags, capsys):
    """Catches a traceback, and a text that is raced against the wrong program."""
    assert peers.main(flags.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {WRONG[flags]}") and error.count("\n") == 1
