"""The list of planted bugs fits the sources: `make mutants` itself takes long and is soak."""

from __future__ import annotations

from collections import Counter
from functools import reduce
from importlib import import_module
from typing import Any

import pytest

from tests.mutants.run import ROOT, Bug, bugs, place_of, source_of_test


@pytest.mark.parametrize("bug", bugs(), ids=lambda bug: bug.name)
def test_a_bug_has_one_place_and_a_test_that_exists(bug: Bug) -> None:
    place_of(bug, ROOT)
    assert bug.find.split() != bug.replace.split()
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
