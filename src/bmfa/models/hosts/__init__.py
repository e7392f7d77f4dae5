"""The model families that `patch` and `reduce` support, one file for each library.

`register_host` adds a class of another package at run time. To add a library, write a module with a
subclass of `AttentionReplacement` that passes q, k, v of its attention layers to a function, and
with `find_towers(model)`, which lists the towers it knows as `Host`; then call it in `find_host`.
To add a model class of a library that is supported, add it to the sets of classes at the top of its
module, for example `TOWERS`, `ATTENTIONS` and `LAYOUTS` in `timm.py`.
"""

from torch import nn

from bmfa.models.hosts import generic, hiera, naflex, packed, padded, relative, timm, transformers
from bmfa.models.hosts.base import Host
from bmfa.models.hosts.generic import register_host
from bmfa.models.hosts.unsupported import raise_unsupported

__all__ = ["Host", "check_module", "find_host", "register_host"]


def find_host(model: nn.Module) -> Host:
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
        >>> host = find_host(bmfa.load_model("embedded").model)
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
