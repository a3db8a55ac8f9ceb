"""Power cuts of a real file system on a loop device: `python -m tests.faults.file_system_power_cut
--file-system xfs --cuts 50 --json PATH`, as root.

The shutdown call of ext4 and xfs without a flush of their log loses what a power cut loses of a
file system: everything of its own that it had not made durable. Blocks that memd wrote through
O_DIRECT stay, as they are in the page cache of the loop device's file; that they are lost as well
is the subject of tests/native/powercut.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
TRAINER = ROOT / "build/release/powercut_trainer"
FILE_SYSTEMS = ("ext4", "xfs")
MAKE = {
    "ext4": ("mkfs.ext4", "-q", "-F"),
    "xfs": ("mkfs.xfs", "-q", "-f"),
}
# mkfs.xfs refuses less than 300 MiB. The file is sparse.
IMAGE_BYTES = 384 << 20
TIMEOUT_S = 120.0
# EXT4_IOC_SHUTDOWN and XFS_IOC_GOINGDOWN are both _IOR('X', 125, __u32).
SHUTDOWN = 0x8004587D
WITHOUT_LOG_FLUSH = 2
# sbin is not on everybody's PATH.
SEARCH_PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))
DEVICE_FAILED = 3


@dataclass(kw_only=True)
class Result:
    file_system: str
    seed: int
    cuts: int = 0
    # What was there after a cut: the last acknowledged operation, or the one that was under way.
    at_acknowledged: int = 0
    at_started: int = 0
    violations: list[str] = field(default_factory=list)


def why_not(file_system: str) -> str | None:
    """The reason why no such file system can be cut off here."""
    if os.geteuid() != 0:
        return "only root mounts file systems and makes loop devices"
    for program in (MAKE[file_system][0], "losetup", "mount", "umount"):
        if shutil.which(program, path=SEARCH_PATH) is None:
            return f"{program} is not installed"
    if not TRAINER.exists():
        return f"{TRAINER} is not built"
    known = Path("/proc/filesystems").read_text().split()
    if file_system not in known:
        return f"this kernel has no {file_system}"
    found = run("losetup", "--find", check=False)
    if found.returncode != 0:
        return f"there is no free loop device: {found.stderr.strip()}"
    return None


def run(*command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
        env={**os.environ, "PATH": SEARCH_PATH},
    )
    if check and done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr}")
    return done


@contextmanager
def loop_device(image: Path) -> Iterator[str]:
    device = run("losetup", "--find", "--show", str(image)).stdout.strip()
    try:
        yield device
    finally:
        run("losetup", "--detach", device)


@contextmanager
def mounted(device: str, folder: Path) -> Iterator[None]:
    run("mount", device, str(folder))
    try:
        yield
    finally:
        unmount(folder)


def unmount(folder: Path) -> None:
    """io_uring keeps the files of a process that ended a moment longer."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        done = run("umount", str(folder), check=False)
        if done.returncode == 0:
            return
        if "busy" not in done.stderr or time.monotonic() > deadline:
            raise RuntimeError(f"umount {folder}: {done.stderr}")
        time.sleep(0.02)


def drop_caches() -> None:
    Path("/proc/sys/vm/drop_caches").write_text("3")


def cut_power(folder: Path) -> None:
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.ioctl(opened, SHUTDOWN, struct.pack("I", WITHOUT_LOG_FLUSH))
    finally:
        os.close(opened)


def train_until_cut(folder: Path, seed: int, chance: random.Random) -> tuple[int, int]:
    """The last operation that was acknowledged, and the last one that was started."""
    acknowledged = started = -1
    with subprocess.Popen(
        [str(TRAINER), "train", str(folder / "data"), str(seed)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as trainer:
        assert trainer.stdout is not None
        assert trainer.stderr is not None
        try:
            operations = chance.randrange(3, 30)
            for line in trainer.stdout:
                word, number = line.split()
                if word == "started":
                    started = int(number)
                    operations -= 1
                    if operations == 0:
                        # Anywhere in an operation, which takes some milliseconds.
                        time.sleep(chance.random() * 0.01)
                        cut_power(folder)
                else:
                    acknowledged = int(number)
                    started = max(started, acknowledged)
            complaint = trainer.stderr.read()
            status = trainer.wait(TIMEOUT_S)
        finally:
            trainer.kill()
    if status != DEVICE_FAILED or operations > 0:
        raise RuntimeError(f"the trainer ended with {status} before the cut: {complaint}")
    return acknowledged, started


def verify(folder: Path, seed: int, first: int, last: int) -> tuple[int | None, str]:
    """Which of these operations the volume holds, or what it holds instead."""
    done = run(
        str(TRAINER), "verify", str(folder / "data"), str(seed), str(first), str(last), check=False
    )
    if done.returncode != 0:
        return None, done.stderr.strip()
    return int(done.stdout.split()[-1]), ""


def cut_often(file_system: str, cuts: int, seed: int, scratch: Path) -> Result:
    """One file system and one job, whose power is cut again and again."""
    result = Result(file_system=file_system, seed=seed)
    chance = random.Random(seed)
    image, folder = scratch / "image", scratch / "mounted"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(IMAGE_BYTES)
    run(*MAKE[file_system], str(image))
    with loop_device(image) as device, mounted(device, folder):
        (folder / "data").mkdir()
    for cut in range(cuts):
        with loop_device(image) as device, mounted(device, folder):
            acknowledged, started = train_until_cut(folder, seed, chance)
        # The new loop device and the recovery of the file system read from the image again.
        drop_caches()
        with loop_device(image) as device, mounted(device, folder):
            holds, difference = verify(folder, seed, acknowledged, started)
        result.cuts += 1
        if holds is None:
            result.violations.append(
                f"{file_system}, seed {seed}, cut {cut}: neither operation {acknowledged}, which "
                f"was acknowledged, nor {started}, which was started: {difference}"
            )
            break  # what was lost once is missing for ever
        result.at_acknowledged += holds == acknowledged
        result.at_started += holds != acknowledged
        show(result, cuts)
    return result


def show(result: Result, cuts: int) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{result.file_system}: {result.cuts} of {cuts} power cuts ")
        sys.stderr.flush()


@contextmanager
def scratch_folder() -> Iterator[Path]:
    parent = ROOT / "build/test-data"
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="power-cut-", dir=parent))
    try:
        yield folder
    finally:
        # Where something is still mounted, its files are not ours to delete.
        if f" {folder}/mounted " not in Path("/proc/mounts").read_text():
            shutil.rmtree(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--file-system", choices=FILE_SYSTEMS, required=True)
    parser.add_argument("--cuts", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    reason = why_not(arguments.file_system)
    if reason is not None:
        parser.error(reason)
    with scratch_folder() as scratch:
        result = cut_often(arguments.file_system, arguments.cuts, arguments.seed, scratch)
    text = json.dumps(asdict(result))
    sys.stdout.write(text + "\n")
    if arguments.json is not None:
        arguments.json.write_text(text + "\n")
    return 1 if result.violations else 0


if __name__ == "__main__":
    sys.exit(main())
