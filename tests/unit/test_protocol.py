"""Which version of the protocol two sides speak."""

from __future__ import annotations

import pytest

from memd_native.protocol import ProtocolVersions, versions_said


@pytest.mark.parametrize(
    ("here", "there", "agreed"),
    [
        ((4, 4), (4, 4), 4),
        ((4, 6), (5, 9), 6),
        ((5, 9), (4, 6), 6),
        ((4, 9), (5, 6), 6),
        ((4, 5), (6, 7), None),
        ((6, 7), (4, 5), None),
    ],
)
def test_the_newest_that_both_speak(
    here: tuple[int, int], there: tuple[int, int], agreed: int | None
) -> None:
    ours = ProtocolVersions(oldest=here[0], newest=here[1])
    theirs = ProtocolVersions(oldest=there[0], newest=there[1])
    assert ours.agreed_with(theirs) == theirs.agreed_with(ours) == agreed


def test_a_side_without_a_range_speaks_one_version() -> None:
    alone = versions_said(4, oldest=0, newest=0)
    assert (alone, str(alone)) == (ProtocolVersions(oldest=4, newest=4), "4")
    several = versions_said(6, oldest=4, newest=6)
    assert (4 in several, 3 in several, 7 in several) == (True, False, False)
    assert str(several) == "4 to 6"
