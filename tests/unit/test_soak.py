"""`make soak`: its parts that are targets of the Makefile, and what they fail at."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.soak import containers, soak

ROOT = Path(__file__).parents[2]
TARGETS = {each.name: each for each in soak.PARTS if isinstance(each, soak.Target)}
MAKEFILE = """
lacks:
\t@echo "no trial: install the package of a tool"; exit 1
tells:
\t@echo first; echo "asked for $(ARGS)"
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "Makefile").write_text(MAKEFILE)
    monkeypatch.setattr(soak, "ROOT", tmp_path)
    monkeypatch.setattr(soak, "FOLDER", tmp_path)
    return tmp_path


def before_a_release() -> str:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return text.partition("\n## Before a release\n")[2].partition("\n## ")[0]


def test_every_installation_is_a_part_and_named_before_a_release() -> None:
    assert set(TARGETS) == {"operator", "package", "containers", "wheels"}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for part in TARGETS.values():
        for target in part.program:
            assert re.search(rf"^{target}:", makefile, re.MULTILINE)
        assert f"`make {part.program[-1]}`" in before_a_release()


def test_containers_are_killed_as_often_as_their_median_needs() -> None:
    part = TARGETS["containers"]
    assert part.count >= containers.KILLS_OF_A_MEDIAN
    assert part.command(Path("answer"))[-1] == f"ARGS=--kills {part.count}"


@pytest.mark.usefixtures("checkout")
def test_a_target_that_lacks_something_fails_with_its_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, status = soak._run(soak.Target("part", ("lacks",), "", 1), "commit")
    assert status != 0
    assert "no trial: install the package of a tool" in capsys.readouterr().out


def test_the_last_words_of_a_target_are_its_report(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sees its own arguments, and none that `make soak` was given."""
    monkeypatch.setenv("MAKEFLAGS", " -- ARGS=--only")
    monkeypatch.setenv("ARGS", "--only part")
    for part, said in (
        (soak.Target("part", ("tells",), "", 1), "asked for "),
        (soak.Target("part", ("tells",), "--kills", 20), "asked for --kills 20"),
    ):
        assert soak._run(part, "commit")[1] == 0
        assert json.loads(part.report.read_text())["outcome"] == ["first", said]
        assert part.report.parent == checkout


def outcome(*, kills: int, median: float) -> containers.Outcome:
    return containers.Outcome(
        daemon_image_bytes=1,
        trainer_image_bytes=1,
        first_ready_s=1.0,
        next_ready_s=1.0,
        engine_by_default="threads",
        engine_with_profile="io_uring",
        namespaces_apart=[],
        steps=1,
        steps_computed_again=0,
        sessions_fenced=0,
        kills=kills,
        death_ms=[median],
        death_ms_median=median,
        noticed_ms=[median],
        noticed_ms_median=median,
    )


@pytest.mark.parametrize(
    ("kills", "median", "is_late"),
    [(20, 100.0, False), (20, 100.1, True), (200, 101.0, True), (19, 500.0, False)],
)
def test_deaths_that_are_noticed_late_in_the_median_fail(
    kills: int, median: float, is_late: bool
) -> None:
    sentence = containers.late(outcome(kills=kills, median=median))
    assert (sentence is not None) == is_late
    assert sentence is None or f"{median} ms" in sentence


@pytest.fixture
def _measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["containers", "--engine", "true"])
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(containers, "run", lambda _, kills: outcome(kills=kills, median=100.1))


@pytest.mark.usefixtures("_measured")
def test_the_program_ends_with_1_where_they_are_late(capsys: pytest.CaptureFixture[str]) -> None:
    assert containers.main() == 1
    assert capsys.readouterr().out.endswith("100.1 ms in the median, and not within 100\n")
