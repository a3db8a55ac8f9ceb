"""The list of planted bugs fits the sources: `make mutants` itself takes an hour and is soak."""

from __future__ import annotations

import pytest

from tests.mutants.run import ROOT, Bug, bugs, place_of


@pytest.mark.parametrize("bug", bugs(), ids=lambda bug: bug.name)
def test_a_bug_has_one_place_and_a_test_that_exists(bug: Bug) -> None:
    place_of(bug, ROOT)
    suite, name = bug.test.split(".")
    texts = [path.read_text() for path in (ROOT / "tests" / "native").rglob(f"{bug.program}.cc")]
    assert len(texts) == 1
    compact = "".join(texts[0].split())
    assert any(f"{kind}({suite},{name})" in compact for kind in ("TEST", "TEST_F", "TEST_P")), (
        f"{bug.program} has no test {bug.test}"
    )
