"""Jobs of tenants on one daemon, all of them root: pods told apart by their control groups, service
accounts by their tokens."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import memd_client
from tests.daemons import TIMEOUT_S, Daemon
from tests.mint import AUDIENCE, ISSUER, Issuer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.daemons import Daemons

# A container of its own: who is in that administers, and these tests are not.
CONTAINER = ("unshare", "--mount")
A, B = "05b3ee07-a2bd-47e7-9599-7961201f20dd", "fd52ef25-a87d-11e9-9423-0800271a638e"


def contained(daemons: Daemons, name: str, **environ: str) -> Daemon:
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not installed")
    if subprocess.run([*CONTAINER, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("a mount namespace can't be made here")
    environ |= {"MEMD_HOLDER_SECONDS": "0"}
    return daemons.start(name=name, before=CONTAINER, environ=environ)


def memd(
    daemon: Daemon,
    *arguments: str,
    before: Sequence[str] = (),
    token: Path | None = None,
    status: int = 0,
) -> str:
    environ = {key: value for key, value in os.environ.items() if not key.startswith("MEMD_")}
    environ |= {"MEMD_TOKEN_FILE": str(token)} if token is not None else {}
    answer = subprocess.run(
        [*before, sys.executable, "-m", "memd", *arguments, "--socket", str(daemon.socket)],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
        env=environ,
    )
    assert answer.returncode == status, answer
    return answer.stdout + answer.stderr


def names(daemon: Daemon, **how: Any) -> list[str]:
    return [job["name"] for job in json.loads(memd(daemon, "job", "list", "--json", **how))]


@pytest.fixture
def issuer(tmp_path: Path) -> Issuer:
    return Issuer(tmp_path / "jwks.json")


@pytest.fixture
def daemon(daemons: Daemons, issuer: Issuer) -> Iterator[Daemon]:
    daemon = contained(
        daemons,
        "tokens",
        MEMD_IDENTITY="token",
        MEMD_TOKEN_KEYS=str(issuer.path),
        MEMD_TOKEN_ISSUER=ISSUER,
        MEMD_TOKEN_AUDIENCE=AUDIENCE,
        MEMD_ADMINISTRATORS="ops:admin",
    )
    yield daemon
    assert daemon.stop() == 0


@pytest.fixture
def files(tmp_path: Path, issuer: Issuer) -> dict[str, Path]:
    """The projected tokens of three service accounts."""
    made = {}
    for account in ("team-a:trainer", "team-b:trainer", "ops:admin"):
        made[account] = tmp_path / account.replace(":", "-")
        made[account].write_text(issuer.token(f"system:serviceaccount:{account}") + "\n")
    return made


def test_service_accounts_have_jobs_of_their_own(
    daemon: Daemon,
    files: dict[str, Path],
    issuer: Issuer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for number, account in enumerate(("team-a:trainer", "team-b:trainer")):
        monkeypatch.setenv("MEMD_TOKEN_FILE", str(files[account]))
        with memd_client.connect(daemon.address, job="gpt", host_bytes=16 << 20) as session:
            session.put("blob", torch.full((8,), number))
    monkeypatch.setenv("MEMD_TOKEN_FILE", str(files["team-a:trainer"]))
    with memd_client.connect(daemon.address, job="gpt") as session:
        assert torch.equal(session.get("blob"), torch.zeros(8, dtype=torch.int64))
    of_a, of_b = files["team-a:trainer"], files["team-b:trainer"]
    assert names(daemon, token=of_a) == ["team-a:trainer/gpt"]
    assert names(daemon, token=of_b) == ["team-b:trainer/gpt"]
    assert names(daemon, token=files["ops:admin"]) == ["team-a:trainer/gpt", "team-b:trainer/gpt"]
    said = memd(daemon, "job", "drop", "team-a:trainer/gpt", "--yes", token=of_b, status=1)
    assert "there is no job 'team-a:trainer/gpt'" in said
    memd(daemon, "job", "drop", "gpt", "--yes", token=of_b)
    assert names(daemon, token=files["ops:admin"]) == ["team-a:trainer/gpt"]
    memd(daemon, "job", "drop", "team-a:trainer/gpt", "--yes", token=files["ops:admin"])
    assert names(daemon, token=files["ops:admin"]) == []
    log = daemon.log.read_text()
    assert 'event="job dropped"' in log
    assert "tenant=ops:admin" in log
    for file in files.values():
        assert file.read_text().strip() not in log


def test_who_shows_no_good_token_is_refused(
    daemon: Daemon, files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MEMD_TOKEN_FILE", raising=False)
    with pytest.raises(memd_client.PermissionDenied, match="set MEMD_TOKEN_FILE to its path"):
        memd_client.connect(daemon.address, job="gpt")
    assert "set MEMD_TOKEN_FILE to its path" in memd(daemon, "job", "list", status=1)
    assert "set MEMD_TOKEN_FILE to its path" in memd(daemon, "doctor", status=1)
    assert memd(daemon, "status", "--probe") == "ready\n", "a probe has no identity"
    forged = tmp_path / "forged"
    forged.write_text(Issuer(tmp_path / "other.json").token("system:serviceaccount:ops:admin"))
    said = memd(daemon, "job", "list", token=forged, status=1)
    assert "the token of this process is not good" in said
    monkeypatch.setenv("MEMD_TOKEN_FILE", str(tmp_path / "none"))
    with pytest.raises(memd_client.InvalidArgument, match="cannot be read as a token"):
        memd_client.connect(daemon.address, job="gpt")
    assert names(daemon, token=files["ops:admin"]) == []


def pod(uid: str) -> Iterator[tuple[str, ...]]:
    """A control group as the kubelet's; what it gives runs a command in it."""
    root = Path("/sys/fs/cgroup")
    first = root / "pids"
    group = (first if first.is_dir() else root) / "kubepods" / f"pod{uid}"
    try:
        group.mkdir(parents=True)
    except OSError as error:
        pytest.skip(f"a control group can't be made here: {error}")
    yield ("/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs"))
    group.rmdir()


@pytest.fixture
def pod_a() -> Iterator[tuple[str, ...]]:
    yield from pod(A)


@pytest.fixture
def pod_b() -> Iterator[tuple[str, ...]]:
    yield from pod(B)


PUT = """
import sys, torch, memd_client
with memd_client.connect(sys.argv[1], job="gpt", host_bytes=16 << 20) as session:
    session.put("blob", torch.ones(8))
"""


def test_pods_have_jobs_of_their_own(
    daemons: Daemons, pod_a: tuple[str, ...], pod_b: tuple[str, ...]
) -> None:
    daemon = contained(daemons, "pods", MEMD_IDENTITY="cgroup")
    for before in (pod_a, pod_b):
        command = [*before, sys.executable, "-c", PUT, daemon.address]
        subprocess.run(command, check=True, timeout=TIMEOUT_S)
    assert names(daemon, before=pod_a) == [f"{A}/gpt"]
    assert names(daemon, before=pod_b) == [f"{B}/gpt"]
    memd(daemon, "job", "drop", f"{A}/gpt", "--yes", before=pod_b, status=1)
    assert "is in no pod of Kubernetes" in memd(daemon, "job", "list", status=1)
    inside = ("nsenter", "--mount", "--target", str(daemon.process.pid))
    if shutil.which("nsenter") is not None:  # as `kubectl exec` into the daemon's container
        assert names(daemon, before=inside) == [f"{A}/gpt", f"{B}/gpt"]
    assert daemon.stop() == 0
