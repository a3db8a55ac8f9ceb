"""ext4 and xfs lose their power under a job. MEMD_POWER_CUTS and MEMD_POWER_CUT_SEED ask for more
cuts, and others."""

from __future__ import annotations

import os

import pytest

from tests.faults.file_system_power_cut import FILE_SYSTEMS, cut_often, scratch_folder, why_not

CUTS = int(os.environ.get("MEMD_POWER_CUTS", "2"))
SEED = int(os.environ.get("MEMD_POWER_CUT_SEED", "1"))


@pytest.mark.parametrize("file_system", FILE_SYSTEMS)
def test_a_job_stands_at_its_last_commit_or_the_one_under_way(file_system: str) -> None:
    reason = why_not(file_system)
    if reason is not None:
        pytest.skip(reason)
    with scratch_folder() as scratch:
        result = cut_often(file_system, CUTS, SEED, scratch)
    assert result.violations == []
    assert result.cuts == CUTS
    assert result.at_acknowledged + result.at_started == CUTS
