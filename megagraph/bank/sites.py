# SPDX-License-Identifier: Apache-2.0
"""Names what can be graphed, a site (a call of a module, or of parts of it) and a variant; finds what cannot.

Sites are captured for variants, and what lies between two sites stays eager. Beside the hidden states a
variant's calls are given constants and buffers of metadata, which staging fills
(csrc/bank/staging/metadata.h). Holds no graph.

Note [Arguments of a variant]
`VariantSpec.arguments` runs at the capture, and no replay runs it again. What it hands on of the buffers
(themselves, or views) follows each micro-batch; everything else keeps the value that it had at the capture,
and lives as long as the graphs. So a value that was computed from a buffer's content would stay the
example's: it is an error. It is found by asking again while the buffers hold something else.
"""

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from megagraph import _C
from megagraph.reasons import EagerReason

__all__ = [
    *("CaptureError", "CapturedVariant", "EagerPart", "JoinedSites", "Outputs", "SiteSpec", "VariantSpec"),
    *("as_tuple", "ineligible_sites"),
]

# What a site hands out: one tensor or several.
Outputs = Tensor | Sequence[Tensor]
_Owned = TypeVar("_Owned", bound=Tensor)


class CaptureError(RuntimeError):
    """A site could not be captured; everything of the attempt has been undone.

    Its calls are counted under `reason`. `detail` names the pass, the last op and the user's line.
    """

    def __init__(self, *, site: str, index: int, reason: EagerReason, detail: str) -> None:
        super().__init__(f"{site}: {detail}")
        self.index, self.reason, self.detail = index, reason, detail


def _each_once(named: Iterable[tuple[str, _Owned]]) -> list[tuple[str, _Owned]]:
    found: dict[int, tuple[str, _Owned]] = {}
    for name, tensor in named:
        found.setdefault(id(tensor), (name, tensor))
    return [*found.values()]


def as_tuple(outputs: Outputs) -> tuple[Tensor, ...]:
    """The outputs of a call."""
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


class _OfModule:
    """Something that a module does. Holds it weakly: graphs must not keep a model alive."""

    def __init__(self, *, name: str, module: nn.Module, forward: Callable[..., Any]) -> None:
        self.name = name
        self._module = weakref.ref(module)
        self._forward = forward

    def within(self, name: str) -> str:
        """The name of something inside of it, without what its own name says in brackets."""
        own = self.name.partition(" (")[0]
        return f"{own}.{name}" if name else own

    @property
    def module(self) -> nn.Module:
        """The module. Raises `RuntimeError` once it is gone."""
        module = self._module()
        if module is None:
            raise RuntimeError(f"the module of {self.name} does not exist any more")
        return module

    @property
    def is_gone(self) -> bool:
        """Whether the module does not exist any more, or one of several."""
        return self._module() is None

    def call(self, given: Any, **arguments: Any) -> Any:
        """Runs it eagerly."""
        return self._forward(self.module, given, **arguments)


class EagerPart(_OfModule):
    """What stays eager before, between or after sites.

    Its `forward` maps the module, what came before (a site's output, or a tuple of them where it has several;
    at the beginning the bank's input) and the variant's arguments to hidden states of as many rows.
    """


class SiteSpec(_OfModule):
    """One call to graph, of a module or of parts of it.

    Its `forward` maps the module, the hidden states and the variant's arguments to hidden states of as many
    rows, or to any tensors where an `EagerPart` takes them; by default it is the module's own call.
    """

    def __init__(
        self,
        *,
        name: str,
        module: nn.Module,
        forward: Callable[..., Outputs] = lambda module, hidden, **arguments: module(hidden, **arguments),
        # Names of the module's children that own the parameters and buffers that the call uses, where it is
        # not all of the module. Hooks of the module itself, and of what is between, are bypassed then.
        parts: Sequence[str] = (),
        # Outputs, by index, that the EagerPart behind this site alone reads: their memory is used again by
        # what comes after. Whoever keeps one keeps the next site eager.
        transient: Collection[int] = (),
        # Further tensors that the call changes in place, of the module: metrics, say.
        state: Callable[[Any], Sequence[Tensor]] = lambda module: (),
    ) -> None:
        super().__init__(name=name, module=module, forward=forward)
        self._parts = tuple(parts)
        # Names of children between the module and its parts, whose own calls are bypassed as well.
        self.bypassed = sorted({part.rpartition(".")[0] for part in parts} - {""})
        self.transient = frozenset(transient)
        self.state = state
        self.calls = 1  # as many one of this site counts as
        # Does what its backward leaves to be done later, once: adds to `main_grad`, or leaves in `.grad`, the
        # gradients that are missing (csrc/bank/replay/finish.h, Note [Third pass]). And lets go of what these
        # were to be made of, if anything: a call has failed.
        self.finish: Callable[[Any], None] | None = None
        self.forget: Callable[[Any], None] = lambda module: None

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """The module, and those within that the call uses, by name."""
        for name in ("", *self.bypassed) if self._parts else ():
            yield name, self.module.get_submodule(name)
        for name, root in self.roots():
            yield from root.named_modules(prefix=name)

    def modules(self) -> list[nn.Module]:
        """The same without names."""
        return [module for _name, module in self.named_modules()]

    def roots(self) -> list[tuple[str, nn.Module]]:
        """Those of them whose parameters and buffers the call uses, with all that lies within, by name."""
        module = self.module
        return [(part, module.get_submodule(part)) for part in self._parts] or [("", module)]

    def owners(self) -> list[nn.Module]:
        """Those of them that own the parameters and buffers that the call uses."""
        return [module for _name, root in self.roots() for module in root.modules()]

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters that the call uses, each once, by name."""
        return _each_once(it for name, root in self.roots() for it in root.named_parameters(prefix=name))

    def parameters(self) -> list[nn.Parameter]:
        """The same without names."""
        return [param for _name, param in self.named_parameters()]

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """Those that get a gradient, by name."""
        return [(name, param) for name, param in self.named_parameters() if param.requires_grad]

    def named_buffers(self) -> list[tuple[str, Tensor]]:
        """The buffers that the call uses, each once, by name."""
        return _each_once(it for name, root in self.roots() for it in root.named_buffers(prefix=name))


class JoinedSites(SiteSpec):
    """Neighbouring sites that one graph runs in each pass; each hands hidden states to the next one."""

    def __init__(self, *, name: str, sites: Sequence[SiteSpec]) -> None:
        assert all(site.finish is None for site in sites)
        super().__init__(
            name=name,
            module=sites[0].module,
            transient=sites[-1].transient,
            state=lambda _module: [*dict.fromkeys(it for site in sites for it in site.state(site.module))],
        )
        self._sites = tuple(sites)
        self.calls = sum(site.calls for site in sites)

    @property
    def is_gone(self) -> bool:
        return any(site.is_gone for site in self._sites)

    def call(self, given: Any, **arguments: Any) -> Any:
        for site in self._sites:
            given = site.call(given, **arguments)
        return given

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        for site in self._sites:
            yield from ((site.within(name), module) for name, module in site.named_modules())

    def roots(self) -> list[tuple[str, nn.Module]]:
        return [(site.within(name), root) for site in self._sites for name, root in site.roots()]


@dataclass(frozen=True, kw_only=True)
class VariantSpec:
    """What a bank captures for: shapes, with or without a backward pass, the calls' arguments."""

    key: Any  # its place in the bank's table
    training: bool  # capture a backward pass too
    rows: int  # first dimension of the hidden states
    row_shape: tuple[int, ...]  # their other dimensions
    dtype: torch.dtype
    metadata: Mapping[str, _C.MetadataSpec] = field(default_factory=dict)  # named buffers
    # The source whose last entry is the pack's physical end: rows at or past it are zeroed in the bank's
    # input and in the gradient that it returns; -1 for none. And the buffer that ends with the same entry.
    end_source: int = -1
    end_buffer: str | None = None
    fewer_rows: bool = False  # the bank's input may have fewer than `rows`
    # Keyword arguments of every site's call, from the slot's metadata buffers: these themselves or views of
    # them, and constants. Asked at the capture and again where a call runs eager; never in a replay: Note
    # [Arguments of a variant].
    arguments: Callable[[Mapping[str, Tensor]], Mapping[str, Any]] = lambda buffers: {}
    name: str = ""  # for progress and profilers; by default the key's
    # Entered around the variant's warm-up and capture: the mode of its modules, say.
    context: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    def __str__(self) -> str:
        return self.name or str(self.key)


class CapturedVariant:
    """A variant in a bank: its buffers of metadata, and what its sites are called with over them."""

    def __init__(self, spec: VariantSpec, num_slots: int) -> None:
        self.spec = spec
        # Its metadata buffers, by slot and name; and the arguments over these at the capture, by slot.
        self.buffers = [{name: it.buffer() for name, it in spec.metadata.items()} for _ in range(num_slots)]
        with spec.context():
            self.given = [_arguments_of(spec, of_slot) for of_slot in self.buffers]
        # What the warm-up has found out of each site, by index.
        self.saves: dict[int, tuple[bool, list[bool]]] = {}  # whether backwards read its input; each output
        self.reads: dict[int, _C.ReadTrace] = {}  # what it reads that nobody has given it
        self.kept_bytes: dict[int, int] = {}  # from its forward to its backward
        # What each pass allocates, while the variant is captured; None where slots share nothing.
        self.memory: _C.SlotMemory | None = None
        self.sites: Collection[int] = ()  # that have graphs, by index
        self.num_graphs = 0  # forwards and backwards, in every slot
        # By slot, which memory of its pool was taken when the last pass of a site was captured.
        self.notes: list[dict[int, _C.PoolNote | None]] = [{} for _ in range(num_slots)]
        # Sites, by index, whose graphs no verification has compared, and why; None before any.
        self.not_compared: Mapping[int, str] | None = None

    def arguments(self, slot: int, sources: Sequence[Tensor]) -> Mapping[str, Any]:
        """The arguments of a call that runs eager, over its micro-batch's metadata in memory of their own."""
        spec, buffers = self.spec, self.buffers[slot]
        contents = {
            name: it.content(buffers[name], sources, spec.end_source) for name, it in spec.metadata.items()
        }
        return spec.arguments(contents)

    def staged(self, hidden: Tensor, sources: Sequence[Tensor]) -> Tensor:
        """The first input as staging would write it: in the captured rows, zero past the pack's end.

        Where only as many rows as were captured may be given, others stay as they are.
        """
        rows = max(self.spec.rows, hidden.shape[0]) if self.spec.fewer_rows else hidden.shape[0]
        if self.spec.end_source >= 0:
            offsets = sources[self.spec.end_source]
            out: Tensor = torch.ops.megagraph.zero_tail(hidden, offsets, rows)
            return out
        missing = rows - hidden.shape[0]
        return hidden if missing == 0 else torch.cat([hidden, hidden.new_zeros(missing, *hidden.shape[1:])])


def _arguments_of(variant: VariantSpec, buffers: Mapping[str, Tensor]) -> Mapping[str, Any]:
    """A variant's arguments over the metadata buffers of a slot, filled with their examples.

    Raises:
        ValueError: naming an argument that was computed from the content of a buffer: Note [Arguments of a
            variant].
    """
    arguments = variant.arguments(buffers)
    staged = [buffers[name] for name, spec in variant.metadata.items() if spec.is_staged]
    examples = [buffer.clone() for buffer in staged]
    for buffer in staged:
        buffer.fill_(not bool(buffer.any()))  # zeros, or ones in place of zeros: offsets stay offsets
    try:
        others = variant.arguments(buffers)
    except Exception as error:
        raise ValueError(
            f"variant {variant}: its arguments depend on the content of the metadata buffers, which no "
            f"replay would see; asked with other contents they raise {type(error).__name__}: {error}"
        ) from error
    finally:
        for buffer, example in zip(staged, examples, strict=True):
            buffer.copy_(example)
    if (path := _C.computed_argument(arguments, others, [*buffers.values()])) is not None:
        raise ValueError(
            f"variant {variant}: argument {path} is computed from the content of a metadata buffer and "
            "would keep the example's; hand the buffer on, or a view of it, and compute in the module"
        )
    return arguments


# -- what a graph would bypass or double: hooks and shared parameters ---------------------------------


def _foreign_hook(module: nn.Module | None, is_expected: Callable[[Any], bool], where: str) -> str | None:
    hook = _C.foreign_hook(module, is_expected)
    return None if hook is None else f"hook {getattr(hook, '__qualname__', hook)} of {where}"


def _carries_foreign_hook(
    site: SiteSpec,
    is_expected: Callable[[Callable[..., Any]], bool],
    accumulator_hooks: Callable[[nn.Parameter], int],
) -> str | None:
    for name, module in site.named_modules():
        if hook := _foreign_hook(module, is_expected, f"module {name or type(module).__name__}"):
            return hook
    for name, param in site.named_parameters():
        if param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None):
            return f"gradient hook of parameter {name}"
        found, expected = _C.count_accumulator_hooks(param), accumulator_hooks(param)
        if found > expected:
            return f"hook on the gradient accumulator of parameter {name}"
        if found < expected and param.requires_grad:  # a frozen one needs none
            return f"the gradient accumulator of parameter {name} has lost its hook, and eager its gradient"
    return None


def ineligible_sites(
    sites: Sequence[SiteSpec],
    *,
    other_params: Iterable[nn.Parameter] = (),
    is_expected_hook: Callable[[Callable[..., Any]], bool] = lambda hook: False,
    accumulator_hooks: Callable[[nn.Parameter], int] = lambda param: 0,
) -> Mapping[int, tuple[EagerReason, str]]:
    """Sites of one bank that must stay eager: index to the reason and what was found.

    `other_params` are used outside of these. The caller answers for expected hooks, and says how many it has
    on a parameter's gradient accumulator: moved to another device by `param.data = ...`, it loses them.
    """
    uses = Counter(id(param) for site in sites for param in site.parameters())
    uses.update({id(param) for param in other_params})
    found: dict[int, tuple[EagerReason, str]] = {}
    global_hook = _foreign_hook(None, is_expected_hook, "all modules")
    for index, site in enumerate(sites):
        shared = [name for name, param in site.named_parameters() if uses[id(param)] > 1]
        hook = global_hook or _carries_foreign_hook(site, is_expected_hook, accumulator_hooks)
        if shared:
            found[index] = EagerReason.SHARED_PARAMETER, f"parameter {shared[0]} is used elsewhere too"
        elif hook is not None:
            found[index] = EagerReason.FOREIGN_HOOK, hook
    return found
