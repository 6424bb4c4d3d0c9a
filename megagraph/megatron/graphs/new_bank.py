# SPDX-License-Identifier: Apache-2.0
"""Makes the bank of a block of layers, as the options and the model's communicators ask for it."""

import torch

from megagraph.bank.bank import Bank
from megagraph.bank.chain import Chain
from megagraph.config import GraphConfig
from megagraph.megatron.graphs import while_capturing
from megagraph.megatron.parallel.peers import Peers
from megagraph.megatron.scopes.plan import BlockPlan
from megagraph.megatron.watch.states import IGNORED_ATTRIBUTES

__all__ = ["new_bank"]


def new_bank(
    plan: BlockPlan, num_slots: int, device: torch.device, peers: Peers, config: GraphConfig
) -> tuple[Bank, Chain]:
    """An empty bank, and in it the chain of the block's steps, with its slots.

    Args:
        plan: the steps.
        num_slots: micro-batches that may be in flight at once.
        device: where the model is.
        peers: the ranks that run the same packs.
        config: the plugin's options.
    """
    bank = Bank(
        device,
        trackers=[while_capturing.rng_tracker_source()],
        poison=config.poison,
        guard=while_capturing.capturing,
        exchange=peers.exchange,
        annotate=config.cuda_graph_nvtx,
        left_out=IGNORED_ATTRIBUTES,
    )
    chain = bank.add_chain(plan.chain_steps(), num_slots=num_slots, holds_collectives=peers.size > 1)
    return bank, chain
