"""Tenants: pods by their control groups, and service accounts by their tokens."""

from __future__ import annotations

import json
import os
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from memd import identity
from memd.config import SettingsError, load
from memd.daemon import token_identity
from memd.identity import CgroupIdentity, TokenIdentity, pod_of
from memd.owner import Owner, owner_by_uid, tenant_of
from memd.peers import Peer
from memd.refusal import Refused, StatusCode
from tests.mint import AUDIENCE, ISSUER, Issuer

if TYPE_CHECKING:
    from collections.abc import Callable

PROCESSES = tomllib.loads(Path(__file__).with_name("cgroups.toml").read_text())["process"]
ACCOUNT = "system:serviceaccount:team-a:trainer"


@pytest.mark.parametrize("process", PROCESSES, ids=[each["layout"] for each in PROCESSES])
def test_the_pod_is_that_of_the_outermost_group(process: dict[str, str]) -> None:
    assert pod_of(process["text"].lstrip("\n")) == (process["pod"] or None)


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Peer:
    """This process, as if it were in a container of its own."""
    monkeypatch.setattr(identity, "is_in_our_container", lambda peer: False)
    return Peer(pid=os.getpid(), uid=0, pidfd=os.pidfd_open(os.getpid()), connection=None)


def test_a_peers_pod_is_read_from_its_control_group(peer: Peer, tmp_path: Path) -> None:
    by_cgroup = CgroupIdentity(proc=tmp_path)
    file = tmp_path / str(peer.pid) / "cgroup"
    file.parent.mkdir()
    file.write_text(PROCESSES[0]["text"].lstrip())
    owner = by_cgroup.of_peer(peer)
    assert owner == Owner(uid=0, tenant=PROCESSES[0]["pod"])
    assert not owner.administers_all, "root of a container is nobody in particular"
    file.write_text("0::/user.slice\n")
    with pytest.raises(Refused, match="is in no pod of Kubernetes; train in a pod"):
        by_cgroup.of_peer(peer)
    with pytest.raises(Refused, match="no number in the daemon's PID namespace"):
        by_cgroup.of_peer(replace(peer, pid=0))
    file.unlink()
    with pytest.raises(Refused, match="cannot be read: No such file"):
        by_cgroup.of_peer(peer)


def test_a_number_that_may_be_another_process_s_by_now_tells_nothing(
    peer: Peer, tmp_path: Path
) -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    dead = replace(peer, pid=child, pidfd=os.pidfd_open(child))
    os.waitpid(child, 0)
    (tmp_path / str(child)).mkdir()
    (tmp_path / str(child) / "cgroup").write_text(PROCESSES[0]["text"].lstrip())
    with pytest.raises(Refused, match="has died"):
        CgroupIdentity(proc=tmp_path).of_peer(dead)


def test_who_runs_in_the_daemons_own_container_administers() -> None:
    ours = Peer(
        pid=os.getpid(), uid=os.geteuid(), pidfd=os.pidfd_open(os.getpid()), connection=None
    )
    assert CgroupIdentity().of_peer(ours).administers_all
    stranger = replace(ours, uid=4242)
    assert not identity.is_in_our_container(stranger)
    assert not identity.is_in_our_container(replace(ours, pid=0))


@pytest.fixture
def issuer(tmp_path: Path) -> Issuer:
    return Issuer(tmp_path / "jwks.json")


@pytest.fixture
def check(issuer: Issuer, peer: Peer) -> Callable[[str], Owner]:
    by_token = TokenIdentity(issuer.keys(), administrators=("ops:admin",))
    assert by_token.of_peer(peer) is None
    return lambda token: by_token.of_token(peer, token)


def test_a_service_account_is_a_tenant(issuer: Issuer, check: Callable[[str], Owner]) -> None:
    assert check(issuer.token(ACCOUNT)) == Owner(uid=0, tenant="team-a:trainer")
    assert check(issuer.token("system:serviceaccount:ops:admin")).administers_all
    assert check(issuer.token("alice@example.org")).tenant == "alice@example.org"
    assert check(issuer.token(ACCOUNT, algorithm="ES256")).tenant == "team-a:trainer"


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        # In 2001 and 2096: these lines run long before the tests do.
        ("Signature has expired", {"exp": 1_000_000_000}),
        ("The token is not yet valid", {"nbf": 4_000_000_000}),
        ("Audience doesn't match", {"aud": "https://kubernetes.default.svc"}),
        ("Invalid issuer", {"iss": "https://elsewhere.example"}),
        ('missing the "exp" claim', {"exp": None}),
        ('missing the "sub" claim', {"sub": None}),
        ("its subject is neither", {"sub": "team-b:trainer"}),
        ("its subject is neither", {"sub": "a/b"}),
        ("its subject is neither", {"sub": "memd"}),
        ("its subject is neither", {"sub": "system:serviceaccount:a:b/c"}),
        ("its subject is neither", {"sub": "system:serviceaccount:a"}),
        ("its subject is neither", {"sub": "system:node:worker"}),
    ],
)
def test_a_token_that_is_not_good_is_refused_with_the_reason(
    issuer: Issuer, check: Callable[[str], Owner], reason: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(Refused, match=reason) as error:
        check(issuer.token(ACCOUNT, **changes))
    assert error.value.code is StatusCode.PERMISSION_DENIED
    assert f"audience '{AUDIENCE}', of issuer '{ISSUER}'" in str(error.value)


def test_only_the_issuers_keys_count(
    issuer: Issuer, check: Callable[[str], Owner], tmp_path: Path
) -> None:
    forged = Issuer(tmp_path / "forged.json").token(ACCOUNT)
    with pytest.raises(Refused, match="is not good"):
        check(forged)
    with pytest.raises(Refused, match="is not good"):
        check(issuer.unsigned(ACCOUNT))
    with pytest.raises(Refused, match="is not good"):
        check(issuer.signed_with_the_public_key(ACCOUNT))
    with pytest.raises(Refused, match="is not good"):
        check("no token at all")
    with pytest.raises(Refused, match="none of the keys of"):
        check(issuer.token(ACCOUNT, headers={"kid": "nobody"}))


def test_keys_are_exchanged_while_the_daemon_runs(
    issuer: Issuer, check: Callable[[str], Owner]
) -> None:
    old = issuer.token(ACCOUNT)
    issuer.exchange_keys()
    with pytest.raises(Refused, match="none of the keys of"):
        check(old)
    assert check(issuer.token(ACCOUNT)).tenant == "team-a:trainer"
    issuer.path.write_text("{")  # half written
    assert check(issuer.token(ACCOUNT)).tenant == "team-a:trainer"


def test_what_an_owner_is_counted_by_tells_root_of_one_pod_from_root_of_another() -> None:
    owners = [Owner(uid=0, tenant="team-a:trainer"), Owner(uid=0, tenant="team-b:trainer")]
    assert [each.key_text for each in owners] == ["team-a:trainer", "team-b:trainer"]
    assert Owner(uid=7).key_text == "user 7"


def test_keys_that_stop_being_readable_are_told_once(
    issuer: Issuer, check: Callable[[str], Owner], caplog: pytest.LogCaptureFixture
) -> None:
    def reasons() -> list[str]:
        said = [each for each in caplog.records if each.message.startswith("token_keys")]
        assert {each.__dict__["path"] for each in said} <= {str(issuer.path)}
        return [each.__dict__["reason"] for each in said]

    token = issuer.token(ACCOUNT)
    issuer.path.rename(issuer.path.with_suffix(".old"))
    for _ in range(3):
        assert check(token).tenant == "team-a:trainer"
    assert len(reasons()) == 1
    assert "No such file" in reasons()[0]
    issuer.path.write_text("{")
    for _ in range(3):
        check(token)
    assert len(reasons()) == 2
    issuer.exchange_keys()
    check(issuer.token(ACCOUNT))
    issuer.path.unlink()
    check(issuer.token(ACCOUNT))
    assert len(reasons()) == 3, "after it was good it is told again"


@pytest.mark.parametrize("text", ["", "{}", '{"keys": []}', "[]", json.dumps({"keys": [{}]})])
def test_a_daemon_without_keys_does_not_start(tmp_path: Path, text: str) -> None:
    file = tmp_path / "jwks.json"
    file.write_text(text)
    environ = {"MEMD_IDENTITY": "token", "MEMD_TOKEN_ISSUER": ISSUER, "MEMD_TOKEN_KEYS": str(file)}
    empty = tmp_path / "empty.toml"
    empty.touch()
    settings = load(flags={}, environ=environ, file=empty).settings
    with pytest.raises(Refused, match=r"is no JWKS file with public keys: .*kubectl get --raw"):
        token_identity(settings)


def test_tokens_need_keys_and_an_issuer(tmp_path: Path) -> None:
    empty = tmp_path / "empty.toml"
    empty.touch()
    with pytest.raises(SettingsError, match="needs token_keys, a JWKS file, and token_issuer"):
        load(flags={}, environ={"MEMD_IDENTITY": "token"}, file=empty)


def test_a_tenant_owns_what_has_its_name_in_front() -> None:
    tenant = Owner(uid=0, tenant="team-a:trainer")
    assert tenant.stored_name("gpt/large") == "team-a:trainer/gpt/large"
    assert tenant_of("team-a:trainer/gpt/large") == "team-a:trainer"
    for name, uid, is_own in (
        ("team-a:trainer/gpt", 0, True),
        ("team-a:trainer/gpt", 7, True),
        ("team-a:trainer2/gpt", 0, False),
        ("gpt", 0, False),
    ):
        job: Any = SimpleNamespace(name=name, uid=uid)
        assert tenant.owns(job) == is_own, name
    job = SimpleNamespace(name="a/b", uid=7)
    assert owner_by_uid(7).owns(job)
    assert not owner_by_uid(8).owns(job)
    assert owner_by_uid(7).stored_name("a/b") == "a/b"
