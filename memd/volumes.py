"""`memd volume`: what can be said of volumes, and done to them."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from memd import calibration
from memd.failures import Damaged, WrongUse
from memd.refusal import StatusCode
from memd.sizes import exact_size, format_size
from memd_native import (
    StatusError,
    format_volumes,
    inspect_volume,
    list_volumes,
    remove_volumes,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from memd_native import CheckedJob, CheckedVolume
    from memd_proto.v1 import check_pb2

# A check meets these on the volumes. All else is wrong use.
_FAILURES = {StatusCode.INTEGRITY: Damaged, StatusCode.DEVICE: click.ClickException}


@contextlib.contextmanager
def told_to_people() -> Iterator[None]:
    """A StatusError becomes a sentence and an exit code: 1 the device failed, 2 wrong use, 3
    damage."""
    try:
        yield
    except StatusError as error:
        raise _FAILURES.get(StatusCode(error.code), WrongUse)(str(error)) from error


@contextlib.contextmanager
def progress_bar(label: str, *, shows_rate: bool = True) -> Iterator[Callable[[int, int], None]]:
    """On a terminal only, on stderr, with the rate where it counts bytes; elsewhere nothing is
    written."""
    if not sys.stderr.isatty():
        yield lambda done, of_all: None
        return
    began = time.monotonic()
    with click.progressbar(
        length=1, label=label, file=sys.stderr, item_show_func=lambda text: text
    ) as bar:
        at = 0

        def show(done: int, of_all: int) -> None:
            nonlocal at
            bar.length = max(of_all, 1)
            rate = done / max(time.monotonic() - began, 1e-3)
            text = f"{format_size(done)} at {format_size(int(rate))}/s" if shows_rate else None
            bar.update(done - at, text)
            at = done

        yield show


def volume_record(volume: CheckedVolume | check_pb2.CheckedVolume) -> dict[str, Any]:
    incompatible, read_only_compatible, compatible = volume.features
    return {
        "path": volume.path,
        "bytes": volume.bytes,
        "uuid": volume.uuid,
        "index": volume.index,
        "sequence": volume.sequence,
        "format": volume.format,
        "features": {
            "incompatible": incompatible,
            "read_only_compatible": read_only_compatible,
            "compatible": compatible,
        },
        "in_use_by": volume.holder,
        "damaged_superblock_offsets": list(volume.damaged_superblock_offsets),
    }


def job_record(job: CheckedJob | check_pb2.CheckedJob) -> dict[str, Any]:
    return {
        "job": job.name,
        "job_id": job.job_id,
        "step": job.step,
        "shards": job.shard_count,
        "extents": job.extent_count,
        "bytes": job.bytes,
        "lost_shards": list(job.lost_shards),
        "snapshots": [
            {
                "snapshot": each.name,
                "step": each.step,
                "lost": each.is_lost,
                "extents": each.extent_count,
                "bytes": each.bytes,
                "lost_shards": list(each.lost_shards),
            }
            for each in job.snapshots
        ],
    }


def listed(folders: Sequence[Path]) -> dict[str, Any]:
    with told_to_people():
        volumes = list_volumes([str(path) for path in folders])
    return {
        "volumes": [volume_record(each) for each in volumes.volumes],
        "jobs": [
            {name: value for name, value in job_record(each).items() if name != "lost_shards"}
            for each in volumes.jobs
        ],
        "jobs_unknown": volumes.jobs_unknown,
    }


def volume_rows(found: dict[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for volume in found["volumes"]:
        damaged = len(volume["damaged_superblock_offsets"])
        features = [
            f"{kind}:{words:#x}" for kind, words in volume["features"].items() if words != 0
        ]
        rows.append(
            (
                volume["path"],
                format_size(volume["bytes"]),
                volume["uuid"],
                volume["format"],
                " ".join(features) or "none",
                str(volume["sequence"]),
                f"{damaged} of 4 damaged" if damaged else "clean",
                volume["in_use_by"] or "nobody",
            )
        )
    return rows


def snapshots_text(job: dict[str, Any]) -> str:
    """How many the job has, and which of them nobody can go back to."""
    lost = [each["snapshot"] for each in job["snapshots"] if each["lost"]]
    return ", ".join([str(len(job["snapshots"])), *(f"{name} is lost" for name in lost)])


VOLUME_HEADER = (
    "volume",
    "size",
    "set",
    "format",
    "features",
    "sequence",
    "superblocks",
    "in use by",
)


def format_anew(folders: Sequence[Path], *, nvme: int, force: bool, yes: bool) -> float:
    """Makes volumes where there are none; with `force` it removes those that are there first.
    Returns the seconds it took."""
    held = [path for path in folders if (path / "memd.volume").exists()]
    if held and not force:
        raise WrongUse(
            f"{held[0] / 'memd.volume'} exists; `memd volume list` shows what it holds, and "
            "--force removes it with all its jobs"
        )
    for path in held:
        found = listed_alone(path)
        if found["in_use_by"]:
            raise WrongUse(f"{path} is in use by {found['in_use_by']}; stop that daemon")
        uuid = found["uuid"]
        if not yes:
            if not sys.stdin.isatty():
                raise WrongUse(
                    f"{path / 'memd.volume'} would be removed with all its jobs; say --yes, or "
                    "call this from a terminal and type the uuid of its set"
                )
            typed = click.prompt(
                f"All jobs on {path / 'memd.volume'} will be gone. Type the uuid of its set "
                f"({uuid})",
                err=True,
            )
            if typed.strip() != uuid:
                raise WrongUse(f"{typed.strip()!r} is not {uuid}; nothing was removed")
        with told_to_people():
            remove_volumes([str(path)], uuid=bytes.fromhex(uuid))
    measured = calibration.measure_for_new_volumes(folders, volume_bytes=nvme // len(folders))
    with told_to_people(), progress_bar(f"formatting {exact_size(nvme)}") as progress:
        seconds = format_volumes(
            [str(path) for path in folders], nvme_bytes=nvme, progress=progress
        )
    calibration.keep_all(measured)
    return seconds


def listed_alone(folder: Path) -> dict[str, Any]:
    """One volume's own words, whether or not the rest of its set is there."""
    with told_to_people():
        return volume_record(inspect_volume(str(folder)))
