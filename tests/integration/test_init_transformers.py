"""Hugging Face models that are built or loaded inside `init`, with the bits of plain ones."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

import memd_client
from memd_client.parameters import unnamed as unnamed_module
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


_LOADED = """
import json, sys, threading
import torch
import transformers
from transformers.models.llama import modeling_llama

def anonymous_bytes():
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("RssAnon"))

before = anonymous_bytes()
import memd_client

peak, is_over = 0, threading.Event()

def watch():
    global peak
    while not is_over.wait(0.001):
        peak = max(peak, anonymous_bytes())

session = memd_client.connect(sys.argv[1], job="loaded")
watcher = threading.Thread(target=watch, daemon=True)
watcher.start()
with memd_client.init(session):
    model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[2], dtype=torch.bfloat16)
is_over.set()
watcher.join()
print(json.dumps({"peak": peak - before, "model": sum(p.nbytes for p in model.parameters())}))
session.drop_job()
"""


def test_a_checkpoint_that_is_converted_is_not_read_ahead(tmp_path: Path) -> None:
    large = config(is_tied=False)
    large.update({"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 24})
    large.update({"head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 8})
    transformers.AutoModelForCausalLM.from_config(large).save_pretrained(tmp_path)
    with running_daemon(host="96MiB", nvme="1GiB") as daemon:
        done = subprocess.run(
            [sys.executable, "-c", _LOADED, daemon.address, str(tmp_path)],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["model"] > 200e6
    assert found["peak"] < 64 << 20, found
