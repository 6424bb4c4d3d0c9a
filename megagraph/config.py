# SPDX-License-Identifier: Apache-2.0
"""Every option of the plugin, and the only reader of MEGAGRAPH_* variables.

Names are Megatron's where Megatron has one. Changes nothing by itself. No library reads the options: neither
msgspec nor pydantic takes `8,20` for a list, or names an option as it was spelled in a file or a variable.
"""

import dataclasses
import operator
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args

import torch  # noqa: F401  # whose libraries the core needs

from megagraph._C import Capacity
from megagraph.packs.ops import TailConvention

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["Capacity", "GraphConfig", "graph_modules"]

MODULES = ("attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba")
_PREFIX = "MEGAGRAPH_"
# Megatron's own names of scopes; `full` is an older spelling.
UPSTREAM_MODULES = ("full_iteration", "full", *MODULES)
_SHORT_FORM = ("cuda_graph_max_packed_seqs", "max_seqlen_per_dp_cp_rank", "max_seqlen")
# Variables with our prefix that are no options: a file of them, and what other parts of the project own.
_NOT_OPTIONS = (
    *("MEGAGRAPH_AUTO", "MEGAGRAPH_COMMIT", "MEGAGRAPH_CONFIG", "MEGAGRAPH_CUDA", "MEGAGRAPH_WERROR"),
    *("MEGAGRAPH_TEST_CORE", "MEGAGRAPH_TEST_BRIDGE", "MEGAGRAPH_TEST_HOSTS"),
)


def _parsed(name: str, parse: Callable[[Any], Any], value: Any) -> Any:
    """What a value says; an error begins with its name."""
    try:
        return parse(value)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name}: {error}") from error


def _choice(value: Any, names: Collection[str]) -> str:
    if value not in names:
        raise ValueError(f"expected one of {', '.join(names)}, got {value!r}")
    return str(value)


def _list(value: Any, parse: Callable[[Any], Any]) -> tuple[Any, ...]:
    """Of a list, of text with commas or blanks, or of one value alone."""
    if isinstance(value, str):
        return tuple(parse(part) for part in re.split(r"[,\s]+", value) if part)
    is_list = isinstance(value, Collection) and not isinstance(value, Mapping)
    return tuple(map(parse, value if is_list else [value]))


def _integer(value: Any, at_least: int = 1, at_most: int = 2**31 - 1) -> int:
    try:
        # index() takes every kind of integer, and neither 2.5 nor what only int() would take.
        number = int(value) if isinstance(value, str) else operator.index(value)
    except (TypeError, ValueError):
        number = None
    if number is None or isinstance(value, bool):
        raise ValueError(f"expected an integer, got {value!r}")
    if number < at_least:
        raise ValueError(f"expected at least {at_least}, got {number}")
    if number > at_most:  # by default what an int32 can hold, as a pack's offsets are
        raise ValueError(f"expected at most {at_most}, got {number}")
    return number


_ON, _OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def _boolean(value: Any) -> bool:
    if (switch := str(value).lower()) not in (*_ON, *_OFF):
        raise ValueError(f"expected true or false, got {value!r}")
    return switch in _ON


def _path(value: Any) -> Path | None:
    if not isinstance(value, str | os.PathLike) or "\0" in os.fspath(value):
        raise ValueError(f"expected a path, got {value!r}")
    return Path(os.path.expanduser(value)) if os.fspath(value) else None


def _capacity(value: Any) -> Capacity:
    """From a table, or from `tokens:num_seqs[:max_seqlen]`; by default `max_seqlen` is `tokens`."""
    if isinstance(value, Capacity):
        return value
    keys = ("tokens", "num_seqs", "max_seqlen")
    if isinstance(value, Mapping):
        if not {*keys[:2]} <= {*value} <= {*keys}:
            raise ValueError(f"expected a table of {', '.join(keys)}, got {dict(value)!r}")
        given = {"max_seqlen": value["tokens"], **value}
    else:
        parts = value.split(":") if isinstance(value, str) else []
        if len(parts) not in (2, 3):
            raise ValueError(f"expected tokens:num_seqs[:max_seqlen], got {value!r}")
        given = dict(zip(keys, [*parts, parts[0]], strict=False))
    return Capacity(**{key: _parsed(f"{value!r}: {key}", _integer, given[key]) for key in keys})


def _capacities(value: Any) -> tuple[Capacity, ...]:
    found = _list(value, _capacity)
    if twice := [it for index, it in enumerate(found) if it in found[:index]]:
        raise ValueError(f"expected each once, got {twice[0]} twice")
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [*map(_plain, value)]
    if isinstance(value, Capacity):
        return f"{value.tokens}:{value.num_seqs}:{value.max_seqlen}"
    return value if isinstance(value, int) else str(getattr(value, "value", value))


def _tail(value: Any) -> TailConvention:
    names = [convention.value for convention in TailConvention]
    return value if isinstance(value, TailConvention) else TailConvention(_choice(value, names))


def _verify(value: Any) -> str | int:
    if value in ("capture", "off"):
        return str(value)
    try:
        return _integer(value)
    except ValueError:
        raise ValueError(f"expected capture, off or an integer of at least 1, got {value!r}") from None


def _module(value: Any) -> str:
    name = getattr(value, "name", value)  # of Megatron's enum
    if name in MODULES:
        return str(name)
    known = "supported yet" if name in UPSTREAM_MODULES else f"one of {', '.join(UPSTREAM_MODULES)}"
    raise ValueError(f"expected none (whole layers), or of {', '.join(MODULES)}; {name!r} is not {known}")


def graph_modules(value: Any) -> tuple[str, ...]:
    """Scopes as Megatron spells them: none, `full`, one of them, text of several, a list of names or enums.

    Raises:
        ValueError: for one that is not supported, naming it.
    """
    if value is None or value in ("full", ["full"], ("full",)):
        return ()
    return tuple(dict.fromkeys(_list(value, _module)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraphConfig:
    """How to graph a model.

    A value may be spelled as in TOML or in a variable: one number for a list, text for a path or a tail,
    `"8192:20"` for a capacity. The attribute then has the type of its annotation. `cuda_graph_scope` is taken
    as `cuda_graph_modules`. docs/configuration.md says more.

    Args:
        mode: `graph`; `eager`: canonical packs without graphs, the reference of bits; `off`: no patches
        cuda_graph_max_packed_seqs: documents a pack may hold, empty ones included; one capacity each
        max_seqlen_per_dp_cp_rank: rows of a rank's share of a pack; goes with the key above
        max_seqlen: tokens of the longest document, padding included; by default a whole pack
        capacities: the capacities outright, in place of the three keys above
        cp_sizes: context-parallel sizes that packs may declare
        cuda_graph_warmup_steps: eager training steps before the capture; by default the model's own
        cuda_graph_max_states: states of the layers with graphs at once; the longest unused go
        cuda_graph_slots: micro-batches in flight at once; by default what the schedule needs
        cuda_graph_modules: parts of layers to graph; empty: as the model's config says, else whole layers
        cuda_graph_granularity: `layer`, or `chunk`: one graph for neighbouring whole layers
        verify: compare graphs with eager before use; a number: again, for one of so many; `off`
        tail: what canonical offsets say of the rows past a pack's end
        progress: a progress bar on standard error while capturing, on a terminal
        poison: fill freed slots with NaN, to find late readers; always on without a GPU
        report: a JSON file, written once an interval of the log, at the end and at `uninstall()`
        log_interval: training steps between two lines of the log; 0 for none
        cuda_graph_nvtx: names each replay (site, variant, slot) for torch's profiler and NVTX

    Raises:
        ValueError: for a value of the wrong kind or out of range, naming the option, what was expected
            and what came.
    """

    # With each type what makes its value of what Python, a TOML file or a variable says. A None that is the
    # default stays.
    mode: Annotated[str, partial(_choice, names=("graph", "eager", "off"))] = "graph"
    cuda_graph_max_packed_seqs: Annotated[tuple[int, ...], partial(_list, parse=_integer)] = ()
    max_seqlen_per_dp_cp_rank: Annotated[int | None, _integer] = None
    max_seqlen: Annotated[int | None, _integer] = None
    capacities: Annotated[tuple[Capacity, ...], _capacities] = ()
    cp_sizes: Annotated[tuple[int, ...], partial(_list, parse=_integer)] = ()
    cuda_graph_warmup_steps: Annotated[int | None, _integer] = None
    cuda_graph_max_states: Annotated[int, _integer] = 8
    cuda_graph_slots: Annotated[int | None, partial(_integer, at_most=64)] = None
    cuda_graph_modules: Annotated[tuple[str, ...], graph_modules] = ()
    cuda_graph_granularity: Annotated[str, partial(_choice, names=("layer", "chunk"))] = "layer"
    verify: Annotated[str | int, _verify] = "capture"
    tail: Annotated[TailConvention, _tail] = TailConvention.HIDDEN
    progress: Annotated[bool, _boolean] = True
    poison: Annotated[bool, _boolean] = False
    report: Annotated[Path | None, _path] = None
    log_interval: Annotated[int, partial(_integer, at_least=0)] = 100
    cuda_graph_nvtx: Annotated[bool, _boolean] = False
    cuda_graph_scope: dataclasses.InitVar[Any] = None  # an older name of the modules

    def __post_init__(self, cuda_graph_scope: Any) -> None:
        if cuda_graph_scope is not None:
            if self.cuda_graph_modules:
                raise ValueError("cuda_graph_modules and cuda_graph_scope: expected one of them, got both")
            modules = _parsed("cuda_graph_scope", graph_modules, cuda_graph_scope)
            object.__setattr__(self, "cuda_graph_modules", modules)
        for option in dataclasses.fields(self):
            (_type, parse), value = get_args(option.type), getattr(self, option.name)
            if value is not None or option.default is not None:
                parsed = _parsed(option.name, parse, value)
                object.__setattr__(self, option.name, parsed)  # as a frozen dataclass sets its own fields
        counts, tokens = self.cuda_graph_max_packed_seqs, self.max_seqlen_per_dp_cp_rank
        if self.capacities and (counts or tokens is not None or self.max_seqlen is not None):
            raise ValueError(
                "capacities: expected either this or cuda_graph_max_packed_seqs with "
                "max_seqlen_per_dp_cp_rank, got both"
            )
        if bool(counts) != (tokens is not None):
            raise ValueError(
                "cuda_graph_max_packed_seqs and max_seqlen_per_dp_cp_rank: expected both or neither, got "
                f"{counts or None} and {tokens}"
            )
        if self.max_seqlen is not None and not counts:
            raise ValueError("max_seqlen: expected together with cuda_graph_max_packed_seqs")
        if any(size & (size - 1) for size in self.cp_sizes) or [*self.cp_sizes] != sorted({*self.cp_sizes}):
            raise ValueError(f"cp_sizes: expected ascending powers of two, got {self.cp_sizes}")
        largest = max(self.cp_sizes, default=1)
        rows = max((capacity.tokens for capacity in self.capacities), default=tokens or 0)
        if rows * largest >= 2**31:
            raise ValueError(f"cp_sizes: expected packs of less than 2**31 tokens, got {largest} x {rows}")
        for capacity in self.all_capacities(largest):
            self.tail.check(capacity, largest)

    def all_capacities(self, cp_size: int = 1) -> tuple[Capacity, ...]:
        """The capacities of packs that ranks share, smallest first; empty if they are to be learned."""
        tokens, counts = self.max_seqlen_per_dp_cp_rank, sorted(set(self.cuda_graph_max_packed_seqs))
        if tokens is None:
            return tuple(sorted(capacity.shared_by(cp_size) for capacity in self.capacities))
        longest = tokens * cp_size if self.max_seqlen is None else self.max_seqlen
        return tuple(Capacity(tokens=tokens, num_seqs=count, max_seqlen=longest) for count in counts)

    def spelled(self) -> dict[str, Any]:
        """The options that are set to something, as plain values."""
        return {name: _plain(value) for name, value in vars(self).items() if value not in (None, ())}

    @classmethod
    def from_mapping(
        cls,
        values: Mapping[str, Any],
        *,
        source: str,
        base: "GraphConfig | None" = None,
        spell: Callable[[str], str] = str,
    ) -> "GraphConfig":
        """Builds a config from named values, as TOML or the environment spell them; they go before `base`.

        Errors name the source, and options as it spells them.

        Raises:
            ValueError: for an unknown key or a value of the wrong kind, naming both and the source.
        """
        spelled = {name: spell(name) for name in values}
        known = sorted(field.name for field in dataclasses.fields(cls))
        if unknown := [spelled[key] for key in values if key not in (*known, "cuda_graph_scope")]:
            choices = ", ".join(map(spell, known))
            raise ValueError(f"{source}: unknown option {unknown[0]!r}; choose from {choices}")
        # One way of naming capacities takes the place of the other.
        if "capacities" in values:
            values = {**dict.fromkeys(_SHORT_FORM), "cuda_graph_max_packed_seqs": (), **values}
        elif any(key in values for key in _SHORT_FORM):
            values = {"capacities": (), **values}
        if "cuda_graph_scope" in values:
            values = {"cuda_graph_modules": (), **values}
        try:
            return dataclasses.replace(cls() if base is None else base, **values)
        except ValueError as error:
            names, colon, said = str(error).partition(": ")
            names = re.sub(r"\w+", lambda name: spelled.get(name[0], name[0]), names)
            raise ValueError(f"{source}: {names}{colon}{said}") from error

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str]) -> "GraphConfig":
        """Reads the table `[megagraph]` of a TOML file; other tables are left alone."""
        try:
            document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:  # of the file, of TOML or UTF-8
            why = getattr(error, "strerror", None) or error
            raise ValueError(f"{path}: expected TOML, {why}") from error
        if not isinstance(document.get("megagraph"), dict):
            raise ValueError(f"{path}: expected a table [megagraph], found {', '.join(document) or 'none'}")
        return cls.from_mapping(document["megagraph"], source=str(path))

    @classmethod
    def from_env(
        cls, environ: Mapping[str, str] = os.environ, base: "GraphConfig | None" = None
    ) -> "GraphConfig":
        """Reads MEGAGRAPH_<OPTION IN CAPITALS>; what is set there, and not empty, goes before `base`.

        Without a base, MEGAGRAPH_CONFIG may name its file.
        """
        if base is None and (path := environ.get(f"{_PREFIX}CONFIG")):
            base = _parsed(f"environment: {_PREFIX}CONFIG", cls.from_toml, path)
        values = {
            name.removeprefix(_PREFIX).lower(): value
            for name, value in environ.items()
            if name.startswith(_PREFIX) and name not in _NOT_OPTIONS and value
        }
        spell: Callable[[str], str] = lambda name: _PREFIX + name.upper()  # noqa: E731
        return cls.from_mapping(values, source="environment", base=base, spell=spell)
