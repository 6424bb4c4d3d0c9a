# SPDX-License-Identifier: Apache-2.0
"""Drawing when slots were leased; what a drawing shows is looked at by people."""

import sys
from pathlib import Path

import pytest

from megagraph.timeline import Lease, draw_timeline

LEASES = {
    "GPTModel (stage 0)": [
        Lease(slot=index % 2, grad=index < 90, begin=float(index), end=index + 1.5) for index in range(100)
    ]
    + [Lease(slot=0, grad=True, begin=100.0, end=None)],
    "GPTModel (stage 1)": [],
}


@pytest.mark.parametrize(("suffix", "begins"), [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml")])
def test_the_ending_says_which_kind_of_image(tmp_path: Path, suffix: str, begins: bytes) -> None:
    path = tmp_path / f"slots.{suffix}"
    draw_timeline(LEASES, path)
    assert path.read_bytes().startswith(begins)


def test_an_unknown_kind_is_refused_with_those_there_are(tmp_path: Path) -> None:
    path = tmp_path / "slots.docx"
    with pytest.raises(ValueError, match=r"docx.*png.*svg"):
        draw_timeline(LEASES, path)
    assert not path.exists()


def test_without_matplotlib_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match="pip install matplotlib"):
        draw_timeline(LEASES, tmp_path / "slots.png")


def test_chunks_of_single_slots_have_no_timeline(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no model chunk has had several slots"):
        draw_timeline({"GPTModel (stage 1)": []}, tmp_path / "slots.png")
