"""What deploy/ ships is checked by the programs that will read it."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

from memd import config
from tests.unit import reference

DEPLOY = Path(__file__).parents[2] / "deploy"
SERVICE = DEPLOY / "systemd" / "memd.service"
SOCKET = DEPLOY / "systemd" / "memd.socket"
RULES = DEPLOY / "prometheus" / "rules.yml"
ALERT_TESTS = Path(__file__).with_name("alerts.yml")


def run(program: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed; `make test` installs it")
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False)


def settings(unit: Path) -> dict[str, list[str]]:
    """Every setting of a unit with all its values; a unit may repeat one, an INI file may not."""
    values: dict[str, list[str]] = defaultdict(list)
    for line in unit.read_text(encoding="utf-8").splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            values[name].append(value)
    return values


def test_the_service_is_exposed_no_more_than_2_0() -> None:
    # --threshold takes tenths.
    answer = run("systemd-analyze", "security", "--offline=yes", "--threshold=20", SERVICE)
    assert answer.returncode == 0, answer.stdout[-2000:] + answer.stderr


def test_the_metrics_are_reachable_from_this_machine_and_from_no_other() -> None:
    service = settings(SERVICE)
    assert service["IPAddressDeny"] == ["any"]
    assert service["IPAddressAllow"] == ["localhost"]
    assert "AF_INET" in service["RestrictAddressFamilies"][0].split()


@pytest.mark.parametrize("unit", [SERVICE, SOCKET], ids=lambda unit: unit.name)
def test_systemd_accepts_the_unit(unit: Path) -> None:
    answer = run("systemd-analyze", "verify", "--man=no", SERVICE, SOCKET)
    complaints = [
        line
        for line in answer.stderr.splitlines()
        if line.startswith((unit.name, str(unit))) and "is not executable" not in line
    ]
    assert complaints == []


def test_the_service_keeps_the_system_calls_of_its_data_plane() -> None:
    assert settings(SERVICE)["SystemCallFilter"] == ["@system-service"]
    answer = run("systemd-analyze", "syscall-filter", "--no-pager")
    groups: dict[str, set[str]] = defaultdict(set)
    for line in answer.stdout.splitlines():
        if line.startswith("@"):
            group = line.strip()
        elif (name := line.strip()) and not name.startswith("#"):
            groups[group].add(name)

    def members(group: str) -> set[str]:
        return {
            member
            for name in groups[group]
            for member in (members(name) if name.startswith("@") else {name})
        }

    needed = {"io_uring_setup", "io_uring_enter", "io_uring_register", "memfd_create", "pidfd_open"}
    needed |= {"mlock2", "fallocate", "fdatasync", "sched_setaffinity"}
    assert needed - members("@system-service") == set()


def test_the_socket_passes_packets_to_a_descriptor_called_attach() -> None:
    socket = settings(SOCKET)
    assert socket["ListenSequentialPacket"] == ["/run/memd/attach.sock"]
    assert socket["FileDescriptorName"] == ["attach"]
    assert socket["SocketMode"] == ["0660"]
    assert socket["SocketUser"] == socket["SocketGroup"] == ["memd"]


def test_stopping_the_service_leaves_the_sockets_folder_to_the_socket() -> None:
    # With `no` or `restart`, stopping memd.service would remove attach.sock under memd.socket.
    assert settings(SERVICE)["RuntimeDirectoryPreserve"] == ["yes"]


def test_prometheus_accepts_the_scrape_configuration() -> None:
    answer = run("promtool", "check", "config", DEPLOY / "prometheus" / "prometheus.yml")
    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_each_alert_fires_when_it_should_and_not_before() -> None:
    answer = run("promtool", "test", "rules", ALERT_TESTS)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    tests = ALERT_TESTS.read_text(encoding="utf-8")
    for name in re.findall(r"- alert: (\w+)", RULES.read_text(encoding="utf-8")):
        outcomes = re.findall(rf"alertname: {name}\n +eval_time: \w+\n +exp_alerts:( \[\])?", tests)
        assert set(outcomes) == {"", " []"}, name


def test_alerts_watch_metrics_that_the_daemon_has() -> None:
    watched = set(re.findall(r"\bmemd_\w+", RULES.read_text(encoding="utf-8")))
    listed = set(re.findall(r"^\| `(memd_\w+)` \|", reference.generate(), re.MULTILINE))
    # A label, and the series that a histogram has.
    assert watched - {"memd_job"} - listed == {"memd_commit_seconds_bucket"}


def test_the_example_configuration_is_one_the_daemon_takes() -> None:
    settings_file = DEPLOY / "memd.toml"
    example = config.load(flags={}, environ={}, file=settings_file)
    given = {name for name, origin in example.origins.items() if origin == str(settings_file)}
    assert given == {"socket", "data", "host", "nvme", "metrics", "scrub", "huge_pages"}
    assert settings(SOCKET)["ListenSequentialPacket"] == [str(example.settings.attach_socket)]
    assert example.settings.data == (Path("/var/lib") / settings(SERVICE)["StateDirectory"][0],)


def test_the_scrape_configuration_asks_where_the_daemon_answers() -> None:
    scrape = (DEPLOY / "prometheus" / "prometheus.yml").read_text(encoding="utf-8")
    example = config.load(flags={}, environ={}, file=DEPLOY / "memd.toml")
    assert f'"{example.settings.metrics}"' in scrape
    assert "job_name: memd\n" in scrape
