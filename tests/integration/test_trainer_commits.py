"""`CommittedTrainer` beside plain Trainer: jobs that are extended, stopped, killed and resumed."""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import memd_client
from tests.daemons import running_daemon

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.daemons import Daemon

transformers: Any = pytest.importorskip("transformers")
CommittedTrainer: Any = pytest.importorskip(
    "memd_client.integrations.transformers"
).CommittedTrainer

pytestmark = [pytest.mark.more, pytest.mark.timeout(300)]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.25), nn.Linear(16, 1))

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layers(inputs).square().mean()}


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self) -> None:
        self._rows = torch.randn(24, 8, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"inputs": self._rows[index]}


class Killed(Exception):
    pass


class KillAfter(transformers.TrainerCallback):  # type: ignore[misc] # transformers has no types
    """Raises when the step has been committed, before the next."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step:
            raise Killed


class Run:
    """Trains one job, in a new session and a new Trainer each time."""

    def __init__(self, address: str, job: str, out: Path) -> None:
        self.address = address
        self.job = job
        self.out = out

    def plain(
        self,
        max_steps: int,
        *,
        kind: Any = transformers.Trainer,
        checkpoint: bool = False,
        **settings: Any,
    ) -> Trained:
        return self._train(kind, Model(), max_steps, resume=checkpoint or None, **settings)

    def ours(self, max_steps: int, *, kind: Any = CommittedTrainer, **settings: Any) -> Trained:
        with memd_client.connect(self.address, job=self.job) as session:
            model = memd_client.offload(Model(), session)
            return self._train(kind, model, max_steps, session=session, **settings)

    def _train(
        self,
        kind: Any,
        model: nn.Module,
        max_steps: int,
        *,
        callbacks: tuple[Any, ...] = (),
        save: bool = False,
        resume: bool | None = None,
        **extra: Any,
    ) -> Trained:
        transformers.set_seed(0)
        trainer = kind(
            model=model,
            args=transformers.TrainingArguments(
                output_dir=self.out,
                max_steps=max_steps,
                per_device_train_batch_size=4,
                learning_rate=1e-2,
                lr_scheduler_type="cosine",
                save_strategy="steps" if save else "no",
                save_steps=10,
                logging_steps=3,
                logging_nan_inf_filter=False,
                use_cpu=True,
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=Rows(),
            callbacks=list(callbacks),
            **extra,
        )
        result = trainer.train(resume_from_checkpoint=resume)
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        return Trained(result, weights, trainer.state.log_history)


class Trained:
    def __init__(self, result: Any, weights: dict[str, torch.Tensor], logs: list[Any]) -> None:
        self.steps = result.global_step
        self.loss = result.training_loss
        self.metrics = result.metrics
        self.weights = weights
        self.logs = logs


def assert_equal_weights(ours: Trained, plain: Trained) -> None:
    assert ours.weights.keys() == plain.weights.keys()
    for name, value in plain.weights.items():
        assert torch.equal(ours.weights[name], value), name


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon() as daemon:
        yield daemon


@pytest.fixture
def run(daemon: Daemon, tmp_path: Path) -> Iterator[Run]:
    yield Run(daemon.address, "trained", tmp_path)
    gc.collect()  # ends the session of a training that failed
    memd_client.connect(daemon.address, job="trained").drop_job()


def test_a_finished_job_goes_on_with_more_steps(run: Run) -> None:
    """As plain Trainer goes on from the checkpoint of its last step."""
    run.plain(10, save=True)
    expected = run.plain(20, save=True, checkpoint=True)
    done = run.ours(10)
    again = run.ours(10)
    assert again.steps == 10, "it was finished"
    assert_equal_weights(again, done)
    longer = run.ours(20)
    assert longer.steps == expected.steps == 20
    assert_equal_weights(longer, expected)
    assert len(longer.logs) == len(expected.logs)


def test_the_last_metrics_of_a_resumed_training_describe_all_its_steps(run: Run) -> None:
    class Slow(transformers.TrainerCallback):  # type: ignore[misc] # transformers has no types
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            time.sleep(0.2)

    expected = run.plain(8)
    with pytest.raises(Killed):
        run.ours(8, callbacks=(Slow(), KillAfter(5)))
    resumed = run.ours(8)
    assert resumed.steps == 8
    assert resumed.loss == expected.loss
    assert resumed.metrics["train_runtime"] >= 1.0
    assert_equal_weights(resumed, expected)


def test_what_trainer_logs_may_be_a_tensor_and_is_logged_again(run: Run) -> None:
    class Logs:
        def compute_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)  # type: ignore[misc] # of Trainer
            self.log({"batch_loss": loss})  # it has a grad_fn
            return loss

    class Plain(Logs, transformers.Trainer):  # type: ignore[misc] # transformers has no types
        pass

    class Ours(Logs, CommittedTrainer):  # type: ignore[misc] # transformers has no types
        pass

    def batch_losses(trained: Trained) -> list[torch.Tensor]:
        return [entry["batch_loss"].detach() for entry in trained.logs if "batch_loss" in entry]

    expected = run.plain(6, kind=Plain)
    with pytest.raises(Killed):
        run.ours(6, kind=Ours, callbacks=(KillAfter(4),))
    resumed = run.ours(6, kind=Ours)
    assert len(batch_losses(resumed)) == 6
    assert batch_losses(resumed) == batch_losses(expected)


def test_what_cannot_be_stored_is_named(run: Run) -> None:
    class Logs(transformers.TrainerCallback):  # type: ignore[misc] # transformers has no types
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            state.log_history.append({"sample": object()})

    with pytest.raises(
        memd_client.InvalidArgument,
        match=r"\['log_history'\]\[0\]\['sample'\] is a ",
    ):
        run.ours(2, callbacks=(Logs(),))


def test_a_callback_stops_the_training_behind_the_step_that_plain_trainer_makes(run: Run) -> None:
    class StopAtEpoch(transformers.TrainerCallback):  # type: ignore[misc] # transformers has no types
        def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = True

    expected = run.plain(8, callbacks=(StopAtEpoch(),))
    ours = run.ours(8, callbacks=(StopAtEpoch(),))
    assert ours.steps == expected.steps == 1
    assert_equal_weights(ours, expected)
    assert run.ours(8).steps == 1, "the training was stopped"
    assert run.ours(9).steps == 9


def test_a_callback_that_stops_when_training_begins_stops_a_resumed_one_too(run: Run) -> None:
    class StopAtBegin(transformers.TrainerCallback):  # type: ignore[misc] # transformers has no types
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = True

    class StopAfter(transformers.TrainerCallback):  # type: ignore[misc] # transformers has no types
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 11

    expected = run.plain(20, callbacks=(StopAfter(),))
    for train in (run.plain, run.ours):
        with pytest.raises(Killed):
            train(20, save=True, callbacks=(KillAfter(10),))
    assert run.plain(20, checkpoint=True, callbacks=(StopAtBegin(),)).steps == 11
    ours = run.ours(20, callbacks=(StopAtBegin(),))
    assert ours.steps == 11
    assert_equal_weights(ours, expected)
    assert run.ours(20).steps == 11, "the training was stopped"
    assert run.ours(21, callbacks=(StopAtBegin(),)).steps == 12, "it is longer now"
