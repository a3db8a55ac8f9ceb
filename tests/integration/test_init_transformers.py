"""Hugging Face models that are built or loaded inside `init`, with the bits of plain ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import memd_client
from memd_client import unnamed as unnamed_module
from tests.daemons import running_daemon

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from memd_client import Session
    from tests.daemons import Daemon

transformers: Any = pytest.importorskip("transformers")

pytestmark = [pytest.mark.more, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon() as daemon:
        yield daemon


@pytest.fixture(params=["at home", "away"])
def session(
    request: pytest.FixtureRequest, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Session]:
    if request.param == "away":
        monkeypatch.setattr(unnamed_module, "_HOME_BYTES_MAX", 0)
        monkeypatch.setattr(unnamed_module, "_SMALL_BYTES", 0)
    session = memd_client.connect(daemon.address, job="hugging-face")
    yield session
    session.drop_job()


def config(*, is_tied: bool) -> Any:
    return transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=is_tied,
    )


def assert_same_model(model: Any, reference: Any) -> None:
    state, expected = model.state_dict(), reference.state_dict()
    assert state.keys() == expected.keys()
    for name, value in state.items():
        assert torch.equal(value, expected[name]), name
    tokens = torch.arange(24).view(2, 12)
    for one in (model, reference):
        one.train()
    loss = model(input_ids=tokens, labels=tokens).loss
    plain = reference(input_ids=tokens, labels=tokens).loss
    assert torch.equal(loss, plain)
    loss.backward()
    plain.backward()
    for (name, one), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), name


@pytest.mark.parametrize("is_tied", [False, True])
def test_from_config(session: Session, *, is_tied: bool) -> None:
    made = transformers.AutoModelForCausalLM.from_config
    torch.manual_seed(0)
    reference = made(config(is_tied=is_tied))
    expected = torch.get_rng_state()
    torch.manual_seed(0)
    with memd_client.init(session):
        model = made(config(is_tied=is_tied))
    assert torch.equal(torch.get_rng_state(), expected)
    assert_same_model(model, reference)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_tied", [False, True])
def test_from_pretrained(
    session: Session, tmp_path: Path, *, dtype: torch.dtype, is_tied: bool
) -> None:
    loaded = transformers.AutoModelForCausalLM.from_pretrained
    torch.manual_seed(0)
    source = transformers.AutoModelForCausalLM.from_config(config(is_tied=is_tied))
    source.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    reference = loaded(tmp_path, dtype=dtype)
    with memd_client.init(session):
        model = loaded(tmp_path, dtype=dtype)
    assert_same_model(model, reference)


def test_from_pretrained_initialises_what_the_checkpoint_lacks(
    session: Session, tmp_path: Path
) -> None:
    """As a sequence classifier has a head of its own."""
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config(is_tied=False)).save_pretrained(tmp_path)
    torch.manual_seed(1)
    reference = loaded(tmp_path, num_labels=3)
    torch.manual_seed(1)
    with memd_client.init(session):
        model = loaded(tmp_path, num_labels=3)
    state, expected = model.state_dict(), reference.state_dict()
    assert state.keys() == expected.keys()
    for name, value in state.items():
        assert torch.equal(value, expected[name]), name
