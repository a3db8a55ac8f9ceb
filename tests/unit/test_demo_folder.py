import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from memd.demo import folder as demo_folder
from memd.demo.folder import (
    FolderError,
    check_folder,
    default_parent,
    file_system_type,
    volume_folder,
)

TMPFS = 0x01021994


def on_disk() -> Path:
    """The build folder's file system; the temporary folder may be tmpfs."""
    parent = Path(__file__).parents[2] / "build" / "tests"
    parent.mkdir(parents=True, exist_ok=True)
    return parent


def test_a_folder_on_tmpfs_is_refused() -> None:
    shared_memory = Path("/dev/shm")
    if not shared_memory.is_dir() or file_system_type(shared_memory) != TMPFS:
        pytest.skip("no tmpfs at /dev/shm")
    with (
        pytest.raises(FolderError, match=r"on tmpfs.*--data"),
        volume_folder(shared_memory, bytes_needed=1),
    ):
        pytest.fail("entered a folder on tmpfs")


def test_every_file_system_in_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (0x01021994, 0x858458F6, 0x958458F6):
        monkeypatch.setattr(demo_folder, "file_system_type", lambda _folder, number=number: number)
        with pytest.raises(FolderError, match="nothing would be saved"):
            check_folder(on_disk(), bytes_needed=1)


def test_a_cache_folder_that_cannot_be_made_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with (
        pytest.raises(FolderError, match=r"can't be made \(Not a directory\).*--data"),
        volume_folder(None, bytes_needed=1),
    ):
        pytest.fail("entered a folder below a file")


def test_a_full_disk_is_refused_with_both_sizes() -> None:
    with pytest.raises(FolderError, match=r"MiB free.*needs 1099511627776 MiB.*--params"):
        check_folder(on_disk(), bytes_needed=2**60)


def test_a_folder_that_does_not_exist_is_refused() -> None:
    with (
        pytest.raises(FolderError, match="not a folder"),
        volume_folder(on_disk() / "missing", bytes_needed=1),
    ):
        pytest.fail("entered a folder that does not exist")


def test_the_folder_is_fresh_and_gone_afterwards() -> None:
    with (
        volume_folder(on_disk(), bytes_needed=1) as first,
        volume_folder(on_disk(), bytes_needed=1) as second,
    ):
        assert first != second
        (first / "memd.volume").write_bytes(b"state")
    assert not first.exists()
    assert not second.exists()


def test_a_relative_folder_is_named_absolutely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(on_disk())
    with volume_folder(Path(), bytes_needed=1) as folder:
        assert folder.is_absolute()
        assert folder.parent == on_disk().resolve()


def test_the_folder_is_gone_after_an_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt), volume_folder(on_disk(), bytes_needed=1) as folder:
        raise KeyboardInterrupt
    assert not folder.exists()


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_the_folder_is_gone_when_the_process_is_told_to_end(signal_number: int) -> None:
    program = (
        "import signal, sys, time; from pathlib import Path\n"
        # A shell's background jobs, and what they start, ignore it.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from memd.demo.folder import volume_folder\n"
        "with volume_folder(Path(sys.argv[1]), bytes_needed=1) as folder:\n"
        "    (folder / 'memd.volume').write_bytes(b'state')\n"
        "    sys.stdout.write(f'{folder}\\n'); sys.stdout.flush(); time.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(on_disk())],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert process.stdout is not None
    with process:
        folder = Path(process.stdout.readline().strip())
        assert folder.is_dir()
        process.send_signal(signal_number)
        process.wait(timeout=30)
    assert process.returncode != 0
    assert not folder.exists()


def test_the_volume_lies_in_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somebody")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert default_parent() == Path("/cache/memd")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_parent() == Path("/somebody/.cache/memd")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_parent() == Path("/somebody/.cache/memd")
