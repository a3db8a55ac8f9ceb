"""The verification in the background of a real daemon."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client.parser import text_string_to_metric_families

from tests.daemons import TIMEOUT_S
from tests.golden import image

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.daemons import Daemon, Daemons

PACKED = Path(image.__file__).parent / "format-1.0.xz.b64"
BLOCK = 4096


def figures(daemon: Daemon) -> dict[str, float]:
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(daemon.get("/metrics"))
        for sample in family.samples
        if sample.name.startswith("memd_scrub_")
    }


def status(daemon: Daemon) -> dict[str, Any]:
    command = [sys.executable, "-m", "memd", "status", "--json", "--socket", str(daemon.socket)]
    answer: dict[str, Any] = json.loads(subprocess.check_output(command, timeout=TIMEOUT_S))
    return answer


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def unpacked(daemons: Daemons, name: str) -> tuple[Path, str]:
    """The image as a daemon's volume, and its size as a setting."""
    folder = daemons.data_folder(name)
    image.unpack(PACKED, folder)
    volume = folder / "memd.volume"
    return volume, f"{volume.stat().st_size}B"


def test_a_whole_volume_is_gone_through_and_sighup_changes_the_rate(
    daemons: Daemons, tmp_path: Path
) -> None:
    file = tmp_path / "memd.toml"
    file.write_text('scrub = "0"\n')
    _, nvme = unpacked(daemons, "whole")
    daemon = daemons.start("--config", str(file), name="whole", nvme=nvme)
    assert status(daemon)["scrub"]["bytes_per_second"] == 0
    assert figures(daemon)["memd_scrub_bytes_total"] == 0
    assert figures(daemon)["memd_scrub_last_pass_timestamp_seconds"] == 0
    file.write_text('scrub = "1GiB"\n')
    daemon.process.send_signal(signal.SIGHUP)
    wait_until(lambda: figures(daemon)["memd_scrub_last_pass_timestamp_seconds"] > 0)
    found = figures(daemon)
    assert found["memd_scrub_bytes_total"] > 4 << 20
    assert found["memd_scrub_errors_total"] == 0
    told = status(daemon)
    assert told["scrub"]["bytes_per_second"] == 1 << 30
    assert told["scrub"]["pass_bytes"] == told["scrub"]["pass_bytes_all"]
    assert not any(job["lost_shards"] for job in told["jobs"])
    assert daemon.stop() == 0


def test_a_flipped_byte_is_found_before_anybody_reads_it(daemons: Daemons) -> None:
    volume, nvme = unpacked(daemons, "flipped")
    data = bytearray(volume.read_bytes())
    block = image.pattern("blob", image.UINT8, BLOCK)
    at = next(at for at in range(2 << 20, len(data), BLOCK) if data[at : at + BLOCK] == block)
    data[at + 5] ^= 1
    volume.write_bytes(data)
    environ = {"MEMD_SCRUB": "1GiB"}
    daemon = daemons.start(name="flipped", nvme=nvme, environ=environ)
    wait_until(lambda: figures(daemon)["memd_scrub_errors_total"] == 1)
    told = status(daemon)
    job = next(job for job in told["jobs"] if job["name"] == image.JOB)
    assert job["lost_shards"] == ["blob"]
    assert f"shard {image.JOB}/blob: " in told["scrub"]["last_error"]
    assert f"{volume} at {at}, " in told["scrub"]["last_error"]
    assert not next(job for job in told["jobs"] if job["name"] == image.OTHER_JOB)["lost_shards"]
    assert daemon.stop() == 0
