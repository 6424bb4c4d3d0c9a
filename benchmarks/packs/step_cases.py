# SPDX-License-Identifier: Apache-2.0
"""The models and packs whose whole training steps are timed."""

from dataclasses import dataclass

import torch

from benchmarks.packs.cases import MICRO_BATCHES, Case, model_options
from benchmarks.packs.documents import filled
from benchmarks.step.train_steps import Batch, batch_of
from megagraph.decide.dispatch import Capacity
from megagraph.demo.packers import Pack
from megagraph.demo.trainer import ModelOptions

NUM_SEQS = 64  # as many documents as the shortest ones make in a pack: every pack fits


@dataclass(frozen=True, kw_only=True)
class StepCase:
    """A model on packs.

    Args:
        layers: of the model.
        hidden: size.
        tokens: of a pack.
        rivals: Megatron's graphs beside it.
    """

    layers: int
    hidden: int
    tokens: int
    rivals: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """For tables."""
        return f"hidden {self.hidden}, packs of {self.tokens}"

    @property
    def is_small(self) -> bool:
        """Whether the floor is its bar, else eager."""
        return self.hidden <= 1024

    @property
    def distinct_steps(self) -> int:
        """Steps that differ. Of a small model each is traced."""
        return 3 if self.is_small else 4

    @property
    def model(self) -> ModelOptions:
        """Its shape: heads of 64, of 128 in large models."""
        return model_options(
            self.hidden, layers=self.layers, tokens=self.tokens, head_dim=64 if self.hidden <= 1024 else 128
        )

    @property
    def capacity(self) -> Capacity:
        """The only one."""
        return Capacity(tokens=self.tokens, num_seqs=NUM_SEQS, max_seqlen=self.tokens)

    def packs(self) -> list[list[Pack]]:
        """The packs of each distinct step, the same for every way to run it, and full.

        A small model's step has one pack several times: graphs that are launched again, without staging,
        then do the work of the whole step.
        """
        case = Case(
            name=self.name, model=self.model, max_packed_seqs=(NUM_SEQS,), mean_length=self.tokens // 8
        )
        steps = [[filled(pack, self.tokens) for pack in step] for step in case.steps(self.distinct_steps)]
        return [[step[0]] * MICRO_BATCHES for step in steps] if self.is_small else steps

    def batches(self, device: torch.device, *, canonical: bool = False) -> list[list[Batch]]:
        """`packs()` on the device; with `canonical` all of one shape."""
        capacity = self.capacity if canonical else None
        return [[batch_of(pack, device, capacity) for pack in step] for step in self.packs()]


def in_rounds(num_steps: int, rounds: int) -> list[int]:
    """Which of the distinct steps each round runs: each as often as the others.

    Raises:
        ValueError: if the rounds do not divide.
    """
    if rounds % num_steps:
        raise ValueError(f"expected rounds that {num_steps} steps share evenly, got {rounds}")
    return [index % num_steps for index in range(rounds)]
