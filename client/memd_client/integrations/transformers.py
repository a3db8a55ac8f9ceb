"""Hugging Face's Trainer whose every step is a commit of memd.

    session = memd_client.connect(job="gpt-finetune")
    memd_client.offload(model, session)
    trainer = CommittedTrainer(model, arguments, train_dataset=dataset, session=session)
    trainer.train()  # after a crash, the next step

Needs the packages transformers and accelerate.
"""

from __future__ import annotations

import dataclasses
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from memd_client.checkpoints.checkpoint_files import os_errors
from memd_client.checkpoints.torch_archive import load_archive, save_archive
from memd_client.errors import InvalidArgument
from memd_client.integrations.adam_states import refuse_other_states
from memd_client.integrations.refusals import refuse_processes, refuse_scaler
from memd_client.optimizer import AdamW
from memd_client.random_states import random_state, set_random_state
from memd_client.save_safetensors import save_safetensors

try:
    from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerState
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
    from transformers.trainer_callback import ExportableState
    from transformers.trainer_pt_utils import reissue_pt_warnings
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"memd_client.integrations.transformers needs {error.name}: pip install {error.name}",
        name=error.name,
    ) from error

if TYPE_CHECKING:
    from memd_client.session import Session

# Stands for a checkpoint where Trainer asks which one it goes on from.
_COMMIT = "the commit of memd that was resumed"
_COUNTERS = (
    "_total_loss_scalar",
    "_initial_global_step",
    "_globalstep_last_logged",
    "current_flos",
)
_STATE_FIELDS = dataclasses.fields(TrainerState)


class CommitsSteps:
    """A mixin that makes each step of a Trainer one commit, and goes on at the last commit.

    Put it before the Trainer that it extends: `class Mine(CommitsSteps, SFTTrainer)`. `train()`
    without `resume_from_checkpoint` goes on at the job's last commit, with the `TrainerState`, the
    scheduler, random numbers, the position in the data and the loss that is not logged yet.
    Logging, evaluation and saving at that step come after its commit, so they are repeated, also if
    they had happened. `train(resume_from_checkpoint=…)` loads Trainer's own checkpoint, as ever; a
    job that has commits goes on from it. To begin anew, `connect(fresh=True)`.

    Random numbers of a dataset or a collator (the masks of `DataCollatorForLanguageModeling`) are
    as after Trainer's own checkpoints: others than without the interruption, because the
    next batch was made before the commit. Draw them in the model, or prepare them in the dataset.

    Args:
        session: of the job that the model is offloaded to. The mixin tracks "trainer", "scheduler"
            and random numbers in it, and calls `resume()` and `commit()`.

    Raises:
        InvalidArgument: fp16, whose GradScaler skips steps (use bf16); several processes; an
            `optim` that memd does not have; a second `train()` in one session.
    """

    def __init__(self, *args: Any, session: Session, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._session = session
        self._resumed = False
        self._progress = _Progress(self)
        self._random_state: dict[str, Any] | None = None
        self._was_last_step = False
        trainer: Any = self
        _refuse_arguments(trainer)
        if trainer.optimizer is None and trainer.optimizer_cls_and_kwargs is None:
            trainer.optimizer_cls_and_kwargs = (AdamW, _adam_settings(trainer.args))
        trainer.add_callback(_Repeat(trainer))

    def _load_from_checkpoint(self, checkpoint: str, model: Any = None) -> None:
        # Trainer loads before it makes the optimizer, and so before resume(), which would put the
        # commit's buffers over the checkpoint's.
        if self._resumed:
            super()._load_from_checkpoint(checkpoint, model)  # type: ignore[misc] # of Trainer

    def _init_training_state(self, max_steps: int, *args: Any) -> tuple[int, int]:
        trainer: Any = self
        if self._resumed:
            raise InvalidArgument(
                "train() was called already in this session, which goes on at a commit once: "
                "connect again and make another Trainer"
            )
        updates_per_epoch, _, checkpoint, _ = args
        begin = super()._init_training_state(max_steps, *args)  # type: ignore[misc] # of Trainer
        trainer.create_optimizer()
        trainer.create_scheduler(num_training_steps=max_steps)
        trainer._created_lr_scheduler = False  # Trainer keeps it as if the user had made it
        self._session.track(trainer=self._progress, scheduler=trainer.lr_scheduler, rng=True)
        self._session.resume()
        self._resumed = True
        if checkpoint is not None:
            self._progress.forget()
            trainer._load_from_checkpoint(checkpoint)
            return begin  # type: ignore[no-any-return] # of Trainer
        if self._progress.loaded is None:
            return begin  # type: ignore[no-any-return] # of Trainer
        self._random_state = random_state()
        self._progress.restore_state()
        done, at = divmod(trainer.state.global_step, updates_per_epoch)
        if trainer.args.ignore_data_skip:
            at = 0
        return done, at * trainer.args.gradient_accumulation_steps

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if self._was_last_step:
            return
        if self._random_state is not None:
            kwargs["resume_from_checkpoint"] = _COMMIT
        super()._run_epoch(*args, **kwargs)  # type: ignore[misc] # of Trainer

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not _COMMIT:
            super()._load_rng_state(checkpoint)  # type: ignore[misc] # of Trainer
        elif self._random_state is not None:
            set_random_state(self._random_state)

    def _maybe_log_save_evaluate(
        self,
        tr_loss: torch.Tensor,
        grad_norm: Any,
        model: Any,
        trial: Any,
        epoch: Any,
        ignore_keys_for_eval: Any,
        start_time: float,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        # Behind the scheduler and on_step_end; before evaluation, which needs the new values.
        self._progress.commit(
            self._session,
            grad_norm=None if grad_norm is None else float(grad_norm),
            learning_rate=kwargs.get("learning_rate"),
            ignore_keys_for_eval=ignore_keys_for_eval,
            seconds=self._progress.seconds_before + time.time() - start_time,
        )
        super()._maybe_log_save_evaluate(  # type: ignore[misc] # of Trainer
            tr_loss,
            grad_norm,
            model,
            trial,
            epoch,
            ignore_keys_for_eval,
            start_time,
            *args,
            **kwargs,
        )

    def _finalize_training(self, trial: Any, num_train_samples: int, start_time: float) -> Any:
        # The last metrics describe the whole training: its loss, steps and seconds.
        return super()._finalize_training(  # type: ignore[misc] # of Trainer
            trial, num_train_samples, start_time - self._progress.seconds_before
        )

    def repeat_after_commit(self, start_time: float) -> None:
        """Repeats what Trainer does between the resumed commit and the next step."""
        loaded = self._progress.loaded
        if loaded is None or self._random_state is None:
            return
        trainer: Any = self
        set_random_state(self._random_state)
        state = trainer.state
        # By the on_train_begin of a callback. It is of this training and not of the commit, and
        # Trainer obeys after one step.
        is_stopped = trainer.control.should_training_stop
        trainer.control.should_training_stop = False
        ended_epoch = self._progress.restore_counters()
        keep = loaded["arguments"]

        def follow() -> None:
            trainer._maybe_log_save_evaluate(
                trainer._tr_loss,
                keep["grad_norm"],
                trainer.model_wrapped,
                None,
                state.epoch,
                keep["ignore_keys_for_eval"],
                start_time,
                learning_rate=keep["learning_rate"],
            )

        follow()
        control = trainer.control
        if control.should_training_stop or control.should_epoch_stop or ended_epoch:
            trainer.control = trainer.callback_handler.on_epoch_end(trainer.args, state, control)
            follow()
        # If a callback stops the training later, Trainer still makes one step.
        self._was_last_step = trainer.control.should_training_stop
        trainer.control.should_training_stop |= is_stopped
        self._random_state = random_state()

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        trainer: Any = self
        model = trainer.model
        if state_dict is not None or not trainer.args.should_save or not _is_plain(model):
            super()._save(output_dir, state_dict=state_dict)  # type: ignore[misc] # of Trainer
            return
        folder = Path(trainer.args.output_dir if output_dir is None else output_dir)
        with os_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        # As of save_pretrained, which would hold all weights at once.
        model.config.dtype = str(model.dtype).removeprefix("torch.")
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
        save_safetensors(model, folder)
        processing = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
        if processing is not None:
            processing.save_pretrained(folder)
        torch.save(trainer.args, folder / "training_args.bin")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        trainer: Any = self
        if not trainer.args.should_save or _is_divided(trainer):
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc] # of Trainer
            return
        folder = Path(output_dir)
        save_archive(trainer.optimizer.state_dict(), folder / OPTIMIZER_NAME)
        with warnings.catch_warnings(record=True) as caught:
            save_archive(trainer.lr_scheduler.state_dict(), folder / SCHEDULER_NAME)
        reissue_pt_warnings(caught)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        trainer: Any = self
        optimizer, scheduler = (
            Path(checkpoint or "", name) for name in (OPTIMIZER_NAME, SCHEDULER_NAME)
        )
        has_both = optimizer.is_file() and scheduler.is_file()
        if checkpoint is None or not has_both or _is_divided(trainer):
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc] # of Trainer
            return
        # Mapped: the moments of one parameter at a time come into this process.
        states = load_archive(optimizer)
        refuse_other_states(states, trainer.optimizer, optimizer)
        settings = load_archive(scheduler)
        trainer.optimizer.load_state_dict(states)
        with warnings.catch_warnings(record=True) as caught:
            trainer.lr_scheduler.load_state_dict(settings)
        reissue_pt_warnings(caught)


class CommittedTrainer(CommitsSteps, Trainer):  # type: ignore[misc] # transformers has no types
    """`transformers.Trainer` with `CommitsSteps`: takes `session` beside Trainer's arguments. Its
    optimizer is memd's AdamW with the settings of `TrainingArguments`, unless another of memd's is
    given."""


class _Progress:
    """A Trainer's part of a commit: an object that the session tracks."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._arguments: dict[str, Any] = {}
        self._committed = -1  # the global step of the last commit
        self._loaded: dict[str, Any] | None = None

    @property
    def loaded(self) -> dict[str, Any] | None:
        """The state that resume() has restored, if the job had a commit."""
        return self._loaded

    @property
    def seconds_before(self) -> float:
        """Seconds of training that led to the resumed commit."""
        if self._loaded is None:
            return 0.0
        return float(self._loaded["arguments"]["seconds"])

    def forget(self) -> None:
        """A checkpoint is loaded over what resume() has restored."""
        self._loaded = None

    def commit(self, session: Session, **arguments: Any) -> None:
        """Commits the step, once: Trainer asks again at the end of an epoch."""
        step = self._trainer.state.global_step
        if step == self._committed:
            return
        self._arguments = arguments
        session.commit()
        self._committed = step

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        if not hasattr(trainer, "_tr_loss"):  # resume() asks once after it has loaded
            return {}
        # Not asdict(), which copies the whole log_history, and fails on a tensor with a gradient.
        state = {field.name: getattr(trainer.state, field.name) for field in _STATE_FIELDS}
        state["stateful_callbacks"] = _callback_states(trainer)
        return {
            "state": state,
            "control": dataclasses.asdict(trainer.control),
            "loss": float(trainer._tr_loss),
            "counters": {name: getattr(trainer, name) for name in _COUNTERS},
            "arguments": self._arguments,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded = state

    def restore_state(self) -> None:
        assert self._loaded is not None
        trainer = self._trainer
        fresh = trainer.state
        trainer.state = TrainerState(**self._loaded["state"])
        self._committed = trainer.state.global_step
        trainer._load_callback_state()
        # The rest belongs to this run, as when Trainer loads a checkpoint.
        for name in ("max_steps", "num_train_epochs", "is_local_process_zero"):
            setattr(trainer.state, name, getattr(fresh, name))
        trainer.state.is_world_process_zero = fresh.is_world_process_zero

    def restore_counters(self) -> bool:
        """Returns whether the commit's step was the last of an epoch."""
        assert self._loaded is not None
        trainer = self._trainer
        trainer._tr_loss.fill_(self._loaded["loss"])
        for name, value in self._loaded["counters"].items():
            setattr(trainer, name, value)
        control = dict(self._loaded["control"])
        if self._loaded["state"]["max_steps"] != trainer.state.max_steps:
            del control["should_training_stop"]  # the job was finished, and this run is longer
        for name, value in control.items():
            setattr(trainer.control, name, value)
        if trainer.state.global_step >= trainer.state.max_steps:
            trainer.control.should_training_stop = True
        return float(trainer.state.epoch).is_integer()


class _Repeat(TrainerCallback):  # type: ignore[misc] # transformers has no types
    """Repeats, when training begins, what follows the resumed commit."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.repeat_after_commit(time.time())


def _callback_states(trainer: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for callback in [*trainer.callback_handler.callbacks, trainer.control]:
        if isinstance(callback, ExportableState):
            found.setdefault(type(callback).__name__, []).append(callback.state())
    return {name: states if len(states) > 1 else states[0] for name, states in found.items()}


def _refuse_arguments(trainer: Any) -> None:
    refuse_scaler(getattr(trainer.accelerator, "scaler", None), instead="bf16=True")
    refuse_processes(trainer.args.world_size, what="Trainer")


def _adam_settings(arguments: Any) -> dict[str, Any]:
    if arguments.optim not in ("adamw_torch", "adamw_torch_fused"):
        raise InvalidArgument(
            f"memd has no optimizer for optim={str(arguments.optim)!r}; use adamw_torch, or pass "
            "optimizer_cls_and_kwargs with memd_client.Adam or AdamW"
        )
    return {
        "lr": arguments.learning_rate,
        "betas": (arguments.adam_beta1, arguments.adam_beta2),
        "eps": arguments.adam_epsilon,
    }


def _is_divided(trainer: Any) -> bool:
    """Others write its optimizer's state."""
    return bool(trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled)


def _is_plain(model: Any) -> bool:
    """`save_pretrained` writes what `state_dict()` has, under the same names."""
    return (
        isinstance(model, PreTrainedModel)
        and not model.is_remote_code()
        and not getattr(model, "_hf_peft_config_loaded", False)
        and getattr(model, "hf_quantizer", None) is None
        and not _is_converted(model)
    )


def _is_converted(model: Any) -> bool:
    """`save_pretrained` renames or splits tensors: the rule of `revert_weight_conversion`."""
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        conversions = get_model_conversion_mapping(model, add_legacy=False)
    return bool(conversions)
