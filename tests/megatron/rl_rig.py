# SPDX-License-Identifier: Apache-2.0
"""A reinforcement-learning loop as hosts of Megatron write it: log-probabilities, training, offload.

The rollouts are drawn, not generated; everything else goes through Megatron's own schedule.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from megatron_rig import OPTIONS, Micro, grads, graph_config, plain_model, run_schedule
from torch import Tensor, nn

import megagraph
from megagraph.decide.dispatch import Capacity
from megagraph.demo.trainer import Trainer

BUDGET = 64  # tokens of a pack
BANK = (
    Capacity(tokens=32, num_seqs=6, max_seqlen=32),
    Capacity(tokens=BUDGET, num_seqs=12, max_seqlen=BUDGET),
)
NAN = float("nan")


def fits(micro: Micro) -> bool:
    """By hand: whether a capacity of `BANK` holds a pack."""
    return len(micro.lengths) <= 12


def rollouts(index: int, *, mini_batches: int) -> list[list[Micro]]:
    """The packs of each mini-batch of round `index`: answers get longer, the token budget does not."""
    rng = random.Random(index)
    longest = 12 + min(index, 36)
    found: list[list[Micro]] = []
    for _ in range(mini_batches):
        packs: list[list[int]] = [[]]
        for _ in range(rng.randint(4, 12)):
            length = rng.randint(2, longest)
            if sum(packs[-1]) + length > BUDGET:
                packs.append([])
            packs[-1].append(length)
        found.append([Micro(lengths=tuple(pack), seed=rng.randrange(1 << 30)) for pack in packs])
    return found


def frozen_model(seed: int) -> tuple[nn.Module, nn.Module]:
    """A GPTModel that is never trained, and what is called in its place."""
    model, called = plain_model(seed)
    model.eval().requires_grad_(False)
    return model, called


def _token_log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    """Of each label, [T], from logits [1, T, V]."""
    return logits[0].float().log_softmax(-1).gather(-1, labels[:, None]).squeeze(-1)


def _schedule(model: Any, packs: Sequence[Any], loss: Any, *, forward_only: bool) -> list[dict[str, Tensor]]:
    """Megatron's schedule over packs; `loss(logits, item, labels, mask)` gives (loss, what to return)."""
    device = next(model.parameters()).device

    def forward_step(data: Iterator[Any], chunk: Any) -> tuple[Tensor, Any]:
        item = next(data)
        micro = item if isinstance(item, Micro) else item[0]
        tokens, labels, mask, positions = (t.to(device) for t in micro.row_lists())
        logits = chunk(
            input_ids=tokens[None],
            position_ids=positions[None],
            attention_mask=None,
            packed_seq_params=micro.params(device),
        )
        return logits, partial(loss, item=item, labels=labels, mask=mask)

    return run_schedule(model, forward_step, packs, len(packs), forward_only=forward_only)


def log_probs(model: nn.Module, packs: Sequence[Micro]) -> list[Tensor]:
    """The forward-only pass: log-probabilities of each pack's tokens, [T]."""

    def collect(
        logits: Tensor, item: Micro, labels: Tensor, mask: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        found = _token_log_probs(logits, labels).where(mask > 0, 0.0)
        return found.new_zeros(()), {"log_probs": found}

    was_training = model.training
    model.eval()
    with torch.no_grad():
        results = _schedule(model, packs, collect, forward_only=True)
    model.train(was_training)
    return [result["log_probs"] for result in results]


def train(
    trainer: Trainer, packs: Sequence[Micro], old: Sequence[Tensor], reference: Sequence[Tensor]
) -> list[Tensor]:
    """One clipped policy-gradient step with a penalty towards the reference. Returns the losses."""

    def policy_loss(
        logits: Tensor, item: tuple[Micro, Tensor, Tensor], labels: Tensor, mask: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        micro, before, other = item
        now = _token_log_probs(logits, labels).where(mask > 0, 0.0)
        generator = torch.Generator().manual_seed(micro.seed)
        advantage = torch.randn(len(micro.lengths), generator=generator)
        rows = torch.repeat_interleave(advantage, torch.tensor(micro.rows)).to(now.device)
        ratio = (now - before).exp()
        gain = torch.minimum(ratio * rows, ratio.clamp(0.8, 1.2) * rows)
        penalty = (other - now).exp() - (other - now) - 1
        loss = ((0.1 * penalty - gain) * mask).sum() / mask.sum().clamp(min=1)
        return loss, {"loss": loss.detach().clone()}

    trainer.zero_grad()
    items = list(zip(packs, old, reference, strict=True))
    return [result["loss"] for result in _schedule(trainer.model, items, policy_loss, forward_only=False)]


def _optimizers(optimizer: Any) -> list[Any]:
    return [part.optimizer for part in getattr(optimizer, "chained_optimizers", [optimizer])]


@dataclass(kw_only=True)
class Offload:
    """Moves what models own to the host and back to other addresses.

    The old memory stays alive and holds NaN, so that whatever reads it shows.
    """

    megatrons_own: bool = False  # gradients go through Megatron's `offload_grad_buffers()`
    _held: list[Tensor] = field(default_factory=list)
    _copies: dict[Tensor, Tensor] = field(default_factory=dict)

    def weights(self, model: nn.Module) -> None:
        """Every parameter to the host; of those that train, the memory alone.

        A parameter that moves to another device loses its gradient accumulator, and Megatron's DDP with it
        its hook.
        """
        for param in model.parameters():
            copy = param.data.to("cpu", copy=True)
            if param.requires_grad:
                self._copies[param] = copy
                size = param.data.untyped_storage().nbytes()
                param.data.untyped_storage().resize_(0)
                self._held.append(torch.full((size // param.element_size(),), NAN).to(param))
            else:
                old, param.data = param.data, copy
                self._held.append(old.fill_(NAN))

    def weights_back(self, model: nn.Module, device: torch.device) -> None:
        """Every parameter to the device."""
        for param in model.parameters():
            copy = self._copies.pop(param, None)
            if copy is None:
                param.data = param.data.to(device, copy=True)
            else:
                param.data.untyped_storage().resize_(copy.untyped_storage().nbytes())
                param.data.copy_(copy)

    def gradients(self, ddp: Any) -> None:
        """Frees the gradient buffers; something else takes their place."""
        sizes = [buffer.grad_data.untyped_storage().nbytes() for buffer in ddp.buffers]
        if self.megatrons_own:
            ddp.offload_grad_buffers()
        else:
            for buffer in ddp.buffers:
                buffer.grad_data.untyped_storage().resize_(0)
        self._sizes = sizes
        device = ddp.buffers[0].grad_data.device
        self._held += [torch.full((size // 4,), NAN, device=device) for size in sizes]

    def gradients_back(self, ddp: Any) -> None:
        """Allocates the gradient buffers again, zeroed."""
        if self.megatrons_own:
            ddp.restore_grad_buffers()
            return
        for buffer, size in zip(ddp.buffers, self._sizes, strict=True):
            buffer.grad_data.untyped_storage().resize_(size)
            buffer.grad_data.zero_()

    def move_gradients(self, ddp: Any) -> None:
        """Frees and allocates the gradient buffers until they lie elsewhere."""
        before = [buffer.grad_data.data_ptr() for buffer in ddp.buffers]
        while before == [buffer.grad_data.data_ptr() for buffer in ddp.buffers]:
            self.gradients(ddp)
            self.gradients_back(ddp)

    def optimizer(self, optimizer: Any, device: torch.device | str) -> None:
        """The optimizer's state to a device."""
        for part in _optimizers(optimizer):
            for state in part.state.values():
                for name, value in state.items():
                    if isinstance(value, Tensor) and value.dim() > 0:
                        state[name] = value.to(device, copy=True)


@dataclass(kw_only=True)
class Round:
    """What one round left, mini-batch by mini-batch."""

    old: list[Tensor] = field(default_factory=list)
    reference: list[Tensor] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    grads: list[dict[str, Tensor]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A whole run."""

    rounds: int  # how many
    mini_batches: int = 2  # schedule calls of each phase
    late_gradients: bool = False  # gradient buffers come back after the log-probability passes only
    megatrons_own: bool = False  # see `Offload`
    moves: bool = True  # whether anything is offloaded between rounds
    announces: bool = True  # whether the plugin is told so, by `suspend()` and `resume()`

    def batches(self, index: int) -> list[list[Micro]]:
        """The packs of round `index`."""
        return rollouts(index, mini_batches=self.mini_batches)

    def run(self, mode: str) -> tuple[list[Round], list[dict[str, Any]], list[dict[str, Any]]]:
        """Trains fresh models in a mode of the plugin."""
        megagraph.install(graph_config(capacities=BANK, mode=mode))
        try:
            trainer = Trainer(OPTIONS)
            frozen, reference = frozen_model(seed=99)
            offload = Offload(megatrons_own=self.megatrons_own)
            found, policy_reports, reference_reports = [], [], []
            for index in range(self.rounds):
                found.append(self._round(index, trainer, reference, offload))
                if self.moves:
                    self._move_all_away(trainer, frozen, offload)
                policy, other = megagraph.reports()
                policy_reports.append(policy)
                reference_reports.append(other)
        finally:
            megagraph.uninstall()
        return found, policy_reports, reference_reports

    def _round(self, index: int, trainer: Trainer, reference: nn.Module, offload: Offload) -> Round:
        left = Round()
        batches = self.batches(index)
        is_away = self.moves and index > 0
        if is_away:
            for model in (trainer.model, reference):
                offload.weights_back(model, trainer.device)
            if not self.late_gradients:
                offload.gradients_back(trainer.model)
            if self.announces:
                megagraph.resume()
        old = [log_probs(trainer.model, packs) for packs in batches]
        others = [log_probs(reference, packs) for packs in batches]
        if is_away and self.late_gradients:
            offload.gradients_back(trainer.model)
        if is_away:
            offload.optimizer(trainer.optimizer, trainer.device)
        for packs, before, other in zip(batches, old, others, strict=True):
            left.old += before
            left.reference += other
            left.losses += train(trainer, packs, before, other)
            left.grads.append(grads(trainer.chunk))
            trainer.update()
        return left

    def _move_all_away(self, trainer: Trainer, frozen: nn.Module, offload: Offload) -> None:
        if self.announces:
            megagraph.suspend()
        offload.weights(trainer.model)
        offload.weights(frozen)
        offload.gradients(trainer.model)
        offload.optimizer(trainer.optimizer, "cpu")
