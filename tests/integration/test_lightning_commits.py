"""`CommitSteps` and `StreamedCheckpointIO` beside plain Lightning: trainings that are killed and
resumed, by commit and by checkpoint, and checkpoints that cannot be loaded or saved."""

from __future__ import annotations

import gc
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import memd_client
from tests.daemons import running_daemon
from tests.integration.full_disk import no_file_larger_than

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.daemons import Daemon

lightning: Any = pytest.importorskip("lightning")
ours: Any = pytest.importorskip("memd_client.integrations.lightning")

pytestmark = [
    pytest.mark.more,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # Lightning's advice
]

BATCHES = 6
EPOCHS = 3


class Killed(Exception):
    pass


class Module(lightning.LightningModule):  # type: ignore[misc] # lightning has no types here
    """Draws random numbers everywhere, and follows a metric."""

    def __init__(self, make: Any, *, manual: bool = False, plateau: str = "epoch") -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.layers = nn.Sequential(
            nn.Linear(8, 16), nn.Dropout(0.25), nn.BatchNorm1d(16), nn.Linear(16, 8)
        )
        self.make = make
        self.plateau = plateau
        self.losses: dict[tuple[int, int], float] = {}  # by epoch and batch
        self.ended: list[tuple[int, int]] = []

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss: torch.Tensor = self.layers(batch[0]).square().mean()
        self.losses[self.current_epoch, index] = loss.item()
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def on_train_epoch_start(self) -> None:
        torch.rand(1)  # between the iterator and the first batch

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        torch.rand(1)
        assert batch[0].shape == (4, 8)
        if self.automatic_optimization:
            assert outputs["loss"].ndim == 0
        self.ended.append((self.current_epoch, index))

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.log("valid", self.layers(batch[0]).square().mean() + torch.rand(()))

    def on_train_epoch_end(self) -> None:
        torch.rand(1)

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.parameters(), lr=1e-2)
        if not self.automatic_optimization:
            return optimizer
        step = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.99)
        epoch = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return [optimizer], [
            {"scheduler": step, "interval": "step"},
            {"scheduler": epoch, "interval": "epoch"},
            {
                "scheduler": plateau,
                "interval": self.plateau,
                "monitor": "valid",
                "strict": False,  # before the first validation
            },
        ]


class KillBehind(lightning.Callback):  # type: ignore[misc] # lightning has no types here
    """Raises where the hook is called for the batch (epoch, index)."""

    def __init__(self, hook: str, place: tuple[int, int]) -> None:
        def kill(trainer: Any, module: Any, *args: Any) -> None:
            if (trainer.current_epoch, trainer.fit_loop.batch_idx) == place:
                raise Killed

        setattr(self, hook, kill)


class Stream(torch.utils.data.IterableDataset[list[torch.Tensor]]):
    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        return iter([[row] for row in rows()])


def rows() -> torch.Tensor:
    return torch.randn(BATCHES * 4, 8, generator=torch.Generator().manual_seed(1))


def loader(kind: str) -> Any:
    dataset: Any = Stream() if kind == "stream" else torch.utils.data.TensorDataset(rows())
    settings: dict[str, Any] = {"batch_size": 4}
    if kind in ("shuffled", "worker"):
        settings["shuffle"] = True
    if kind == "worker":  # it asks the sampler for batches when the iterator is made
        settings |= {"num_workers": 1, "multiprocessing_context": "forkserver"}
    if kind == "generator":
        settings |= {"shuffle": True, "generator": torch.Generator().manual_seed(5)}
    return torch.utils.data.DataLoader(dataset, **settings)


class Job:
    """Trains one job, in a new session and a new Trainer each time."""

    def __init__(self, address: str, path: Path) -> None:
        self.address = address
        self.path = path

    def plain(self, **settings: Any) -> Any:
        return self._train(None, **settings)

    def train(self, **settings: Any) -> Any:
        with memd_client.connect(self.address, job="lightning") as session:
            return self._train(session, **settings)

    def module(self, session: Any, **settings: Any) -> Any:
        lightning.seed_everything(0, verbose=False)
        if session is None:
            return Module(partial(torch.optim.AdamW, fused=True), **settings)
        return memd_client.offload(Module(memd_client.AdamW, **settings), session)

    def trainer(self, session: Any, *callbacks: Any, **settings: Any) -> Any:
        given: dict[str, Any] = {
            "accelerator": "cpu",
            "max_epochs": EPOCHS,
            "default_root_dir": self.path,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": any(
                isinstance(each, lightning.pytorch.callbacks.ModelCheckpoint) for each in callbacks
            ),
        }
        if session is not None:
            given["plugins"] = [ours.StreamedCheckpointIO()]
            callbacks = (*callbacks, ours.CommitSteps(session))
        return lightning.Trainer(callbacks=list(callbacks), **given | settings)

    def _train(
        self,
        session: Any,
        *,
        kind: str = "shuffled",
        killed: tuple[str, tuple[int, int]] | None = None,
        checkpoint: bool = False,
        ckpt_path: Path | None = None,
        manual: bool = False,
        plateau: str = "epoch",
        **settings: Any,
    ) -> Any:
        module = self.module(session, manual=manual, plateau=plateau)
        callbacks: list[Any] = [lightning.pytorch.callbacks.EarlyStopping("valid", patience=9)]
        if killed is not None:
            callbacks.append(KillBehind(*killed))
        if checkpoint:
            callbacks.append(
                lightning.pytorch.callbacks.ModelCheckpoint(
                    dirpath=self.path, monitor="valid", save_top_k=-1, filename="{epoch}-{step}"
                )
            )
        trainer = self.trainer(session, *callbacks, **settings)
        trainer.fit(module, loader(kind), loader("shuffled"), ckpt_path=ckpt_path)
        return Trained(trainer, module, session)


class Trained:
    def __init__(self, trainer: Any, module: Any, session: Any) -> None:
        self.losses = module.losses
        self.ended = module.ended
        self.steps = trainer.global_step
        self.epochs = trainer.current_epoch
        self.weights = weights_of(module)
        self.rates = trainer.optimizers[0].param_groups[0]["lr"]
        self.best = trainer.early_stopping_callback.best_score
        self.wait_count = trainer.early_stopping_callback.wait_count
        self.commits = session.committed_step if session is not None else 0


def assert_same(found: Trained, wanted: Trained) -> None:
    assert found.losses.items() <= wanted.losses.items()
    for name in ("steps", "epochs", "weights", "rates", "best", "wait_count"):
        assert getattr(found, name) == getattr(wanted, name), name


def weights_of(module: nn.Module) -> dict[str, Any]:
    return {name: value.tolist() for name, value in module.state_dict().items()}


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon() as daemon:
        yield daemon


@pytest.fixture
def job(daemon: Daemon, tmp_path: Path) -> Iterator[Job]:
    yield Job(daemon.address, tmp_path / "checkpoints")
    gc.collect()  # ends the session of a training that failed
    memd_client.connect(daemon.address, job="lightning").drop_job()


PLACES = [
    ("on_train_batch_end", (0, 1)),
    ("on_validation_end", (0, 5)),
    ("on_train_batch_start", (1, 3)),
    ("on_train_epoch_end", (1, 5)),
    ("on_train_batch_end", (2, 5)),
]


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("kind", ["shuffled", "generator", "stream"])
def test_a_killed_training_goes_on_at_its_last_commit(job: Job, kind: str, accumulate: int) -> None:
    """Wherever it is killed: hooks and validation behind the last commit are made again, once."""
    settings: dict[str, Any] = {"kind": kind, "accumulate_grad_batches": accumulate}
    expected = job.plain(**settings)
    places = PLACES
    if accumulate == 4:  # an epoch of 6 has steps behind batches 3 and 5
        places = [("on_train_batch_end", (0, 3)), ("on_train_batch_start", (1, 5))]
    for killed in places:
        with pytest.raises(Killed):
            job.train(killed=killed, **settings)
    resumed = job.train(**settings)
    assert_same(resumed, expected)
    assert resumed.commits == expected.steps


def test_batches_that_no_step_has_are_trained_again(job: Job) -> None:
    expected = job.plain(accumulate_grad_batches=3)
    with pytest.raises(Killed):
        job.train(accumulate_grad_batches=3, killed=("on_train_batch_end", (1, 4)))
    resumed = job.train(accumulate_grad_batches=3)
    assert next(iter(resumed.losses)) == (1, 3)
    assert resumed.ended[0] == (1, 2), "hooks behind the commit are made again"
    assert_same(resumed, expected)


def test_the_order_of_a_loader_with_a_worker_is_restored(job: Job) -> None:
    settings: dict[str, Any] = {"kind": "worker", "max_epochs": 2}
    expected = job.plain(**settings)
    for place in [(0, 2), (1, 2)]:
        with pytest.raises(Killed):
            job.train(killed=("on_train_batch_start", place), **settings)
    resumed = job.train(**settings)
    assert next(iter(resumed.losses)) == (1, 2)
    assert_same(resumed, expected)


def test_validation_within_an_epoch_is_made_again(job: Job) -> None:
    expected = job.plain(val_check_interval=2)
    for place in [(0, 1), (1, 3)]:
        with pytest.raises(Killed):
            job.train(val_check_interval=2, killed=("on_validation_start", place))
    assert_same(job.train(val_check_interval=2), expected)


def test_a_metric_of_before_the_commit_is_followed_behind_it(job: Job) -> None:
    expected = job.plain(plateau="step")
    with pytest.raises(Killed):
        job.train(plateau="step", killed=("on_train_batch_start", (1, 3)))
    assert_same(job.train(plateau="step"), expected)


def test_manual_optimization_commits_each_step(job: Job) -> None:
    expected = job.plain(manual=True)
    with pytest.raises(Killed):
        job.train(manual=True, killed=("on_train_batch_start", (1, 4)))
    resumed = job.train(manual=True)
    assert next(iter(resumed.losses)) == (1, 4)
    assert_same(resumed, expected)
    assert resumed.commits == expected.steps


def test_a_finished_training_goes_on_with_more_epochs_or_steps(job: Job) -> None:
    expected = job.plain(max_epochs=4)
    assert job.train(max_epochs=-1, max_steps=8).steps == 8
    again = job.train(max_epochs=-1, max_steps=8)
    assert again.steps == again.commits == 8
    assert not again.losses
    assert job.train(max_epochs=2).epochs == 2
    assert_same(job.train(max_epochs=4), expected)


def test_loaders_that_are_made_anew_have_the_batches_of_then(job: Job) -> None:
    class Data(lightning.LightningDataModule):  # type: ignore[misc] # lightning has no types here
        made = 0

        def train_dataloader(self) -> Any:
            order = torch.randperm(BATCHES * 4)  # drawn when the loader is made
            dataset = torch.utils.data.TensorDataset(rows()[order])
            return torch.utils.data.DataLoader(dataset, batch_size=4, shuffle=True)

        def val_dataloader(self) -> Any:
            return loader("shuffled")

        def state_dict(self) -> dict[str, Any]:
            return {"made": self.made, "path": Path("data")}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            assert state["path"] == Path("data")
            self.made = state["made"] + 1

    def train(session: Any, *callbacks: Any) -> tuple[Any, Data]:
        module, data = job.module(session), Data()
        trainer = job.trainer(session, *callbacks, reload_dataloaders_every_n_epochs=2)
        trainer.fit(module, datamodule=data)
        return module, data

    expected, _ = train(None)
    for place in [(1, 2), (2, 3)]:
        with (
            pytest.raises(Killed),
            memd_client.connect(job.address, job="lightning") as session,
        ):
            train(session, KillBehind("on_train_batch_start", place))
    with memd_client.connect(job.address, job="lightning") as session:
        resumed, data = train(session)
        assert resumed.losses.items() <= expected.losses.items()
        assert weights_of(resumed) == weights_of(expected)
        assert data.made == 2


def test_callbacks_go_on_with_their_states(job: Job) -> None:
    expected = job.plain(checkpoint=True)
    names = sorted(path.name for path in job.path.iterdir())
    for path in job.path.iterdir():
        path.unlink()
    with pytest.raises(Killed):
        job.train(checkpoint=True, killed=("on_validation_start", (1, 5)))
    assert_same(job.train(checkpoint=True), expected)
    assert sorted(path.name for path in job.path.iterdir()) == names


# Checkpoints


def test_plain_lightning_loads_a_checkpoint_and_the_other_way_round(job: Job) -> None:
    """Batches in order, since Lightning's checkpoints have no random numbers."""
    job.plain(checkpoint=True, max_epochs=2, kind="in order")
    job.path.rename(job.path.with_name("theirs"))
    theirs = {path.name: torch.load(path) for path in job.path.with_name("theirs").iterdir()}
    job.train(checkpoint=True, max_epochs=2, kind="in order")
    for name, state in theirs.items():
        found = torch.load(job.path / name)
        assert found.keys() == state.keys()
        assert list(found["state_dict"]) == list(state["state_dict"])
        for key, value in state["state_dict"].items():
            assert torch.equal(found["state_dict"][key], value), key
        for index, moments in state["optimizer_states"][0]["state"].items():
            for key, value in moments.items():
                assert torch.equal(found["optimizer_states"][0]["state"][index][key], value)
        assert found["loops"] == state["loops"]
        assert found["lr_schedulers"] == state["lr_schedulers"]
    name = "epoch=0-step=6.ckpt"
    expected = job.plain(kind="in order", ckpt_path=job.path.with_name("theirs") / name)
    path = job.path / name
    # In a job that has gone further.
    resumed = job.train(kind="in order", ckpt_path=path)
    assert resumed.losses == expected.losses
    assert_same(resumed, expected)
    # And at its commits again.
    with pytest.raises(Killed):
        job.train(kind="in order", ckpt_path=path, killed=("on_train_batch_start", (1, 3)))
    again = job.train(kind="in order")
    assert next(iter(again.losses)) == (1, 3)
    assert_same(again, expected)


def test_weights_of_a_checkpoint_are_tested(job: Job) -> None:
    job.train(checkpoint=True, max_epochs=1)
    (path,) = job.path.iterdir()
    wanted = torch.load(path)["state_dict"]
    with memd_client.connect(job.address, job="lightning") as session:
        module = job.module(session)
        with torch.no_grad():
            module.layers[0].weight.zero_()
        job.trainer(session).validate(module, loader("in order"), ckpt_path=path, verbose=False)
        for name, value in wanted.items():
            assert torch.equal(module.state_dict()[name], value), name


def test_a_module_that_loads_in_its_own_way_is_asked(job: Job) -> None:
    class Renaming(Module):
        def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
            renamed = {name.replace("old.", "layers."): value for name, value in state.items()}
            return super().load_state_dict(renamed, strict, assign)

    with memd_client.connect(job.address, job="lightning") as session:
        module = memd_client.offload(Renaming(memd_client.AdamW), session)
        trainer = job.trainer(session, max_epochs=1)
        trainer.fit(module, loader("shuffled"), loader("shuffled"))
        trainer.save_checkpoint(job.path / "a.ckpt")
        state = torch.load(job.path / "a.ckpt")
        ones = {name: torch.ones_like(value) for name, value in state["state_dict"].items()}
        names = {name: name.replace("layers.", "old.") for name in ones}
        state["state_dict"] = {names[name]: value for name, value in ones.items()}
        torch.save(state, job.path / "a.ckpt")
        job.trainer(session).validate(module, loader("in order"), ckpt_path=job.path / "a.ckpt")
        for name, value in module.state_dict().items():
            assert torch.equal(value, ones[name]), name


def test_a_module_within_that_loads_in_its_own_way_is_asked(job: Job) -> None:
    class Told(nn.Module):
        word = "new"

        def get_extra_state(self) -> dict[str, str]:
            return {"word": self.word}

        def set_extra_state(self, state: dict[str, str]) -> None:
            self.word = state["word"]

    with memd_client.connect(job.address, job="lightning") as session:
        module: Any = Module(memd_client.AdamW)
        module.told = Told()
        memd_client.offload(module, session)
        trainer = job.trainer(session, max_epochs=1)
        trainer.fit(module, loader("shuffled"), loader("shuffled"))
        trainer.save_checkpoint(job.path / "a.ckpt")
        state = torch.load(job.path / "a.ckpt")["state_dict"]
        assert state._metadata == module.state_dict()._metadata
        module.told.word = "changed"
        with torch.no_grad():
            module.layers[0].weight.zero_()
        job.trainer(session).validate(module, loader("in order"), ckpt_path=job.path / "a.ckpt")
        assert module.told.word == "new"
        assert torch.equal(module.layers[0].weight, state["layers.0.weight"])


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 40)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def rewritten(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def rewrite(path: Path) -> None:
        state = torch.load(path)
        change(state)
        torch.save(state, path)

    return rewrite


def of_another_model(state: dict[str, Any]) -> None:
    state["state_dict"]["layers.0.weight"] = torch.ones(24, 8)


def of_sgd(state: dict[str, Any]) -> None:
    for moments in state["optimizer_states"][0]["state"].values():
        moments["momentum_buffer"] = moments.pop("exp_avg")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (truncate, "truncated or damaged"),
        (cut, "truncated or damaged"),
        (os.remove, "No such file"),
        (rewritten(of_another_model), r"'layers\.0\.weight' is \[24, 8\] there"),
        (rewritten(of_sgd), "another optimizer than Adam"),
        (rewritten(lambda state: state.pop("optimizer_states")), "weights alone"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_and_nothing_changes(
    job: Job, change: Callable[[Path], None], message: str
) -> None:
    job.train(checkpoint=True, max_epochs=1)
    expected = job.plain(max_epochs=2)
    (path,) = job.path.glob("*.ckpt")
    change(path)
    with pytest.raises(memd_client.InvalidArgument, match=message):
        job.train(max_epochs=2, ckpt_path=path)
    gc.collect()
    assert_same(job.train(max_epochs=2), expected)


def test_a_checkpoint_is_not_loaded_over_a_job_in_use(job: Job) -> None:
    job.train(checkpoint=True, max_epochs=1)
    (path,) = job.path.iterdir()
    with (
        memd_client.connect(job.address, job="lightning"),
        pytest.raises(memd_client.InvalidArgument, match="other sessions"),
    ):
        job.train(ckpt_path=path)


def test_a_save_on_a_full_disk_leaves_the_earlier_checkpoint(job: Job) -> None:
    with memd_client.connect(job.address, job="lightning") as session:
        module = job.module(session)
        trainer = job.trainer(session, max_epochs=1)
        trainer.fit(module, loader("shuffled"), loader("shuffled"))
        path = job.path / "deep" / "a.ckpt"
        trainer.save_checkpoint(path)
        kept = path.read_bytes()
        with no_file_larger_than(4096), pytest.raises(memd_client.CapacityError, match="no room"):
            trainer.save_checkpoint(path)
        assert path.read_bytes() == kept
        assert [each.name for each in path.parent.iterdir()] == ["a.ckpt"]
        assert session.statistics().leases_held == 0
        trainer.save_checkpoint(path)
        trainer.strategy.remove_checkpoint(path)
        assert not path.exists()


# A Trainer that cannot commit says so in one sentence.


def test_trainers_that_memd_cannot_keep_are_refused(job: Job) -> None:
    class Scaled(lightning.pytorch.plugins.MixedPrecision):  # type: ignore[misc] # no types here
        """As of precision="16-mixed", which needs a GPU."""

        def __init__(self) -> None:
            super().__init__("bf16-mixed", "cpu")
            self.scaler = torch.amp.GradScaler("cpu")

    with memd_client.connect(job.address, job="lightning") as session:
        module = job.module(session)
        refused: list[tuple[dict[str, Any], str]] = [
            ({"plugins": [Scaled()]}, "fp16 has a GradScaler"),
            ({"strategy": "ddp", "devices": 1}, "DDPStrategy keeps or divides parameters"),
        ]
        for settings, message in refused:
            with pytest.raises(memd_client.InvalidArgument, match=message):
                job.trainer(session, **settings).fit(module, loader("shuffled"))
        trainer = job.trainer(session)
        type(trainer).world_size, before = property(lambda _: 2), type(trainer).world_size
        try:
            with pytest.raises(memd_client.InvalidArgument, match="this Trainer has 2"):
                trainer.fit(module, loader("shuffled"))
        finally:
            type(trainer).world_size = before
        module.make = partial(torch.optim.SGD)
        with pytest.raises(memd_client.InvalidArgument, match="gives a SGD"):
            job.trainer(session).fit(module, loader("shuffled"))
        module.make = memd_client.AdamW
        trainer = job.trainer(session, max_epochs=1)
        trainer.fit(module, loader("shuffled"), loader("shuffled"))
        trainer.fit_loop.max_epochs = 2
        with pytest.raises(memd_client.InvalidArgument, match="called already in this session"):
            trainer.fit(module, loader("shuffled"), loader("shuffled"))


def test_a_step_that_fetches_its_batches_is_refused(job: Job) -> None:
    class Fetching(Module):
        def training_step(self, dataloader_iter: Any) -> torch.Tensor:  # type: ignore[override]
            batch, _, _ = next(dataloader_iter)
            loss: torch.Tensor = self.layers(batch[0]).square().mean()
            return loss

    with memd_client.connect(job.address, job="lightning") as session:
        module = memd_client.offload(Fetching(memd_client.AdamW), session)
        with pytest.raises(memd_client.InvalidArgument, match="fetches batches itself"):
            job.trainer(session).fit(module, loader("shuffled"), loader("shuffled"))


def test_a_state_that_is_no_plain_data_is_named(job: Job) -> None:
    class Odd(lightning.Callback):  # type: ignore[misc] # lightning has no types here
        def state_dict(self) -> dict[str, Any]:
            return {"sample": object()}

    with memd_client.connect(job.address, job="lightning") as session:
        module = job.module(session)
        with pytest.raises(memd_client.InvalidArgument, match=r"Odd'\]\['sample'\] is a "):
            job.trainer(session, Odd()).fit(module, loader("shuffled"), loader("shuffled"))


def test_other_places_than_local_files_are_refused() -> None:
    io = ours.StreamedCheckpointIO()
    with pytest.raises(memd_client.InvalidArgument, match=r"s3://bucket/a\.ckpt is none"):
        io.save_checkpoint({}, "s3://bucket/a.ckpt")
    with pytest.raises(memd_client.InvalidArgument, match="takes no storage_options"):
        io.save_checkpoint({}, "a.ckpt", storage_options={})


def test_a_place_that_cannot_be_written_or_removed_is_named(tmp_path: Path) -> None:
    io = ours.StreamedCheckpointIO()
    (tmp_path / "file").write_bytes(b"somebody else's")
    path = tmp_path / "file" / "a.ckpt"
    with pytest.raises(memd_client.InvalidArgument, match=rf"{path}: "):
        io.save_checkpoint({}, path)
    with pytest.raises(memd_client.InvalidArgument, match=rf"{path}: "):
        io.remove_checkpoint(path)
    assert (tmp_path / "file").read_bytes() == b"somebody else's"
