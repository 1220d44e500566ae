"""Claims about setup_tpu.sh: a folder for each commit, packages once for each lock, over real ssh, make and pip."""

import json
import re
import subprocess

import pytest

from launch import hosts
from tests.launch import rehearsal
from tests.launch.rehearsal import wait_until

pytestmark = pytest.mark.launch


@pytest.fixture
def fleet():
    with rehearsal.rehearse(2) as fleet:
        (fleet.checkout / "requirements.txt").write_text("# no packages: what installs them is real, and quick\n")
        rehearsal.commit(fleet.checkout, "A lock of nothing")
        yield fleet


def made(fleet):
    """When each commit was unpacked, and each lock installed."""
    patterns = "host*/home/*/commits/*/.shipped", "host*/home/*/packages/*/.venv/installed"
    return [{path: path.stat().st_mtime_ns for path in fleet.folder.glob(pattern)} for pattern in patterns]


def test_a_host_is_put_in_order_once(fleet):
    """Catches a second setup that installs again, a commit over another, and packages that two locks share."""
    first = fleet.run("setup_tpu.sh", VENV="")
    assert first.returncode == 0, first.stderr
    commit = rehearsal.git(fleet.checkout, "rev-parse", "HEAD")
    for host in fleet.hosts:
        assert f"{host.name}  ready\n" in first.stdout
        assert re.search(rf"{host.name}  3\.\d+\.\d+ +none +\d+ +0 +{host.address}\n", first.stdout)
        code = host.axis / "commits" / commit
        assert (code / "launcher.sh").read_bytes() == (fleet.checkout / "launcher.sh").read_bytes()
        assert (code / ".venv").resolve().parent.parent == host.axis / "packages"
        (code / "runs").resolve().joinpath("kept").touch()
    commits, packages = made(fleet)
    assert (len(commits), len(packages)) == (2, 2)

    assert fleet.run("setup_tpu.sh", VENV="").returncode == 0
    assert made(fleet) == [commits, packages]

    (fleet.checkout / "note.txt").write_text("another commit, the same lock\n")
    second = rehearsal.commit(fleet.checkout, "A note")
    assert fleet.run("setup_tpu.sh", VENV="").returncode == 0
    now, same = made(fleet)
    assert same == packages
    assert now.items() > commits.items()
    for host in fleet.hosts:
        assert (host.axis / "commits" / second / "runs/kept").exists(), "training does not go on in another commit"

    (fleet.checkout / "requirements.txt").write_text("./gone.whl --hash=sha256:" + "0" * 64 + "\n")
    rehearsal.commit(fleet.checkout, "A lock that cannot be installed")
    failed = fleet.run("setup_tpu.sh", VENV="")
    assert failed.returncode == 1
    assert (
        len(re.findall(r"host0\d  FAILED: cannot install the packages: .*; see .*/packages/\w+/log\n", failed.stderr))
        == 2
    )


def test_half_a_commit_is_never_there(fleet):
    """Catches a commit of which a part arrived, which the next launch would run, and parts that stay for ever."""
    commit = rehearsal.git(fleet.checkout, "rev-parse", "HEAD")
    archive = rehearsal.git(fleet.checkout, "archive", "--format=tar.gz", commit, text=False)
    request = {"mark": "MARK", "folder": "axis-by-axis", "keys": False, "do": "receive", "commit": commit}
    request |= {"venv": f"{rehearsal.ROOT}/.venv", "free": True}
    source = hosts.agent_source().encode()
    sent = b"%d\n%s%s\n" % (len(source), source, json.dumps(request).encode())
    words = f"sh -c '{hosts.BOOT}' axis-by-axis receive"
    host = fleet.hosts[0]
    said = fleet.ssh(host, words, input=sent + archive[: len(archive) // 2])
    assert said.startswith(f'MARK {{"error": "the files of commit {commit} did not arrive completely')
    assert list((host.axis / "commits").iterdir()) == []

    ssh = ["ssh", "-F", f"{fleet.folder}/ssh_config", host.name, words]
    with subprocess.Popen(ssh, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as sending:
        sending.stdin.write(sent + archive[: len(archive) // 2])
        sending.stdin.flush()
        wait_until(lambda: list((host.axis / "commits").iterdir()))
        fleet.end_processes()  # the host restarts: nothing can clean up
    assert len(list((host.axis / "commits").iterdir())) == 1
    assert '"answer"' in fleet.ssh(host, words, input=sent + archive)
    assert [path.name for path in (host.axis / "commits").iterdir()] == [commit]
