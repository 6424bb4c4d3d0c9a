# SPDX-License-Identifier: Apache-2.0
"""Which releases of megatron-core are supported, and whether the installed one fits."""

import importlib

from megagraph.log import log
from megagraph.megatron.seams.experts import EXPERT_SEAMS
from megagraph.megatron.seams.models import (
    MIXER_DOCUMENTS,
    MODEL_SEAMS,
    engine_seams,
    hybrid_seams,
    packs_say_documents,
)

__all__ = ["SUPPORTED", "check_core"]

# Releases that the tests run against. Others are tried, with a warning.
SUPPORTED = ("0.16.1", "0.19.2")


def check_core() -> str:
    """Checks every seam of the installed megatron-core.

    Returns:
        Its version.

    Raises:
        RuntimeError: where megatron-core is absent, or a seam does not fit, naming each.
    """
    try:
        version = str(importlib.import_module("megatron.core").__version__)
    except ImportError as error:
        raise RuntimeError(
            f"megagraph.install() needs megatron-core ({' or '.join(SUPPORTED)}), and it cannot be "
            f"imported: {error}"
        ) from error
    hybrid = hybrid_seams() or ()
    documents = (MIXER_DOCUMENTS,) if hybrid and not packs_say_documents() else ()
    seams = (*MODEL_SEAMS, *EXPERT_SEAMS, *engine_seams(), *hybrid, *documents)
    problems = [problem for seam in seams if (problem := seam.problem()) is not None]
    if problems:
        raise RuntimeError(
            f"megatron-core {version} does not fit (supported: {', '.join(SUPPORTED)}): "
            + "; ".join(problems)
        )
    if version.split("+")[0] not in SUPPORTED:  # without the commit that core may append
        log.warning("megatron-core %s is untested (tested: %s); its seams fit", version, ", ".join(SUPPORTED))
    return version
