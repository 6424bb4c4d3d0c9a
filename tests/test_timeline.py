# SPDX-License-Identifier: Apache-2.0
"""Drawing when slots were leased; what a drawing shows is looked at by people."""

import sys
from contextlib import nullcontext
from pathlib import Path

import matplotlib
import pytest
from matplotlib import pyplot

from megagraph.timeline import Lease, draw_timeline

LEASES = {
    "GPTModel (stage 0)": [
        Lease(slot=index % 2, grad=index < 90, begin=float(index), end=index + 1.5) for index in range(100)
    ]
    + [Lease(slot=0, grad=True, begin=100.0, end=None)],
    "GPTModel (stage 1)": [],
}


@pytest.mark.parametrize(
    ("suffix", "begins"),
    [(".PNG", b"\x89PNG"), (".pdf", b"%PDF"), (".svg", b"<?xml"), (".docx", None), ("", None)],
)
def test_the_ending_says_which_kind_of_image_and_a_drawing_leaves_nothing_behind(
    tmp_path: Path, suffix: str, begins: bytes | None
) -> None:
    """Neither in pyplot, nor in the settings of a process that draws more."""
    path, before = tmp_path / f"slots{suffix}", dict(matplotlib.rcParams)
    # Without an ending matplotlib adds one, and the file that was asked for is not there.
    message = rf"slots{suffix}: expected an .*png.*svg"
    with nullcontext() if begins else pytest.raises(ValueError, match=message):
        draw_timeline(LEASES, path)
    assert [*tmp_path.iterdir()] == ([path] if begins else [])
    assert begins is None or path.read_bytes().startswith(begins)
    assert pyplot.get_fignums() == [] and dict(matplotlib.rcParams) == before


def test_each_slot_has_a_line_with_its_name_and_the_chunk_s(tmp_path: Path) -> None:
    """Also where a name would be a formula to matplotlib; and lines are as many as slots that there are."""
    path = tmp_path / "slots.svg"
    draw_timeline({r"$\chunk$": [Lease(slot=slot, grad=True, begin=1, end=2) for slot in (0, 10**9)]}, path)
    drawn = path.read_text()
    assert r"$\chunk$, slot 0" in drawn and r"$\chunk$, slot 1000000000" in drawn


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[float, float]]]:
    """What is drawn, by line and colour."""
    drawn: list[list[tuple[float, float]]] = []
    monkeypatch.setattr("matplotlib.axes.Axes.broken_barh", lambda _axes, bars, *_, **__: drawn.append(bars))
    return drawn


def test_what_all_chunks_have_recorded_is_drawn(
    tmp_path: Path, bars: list[list[tuple[float, float]]]
) -> None:
    """What was held when the report was written is held to the end; what ended at 0 is not."""
    often = [
        *(Lease(slot=0, grad=True, begin=begin, end=begin + 2) for begin in (-9.0, -2.0, -1.0, 4.0)),
        Lease(slot=1, grad=False, begin=2.0, end=None),
    ]
    seldom = [Lease(slot=0, grad=True, begin=0.0, end=10.0), Lease(slot=1, grad=True, begin=1.0, end=None)]
    draw_timeline({"often": often, "seldom": seldom}, tmp_path / "slots.png")
    training, forward_only = bars[::2], bars[1::2]
    assert training == [[(0.0, 1.0), (4.0, 2.0)], [], [(0.0, 10.0)], [(1.0, 9.0)]]
    assert forward_only == [[], [(2.0, 8.0)], [], []]


def test_the_last_leases_are_drawn(tmp_path: Path, bars: list[list[tuple[float, float]]]) -> None:
    draw_timeline(LEASES, tmp_path / "slots.png")
    # Those of 69 to 100, of which the last one has no end, and has not begun before the others' end.
    drawn = sorted(bar for some in bars for bar in some)
    assert drawn == [*((place, 1.5) for place in range(31)), (31.0, 0.5)]


def test_what_cannot_be_drawn_is_named_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="no model chunk has had several slots"):
        draw_timeline({"GPTModel (stage 1)": []}, tmp_path / "slots.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match="pip install matplotlib"):
        draw_timeline(LEASES, tmp_path / "slots.png")
