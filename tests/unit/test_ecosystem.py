"""`python -m tests.compat.ecosystem`: its rows name what exists, and a row can fail."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.compat import ecosystem
from tests.compat.ecosystem import Row, line, outcome_of, rows

ROOT = Path(__file__).parents[2]
PASSES = "tests/unit/test_log.py"


def row(*, tests: str = "", command: str = "", expects: str = "a thing") -> Row:
    return Row(area="gRPC", expects=expects, tests=tests, command=command)


def test_each_row_has_one_way_to_show_it_or_says_why_memd_differs() -> None:
    assert len(rows()) > 50
    ways = [(each, (each.tests, each.command, each.differs)) for each in rows()]
    assert [each for each, texts in ways if sum(map(bool, texts)) != 1] == []
    expected = [each.expects for each in rows()]
    assert len(set(expected)) == len(expected)


@pytest.mark.parametrize("each", [row for row in rows() if row.tests], ids=lambda row: row.expects)
def test_the_files_of_tests_exist(each: Row) -> None:
    files = [word for word in shlex.split(each.tests) if word.startswith("tests/")]
    assert files
    assert [file for file in files if not (ROOT / file).is_file()] == []


@pytest.mark.parametrize(
    ("command", "has_passed", "last_line"),
    [
        ("printf 'one\\ntwo\\n\\n'", True, "two"),
        ("echo so far; exit 3", False, "so far"),
        ("false | cat; echo on", False, "it said nothing"),
        ("true", True, "it said nothing"),
    ],
)
def test_a_command_passes_by_its_status(command: str, *, has_passed: bool, last_line: str) -> None:
    outcome = outcome_of(row(command=command))
    assert (outcome.has_passed, outcome.last_line) == (has_passed, last_line)


def test_tests_that_select_or_run_nothing_have_not_passed(tmp_path: Path) -> None:
    skipped = tmp_path / "test_skipped.py"
    skipped.write_text("import pytest\n\n\ndef test_nothing() -> None:\n    pytest.skip('why')\n")
    assert outcome_of(row(tests=f"{PASSES} -k no_test_has_this_name")).has_passed is False
    outcome = outcome_of(row(tests=str(skipped)))
    assert (outcome.status, outcome.has_passed) == (0, False)


def test_a_row_that_has_no_end_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ecosystem, "TIMEOUT_S", 0.1)
    outcome = outcome_of(row(command="exec sleep 60"))
    assert not outcome.has_passed
    assert "no end" in outcome.last_line


def test_a_line_of_the_table_has_four_cells_and_says_what_failed() -> None:
    shown = line(outcome_of(row(command="echo 'a | b'; exit 1", expects="x | y")))
    assert shown == ("| gRPC | x \\| y | `echo 'a \\| b'; exit 1` | FAILED: a \\| b |")


def test_one_that_fails_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["ecosystem"])
    made = [row(command="true"), row(command="false")]
    monkeypatch.setattr(ecosystem, "rows", lambda: made)
    assert ecosystem.main() == 1
    assert "1 of 2 rows passed" in capsys.readouterr().out
    made[1] = Row(area="gRPC", expects="a thing", differs="a | b")
    capsys.readouterr()
    assert ecosystem.main() == 0
    shown = capsys.readouterr().out
    assert "| gRPC | a thing | memd does otherwise | a \\| b |" in shown
    assert "1 of 1 rows passed; 1 differ" in shown
