# SPDX-License-Identifier: Apache-2.0
"""Replays from several streams, and while another device is the current one."""

import dataclasses

import pytest
import torch
from bank_pair import Block, Pair, blocks, new_bank, run_eager, variant
from same_bits import assert_same_bits


@pytest.mark.gpu
def test_micro_batches_on_two_streams_do_not_meet() -> None:
    layers = [Block(1024) for _ in range(4)]
    for param in (param for layer in layers for param in layer.parameters()):
        param.requires_grad_(False)  # gradients of parameters are for the caller to order
    rows = 256
    banks = []
    for _ in range(2):
        bank = new_bank([layer.cuda() for layer in layers], "cuda")
        shape = variant(rows=rows)
        bank.capture([dataclasses.replace(shape, row_shape=(1024,))])
        banks.append(bank)
    streams = [torch.cuda.Stream(), torch.cuda.current_stream(), torch.cuda.Stream()]
    inputs = [torch.randn(rows, 1024, device="cuda") for _ in range(12)]
    want = []
    for given in inputs:
        leaf = given.clone().requires_grad_()
        run_eager(layers, leaf).square().sum().backward()
        want.append(leaf.grad)
    leaves = [given.clone().requires_grad_() for given in inputs]
    torch.cuda.synchronize()
    for turn, leaf in enumerate(leaves):
        bank = banks[turn // 2 % 2]
        with torch.cuda.stream(streams[turn % 3]):
            torch.cuda._sleep(3_000_000)  # what was launched before is still running then
            with bank.micro_batch("train") as reason:
                assert reason is None
                out = bank(leaf)
            out.square().sum().backward()
            del out
    torch.cuda.synchronize()
    for turn, (leaf, grad) in enumerate(zip(leaves, want, strict=True)):
        assert_same_bits(leaf.grad, grad, f"gradient of input {turn}")


@pytest.mark.multi_gpu
def test_a_bank_replays_on_its_own_device_whichever_is_current() -> None:
    pair = Pair("cuda:1", blocks()).capture()
    for current in (0, 1, 0):
        with torch.cuda.device(current):
            assert pair.step() is None
            assert torch.cuda.current_device() == current
