"""Lightning's Trainer whose every step is a commit of memd, and whose checkpoints are streamed.

    session = memd_client.connect(job="gpt-finetune")
    module = memd_client.offload(MyLightningModule(), session)  # configure_optimizers: memd's AdamW
    trainer = lightning.Trainer(
        callbacks=[CommitSteps(session)], plugins=[StreamedCheckpointIO()], max_epochs=3
    )
    trainer.fit(module, loader)  # after a crash, the next step

Needs the package lightning.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

try:
    from lightning.pytorch import Callback
    from lightning.pytorch.plugins.io import CheckpointIO
    from lightning.pytorch.strategies import SingleDeviceStrategy
    from lightning.pytorch.trainer.states import TrainerFn
except ModuleNotFoundError as error:
    missing = (error.name or "lightning").partition(".")[0]
    raise ModuleNotFoundError(
        f"memd_client.integrations.lightning needs {missing}: pip install {missing}",
        name=missing,
    ) from error

from memd_client.checkpoints.checkpoint_files import os_errors
from memd_client.checkpoints.torch_archive import live_state, load_archive, save_archive
from memd_client.errors import InvalidArgument
from memd_client.integrations.adam_states import refuse_other_states
from memd_client.integrations.lightning_loop import LoopPlace
from memd_client.integrations.load_tensors import load_tensors
from memd_client.integrations.progress import Progress
from memd_client.integrations.refusals import (
    refuse_divided,
    refuse_optimizer,
    refuse_processes,
    refuse_scaler,
)
from memd_client.random_states import random_state, set_random_state

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from memd_client.session import Session


class CommitSteps(Callback):  # type: ignore[misc] # lightning has no types here
    """Makes each optimizer step of `fit()` one commit, behind the scheduler, and goes on at the
    last commit: with the loop's counters, schedulers, callbacks, random numbers and the place in
    the data.

    `fit()` without `ckpt_path` goes on at the job's last commit. Hooks, validation, checkpoints and
    the end of an epoch behind that commit are repeated, also if they had happened; hooks that begin
    the epoch are not. `fit(ckpt_path=…)` loads Lightning's own checkpoint, as ever; a job that has
    commits goes on from it. To begin anew, `connect(fresh=True)`. Batches of the epoch that were
    trained are fetched and dropped.

    With it and `StreamedCheckpointIO` a checkpoint takes no copy of the weights. Those of `fit`,
    `validate`, `test` and `predict` with `ckpt_path` replace the job's: all or none, unless the
    module, or one in it, loads in its own way, by a `load_state_dict`, hooks or extra state. It is
    the first callback, wherever it stands in the list: others see the new values.

    No commit has what `on_save_checkpoint` adds: give it to `session.track()`. Means of
    `self.log(on_epoch=True)` are over the batches behind the commit, as after Lightning's own
    checkpoints, and random numbers of a dataset with a prefetching loader are others.

    Args:
        session: of the job that the module is offloaded to. The callback tracks "lightning",
            schedulers and random numbers in it, and calls `resume()` and `commit()`.

    Raises:
        InvalidArgument: fp16, whose GradScaler skips steps (use bf16); a strategy of several
            processes, DeepSpeed or FSDP; an optimizer that is not memd's; a second `fit()` in one
            session; `training_step(dataloader_iter)`.
    """

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        self._place: LoopPlace | None = None
        self._loaded: dict[str, Any] | None = None
        self._committed_step = -1  # the global step of the last commit
        self._weights: tuple[Mapping[str, Any], bool] | None = None  # of a checkpoint; strict

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Lightning calls it before it loads a checkpoint."""
        if stage == "fit" and self._place is not None:
            raise InvalidArgument(
                "fit() was called already in this session, which goes on at a commit once: "
                "connect again and make another Trainer"
            )
        _refuse_trainer(trainer)
        trainer.callbacks = [self, *(each for each in trainer.callbacks if each is not self)]
        strategy = trainer.strategy
        if isinstance(strategy.checkpoint_io, StreamedCheckpointIO):
            # Others may keep the state, which shows the values of each time it is used.
            strategy.lightning_module_state_dict = partial(live_state, pl_module)
        strategy.load_model_state_dict = partial(self._load_weights, trainer, pl_module)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Lightning calls it when its work is over. The Trainer may still save checkpoints."""
        del trainer, pl_module, stage
        if self._place is not None:
            self._place.release()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Optimizers are made. What a checkpoint has of them is loaded next."""
        _refuse_optimizers(trainer)
        before = random_state()
        self._place = LoopPlace(trainer)
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        named = {f"scheduler{index}": each for index, each in enumerate(schedulers)}
        progress = Progress(self, what="the callback")
        self._session.track(lightning=progress, **named, rng=True)
        if self._session.resume():
            for optimizer in trainer.optimizers:
                # Otherwise torch warns of a scheduler that steps at the end of a resumed epoch.
                optimizer._opt_called = True
        at_commit = random_state()
        set_random_state(before)  # loaders are made with those of a new process
        if self._weights is not None:
            self._load_checkpoint(trainer, pl_module, *self._weights)
        elif self._loaded is not None:
            self._place.go_on(self._loaded, at_commit)
            self._committed_step = _optimizer_steps(self._loaded)
        self._loaded = self._weights = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """A checkpoint of Lightning is loaded by now."""
        del pl_module
        self._committed_step = max(self._committed_step, trainer.global_step)

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Counts it."""
        del trainer, pl_module, batch, batch_idx
        assert self._place is not None  # of on_fit_start()
        self._place.note_batch()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Commits, if the batch made a step. Schedulers have stepped."""
        del pl_module, batch
        if trainer.global_step == self._committed_step:
            return
        assert self._place is not None  # of on_fit_start()
        self._place.note_outputs(outputs, batch_idx)
        self._session.commit()
        self._committed_step = trainer.global_step

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Lightning uses the parameters next, and an error there would hide this one."""
        del trainer, pl_module, exception
        self._session.transaction.job.steps.drop_open()

    def progress(self) -> dict[str, Any]:
        """The part of a commit that is tracked as "lightning"."""
        assert self._place is not None  # of on_fit_start()
        return self._place.state()

    def note_loaded(self, state: dict[str, Any]) -> None:
        """`state` is that of the commit. Random numbers are not restored yet."""
        self._loaded = state

    def _load_weights(
        self, trainer: Any, pl_module: Any, checkpoint: Mapping[str, Any], strict: bool = True
    ) -> None:
        """In place of the strategy's load_model_state_dict()."""
        weights = checkpoint["state_dict"]
        if trainer.state.fn == TrainerFn.FITTING and self._place is None:
            # The commit, which has buffers, is restored before: when there are optimizers.
            self._weights = weights, strict
            return
        what = f"ckpt_path={trainer.ckpt_path}"
        load_tensors(pl_module, weights, self._session, what=what, strict=strict)

    def _load_checkpoint(
        self, trainer: Any, pl_module: Any, weights: Mapping[str, Any], strict: bool
    ) -> None:
        checkpoint = trainer._checkpoint_connector._loaded_checkpoint
        path = Path(str(trainer.ckpt_path))
        states = checkpoint.get("optimizer_states")
        if states is None or len(states) != len(trainer.optimizers):
            raise InvalidArgument(
                f"{path} has the states of {len(states or ())} optimizers, and the module has "
                f"{len(trainer.optimizers)}; a checkpoint of weights alone (save_weights_only) "
                "goes into the module with load_state_dict(), before fit()"
            )
        for state, optimizer in zip(states, trainer.optimizers, strict=True):
            refuse_other_states(state, optimizer, path)
        load_tensors(pl_module, weights, self._session, what=f"ckpt_path={path}", strict=strict)


class StreamedCheckpointIO(CheckpointIO):  # type: ignore[misc] # lightning has no types here
    """Writes and reads Lightning's checkpoints, which are files of `torch.save`: plain Lightning
    and plain torch load them. A file appears whole, once its bytes are on disk; what was there
    stays until then.

    This process holds the moments of at most one parameter. Lightning copies the weights before it
    calls this, unless `CommitSteps` is among the callbacks.
    """

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        storage_options: Any = None,
    ) -> None:
        """
        Raises:
            InvalidArgument: the path is no local one, or cannot be written.
            CapacityError: the disk is full.
            DeviceError: a write failed. After any error what was there before is as it was.
        """
        if storage_options is not None:
            raise InvalidArgument("StreamedCheckpointIO takes no storage_options")
        file = _local(path)
        with os_errors(file):
            file.parent.mkdir(parents=True, exist_ok=True)
        save_archive(checkpoint, file)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = None,
        weights_only: bool | None = None,
    ) -> Any:
        """Its tensors are on the CPU, and show the bytes of the file.

        Raises:
            InvalidArgument: no file of `torch.save` is there, or it is damaged.
        """
        del map_location
        return load_archive(_local(path), weights_only=weights_only)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """A file that is not there is none.

        Raises:
            InvalidArgument: it may not be removed.
            DeviceError: it could not be.
        """
        file = _local(path)
        with os_errors(file):
            if file.is_dir():
                shutil.rmtree(file)
            else:
                file.unlink(missing_ok=True)


def _optimizer_steps(state: dict[str, Any]) -> int:
    """As of `trainer.global_step`, which counts those of one kind."""
    automatic = state["loops"]["epoch_loop.automatic_optimization.optim_progress"]
    manual = state["loops"]["epoch_loop.manual_optimization.optim_step_progress"]
    return max(
        int(automatic["optimizer"]["step"]["total"]["completed"]),
        int(manual["total"]["completed"]),
    )


def _refuse_trainer(trainer: Any) -> None:
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    refuse_scaler(scaler, instead='precision="bf16-mixed"')
    refuse_processes(trainer.world_size, what="Trainer")
    if not isinstance(trainer.strategy, SingleDeviceStrategy):
        refuse_divided(type(trainer.strategy).__name__, instead="leave strategy= out")


def _refuse_optimizers(trainer: Any) -> None:
    for optimizer in trainer.optimizers:
        refuse_optimizer(optimizer, what="configure_optimizers() gives")


def _local(path: str | os.PathLike[str]) -> Path:
    if "://" in str(path):
        raise InvalidArgument(
            f"StreamedCheckpointIO writes local files, and {path} is none; leave the plugin out"
        )
    return Path(path)
