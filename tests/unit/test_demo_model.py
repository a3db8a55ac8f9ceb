import pytest
import torch

from memd.demo.model import GPTShape, build_model, parameter_groups, shape_for

SMALL = GPTShape(width=64, depth=2, sequence=48)


@pytest.mark.parametrize("parameter_count", [1_000_000, 5_000_000, 30_000_000, 7_000_000_000])
def test_a_shape_has_about_the_parameters_asked_for(parameter_count: int) -> None:
    shape = shape_for(parameter_count, sequence=256)
    assert shape.parameter_count == pytest.approx(parameter_count, rel=0.2)
    assert 32 <= shape.width / shape.depth <= 96


def test_large_counts_are_met_closely() -> None:
    shape = shape_for(30_000_000, sequence=256)
    assert shape.parameter_count == pytest.approx(30_000_000, rel=0.05)


@pytest.mark.parametrize("parameter_count", [0, 99_999, 10**12])
def test_counts_that_no_shape_has_are_refused_with_the_range(parameter_count: int) -> None:
    with pytest.raises(ValueError, match="choose between 100000 and"):
        shape_for(parameter_count, sequence=256)


def test_the_built_model_has_the_parameters_its_shape_says() -> None:
    model = build_model(SMALL, dtype=torch.float32, seed=0)
    assert sum(parameter.numel() for parameter in model.parameters()) == SMALL.parameter_count


def test_the_largest_module_is_the_one_the_shape_says() -> None:
    model = build_model(SMALL, dtype=torch.float32, seed=0)
    largest = max(
        sum(parameter.numel() for parameter in module.parameters(recurse=False))
        for module in model.modules()
    )
    assert largest == SMALL.module_elements_max


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("depth", [1, 6])
def test_activations_are_what_autograd_saves_and_one_block_more(
    depth: int, dtype: torch.dtype
) -> None:
    shape = GPTShape(width=256, depth=depth, sequence=64)
    model = build_model(shape, dtype=dtype, seed=0)
    parameters = {each.untyped_storage().data_ptr() for each in model.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in parameters:
            saved[address] = tensor
        return tensor

    inputs = torch.zeros(2, 64, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(inputs, inputs)
    saved_bytes = sum(each.untyped_storage().nbytes() for each in saved.values())
    counted_bytes = shape.activation_bytes(batch=2, element_bytes=dtype.itemsize)
    block_bytes = 2 * 64 * 16 * shape.width * dtype.itemsize
    assert saved_bytes < counted_bytes < saved_bytes + 1.2 * block_bytes


def test_a_seed_gives_the_same_parameters_again() -> None:
    first = build_model(SMALL, dtype=torch.float32, seed=3)
    again = build_model(SMALL, dtype=torch.float32, seed=3)
    other = build_model(SMALL, dtype=torch.float32, seed=4)
    assert all(
        torch.equal(p, q) for p, q in zip(first.parameters(), again.parameters(), strict=True)
    )
    assert not torch.equal(first.embedding.weight, other.embedding.weight)


def test_the_output_layer_shares_the_embedding() -> None:
    model = build_model(SMALL, dtype=torch.float32, seed=0)
    assert model.head.weight is model.embedding.weight
    assert "head.weight" not in dict(model.named_parameters())


def test_a_prediction_sees_nothing_of_what_follows() -> None:
    model = build_model(SMALL, dtype=torch.float32, seed=0)
    inputs = torch.arange(48).view(1, 48)
    changed = inputs.clone()
    changed[0, -1] = 200
    hidden: list[torch.Tensor] = []
    model.norm.register_forward_hook(lambda _m, _args, output: hidden.append(output))
    model(inputs, inputs)
    model(changed, inputs)
    assert torch.equal(hidden[0][:, :-1], hidden[1][:, :-1])
    assert not torch.equal(hidden[0][:, -1], hidden[1][:, -1])


def test_an_untrained_model_guesses_evenly() -> None:
    model = build_model(SMALL, dtype=torch.bfloat16, seed=0)
    inputs = torch.arange(48).view(1, 48)
    loss = model(inputs, inputs.flip(1))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(5.545, abs=0.3)  # log 256


def test_matrices_decay_and_vectors_do_not() -> None:
    model = build_model(SMALL, dtype=torch.float32, seed=0)
    matrices, vectors = parameter_groups(model, weight_decay=0.1)
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    assert all(parameter.dim() == 2 for parameter in matrices["params"])
    assert all(parameter.dim() == 1 for parameter in vectors["params"])
    assert len(matrices["params"]) + len(vectors["params"]) == len(list(model.parameters()))
