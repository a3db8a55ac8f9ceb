"""The client against a real daemon: the cases of tests/unit/client_cases.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import memd_client
from tests.daemons import Daemon, running_daemon
from tests.unit.amsgrad_cases import TestAmsgrad  # noqa: F401
from tests.unit.autocast_cases import (  # noqa: F401
    TestAutocast,
    cast_pair,
    shared_pair,
)
from tests.unit.backward_cases import TestStepsCalledInBackward  # noqa: F401
from tests.unit.client_cases import (  # noqa: F401  # pytest finds tests and fixtures by their names here
    TestAway,
    TestBlobs,
    TestGather,
    TestHooks,
    TestJobs,
    TestOptimizer,
    TestOptimizerState,
    TestStreaming,
    gpt,
    mlp,
    pair,
    session,
)
from tests.unit.early_cases import TestStepInBackward  # noqa: F401
from tests.unit.empty_cases import TestEmpty  # noqa: F401
from tests.unit.encoder_cases import TestEncoderLayer  # noqa: F401
from tests.unit.frozen_cases import TestFrozen  # noqa: F401
from tests.unit.init_cases import (  # noqa: F401
    TestInitCopies,
    TestInitErrors,
    TestInitForms,
    TestInitJobs,
    TestInitNames,
    TestInitNumbers,
    away,
    room,
)
from tests.unit.lazy_cases import (  # noqa: F401
    TestDetached,
    TestGradScaler,
    TestGraphsOfGradients,
    TestHooksOfOthers,
    TestLazyGradients,
)
from tests.unit.optim_cases import TestChannelsLast, TestTorchOptimizers  # noqa: F401
from tests.unit.program_cases import TestPrograms  # noqa: F401
from tests.unit.refusal_cases import TestRefusals  # noqa: F401
from tests.unit.settings_cases import TestSettings  # noqa: F401
from tests.unit.thread_cases import TestThreads  # noqa: F401
from tests.unit.tied_cases import TestTied  # noqa: F401
from tests.unit.track_cases import TestAfterCommit, TestCommit, TestResume, TestTrack  # noqa: F401
from tests.unit.view_cases import TestViews  # noqa: F401
from tests.unit.zero_grad_cases import TestZeroGrad  # noqa: F401

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.unit.client_cases import OpenSession


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon() as daemon:
        yield daemon


@pytest.fixture
def job(daemon: Daemon) -> Iterator[OpenSession]:
    """Sessions of a job that is dropped after the test."""

    def open_session() -> memd_client.Session:
        return memd_client.connect(daemon.address, job="cases")

    yield open_session
    open_session().drop_job()
