"""The place of Lightning's training loop: what a commit has of it, and how it goes on there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.trainer import call

from memd_client.errors import InvalidArgument
from memd_client.random_states import random_state, set_random_state

if TYPE_CHECKING:
    from collections.abc import Iterator

# Stands for a path in what callbacks have as their state.
_PATH = "memd.path"
# A larger tensor that training_step() has returned is not kept for the hooks behind it.
_OUTPUT_BYTES_MAX = 4096
_METRICS = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")


class LoopPlace:
    """Notes where the loop of a Trainer stands. A loop that goes on repeats what Lightning does
    behind the committed batch: hooks, validation, the end of the epoch.

    An epoch's batches have the order of the interrupted one: loaders are made, asked for their
    iterators and for the first batch with the random numbers of then.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._fit = trainer.fit_loop
        self._epoch = trainer.fit_loop.epoch_loop
        self._begin: dict[str, Any] = {}
        self._batch: dict[str, Any] = {}
        self._to_go_on: dict[str, Any] | None = None
        self._random: dict[str, Any] = {}  # at the commit
        self._setup_data = self._fit.setup_data
        self._on_run_start = self._epoch.on_run_start
        self._fit.setup_data = self._note_setup
        self._epoch.on_run_start = self._note_begin

    def release(self) -> None:
        """The loop is Lightning's own again."""
        vars(self._fit).pop("setup_data", None)
        vars(self._epoch).pop("on_run_start", None)
        vars(self._epoch).pop("run", None)

    def note_batch(self) -> None:
        """A batch of the epoch is about to be trained."""
        self._begin["batches"] += 1

    def note_outputs(self, outputs: Any, index: int) -> None:
        """The committed batch has given `outputs`."""
        self._batch = {"outputs": _small(outputs), "index": index}

    def state(self) -> dict[str, Any]:
        """Plain data, unless callbacks have something else."""
        trainer, connector = self._trainer, self._trainer._logger_connector
        loops = self._fit.state_dict()
        loops["state_dict"].pop("combined_loader", None)  # batches are skipped instead
        datamodule = trainer.datamodule
        return {
            "loops": loops,
            "begin": self._begin,
            "batch": self._batch,
            "reloaded": self._fit._last_train_dl_reload_epoch,
            "should_stop": trainer.should_stop,
            "callbacks": _storable(call._call_callbacks_state_dict(trainer)),
            "datamodule": _storable(datamodule.state_dict()) if datamodule is not None else {},
            "metrics": {
                name: {key: _on_cpu(value) for key, value in getattr(connector, name).items()}
                for name in _METRICS
            },
        }

    def go_on(self, state: dict[str, Any], random: dict[str, Any]) -> None:
        """From `state`, with these random numbers, when the loop runs."""
        trainer = self._trainer
        self._to_go_on, self._random = state, random
        call._call_callbacks_load_state_dict(trainer, {"callbacks": _restored(state["callbacks"])})
        if trainer.datamodule is not None and state["datamodule"]:
            trainer.datamodule.load_state_dict(_restored(state["datamodule"]))
        # In the middle of an epoch, so that Lightning does not begin it.
        self._fit.epoch_progress.load_state_dict(state["loops"]["epoch_progress"])
        self._fit.restarting = True
        self._epoch.run = self._run

    def _note_setup(self) -> None:
        fit = self._fit
        if fit._combined_loader is None or fit._should_reload_train_dl:
            if self._to_go_on is not None:
                set_random_state(self._to_go_on["begin"]["setup"])
            self._begin["setup"] = random_state()
        self._setup_data()

    def _note_begin(self, data_fetcher: Any) -> None:
        if isinstance(data_fetcher, _DataLoaderIterDataFetcher):
            raise InvalidArgument(
                "training_step(dataloader_iter) fetches batches itself, so a commit does not know "
                "which were trained; take batch and batch_idx instead"
            )
        fit, epoch = self._fit, self._epoch
        # The condition of Lightning's on_run_start().
        makes_iterator = self._trainer.current_epoch > 0 and not (
            fit.is_resuming or epoch.restarting
        )
        again = self._generators_and_random() if makes_iterator else None
        self._on_run_start(data_fetcher)
        self._begin |= {
            "again": again,
            "first": random_state(),
            "fetched": data_fetcher.fetched,
            "batches": 0,
        }

    def _generators_and_random(self) -> dict[str, Any]:
        return {
            "random": random_state(),
            "generators": [each.get_state() for each in self._generators()],
        }

    def _generators(self) -> list[torch.Generator]:
        found: dict[int, torch.Generator] = {}
        for loader in self._fit._combined_loader.flattened:
            batches = getattr(loader, "batch_sampler", None)
            sampler = getattr(loader if batches is None else batches, "sampler", None)
            for holder in (loader, sampler):
                generator = getattr(holder, "generator", None)
                if generator is not None:
                    found[id(generator)] = generator
        return list(found.values())

    def _run(self, data_fetcher: Any) -> None:
        """In place of the epoch loop's run(), once."""
        assert self._to_go_on is not None
        state, self._to_go_on = self._to_go_on, None
        fit, epoch = self._fit, self._epoch
        del epoch.run
        fit._last_train_dl_reload_epoch = state["reloaded"]
        fit.load_state_dict(state["loops"])
        for loop in _all_loops(fit):
            loop._restarting = loop._loaded_from_state_dict = False
            loop._resuming_from_checkpoint = False
        self._trainer.should_stop = state["should_stop"]
        for name in _METRICS:
            getattr(self._trainer._logger_connector, name).update(state["metrics"][name])
        batch = self._skip(data_fetcher, state["begin"])
        set_random_state(self._random)
        self._begin, self._batch = state["begin"], state["batch"]
        self._go_on_behind(batch, data_fetcher)

    def _skip(self, data_fetcher: Any, begin: dict[str, Any]) -> Any:
        """Fetches the batches that were trained. Returns the last."""
        again = begin["again"]
        if again is not None:
            generators = self._generators()
            if len(generators) != len(again["generators"]):
                raise InvalidArgument(
                    "the loaders or their samplers have other generators than when the commit was "
                    "made, so the order of batches cannot be restored"
                )
            set_random_state(again["random"])
            for generator, stored in zip(generators, again["generators"], strict=True):
                generator.set_state(stored)
            iter(data_fetcher)
        data_fetcher.fetched = begin["fetched"]
        set_random_state(begin["first"])
        batch = None
        for _ in range(begin["batches"]):
            batch, _, _ = next(data_fetcher)
        return batch

    def _go_on_behind(self, batch: Any, data_fetcher: Any) -> None:
        """As Lightning's advance() behind the schedulers, and then as its run()."""
        trainer, epoch = self._trainer, self._epoch
        connector = trainer._logger_connector
        batch = call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)
        outputs, index = self._batch["outputs"], self._batch["index"]
        try:
            connector.on_batch_start(batch)
            for hooks in (call._call_callback_hooks, call._call_lightning_module_hook):
                hooks(trainer, "on_train_batch_end", outputs, batch, index)
            connector.on_batch_end()
            epoch.batch_progress.increment_completed()
            epoch.on_advance_end(data_fetcher)
        finally:
            epoch.on_iteration_done()
        data_fetcher._start_profiler = epoch._on_before_fetch
        data_fetcher._stop_profiler = epoch._on_after_fetch
        while not epoch.done:
            try:
                epoch.advance(data_fetcher)
                epoch.on_advance_end(data_fetcher)
            except StopIteration:
                break
            finally:
                epoch.on_iteration_done()


def _all_loops(loop: _Loop) -> Iterator[Any]:
    yield loop
    for each in vars(loop).values():
        if isinstance(each, _Loop):
            yield from _all_loops(each)


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def _small(outputs: Any) -> Any:
    """The parts of what training_step() has returned that a commit keeps."""
    if not isinstance(outputs, Mapping):
        return None
    kept: dict[str, Any] = {}
    for name, value in outputs.items():
        if isinstance(value, torch.Tensor) and value.nbytes <= _OUTPUT_BYTES_MAX:
            kept[str(name)] = value.detach().cpu().clone()
        elif isinstance(value, bool | int | float | str):
            kept[str(name)] = value
    return kept


def _storable(value: Any) -> Any:
    """As plain data: callbacks have paths in their states."""
    if isinstance(value, PurePath):
        return {_PATH: str(value)}
    if isinstance(value, dict):
        return {key: _storable(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_storable(each) for each in value)
    return _on_cpu(value)


def _restored(value: Any) -> Any:
    """The value that `_storable` was given."""
    if isinstance(value, dict):
        if value.keys() == {_PATH}:
            return Path(value[_PATH])
        return {key: _restored(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_restored(each) for each in value)
    return value
