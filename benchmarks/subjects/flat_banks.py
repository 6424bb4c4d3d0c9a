# SPDX-License-Identifier: Apache-2.0
"""Whether a replay costs the same in a bank of many variants or slots as in one of one each.

Plain modules, no Megatron: its blocks have one slot.
"""

import itertools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.measuring.children import Answer
from benchmarks.measuring.clocks import host_seconds
from benchmarks.measuring.figures import differences
from benchmarks.subjects.inside import bare_loops
from benchmarks.subjects.packs import hidden_states, variant_of
from megagraph.bank.bank import Bank

# Name to (variants, slots).
BANKS = {"1 variant": (1, 1), "4 variants": (4, 1), "64 variants": (64, 1), "16 slots": (1, 16)}
SITES = 12  # 64 variants of them are 1,536 graphs
MICRO_BATCHES = 16  # of each bank in a round
WARM_UP, ROUNDS = 4, 12  # in the first each of 64 variants has its first replay, then each three
_PHASES = ("forward", "backward", "engine", "bare forward", "bare backward")


class Layer(nn.Module):
    """A transformer layer of 12 parameters on rows [T, 1, H]."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        rows = hidden.flatten(0, 1)
        q, k, v = self.qkv(self.attention_norm(rows)).unflatten(-1, (3, self.heads, -1)).permute(1, 2, 0, 3)
        attended = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)
        rows = rows + self.out(attended[0].transpose(0, 1).flatten(1))
        out: Tensor = (rows + self.down(F.gelu(self.up(self.mlp_norm(rows))))).view_as(hidden)
        return out


def keys_of_round(index: int, *, variants: int, slots: int) -> list[int]:
    """The variants of a round, each for as many micro-batches in flight as there are slots."""
    flights = MICRO_BATCHES // slots
    return [(index * flights + flight) % variants for flight in range(flights)]


class _Measured:
    """One bank of the modules, with every variant captured into every slot."""

    def __init__(self, layers: Sequence[Layer], variants: int, slots: int, hidden: Tensor) -> None:
        self._slots, self._variants = slots, variants
        self._hidden, self._grad = hidden, torch.randn_like(hidden) * 1e-3
        self.times: dict[str, list[float]] = {phase: [] for phase in _PHASES}
        self._bank = Bank(layers, hidden.device, num_slots=slots)
        self._bank.capture([variant_of(hidden, key=key) for key in range(variants)])
        if self._bank.failures:
            raise RuntimeError(f"capture failed: {self._bank.failures[0]}")
        places = [(key, slot) for key in range(variants) for slot in range(slots)]
        self._bare = {place: bare_loops(self._bank, *place) for place in places}

    def _time(self, phase: str, call: Callable[[], object]) -> None:
        self.times[phase].append(host_seconds(call))

    def _differentiate(self, phase: str, out: Tensor) -> None:
        kept: list[object] = []  # nothing is freed while the time is taken
        self._time(phase, lambda: kept.append(torch.autograd.grad(out, self._hidden, self._grad)))

    def run(self, index: int) -> None:
        """A round: in turns as many micro-batches in flight as there are slots, and their backwards."""
        for key in keys_of_round(index, variants=self._variants, slots=self._slots):
            outs: list[Tensor] = []
            for _ in range(self._slots):
                with self._bank.micro_batch(key) as reason:
                    if reason is not None:
                        raise RuntimeError(f"a micro-batch ran eager: {reason.name}")
                    self._time("forward", lambda outs=outs: outs.append(self._bank(self._hidden)))  # type: ignore[misc]
            while outs:
                self._differentiate("backward", outs.pop(0))
                self._differentiate("engine", self._hidden.view_as(self._hidden))
            for slot in range(self._slots):
                forward, backward = self._bare[key, slot]
                self._time("bare forward", forward)
                self._time("bare backward", backward)

    def answer(self) -> Answer:
        """Microseconds of each phase for each site, `engine` for all together, and backwards less the engine.

        Raises `RuntimeError` where anything ran eager.
        """
        counters, seconds = self._bank.counters(), self.times
        if counters["replays"] != counters["calls"]:
            raise RuntimeError(f"expected replays only, got {counters}")
        every = {**seconds, "backward without engine": differences(seconds["backward"], seconds["engine"])}
        return {
            phase: [second * 1e6 / (1 if phase == "engine" else SITES) for second in times]
            for phase, times in every.items()
        }


def measure_banks(hidden_size: int = 1024, tokens: int = 256) -> dict[str, Answer]:
    """Host time for each site of a bank, in turn in each of `BANKS`, as many micro-batches of each."""
    layers = [Layer(hidden_size, hidden_size // 64).to("cuda", torch.bfloat16) for _ in range(SITES)]
    for param in itertools.chain.from_iterable(layer.parameters() for layer in layers):
        # The float32 gradient that Megatron's DDP would give it.
        param.main_grad = torch.zeros_like(param, dtype=torch.float32)  # type: ignore[attr-defined]
    hidden = hidden_states(tokens, hidden_size).clone()  # the gradient of a leaf would be cloned
    banks = [_Measured(layers, variants, slots, hidden) for variants, slots in BANKS.values()]
    for index in range(WARM_UP + ROUNDS):
        if index == WARM_UP:
            for bank in banks:
                bank.times = {phase: [] for phase in _PHASES}
        for offset in range(len(banks)):  # another one is first in the next round
            banks[(index + offset) % len(banks)].run(index)
    return {name: bank.answer() for name, bank in zip(BANKS, banks, strict=True)}
