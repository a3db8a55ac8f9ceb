"""The files of `Accelerator.save_state`, streamed out of memd and into it."""

from __future__ import annotations

import re
import zipfile
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import (
    MODEL_NAME,
    OPTIMIZER_NAME,
    SAFE_WEIGHTS_NAME,
    SCHEDULER_NAME,
    WEIGHTS_NAME,
    save,
)

from memd_client.checkpoints.checkpoint_files import CheckpointFiles
from memd_client.checkpoints.torch_archive import (
    as_state,
    live_state,
    load_archive,
    save_archive,
)
from memd_client.errors import InvalidArgument
from memd_client.integrations.adam_states import refuse_other_states
from memd_client.integrations.load_tensors import load_tensors, loads_in_its_own_way
from memd_client.load_safetensors import load_safetensors
from memd_client.parameters.model_tensors import model_tensors
from memd_client.save_safetensors import save_safetensors

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import nn

    from memd_client.session import Session

# Accelerate writes these. Any other file in a checkpoint's folder is somebody else's.
_NAMES = re.compile(
    r"(model|pytorch_model|optimizer|scheduler|sampler|dl_state_dict|random_states|scaler"
    r"|custom_checkpoint)(_\d+)?\.(safetensors|bin|pkl|pt)"
)
# Archives of torch that Accelerate reads after the weights are loaded.
_ARCHIVES = re.compile(r"(scheduler|sampler|random_states|custom_checkpoint)(_\d+)?\.(bin|pkl)")


class LiveState(dict[str, Any]):
    """A model's state of now, which stands for it in the list of weights that hooks see."""

    def __init__(self, model: nn.Module) -> None:
        live = live_state(model)
        super().__init__(live)
        self._metadata = getattr(live, "_metadata", None)  # torch's name
        self._model = model
        self._ids = {name: id(value) for name, value in self.items()}

    @property
    def model(self) -> nn.Module | None:
        """None if a hook has changed the state."""
        is_whole = self._ids == {name: id(value) for name, value in self.items()}
        return self._model if is_whole else None


def is_of_accelerate(name: str) -> bool:
    """Whether Accelerate writes a file of this name into a checkpoint's folder."""
    return _NAMES.fullmatch(name) is not None


def save_weights(weights: Sequence[Any], folder: Path, *, safe_serialization: bool) -> None:
    """Each under the name that Accelerate gives it."""
    for index, state in enumerate(weights):
        path = folder / _numbered(SAFE_WEIGHTS_NAME if safe_serialization else WEIGHTS_NAME, index)
        model = state.model if isinstance(state, LiveState) else None
        if model is not None and safe_serialization:
            save_safetensors(model, path)
        elif not safe_serialization:
            save_archive(as_state(state.items(), of=state), path)
        else:
            copies = {name: torch.clone(value.detach()) for name, value in state.items()}
            save(copies, path, safe_serialization=True)


def save_optimizers(optimizers: Sequence[Any], folder: Path) -> None:
    """Each under the name that Accelerate gives it."""
    for index, optimizer in enumerate(optimizers):
        save_archive(optimizer.state_dict(), folder / _numbered(f"{OPTIMIZER_NAME}.bin", index))


class StoredStates:
    """The states in a folder that are large: opened and checked before anything changes."""

    def __init__(self, folder: Path, optimizers: Sequence[Any]) -> None:
        """
        Raises:
            InvalidArgument: a file is missing or damaged, or of other optimizers.
        """
        self._folder = folder
        self._optimizers = optimizers
        self._states = []
        for index, optimizer in enumerate(optimizers):
            path = _existing(folder / _numbered(f"{OPTIMIZER_NAME}.bin", index))
            state = load_archive(path)
            refuse_other_states(state, optimizer, path)
            self._states.append(state)

    def load(self, models: Sequence[nn.Module], session: Session, *, strict: bool) -> None:
        """Into the models, each all or not at all, and then into the optimizers."""
        for index, model in enumerate(models):
            path = self._folder / _numbered(SAFE_WEIGHTS_NAME, index)
            if path.exists() and not loads_in_its_own_way(model):
                load_safetensors(model, path, session, strict=strict)
                continue
            if path.exists():
                state = _whole_state(model, path)
            else:
                path = _existing(self._folder / _numbered(f"{MODEL_NAME}.bin", index))
                state = load_archive(path)
            load_tensors(model, state, session, what=f"load_state({path})", strict=strict)
        for optimizer, state in zip(self._optimizers, self._states, strict=True):
            optimizer.load_state_dict(state)


def refuse_damaged(folder: Path, *, schedulers: int, custom_objects: int) -> None:
    """Accelerate reads these files last, and goes on without a word if it cannot read the random
    states.

    Raises:
        InvalidArgument: one is missing or damaged.
    """
    for index in range(schedulers):
        _existing(folder / _numbered(f"{SCHEDULER_NAME}.bin", index))
    _existing(folder / "random_states_0.pkl")
    found = len(list(folder.glob("custom_checkpoint_*.pkl")))
    if found != custom_objects:
        raise InvalidArgument(
            f"{folder} has the states of {found} objects that were registered for checkpointing, "
            f"and {custom_objects} are registered now"
        )
    for path in folder.iterdir():
        if _ARCHIVES.fullmatch(path.name):
            try:
                with zipfile.ZipFile(path) as archive:
                    damaged = archive.testzip()
            except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
                raise InvalidArgument(f"{path} is truncated or damaged: {error}") from error
            if damaged is not None:
                raise InvalidArgument(f"{path} is damaged: {damaged}")


def _whole_state(model: nn.Module, path: Path) -> dict[str, torch.Tensor]:
    """All of a safetensors file, in memory, for a model that wants it so."""
    state: dict[str, torch.Tensor] = {}
    with CheckpointFiles(path) as files:
        for name, stored in files.tensors.items():
            data = torch.empty(stored.tensor.size_bytes, dtype=torch.uint8)
            stored.read(0, data.numpy().data)
            state[name] = data.view(stored.tensor.dtype).view(stored.tensor.shape)
    for target in model_tensors(model):
        found = [state[name] for name in target.names if name in state]
        # The file has a tied parameter once.
        state |= {name: found[0] for name in target.names if found}
    return state


def _numbered(name: str, index: int) -> str:
    return name.replace(".", f"_{index}.") if index else name


def _existing(path: Path) -> Path:
    if not path.exists():
        raise InvalidArgument(f"{path.parent} is no checkpoint of these objects: no {path.name}")
    return path
