"""An export of a model with tied tensors has what a plain model of the same kind asks for."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, load_model
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

import memd_client
from tests.integration.test_distributed_checkpoint import assert_same
from tests.integration.test_export_dcp import assert_whole_archives, export
from tests.integration.test_snapshot_export import job_of
from tests.integration.test_snapshots import memd

if TYPE_CHECKING:
    from pathlib import Path

    from memd_client import Session
    from tests.daemons import Daemon

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

TIED = {"head.weight": "embed.weight", "scales.1.mean": "scales.0.mean"}


class Scale(nn.Module):
    """A weight, and a buffer that each forward changes."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(64))
        self.register_buffer("mean", torch.zeros(64))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.mean += value.detach().mean(0)
        return value * self.weight + self.mean


class Tied(nn.Module):
    """A head with the embedding's weight, and a module that is there twice, with its buffers."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(50, 64)
        self.scales = nn.ModuleList([Scale()] * 2)
        self.head = nn.Linear(64, 50)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        value = self.embed(tokens)
        for scale in self.scales:
            value = scale(value)
        result: torch.Tensor = self.head(value)
        return result


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The state after one step."""
    model(torch.arange(9)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}


def states_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """By the names of parameters."""
    return get_state_dict(model, optimizer)[1]["state"]


def assert_loads(path: Path, values: dict[str, torch.Tensor], daemon: Daemon) -> None:
    """Into a plain model and into one that is offloaded."""
    plain = Tied(seed=1)
    state = {"model": plain.state_dict()}
    load(state, checkpoint_id=path)
    plain.load_state_dict(state["model"])
    assert_same(dict(plain.state_dict()), values)
    with job_of(daemon, "tied-loaded") as session:
        model = memd_client.offload(Tied(seed=1), session)
        kept = {"model": model.state_dict(keep_vars=True)}
        load(kept, storage_reader=memd_client.checkpoint.Reader(path))
        assert_same(dict(model.state_dict()), values)


def exported(daemon: Daemon, session: Session, path: Path) -> set[str]:
    """The names of the model in an export of now."""
    session.snapshot(path.name)
    export(daemon, session.job, path.name, path)
    names = FileSystemReader(path).read_metadata().state_dict_metadata
    assert not [name for name in names if name.startswith("blobs.")]
    return {name.removeprefix("model.") for name in names if name.startswith("model.")}


@pytest.mark.parametrize("is_built", [False, True], ids=["offload", "init"])
def test_it_loads_into_tied_models(daemon: Daemon, tmp_path: Path, is_built: bool) -> None:
    path = tmp_path / "out"
    with job_of(daemon, "tied") as session:
        with memd_client.init(session) if is_built else contextlib.nullcontext():
            model = Tied()
        if not is_built:
            memd_client.offload(model, session)
        optimizer = memd_client.AdamW(model.parameters(), lr=1e-2)
        values = trained(model, optimizer)
        # The two names are of the same bytes.
        assert exported(daemon, session, path) == values.keys()
        assert_whole_archives(path)
        stored = {
            key.fqn: at for key, at in FileSystemReader(path).read_metadata().storage_data.items()
        }
        assert all(stored[f"model.{one}"] == stored[f"model.{two}"] for one, two in TIED.items())
        memd(daemon, "snapshot", "export", "tied", "out", str(tmp_path / "files"))
        states = {
            name: {key: torch.as_tensor(each).clone() for key, each in state.items()}
            for name, state in states_of(model, optimizer).items()
        }
    assert_loads(path, values, daemon)
    plain = Tied(seed=1)
    found = {"optimizer": {"state": states_of(plain, torch.optim.AdamW(plain.parameters()))}}
    load(found, checkpoint_id=path)
    for name, state in states.items():
        assert_same(found["optimizer"]["state"][name], state)
    # Files of safetensors have a tied parameter once, as those of the library's save_model.
    assert load_file(tmp_path / "files" / "model.safetensors").keys() == values.keys() - {
        name for name in values if name.startswith("scales.1") or name == "head.weight"
    }
    load_model(plain, tmp_path / "files" / "model.safetensors")
    assert_same(dict(plain.state_dict()), values)
    with job_of(daemon, "tied-loaded") as session:
        model = memd_client.offload(Tied(seed=2), session)
        memd_client.load_safetensors(model, tmp_path / "files", session)
        assert_same(dict(model.state_dict()), values)


def test_an_asynchronous_save_loads_into_tied_models(daemon: Daemon, tmp_path: Path) -> None:
    with job_of(daemon, "tied") as session:
        model = memd_client.offload(Tied(), session)
        optimizer = memd_client.AdamW(model.parameters(), lr=1e-2)
        values = trained(model, optimizer)
        saving: Any = async_save(
            {"model": model.state_dict(keep_vars=True)},
            storage_writer=memd_client.checkpoint.Writer(tmp_path / "out"),
        )
        trained(model, optimizer)
        saving.result()
    assert_loads(tmp_path / "out", values, daemon)


def test_an_export_has_the_names_of_the_model_that_was_offloaded_last(
    daemon: Daemon, tmp_path: Path
) -> None:
    model: Any = Tied()
    names = model.state_dict().keys()
    with job_of(daemon, "tied-changed") as session:
        memd_client.offload(model, session)
        assert exported(daemon, session, tmp_path / "first") == names
        session.close()
        with memd_client.connect(daemon.address, job="tied-changed") as again:
            other: Any = Tied()
            other.add_module("output", other.head)
            del other.head
            # Without it, only the module's name is new.
            other.output.register_parameter("bias", None)
            memd_client.offload(other, again, strict=False)
            second = exported(daemon, again, tmp_path / "second")
    assert second == {*names, "output.weight"} - {"head.weight"}


def test_a_model_of_another_session_leaves_the_names(daemon: Daemon, tmp_path: Path) -> None:
    with job_of(daemon, "tied-twice") as session:
        names = memd_client.offload(Tied(), session).state_dict().keys()
        with memd_client.connect(daemon.address, job="tied-twice") as beside:
            embedding = nn.ModuleDict({"embed": nn.Embedding(50, 64)})
            memd_client.offload(embedding, beside, strict=False)
            assert exported(daemon, session, tmp_path / "out") == names


def test_names_of_tied_parameters_are_no_blobs_of_the_user(daemon: Daemon) -> None:
    with job_of(daemon, "tied") as session:
        memd_client.offload(Tied(), session)
        with pytest.raises(memd_client.InvalidArgument, match="are memd's own"):
            session.put('@tied/["a", "embed.weight"]', torch.ones(1))
        with pytest.raises(memd_client.InvalidArgument, match="which names a tensor of a module"):
            session.delete('@tied/["head.weight", "embed.weight"]')


def test_a_tied_name_that_is_too_long_is_left_out_with_a_warning(
    daemon: Daemon, tmp_path: Path
) -> None:
    long = "long" * 150
    with job_of(daemon, "tied-long") as session:
        model = nn.ModuleDict({"short": nn.Linear(4, 4, bias=False)})
        model[long] = nn.ModuleDict({long[:400]: nn.Linear(4, 4, bias=False)})
        model.get_submodule(f"{long}.{long[:400]}").weight = model["short"].weight
        with pytest.warns(match=f"will lack '{long}.*another name of 'short.weight'"):
            memd_client.offload(model, session)
        assert exported(daemon, session, tmp_path / "out") == {"short.weight"}


def test_transformers_loads_files_of_a_tied_model(daemon: Daemon, tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    path = tmp_path / "files"
    with job_of(daemon, "tied-llama") as session:
        model = memd_client.offload(transformers.LlamaForCausalLM(config), session)
        session.snapshot("kept")
        values = {name: value.clone() for name, value in model.state_dict().items()}
        memd(daemon, "snapshot", "export", "tied-llama", "kept", str(path))
        export(daemon, "tied-llama", "kept", tmp_path / "out")
    config.save_pretrained(path)
    assert "lm_head.weight" in values
    assert_same(dict(transformers.LlamaForCausalLM.from_pretrained(path).state_dict()), values)
    plain = transformers.LlamaForCausalLM(config)
    state = {"model": plain.state_dict()}
    load(state, checkpoint_id=tmp_path / "out")
    assert_same(state["model"], values)
