"""Fakes of native classes have the members that the committed stub `_core.pyi` has, each with its
parameters. `test_stub_is_current.py` holds the stub against the compiled module."""

from __future__ import annotations

import ast
import copy
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
STUB = ROOT / "native" / "python" / "memd_native" / "_core.pyi"
CALLS = ROOT / "client" / "memd_client" / "connection" / "calls.py"
NATIVE = "tests/unit/fake_native.py"
SESSION = "tests/unit/fake_session.py"
# fake_native.py keeps its bytes in these.
OWN_RECORDS = {"Shard", "Job"}
OTHER_NAMES = {
    "FakeServer": "Server",
    "FakeLease": "ServiceLease",
    "FakeMomentsWrite": "MomentsWrite",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fake:
    file: str
    name: str
    stands_for: str
    own: frozenset[str] = frozenset()  # members that tests use, and memd does not
    is_made_by_memd: bool = False  # its constructor stands for the native one too

    @property
    def label(self) -> str:
        return f"{Path(self.file).stem}.{self.name}"


@cache
def classes_of(path: Path) -> dict[str, ast.ClassDef]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def control_calls() -> frozenset[str]:
    """Fake sessions answer these of the control plane too."""
    classes = classes_of(CALLS)
    return frozenset(members_of(classes["ControlPlane"]) | members_of(classes["TensorCalls"]))


def fakes() -> Iterator[Fake]:
    for name in classes_of(ROOT / NATIVE):
        if name not in OWN_RECORDS:
            yield Fake(
                file=NATIVE,
                name=name,
                stands_for=OTHER_NAMES.get(name, name),
                own=frozenset({"sessions"} if name == "FakeServer" else ()),
            )
    ranks = "tests/unit/test_rank_calls.py"
    yield Fake(file=ranks, name="Ranks", stands_for="Server")
    slow = "tests/unit/test_calibration.py"
    yield Fake(file=slow, name="SlowBench", stands_for="IoBench", is_made_by_memd=True)
    yield Fake(file=SESSION, name="FakeStatistics", stands_for="ClientStatistics")
    # Parts of a session, and what the client says it uses of one.
    for file, name, own in (
        (SESSION, "FakeDaemon", {"session", *control_calls()} - {"close"}),  # both planes close
        ("tests/unit/test_gradient_order.py", "Backward", {"run", "step"}),
        (
            "tests/unit/test_reattach.py",
            "World",
            {"restart", "connect", "call", "leased", "renew", "attach"},
        ),
        ("tests/device/announced_leases.py", "_AnnouncedPlane", {"seal"}),
        ("client/memd_client/core/leases.py", "DataPlane", set()),
        ("client/memd_client/core/registration.py", "ArenaPlane", set()),
        ("client/memd_client/core/gradient_order.py", "Asking", set()),
        ("client/memd_client/connection/reattach.py", "SuspendablePlane", set()),
    ):
        yield Fake(file=file, name=name, stands_for="ClientSession", own=frozenset(own))
    leases = "client/memd_client/core/leases.py"
    yield Fake(file=leases, name="LeaseStatistics", stands_for="ClientStatistics")


def members_of(node: ast.ClassDef, *, with_constructor: bool = False) -> dict[str, str]:
    """Public ones as a caller sees them: the type of a property or field, parameters of a
    method."""
    members = {}
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            members[each.target.id] = f": {ast.unparse(each.annotation)}"
        elif isinstance(each, ast.FunctionDef) and each.name == "__init__":
            if with_constructor:
                members[each.name] = parameters_of(each)
        elif isinstance(each, ast.FunctionDef) and "property" in map(
            ast.unparse, each.decorator_list
        ):
            assert each.returns is not None
            members[each.name] = f": {ast.unparse(each.returns)}"
        elif isinstance(each, ast.FunctionDef):
            members[each.name] = parameters_of(each)
    return {name: text for name, text in members.items() if re.match("[a-z]|__init__", name)}


def parameters_of(function: ast.FunctionDef) -> str:
    """Names, kinds and defaults, without self. The stub writes an empty sequence as a list, which
    Python would share between calls."""
    arguments = copy.deepcopy(function.args)
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    every += [each for each in (arguments.vararg, arguments.kwarg) if each is not None]
    for each in every:
        each.annotation = None
    del (arguments.posonlyargs or arguments.args)[0]
    return f"({ast.unparse(arguments)})".replace("=[]", "=()")


def fields_of(node: ast.ClassDef) -> set[str]:
    return {
        each.target.id
        for each in node.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }


def drift(
    fake: ast.ClassDef,
    native: ast.ClassDef,
    *,
    own: Collection[str] = (),
    with_constructor: bool = False,
) -> list[str]:
    """Differences of the fake from the native class, a line each."""
    ours = members_of(fake, with_constructor=with_constructor)
    theirs = members_of(native, with_constructor=with_constructor)
    is_record = all(text.startswith(":") for text in theirs.values())
    state = set() if is_record else fields_of(fake)
    wrong = [
        f"{name} is not {fake.name}'s own: {native.name} has it" for name in own if name in theirs
    ]
    for name, text in ours.items():
        if name in own:
            continue
        if name not in theirs:
            if name not in state:
                wrong.append(f"{native.name} has no {name}")
        elif text != theirs[name]:
            wrong.append(f"{name}{text} is {name}{theirs[name]} of {native.name}")
    return wrong


@pytest.mark.parametrize("fake", list(fakes()), ids=lambda fake: fake.label)
def test_a_fake_has_the_signatures_of_the_native_class(fake: Fake) -> None:
    assert not drift(
        classes_of(ROOT / fake.file)[fake.name],
        classes_of(STUB)[fake.stands_for],
        own=fake.own,
        with_constructor=fake.is_made_by_memd,
    )


@pytest.mark.parametrize("fake", list(fakes()), ids=lambda fake: fake.label)
def test_a_member_of_its_own_is_one_that_the_fake_has(fake: Fake) -> None:
    members = members_of(classes_of(ROOT / fake.file)[fake.name])
    assert fake.own - control_calls() <= members.keys()


REAL = """
class Server:
    def __init__(self, *, directories: Sequence[str], keeper_fd: int | None = None) -> None: ...
    def lease(self, shard_id: int, *, part: int = 0, ids: Any = [], timeout_s: float) -> int: ...
    def stop(self, *, timeout_s: float) -> None: ...
    @property
    def paths(self) -> list[str]: ...
"""
FAKE = """
class Fake:
    paths: list[str] = field(default_factory=list)
    calls: int = 0
    def __init__(self) -> None: ...
    def lease(self, shard_id: int, *, part: int = 0, ids: Any = (), timeout_s: float) -> Any: ...
    def look(self) -> None: ...
    def _private(self) -> None: ...
"""


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        ("", "", []),
        ("def look", "def shards", ["Server has no shards"]),
        ("def look", "def stop", ["stop() is stop(*, timeout_s) of Server"]),
        ("shard_id: int, *", "shard: int, *", ["lease(shard, *"]),
        ("*, part: int = 0", "part: int = 0, *", ["lease(shard_id, part=0, *, ids"]),
        ("part: int = 0", "part: int = 1", ["lease(shard_id, *, part=1"]),
        ("part: int = 0, ", "", ["lease(shard_id, *, ids=(), timeout_s) is"]),
        ("timeout_s: float", "timeout_s: float = 1.0", ["timeout_s=1.0) is lease("]),
        (
            "    paths: list[str]",
            "    paths: list[Path]",
            ["paths: list[Path] is paths: list[str]"],
        ),
        ("paths: list[str] = field(default_factory=list)", "def paths(self): ...", ["paths() is"]),
    ],
)
def test_a_drift_is_found(before: str, after: str, found: list[str]) -> None:
    assert before in FAKE
    (fake,) = classes_in(FAKE.replace(before, after) if before else FAKE)
    (native,) = classes_in(REAL)
    said = drift(fake, native, own={"look"})
    assert len(said) == len(found), said
    assert all(part in line for part, line in zip(found, said, strict=True)), said


def test_a_drift_of_records_constructors_and_own_members_is_found() -> None:
    (fake,), (native,) = classes_in(FAKE), classes_in(REAL)
    assert drift(fake, native, own={"look", "stop"}) == ["stop is not Fake's own: Server has it"]
    (said,) = drift(fake, native, own={"look"}, with_constructor=True)
    assert said == "__init__() is __init__(*, directories, keeper_fd=None) of Server"
    (record,) = classes_in("class Report:\n    path: str\n    age: int = 0\n")
    (real,) = classes_in("class Report:\n    @property\n    def path(self) -> str: ...\n")
    assert drift(record, real) == ["Report has no age"]


def classes_in(text: str) -> list[ast.ClassDef]:
    return [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]


def test_no_fake_of_a_native_class_is_missing_here() -> None:
    """Another class gets in a native one's place by a cast, a patched name, or as no class at
    all."""
    known = {fake.file for fake in fakes()}
    casts = re.compile(r'cast\(\s*"(?:memd_native\.)?(?:Server|ClientSession|IoBench)"')
    patched = re.compile(r'setattr\(\s*(?:"memd_native\.|memd_native, ")[A-Z]')
    for path in sorted(TESTS.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if path != Path(__file__) and (casts.search(text) or patched.search(text)):
            assert str(path.relative_to(ROOT)) in known
    assert "SimpleNamespace" not in (ROOT / NATIVE).read_text(encoding="utf-8")
