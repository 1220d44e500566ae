"""Claims about the hosts that the launch scripts are rehearsed on."""

import socket

import pytest

from tests.launch import rehearsal

pytestmark = pytest.mark.launch


def test_a_host_has_a_home_and_a_tmux_of_its_own():
    """Catches hosts that see each other's files or sessions: a script would pass that mixes them up."""
    with rehearsal.rehearse(2) as fleet:
        for host in fleet.hosts:
            fleet.ssh(host, "tmux new-session -d -s here sleep 60; touch ~/here")
            fleet.ssh(host, f"tmux rename-session -t here {host.name}")
            said = fleet.ssh(host, 'echo "$HOME"; echo "$SSH_CONNECTION"; tmux list-sessions -F "#S"; ls').split("\n")
            assert said[0] == str(host.home)
            assert said[1].split()[2] == host.address
            assert said[2] == host.name
        assert sorted(path.name for path in fleet.folder.glob("host*/home/here")) == ["here", "here"]


def test_nothing_is_left_of_a_rehearsal():
    """Catches servers, sessions and files that outlive the test that started them."""
    with rehearsal.rehearse(2) as fleet:
        fleet.ssh(fleet.hosts[0], "tmux new-session -d 'trap \"\" HUP TERM; sleep 61; sleep 62'")
        fleet.ssh(fleet.hosts[1], "setsid nohup sleep 63 > /dev/null 2>&1 < /dev/null & ")
        look, looks = fleet.processes, []

        def first_look_misses_one():  # as it does one that has not got its environment yet, or begins right after
            looks.append(look())
            return looks[0][:-1] if len(looks) == 1 else looks[-1]

        port = fleet.port
        assert len(fleet.processes()) >= 3
        fleet.processes = first_look_misses_one
    assert len(looks) > 1 and look() == []
    assert not fleet.folder.exists()
    for host in fleet.hosts:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host.address, port), timeout=1)


def test_the_whole_project_can_be_launched():
    """Catches a checkout that lacks a file which `python main.py` would import on a host."""
    with rehearsal.rehearse(1, whole=True) as fleet:
        done = fleet.run("setup_tpu.sh")
        assert done.returncode == 0, done.stderr
        (code,) = (fleet.hosts[0].axis / "commits").iterdir()
        ours = [rehearsal.ROOT / name for name in rehearsal.git(rehearsal.ROOT, "ls-files").splitlines()]
        assert rehearsal.ROOT / "main.py" in ours
        for file in ours:
            if file.exists():  # not one that is deleted, but not committed so
                assert (code / file.relative_to(rehearsal.ROOT)).read_bytes() == file.read_bytes(), file
