"""Attention masks of hosts that hide padding, as masks of the spatial keys that exist."""

from typing import Any

import torch
from torch import Tensor

from bmfa.checks import is_compiling

# Hosts hide a key by adding -inf or the smallest number of the dtype, -65504 in float16, to its score.
_HIDDEN_SCORE = -1e4


def valid_keys(mask: Tensor, prefix: int, suffix: int = 0) -> Tensor | None:
    """Convert a padding mask to the mask of spatial keys that exist.

    Args:
        mask: Boolean or additive mask that broadcasts to (B, heads, Q, prefix + N + suffix).
        prefix: The number of tokens before the grid.
        suffix: The number of tokens behind the grid.

    Returns:
        (B or 1, N) torch.bool, or None if all keys exist. While torch.compile traces, which cannot read
        the values of the mask, the mask is returned in both cases.

    Raises:
        ValueError: If the mask is not a padding mask of spatial keys.
    """
    if is_compiling():
        valid: Tensor = torch.ops.bmfa.valid_keys(mask, prefix, suffix)
        return valid
    valid = _checked_keys(mask, prefix, suffix)
    return None if bool(valid.all()) else valid


def _checked_keys(mask: Tensor, prefix: int, suffix: int) -> Tensor:
    """Return the (B or 1, N) mask of spatial keys after checking the values of the mask."""
    mask = mask[(None,) * (4 - mask.dim())]  # (B or 1, heads or 1, Q or 1, tokens)
    visible = mask if mask.dtype == torch.bool else mask == 0
    hidden = ~visible if mask.dtype == torch.bool else mask < _HIDDEN_SCORE
    same = (visible == visible[:, :1, :1]).all()
    end = mask.shape[-1] - suffix
    special = torch.cat((visible[..., :prefix], visible[..., end:]), -1)
    if not (same and (visible | hidden).all() and special.all()):
        raise ValueError(
            f"an attention mask of shape {tuple(mask.shape)} that adds a bias, differs between queries "
            "or heads, or hides tokens that are not on the grid is not supported; pass a padding mask, "
            "or call bmfa.unpatch(model)"
        )
    return visible[:, 0, 0, prefix:end]


def _fake(mask: Tensor, prefix: int, suffix: int) -> Tensor:
    batch = mask.shape[0] if mask.dim() == 4 else 1
    return mask.new_empty((batch, mask.shape[-1] - prefix - suffix), dtype=torch.bool)


def _run(mask: Tensor, prefix: int, suffix: int) -> Tensor:
    return _checked_keys(mask, prefix, suffix).clone()  # an operator returns no view of its input


# A node of a compiled graph that reads the mask when the graph runs, which a CUDA graph cannot contain.
_library: Any = torch.library.Library("bmfa", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "valid_keys(Tensor mask, int prefix, int suffix) -> Tensor",
    tags=tuple(filter(None, [getattr(torch.Tag, "cudagraph_unsafe", None)])),  # torch 2.8 and newer
)
_opaque = torch._disable_dynamo(_run)  # type: ignore[attr-defined]
_library.impl("valid_keys", _opaque, "CompositeExplicitAutograd")
torch.library.register_fake("bmfa::valid_keys", _fake, lib=_library)
