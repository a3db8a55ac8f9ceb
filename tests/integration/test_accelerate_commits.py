"""`CommittedAccelerator` beside plain Accelerate: loops that are killed and resumed, by commit and
by checkpoint, and checkpoints that cannot be loaded or saved."""

from __future__ import annotations

import gc
import os
import shutil
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import memd_client
from tests.daemons import running_daemon
from tests.integration.full_disk import no_file_larger_than

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.daemons import Daemon

accelerate: Any = pytest.importorskip("accelerate")
CommittedAccelerator: Any = pytest.importorskip(
    "memd_client.integrations.accelerate"
).CommittedAccelerator

pytestmark = [pytest.mark.more, pytest.mark.timeout(300)]

BATCHES = 6
EPOCHS = 3


class Killed(Exception):
    pass


class Model(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, width), nn.Dropout(0.25), nn.BatchNorm1d(width), nn.Linear(width, 8)
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layers(inputs).square().mean()
        return loss


class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(rows())


class ByEpoch(torch.utils.data.Sampler[int]):
    """Its order depends on `set_epoch()`, as that of a DistributedSampler."""

    def __init__(self) -> None:
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return BATCHES * 4

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._epoch)
        return iter(torch.randperm(len(self), generator=generator).tolist())


def rows() -> torch.Tensor:
    return torch.randn(BATCHES * 4, 8, generator=torch.Generator().manual_seed(1))


def loader(kind: str) -> Any:
    dataset: Any = Stream() if kind == "stream" else rows()
    settings: dict[str, Any] = {"batch_size": 4}
    if kind in ("shuffled", "seedable"):
        settings["shuffle"] = True
    if kind == "generator":
        settings |= {"shuffle": True, "generator": torch.Generator().manual_seed(5)}
    if kind == "by epoch":
        settings["sampler"] = ByEpoch()
    return torch.utils.data.DataLoader(dataset, **settings)


@dataclass(kw_only=True)
class Run:
    """One training, as far as it comes."""

    losses: dict[tuple[int, int], float] = field(default_factory=dict)  # by epoch and batch
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    commits: int = 0


class Job:
    """Trains one job, in a new session and a new Accelerator each time."""

    def __init__(self, address: str, path: Path) -> None:
        self.address = address
        self.path = path

    def plain(self, **settings: Any) -> Run:
        return self._train(None, **settings)

    def ours(self, **settings: Any) -> Run:
        with memd_client.connect(self.address, job="loop") as session:
            return self._train(session, **settings)

    @contextmanager
    def prepared(self, *, width: int = 16, resume: bool = True) -> Iterator[Any]:
        """An Accelerator with all it needs, and its session."""
        with memd_client.connect(self.address, job="loop") as session:
            accelerator, *prepared = self._prepare(session, kind="in order", width=width)
            if resume:
                accelerator.resume()
            yield accelerator, *prepared

    def _prepare(
        self, session: Any, *, kind: str, accumulate: int = 1, width: int = 16, each: str = "step"
    ) -> Any:
        accelerate.utils.set_seed(0)
        model: nn.Module = Model(width)
        config = accelerate.utils.DataLoaderConfiguration(use_seedable_sampler=kind == "seedable")
        given: dict[str, Any] = {
            "cpu": True,
            "gradient_accumulation_steps": accumulate,
            "dataloader_config": config,
            "step_scheduler_with_optimizer": each == "step",
        }
        if session is None:
            accelerator = accelerate.Accelerator(**given)
            optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        else:
            memd_client.offload(model, session)
            accelerator = CommittedAccelerator(session=session, **given)
            optimizer = memd_client.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        return accelerator, *accelerator.prepare(model, optimizer, loader(kind), scheduler)

    def _train(
        self,
        session: Any,
        *,
        kind: str = "shuffled",
        accumulate: int = 1,
        each: str = "step",
        killed_after: tuple[int, int] | None = None,
        checkpoint_after: tuple[int, int] | None = None,
        from_checkpoint: bool = False,
    ) -> Run:
        accelerator, model, optimizer, batches, scheduler = self._prepare(
            session, kind=kind, accumulate=accumulate, each=each
        )
        run = Run()
        begin, at = 0, 0
        if session is not None:
            position = accelerator.resume()
            if from_checkpoint:
                position = accelerator.load_state(self.path)
            begin, at = position.epoch, position.batch
        for epoch in range(begin, EPOCHS):
            for number, inputs in enumerate(batches, at + 1):
                with accelerator.accumulate(model):
                    loss = model(inputs)
                    accelerator.backward(loss)
                    optimizer.step()
                    if each == "step":
                        scheduler.step()
                    optimizer.zero_grad()
                run.losses[epoch, number] = loss.item()
                if (epoch, number) == checkpoint_after:
                    accelerator.save_state(self.path)
                if (epoch, number) == killed_after:
                    raise Killed
            at = 0
            # Behind an epoch's last commit.
            if each == "epoch":
                scheduler.step()
            torch.rand(1)
        run.weights = {name: each.clone() for name, each in model.state_dict().items()}
        run.commits = session.committed_step if session is not None else 0
        return run


def assert_equal_weights(found: Run, wanted: Run) -> None:
    assert found.weights.keys() == wanted.weights.keys()
    for name, value in wanted.weights.items():
        assert torch.equal(found.weights[name], value), name


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon() as daemon:
        yield daemon


@pytest.fixture
def job(daemon: Daemon, tmp_path: Path) -> Iterator[Job]:
    yield Job(daemon.address, tmp_path / "checkpoint")
    gc.collect()  # ends the session of a training that failed
    memd_client.connect(daemon.address, job="loop").drop_job()


@pytest.mark.parametrize("each", ["step", "epoch"])
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("kind", ["shuffled", "generator", "seedable", "by epoch", "stream"])
def test_a_killed_loop_goes_on_at_its_last_commit(
    job: Job, kind: str, accumulate: int, each: str
) -> None:
    """In the middle of an epoch, and behind its last batch, where the epoch's end is made again."""
    settings: dict[str, Any] = {"kind": kind, "accumulate": accumulate, "each": each}
    expected = job.plain(**settings)
    # With 4 batches a step, an epoch of 6 has steps behind 4 and 6.
    for killed_after in [(0, 4), (0, 6), (1, 6), (2, 4)]:
        with pytest.raises(Killed):
            job.ours(killed_after=killed_after, **settings)
    resumed = job.ours(**settings)
    assert list(resumed.losses) == [(2, 5), (2, 6)]
    assert resumed.losses.items() <= expected.losses.items()
    assert_equal_weights(resumed, expected)
    assert resumed.commits == EPOCHS * (BATCHES if accumulate == 1 else 2)


def test_batches_that_no_step_has_are_trained_again(job: Job) -> None:
    expected = job.plain(accumulate=3)
    with pytest.raises(Killed):
        job.ours(accumulate=3, killed_after=(1, 5))
    resumed = job.ours(accumulate=3)
    assert next(iter(resumed.losses)) == (1, 4)
    assert resumed.losses.items() <= expected.losses.items()
    assert_equal_weights(resumed, expected)


@pytest.mark.parametrize("place", [(1, 2), (1, 6)])
def test_a_job_that_has_gone_further_goes_on_at_a_checkpoint(
    job: Job, place: tuple[int, int]
) -> None:
    expected = job.plain()
    with pytest.raises(Killed):
        job.ours(checkpoint_after=place, killed_after=(2, 3))
    resumed = job.ours(from_checkpoint=True)
    assert len(resumed.losses) == EPOCHS * BATCHES - (place[0] * BATCHES + place[1])
    assert resumed.losses.items() <= expected.losses.items()
    assert_equal_weights(resumed, expected)


def test_a_loop_that_went_on_at_a_checkpoint_goes_on_at_its_commits(job: Job) -> None:
    expected = job.plain()
    with pytest.raises(Killed):
        job.ours(checkpoint_after=(1, 2), killed_after=(1, 4))
    with pytest.raises(Killed):
        job.ours(from_checkpoint=True, killed_after=(1, 3))
    resumed = job.ours()
    assert next(iter(resumed.losses)) == (1, 4)
    assert_equal_weights(resumed, expected)


@pytest.mark.parametrize("safe", [True, False])
def test_plain_accelerate_loads_a_checkpoint_and_the_other_way_round(job: Job, safe: bool) -> None:
    accelerator, *theirs = job._prepare(None, kind="in order")
    with job.prepared() as (ours, *prepared):
        step(ours, *prepared)
        ours.save_state(job.path, safe_serialization=safe)
        accelerator.load_state(str(job.path))
        assert_equal_states(theirs, prepared)
        step(accelerator, *theirs)
        accelerator.save_state(str(job.path), safe_serialization=safe)
        names = sorted(path.name for path in job.path.iterdir())
        job.path.chmod(0o700)
        step(ours, *prepared)
        step(ours, *prepared)
        # Its weights are those of plain Accelerate, and so it is no checkpoint of this place.
        assert (job.path / "memd_position").exists()
        position = ours.load_state(job.path, strict=True)
        assert (position.step, position.epoch, position.batch) == (3, 0, 0)
        assert_equal_states(prepared, theirs)
        assert ("model.safetensors" in names) == safe
        before = {path.name: path.read_bytes() for path in job.path.glob("model*")}
        ours.save_state(job.path, safe_serialization=safe)
        assert job.path.stat().st_mode & 0o777 == 0o700
        for name, data in before.items():
            assert (job.path / name).read_bytes() == data


def test_a_folder_keeps_what_is_not_accelerates(job: Job) -> None:
    with job.prepared() as (accelerator, *prepared):
        step(accelerator, *prepared)
        accelerator.save_state(job.path, safe_serialization=False)
        (job.path / "notes.txt").write_text("mine")
        (job.path / "tokenizer").mkdir()
        (job.path / "tokenizer" / "vocab.txt").write_text("mine")
        accelerator.save_state(job.path)
        assert (job.path / "notes.txt").read_text() == "mine"
        assert (job.path / "tokenizer" / "vocab.txt").read_text() == "mine"
        assert not (job.path / "pytorch_model.bin").exists(), "plain Accelerate might load it"
        assert [path.name for path in job.path.parent.iterdir()] == [job.path.name]


def test_named_checkpoints_are_numbered_and_limited(job: Job) -> None:
    with job.prepared() as (accelerator, *prepared):
        config = accelerator.project_configuration
        config.set_directories(str(job.path))
        config.automatic_checkpoint_naming = True
        config.total_limit = 2
        for _ in range(3):
            step(accelerator, *prepared)
            accelerator.save_state()
        folder = job.path / "checkpoints"
        assert sorted(path.name for path in folder.iterdir()) == ["checkpoint_1", "checkpoint_2"]
        kept = weights_of(prepared[0])
        step(accelerator, *prepared)
        accelerator.load_state()
        assert weights_of(prepared[0]) == kept
        config.iteration = 2
        with pytest.raises(memd_client.InvalidArgument, match="checkpoint_2 is there already"):
            accelerator.save_state()


def test_an_earlier_checkpoint_that_cannot_be_removed_is_named(job: Job) -> None:
    with job.prepared() as (accelerator, *prepared):
        config = accelerator.project_configuration
        config.set_directories(str(job.path))
        config.automatic_checkpoint_naming = True
        config.total_limit = 1
        config.iteration = 1
        folder = job.path / "checkpoints"
        folder.mkdir(parents=True)
        (folder / "checkpoint_0").write_bytes(b"no folder")
        step(accelerator, *prepared)
        with pytest.raises(memd_client.InvalidArgument, match=r"/checkpoint_0: "):
            accelerator.save_state()
        step(accelerator, *prepared)
        accelerator.load_state(folder / "checkpoint_1")
        with pytest.raises(memd_client.InvalidArgument, match=r"checkpoint_0/model/deep: "):
            accelerator.save_model(prepared[0], folder / "checkpoint_0" / "model" / "deep")


# A checkpoint that cannot be loaded or saved changes nothing.


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 40)


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("model.safetensors", truncate, "model.safetensors"),
        ("optimizer.bin", truncate, "optimizer.bin is truncated or damaged"),
        ("optimizer.bin", os.remove, "no optimizer.bin"),
        ("scheduler.bin", os.remove, "no scheduler.bin"),
        ("scheduler.bin", truncate, "scheduler.bin is truncated or damaged"),
        ("random_states_0.pkl", damage, "random_states_0.pkl is damaged"),
        ("memd_position", truncate, "not what memd stored"),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_nothing_changes(
    job: Job, name: str, change: Callable[[Path], None], message: str
) -> None:
    with job.prepared() as (accelerator, model, optimizer, batches, scheduler):
        step(accelerator, model, optimizer, batches, scheduler)
        accelerator.save_state(job.path)
        step(accelerator, model, optimizer, batches, scheduler)
        change(job.path / name)
        before = weights_of(model), moments_of(optimizer), scheduler.state_dict()
        with pytest.raises(memd_client.MemdError, match=message):
            accelerator.load_state(job.path)
        assert (weights_of(model), moments_of(optimizer), scheduler.state_dict()) == before
        assert accelerator._optimizers == [optimizer]
        step(accelerator, model, optimizer, batches, scheduler)


def test_a_checkpoint_of_another_model_or_optimizer_is_refused(job: Job) -> None:
    other, model, optimizer, batches, scheduler = job._prepare(None, kind="in order", width=24)
    step(other, model, optimizer, batches, scheduler)
    other.save_state(str(job.path))
    sgd = torch.optim.SGD(Model().parameters(), lr=1e-2, momentum=0.9)
    with job.prepared() as (accelerator, model, optimizer, *rest):
        step(accelerator, model, optimizer, *rest)
        before = weights_of(model), moments_of(optimizer)
        with pytest.raises(memd_client.InvalidArgument, match="it is of another model"):
            accelerator.load_state(job.path)
        accelerator.save_state(job.path)
        for parameter in sgd.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        sgd.step()
        torch.save(sgd.state_dict(), job.path / "optimizer.bin")
        with pytest.raises(memd_client.InvalidArgument, match="another optimizer than Adam"):
            accelerator.load_state(job.path)
        torch.save({"state": {}, "param_groups": []}, job.path / "optimizer.bin")
        with pytest.raises(memd_client.InvalidArgument, match="groups have"):
            accelerator.load_state(job.path)
        assert (weights_of(model), moments_of(optimizer)) == before


def test_a_checkpoint_is_not_loaded_over_a_job_in_use(job: Job) -> None:
    with job.prepared() as (accelerator, *prepared):
        step(accelerator, *prepared)
        accelerator.save_state(job.path)
        before = weights_of(prepared[0])
        with (
            memd_client.connect(job.address, job="loop"),
            pytest.raises(memd_client.InvalidArgument, match="other sessions"),
        ):
            accelerator.load_state(job.path)
        assert weights_of(prepared[0]) == before


def test_of_two_loops_over_one_job_one_goes_on(job: Job) -> None:
    with job.prepared() as (first, *one):
        step(first, *one)
        assert first._session.committed_step == 1
        with job.prepared() as (second, *other):
            step(second, *other)
            assert second._session.committed_step == 2
            step(first, *one)
            with pytest.raises(memd_client.SessionFenced, match="another session made"):
                _ = first._session.committed_step
            step(second, *other)
            assert second._session.committed_step == 3


def test_a_save_on_a_full_disk_leaves_the_earlier_checkpoint(job: Job) -> None:
    with job.prepared() as (accelerator, model, optimizer, *rest):
        step(accelerator, model, optimizer, *rest)
        accelerator.save_state(job.path)
        kept = weights_of(model), moments_of(optimizer)
        files = {path.name: path.read_bytes() for path in job.path.iterdir()}
        step(accelerator, model, optimizer, *rest)
        size_bytes = (job.path / "model.safetensors").stat().st_size
        # The weights fit, and the moments do not.
        with no_file_larger_than(size_bytes), pytest.raises(memd_client.CapacityError):
            accelerator.save_state(job.path)
        assert {path.name: path.read_bytes() for path in job.path.iterdir()} == files
        assert [path.name for path in job.path.parent.iterdir()] == [job.path.name]
        assert accelerator._optimizers == [optimizer]
        accelerator.load_state(job.path)
        assert (weights_of(model), moments_of(optimizer)) == kept
        accelerator.save_state(job.path)


def test_a_folder_that_a_killed_save_left_is_removed_by_the_next(job: Job) -> None:
    left = job.path.with_name(f".{job.path.name}.0123456789ab.partial")
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"begun")
    with job.prepared() as (accelerator, *prepared):
        step(accelerator, *prepared)
        accelerator.save_state(job.path)
    assert not left.exists()


# An Accelerator that cannot commit says so in one sentence.


def test_what_commits_cannot_have_is_refused(job: Job) -> None:
    with job.prepared(resume=False) as (accelerator, model, optimizer, batches, scheduler):
        with (
            pytest.raises(memd_client.InvalidArgument, match=r"call accelerator\.resume\(\)"),
            accelerator.accumulate(model),
        ):
            pass
        with pytest.raises(memd_client.InvalidArgument, match="this one is a SGD"):
            accelerator.prepare(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0))
        accelerator.dataloader_config.use_stateful_dataloader = True
        with pytest.raises(memd_client.InvalidArgument, match="use_stateful_dataloader"):
            accelerator.prepare(loader("in order"))
        accelerator.dataloader_config.use_stateful_dataloader = False
        accelerator.resume()
        with pytest.raises(memd_client.InvalidArgument, match="was called already"):
            accelerator.resume()
        optimizer_step(accelerator, model, optimizer, scheduler, next(iter(batches)))
        model(torch.ones(4, 8)).backward()
        optimizer.step()
        with pytest.raises(memd_client.InvalidArgument, match="between step"):
            accelerator.save_state(job.path)
        accelerator.commit()
        accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1))
        with pytest.raises(memd_client.InvalidArgument, match="was prepared or registered after"):
            accelerator.commit()


def test_skipping_what_is_skipped_already_is_refused_unless_it_is_the_same(job: Job) -> None:
    with pytest.raises(Killed):
        job.ours(kind="in order", killed_after=(0, 2))
    with job.prepared() as (accelerator, _, _, batches, _):
        with pytest.raises(memd_client.InvalidArgument, match="goes on behind batch 2 by itself"):
            accelerator.skip_first_batches(batches, 3)
        again = list(accelerator.skip_first_batches(batches, 2))
        assert torch.equal(torch.cat(again), rows()[8:])
        skipped = accelerator.skip_first_batches(batches, 4)
        assert len(skipped) == 2
        assert torch.equal(torch.cat(list(skipped)), rows()[16:])
        assert len(list(batches)) == BATCHES


def test_objects_registered_for_checkpointing_are_in_commits(job: Job) -> None:
    class Count:
        value = 0

        def state_dict(self) -> dict[str, int]:
            return {"value": self.value}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.value = state["value"]

    with job.prepared(resume=False) as (accelerator, *prepared):
        count = Count()
        accelerator.register_for_checkpointing(count)
        accelerator.resume()
        count.value = 7
        step(accelerator, *prepared)
        accelerator.save_state(job.path)
    with job.prepared(resume=False) as (accelerator, *prepared):
        count = Count()
        accelerator.register_for_checkpointing(count)
        accelerator.resume()
        assert count.value == 7
        shutil.copy(job.path / "custom_checkpoint_0.pkl", job.path / "custom_checkpoint_1.pkl")
        with pytest.raises(memd_client.InvalidArgument, match="states of 2 objects"):
            accelerator.load_state(job.path)


@pytest.mark.parametrize("is_safe", [True, False])
def test_a_model_of_which_a_module_loads_in_its_own_way_is_asked(job: Job, is_safe: bool) -> None:
    class Told(nn.Linear):
        number = 1

        def get_extra_state(self) -> torch.Tensor:
            return torch.tensor(self.number)

        def set_extra_state(self, state: torch.Tensor) -> None:
            self.number = int(state)

    with memd_client.connect(job.address, job="loop") as session:
        model = nn.Sequential(Told(8, 8), nn.Linear(8, 8))
        model[1].weight = model[0].weight
        memd_client.offload(model, session)
        optimizer: Any = memd_client.AdamW(model.parameters())
        accelerator = CommittedAccelerator(session=session, cpu=True)
        model, optimizer = accelerator.prepare(model, optimizer)
        accelerator.resume()
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 8)).sum())
            optimizer.step()
            optimizer.zero_grad()
        accelerator.save_state(job.path, safe_serialization=is_safe)
        wanted: Any = model.state_dict()
        if not is_safe:
            assert torch.load(job.path / "pytorch_model.bin")._metadata == wanted._metadata
        kept = weights_of(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        model[0].number = 2
        accelerator.load_state(job.path)
        assert weights_of(model) == kept
        assert model[0].number == 1


def step(accelerator: Any, model: Any, optimizer: Any, batches: Any, scheduler: Any) -> None:
    optimizer_step(accelerator, model, optimizer, scheduler, next(iter(batches)))


def optimizer_step(
    accelerator: Any, model: Any, optimizer: Any, scheduler: Any, inputs: torch.Tensor
) -> None:
    with accelerator.accumulate(model):
        accelerator.backward(model(inputs))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def weights_of(model: nn.Module) -> dict[str, Any]:
    return {name: value.tolist() for name, value in model.state_dict().items()}


def moments_of(optimizer: Any) -> dict[int, dict[str, Any]]:
    states = optimizer.state_dict()["state"]
    return {
        index: {name: value.tolist() for name, value in state.items()}
        for index, state in states.items()
    }


def assert_equal_states(ours: list[Any], theirs: list[Any]) -> None:
    (model, optimizer, _, scheduler), (their_model, their_optimizer, _, their_scheduler) = (
        ours,
        theirs,
    )
    assert weights_of(model) == weights_of(their_model)
    assert moments_of(optimizer) == moments_of(their_optimizer)
    assert scheduler.state_dict() == their_scheduler.state_dict()
