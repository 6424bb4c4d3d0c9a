# SPDX-License-Identifier: Apache-2.0
"""How far runs are apart, and whether one is a run like others, without keeping each of them."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megagraph._C import Comparison, Difference, has_bits, have_same_bits

NAN, INF = float("nan"), float("inf")
ROWS, COLUMNS = 32, 256
PIECE = 2**19  # entries that are compared at once


def compared(runs: Sequence[Tensor], graph: Tensor) -> Comparison:
    """What a graph has made beside runs of its module."""
    found = Comparison({"it": graph}, {"it": runs[0]})
    for run in runs[1:]:
        found.add({"it": run})
    return found


def misfit(runs: Sequence[Tensor], graph: Tensor) -> Difference | None:
    """How the graph differs, if what it has made is not one run more."""
    return next(iter(compared(runs, graph).differences(0, 0)), None)


def apart(runs: Sequence[Tensor]) -> float:
    """How far runs are apart, beside a graph that makes another shape."""
    found = misfit(runs, torch.zeros(7, 7, 7))
    assert found is not None and found.off == INF
    return found.spread


@pytest.mark.parametrize(("shape", "times"), [((3, 11), 50), ((3, PIECE // 2), 2), ((PIECE + 1,), 2)])
def test_a_range_knows_how_far_every_two_runs_are_apart(shape: tuple[int, ...], times: int) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(times):
        runs = list(torch.randn(5, *shape, generator=generator))
        pairs = itertools.combinations(runs, 2)
        assert apart(runs) == max(float((a.double() - b.double()).abs().max()) for a, b in pairs)


def test_distances_of_numbers_of_any_kind_and_of_what_is_none() -> None:
    for one, other, expected in (
        *(([1.0, NAN], [3.0, NAN], 2.0), ([1.0, NAN], [1.0, 2.0], INF), ([1.0, 2.0], [1.0, NAN], INF)),
        *(([INF, 1.0], [INF, 1.5], 0.5), ([INF, 1.0], [-INF, 1.0], INF)),
        *(([], [], 0.0), ([1.0], [1.0, 2.0], INF), ([1, 5], [1, 2], 3.0)),
        ([True, False], [True, True], 1.0),
    ):
        found = misfit([torch.tensor(one)], torch.tensor(other))
        assert (found.off if found else 0.0) == expected


def test_a_negative_zero_has_a_bit_and_so_have_complex_numbers() -> None:
    for dtype in (torch.float8_e5m2, torch.float16, torch.float32, torch.float64):
        assert not has_bits(torch.zeros(3).to(dtype)) and has_bits(torch.tensor([0.0, -0.0]).to(dtype))
    found = misfit([torch.zeros(3)], torch.tensor([0.0, -0.0, 0.0]))
    assert found is not None and found.off == found.spread == 0.0
    nan = torch.tensor([complex(NAN, 1.0)])
    assert have_same_bits(nan, nan.clone())
    assert not have_same_bits(torch.tensor([complex(0.0, 1.0)]), torch.tensor([complex(-0.0, 1.0)]))


# -- runs that add in another order each time ------------------------------------------------------


def sums(seed: int, dtype: torch.dtype, scale: Tensor, device: str = "cpu") -> Callable[[], Tensor]:
    """Runs of one kernel: entries are sums of 64 terms, each time in another order."""
    generator = torch.Generator().manual_seed(seed)
    terms = torch.randn(64, ROWS, COLUMNS, generator=generator) * scale

    def run() -> Tensor:
        total = torch.zeros(ROWS, COLUMNS)
        for place in torch.randperm(64, generator=generator).tolist():
            total += terms[place]
        return total.to(device, dtype)

    return run


def flips(seed: int) -> Callable[[], Tensor]:
    """Runs of one kernel that are the same but for two rows each time, which are rounded otherwise."""
    generator = torch.Generator().manual_seed(seed)
    exact = torch.randn(ROWS, COLUMNS, generator=generator)

    def run() -> Tensor:
        out = exact.clone()
        rows = torch.randint(0, ROWS, (2,), generator=generator)
        out[rows] *= 1 + 2.0**-8 * torch.randn(COLUMNS, generator=generator)
        return out

    return run


SCALES = [torch.ones(ROWS, 1), 10.0 ** -torch.arange(ROWS).unsqueeze(1), 10.0 ** (-torch.arange(256) / 50)]


def is_never_like(run: Callable[[], Tensor]) -> bool:
    """Whether one run more is not like five others, nor like up to twenty."""
    judged = compared([run() for _ in range(5)], run())
    for _ in range(15):
        if not judged.differences(0, 0):
            return False
        judged.add({"it": run()})
    return bool(judged.differences(0, 0))


@pytest.mark.parametrize("shape", [(ROWS, COLUMNS), (-1, 16), (-1, 3, 1), (-1,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", SCALES, ids=["even", "rows", "columns"])
def test_one_run_more_is_no_other_kernel(scale: Tensor, dtype: torch.dtype, shape: Any, device: str) -> None:
    def run() -> Tensor:
        whole = of_seed().flatten()
        return whole[: len(whole) // 3 * 3 if 3 in shape else len(whole)].reshape(shape)

    for seed in range(6):
        of_seed = sums(seed, dtype, scale, device)
        assert not is_never_like(run)


def test_rows_that_each_run_rounds_otherwise_are_hardly_ever_an_alarm() -> None:
    """One that does not recur is none: `Difference.may_be_chance()`."""
    assert sum(is_never_like(flips(seed)) for seed in range(20)) <= 1


@pytest.mark.parametrize("noise", [2.0**-22, 2.0**-19])
def test_sums_that_cancel_may_go_as_far_as_their_terms_but_only_few_of_them(noise: float) -> None:
    """Bug: a right graph of a large model's layer failed, since its order varied more than eager's."""
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(512, 512, generator=generator) / 512**0.5).bfloat16()
    scale = torch.exp(torch.randn(256, 1, generator=generator)) * 1e-6
    kept, added = scale * torch.randn(2, 256, 512, generator=generator)

    def run(more: float = 1.0) -> Tensor:
        off = torch.randn(256, 512, generator=generator, dtype=torch.float64) * noise * more
        return (kept.double() * (1 + off)).bfloat16() @ weight + added.bfloat16()

    graph, known = run(more=3.0), [run() for _ in range(20)]
    assert misfit(known, graph) is None
    is_steady = torch.stack(known).eq(known[0]).all(0)
    of_a_column = is_steady & (torch.arange(512) == 7)
    little = torch.where(of_a_column, graph.abs().amax(1, True) / 128, 0.0)
    assert misfit(known, graph + little) is not None and misfit(known, graph * (1 + 2.0**-7)) is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_rows_and_columns_beside_noise_may_not_err(dtype: torch.dtype, device: str) -> None:
    """Bug: the noise of the largest entries excused whatever small ones were."""
    run = sums(0, dtype, SCALES[1], device)
    known = [run() for _ in range(20)]
    for row, factor in itertools.product((1, 5, 15), (0.0, 1.1)):
        spoilt = run()
        spoilt[row] *= factor
        found = misfit(known, spoilt)
        assert found is not None and found.off > found.spread
    run = sums(0, dtype, SCALES[2], device)
    known = [run() for _ in range(20)]
    for column in (128, 255):
        assert misfit(known, run().index_fill(1, torch.tensor(column, device=device), 0.0)) is not None


@pytest.mark.parametrize("width", [1, 8, 16, 63])
def test_short_rows_that_are_small_may_not_be_wrong(width: int) -> None:
    generator, small = torch.Generator().manual_seed(1), torch.arange(512, 1024)
    exact = torch.randn(1024, width, generator=generator)
    exact[512:] *= 3e-3
    noise = torch.full((1024, 1), 1e-3).index_fill(0, small, 1e-9)

    def run() -> Tensor:
        return exact + noise * torch.randn(1024, width, generator=generator)

    spoilt = run().index_fill(0, small, 0.0)
    assert not is_never_like(run)
    assert misfit([run() for _ in range(5)], spoilt) is not None


def test_many_entries_that_no_run_moves_may_not_move_even_by_a_rounding() -> None:
    run = flips(0)
    runs, moved = [run() for _ in range(5)], run()
    moved += moved.abs() * torch.finfo(torch.float32).eps
    assert misfit(runs, run()) is None and misfit(runs, moved) is not None


def test_neither_what_is_no_number_nor_what_early_runs_have_moved_excuses_moves() -> None:
    exact = torch.rand(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)) + 1
    early, moved = exact.clone(), exact.clone()
    for run, places in ((early, (3, ...)), (moved, (9, slice(100)))):
        run[places] = torch.nextafter(run[places], torch.tensor(INF))
    littered = [exact.index_fill(0, torch.tensor(row), NAN) for row in range(5)]
    for runs in (littered, [exact, early, *[exact] * 3]):
        assert misfit(runs, exact) is None and misfit(runs, moved) is not None


@pytest.mark.parametrize(
    ("runs", "spread", "good", "bad"),
    [
        # Bug: with no number at times runs were infinitely far apart, and a graph might make anything.
        (
            [[1.0, NAN, NAN], [1.0, 2.0, NAN], [1.1, 2.0, NAN]],
            INF,
            [[1.0, NAN, NAN], [1.05, 2.0, NAN]],
            [[NAN, 2.0, NAN], [1.0, 7.0, NAN], [1.0, 2.0, 3.0], [1.0, INF, NAN], [7.0, 7.0, 7.0]],
        ),
        # Bug: likewise with a run that overflowed.
        ([[1.0, 5], [INF, 5], [1.0, 5]], INF, [[INF, 5], [1.0, 5]], [[7e30, 5], [-INF, 5], [NAN, 5]]),
        ([[-INF, 5.0], [INF, 5.0]], INF, [[INF, 5.0], [-INF, 5.0]], [[42.0, 5.0], [NAN, 5.0]]),
        # Where runs are alike, one more is like them bit by bit.
        ([[3.0, 5.0], [3.0, 5.0]], 0.0, [[3.0, 5.0]], [[3.0, 5.0 * (1 + 2**-20)]]),
        ([[INF, 5.0], [INF, 5.0]], 0.0, [[INF, 5.0]], [[1.0, 5.0], [-INF, 5.0], [NAN, 5.0]]),
        ([[NAN, 5.0], [1.0, 5.0], [INF, 5.0]], INF, [[NAN, 5.0], [INF, 5.0]], [[2.0, 5.0], [-INF, 5.0]]),
        ([[INF, 2.0], [INF, 3.0]], 1.0, [[INF, 2.5]], [[1.0, 2.5]]),
        ([[1.0], [1.125]], 0.125, [[1.4375]], [[1.625]]),  # four times its own spread
        # Twice that of one that is smaller.
        ([[1.0, 8.0], [1.5, 8.125]], 0.5, [[1.25, 8.75]], [[1.25, 9.5]]),
        # Zeros of either sign are one where runs have both.
        ([[0.0, 1.0], [-0.0, 1.0]], 0.0, [[-0.0, 1.0]], [[-0.0, 1.0 + 2**-10]]),
        # Whole numbers are compared beyond what doubles hold.
        ([[2**60], [2**60 + 1]], None, [[2**60 + 1]], [[2**60 + 30]]),
        ([[5, 1], [5, 4]], 3.0, [[5, 2]], [[6, 2]]),
        ([[True, True], [True, False]], 1.0, [[True, False]], []),
        ([[1j, 2], [1j, 3]], 1.0, [[1j, 2.5]], [[1j, 9]]),
    ],
)
def test_entries_are_judged_one_by_one_whatever_others_are(
    runs: list[list[float]], spread: float | None, good: list[list[float]], bad: list[list[float]]
) -> None:
    known = [torch.tensor(run) for run in runs]
    assert spread is None or apart(known) == spread
    assert all(misfit(known, torch.tensor(run)) is None for run in good)
    assert all(misfit(known, torch.tensor(run)) is not None for run in bad)


def test_a_long_row_is_judged_in_parts() -> None:
    """The noise of its beginning does not excuse what is as large and quiet at its end."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.full((PIECE + 100,), 1e-2).index_fill(0, torch.arange(PIECE, PIECE + 100), 1e-6)

    def run() -> Tensor:
        return 1 + noise * torch.rand(PIECE + 100, generator=generator)

    known, spoilt = [run() for _ in range(5)], run()
    assert misfit(known, spoilt) is None
    spoilt[-1] += 1e-3
    assert misfit(known, spoilt) is not None


@pytest.mark.parametrize("strange", [torch.tensor([1.0]), torch.tensor([1.0, 2.0], dtype=torch.float64)])
def test_runs_of_several_shapes_or_types_excuse_nothing(strange: Tensor) -> None:
    runs = [torch.tensor([1.0, 2.0]), strange, torch.tensor([1.0, 2.0])]
    assert apart(runs) == INF
    assert misfit(runs, torch.tensor([7.0, 8.0])) is not None
