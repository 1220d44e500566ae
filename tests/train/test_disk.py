"""A run whose shared disk disappears exits so that it is restarted, and names the disk as the cause."""

import errno
import shutil

import jax
import pytest

import main
from bench import soak
from tests.train.small_run import run, snapshot
from train import checkpoint, storage
from train.directory import Metrics
from train.hosts.watchdog import LOST
from utils import DiskLost


def rename_before(monkeypatch, module, name, directory, calls):
    """Rename a run's directory, as if its disk were gone, before the function is called for the `calls`-th time."""
    function, left = getattr(module, name), [calls]

    def later(*args, **kwargs):
        left[0] -= 1
        if left[0] == 0:
            directory.rename(directory.with_name("unmounted"))
        return function(*args, **kwargs)

    monkeypatch.setattr(module, name, later)


@pytest.mark.parametrize(("module", "name", "calls"), [
    (Metrics, "write", 4), (main.checkpoint, "save", 1), (checkpoint, "write_manifest", 3), (main, "finish", 1),
])  # fmt: skip
def test_a_directory_that_vanishes_ends_the_run_for_a_restart(
    partway, straight, tmp_path, monkeypatch, module, name, calls
):
    """Catches status 2, after which nothing restarts; "No such file or directory: metrics.jsonl"; and a restart that
    trains from step 0 in the empty mount point, which hides the real run."""
    argv, directory = partway
    (tmp_path / "launch").mkdir()
    monkeypatch.setenv("AXIS_ALIVE", str(tmp_path / "launch/alive"))
    with monkeypatch.context() as patched:
        rename_before(patched, module, name, directory, calls)
        status, _, err = run(argv)
    assert (status, err) == (LOST, f"error: {directory} is gone: is the shared disk mounted?\n")
    assert not directory.exists()

    unmounted = tmp_path / "unmounted"
    before = snapshot(unmounted)
    status, out, err = run(argv)
    assert (status, out) == (LOST, "")
    assert err == f"error: {directory} is still gone: is the shared disk mounted? If you removed it, launch again\n"
    assert snapshot(unmounted) == before and not directory.exists()

    unmounted.rename(directory)
    status, _, err = run(argv)
    assert (status, err) == (0, "")
    assert soak.differences(argv, directory, straight) == []


def test_a_removed_checkpoints_folder_is_a_user_error(partway, monkeypatch):
    """Catches a run that restarts again and again although its disk is there, and only checkpoints/ was removed."""
    argv, directory = partway
    save = main.checkpoint.save

    def removed(*args):
        shutil.rmtree(directory / "checkpoints")
        save(*args)

    monkeypatch.setattr(main.checkpoint, "save", removed)
    status, _, err = run(argv)
    assert status == 2 and err.startswith(f"error: the checkpoint of step 52 cannot be written to {directory}/checkpo")


@pytest.mark.parametrize(("error", "reason"), [
    (OSError(errno.ESTALE, "Stale file handle"), "does not answer (Stale file handle)"),
    (OSError(errno.EIO, "Input/output error", "RUN/metrics.jsonl"), "does not answer (Input/output error)"),
    (OSError(errno.ENOTCONN, "not connected", "RUN"), "does not answer (Transport endpoint is not connected)"),
    (ValueError(f"Error writing [os_error_code='{errno.ENODEV}']"), "does not answer (No such device)"),
    (OSError(errno.EIO, "Input/output error", "/tokens/train.bin"), None),
    (OSError(errno.ENOSPC, "No space left on device", "RUN/metrics.jsonl"), None),
    (ValueError(f"Error writing [os_error_code='{errno.ENOSPC}']"), None),
    (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), None),
    (OSError(errno.EDQUOT, "Disk quota exceeded"), None),
    (OSError(errno.EROFS, "Read-only file system"), None),
    (FileNotFoundError(errno.ENOENT, "No such file or directory", "/tokens/train.bin"), None),
    (RuntimeError("Gloo AllGather failed"), None),
])  # fmt: skip
def test_which_errors_mean_a_lost_disk(tmp_path, error, reason):
    """Catches a full disk that restarts in vain, and a file server failure that does not restart."""
    if getattr(error, "filename", None):
        error.filename = error.filename.replace("RUN", str(tmp_path))
    assert storage.explain_lost_disk(error, tmp_path) == (
        reason and f"{tmp_path} {reason}: is the shared disk mounted?"
    )
    assert (
        storage.explain_lost_disk(error, tmp_path / "gone") == f"{tmp_path}/gone is gone: is the shared disk mounted?"
    )


def test_a_host_without_run_files_reports_no_lost_disk(tmp_path):
    """Catches a host that shares no disk and blames one for an error of its tokens."""
    with pytest.raises(FileNotFoundError), storage.raise_disk_lost(tmp_path / "nowhere", lambda: False):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "/tokens/train.bin")


def test_a_bucket_is_not_a_disk(tmp_path):
    """Catches a failed request to a bucket that asks for the shared disk."""
    with (
        pytest.raises(TimeoutError),
        storage.raise_disk_lost(storage.BucketDirectory("gs://b/r", tmp_path), lambda: True),
    ):
        raise TimeoutError(errno.ETIMEDOUT, "timed out")


def test_a_save_in_the_background_names_the_disk(tmp_path, monkeypatch):
    """Catches a stale file handle in a save that ends the run with status 2, like a full disk."""
    stale = ValueError(f"Error writing local file [os_error_code='{errno.ESTALE}']")
    monkeypatch.setattr(checkpoint, "write_manifest", lambda *_: (_ for _ in ()).throw(stale))
    said = rf"{tmp_path} does not answer \(Stale file handle\): is the shared disk mounted\?"
    with pytest.raises(DiskLost, match=said), checkpoint.Saver(tmp_path / "checkpoints") as saver:
        checkpoint.save(saver, 4, {"x": jax.numpy.zeros(3)}, {})
