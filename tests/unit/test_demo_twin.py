from pathlib import Path

import pytest
import torch
from torch import nn

from memd.demo.model import GPTShape, build_model, parameter_groups
from memd.demo.text import Batches
from memd.demo.train import (
    BETAS,
    LEARNING_RATE,
    WEIGHT_DECAY,
    StepRecord,
    learning_rate_factor,
    train,
)
from memd.demo.twin import (
    Comparison,
    memory_optimizer,
    read_parameters,
    round_to_half,
    write_parameters,
)

SHAPE = GPTShape(width=64, depth=1, sequence=32)
TEXT = bytearray(b"the quick brown fox jumps over the lazy dog. " * 40)


def batches() -> Batches:
    return Batches(TEXT, batch=4, sequence=32, seed=0)


def train_small(dtype: torch.dtype, *, step_count: int) -> tuple[nn.Module, list[StepRecord]]:
    model = build_model(SHAPE, dtype=dtype, seed=0)
    records: list[StepRecord] = []
    train(
        model,
        memory_optimizer(model),
        batches(),
        step_count=step_count,
        observe=records.append,
    )
    return model, records


def from_bits(*bits: int) -> torch.Tensor:
    signed = [value - 2**32 if value >= 2**31 else value for value in bits]
    return torch.tensor(signed, dtype=torch.int32).view(torch.float32)


def test_halves_are_rounded_with_ties_away_from_zero() -> None:
    halves = round_to_half(
        from_bits(0x3F800000, 0x3F807FFF, 0x3F808000, 0x3F818000, 0xBF808000, 0x80000000)
    )
    bits = [value & 0xFFFF for value in halves.view(torch.int16).tolist()]
    assert bits == [0x3F80, 0x3F80, 0x3F81, 0x3F82, 0xBF81, 0x8000]


def test_the_fp32_twin_is_torchs_fused_adamw() -> None:
    model, records = train_small(torch.float32, step_count=4)
    plain = build_model(SHAPE, dtype=torch.float32, seed=0)
    optimizer = torch.optim.AdamW(
        parameter_groups(plain, weight_decay=WEIGHT_DECAY),
        lr=LEARNING_RATE,
        betas=BETAS,
        fused=True,
    )
    for step in range(4):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * learning_rate_factor(step, step_count=4)
        loss = plain(*batches().at(step))
        assert loss.item() == records[step].loss
        loss.backward()
        # The norm of the gradients' norms depends on their order: that of the groups, in memd too.
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert all(
        torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True)
    )


def test_the_bf16_twin_publishes_the_rounded_half_of_its_masters() -> None:
    model = build_model(SHAPE, dtype=torch.bfloat16, seed=0)
    optimizer = memory_optimizer(model)
    masters = [p for group in optimizer.param_groups for p in group["params"]]
    parameters = [p for group in parameter_groups(model, weight_decay=0) for p in group["params"]]
    model(*batches().at(0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert all(master.dtype == torch.float32 for master in masters)
    assert all(p.grad is None and m.grad is None for p, m in zip(parameters, masters, strict=True))
    assert all(torch.equal(p, round_to_half(m)) for p, m in zip(parameters, masters, strict=True))
    # The masters keep what bf16 can't: updates would otherwise be lost in rounding.
    assert any(not torch.equal(p.float(), m) for p, m in zip(parameters, masters, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_is_repeatable_and_the_loss_falls(dtype: torch.dtype) -> None:
    _, records = train_small(dtype, step_count=30)
    _, again = train_small(dtype, step_count=30)
    assert [record.loss for record in records] == [record.loss for record in again]
    assert records[-1].loss < 0.8 * records[0].loss


def test_the_rate_warms_up_and_falls_to_a_tenth() -> None:
    factors = [learning_rate_factor(step, step_count=100) for step in range(101)]
    assert factors[0] == pytest.approx(0.1)
    assert factors[9] == factors[10] == pytest.approx(1.0)
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert factors[100] == pytest.approx(0.1)


def compare(model: nn.Module, path: Path) -> Comparison:
    comparison = Comparison()
    for name, parameter, expected in read_parameters(path, model):
        comparison.add_parameter(name, parameter.detach(), expected)
    return comparison


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_written_and_read_again_are_identical(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    model = build_model(SHAPE, dtype=dtype, seed=0)
    write_parameters(tmp_path / "parameters", model.named_parameters())
    comparison = compare(model, tmp_path / "parameters")
    assert comparison.identical
    assert comparison.element_count == SHAPE.parameter_count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_differing_bit_is_found_and_named(tmp_path: Path, dtype: torch.dtype) -> None:
    model = build_model(SHAPE, dtype=dtype, seed=0)
    write_parameters(tmp_path / "parameters", model.named_parameters())
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    weight = model.get_parameter("blocks.0.feed_in.weight")
    weight.data.view(bits)[3, 5] ^= 1
    comparison = compare(model, tmp_path / "parameters")
    assert not comparison.identical
    assert comparison.elements_differing == 1
    assert comparison.parameters_differing == ["blocks.0.feed_in.weight"]
    assert 0 < comparison.parameter_difference_max < 1e-3


def test_a_zero_with_the_other_sign_is_a_difference() -> None:
    comparison = Comparison()
    comparison.add_parameter("zero", torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not comparison.identical
    assert comparison.parameter_difference_max == 0


def test_a_nan_is_the_largest_difference() -> None:
    comparison = Comparison()
    comparison.add_losses([float("nan"), 2.0], [1.0, 1.0])
    assert comparison.loss_difference_max != comparison.loss_difference_max
    assert comparison.steps_differing == 2


def test_one_differing_loss_is_found() -> None:
    comparison = Comparison()
    comparison.add_losses([3.0, 2.0, 1.0 + 2**-52], [3.0, 2.0, 1.0])
    assert (comparison.steps_differing, comparison.step_count) == (1, 3)
    assert comparison.loss_difference_max == 2**-52
    assert not comparison.identical


def test_losses_of_different_runs_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="2 losses can't be compared with 1"):
        Comparison().add_losses([1.0, 2.0], [1.0])
