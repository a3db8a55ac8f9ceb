"""The list of planted bugs fits the sources: `make mutants` itself takes long and is soak."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import reduce
from importlib import import_module
from textwrap import dedent
from typing import TYPE_CHECKING, Any

import pytest

from tests.mutants import run
from tests.mutants.run import (
    ROOT,
    Bug,
    DoesNotRunError,
    PythonTests,
    bugs,
    place_of,
    planted_in,
    source_of_test,
)

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("bug", bugs(), ids=lambda bug: bug.name)
def test_a_bug_has_one_place_where_it_compiles_and_a_test_that_exists(bug: Bug) -> None:
    place = place_of(bug, ROOT)
    assert bug.find.split() != bug.replace.split()
    if place.suffix == ".py":
        compile(planted_in(place.read_text(), bug), str(place), "exec")
    if bug.is_native:
        expect_native_test(bug)
    else:
        module = import_module(bug.program.removesuffix(".py").replace("/", "."))
        test: Any = reduce(getattr, bug.test.split("::"), module)
        assert callable(test)


def expect_native_test(bug: Bug) -> None:
    suite, name = bug.test.split(".")
    source = source_of_test(bug)
    # Tests that several programs share are in headers.
    texts = [source.read_text()] + [path.read_text() for path in source.parent.glob("*.h")]
    compact = "".join("".join(text.split()) for text in texts)
    assert any(f"{kind}({suite},{name})" in compact for kind in ("TEST", "TEST_F", "TEST_P")), (
        f"{bug.program} has no test {bug.test}"
    )


def test_a_bug_has_a_name_of_its_own() -> None:
    assert [name for name, count in Counter(bug.name for bug in bugs()).items() if count > 1] == []


class TestWhatCountsAsCaught:
    """The exit of pytest decides, and its last line."""

    @pytest.fixture
    def bug(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bug:
        """Its program has a test for each end that one may come to."""
        monkeypatch.setattr(run, "SOURCE", tmp_path)
        monkeypatch.setattr(run, "SCRATCH", tmp_path)
        (tmp_path / "test_ends.py").write_text(
            dedent("""
                import pytest

                @pytest.fixture
                def breaks_before():
                    raise OSError

                @pytest.fixture
                def breaks_after():
                    yield
                    raise OSError

                def test_passes(): pass
                def test_fails(): assert False
                def test_begins_with_an_error(breaks_before): pass
                def test_passes_and_ends_with_an_error(breaks_after): pass
                def test_fails_and_ends_with_an_error(breaks_after): assert False
                def test_is_skipped(): pytest.skip("no device")
            """)
        )
        (tmp_path / "test_does_not_import.py").write_text("import there_is_no_such_module\n")
        return Bug(name="", file="", find="", replace="", program="test_ends.py", test="")

    @pytest.mark.parametrize(
        "test",
        [
            "test_fails",
            "test_begins_with_an_error",
            "test_passes_and_ends_with_an_error",
            "test_fails_and_ends_with_an_error",
        ],
    )
    def test_a_failure_and_an_error_of_a_fixture_do(self, bug: Bug, test: str) -> None:
        assert PythonTests().fails(bug, [test], timeout_s=60) is not None

    def test_a_test_that_passes_does_not(self, bug: Bug) -> None:
        assert PythonTests().fails(bug, ["test_passes"], timeout_s=60) is None

    @pytest.mark.parametrize("test", ["test_is_skipped", "test_is_missing"])
    def test_what_did_not_run_says_nothing(self, bug: Bug, test: str) -> None:
        with pytest.raises(DoesNotRunError):
            PythonTests().fails(bug, [test], timeout_s=60)

    def test_a_module_that_cannot_be_imported_says_nothing(self, bug: Bug) -> None:
        missing = replace(bug, program="test_does_not_import.py")
        with pytest.raises(DoesNotRunError):
            PythonTests().fails(missing, ["test_passes"], timeout_s=60)
