"""torch.compile of offloaded models with inductor. It compiles C++, so `make test-more`
runs it."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import pytest
import torch
import torch._inductor.config

import memd_client
from tests.unit.compiled_models import (
    ASKS_FOR_GRADIENTS,
    COMPILE,
    Trained,
    assert_no_leases,
    assert_same,
    build,
    tokens,
    train_offloaded,
    train_plain,
)
from tests.unit.fake_session import FakeDaemon

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memd_client import Session

pytestmark = [
    pytest.mark.more,
    ASKS_FOR_GRADIENTS,
    # When inductor is imported.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]


@pytest.fixture(autouse=True, scope="module")
def compiled_code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests share what they compile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        # Processes of inductor's own would outlive the test.
        patch.setattr(torch._inductor.config, "compile_threads", 1)
        yield


@pytest.fixture
def session() -> Iterator[Session]:
    torch._dynamo.reset()
    with FakeDaemon().session() as session:
        yield session


@cache
def plain(how: str, mode: str | None) -> Trained:
    return train_plain(how, backend="inductor", mode=mode)


@pytest.mark.parametrize(
    ("when", "how"),
    [
        ("before", "whole"),
        ("after", "blocks"),
        pytest.param("before", "blocks", marks=pytest.mark.soak),
        pytest.param("after", "whole", marks=pytest.mark.soak),
    ],
)
def test_has_the_bits_of_the_plain_model_compiled_in_the_same_way(
    how: str, when: str, session: Session
) -> None:
    trained = train_offloaded(how, when, session, backend="inductor")
    assert_same(trained, plain(how, None))


def test_without_cuda_graphs_their_mode_has_the_bits_of_the_plain_model(session: Session) -> None:
    """They would keep the addresses of parameters, but torch makes none on the CPU."""
    trained = train_offloaded("blocks", "after", session, mode="reduce-overhead")
    assert_same(trained, plain("blocks", "reduce-overhead"))


def test_constants_of_parameters_are_refused(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = memd_client.offload(build(), session)
    monkeypatch.setattr(torch._inductor.config, "freezing", True)
    COMPILE["blocks"](model)
    with torch.no_grad(), pytest.raises(memd_client.NotResident, match=r"^job 'fake'.*freezing"):
        model(tokens(0))
    assert_no_leases(session)
