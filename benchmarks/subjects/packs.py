# SPDX-License-Identifier: Apache-2.0
"""The models and packs that benchmarks measure."""

import itertools
import math
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megagraph.bank.sites import VariantSpec
from megagraph.demo.documents import Document, load_documents
from megagraph.demo.packs import Pack, stream_packs
from megagraph.demo.trainer import ModelOptions

MICRO_BATCHES = 4
LAYER_KINDS = {"our attention": False, "Transformer Engine": True}  # whether they are of its modules


def model_options(hidden: int, *, layers: int, tokens: int, head_dim: int = 64) -> ModelOptions:
    """A model in bfloat16 on packs of `tokens`."""
    return ModelOptions(layers=layers, hidden=hidden, heads=hidden // head_dim, max_tokens=tokens, bf16=True)


def lognormal_lengths(
    num: int, *, mean: float, sigma: float, minimum: int, maximum: int, seed: int
) -> Tensor:
    """Of documents, int64 [num]. `mean` is the lognormal's own, before it is clipped to what is between."""
    normal = torch.randn(num, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    lengths = (math.log(mean) - sigma**2 / 2 + sigma * normal).exp()
    return lengths.clamp(minimum, maximum).round().to(torch.int64)


def swiglu_experts(count: int, *, topk: int, inner: int) -> dict[str, Any]:
    """Fields of Megatron's config; the router balances nothing."""
    return {
        "num_moe_experts": count,
        "moe_router_topk": topk,
        "moe_ffn_hidden_size": inner,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": functional.silu,
        "bias_activation_fusion": True,
    }


def random_documents(lengths: Iterable[int], *, seed: int) -> Iterator[Document]:
    """Documents of random tokens; the same at every call."""
    generator = torch.Generator().manual_seed(seed)
    for index, length in enumerate(lengths):
        yield Document(name=str(index), tokens=torch.randint(256, (length,), generator=generator))


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model on one stream of packs."""

    name: str
    model: ModelOptions
    max_packed_seqs: tuple[int, ...]  # documents of each capacity; some packs hold more
    mean_length: int | None  # of the lognormal document lengths, in tokens; None for real documents
    longest: int | None = None  # of the lognormal document lengths; by default a whole pack's
    multiple: int = 1  # of which each lognormal length is one, so that ranks can share a pack's rows

    def steps(self, count: int) -> list[list[Pack]]:
        """The packs of each of the first `count` steps; the same at every call."""
        packs = stream_packs(self._documents(), self.model.max_tokens)
        return [list(itertools.islice(packs, MICRO_BATCHES)) for _ in range(count)]

    def _documents(self) -> Iterable[Document]:
        if self.mean_length is None:
            return load_documents(None, min_length=2, max_length=self.model.max_tokens)
        return random_documents(self._lengths(self.mean_length), seed=11)

    def _lengths(self, mean: int) -> Iterator[int]:
        """Of lognormal documents, without an end."""
        limit = self.model.max_tokens
        bounds = {"minimum": limit // 64, "maximum": self.longest or limit}
        for seed in itertools.count(7):
            lengths = lognormal_lengths(20_000, mean=mean, sigma=1.5, seed=seed, **bounds)
            yield from (lengths // self.multiple * self.multiple).tolist()


_LARGE = model_options(1024, layers=24, tokens=8192)
_SMALL = model_options(512, layers=24, tokens=2048)
_CASES = (
    Case(name="lognormal", model=_LARGE, max_packed_seqs=(8, 20), mean_length=1024),
    Case(name="documents", model=_LARGE, max_packed_seqs=(32, 64), mean_length=None),
    Case(name="host-limited", model=_SMALL, max_packed_seqs=(8, 20), mean_length=256),
)
CASES = {case.name: case for case in _CASES}


def lognormal_offsets(tokens: int, documents: int | None = None, *, device: str = "cuda") -> Tensor:
    """Offsets, int32 [documents + 1], of lognormal documents that fill `tokens` rows; by default of 1,024."""
    documents = documents or max(round(tokens / 1024), 1)
    mean = tokens // documents
    lengths = lognormal_lengths(
        documents, mean=mean, sigma=1.0, minimum=max(mean // 8, 1), maximum=8 * mean, seed=7
    )
    ends = lengths.cumsum(0).double() / int(lengths.sum()) * tokens
    offsets = torch.cat([torch.zeros(1, dtype=torch.float64), ends]).round().to(torch.int32)
    assert int(offsets[-1]) == tokens and int(offsets.diff().min()) > 0, offsets
    return offsets.to(device)


def filled(pack: Pack, tokens: int) -> Pack:
    """The pack with one more document that fills it up to `tokens`, or itself if it is full."""
    if not (missing := tokens - pack.num_tokens):
        return pack
    further = torch.arange(missing) % 256
    return Pack(
        tokens=torch.cat([pack.tokens, further]),
        cu_seqlens=torch.cat([pack.cu_seqlens, pack.cu_seqlens.new_tensor([tokens])]),
        max_seqlen=max(pack.max_seqlen, missing),
    )


def a_pack(tokens: int) -> Pack:
    """Three documents that fill a pack."""
    ends = torch.tensor([0, tokens // 2, tokens * 3 // 4, tokens], dtype=torch.int32)
    return Pack(tokens=torch.arange(tokens) % 256, cu_seqlens=ends, max_seqlen=tokens // 2)


def hidden_states(tokens: int, width: int) -> Tensor:
    """Random ones of a pack, [tokens, 1, width], whose gradient is wanted."""
    return torch.randn(tokens, 1, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def variant_of(hidden: Tensor, *, key: Hashable = "pack", **more: Any) -> VariantSpec:
    """What a bank captures for rows like those of `hidden`."""
    shape: dict[str, Any] = {"rows": hidden.size(0), "row_shape": tuple(hidden.shape[1:])}
    return VariantSpec(key=key, training=True, **shape, dtype=hidden.dtype, **more)
