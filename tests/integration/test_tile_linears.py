"""Linear layers in tiles: the numbers are those of a tiled program in plain torch, and the
parameter stays one wherever a user sees it."""

from __future__ import annotations

import copy
import itertools
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import memd_client
from memd.demo.twin import MemoryAdamW
from memd_client.core.leases import Leases

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.daemons import Daemon, Daemons

ROOT = Path(__file__).parents[2]
BATCH, WIDTH, INNER = 6, 24, 56
TILE_BYTES = 10 * WIDTH * 4  # 10 rows of the wider layers in fp32
LEARNING_RATE, BETAS, WEIGHT_DECAY = 5e-4, (0.9, 0.95), 0.1  # those of MemoryAdamW


class WrittenOut(nn.Linear):
    """The tiled program. Its heights are what `tile_linears` promises: as few tiles as there may
    be, of equal height."""

    bytes_max = TILE_BYTES

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.out_features
        rows_max = self.bytes_max // (self.in_features * self.weight.element_size())
        count = -(-rows // rows_max)
        edges = [0]
        for number in range(count):
            edges.append(edges[-1] + rows // count + (number < rows % count))
        outputs = []
        for first, end in itertools.pairwise(edges):
            bias = self._parameters["bias"]
            part = None if bias is None else bias[first:end]
            outputs.append(functional.linear(x, self.weight[first:end], part))
        return torch.cat(outputs, -1)


class Model(nn.Module):
    def __init__(self, linear: type[nn.Linear]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(INNER, WIDTH)
        self.up = linear(WIDTH, INNER)
        self.down = linear(INNER, WIDTH)  # few rows, which are long
        self.head = linear(WIDTH, INNER, bias=False)

    def forward(self, tokens: torch.Tensor, *, kind: str = "plain") -> torch.Tensor:
        x = self.embedding(tokens)
        x = self.down(functional.gelu(self._run(self.up, x, kind))) + x
        logits: torch.Tensor = self._run(self.head, x, kind)
        return functional.cross_entropy(logits.float().flatten(0, -2), tokens.flatten().flip(0))

    def _run(self, layer: nn.Module, x: torch.Tensor, kind: str) -> torch.Tensor:
        result: torch.Tensor
        if kind == "plain":
            result = layer(x)
        else:
            result = checkpoint(layer, x, use_reentrant=kind == "reentrant")
        return result


class TiedModel(Model):
    def __init__(self, linear: type[nn.Linear]) -> None:
        super().__init__(linear)
        self.head.weight = self.embedding.weight


def build(kind: type[Model] = Model, linear: type[nn.Linear] = nn.Linear, **to: Any) -> Model:
    torch.manual_seed(5)
    return kind(linear).to(**to)


def tiled(kind: type[Model] = Model, **to: Any) -> Model:
    return memd_client.tile_linears(build(kind, **to), bytes_max=TILE_BYTES)


def tokens(step: int) -> torch.Tensor:
    return torch.randint(INNER, (2, BATCH), generator=torch.Generator().manual_seed(step))


def reference(kind: type[Model] = Model, **to: Any) -> Model:
    return build(kind, WrittenOut, **to)


@pytest.fixture
def session(daemon: Daemon) -> Iterator[memd_client.Session]:
    with memd_client.connect(daemon.address, job="tiles", fresh=True) as session:
        yield session
        session.drop_job()


def gradient(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.grad is not None
    return tensor.grad


def groups(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": list(model.parameters()), "weight_decay": WEIGHT_DECAY}]


def memd_optimizer(model: nn.Module, **more: Any) -> memd_client.AdamW:
    return memd_client.AdamW(groups(model), lr=LEARNING_RATE, betas=BETAS, **more)


def assert_same_values(model: nn.Module, expected: nn.Module) -> None:
    found = dict(model.named_parameters())
    assert list(found) == [name for name, _ in expected.named_parameters()]
    for name, value in expected.named_parameters():
        assert found[name].shape == value.shape
        assert torch.equal(found[name].detach().clone(), value.detach()), name


def train(
    model: nn.Module,
    optimizer: Any,
    *,
    clip: bool = True,
    micro_batches: int = 1,
    kind: str = "plain",
    autocast: bool = False,
) -> list[float]:
    told = []
    for step in range(5):
        for micro_batch in range(micro_batches):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(tokens(10 * step + micro_batch), kind=kind)
            loss.backward()
            told.append(loss.item())
        if clip:
            told.append(optimizer.clip_grad_norm_(0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return told


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [Model, TiedModel])
@pytest.mark.parametrize(
    "way",
    [
        pytest.param({}, id="plain"),
        pytest.param({"micro_batches": 3}, id="accumulated"),
        pytest.param({"kind": "reentrant"}, id="reentrant"),
        pytest.param({"kind": "not reentrant"}, id="not-reentrant"),
        pytest.param({"autocast": True}, id="autocast"),
    ],
)
def test_training_has_the_bits_of_the_program_written_out(
    session: memd_client.Session, kind: type[Model], dtype: torch.dtype, way: dict[str, Any]
) -> None:
    plain = reference(kind, dtype=dtype)
    model = memd_client.offload(tiled(kind, dtype=dtype), session)
    assert train(model, memd_optimizer(model), **way) == train(
        plain, MemoryAdamW(groups(plain)), **way
    )
    assert_same_values(model, plain)


@pytest.mark.parametrize("is_tied", [False, True])
def test_updates_during_backward_have_the_same_bits(
    session: memd_client.Session, is_tied: bool
) -> None:
    kind = TiedModel if is_tied else Model
    plain = reference(kind)
    model = memd_client.offload(tiled(kind), session)
    optimizer = memd_optimizer(model, step_in_backward=True)
    assert train(model, optimizer, clip=False) == train(
        plain, MemoryAdamW(groups(plain)), clip=False
    )
    assert_same_values(model, plain)


def test_outputs_and_gradients_have_the_bits_of_the_program_written_out(
    session: memd_client.Session,
) -> None:
    torch.manual_seed(0)
    plain = WrittenOut(WIDTH, INNER)
    layer = nn.Linear(WIDTH, INNER)
    layer.load_state_dict(plain.state_dict())
    memd_client.offload(memd_client.tile_linears(layer, bytes_max=TILE_BYTES), session)
    inputs = [torch.randn(BATCH, WIDTH).requires_grad_() for _ in range(2)]
    inputs[1].data.copy_(inputs[0].data)
    outputs = [layer(inputs[0]), plain(inputs[1])]
    assert torch.equal(*outputs)
    for output in outputs:
        output.square().sum().backward()
    assert torch.equal(gradient(inputs[0]), gradient(inputs[1]))
    for found, expected in zip(layer.parameters(), plain.parameters(), strict=True):
        assert torch.equal(gradient(found).clone(), gradient(expected))
    with torch.inference_mode():
        assert torch.equal(layer(inputs[0]), outputs[1])


def test_nothing_larger_than_a_tile_is_leased(
    session: memd_client.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = memd_client.offload(tiled(), session)
    leased: list[int] = []

    def watch(name: str) -> None:
        plain = getattr(Leases, name)

        def note(self: Leases, shards: Any, *more: Any) -> Any:
            together = shards if isinstance(shards, list) else [shards]
            leased.extend(each.size_bytes for each in together if "embedding" not in each.name)
            return plain(self, shards, *more)

        monkeypatch.setattr(Leases, name, note)

    for name in ("value", "values", "gradient", "resident", "overwrite_gradient"):
        watch(name)
    optimizer = memd_optimizer(model)
    train(model, optimizer)
    model.state_dict()
    model.down.weight.grad = torch.ones(WIDTH, INNER)
    nn.init.normal_(model.head.weight)
    assert len(leased) > 10
    assert max(leased) <= TILE_BYTES


_TRAINED = """
import re, sys, threading
import torch
from torch import nn
import memd_client

def anonymous_bytes():
    with open("/proc/self/status") as status:
        return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", status.read())[1])

peak, is_over = 0, threading.Event()

def watch():
    global peak
    while not is_over.wait(0.001):
        peak = max(peak, anonymous_bytes())

torch.set_num_threads(1)
width, tiles = 1280, 2
session = memd_client.connect(sys.argv[1], job="memory", fresh=True)
model = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
memd_client.tile_linears(model, bytes_max=16 * width * width // tiles)
memd_client.offload(model, session)
optimizer = memd_client.AdamW(model.parameters())
before = anonymous_bytes()
watcher = threading.Thread(target=watch, daemon=True)
watcher.start()
for _ in range(3):
    model(torch.ones(16, width)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
is_over.set()
watcher.join()
print(peak - before)
session.drop_job()
"""


def test_gradients_of_tiles_that_are_freed_are_no_memory_of_the_trainer(daemons: Daemons) -> None:
    """All four are 50 MiB. 16 MiB and one more may be kept, and torch has memory of its own for a
    product."""
    daemon = daemons.start(name="memory", host="256MiB", nvme="3GiB")
    done = subprocess.run(
        [sys.executable, "-c", _TRAINED, daemon.address],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    daemon.stop()
    assert int(done.stdout) < 45 << 20


_WHOLES = """
import copy, sys
import torch
from torch import nn
from torch.nn import functional
import memd_client
from memd_client.base.freed_memory import return_freed_memory
from tests.integration.safetensors_memory import peak, rss_anon_bytes

def gather(write):
    with memd_client.gather(layer, write=write):
        if write:
            layer.weight.data[0, 0] = 1

torch.set_num_threads(1)
session = memd_client.connect(sys.argv[1], job="wholes", fresh=True)
layer = memd_client.tile_linears(nn.Linear(4096, 2048, bias=False), bytes_max=4 << 20)
memd_client.offload(layer, session)
layer.weight.detach()[0].sum()  # torch imports what it needs for tensors of other classes
for use in (
    lambda: gather(False),
    lambda: gather(True),
    lambda: copy.deepcopy(layer.weight),
    lambda: functional.linear(torch.ones(1, 4096), layer.weight),
):
    return_freed_memory()
    with peak("use", rss_anon_bytes()):
        use()
session.drop_job()
"""


def test_a_weight_in_tiles_is_copied_together_once(daemons: Daemons) -> None:
    """It has 32 MiB, and tiles 4. Copies of some tiles may be there too."""
    daemon = daemons.start(name="wholes", host="128MiB", nvme="1GiB")
    done = subprocess.run(
        [sys.executable, "-c", _WHOLES, daemon.address],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    daemon.stop()
    peaks = [int(line.split()[1]) for line in done.stdout.splitlines()]
    assert len(peaks) == 4
    assert max(peaks) <= 60 << 20, peaks


def test_without_memd_a_tiled_layer_is_the_program_written_out() -> None:
    plain, model = reference(), tiled()
    assert train(model, MemoryAdamW(groups(model))) == train(plain, MemoryAdamW(groups(plain)))
    assert_same_values(model, plain)


def test_the_parameter_is_one_in_every_interface(session: memd_client.Session) -> None:
    plain = reference()
    names = list(plain.state_dict())
    model = memd_client.offload(tiled(), session)
    optimizer = memd_optimizer(model)
    expected = MemoryAdamW(groups(plain))
    train(model, optimizer)
    train(plain, expected)
    assert list(model.state_dict()) == names
    assert [name for name, _ in model.named_parameters()] == names
    for name, value in model.state_dict().items():
        assert type(value) is torch.Tensor
        assert torch.equal(value, plain.state_dict()[name])
    state, expected_state = optimizer.state_dict()["state"], expected.state_dict()["state"]
    assert state.keys() == expected_state.keys()
    for index, each in expected_state.items():
        for moment, value in each.items():
            assert torch.equal(state[index][moment] + 0, value), (index, moment)
    copied = copy.deepcopy(model)
    assert type(copied.up.weight) is nn.Parameter
    assert_same_values(copied, plain)
    assert len(optimizer.param_groups[0]["params"]) == len(names)


def test_states_are_exchanged_with_torch(session: memd_client.Session) -> None:
    plain = reference()
    theirs = torch.optim.AdamW(groups(plain), lr=LEARNING_RATE, betas=BETAS, fused=True)
    for step in range(3):
        plain(tokens(step)).backward()
        theirs.step()
        theirs.zero_grad()
    model = memd_client.offload(tiled(), session)
    model.load_state_dict(plain.state_dict())
    ours = memd_optimizer(model)
    ours.load_state_dict(theirs.state_dict())
    for step in range(3, 5):
        for each, optimizer in ((plain, theirs), (model, ours)):
            each(tokens(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_values(model, plain)
    again = torch.optim.AdamW(groups(plain), lr=LEARNING_RATE, betas=BETAS, fused=True)
    again.load_state_dict(ours.state_dict())
    for one, other in zip(again.state.values(), theirs.state.values(), strict=True):
        assert torch.equal(one["exp_avg_sq"], other["exp_avg_sq"])


def test_the_value_is_read_and_changed_as_one(session: memd_client.Session) -> None:
    plain = reference()
    model = memd_client.offload(tiled(), session)
    weight, expected = model.up.weight, plain.up.weight

    def both(change: Callable[[Any], object]) -> None:
        change(weight)
        change(expected)
        assert torch.equal(weight.detach().clone(), expected.detach())

    def init(parameter: nn.Parameter) -> None:
        torch.manual_seed(1)
        nn.init.kaiming_uniform_(parameter)

    def assign(parameter: nn.Parameter) -> None:
        parameter.data = torch.full((INNER, WIDTH), 2.0)

    both(init)
    both(lambda parameter: parameter.data.mul_(0.5))
    both(lambda parameter: parameter.detach()[8:30].add_(1))
    both(assign)
    with torch.no_grad():
        both(lambda parameter: parameter.copy_(torch.arange(INNER * WIDTH).view(INNER, WIDTH)))
        assert weight.add_(1) is weight
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        weight.add_(1)
    assert weight.shape == (INNER, WIDTH)
    assert weight.is_leaf
    assert isinstance(weight, nn.Parameter)
    assert torch.equal(weight[3] + 0, expected[3] + 1)
    assert weight.sum().item() == (expected + 1).sum().item()
    weight.sum().backward()
    assert torch.equal(gradient(weight).clone(), torch.ones(INNER, WIDTH))


def test_the_gradient_is_read_and_changed_as_one(session: memd_client.Session) -> None:
    plain = reference()
    model = memd_client.offload(tiled(), session)
    optimizer, expected = memd_optimizer(model), MemoryAdamW(groups(plain))
    assert model.up.weight.grad is None
    for step in range(3):
        for each in (model, plain):
            each(tokens(step)).backward()
            found = gradient(each.up.weight)
            assert found is each.up.weight.grad
            found.mul_(0.5)
            each.head.weight.grad = torch.full((INNER, WIDTH), 0.01)
            nn.utils.clip_grad_norm_(each.parameters(), 0.1)
        kept = gradient(model.up.weight)
        value = gradient(plain.up.weight).clone()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(kept + 0, value)
        assert model.up.weight.grad is None
        expected.step()
        expected.zero_grad()
    assert_same_values(model, plain)


def test_a_tensor_that_was_assigned_is_the_gradient_until_that_ends(
    session: memd_client.Session,
) -> None:
    plain = reference()
    model = memd_client.offload(tiled(), session)
    optimizer, expected = memd_optimizer(model), MemoryAdamW(groups(plain))
    given = [torch.full((INNER, WIDTH), 0.5) for _ in range(2)]
    for _ in range(2):
        for each, stepping, tensor in (
            (model, optimizer, given[0]),
            (plain, expected, given[1]),
        ):
            each.up.weight.grad = tensor
            gradient(each.up.weight).add_(1)
            stepping.clip_grad_norm_(1.0)
            stepping.step()
            stepping.zero_grad()
        assert torch.equal(*given)
        for tensor in given:
            tensor.mul_(2)  # that gradient is over
        for each, stepping in ((model, optimizer), (plain, expected)):
            each(tokens(0)).backward()
            stepping.step()
            stepping.zero_grad()
    assert_same_values(model, plain)


def test_gather_has_the_whole_parameter_in_place(session: memd_client.Session) -> None:
    plain = reference()
    model = memd_client.offload(tiled(), session)
    weight, expected = model.up.weight, plain.up.weight
    with memd_client.gather(model, write=True):
        assert torch.equal(weight, expected)
        weight.detach().numpy()[:] = 3  # torch does not count this
        weight.data = 2 * weight.data
        with memd_client.gather([weight]):
            assert weight[5, 5] == 6
    with torch.no_grad():
        expected.fill_(6)
    assert_same_values(model, plain)
    with memd_client.gather(model):
        with torch.no_grad():
            weight.mul_(0.5)
        with pytest.raises(memd_client.MemdError, match="write=True"):
            weight.data = weight.data + 1
        with (
            pytest.raises(memd_client.MemdError, match="in use for reading"),
            memd_client.gather(weight, write=True),
        ):
            pass
        functional.linear(torch.ones(2, WIDTH), weight).sum().backward()
        output = model.up(torch.ones(2, WIDTH))
        output.sum().backward()
    with torch.no_grad():
        expected.mul_(0.5)
    functional.linear(torch.ones(2, WIDTH), expected).sum().backward()
    expected_output = plain.up(torch.ones(2, WIDTH))
    expected_output.sum().backward()
    assert torch.equal(output, expected_output)  # with what was changed inside
    assert_same_values(model, plain)
    assert torch.equal(gradient(weight).clone(), gradient(expected))
    with (
        pytest.raises(memd_client.MemdError, match="torch does not count"),
        memd_client.gather(weight),
    ):
        weight.detach().numpy()[:] = 4
    assert_same_values(model, plain)


def test_a_step_inside_gather_is_refused_and_makes_no_step(session: memd_client.Session) -> None:
    model = memd_client.offload(tiled(), session)
    optimizer = memd_optimizer(model)
    weight = model.up.weight
    before = weight.detach().clone()
    for write in (True, False):
        with memd_client.gather(weight, write=write):
            weight.square().sum().backward()
            with pytest.raises(memd_client.MemdError, match=r"'up\.weight' .*leave gather"):
                optimizer.step()
        assert torch.equal(weight.detach(), before)
        optimizer.zero_grad()
    weight.square().sum().backward()
    optimizer.step()
    assert not torch.equal(weight.detach(), before)


def test_a_weight_that_is_trained_from_inside_gather_on_gets_its_gradient(
    session: memd_client.Session,
) -> None:
    model = tiled()
    model.up.weight.requires_grad_(False)
    memd_client.offload(model, session)
    weight = model.up.weight
    with memd_client.gather(weight):
        weight.requires_grad_()
        weight.square().sum().backward()
    assert torch.equal(gradient(weight).clone(), 2 * weight.detach())


def test_threads_may_gather_one_weight_together(session: memd_client.Session) -> None:
    model = memd_client.offload(tiled(), session)
    weight = model.up.weight
    expected = weight.detach().clone()
    start = threading.Barrier(4)
    wrong: list[object] = []

    def read() -> None:
        start.wait()
        for _ in range(20):
            with memd_client.gather(weight):
                if not torch.equal(weight * 1, expected):
                    wrong.append("other bytes")

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert type(weight).__name__ == "TiledParameter"
    assert torch.equal(weight.detach(), expected)


def test_a_changed_assigned_gradient_is_refused_by_whoever_changes_the_gradient(
    session: memd_client.Session,
) -> None:
    model = memd_client.offload(tiled(), session)
    optimizer, weight = memd_optimizer(model), model.up.weight
    given = torch.ones(weight.shape)
    weight.grad = given
    held = weight.grad
    given.add_(1)
    with pytest.raises(memd_client.MemdError, match="assign it again"):
        optimizer.clip_grad_norm_(1.0)
    assert held is not None
    with pytest.raises(memd_client.MemdError, match="assign it again"):
        held.mul_(2)
    assert torch.equal(given, torch.full(weight.shape, 2.0))


def test_a_gradient_in_tiles_is_not_shared_with_another_parameter(
    session: memd_client.Session,
) -> None:
    model = tiled()
    model.other = nn.Parameter(torch.ones(model.up.weight.shape))
    memd_client.offload(model, session)
    model.up.weight.grad = torch.ones(model.up.weight.shape)
    with pytest.raises(memd_client.InvalidArgument, match="clone"):
        model.other.grad = model.up.weight.grad


def test_zeros_stay_where_a_module_zeroes_its_gradients(session: memd_client.Session) -> None:
    plain = reference()
    model = memd_client.offload(tiled(), session)
    optimizer, expected = memd_optimizer(model), MemoryAdamW(groups(plain))
    for each, stepping in ((model, optimizer), (plain, expected)):
        each(tokens(0)).backward()
        stepping.step()
        each.zero_grad(set_to_none=False)
        stepping.step()
    assert_same_values(model, plain)


def test_a_frozen_weight_in_tiles_trains_what_is_below_it(session: memd_client.Session) -> None:
    plain = reference()
    model = tiled()
    for each in (plain, model):
        each.up.weight.requires_grad_(False)
    memd_client.offload(model, session)
    for each in (plain, model):
        each(tokens(0)).backward()
    assert model.up.weight.grad is None
    assert torch.equal(gradient(model.embedding.weight).clone(), gradient(plain.embedding.weight))
    for each in (plain, model):
        each.up.weight.requires_grad_(True)
        each(tokens(1)).backward()
    assert torch.equal(gradient(model.up.weight).clone(), gradient(plain.up.weight))


def test_a_job_goes_on_with_its_tiles(daemon: Daemon) -> None:
    plain = reference()
    expected = MemoryAdamW(groups(plain))
    losses = train(plain, expected) + train(plain, expected)
    found = []
    for _ in range(2):
        with memd_client.connect(daemon.address, job="again") as session:
            model = memd_client.offload(tiled(), session)
            found += train(model, memd_optimizer(model))
    assert found == losses
    with memd_client.connect(daemon.address, job="again") as session:
        other = memd_client.tile_linears(build(), bytes_max=2 * TILE_BYTES)
        with pytest.raises(memd_client.InvalidArgument, match=r"up\.weight\[0:"):
            memd_client.offload(other, session)
        session.drop_job()


def test_a_model_is_tiled_while_it_is_built(session: memd_client.Session) -> None:
    with memd_client.init(session, dtype=torch.bfloat16):
        model = build()
        memd_client.tile_linears(model, bytes_max=TILE_BYTES)
    plain = reference(dtype=torch.bfloat16)
    assert_same_values(model, plain)
    assert train(model, memd_optimizer(model)) == train(plain, MemoryAdamW(groups(plain)))


def test_checkpoints_hold_the_whole_weight(session: memd_client.Session, tmp_path: Path) -> None:
    model = memd_client.offload(tiled(), session)
    train(model, memd_optimizer(model))
    plain = build()
    memd_client.save_safetensors(model, tmp_path / "ours.safetensors")
    memd_client.load_safetensors(plain, tmp_path / "ours.safetensors", session)
    assert_same_values(model, plain)
    other = build()
    memd_client.save_safetensors(other, tmp_path / "theirs.safetensors")
    memd_client.load_safetensors(model, tmp_path / "theirs.safetensors", session)
    assert_same_values(model, other)
    half = build().to(torch.bfloat16)
    memd_client.save_safetensors(half, tmp_path / "half.safetensors")
    memd_client.load_safetensors(model, tmp_path / "half.safetensors", session, convert=True)
    assert_same_values(model, half.float())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_another_job_goes_on_from_a_distributed_checkpoint(daemon: Daemon, tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    from memd_client.checkpoint import Reader, Writer

    plain = reference()
    expected = MemoryAdamW(groups(plain))
    train(plain, expected)
    with memd_client.connect(daemon.address, job="one", fresh=True) as session:
        model = memd_client.offload(tiled(), session)
        optimizer = memd_optimizer(model)
        train(model, optimizer)
        state = {"model": model.state_dict(keep_vars=True), "optimizer": optimizer.state_dict()}
        save(state, storage_writer=Writer(tmp_path), no_dist=True)
        session.drop_job()
    with memd_client.connect(daemon.address, job="other", fresh=True) as session:
        # Another bound, so other shards.
        model = memd_client.tile_linears(Model(nn.Linear), bytes_max=2 * TILE_BYTES)
        memd_client.offload(model, session)
        optimizer = memd_optimizer(model)
        state = {"model": model.state_dict(keep_vars=True), "optimizer": optimizer.state_dict()}
        load(state, storage_reader=Reader(tmp_path), no_dist=True)
        optimizer.load_state_dict(state["optimizer"])
        assert_same_values(model, plain)
        found = optimizer.state_dict()["state"]
        for index, moments in expected.state_dict()["state"].items():
            for name, value in moments.items():
                assert torch.equal(found[index][name] + 0, value), (index, name)
        session.drop_job()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_distributed_checkpoints_hold_the_whole_weight(
    session: memd_client.Session, tmp_path: Path
) -> None:
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    from memd_client.checkpoint import Reader, Writer

    model = memd_client.offload(tiled(), session)
    train(model, memd_optimizer(model))
    state = {"model": model.state_dict(keep_vars=True)}
    save(state, storage_writer=Writer(tmp_path / "ours"), no_dist=True)
    plain = build()
    load({"model": plain.state_dict()}, checkpoint_id=tmp_path / "ours", no_dist=True)
    assert_same_values(model, plain)
    other = build()
    save({"model": other.state_dict()}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    load(state, storage_reader=Reader(tmp_path / "theirs"), no_dist=True)
    assert_same_values(model, other)


def refused(model: nn.Module, bytes_max: int | str) -> str:
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(memd_client.InvalidArgument) as error:
        memd_client.tile_linears(model, bytes_max=bytes_max)
    assert [type(module) for module in model.modules()] == kinds
    return str(error.value)


def test_bad_input_is_refused_and_no_layer_has_changed(session: memd_client.Session) -> None:
    class OwnLinear(nn.Linear):
        pass

    assert "less than a row of 'up'" in refused(build(), WIDTH * 4 - 1)
    assert "bytes_max" in refused(build(), "many")
    assert "OwnLinear" in refused(nn.Sequential(nn.Linear(64, 64), OwnLinear(64, 64)), 4096)
    assert "out_proj" in refused(nn.MultiheadAttention(32, 2), 2048)
    model = memd_client.offload(build(), session)
    assert "before offload()" in refused(model, TILE_BYTES)


def test_other_optimizers_and_averages_work_with_the_whole(session: memd_client.Session) -> None:
    plain = reference()
    model = memd_client.offload(tiled(), session)
    averages = []
    for each in (model, plain):
        average = torch.optim.swa_utils.AveragedModel(each)
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            each(tokens(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(each)
        averages.append(average)
    assert_same_values(model, plain)
    assert_same_values(*averages)


def test_a_layer_that_is_used_three_times_adds_its_gradients_in_torchs_order(
    session: memd_client.Session,
) -> None:
    plain = reference()
    model = memd_client.offload(tiled(), session)
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
    for each in (model, plain):
        (each.up(x) + each.up(2 * x) + each.up(3 * x)).square().sum().backward()
    assert torch.equal(gradient(model.up.weight).clone(), gradient(plain.up.weight))


def test_a_weight_that_is_replaced_is_refused_at_the_step(session: memd_client.Session) -> None:
    model = memd_client.offload(tiled(), session)
    optimizer = memd_optimizer(model)
    model.up.weight = nn.Parameter(torch.ones(INNER, WIDTH))
    model(tokens(0)).backward()
    with pytest.raises(memd_client.MemdError, match="was replaced by one that is not in memd"):
        optimizer.step()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of torch's own compiler
@pytest.mark.parametrize("is_whole", [False, True])
def test_compiled_layers_have_the_same_bits(session: memd_client.Session, is_whole: bool) -> None:
    plain = reference()
    model = memd_client.offload(tiled(), session)
    if is_whole:
        model.compile(backend="aot_eager")
    else:
        model.up.compile(backend="aot_eager")
    assert train(model, memd_optimizer(model)) == train(plain, MemoryAdamW(groups(plain)))


def test_what_a_tiled_parameter_cannot_do_is_one_sentence(session: memd_client.Session) -> None:
    hooked = tiled()
    hooked.up.weight.register_hook(lambda gradient: gradient)
    with pytest.raises(memd_client.InvalidArgument, match="hooks would see none"):
        memd_client.offload(hooked, session)
    held = tiled()
    view = held.up.weight.detach()
    with pytest.raises(memd_client.InvalidArgument, match="shares the memory"):
        memd_client.offload(held, session)
    del view
    model = memd_client.offload(held, session)
    weight = model.up.weight
    with pytest.raises(memd_client.InvalidArgument, match="register_hook"):
        weight.register_hook(lambda gradient: gradient)
    with pytest.raises(memd_client.InvalidArgument, match=r"use p\.grad"):
        torch.autograd.grad(model(tokens(0)), [weight])
    with pytest.raises(memd_client.NotResident, match="convert before offload"):
        model.to(torch.bfloat16)
    with pytest.raises(memd_client.NotResident, match="tiled"):
        torch.vmap(torch.sum)(weight)
    given = torch.ones(INNER, WIDTH)
    weight.grad = given
    given.add_(1)
    with pytest.raises(memd_client.MemdError, match="has changed since"):
        memd_optimizer(model).step()
    weight.grad = given
    with pytest.raises(memd_client.InvalidArgument, match="assign a clone"):
        model.head.weight.grad = weight.grad
