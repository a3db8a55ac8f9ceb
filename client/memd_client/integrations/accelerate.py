"""Hugging Face's Accelerator whose every step is a commit of memd.

    session = memd_client.connect(job="gpt-finetune")
    memd_client.offload(model, session)
    optimizer = memd_client.AdamW(model.parameters())
    accelerator = CommittedAccelerator(session=session)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for epoch in range(accelerator.resume().epoch, 3):
        for batch in loader:  # after a crash, the next one
            with accelerator.accumulate(model):  # the commit is at its end
                accelerator.backward(model(batch))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

Needs the package accelerate.
"""

from __future__ import annotations

import hashlib
import shutil
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

try:
    from accelerate import Accelerator
    from accelerate.utils import DistributedType
    from accelerate.utils.constants import RNG_STATE_NAME
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"memd_client.integrations.accelerate needs {error.name}: pip install {error.name}",
        name=error.name,
    ) from error

from memd_client.base import plain
from memd_client.checkpoints.checkpoint_files import os_errors
from memd_client.checkpoints.whole_folder import WholeFolder
from memd_client.errors import InvalidArgument
from memd_client.integrations.accelerate_files import (
    LiveState,
    StoredStates,
    is_of_accelerate,
    refuse_damaged,
    save_optimizers,
    save_weights,
)
from memd_client.integrations.accelerate_loader import CountedLoader
from memd_client.integrations.progress import Progress
from memd_client.integrations.refusals import (
    refuse_divided,
    refuse_optimizer,
    refuse_processes,
    refuse_scaler,
)
from memd_client.save_safetensors import save_safetensors

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    from memd_client.session import Session

# The name of a file beside Accelerate's own. Accelerate ignores it, and leaves it where it saves
# over a checkpoint of memd: it names the contents of a file that each save writes anew.
_POSITION_NAME = "memd_position"
_WRITTEN_NAME = f"{RNG_STATE_NAME}_0.pkl"


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """The place at which a loop goes on."""

    step: int  # commits that the job has made
    epoch: int  # passes over the loader that were over
    batch: int  # batches of the pass that goes on, which the loader skips by itself


class CommittedAccelerator(Accelerator):  # type: ignore[misc] # accelerate has no types
    """`accelerate.Accelerator` that makes each step one commit, and goes on at the last commit.

    The commit is at the end of `with accelerator.accumulate(model):` if the gradients were
    synchronised there, so put the scheduler's step inside. A loop without `accumulate` calls
    `commit()` after the scheduler. A commit has schedulers, what was registered for checkpointing,
    random numbers, and the place in each loader.

    `resume()` restores them after `prepare()`. The loader's next pass then goes on behind the last
    batch that was trained, in the same order. What the loop does behind the commit of an epoch's
    last batch is done again, as evaluation and a scheduler's step for each epoch; what it does
    behind other commits is not, as with Accelerate's own checkpoints.

    `save_state`, `load_state` and `save_model` stream: at most one parameter, or the moments of
    one, is in this process. The folder is Accelerate's, and plain Accelerate loads it. It has the
    earlier checkpoint or the new one, whole. `load_state` goes on from it in a job that has
    commits too, and says where. It is two transactions: weights, then moments. A model that loads
    in its own way, by a `load_state_dict`, hooks or extra state, gets the weights in memory, and
    copies what it accepts.

    Random numbers of a dataset or a collator are as after Accelerate's own checkpoints: others than
    without the interruption, because the next batch was made before the commit.

    Args:
        session: of the job that the models are offloaded to. The Accelerator tracks its state in
            it, and calls `resume()` and `commit()`.

    Raises:
        InvalidArgument: fp16, whose GradScaler skips steps (use bf16); several processes;
            DeepSpeed, FSDP or Megatron-LM; an optimizer that is not memd's; a loader of torchdata.
    """

    def __init__(self, *args: Any, session: Session, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._session = session
        self._loaders: list[CountedLoader] = []
        self._committed: tuple[list[Any], ...] = ()  # what a commit has: fixed by resume()
        self._is_resumed = False
        self._is_saving = False
        self._loaded: dict[str, Any] | None = None
        _refuse_setup(self)

    def resume(self) -> Position:
        """Restores what the last commit has. Call it once, after `prepare()` and
        `register_for_checkpointing()`.

        Raises:
            InvalidArgument: a second call; or other objects than in that commit.
        """
        if self._is_resumed:
            raise InvalidArgument("resume() was called already: connect again to go on elsewhere")
        named = {f"scheduler{index}": each for index, each in enumerate(self._schedulers)}
        named |= {f"custom{index}": each for index, each in enumerate(self._custom_objects)}
        progress = Progress(self, what="the Accelerator")
        self._session.track(accelerator=progress, **named, rng=True)
        step = self._session.resume()
        self._is_resumed = True
        self._committed = self._parts()
        if step:
            self._go_on_naming()
            # Otherwise torch warns of a scheduler that steps at the end of a resumed epoch.
            for optimizer in self._optimizers:
                optimizer.optimizer._opt_called = True
        if self._loaded is not None:
            self.restore_progress(self._loaded)
        return self._position(step)

    def commit(self, *, wait: bool = False) -> None:
        """Makes the step a commit, for loops that do not use `accumulate()`: see `Session.commit`.

        Raises:
            InvalidArgument: `resume()` was not called, or something was prepared after it.
        """
        self._refuse_unready("commit()")
        self._session.commit(wait=wait)

    @contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        """As Accelerate's. At its end the step is committed, if there was one.

        Raises:
            InvalidArgument: `resume()` was not called, or something was prepared after it.
        """
        self._refuse_unready("accumulate()")
        with super().accumulate(*models):
            yield
        if self.sync_gradients:
            self.commit()

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """As Accelerate's; the loader counts its batches."""
        if isinstance(data_loader, CountedLoader):
            return data_loader
        if self.use_stateful_dataloader:
            raise InvalidArgument(
                "use_stateful_dataloader=True: the loader goes on where the commit was made by "
                "itself; leave it out"
            )
        prepared = super().prepare_data_loader(data_loader, *args, **kwargs)
        counted = CountedLoader(prepared)
        self._loaders.append(counted)
        return counted

    def prepare_optimizer(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """As Accelerate's.

        Raises:
            InvalidArgument: the optimizer is not memd's.
        """
        refuse_optimizer(getattr(optimizer, "optimizer", optimizer), what="this one is")
        return super().prepare_optimizer(optimizer, *args, **kwargs)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """As Accelerate's. A loader that goes on by itself is returned as it is.

        Raises:
            InvalidArgument: the loader goes on behind another number of batches.
        """
        if isinstance(dataloader, CountedLoader):
            return dataloader.skipping(num_batches)
        return super().skip_first_batches(dataloader, num_batches)

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        """As Accelerate's, which copies the whole model out of memd."""
        return LiveState(model) if self._is_saving else super().get_state_dict(model, unwrap)

    def save_model(
        self,
        model: Any,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """As Accelerate's, streamed if it is to be safetensors.

        Raises:
            MemdError: as of `memd_client.save_safetensors`.
        """
        if not safe_serialization:
            super().save_model(model, save_directory, max_shard_size, safe_serialization)
            return
        folder = Path(save_directory)
        with os_errors(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
        save_safetensors(self.unwrap_model(model), folder, max_shard_bytes=max_shard_size)

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        **save_model_func_kwargs: Any,
    ) -> Path:
        """As Accelerate's. Other people's files in the folder stay.

        Raises:
            InvalidArgument: the folder cannot be written or exchanged; or a call between
                `optimizer.step()` and the commit.
            CapacityError: the disk is full.
            DeviceError: a write failed. After any error the earlier checkpoint is there.
        """
        self._session.transaction.job.settle_for("save_state()")
        place = self._folder_to_save(output_dir)
        config = self.project_configuration
        iteration, naming = config.iteration, config.automatic_checkpoint_naming
        optimizers = list(self._optimizers)

        def stream(models: Any, weights: list[Any], folder: str) -> None:
            """The last hook: what is left in the list, Accelerate would save."""
            del models
            save_weights(weights, Path(folder), safe_serialization=safe_serialization)
            save_optimizers(optimizers, Path(folder))
            weights.clear()
            self._optimizers.clear()

        with WholeFolder(place) as new:
            hook = self.register_save_state_pre_hook(stream)
            config.automatic_checkpoint_naming = False
            self._is_saving = True
            try:
                super().save_state(str(new.path), safe_serialization, **save_model_func_kwargs)
                with os_errors(place):
                    _store_position(new.path, self.progress())
                new.place(keeps=lambda name: not is_of_accelerate(name))
            except BaseException:
                config.iteration = iteration
                raise
            finally:
                hook.remove()
                config.automatic_checkpoint_naming = naming
                self._is_saving = False
                self._optimizers[:] = optimizers
        self._remove_earlier(place.parent)
        return place

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> Position:
        """As Accelerate's. If `resume()` was not called, the job's commit is restored before, and
        the checkpoint goes over it. Returns where the checkpoint was made; the beginning, if
        plain Accelerate made it.

        Raises:
            InvalidArgument, IntegrityError: the checkpoint is damaged, or of another model,
                optimizer or loader; the job has other sessions. Nothing has changed.
            CapacityError: the job's disk quota does not hold the new weights beside the old ones.
        """
        folder = self._folder_to_load(input_dir)
        refuse_damaged(
            folder,
            schedulers=len(self._schedulers),
            custom_objects=len(self._custom_objects),
        )
        stored = StoredStates(folder, self._optimizers)
        position = _stored_position(folder)
        if position is not None:
            self._refuse_other_loaders(position)
        if not self._is_resumed:
            self.resume()
        optimizers = list(self._optimizers)
        strict = load_model_func_kwargs.get("strict", True)

        def stream(models: list[Any], folder: str) -> None:
            """The last hook: what is left in the list, Accelerate would load."""
            del folder
            stored.load(models, self._session, strict=strict)
            models.clear()
            self._optimizers.clear()

        hook = self.register_load_state_pre_hook(stream)
        try:
            super().load_state(str(folder), load_kwargs, **load_model_func_kwargs)
        finally:
            hook.remove()
            self._optimizers[:] = optimizers
        if position is None:
            for loader in self._loaders:
                loader.forget()
        else:
            self.restore_progress(position)
        return self._position(self._session.committed_step)

    def progress(self) -> dict[str, Any]:
        """Plain data: what a commit needs to go on, beside what is tracked."""
        return {"loaders": [loader.state() for loader in self._loaders]}

    def note_loaded(self, state: dict[str, Any]) -> None:
        """`state` is that of the commit. Random numbers are not restored yet."""
        self._loaded = state

    def restore_progress(self, state: dict[str, Any]) -> None:
        """Goes on from `state`, of `progress()`, with the random numbers of now.

        Raises:
            InvalidArgument: there were other loaders.
        """
        self._refuse_other_loaders(state)
        for loader, stored in zip(self._loaders, state["loaders"], strict=True):
            loader.go_on(stored)

    def _refuse_other_loaders(self, state: dict[str, Any]) -> None:
        if len(state["loaders"]) != len(self._loaders):
            raise InvalidArgument(
                f"{len(self._loaders)} loaders are prepared now, and {len(state['loaders'])} were "
                "when the commit or checkpoint was made; prepare the same, in the same order"
            )
        for loader, stored in zip(self._loaders, state["loaders"], strict=True):
            loader.refuse_other_generators(stored)

    def _position(self, step: int) -> Position:
        places = [loader.place for loader in self._loaders if loader.is_running]
        places += [loader.place for loader in self._loaders[:1]]
        epoch, batch = places[0] if places else (0, 0)
        return Position(step=step, epoch=epoch, batch=batch)

    def _parts(self) -> tuple[list[Any], ...]:
        return list(self._loaders), list(self._schedulers), list(self._custom_objects)

    def _refuse_unready(self, what: str) -> None:
        if not self._is_resumed:
            raise InvalidArgument(
                f"{what}: call accelerator.resume() before the first step, after prepare(); it "
                "says where the loop goes on, which is the beginning in a new job"
            )
        if any(
            len(now) != len(then) for now, then in zip(self._parts(), self._committed, strict=True)
        ):
            raise InvalidArgument(
                f"{what}: something was prepared or registered after resume(), so no commit has "
                "it; prepare everything before"
            )

    def _folder_to_save(self, given: str | os.PathLike[str] | None) -> Path:
        if self.project_configuration.automatic_checkpoint_naming:
            place = Path(self.project_dir, "checkpoints", f"checkpoint_{self.save_iteration}")
            if place.exists():
                raise InvalidArgument(
                    f"{place} is there already; set project_configuration.iteration to where "
                    "this run begins"
                )
            return place
        if given is None:
            raise InvalidArgument("save_state() needs a folder, or automatic_checkpoint_naming")
        return Path(given)

    def _go_on_naming(self) -> None:
        """Accelerate numbers checkpoints from 0, and this run has some of before."""
        if self.project_configuration.automatic_checkpoint_naming:
            found = _numbered_folders(Path(self.project_dir, "checkpoints"))
            if found:
                last = int(found[-1].name.rpartition("_")[2])
                self.project_configuration.iteration = last + 1

    def _remove_earlier(self, folder: Path) -> None:
        """Accelerate removes them before it saves, and has none if the save fails."""
        config = self.project_configuration
        if config.automatic_checkpoint_naming and config.total_limit is not None:
            found = _numbered_folders(folder)
            for old in found[: max(len(found) - config.total_limit, 0)]:
                with os_errors(old):
                    shutil.rmtree(old)

    def _folder_to_load(self, given: str | os.PathLike[str] | None) -> Path:
        if given is not None:
            folder = Path(given).expanduser()
        elif self.project_configuration.automatic_checkpoint_naming:
            found = _numbered_folders(Path(self.project_dir, "checkpoints"))
            if not found:
                raise InvalidArgument(f"{self.project_dir} has no checkpoint")
            folder = found[-1]
        else:
            raise InvalidArgument("load_state() needs a folder, or automatic_checkpoint_naming")
        if not folder.is_dir():
            raise InvalidArgument(f"{folder} is no folder, so it is no checkpoint")
        return folder


def _refuse_setup(accelerator: Any) -> None:
    refuse_scaler(accelerator.scaler, instead="mixed_precision='bf16'")
    if accelerator.distributed_type in (
        DistributedType.DEEPSPEED,
        DistributedType.FSDP,
        DistributedType.MEGATRON_LM,
    ):
        refuse_divided(accelerator.distributed_type.value, instead="leave its plugin out")
    refuse_processes(accelerator.num_processes, what="Accelerator")


def _stored_position(folder: Path) -> dict[str, Any] | None:
    """None in a checkpoint of plain Accelerate, also if it was saved over one of memd."""
    path = folder / _POSITION_NAME
    if not path.exists():
        return None
    with os_errors(path):
        stored: dict[str, Any] = plain.decode(path.read_bytes())
        is_current = stored["of"] == _digest(folder)
    position: dict[str, Any] = stored["position"]
    return position if is_current else None


def _store_position(folder: Path, position: dict[str, Any]) -> None:
    text = plain.encode({"of": _digest(folder), "position": position}, what="the loaders' state")
    (folder / _POSITION_NAME).write_bytes(text)


def _digest(folder: Path) -> str:
    return hashlib.blake2b((folder / _WRITTEN_NAME).read_bytes(), digest_size=16).hexdigest()


def _numbered_folders(folder: Path) -> list[Path]:
    """`checkpoint_3`, …: the oldest first."""
    found = [(each.name.rpartition("_")[2], each) for each in folder.glob("checkpoint_*")]
    return [each for _, each in sorted((int(n), each) for n, each in found if n.isdigit())]
