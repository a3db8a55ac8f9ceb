import pytest

from memd.demo.quantities import format_count, parse_count
from memd.demo.sizes import HostPool, host_pool, largest_model, trainer, volume


def small_pool(
    *, gradient_element_bytes: int = 4, cache_fraction: float = 0.25, parameter_count: int = 10**9
) -> HostPool:
    return host_pool(
        parameter_count,
        gradient_element_bytes=gradient_element_bytes,
        cache_fraction=cache_fraction,
        module_elements_max=10**6,
    )


def test_the_pool_is_the_sum_of_its_terms() -> None:
    pool = small_pool()
    assert pool.gradient_bytes == 4 * 10**9
    assert pool.cache_bytes == 3 * 10**9  # a quarter of 12 bytes a parameter
    assert pool.module_bytes == 2 * 4 * 10**6
    assert pool.tile_bytes == 2 * 4 * 2**20
    assert pool.segment_bytes == 2 * 64 * 2**20
    assert pool.total_bytes == 7 * 10**9 + 8 * 10**6 + 8 * 2**20 + 128 * 2**20


def test_bf16_gradients_take_half() -> None:
    assert small_pool(gradient_element_bytes=2).gradient_bytes == 2 * 10**9


def test_a_smaller_cache_changes_only_the_cache() -> None:
    quarter, eighth = small_pool(), small_pool(cache_fraction=0.125)
    assert quarter.total_bytes - eighth.total_bytes == 10**9 * 12 // 8


def test_a_small_pool_has_small_segments() -> None:
    pool = small_pool(parameter_count=10**6)
    assert pool.segment_bytes == 2 * ((pool.total_bytes - pool.segment_bytes) // 16)


def test_the_volume_holds_two_commits_and_spilled_gradients() -> None:
    sizes = volume(10**9, gradient_element_bytes=4)
    assert sizes.state_bytes == sizes.next_state_bytes == 12 * 10**9
    assert sizes.total_bytes > 28 * 10**9


def test_the_largest_model_is_bounded_by_disk_or_memory() -> None:
    def nothing(_count: int) -> int:
        return 0

    by_disk = largest_model(
        disk_bytes_free=28_750_000_000,
        memory_bytes_available=2**40,
        gradient_element_bytes=4,
        trainer_bytes=nothing,
    )
    assert by_disk.parameter_count == by_disk.parameters_by_disk == 10**9
    by_memory = largest_model(
        disk_bytes_free=10**15,
        memory_bytes_available=9 * 2**30,
        gradient_element_bytes=4,
        trainer_bytes=nothing,
    )
    assert by_memory.parameter_count == by_memory.parameters_by_memory == 2**31
    assert "28.75 B" in by_memory.formula


def test_what_the_trainer_takes_is_counted_with_the_gradients() -> None:
    def trainer_bytes(count: int) -> int:
        return 2**20 + 3 * count

    memory_bytes = 2**33
    largest = largest_model(
        disk_bytes_free=10**15,
        memory_bytes_available=memory_bytes + 2**30,
        gradient_element_bytes=2,
        trainer_bytes=trainer_bytes,
    ).parameters_by_memory
    assert 2 * largest + trainer_bytes(largest) <= memory_bytes
    assert 2 * (largest + 1) + trainer_bytes(largest + 1) > memory_bytes


def test_no_model_fits_where_nothing_is_left() -> None:
    largest = largest_model(
        disk_bytes_free=10**15,
        memory_bytes_available=2**30,
        gradient_element_bytes=4,
        trainer_bytes=lambda _count: 2**26,
    )
    assert largest.parameter_count == 0


def test_the_trainer_holds_one_module_its_gradient_and_activations() -> None:
    needs = trainer(module_elements_max=10**6, element_bytes=2, activation_bytes=4 * 10**6)
    assert needs.total_bytes == 2 * 10**6 + 2 * 10**6 + 5 * 10**6 + 64 * 2**20


def test_the_largest_model_here_fits_the_volume_it_would_get() -> None:
    disk_bytes_free = 100 * 10**9
    largest = largest_model(
        disk_bytes_free=disk_bytes_free,
        memory_bytes_available=2**40,
        gradient_element_bytes=2,
        trainer_bytes=lambda _count: 0,
    )
    needed = volume(largest.parameter_count, gradient_element_bytes=2).total_bytes
    assert needed == pytest.approx(disk_bytes_free, rel=0.01)


@pytest.mark.parametrize(
    ("text", "count"), [("5M", 5_000_000), ("1.5B", 1_500_000_000), ("250K", 250_000), ("7", 7)]
)
def test_counts_are_read_with_their_suffix(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "M", "5m", "five", "-5M", "5MM"])
def test_counts_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a number of parameters"):
        parse_count(text)


def test_counts_are_written_in_the_suffix_that_reads_best() -> None:
    assert format_count(29_201_536) == "29.2M"
    assert format_count(1_500_000_000) == "1.5B"
    assert format_count(12) == "12"
