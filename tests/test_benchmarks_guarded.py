# SPDX-License-Identifier: Apache-2.0
"""What `python -m benchmarks guarded` times and counts, on models that a machine without a GPU can train."""

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parent.parent))  # benchmarks are not installed

from benchmarks.subjects import guarded
from megagraph.demo.cpu import megatron_on_cpu
from megagraph.demo.trainer import ModelOptions, process_groups

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the benchmark itself runs on a GPU"),
]
OPTIONS = ModelOptions(layers=2, hidden=32, heads=2, max_tokens=64)


@pytest.fixture(scope="module", autouse=True)
def on_cpu() -> Iterator[None]:
    with megatron_on_cpu(), process_groups():
        yield


def test_guards_and_a_verification_have_their_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded, "ROUNDS", 3)
    answer = guarded.measure_guards(OPTIONS, transformer_engine=False)
    assert {len(times) for times in answer["times"].values()} == {3} and len(answer["times"]) == 4
    assert answer["verification"]["verified"] == 1 and answer["eager"] > 0


@pytest.mark.parametrize("name", [name for name, of in guarded.ALARMS.items() if not of.transformer_engine])
def test_hosts_that_change_nothing_raise_no_alarm(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded, "VERIFY_ONE_IN", 7)
    options = dataclasses.replace(OPTIONS, max_tokens=64)
    report = guarded.measure_alarms(guarded.ALARMS[name], options, 20)
    assert not {"STATE_CHANGED", "VERIFY_FAILED"} & report["eager"].keys()
    assert report["verification"]["verified"] > 4 and report["failures"] == []
