# SPDX-License-Identifier: Apache-2.0
"""Reaches into what the plugin captured: the one place of the benchmarks that knows its insides."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, distributed

from benchmarks.measuring.launch_bare import BareLoop
from benchmarks.subjects.hosts import seed_streams
from benchmarks.subjects.packs import a_pack, hidden_states
from megagraph import megatron
from megagraph.bank.bank import Bank
from megagraph.demo.trainer import Trainer, packed_seq_params
from megagraph.megatron import seams
from megagraph.megatron.parallel import context, peers
from megagraph.megatron.patch.installation import installed_plugin
from megagraph.modules import RotaryTables

PRETENDED_RANKS = 8


def graphs_of(trainer: Trainer) -> Any:
    """The plugin's graphs of a trainer's model."""
    plugin = installed_plugin()
    assert plugin is not None
    return plugin.graphs_of_model(trainer.chunk)


def bare_loops(bank: Bank, key: Any, slot: int = 0) -> tuple[BareLoop, BareLoop]:
    """Launch the forwards, and the backwards, that were captured for a variant into a slot."""
    forward, backward = bank.core.raw_graph_execs(bank.variants[key], slot)
    return BareLoop(forward), BareLoop(backward)


def bare_step(trainer: Trainer) -> BareLoop:
    """Launches forwards and backwards of a micro-batch. Raises `RuntimeError` where none was captured."""
    bank = graphs_of(trainer).captures.bank
    (variant,) = bank.variants.values()  # one capacity, training only
    forward, backward = bank.core.raw_graph_execs(variant, 0)
    if not forward or not backward:
        raise RuntimeError("no graphs were captured")
    return BareLoop([*forward, *reversed(backward)])


class Replays:
    """The layers of a trainer that were captured for training, without the model around them."""

    def __init__(self, trainer: Trainer) -> None:
        self._graphs = graphs_of(trainer)
        self.bank: Bank = self._graphs.captures.bank
        self.key: Any = next(key for key in self.bank.variants if key.grad)
        self._tokens: int = self.key.capacity.tokens
        leaf = hidden_states(self._tokens, trainer.options.hidden)
        self.hidden = leaf.clone()  # the gradient of a leaf would be cloned
        self.grad = torch.randn_like(leaf) * 1e-3
        pack = a_pack(self._tokens)
        self._params = packed_seq_params(pack.cu_seqlens.to(trainer.device), pack.max_seqlen)

    def decided(self) -> Any:
        """A micro-batch: a pack of the largest capacity, read and decided on as a model's forward does."""
        return self._graphs.decide(self._params, self._tokens, None, from_ids=True, is_skipped=False)

    @contextlib.contextmanager
    def running(self, batch: Any) -> Iterator[None]:
        """Inside, the bank replays a micro-batch. Raises `RuntimeError` where it cannot."""
        loop = self._graphs.begin(batch, self.hidden, None, None)
        if loop is None:
            raise RuntimeError(f"a micro-batch ran eager: {batch.reason.name}")
        try:
            yield
        finally:
            self._graphs.end(batch, loop)

    def micro_batch(self) -> contextlib.AbstractContextManager[None]:
        """Both: decides on one, and lets the bank replay it inside."""
        return self.running(self.decided())


@contextlib.contextmanager
def our_rope() -> Iterator[None]:
    """Our RoPE of packs in unpatched attention: Megatron's reads offsets on the host."""
    seam, tables = seams.ATTENTION_ROPE, RotaryTables()

    def rotate(
        t: Tensor, freqs: Tensor, config: Any, cu_seqlens: Tensor, mscale: float = 1.0, **unused: Any
    ) -> Tensor:
        return tables.rotate(t, freqs, cu_seqlens, mscale=mscale)

    with mock.patch.object(seam.owner(), seam.name, rotate):
        yield


@contextlib.contextmanager
def pretended_ranks(cp_sizes: Sequence[int]) -> Iterator[context.ContextGroups]:
    """Groups of `PRETENDED_RANKS` data-parallel ranks, this one the first, and those that share packs."""
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    parallel_state.destroy_model_parallel()
    if distributed.is_initialized():  # this process's own
        distributed.destroy_process_group()
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=PRETENDED_RANKS)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    seed_streams()
    parent = parallel_state.get_data_parallel_group(with_context_parallel=True)
    given = {
        size: distributed.new_group(list(range(size))) for size in cp_sizes if 1 < size < PRETENDED_RANKS
    }
    groups = context.ContextGroups(parent, cp_sizes, {size: (group,) for size, group in given.items()})
    with (
        mock.patch.object(peers, "ContextRanks", _of_groups(groups)),
        mock.patch.object(peers.Peers, "max_over_ranks", lambda _self, values: [*values]),
        mock.patch.object(peers.Peers, "gather", lambda self, what: [what] * self.size),
    ):
        yield groups
    megatron.uninstall()
    parallel_state.destroy_model_parallel()
    distributed.destroy_process_group()


def _of_groups(groups: context.ContextGroups) -> Any:
    """`ContextRanks` of these groups."""

    def make(*given: Any) -> context.ContextRanks:
        with mock.patch.object(context, "context_groups", lambda _sizes: groups):
            return context.ContextRanks(*given)

    return make
