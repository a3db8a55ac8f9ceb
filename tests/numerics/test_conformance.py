"""The matrix of tests/numerics/conformance is whole, its cover covers, and its cells can fail. The
cells themselves run in `make test-more` and `make conformance`."""

from __future__ import annotations

from itertools import combinations, product
from typing import TYPE_CHECKING

import pytest
import torch

from memd.demo.folder import volume_folder
from tests.daemons import BUILD
from tests.numerics.conformance import document
from tests.numerics.conformance.cells import (
    EQUAL,
    RAISES,
    REFUSED,
    WRONG,
    Bench,
    Cell,
    Expected,
    Verdict,
    bench,
    by_plain_torch,
)
from tests.numerics.conformance.cover import pairwise_cover
from tests.numerics.conformance.models import MODELS
from tests.numerics.conformance.program import (
    COMPILERS,
    PRECISIONS,
    STEPS,
    VARIANTS,
    Plain,
    Program,
    Trained,
    difference,
    train,
)
from tests.numerics.conformance.selection import (
    LEFT_OUT,
    cells,
    ci_cells,
    cover,
    cover_first,
    row,
)
from tests.soak.soak import PARTS

if TYPE_CHECKING:
    from collections.abc import Iterator

ACCUMULATION = Program("MLP", "fp32", "accumulation")


@pytest.fixture(scope="module")
def trained() -> Iterator[Bench]:
    thread_count = torch.get_num_threads()
    BUILD.mkdir(exist_ok=True)
    with volume_folder(BUILD, bytes_needed=1 << 28) as folder, bench(folder) as made:
        yield made
    torch.set_num_threads(thread_count)


def test_every_pair_of_values_is_in_the_cover() -> None:
    rows = [*map(row, cover())]
    columns = range(len(rows[0]))
    for one, other in combinations(columns, 2):
        possible = {(each[one], each[other]) for each in map(row, cells())}
        assert {(each[one], each[other]) for each in rows} == possible
    assert len(rows) < 100


def test_a_cover_of_what_is_free_has_the_rows_that_two_columns_need() -> None:
    rows = [*product("abc", "xy", "123")]
    assert len(pairwise_cover(rows)) == 9
    assert pairwise_cover(rows) == pairwise_cover(rows)


def test_ci_runs_the_cover_and_all_of_fp32_in_a_short_pool() -> None:
    chosen = ci_cells()
    assert {cell for cell in cover() if cell.program.variant not in LEFT_OUT} <= {*chosen}
    assert len({*chosen}) == len(chosen)
    programs = {cell.program for cell in chosen if cell.pool == "1/4"}
    ordinary = [each for each in VARIANTS if each not in COMPILERS]
    assert {Program(model, "fp32", each) for model in MODELS for each in ordinary} <= programs
    compiled = [cell for cell in chosen if cell.program.variant in COMPILERS]
    assert (*COMPILERS,) == LEFT_OUT or len(compiled) >= 3


def test_all_cells_are_run_once_and_those_of_the_cover_first() -> None:
    assert {*cover_first()} == {*cells()}
    assert len(cover_first()) == len(cells())
    assert cover_first()[: len(cover())] == cover()
    assert [part.count for part in PARTS if part.name == "conformance"] == [len(cells())]


def test_gradients_that_are_added_have_the_bits_of_plain_torch(trained: Bench) -> None:
    cell = Cell(ACCUMULATION, "1/4")
    verdict = trained.verdict(cell, by_plain_torch(cell.program))
    assert verdict.kind == EQUAL, verdict


def test_a_skipped_step_leaves_what_plain_torch_leaves(trained: Bench) -> None:
    cell = Cell(Program("MLP", "fp16 autocast", "clipping"), "1/4")
    expected = by_plain_torch(cell.program)
    assert expected.trained is not None
    assert expected.trained.skipped_steps == 1
    verdict = trained.verdict(cell, expected)
    assert verdict.kind == EQUAL, verdict


def test_a_refusal_is_one_only_where_it_is_by_design(trained: Bench) -> None:
    program = Program("MLP", "fp32", "step_in_backward, accumulation")
    expected = by_plain_torch(program)
    verdict = trained.verdict(Cell(program, "large"), expected)
    assert verdict.kind == REFUSED
    assert verdict.text.startswith("InvalidArgument: job 'cell': a second gradient")
    # It is none where plain PyTorch raises, too.
    raising = Expected(None, "RuntimeError: no")
    assert trained.verdict(Cell(program, "large"), raising).kind == WRONG


def test_an_error_counts_only_if_plain_torch_raises_it(trained: Bench) -> None:
    program = Program("LSTM", "fp16 autocast", "plain")
    expected = by_plain_torch(program)
    assert expected.trained is None
    cell = Cell(program, "large")
    assert trained.verdict(cell, expected) == Verdict(RAISES, expected.error)
    another = trained.verdict(cell, Expected(None, "RuntimeError: another"))
    assert another == Verdict(RAISES, f"RuntimeError: another With memd: {expected.error}")
    assert trained.verdict(cell, by_plain_torch(ACCUMULATION)).kind == WRONG


@pytest.mark.parametrize("what", ["figure", "parameter", "buffer", "name", "skipped"])
def test_one_bit_of_anything_is_a_difference(what: str) -> None:
    expected = train(Program("convolution", "bf16", "plain"), Plain())
    figures, state = list(expected.figures), dict(expected.state)
    skipped = expected.skipped_steps
    assert not difference(expected, Trained(figures=figures, state=state, skipped_steps=skipped))
    if what == "figure":
        figures[-1] = float(torch.tensor(figures[-1]).nextafter(torch.tensor(torch.inf)))
    elif what == "skipped":
        skipped += 1
    elif what == "name":
        state["other"] = state.pop("head.bias")
    else:
        name = {"parameter": "head.bias", "buffer": "stem.norm.running_var"}[what]
        state[name] = state[name].clone()
        state[name].view(torch.int16)[3] ^= 1
    found = Trained(figures=figures, state=state, skipped_steps=skipped)
    assert difference(found, expected)


def test_the_programs_differ_from_one_another() -> None:
    """Or a variant does nothing."""
    plain = train(Program("MLP", "fp32", "plain"), Plain())
    for variant in ("accumulation", "clipping", "half frozen", "scheduler"):
        assert difference(train(Program("MLP", "fp32", variant), Plain()), plain), variant
    for precision in PRECISIONS[1:]:
        assert difference(train(Program("MLP", precision, "plain"), Plain()), plain), precision
    evaluated = train(Program("MLP", "fp32", "evaluation"), Plain())
    assert len(evaluated.figures) == 2 * STEPS


def shown_in_the_document() -> dict[Cell, str]:
    shown: dict[Cell, str] = {}
    model, columns = "", []
    for line in document.PATH.read_text(encoding="utf-8").splitlines():
        fields = [field.strip() for field in line.strip("|").split(" | ")]
        if line.startswith("## "):
            model = line.removeprefix("## ")
        elif line.startswith("| | "):
            columns = [column.rsplit(", ", 1) for column in line.strip("| ").split(" | ")]
        elif model in MODELS and line.startswith("| "):
            for (precision, pool), text in zip(columns, fields[1:], strict=True):
                shown[Cell(Program(model, precision, fields[0]), pool)] = text.split(" (")[0]
    return shown


def test_the_document_has_all_cells_and_ci_runs_those_that_it_has_right() -> None:
    shown = shown_in_the_document()
    assert {*shown} == {*cells()}
    assert {*shown.values()} <= {EQUAL, REFUSED, RAISES, WRONG, document.NOT_RUN}
    wrong = [cell for cell in ci_cells() if shown[cell] not in (EQUAL, REFUSED, RAISES)]
    assert wrong == []
    assert all(cell.program.is_refused for cell in shown if shown[cell] == REFUSED)
