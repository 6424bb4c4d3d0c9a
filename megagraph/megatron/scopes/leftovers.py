# SPDX-License-Identifier: Apache-2.0
"""What layers keep of a call beyond its end, and sets anew in the next one: tensors with their history.

Where a step raised, its backward will not come, and such a tensor would keep a slot until then.
"""

from collections.abc import Iterable

from torch import Tensor, nn

from megagraph.megatron.scopes.moe import experts_of

__all__ = ["drop_history", "forget_calls"]

_OF_LAYERS = "mlp_norm_manager"  # keeps hidden states from the norm of an MLP to its end; since 0.19


def forget_calls(layers: Iterable[nn.Module]) -> None:
    """Drops it. Call it where no backward is to come."""
    for layer in layers:
        if vars(layer).get(_OF_LAYERS) is not None:
            setattr(layer, _OF_LAYERS, None)
        dispatcher = getattr(experts_of(layer), "token_dispatcher", None)
        if dispatcher is not None:
            drop_history(dispatcher)


def drop_history(owner: object) -> None:
    """Sets attributes that are tensors with a history to None."""
    attributes = vars(owner)
    for name, value in attributes.items():
        if isinstance(value, Tensor) and value.grad_fn is not None:
            attributes[name] = None
