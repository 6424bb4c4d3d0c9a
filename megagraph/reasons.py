# SPDX-License-Identifier: Apache-2.0
"""Why a call runs eager: the closed list of reasons, what to do about each, and a run in one line."""

import enum
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["EagerReason", "Why", "remedy_of", "verdict"]


class EagerReason(enum.IntEnum):
    """Why a call ran eager. Closed: the C++ core lists the same names in the same order.

    With each the remedy, as its section of docs/reasons.md begins.
    """

    remedy: str

    def __new__(cls, remedy: str) -> "EagerReason":
        number = len(cls.__members__)
        reason = int.__new__(cls, number)
        reason._value_, reason.remedy = number, remedy
        return reason

    DISABLED = "you asked for it"
    WARMING_UP = "nothing to do in the first steps"
    NO_PACK_METADATA = "pass the pack"
    TOO_MANY_SEQUENCES = "raise cuda_graph_max_packed_seqs (num_seqs in capacities)"
    TOO_MANY_TOKENS = "raise max_seqlen_per_dp_cp_rank (tokens in capacities)"
    SEQUENCE_TOO_LONG = "drop max_seqlen, or raise it"
    CP_SIZE_NOT_CAPTURED = "set cp_sizes, and take groups from megagraph.context_groups(cp_sizes)"
    SIGNATURE_CHANGED = "give every micro-batch the same dtype and form of pack, and pass attention_mask=None"
    NO_FREE_SLOT = (
        "run the backward first, raise cuda_graph_slots, or keep a clone instead of a tensor of ours"
    )
    SCOPE_UNSUPPORTED = "change what the log and the report name"
    RECOMPUTING = "turn full recompute off, or keep the model eager"
    CAPTURE_FAILED = "make the line capturable that the row stays eager names"
    ADDRESS_MOVED = "put suspend() and resume() around the moves"
    GROUP_DISAGREED = "look at the other ranks' reasons"
    NESTING = "call each layer once, in order"
    NUMERICS_CHANGED = "nothing to do if it is rare"
    PARAMETERS_CHANGED = "nothing to do if it is rare"
    FOREIGN_HOOK = "remove the hook, or accept that layer eager"
    SHARED_PARAMETER = "accept that layer eager"
    RNG_NOT_GRAPH_SAFE = "let Megatron's tracker keep generators (use_cudagraphable_rng), or set dropout to 0"
    SUSPENDED = "call resume() when the phase is over"
    RELEASED = "nothing to do"
    STATE_CHANGED = "nothing to do if it is rare"
    VERIFY_FAILED = "look for state that no guard can see, and please report it"
    EXPERT_OVERLAP = "ask for plans inside of Megatron's schedule, and do not override the model's forward"


# With what is the matter, in words.
Why = tuple[EagerReason, str]

# What packs had most of, by the reason that it was too much for: key of the report, and in words.
_NEEDED = {
    "TOO_MANY_SEQUENCES": ("num_seqs", "packs held up to {}"),
    "TOO_MANY_TOKENS": ("tokens", "packs had up to {} tokens"),
    "SEQUENCE_TOO_LONG": ("max_seqlen", "documents had up to {} tokens"),
}


def verdict(reports: Sequence[Mapping[str, Any]]) -> str:
    """The line, of all models of a run together."""
    calls, replays = (sum(report[key] for report in reports) for key in ("calls", "replays"))
    eager = sum((Counter[str](report["eager"]) for report in reports), Counter[str]())
    if not calls:
        return (
            "nothing replayed: no GPTModel or HybridModel ran a forward through get_forward_backward_func()"
        )
    begins = f"{_percent(replays, calls)} of layer calls replayed" if replays else "nothing replayed"
    # A warm-up is the rest of every run: it counts if there is nothing else.
    others = Counter({name: count for name, count in eager.items() if name != EagerReason.WARMING_UP.name})
    if not others and replays:
        return f"{begins}; the rest warmed up" if eager else begins
    ((reason, count),) = (others or eager).most_common(1)
    what = f"{_percent(count, calls)} eager, {reason}: {remedy_of(reason, reports)}"
    return f"{begins}{'; ' if replays else ': '}{what}"


def _percent(part: int, whole: int) -> str:
    """Rounded down: all is said of all alone."""
    return f"{100 * part // whole} %" if 100 * part >= whole else "under 1 %"


def remedy_of(reason: str, reports: Sequence[Mapping[str, Any]]) -> str:
    """What to do, with the numbers that would have done, or what was found."""
    remedy = EagerReason[reason].remedy if reason in EagerReason.__members__ else "see docs/reasons.md"
    models = [report for report in reports if reason in report["eager"]]
    if reason in _NEEDED:
        key, words = _NEEDED[reason]
        most = max((needed.get(key, 0) for it in models if (needed := it.get("most_needed"))), default=0)
        if not most:
            return remedy
        enough = 1 << (most - 1).bit_length() if key == "num_seqs" else most
        return f"{remedy} to {enough} ({words.format(most)})"
    others = [f"({name})" for name in EagerReason.__members__ if name != reason]  # explain themselves
    sentences = (sentence for it in models for sentence in it.get("failures", ()))
    found = next((it for it in sentences if not any(name in it for name in others)), None)
    return f"{remedy} ({found})" if found else remedy
