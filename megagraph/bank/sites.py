# SPDX-License-Identifier: Apache-2.0
"""Names what can be graphed: a site (a call of a module, or of parts of it), and a variant.

Sites are captured for variants, and what lies between two sites stays eager. Beside the hidden states a
variant's calls are given constants and buffers of metadata, which staging fills
(csrc/bank/staging/staging.h). Holds no graph.

Note [Arguments of a variant]
`VariantSpec.arguments` runs at the capture, and no replay runs it again. What it hands on of the buffers
(themselves, or views) follows each micro-batch; everything else keeps the value that it had at the capture,
and lives as long as the graphs. So a value that was computed from a buffer's content would stay the
example's: it is an error. It is found by asking again while the buffers hold something else.
"""

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megagraph import _C
from megagraph.decide.reasons import EagerReason

__all__ = [
    "CaptureError",
    "EagerPart",
    "JoinedSites",
    "MetadataSpec",
    "Outputs",
    "SiteSpec",
    "StepOrder",
    "VariantSpec",
    "arguments_of",
    "as_tuple",
    "tensors_in",
]


_Kind = _C.SegmentKind


class MetadataSpec(_C.MetadataSpec):
    """A small buffer that graphs read and that staging refills for each micro-batch.

    Args:
        kind: how staging fills it (csrc/bank/staging/staging.h).
        example: its content during warm-up and capture, [entries].
        source: index into what a micro-batch hands over; -1 for none: a mask then has the pack's end alone,
            and any other buffer is constant.
        fill: int32 that fills the entries past the source's; -1 repeats the source's last one.
        shared: one buffer for all slots, the example itself (a counter).
    """

    def __init__(
        self,
        *,
        kind: _C.SegmentKind,
        example: Tensor,
        source: int = -1,
        fill: int = -1,
        shared: bool = False,
    ) -> None:
        super().__init__(kind=kind, example=example, source=source, fill=fill, shared=shared)
        self._kind, self._source, self._fill = kind, source, fill

    @property
    def is_staged(self) -> bool:
        """Whether its content differs from micro-batch to micro-batch."""
        return self._source >= 0 or self._kind == _Kind.MASK

    def content(self, buffer: Tensor, sources: Sequence[Tensor], end: Tensor | None) -> Tensor:
        """What staging would write for a micro-batch, in memory of its own.

        A call that runs eager may need it in its backward pass, when `buffer` holds another micro-batch's.
        Counters and constants are `buffer` itself. Never waits for the device.

        Args:
            buffer: the slot's.
            sources: what the micro-batch handed over.
            end: the pack's physical end, of one entry; a mask needs it.
        """
        if not self.is_staged or self._kind == _Kind.COUNT:
            return buffer
        source = None if self._source < 0 else sources[self._source].flatten()
        if self._kind == _Kind.MASK:
            assert end is not None
            return _C.mask_content(buffer.numel(), source, end).view(buffer.shape)
        assert source is not None
        if self._kind == _Kind.OFFSETS:
            given = (source, buffer.numel() - 1, None if self._fill < 0 else self._fill)
            offsets: Tensor = torch.ops.megagraph.pad_cu_seqlens(*given)
            return offsets.view(buffer.shape)
        out = torch.zeros_like(buffer, memory_format=torch.contiguous_format)
        out.view(-1)[: source.numel()] = source
        return out


# What a site hands out: one tensor or several.
Outputs = Tensor | Sequence[Tensor]


class CaptureError(RuntimeError):
    """A site could not be captured; everything of the attempt has been undone.

    Args:
        site: name of the site.
        index: its place in execution order.
        reason: how its calls are counted from now on.
        detail: the pass, the op that started last and the line of the user's code.
    """

    def __init__(self, *, site: str, index: int, reason: EagerReason, detail: str) -> None:
        super().__init__(f"{site}: {detail}")
        self.site = site
        self.index = index
        self.reason = reason
        self.detail = detail


def _call(module: nn.Module, hidden: Tensor, **arguments: Any) -> Outputs:
    out: Outputs = module(hidden, **arguments)
    return out


def as_tuple(outputs: Outputs) -> tuple[Tensor, ...]:
    """The outputs of a call."""
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


class _OfModule:
    """Something that a module does. Holds it weakly: graphs must not keep a model alive."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self._module = weakref.ref(module)

    @property
    def short_name(self) -> str:
        """The name without what it says in brackets."""
        return self.name.partition(" (")[0]

    @property
    def module(self) -> nn.Module:
        """The module. Raises `RuntimeError` once it is gone."""
        module = self._module()
        if module is None:
            raise RuntimeError(f"the module of {self.name} does not exist any more")
        return module


class EagerPart(_OfModule):
    """What stays eager before, between or after sites.

    Args:
        name: for reports.
        module: whose part it is.
        forward: maps the module, what came before (a site's output, or a tuple of them where it has several;
            at the beginning the bank's input) and the variant's arguments to hidden states of as many rows.
    """

    def __init__(self, *, name: str, module: nn.Module, forward: Callable[..., Tensor]) -> None:
        super().__init__(name, module)
        self._forward = forward

    def call(self, before: Outputs, **arguments: Any) -> Tensor:
        """Runs it."""
        return self._forward(self.module, before, **arguments)


class SiteSpec(_OfModule):
    """One call to graph, of a module or of parts of it.

    Args:
        name: for reports.
        module: whose call it is.
        forward: maps the module, the hidden states and the variant's arguments to hidden states of as many
            rows, or to any tensors where an `EagerPart` takes them; by default the module's own call.
        parts: names of the module's children that own the parameters and buffers that the call uses, where
            it is not all of the module. A hook of the module itself is bypassed then.
        bypassed: names of children between the module and its parts, whose own calls are bypassed as well.
        transient: outputs, by index, that the `EagerPart` behind this site alone reads: their memory is used
            again by what comes after. Whoever keeps one keeps the next site eager.
        state: further tensors that the call changes in place, of the module: metrics, say.
    """

    def __init__(
        self,
        *,
        name: str,
        module: nn.Module,
        forward: Callable[..., Outputs] = _call,
        parts: Sequence[str] = (),
        bypassed: Sequence[str] = (),
        transient: Collection[int] = (),
        state: Callable[[Any], Sequence[Tensor]] = lambda module: (),
    ) -> None:
        super().__init__(name, module)
        self._forward = forward
        self._parts = tuple(parts)
        self.bypassed = tuple(bypassed)
        self.transient = frozenset(transient)
        self.state = state
        self.calls = 1  # as many one of this site counts as

    def call(self, hidden: Tensor, **arguments: Any) -> Outputs:
        """Runs the module eagerly."""
        return self._forward(self.module, hidden, **arguments)

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """The module, and those within that the call uses, by name."""
        module = self.module
        if not self._parts:
            yield from module.named_modules()
            return
        yield "", module
        for name in self.bypassed:
            yield name, module.get_submodule(name)
        for part in self._parts:
            yield from module.get_submodule(part).named_modules(prefix=part)

    def modules(self) -> list[nn.Module]:
        """The same without names."""
        return [module for _name, module in self.named_modules()]

    def owners(self) -> list[nn.Module]:
        """Those of them that own the parameters and buffers that the call uses."""
        return [module for _name, root in self._roots() for module in root.modules()]

    def _roots(self) -> list[tuple[str, nn.Module]]:
        module = self.module
        return [(part, module.get_submodule(part)) for part in self._parts] or [("", module)]

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters that the call uses, each once, by name."""
        found: dict[int, tuple[str, nn.Parameter]] = {}
        for prefix, root in self._roots():
            for name, param in root.named_parameters(prefix=prefix):
                found.setdefault(id(param), (name, param))
        return [*found.values()]

    def parameters(self) -> list[nn.Parameter]:
        """The same without names."""
        return [param for _name, param in self.named_parameters()]

    def further_state(self) -> Sequence[Tensor]:
        """The further tensors that the call changes."""
        return self.state(self.module)

    def named_buffers(self) -> list[tuple[str, Tensor]]:
        """The buffers that the call uses, each once, by name."""
        found: dict[int, tuple[str, Tensor]] = {}
        for prefix, root in self._roots():
            for name, buffer in root.named_buffers(prefix=prefix):
                found.setdefault(id(buffer), (name, buffer))
        return [*found.values()]

    def buffers(self) -> list[Tensor]:
        """The buffers that the call uses, and further tensors that it changes, each once."""
        found = [buffer for _name, buffer in self.named_buffers()]
        return [*{id(tensor): tensor for tensor in (*found, *self.further_state())}.values()]

    def trainable(self) -> list[nn.Parameter]:
        """The parameters that get a gradient, each once."""
        return [param for param in self.parameters() if param.requires_grad]


class JoinedSites(SiteSpec):
    """Neighbouring sites as one, which a single graph runs one after the other in each pass.

    Args:
        name: for reports.
        sites: in execution order; each but the last hands hidden states to the next one.
    """

    def __init__(self, *, name: str, sites: Sequence[SiteSpec]) -> None:
        super().__init__(
            name=name,
            module=sites[0].module,
            transient=sites[-1].transient,
            state=lambda _module: [*{id(it): it for site in sites for it in site.further_state()}.values()],
        )
        self.sites = tuple(sites)
        self.calls = sum(site.calls for site in sites)

    def call(self, hidden: Tensor, **arguments: Any) -> Outputs:
        out: Any = hidden
        for site in self.sites:
            out = site.call(out, **arguments)
        outputs: Outputs = out
        return outputs

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        for site in self.sites:
            for name, module in site.named_modules():
                yield ".".join(filter(None, (site.short_name, name))), module

    def owners(self) -> list[nn.Module]:
        return [module for site in self.sites for module in site.owners()]

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        named = (
            (f"{site.short_name}.{name}", param)
            for site in self.sites
            for name, param in site.named_parameters()
        )
        return [*{id(param): (name, param) for name, param in named}.values()]

    def named_buffers(self) -> list[tuple[str, Tensor]]:
        named = (
            (f"{site.short_name}.{name}", buffer)
            for site in self.sites
            for name, buffer in site.named_buffers()
        )
        return [*{id(buffer): (name, buffer) for name, buffer in named}.values()]


@dataclass(frozen=True, kw_only=True)
class StepOrder:
    """What lies between the sites of a bank.

    Args:
        gaps: sites, by index, behind which something stays eager.
        begins_with_site: nothing eager comes before the first one.
    """

    gaps: frozenset[int]
    begins_with_site: bool

    @staticmethod
    def of(steps: Sequence[SiteSpec | EagerPart]) -> "StepOrder":
        """That of some steps."""
        gaps, index = set(), -1
        for step in steps:
            if isinstance(step, SiteSpec):
                index += 1
            else:
                gaps.add(index)
        return StepOrder(gaps=frozenset(gaps - {-1}), begins_with_site=-1 not in gaps)

    def joins(self, index: int) -> bool:
        """Whether a site takes what the site before it hands out."""
        return index > 0 and index - 1 not in self.gaps

    def is_entry(self, index: int) -> bool:
        """Whether a site takes the bank's input as it was given."""
        return index == 0 and self.begins_with_site


@dataclass(frozen=True, kw_only=True)
class VariantSpec:
    """What a bank captures for: shapes, with or without a backward pass, the calls' arguments.

    Args:
        key: the variant's place in the bank's table.
        training: capture a backward pass too.
        rows: first dimension of the hidden states.
        row_shape: their other dimensions.
        dtype: their dtype.
        metadata: named buffers.
        end_source: the source whose last entry is the pack's physical end: rows at or past it are
            zeroed in the bank's input and in the gradient that it returns; -1 for none.
        end_buffer: the metadata buffer that ends with the same entry.
        fewer_rows: the bank's input may have fewer rows than `rows`.
        arguments: keyword arguments of every site's call, from the slot's metadata buffers: these
            themselves or views of them, and constants. Asked at the capture and again where a call runs
            eager; never in a replay: megagraph/bank/sites.py, Note [Arguments of a variant].
        name: for progress and profilers; by default the key's.
        context: entered around the variant's warm-up and capture: the mode of its modules, say.
    """

    key: Any
    training: bool
    rows: int
    row_shape: tuple[int, ...]
    dtype: torch.dtype
    metadata: Mapping[str, MetadataSpec] = field(default_factory=dict)
    end_source: int = -1
    end_buffer: str | None = None
    fewer_rows: bool = False
    arguments: Callable[[Mapping[str, Tensor]], Mapping[str, Any]] = lambda buffers: {}
    name: str = ""
    context: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    def __str__(self) -> str:
        return self.name or str(self.key)


_DEPTH = 4


def _values_in(value: Any, path: str, depth: int = _DEPTH) -> Iterator[tuple[str, Any]]:
    """Tensors and plain values, by where they are."""
    if isinstance(value, (Tensor, bool, int, float, str)):
        yield path, value
    elif depth == 0 or isinstance(value, (nn.Module, type)):
        return
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _values_in(item, f"{path}[{index}]", depth - 1)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _values_in(item, f"{path}[{key!r}]", depth - 1)
    else:
        for name, item in getattr(value, "__dict__", {}).items():
            yield from _values_in(item, f"{path}.{name}", depth - 1)


def _all_values(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {path: value for name, given in arguments.items() for path, value in _values_in(given, name)}


def tensors_in(arguments: Mapping[str, Any]) -> list[Tensor]:
    """Every tensor of a call's arguments, also those inside containers and plain objects."""
    return [value for value in _all_values(arguments).values() if isinstance(value, Tensor)]


@contextlib.contextmanager
def _other_contents(variant: VariantSpec, buffers: Mapping[str, Tensor]) -> Iterator[None]:
    """The buffers that staging refills hold something else than their examples."""
    staged = [buffers[name] for name, spec in variant.metadata.items() if spec.is_staged]
    before = [buffer.clone() for buffer in staged]
    for buffer in staged:
        buffer.fill_(not bool(buffer.any()))  # zeros, or ones in place of zeros: offsets stay offsets
    try:
        yield
    finally:
        for buffer, content in zip(staged, before, strict=True):
            buffer.copy_(content)


def _storage(tensor: Tensor) -> int:
    return 0 if tensor.device.type == "meta" else tensor.untyped_storage().data_ptr()


def _is_same(value: Any, other: Any) -> bool:
    if value is other:
        return True
    if not isinstance(value, Tensor) or not isinstance(other, Tensor):
        return type(value) is type(other) and bool(value == other)
    if value.shape != other.shape or value.dtype != other.dtype or value.device != other.device:
        return False
    if value.device.type == "meta":
        return True
    both_nan = (value != value) & (other != other)
    return bool(((value == other) | both_nan).all())


def arguments_of(variant: VariantSpec, buffers: Mapping[str, Tensor]) -> Mapping[str, Any]:
    """A variant's arguments over the metadata buffers of a slot, filled with their examples.

    Raises:
        ValueError: naming an argument that was computed from the content of a buffer: Note [Arguments of a
            variant].
    """
    arguments = variant.arguments(buffers)
    with _other_contents(variant, buffers):
        try:
            others = _all_values(variant.arguments(buffers))
        except Exception as error:
            raise ValueError(
                f"variant {variant}: its arguments depend on the content of the metadata buffers, which no "
                f"replay would see; asked with other contents they raise {type(error).__name__}: {error}"
            ) from error
    ours = {_storage(buffer) for buffer in buffers.values()} - {0}
    for path, value in _all_values(arguments).items():
        if isinstance(value, Tensor) and _storage(value) in ours:
            continue
        if path not in others or not _is_same(value, others[path]):
            raise ValueError(
                f"variant {variant}: argument {path} is computed from the content of a metadata buffer and "
                "would keep the example's; hand the buffer on, or a view of it, and compute in the module"
            )
    return arguments
