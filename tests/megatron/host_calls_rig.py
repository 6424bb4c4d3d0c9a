# SPDX-License-Identifier: Apache-2.0
"""How verl, Megatron-Bridge and ms-swift call Megatron: their packs, arguments and phases, in our words.

Read in verl 0.9.1, megatron-bridge 0.3.1, ms-swift 4.6.0 with mcore-bridge 1.6.5.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from host_rig import OwnModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron_rig import OPTIONS, Micro, grads
from rl_rig import Offload
from torch import Tensor, nn

from megagraph.demo.trainer import Trainer

TEMPERATURE = 0.7
Call = Callable[[Any, Micro, Any], Tensor]


def _offsets(lengths: Sequence[int], device: Any) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


# -- packs ------------------------------------------------------------------------------------------


def _pack(actual: Tensor, longest: Any, padded: Tensor | None = None, **further: Any) -> Any:
    """The same for queries and keys."""
    return PackedSeqParams(
        qkv_format="thd",
        **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), actual),
        **dict.fromkeys(("cu_seqlens_q_padded", "cu_seqlens_kv_padded"), padded),
        **dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), longest),
        **further,
    )


def verl_pack(micro: Micro, device: Any) -> Any:
    """One tensor in all four places, the offsets of padded documents; a mark of its own on the pack."""
    offsets = _offsets(micro.rows, device)
    params = _pack(offsets, micro.longest, offsets, local_cp_size=1)
    params._verl_mtp_loss_normalization_factor = 0.5
    return params


def bridge_pack(micro: Micro, device: Any) -> Any:
    """A tensor on the host for the longest document; without padding no padded offsets."""
    return _pack(_offsets(micro.rows, device), torch.tensor(micro.longest))


def bridge_padded_pack(micro: Micro, device: Any) -> Any:
    """As many documents in each pack: offsets are repeated, and the tail is a document without tokens."""
    tail = OPTIONS.max_tokens - micro.physical
    missing = [0] * (3 - len(micro.rows))
    actual = _offsets([*micro.lengths, 0, *missing], device)
    padded = _offsets([*micro.rows, tail, *missing], device)
    return _pack(actual, torch.tensor(max(*micro.rows, tail)), padded)


def bridge_whole_pack(micro: Micro, device: Any) -> Any:
    """The same, as Bridge declares it: a document may be as long as the pack."""
    params = bridge_padded_pack(micro, device)
    params.max_seqlen_q = params.max_seqlen_kv = torch.tensor(OPTIONS.max_tokens)
    return params


def swift_pack(micro: Micro, device: Any) -> Any:
    """Offsets from the positions that are zero; set on the pack afterwards: its tokens and more."""
    _tokens, _labels, _mask, positions = micro.row_lists()
    starts = torch.nonzero(positions == 0).flatten().tolist()
    offsets = torch.tensor([*starts, micro.physical], dtype=torch.int32, device=device)
    params = _pack(offsets, micro.longest)
    params.total_tokens = micro.physical
    params.seq_lens, params.num_samples = list(micro.rows), len(micro.rows)
    return params


def bridge_schedule() -> dict[str, Any]:
    """What Megatron-Bridge gives to the schedule beside what verl does."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    groups = ProcessGroupCollection.use_mpu_process_groups()
    return {"seq_length": OPTIONS.max_tokens, "p2p_communicator": None, "pg_collection": groups}


# -- calls: from a pack to a value for each token -----------------------------------------------------


def _rows(micro: Micro, device: Any, rows: int | None = None) -> list[Tensor]:
    lists = [rows_[None].to(device) for rows_ in micro.row_lists()]
    more = 0 if rows is None else rows - micro.physical
    return [nn.functional.pad(rows_, (0, more)) for rows_ in lists]


def _call(model: Any, params: Any, tokens: Tensor, **given: Any) -> Any:
    arguments = {"position_ids": None, "attention_mask": None, "packed_seq_params": params, **given}
    return model(input_ids=tokens, **arguments)


def verl_call(model: Any, micro: Micro, params: Any) -> Tensor:
    """Logits, edited in place, without positions, mask or labels."""
    tokens, labels, *_ = _rows(micro, params.cu_seqlens_q.device)
    logits = _call(model, params, tokens)
    logits.div_(TEMPERATURE)
    return -logits[0].float().log_softmax(-1).gather(-1, labels[0, :, None]).squeeze(-1)


def labels_call(model: Any, micro: Micro, params: Any, rows: int | None = None) -> Tensor:
    """Losses for labels, with positions."""
    tokens, labels, _mask, positions = _rows(micro, params.cu_seqlens_q.device, rows)
    losses: Tensor = _call(model, params, tokens, position_ids=positions, labels=labels)
    return losses[0, : micro.physical].float()


# Where the tail is a document of the pack.
full_rows_call = partial(labels_call, rows=OPTIONS.max_tokens)


def _fused_output(*, hidden_states: Tensor, output_layer: Any, labels: Tensor, context: Any, **_: Any) -> Any:
    """What stands for verl's fused kernel: from hidden states to log-probabilities, in one go."""
    logits = output_layer(hidden_states)[0][:, 0].float() / context["temperature"]
    return {"log_probs": logits.log_softmax(-1).gather(-1, labels[0, :, None]).squeeze(-1)}


def _fused_hook(*, packed_seq_params: Any, context: Any, **given: Any) -> Any:
    """The same as an output processor, which sees the pack that was given."""
    assert packed_seq_params is context["pack"]
    return _fused_output(context=context, **given)


def fused_hook_call(model: Any, micro: Micro, params: Any) -> Tensor:
    """Through the output processor, where the release has it."""
    tokens, labels, *_ = _rows(micro, params.cu_seqlens_q.device)
    context = {"temperature": TEMPERATURE, "pack": params}
    hook = {"output_processor": _fused_hook, "output_processor_context": context}
    out = _call(model, params, tokens, labels=labels, **hook)
    return -out["log_probs"]


def fused_forward(
    model: Any,
    input_ids: Tensor,
    position_ids: Tensor | None,
    attention_mask: Tensor | None,
    decoder_input: Tensor | None = None,
    labels: Tensor | None = None,
    packed_seq_params: Any = None,
    *,
    temperature: float = 1.0,
) -> dict[str, Tensor]:
    """What verl sets on an instance where the release has no output processor."""
    pack = {"packed_seq_params": packed_seq_params}
    hidden, tables = OwnModel.tables(model, input_ids, position_ids, decoder_input, packed_seq_params)
    out = model.decoder(hidden_states=hidden, attention_mask=attention_mask, **pack, **tables)
    assert labels is not None
    found: dict[str, Tensor] = _fused_output(
        hidden_states=out,
        output_layer=model.output_layer,
        labels=labels,
        context={"temperature": temperature},
    )
    return found


def fused_instance_call(model: Any, micro: Micro, params: Any) -> Tensor:
    """Through that forward."""
    tokens, labels, *_ = _rows(micro, params.cu_seqlens_q.device)
    out = _call(model, params, tokens, labels=labels, temperature=TEMPERATURE)
    return -out["log_probs"]


# -- a linear with an adapter -------------------------------------------------------------------------


class AdaptedLinear(nn.Module):
    """Megatron-Bridge's way: the frozen linear and a low-rank path beside it, as one module."""

    def __init__(self, linear: Any, rank: int) -> None:
        super().__init__()
        self.to_wrap = linear.requires_grad_(False)
        rows, columns = linear.weight.shape
        like = {"dtype": linear.weight.dtype, "device": linear.weight.device}
        self.down = nn.Parameter(torch.randn(rank, columns, **like) / columns)
        self.up = nn.Parameter(torch.randn(rows, rank, **like) / rows)
        self._adapter_enabled = True

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        out, bias = self.to_wrap(x, *args, **kwargs)
        if not self._adapter_enabled:
            return out, bias
        return out + x @ self.down.T @ self.up.T, bias


def adapt(model: Any, names: Sequence[str] = ("linear_fc1",), first: int = 0) -> None:
    """Freezes a model and gives linears of its layers, from the `first` one on, an adapter each."""
    torch.manual_seed(5)
    model.requires_grad_(False)
    for layer in model.decoder.layers[first:]:
        for owner in (layer.self_attention, layer.mlp):
            for name in set(names) & {*owner._modules}:
                setattr(owner, name, AdaptedLinear(getattr(owner, name), rank=4))


# -- phases -------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Host:
    """A trainer's loop as a host runs it."""

    trainer: Trainer  # of the policy
    pack: Callable[[Micro, Any], Any]  # makes the pack of a micro-batch
    call: Call  # calls the model on it
    schedule: dict[str, Any] = field(default_factory=dict)  # further arguments of the schedule
    reference: nn.Module | None = None
    offloads: bool = False  # weights and gradients are away between the phases, and nobody says so
    left: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self._schedule = get_forward_backward_func()  # once, before the loop
        self._offload = Offload()
        self._is_away = False

    def _values(self, model: Any, micro: Micro) -> Tensor:
        return self.call(model, micro, self.pack(micro, self.trainer.device))

    def _run(self, micros: Sequence[Micro], *, forward_only: bool) -> None:
        def forward_step(data: Iterator[Micro], model: Any) -> tuple[Tensor, Any]:
            micro = next(data)
            values = self._values(model, micro)
            if self.reference is not None:
                with torch.no_grad():
                    values = values + self._values(self.reference, micro).exp()
            mask = micro.row_lists()[2].to(values.device)
            return values, partial(_mean, mask=mask)

        results = self._schedule(
            forward_step_func=forward_step,
            data_iterator=iter(micros),
            model=[self.trainer.model],
            num_microbatches=len(micros),
            forward_only=forward_only,
            **{"seq_length": 1, "micro_batch_size": 1, **self.schedule},
        )
        self.left += [result["values"] for result in results]

    def train(self, micros: Sequence[Micro]) -> None:
        """A step; its gradients and losses are kept."""
        with _moved(self):
            self.trainer.zero_grad()
            self._run(micros, forward_only=False)
            self.left += grads(self.trainer.chunk).values()
            self.trainer.update()

    def log_probs(self, micros: Sequence[Micro]) -> None:
        """Through the schedule, forward only, in evaluation mode."""
        with _moved(self):
            self.trainer.model.eval()
            with torch.no_grad():
                self._run(micros, forward_only=True)
            self.trainer.model.train()

    def bare_log_probs(self, micros: Sequence[Micro]) -> None:
        """Of the unwrapped model, outside of any schedule, as GRPO of ms-swift asks for them."""
        model = self.trainer.chunk
        for micro in micros:
            model.eval()
            with torch.no_grad():
                self.left.append(self._values(model, micro).clone())
            model.train()


class _moved:
    """Around a phase: everything comes back before it and goes away after it."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def __enter__(self) -> None:
        host = self._host
        if host.offloads and host._is_away:
            host._offload.weights_back(host.trainer.model, host.trainer.device)
            host._offload.gradients_back(host.trainer.model)

    def __exit__(self, *_: object) -> None:
        host = self._host
        if host.offloads:
            host._offload.weights(host.trainer.model)
            host._offload.gradients(host.trainer.model)
            host._is_away = True


def _mean(values: Tensor, mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    masked = values.where(mask > 0, 0.0)
    return masked.sum() / mask.sum().clamp(min=1), {"values": masked.detach().clone()}
