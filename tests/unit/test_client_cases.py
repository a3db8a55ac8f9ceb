"""The client against a daemon in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

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
from tests.unit.fake_session import FakeDaemon
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
    from tests.unit.client_cases import OpenSession

# tests/integration/test_client_cases.py has them all with a real daemon.
pytestmark = pytest.mark.soak


@pytest.fixture
def job() -> OpenSession:
    return FakeDaemon().session
