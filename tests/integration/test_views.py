"""Writes through views of parameters, with memory that is really shared."""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import memd_client
import memd_native
from memd_client.parameters.parameter import streamed
from tests.daemons import Daemon, Daemons, running_daemon
from tests.unit.client_cases import assert_same_state
from tests.unit.view_cases import WRITES, optimizers_of, view_of

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZE, DEPTH = 512, 12


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon(host="192MiB", nvme="768MiB") as daemon:
        yield daemon


class Masked(nn.Linear):
    """Keeps a row of its weight at zero."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight[3].zero_()
            self.bias.detach().clamp_(-0.01, 0.01)
        return super().forward(inputs)


class Stack(nn.Module):
    """An embedding that renorms, and layers that write to themselves: 13 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SIZE, SIZE, max_norm=1.0)
        self.layers = nn.Sequential(*(Masked(SIZE, SIZE) for _ in range(DEPTH)))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layers(self.embedding(tokens))
        return output


def stack() -> Stack:
    torch.manual_seed(0)
    return Stack()


def tokens(index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(index)
    return torch.randint(0, SIZE, (4, 8), generator=generator)


@pytest.mark.parametrize("host_bytes", ["96MiB", "16MiB"])
def test_programs_that_write_to_parameters_have_torchs_bits_in_a_large_and_a_small_pool(
    daemon: Daemon, host_bytes: str
) -> None:
    with memd_client.connect(
        daemon.address, job=f"views-{host_bytes}", host_bytes=host_bytes, nvme_bytes="256MiB"
    ) as session:
        model, reference = memd_client.offload(stack(), session), stack()
        optimizers = optimizers_of(model, reference)
        for step in range(4):
            losses = []
            for module, optimizer in zip((model, reference), optimizers, strict=True):
                weight = module.get_parameter("layers.5.weight")
                view = WRITES[step](weight)
                loss = module(tokens(step)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
                del view
            assert torch.equal(losses[0], losses[1]), step
        assert_same_state(model, reference)
        assert session.statistics().leases_held == 0
        (evicted,) = re.findall(
            rf'^memd_evicted_bytes_total{{memd_job="views-{host_bytes}"}} (.*)$',
            daemon.get("/metrics"),
            re.MULTILINE,
        )
        assert (float(evicted) > 0) == (host_bytes == "16MiB")
        session.drop_job()


def test_a_write_that_is_asked_for_in_another_form_is_not_lost(daemon: Daemon) -> None:
    with memd_client.connect(daemon.address, job="forms", host_bytes="16MiB") as session:
        model, reference = memd_client.offload(nn.Linear(8, 8), session), nn.Linear(8, 8)
        with memd_client.gather(model):
            reference.load_state_dict(model.state_dict())
        for module in (model, reference):
            view_of(module.weight).mul_(0.5)
        entry = streamed(model.weight)
        assert entry is not None
        plane = session.leases.plane
        for _ in range(2):
            with pytest.raises(memd_native.StatusError, match="do not fit the shard"):
                plane.take_written(entry.shard.shard_id, entry.shard.lease_form[0], [3])
        assert_same_state(model, reference)
        assert session.statistics().leases_held == 0
        session.drop_job()


def test_a_daemon_that_is_killed_knows_what_was_committed_and_no_more(
    daemons: Daemons,
) -> None:
    before = daemons.start(nvme="512MiB")
    reference = stack()
    with memd_client.connect(before.address, job="views") as session:
        model = memd_client.offload(stack(), session)
        optimizers = optimizers_of(model, reference)
        for module, optimizer in zip((model, reference), optimizers, strict=True):
            module(tokens(0)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert session.committed_step == 1
        expected = {name: value.clone() for name, value in reference.state_dict().items()}
        # Nobody has used the parameter since, and the write is in this process alone.
        view = view_of(model.get_parameter("layers.2.weight"))
        view.zero_()
        with memd_client.connect(before.address, job="views") as other:
            assert torch.equal(other.get("layers.2.weight"), expected["layers.2.weight"])
        before.stop(signal.SIGKILL)
        after = daemons.start(nvme="512MiB")
        with memd_client.connect(after.address, job="views") as other:
            assert other.committed_step == 1
            for name, value in expected.items():
                assert torch.equal(other.get(name), value), name
        # The trainer goes on, and its write is part of the next step.
        with torch.no_grad():
            reference.get_parameter("layers.2.weight").zero_()
        for module, optimizer in zip((model, reference), optimizers, strict=True):
            module(tokens(1)).square().mean().backward()
            optimizer.step()
        assert session.committed_step == 2
        assert_same_state(model, reference)


class Rows(Dataset[torch.Tensor]):
    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        row = self._rows[index]
        row.add_(1)
        return row.clone()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_what_a_forked_worker_writes_stays_in_it(daemon: Daemon) -> None:
    with memd_client.connect(daemon.address, job="forks", host_bytes="16MiB") as session:
        session.put("rows", torch.zeros(64, 256))
        rows = session.get("rows")
        loader = DataLoader(Rows(rows), num_workers=2, multiprocessing_context="fork")
        assert all(batch.all() for batch in loader)
        assert not rows.any()
        del rows, loader
        assert not session.get("rows").any()
        session.drop_job()
