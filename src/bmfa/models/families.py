"""The model families that `patch` and `reduce` support, one file for each library.

`bmfa.models.register_model` adds a class of another package at run time. To add a model class of a
library that is supported, add it to the sets of classes at the top of its module, for example `TOWERS`,
`ATTENTIONS` and `LAYOUTS` in `timm.py`.
"""

from torch import nn

from bmfa.models.hosts import generic, hiera, naflex, packed, padded, relative, timm, transformers
from bmfa.models.hosts.base import VisionTransformer
from bmfa.models.hosts.unsupported import raise_unsupported

__all__ = ["VisionTransformer", "check_module", "find_vision_transformer"]


def find_vision_transformer(model: nn.Module) -> VisionTransformer:
    """Find the one vision tower in a model.

    Args:
        model: A vision tower, or a model that contains one.

    Returns:
        The tower with its blocks, attention layers, patch projection and number of prefix tokens.

    Raises:
        TypeError: If `model` is not a module, or contains no tower of a supported class.
        ValueError: If it contains several towers.

    Example:
        >>> import bmfa
        >>> host = find_vision_transformer(bmfa.load_model("embedded").model)
        >>> len(host.attentions), host.prefix
        (8, 1)
    """
    check_module(model)
    # What a user registers comes before what is built in.
    hosts = generic.find_towers(model) or [
        *timm.find_towers(model),
        *naflex.find_towers(model),
        *hiera.find_towers(model),
        *relative.find_towers(model),
        *transformers.find_towers(model),
        *packed.find_towers(model),
        *padded.find_towers(model),
    ]
    if len(hosts) > 1:
        raise ValueError(
            f"{type(model).__name__} contains {len(hosts)} vision towers; pass one of them"
        )
    return hosts[0] if hosts else raise_unsupported(model)


def check_module(model: nn.Module) -> nn.Module:
    """Raise a TypeError unless the model is a module, and return it."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model is {type(model).__name__}; pass the torch.nn.Module (load_model(...).model)"
        )
    return model
