# SPDX-License-Identifier: Apache-2.0
"""How hosts of Megatron write models, packs, calls and loops, in our words. Read in verl 0.9.1,
megatron-bridge 0.3.1, ms-swift 4.6.0 with mcore-bridge 1.6.5."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import megatron_rig as rig
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron_rig import ONE, OTHER, TWO
from model_specs import spec_of
from offsets import offsets
from torch import Tensor, nn

import megagraph
from megagraph.demo.trainer import Trainer, in_half_precision, transformer_config

# As many rows and documents as the capacity: the backward of attention sums by their number.
FULL = rig.Micro(lengths=(40, 9, 7, 5, 3), seed=3)
TEMPERATURE = 0.7
HAS_OUTPUT_PROCESSOR = "output_processor" in inspect.signature(GPTModel.forward).parameters
NAN = float("nan")

# -- models and blocks whose forwards are their own ------------------------------------------------

_TABLES = ("rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin", "sequence_len_offset")
_OF_LAYERS = (*_TABLES[1:], "context", "attention_bias", "inference_context")


class OwnModel(GPTModel):
    """Calls its decoder itself, as ms-swift's GPTModel does with fused RoPE."""

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None,
        attention_mask: Tensor | None = None,
        decoder_input: Tensor | None = None,
        labels: Tensor | None = None,
        inference_context: Any = None,
        packed_seq_params: Any = None,
    ) -> Any:
        return self.run(input_ids, position_ids, attention_mask, decoder_input, labels, packed_seq_params)

    def run(self, tokens: Any, positions: Any, mask: Any, given: Any, labels: Any, pack: Any) -> Any:
        """From the tokens to the losses, or logits."""
        hidden, tables = self.tables(tokens, positions, given, pack)
        out = self.decoder(hidden_states=hidden, attention_mask=mask, packed_seq_params=pack, **tables)
        logits = self.output_layer(out)[0]
        if labels is None:
            return logits.transpose(0, 1).contiguous()
        return self.compute_language_model_loss(labels, logits)

    def tables(self, input_ids: Any, position_ids: Any, given: Any, pack: Any) -> Any:
        """The hidden states, and the rotary tables by name."""
        hidden, *tables = self._preprocess(
            input_ids=input_ids, position_ids=position_ids, decoder_input=given, packed_seq_params=pack
        )
        return hidden, dict(zip(_TABLES, tables, strict=False))


class PerTokenModel(OwnModel):
    """Hands a row of the rotary table to each token, as ms-swift does without fused RoPE."""

    def tables(self, input_ids: Any, position_ids: Any, given: Any, pack: Any) -> Any:
        hidden, tables = super().tables(input_ids, position_ids, given, pack)
        tables["rotary_pos_emb"] = tables["rotary_pos_emb"][position_ids[0]]
        return hidden, tables


class OwnBlock(TransformerBlock):
    """Runs its layers itself; what `between` does there is a subclass's."""

    def forward(self, hidden_states, attention_mask, rotary_pos_emb=None, packed_seq_params=None, **further):
        given = {name: further.get(name) for name in _OF_LAYERS}
        given |= {"attention_mask": attention_mask, "rotary_pos_emb": rotary_pos_emb}
        given["packed_seq_params"] = packed_seq_params
        for index, layer in enumerate(self.layers):
            assert layer.layer_number == index + 1
            hidden_states, _ = layer(hidden_states=hidden_states, **given, **self.further_arguments(index))
            hidden_states = self.between(index, hidden_states)
        return self.final_layernorm(hidden_states)

    def further_arguments(self, index: int) -> dict[str, Any]:
        return {}

    def between(self, index: int, hidden_states: Tensor) -> Tensor:
        return hidden_states


def _host_model(model_class: Any, block_class: Any, options: Any, config: Any, spec: Any = None) -> nn.Module:
    """A model of these classes; of Megatron's block where no other is given."""
    spec = spec_of(config) if spec is None else spec
    given = {"vocab_size": options.vocab, "max_sequence_length": options.max_tokens}
    given |= {"position_embedding_type": "rope"}
    model: nn.Module = model_class(config=config, transformer_layer_spec=spec, **given)
    if block_class is not None:
        model.decoder = block_class(config=config, spec=spec)
    return model


def frozen_model(seed: int, model_class: type = GPTModel, block_class: type | None = None) -> tuple[Any, Any]:
    """A model that is never trained and that no DDP has seen, and what is called in its place."""
    torch.manual_seed(seed)
    model = _host_model(model_class, block_class, rig.OPTIONS, transformer_config(rig.OPTIONS))
    model.to("cuda" if rig.ON_GPU else "cpu").eval().requires_grad_(False)
    return model, in_half_precision(model)


class Holder(nn.Module):
    """A wrapper whose model may be replaced."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class HostTrainer(rig.ModelTrainer):
    """Of a model and a block of these classes; the block is Megatron's own by default."""

    def __init__(self, model_class: type = GPTModel, block_class: type | None = None, **further: Any) -> None:
        self._classes = model_class, block_class
        super().__init__(**further)

    def make_chunk(self, config: Any, spec: Any) -> nn.Module:
        model = _host_model(*self._classes, self.options, config, spec)
        self._prepare(model)
        return model


def host_pair(model_class: Any = GPTModel, block_class: Any = None, times: int = 0, **given: Any) -> rig.Pair:
    """Two models of these classes and of the same weights, after steps of both whose packs change."""
    pair = rig.Pair(HostTrainer, model_class=model_class, block_class=block_class, **given)
    for index in range(times):
        pair.step(ONE if index % 2 else TWO, OTHER, FULL)
        pair.evaluate(TWO)
    return pair


def only(report: dict[str, Any], *reasons: str) -> bool:
    """Whether it replayed, and ran eager for these reasons alone."""
    return report["replays"] > 0 and {*report["eager"]} <= {*reasons}


# -- a linear with an adapter ----------------------------------------------------------------------


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
        out, x = out if isinstance(out, tuple) else (out, x)
        return out + x @ self.down.T @ self.up.T, bias


class NormedLinear(nn.Module):
    """Transformer Engine's way: a linear that hands out what it was given, too, if it is told to."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.linear, self.return_layernorm_output = linear, False

    @property
    def weight(self) -> Tensor:
        return self.linear.weight

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Tensor | None]:
        out, bias = self.linear(x, *args, **kwargs)
        return ((out, x) if self.return_layernorm_output else out), bias


class PeftLinear(AdaptedLinear):
    """PEFT's way: an adapter that is off is frozen."""

    def enable_adapters(self, enabled: bool) -> None:
        self._adapter_enabled = enabled
        for parameter in (self.down, self.up):
            parameter.requires_grad_(enabled)


class SwiftLinear(PeftLinear):
    """The same in mcore-bridge: each call tells the linear what to hand out."""

    def __init__(self, linear: Any, rank: int) -> None:
        super().__init__(NormedLinear(linear), rank)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        self.to_wrap.return_layernorm_output = self._adapter_enabled
        return super().forward(x, *args, **kwargs)


def adapt(model: Any, kind: type = AdaptedLinear) -> None:
    """Freezes a model and gives linears of its layers an adapter each."""
    torch.manual_seed(5)
    model.requires_grad_(False)
    for layer in model.decoder.layers:
        for owner in (layer.self_attention, layer.mlp):
            for name in ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"):
                if name in owner._modules:
                    setattr(owner, name, kind(getattr(owner, name), rank=4))


@contextlib.contextmanager
def without_adapters(*chunks: nn.Module) -> Iterator[None]:
    """As Megatron-Bridge's `disable_adapter()` and PEFT's, which freezes them besides: for a reference."""
    modules = [it for chunk in chunks for it in chunk.modules() if hasattr(it, "_adapter_enabled")]
    enables = [getattr(it, "enable_adapters", partial(setattr, it, "_adapter_enabled")) for it in modules]
    for enable in enables:
        enable(False)
    yield
    for enable in enables:
        enable(True)


# -- packs -----------------------------------------------------------------------------------------


def verl_pack(micro: rig.Micro, device: Any) -> Any:
    """One tensor in all four places, the offsets of padded documents; a mark of its own on the pack."""
    actual = offsets(micro.rows, device)
    params = rig.packed(actual, actual, max_seqlen_q=micro.longest, local_cp_size=1)
    params._verl_mtp_loss_normalization_factor = 0.5
    return params


def bridge_pack(micro: rig.Micro, device: Any) -> Any:
    """A tensor on the host for the longest document; without padding no padded offsets."""
    return rig.packed(offsets(micro.rows, device), max_seqlen_q=torch.tensor(micro.longest))


def bridge_padded_pack(micro: rig.Micro, device: Any, longest: int | None = None) -> Any:
    """As many documents in each pack: offsets are repeated, and the tail is a document without tokens."""
    tail = rig.OPTIONS.max_tokens - micro.physical
    lengths = [*micro.lengths, 0], [*micro.rows, tail]
    actual, padded = (offsets(each, device, entries=5) for each in lengths)
    return rig.packed(actual, padded, max_seqlen_q=torch.tensor(longest or max(*micro.rows, tail)))


# As Bridge declares it: a document may be as long as the pack.
bridge_whole_pack = partial(bridge_padded_pack, longest=rig.OPTIONS.max_tokens)


def swift_pack(micro: rig.Micro, device: Any) -> Any:
    """Offsets from the positions that are zero; set on the pack afterwards: its tokens and more."""
    _tokens, _labels, _mask, positions = micro.row_lists()
    starts = [*torch.nonzero(positions == 0).flatten().tolist(), micro.physical]
    starts = torch.tensor(starts, dtype=torch.int32, device=device)
    params = rig.packed(starts, max_seqlen_q=micro.longest)
    params.total_tokens = micro.physical
    params.seq_lens, params.num_samples = list(micro.rows), len(micro.rows)
    return params


# -- calls: from a pack to a value for each token --------------------------------------------------

Call = Callable[[Any, rig.Micro, Any], Tensor]  # of a model, a micro-batch and its pack
Values = Callable[[Any, Any], Tensor]  # of a model, and a micro-batch or what begins with one


def _asked(
    model: Any, micro: rig.Micro, params: Any, *names: str, rows: int | None = None, **given: Any
) -> tuple[Any, Tensor]:
    """What a model answers, and the labels, [T]; of labels and positions it is given what is named."""
    more = 0 if rows is None else rows - micro.physical
    tokens, labels, _mask, positions = (
        nn.functional.pad(row[None], (0, more)).to(params.cu_seqlens_q.device) for row in micro.row_lists()
    )
    own = {"labels": labels, "position_ids": positions}
    arguments = {"position_ids": None, "attention_mask": None, "packed_seq_params": params, **given}
    return model(input_ids=tokens, **{**arguments, **{name: own[name] for name in names}}), labels[0]


def _losses(logits: Tensor, labels: Tensor) -> Tensor:
    return -logits.float().log_softmax(-1).gather(-1, labels[:, None]).squeeze(-1)


def verl_call(model: Any, micro: rig.Micro, params: Any) -> Tensor:
    """Logits, edited in place, without positions, mask or labels."""
    logits, labels = _asked(model, micro, params)
    return _losses(logits.div_(TEMPERATURE)[0], labels)


def labels_call(model: Any, micro: rig.Micro, params: Any, rows: int | None = None) -> Tensor:
    losses, _labels = _asked(model, micro, params, "labels", "position_ids", rows=rows)
    return losses[0, : micro.physical].float()


# If the tail is a document of the pack.
full_rows_call = partial(labels_call, rows=rig.OPTIONS.max_tokens)


def _fused_hook(*, output_layer: Any, labels: Tensor, context: Any, **given: Any) -> Any:
    """What stands for verl's fused kernel: from hidden states to losses in one go. Sees the pack as given."""
    assert given["packed_seq_params"] is context["pack"]
    logits = output_layer(given["hidden_states"])[0][:, 0]
    return {"losses": _losses(logits / context["temperature"], labels[0])}


def fused_hook_call(model: Any, micro: rig.Micro, params: Any) -> Tensor:
    """Through the output processor, if the release has it."""
    context = {"temperature": TEMPERATURE, "pack": params}
    hook = {"output_processor": _fused_hook, "output_processor_context": context}
    return _asked(model, micro, params, "labels", **hook)[0]["losses"]


# -- phases ----------------------------------------------------------------------------------------


def run_phase(model: Any, items: Sequence[Any], values: Values, **schedule: Any) -> list[Tensor]:
    """Megatron's schedule over micro-batches, or tuples that begin with one. Returns their values, [T]."""

    def forward_step(data: Any, chunk: Any) -> tuple[Tensor, Any]:
        item = next(data)
        micro = item if isinstance(item, rig.Micro) else item[0]
        found = values(chunk, item)
        return found, partial(rig.mean_loss, mask=micro.row_lists()[2].to(found.device))

    results = rig.run_schedule(model, forward_step, items, len(items), **schedule)
    return [result["losses"] for result in results]


def values_of(model: Any, micro: rig.Micro) -> Tensor:
    """Of each token, from a plain pack."""
    return verl_call(model, micro, micro.params(next(model.parameters()).device))


def log_probs(model: Any, micros: Any, values: Values = values_of, **schedule: Any) -> list[Tensor]:
    """Through the schedule, forward only, in evaluation mode."""
    with rig.evaluating(model):
        return run_phase(model, micros, values, forward_only=True, **schedule)


@dataclass(kw_only=True)
class Offload:
    """Moves what models own to the host and back to other addresses. Who reads the old memory gets NaN."""

    megatrons_own: bool = False  # gradients go through Megatron's `offload_grad_buffers()`
    _held: list[Tensor] = field(default_factory=list)
    _copies: dict[Tensor, Tensor] = field(default_factory=dict)
    _sizes: list[int] = field(default_factory=list)  # bytes of the gradient buffers

    def weights(self, model: nn.Module) -> None:
        """Every parameter to the host; of those that train, the memory alone. One that moves to another
        device loses its gradient accumulator, and so DDP's hook. On the CPU another dtype stands for one."""
        for param in model.parameters():
            copy = param.data.to("cpu", copy=True)
            if param.requires_grad:
                self._copies[param] = copy
                size = param.data.untyped_storage().nbytes()
                param.data.untyped_storage().resize_(0)
                self._held.append(torch.full((size // param.element_size(),), NAN).to(param))
            else:
                old, param.data = param.data, copy if rig.ON_GPU else copy.to(torch.float64)
                self._held.append(old.fill_(NAN))

    def weights_back(self, model: nn.Module, device: torch.device) -> None:
        for param in model.parameters():
            copy = self._copies.pop(param, None)
            if copy is None:
                dtype = torch.float32 if param.dtype is torch.float64 else param.dtype
                param.data = param.data.to(device, dtype, copy=True)
            else:
                param.data.untyped_storage().resize_(copy.untyped_storage().nbytes())
                param.data.copy_(copy)

    def gradients(self, ddp: Any) -> None:
        """Frees the gradient buffers; something else takes their place."""
        self._sizes = [buffer.grad_data.untyped_storage().nbytes() for buffer in ddp.buffers]
        if self.megatrons_own:
            ddp.offload_grad_buffers()
        else:
            for buffer in ddp.buffers:
                buffer.grad_data.untyped_storage().resize_(0)
        device = ddp.buffers[0].grad_data.device
        self._held += [torch.full((size // 4,), NAN, device=device) for size in self._sizes]

    def gradients_back(self, ddp: Any) -> None:
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


@dataclass(kw_only=True)
class Host:
    """A trainer's loop as a host runs it; what each phase left is kept."""

    trainer: Trainer  # of the policy
    pack: Callable[[rig.Micro, Any], Any]  # makes the pack of a micro-batch
    call: Call  # calls the model on it
    schedule: dict[str, Any]  # further arguments of the schedule
    reference: Any  # is asked for every micro-batch of a step, too, if it is there
    offload: Offload | None  # weights and gradients are away between the phases
    announces: bool  # which the plugin is told, by `suspend()` and `resume()`
    left: list[Tensor] = field(default_factory=list)
    _is_away: bool = False

    def _values(self, model: Any, micro: rig.Micro) -> Tensor:
        return self.call(model, micro, self.pack(micro, self.trainer.device))

    def _values_beside_reference(self, model: Any, micro: rig.Micro) -> Tensor:
        values = self._values(model, micro)
        if self.reference is None:
            return values
        with torch.no_grad():
            return values + self._values(self.reference, micro).exp()

    def run(self, phase: str, micros: Sequence[rig.Micro]) -> None:
        """Everything comes back before a phase and goes away after it."""
        model = self.trainer.model
        if self.offload is not None and self._is_away:
            self.offload.weights_back(model, self.trainer.device)
            self.offload.gradients_back(model)
            if self.announces:
                megagraph.resume()
        getattr(self, phase)(micros)
        if self.offload is not None:
            if self.announces:
                megagraph.suspend()
            self.offload.weights(model)
            self.offload.gradients(model)
            self._is_away = True

    def train(self, micros: Sequence[rig.Micro]) -> None:
        self.trainer.zero_grad()
        schedule = {"seq_length": 1, **self.schedule}
        self.left += run_phase(self.trainer.model, micros, self._values_beside_reference, **schedule)
        self.left += rig.grads(self.trainer.chunk).values()
        self.trainer.update()

    def log_probs(self, micros: Sequence[rig.Micro]) -> None:
        """Of the wrapped model, through the schedule."""
        self.left += log_probs(self.trainer.model, micros, self._values, **{"seq_length": 1, **self.schedule})

    def bare_log_probs(self, micros: Sequence[rig.Micro]) -> None:
        """Of the unwrapped model, outside of any schedule, as GRPO of ms-swift asks for them."""
        model = self.trainer.chunk
        for micro in micros:
            with rig.evaluating(model):
                self.left.append(self._values(model, micro).clone())
