"""The command line: what it prints, for people and for programs, and its exit codes."""

from __future__ import annotations

import json
import os
import pwd
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest
from click.testing import CliRunner, Result

from memd import __version__, attach, config
from memd.attach import AttachListener
from memd.cli import main
from memd.peers import Peers
from memd.service.control import ControlServer
from memd_native import ShardSpec
from tests.unit.fake_native import Activity, FakeServer, as_server

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def only_the_settings_of_the_test(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(config, "DEFAULT_FILE", tmp_path / "none.toml")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeServer]:
    """A daemon at `tmp_path`, around a data plane that is made up."""
    server, peers = FakeServer(), Peers()
    control = ControlServer(as_server(server), peers=peers, jobs_max=lambda: 64)
    control.listen(tmp_path / "memd.sock")
    listener = AttachListener(
        attach.bind(tmp_path / "attach.sock"),
        server=as_server(server),
        peers=peers,
        control_address=f"unix://{tmp_path}/memd.sock",
    )
    listener.start()
    yield server
    control.stop(grace_s=1)
    listener.stop()


def memd(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def test_the_version_is_that_of_the_distribution() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == __version__
    assert memd("version").output == memd("--version").output == f"memd {__version__}\n"
    assert json.loads(memd("version", "--json").output) == {"version": __version__}


def test_config_shows_each_setting_with_unit_and_origin(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "memd.toml"
    file.write_text('nvme = "20GiB"\n')
    fragment = tmp_path / "conf.d" / "site.toml"
    fragment.parent.mkdir()
    fragment.write_text("max_jobs = 7\n")
    monkeypatch.setenv("MEMD_IO_DEPTH", "8")
    given = ("config", "--config", str(file), "--host", "1536MiB", "--data", "/a", "--data", "/b")
    rows = {line.split()[0]: line.split()[1:] for line in memd(*given).output.splitlines()}
    assert rows["host"] == ["1536MiB", "--host"]
    assert rows["nvme"] == ["20GiB", str(file)]
    assert rows["max_jobs"] == ["7", str(fragment)]
    assert rows["io_depth"] == ["8", "MEMD_IO_DEPTH"]
    assert rows["data"] == ["/a:/b", "--data"]
    assert rows["huge_pages"] == ["false", "default"]
    (tmp_path / "memd.calibration").write_text(
        json.dumps({"version": 1, "depth": 4, "chunk_bytes": 1 << 20})
    )
    shown = json.loads(memd(*given, "--data", str(tmp_path), "--json").output)
    assert shown["path /a"] == {"value": "depth 8, chunks of 1MiB", "origin": "io_depth"}
    assert shown[f"path {tmp_path}"] == {
        "value": "depth 8, chunks of 1MiB",
        "origin": f"io_depth, {tmp_path / 'memd.calibration'}",
    }
    assert shown["host"] == {"value": "1536MiB", "origin": "--host"}
    fragment.write_text('hots = "1GiB"\n')
    wrong = memd(*given)
    assert wrong.exit_code == 2
    assert f"{fragment}: no setting is called 'hots'" in " ".join(wrong.output.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("config", "--host", "64"), "--host: host: '64' has no unit"),
        (("serve", "--nvme", "ten"), "--nvme: nvme: 'ten' is not a size"),
        (("config", "--hots", "1GiB"), "No such option"),
        (("statsu",), "No such command"),
        (("job", "show"), "Missing argument"),
    ],
)
def test_wrong_use_exits_with_2_and_says_why(arguments: tuple[str, ...], message: str) -> None:
    result = memd(*arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_help_names_the_default_of_each_option_that_has_one() -> None:
    said = " ".join(memd("serve", "--help").output.split())
    defaults = config.shown(config.Settings())
    for setting in ("socket", "data", "host", "nvme", "metrics", "log_format", "log_level"):
        assert f"[default: {defaults[setting]}]" in said, setting
    assert f"[default: {defaults['holder_seconds']}]" in said
    context = click.Context(main)
    for path, command in commands_below(main, context):
        for option in command.params:
            if isinstance(option, click.Option) and takes_a_default(option):
                assert option.show_default or "default" in (option.help or ""), (path, option.name)


def commands_below(
    command: click.Command, context: click.Context
) -> Iterator[tuple[str, click.Command]]:
    yield context.command_path, command
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from commands_below(below, click.Context(below, parent=context, info_name=name))


def takes_a_default(option: click.Option) -> bool:
    """A flag is off, and what is hidden is for memd's own processes."""
    default = option.to_info_dict()["default"]
    return not option.is_flag and not option.hidden and default not in (None, (), "")


@pytest.mark.parametrize("command", ["status", "top"])
def test_no_daemon_exits_with_4_and_says_what_to_do(command: str, tmp_path: Path) -> None:
    result = memd(command, "--socket", str(tmp_path / "memd.sock"))
    assert result.exit_code == 4
    assert f"no daemon answers at {tmp_path}/attach.sock" in result.output
    assert "start one with `memd serve`" in result.output


@pytest.mark.parametrize(
    ("command", "is_refused"),
    [
        (("status",), True),
        (("top", "--count", "1"), True),
        (("job", "list"), True),
        (("job", "show", "gpt"), True),
        (("job", "weight", "gpt", "2"), True),
        (("job", "drop", "gpt", "--force", "--yes"), True),
        (("check",), True),
        (("config",), True),
        (("serve", "--metrics", ""), True),
        (("volume", "list", "--data", "/nowhere"), False),
        (("check", "--data", "/nowhere"), False),
    ],
)
def test_every_command_asks_the_daemon_of_the_address(
    server: FakeServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: tuple[str, ...],
    is_refused: bool,
) -> None:
    server.open_job("gpt", uid=0)
    monkeypatch.setenv("MEMD_SOCKET", str(tmp_path / "none.sock"))
    monkeypatch.setenv("MEMD_ADDRESS", f"unix://{tmp_path}/memd.sock")
    if command[0] == "serve":  # somebody serves it
        monkeypatch.setenv("MEMD_DATA", str(tmp_path))
        assert f"another daemon serves {tmp_path}/" in memd(*command).output
    elif command[0] == "config":
        rows = [line.split() for line in memd(*command).output.splitlines()]
        assert ["socket", f"{tmp_path}/memd.sock", "MEMD_ADDRESS"] in rows
    elif is_refused and command != ("check",):
        assert memd(*command).exit_code == 0
    monkeypatch.setenv("MEMD_ADDRESS", "embedded:")
    result = memd(*command)
    assert ("MEMD_ADDRESS: 'embedded:' is no unix socket" in result.output) == is_refused
    assert result.exit_code == 2 or not is_refused


def test_status_for_people_and_for_programs(server: FakeServer, tmp_path: Path) -> None:
    server.open_job("gpt", uid=0)
    socket = ("--socket", str(tmp_path / "memd.sock"))
    text = memd("status", *socket).output
    assert "pool: 32 MiB of 64 MiB free, pages of 4 KiB, locked" in text
    assert "/volume  1 GiB  256 MiB  8 KiB" in text

    def volume_row() -> str:
        rows = memd("status", *socket).output.splitlines()
        return next(row for row in rows if row.startswith("/volume"))

    assert volume_row().endswith("  0")
    server.activities = [
        Activity("write", what="/volume at 4096, 8192 bytes"),
        Activity("sync", what="/volume"),
        Activity("read", what="/volume at 0, 4096 bytes", waits_on="its turn"),
        Activity("read", what="/volume2 at 0, 4096 bytes"),
        Activity("step", job="gpt", what="/volume"),
    ]
    assert volume_row().endswith("  2, 1 wait")
    assert "gpt" in text
    status = json.loads(memd("status", "--json", *socket).output)
    assert status["pool"]["bytes"] == 64 << 20
    assert status["jobs"][0]["name"] == "gpt"
    assert status["io_engine"] == "memory"
    counters = status["jobs"][0]["counters"]
    assert counters["step_wall_seconds"] == 2.0
    assert {"phase": "forward", "reason": "ring", "seconds": 0.25} in counters["stalls"]
    assert json.loads(memd("job", "list", "--json", *socket).output)[0]["counters"] == counters
    shown = json.loads(memd("job", "show", "gpt", "--json", *socket).output)
    assert shown["job"]["counters"] == counters


def test_the_guide_shows_the_columns_that_status_has(server: FakeServer, tmp_path: Path) -> None:
    server.open_job("gpt", uid=0)
    said = memd("status", "--socket", str(tmp_path / "memd.sock")).output
    headers = [" ".join(line.split()) for line in said.splitlines() if line.startswith(TABLES)]
    assert len(headers) == len(TABLES)
    guide = (ROOT / "docs/service.md").read_text(encoding="utf-8")
    assert [header for header in headers if header not in re.sub(" +", " ", guide)] == []


TABLES = ("volume ", "job ")


def test_a_probe_tells_a_daemon_that_takes_work_from_one_that_lives_and_from_none(
    server: FakeServer, tmp_path: Path
) -> None:
    def probe(what: str, socket: str = "memd.sock") -> tuple[int, str]:
        result = memd("status", what, "--socket", str(tmp_path / socket))
        return result.exit_code, result.output

    assert probe("--probe") == (0, "ready\n")
    assert probe("--probe=live") == (0, "ready\n")
    server.fence_reason = "the volumes are fenced: sync of /volume: Input/output error"
    code, said = probe("--probe")
    assert code == 1
    assert "takes no work" in said
    assert probe("--probe=live") == (0, "live\n")
    code, said = probe("--probe", "none.sock")
    assert code == 4
    assert f"no daemon answers at {tmp_path}/none.sock" in said


def test_what_is_in_flight_is_shown_with_what_it_waits_for(
    server: FakeServer, tmp_path: Path
) -> None:
    command = ("status", "--inflight", "--socket", str(tmp_path / "memd.sock"))
    assert memd(*command).output == "nothing is in flight\n"
    server.activities = [
        Activity("step", job="gpt", what="commits", age_seconds=12.25),
        Activity("lease", job="gpt", what="shard w, to read", waits_on="room in the arena"),
        Activity("write", what="/volume at 4096, 8192 bytes", priority="writeback"),
    ]
    lines = [line.split() for line in memd(*command).output.splitlines()]
    assert lines[0] == ["kind", "job", "since", "priority", "what", "waits", "on"]
    assert lines[1] == ["step", "gpt", "12.2", "s", "-", "commits", "-"]
    assert lines[2][-5:] == ["read", "room", "in", "the", "arena"]
    assert lines[3][:5] == ["write", "-", "1.5", "s", "writeback"]
    answer = json.loads(memd(*command, "--json").output)
    assert answer["activities"][1]["waits_on"] == "room in the arena"
    assert answer["activities"][2]["seconds"] == 1.5


def test_the_scrub_s_progress_and_last_pass_are_shown(server: FakeServer, tmp_path: Path) -> None:
    command = ("status", "--socket", str(tmp_path / "memd.sock"))
    assert "scrub: off" in memd(*command).output
    server.set_scrub_rate(16 << 20)
    text = memd(*command).output
    assert (
        "scrub: at most 16 MiB/s, 1 MiB of 4 MiB verified in this pass, last full pass ended "
        "60 s ago, 1 errors" in text
    )
    assert "scrub: shard gpt/wte.weight: its bytes are gone" in text
    scrub = json.loads(memd(*command, "--json").output)["scrub"]
    assert scrub["pass_count"] == 2
    assert scrub["error_count"] == 1


def test_a_fence_and_lost_shards_are_shown(server: FakeServer, tmp_path: Path) -> None:
    socket = ("--socket", str(tmp_path / "memd.sock"))
    job = server.open_job("gpt", uid=0)
    grant = server.attach(job.job_id)
    server.declare(grant.session_id, [ShardSpec("wte.weight", 1, 1, [256, 64], 2)])
    assert "not committing" not in memd("status", *socket).output
    server.fence_reason = "the volumes are fenced: sync of /volume: Input/output error"
    job.lost_shards.append("wte.weight")
    (info,) = server.shards(job.job_id)
    info.lost = True
    text = memd("status", *socket).output
    assert f"not committing: {server.fence_reason}" in text
    assert "gpt stays at step 0: the bytes of wte.weight on disk are gone" in text
    assert "64 KiB  lost" in memd("job", "show", "gpt", *socket).output
    status = json.loads(memd("status", "--json", *socket).output)
    assert status["fence_reason"] == server.fence_reason
    assert status["jobs"][0]["lost_shards"] == ["wte.weight"]


def test_a_power_cut_s_loss_is_told_of_a_job_with_tier_host(
    server: FakeServer, tmp_path: Path
) -> None:
    socket = ("--socket", str(tmp_path / "memd.sock"))
    job = server.open_job("gpt", uid=0)
    assert "tier host" not in memd("status", *socket).output
    job.host_tier_bytes, job.committed_step = 3 << 20, 7
    lost = "gpt: 3 MiB live in tier host, and no snapshot has them: a power cut loses the job"
    assert lost in memd("status", *socket).output
    job.snapshot_count, job.durable_step = 2, 5
    left = "3 MiB live in tier host: a power cut takes the job back to step 5"
    assert left in memd("job", "list", *socket).output
    job.durable_step = 0
    assert "back to a snapshot of step 0, or loses it if" in memd("status", *socket).output


def test_shards_that_the_device_failed_to_read_are_shown(
    server: FakeServer, tmp_path: Path
) -> None:
    socket = ("--socket", str(tmp_path / "memd.sock"))
    job = server.open_job("gpt", uid=0)
    grant = server.attach(job.job_id)
    server.declare(grant.session_id, [ShardSpec("wte.weight", 1, 1, [256, 64], 2)])
    assert "failed to read" not in memd("status", *socket).output
    job.unreadable_shards.append("wte.weight")
    (info,) = server.shards(job.job_id)
    info.unreadable = True
    text = memd("status", *socket).output
    assert "gpt: the device failed to read wte.weight; the next use tries again" in text
    assert "64 KiB  unreadable" in memd("job", "show", "gpt", *socket).output
    status = json.loads(memd("status", "--json", *socket).output)
    assert status["jobs"][0]["unreadable_shards"] == ["wte.weight"]
    assert status["jobs"][0]["lost_shards"] == []


def test_a_job_is_listed_shown_and_dropped(server: FakeServer, tmp_path: Path) -> None:
    socket = ("--socket", str(tmp_path / "memd.sock"))
    job = server.open_job("gpt", uid=0)
    grant = server.attach(job.job_id)
    server.declare(grant.session_id, [ShardSpec("wte.weight", 1, 1, [256, 64], 2)])
    row = memd("job", "list", *socket).output.splitlines()[1].split()
    assert row[:4] == ["gpt", "root", "0", "1"]
    shown = memd("job", "show", "gpt", *socket).output
    assert "wte.weight  parameter  nvme  float32  256x64  64 KiB  never written" in shown
    (shard,) = json.loads(memd("job", "show", "gpt", "--json", *socket).output)["shards"]
    assert shard["spec"]["kind"] == "SHARD_KIND_PARAMETER"
    assert shard["spec"]["shape"] == [256, 64]
    for force in ((), ("--force",)):
        unsaid = memd("job", "drop", "gpt", *force, *socket)
        assert unsaid.exit_code == 2
        assert "say --yes, or call this from a terminal" in unsaid.output
    refused = memd("job", "drop", "gpt", "--yes", *socket)
    assert refused.exit_code == 1
    assert "use --force" in refused.output
    assert memd("job", "drop", "gpt", "--force", "--yes", *socket).output == "dropped gpt\n"
    assert json.loads(memd("job", "list", "--json", *socket).output) == []


def test_users_are_named_where_this_machine_knows_them(server: FakeServer, tmp_path: Path) -> None:
    known = pwd.getpwuid(os.getuid())
    taken = {user.pw_uid for user in pwd.getpwall()}
    unknown = next(uid for uid in range(60000, 65000) if uid not in taken)
    server.open_job("ours", uid=known.pw_uid)
    server.open_job("theirs", uid=unknown)
    socket = ("--socket", str(tmp_path / "memd.sock"))
    for command in (("status",), ("job", "list"), ("top", "--count", "1")):
        rows = [line.split() for line in memd(*command, *socket).output.splitlines()]
        users = {row[0]: row[1] for row in rows if row and row[0] in ("ours", "theirs")}
        assert users == {"ours": known.pw_name, "theirs": str(unknown)}, command
    assert memd("job", "show", "ours", *socket).output.splitlines()[1].split()[1] == known.pw_name


def test_a_job_that_is_not_there_exits_with_1(server: FakeServer, tmp_path: Path) -> None:
    assert server.jobs() == []
    result = memd("job", "drop", "nope", "--yes", "--socket", str(tmp_path / "memd.sock"))
    assert result.exit_code == 1
    assert "there is no job 'nope'; `memd job list`" in result.output


def test_serving_imports_neither_torch_nor_what_is_for_terminals() -> None:
    program = "import sys, memd.daemon, memd.cli; print(*sys.modules)"
    command = [sys.executable, "-c", program]
    modules = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert {"grpc", "memd_native", "memd.daemon"} <= set(modules)
    assert not {"torch", "numpy", "rich", "memd_client"} & set(modules)


def test_help_names_every_command() -> None:
    text = memd("--help").output
    assert all(name in text for name in ("serve", "config", "status", "top", "job", "demo"))
