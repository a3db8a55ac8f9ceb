"""`memd snapshot export`."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import click

from memd.export.formats import format_named
from memd.export.run import SnapshotExport
from memd.refusal import Refused, StatusCode
from memd.sizes import format_size, parse_size
from memd.volumes import progress_bar

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from memd.client import DaemonClient
    from memd.export.target import Target

_FILE_BYTES = 50_000_000_000  # as save_safetensors, and transformers' save_pretrained
_BEGUN = b"begun"
_NICER = 10


def run(
    connect: Callable[[], DaemonClient],
    *,
    job: str,
    snapshot: str,
    path: Path,
    file_format: str,
    max_file: str | None,
    begun_fd: int | None,
) -> dict[str, Any]:
    """Exports, with progress on a terminal. `begun_fd`: of whoever began this in the background."""

    def begun(target: Target) -> None:
        if begun_fd is not None:
            _detach(target, begun_fd)

    made = format_named(file_format)
    # Training that wants a processor comes first.
    os.nice(_NICER)
    with progress_bar("exporting") as progress:
        export = SnapshotExport(
            job=job,
            snapshot=snapshot,
            path=path,
            file_format=made,
            file_bytes_max=_file_bytes(max_file),
            connect=connect,
            progress=progress,
            tell=lambda text: click.echo(text, err=True),
            begun=begun,
        )
        try:
            return export.run()
        except KeyboardInterrupt:
            click.echo(f"\nstopped; the same command goes on with {path}.partial", err=True)
            raise


def _file_bytes(text: str | None) -> int:
    try:
        return _FILE_BYTES if text is None else parse_size(text)
    except ValueError as error:
        raise click.UsageError(f"--max-file: {error}") from error


def run_in_background(arguments: list[str]) -> int:
    """Begins the command `arguments` in a process of its own, and returns its number once it has
    begun to write. Refused with its error where it does not."""
    read_fd, write_fd = os.pipe()
    try:
        child = subprocess.Popen(
            [sys.executable, "-m", "memd", *arguments, "--begun-fd", str(write_fd)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=(write_fd,),
            start_new_session=True,
        )
    finally:
        os.close(write_fd)
    with os.fdopen(read_fd, "rb") as begun:
        # It ends with the child too, if that says nothing.
        if begun.read() == _BEGUN:
            child.returncode = 0  # nobody waits for it
            return child.pid
    _, text = child.communicate()
    raise Refused(
        StatusCode.UNAVAILABLE, text.decode(errors="replace").strip().removeprefix("Error: ")
    )


def _detach(target: Target, begun_fd: int) -> None:
    """Messages go to a file beside what was written from here on, and nobody waits."""
    messages = os.open(
        target.log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o666
    )
    sys.stderr.flush()
    os.dup2(messages, 2)
    os.close(messages)
    os.write(begun_fd, _BEGUN)
    os.close(begun_fd)


def tell_end(report: dict[str, Any]) -> None:
    rate = int(report["bytes"] / max(report["seconds"], 1e-6))
    click.echo(
        f"{report['job']}: snapshot {report['snapshot']} of step {report['step']} is in "
        f"{report['path']}: {len(report['files'])} files, {format_size(report['bytes'])}, "
        f"{format_size(rate)}/s"
    )
