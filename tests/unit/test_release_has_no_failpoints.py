"""Moments to be killed at and bugs to be planted are for tests; what is installed has none."""

from __future__ import annotations

import re
from pathlib import Path

from memd_native import _core

_NATIVE = Path(__file__).parents[2] / "native"
_NAMED = re.compile(r'MEMD_(?:FAILPOINT|PLANTED)\("([^"]+)"\)')


def test_the_installed_module_knows_no_failpoint_and_no_planted_bug() -> None:
    names = {
        name for path in _NATIVE.rglob("*.cc") for name in _NAMED.findall(path.read_text("utf-8"))
    }
    module = Path(str(_core.__file__)).read_bytes()
    assert len(names) >= 52
    # Found if it were there: text of the same kind is.
    assert b"the volumes are fenced" in module
    assert {name for name in names if name.encode() in module} == set()
    assert b"MEMD_PLANT" not in module
