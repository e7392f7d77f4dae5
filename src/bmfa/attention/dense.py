"""Dense attention where "auto" finds it faster: a call is checked once, for all that are like it.

The checks of a call take the host longer than small pictures take a GPU. They look at shapes, dtypes,
devices and options alone, so that what was found of one call holds for all calls with the same.
"""

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from bmfa.attention import dispatch as tiled
from bmfa.attention.inputs import check_finite_scores
from bmfa.attention.result import Screened, Stats, Trees
from bmfa.attention.tiling import Budget, TiledAttention, Tiling
from bmfa.checks import has_values
from bmfa.trees.tree import Tree

# The dense paths by their speed on Hopper and later; torch takes the first that serves a call.
BEST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
# Operations of a single call, unless it is recorded, from which a third of its time is worth that.
WORTH_NAMING = 3e10
_MOST_KNOWN = 1024
_known: dict[Hashable, "DenseCall"] = {}


class DenseCall:
    """Everything about a call of dense attention but its tensors."""

    def __init__(
        self,
        tensors: tuple[Tensor, Tensor, Tensor],  # q, k, v of a first call
        mask: Tensor | None,
        tiling: Tiling,
        question: Budget,
        why: str,
        prefix: int,
        scale: float,
        tau: float,
        valid: Callable[[], Tensor]
        | None = None,  # (B or 1, 1, N) keys that exist, in raster order
    ) -> None:
        q = tensors[0]
        self.tiling, self.rule = tiling, str(question)
        self.prefix, self.scale, self.tau = prefix, scale, tau
        self.factor = scale / tau
        self.named = BEST if mask is None and names_cudnn(*tensors) else None
        if q.numel() == 0:  # the fused kernels on CUDA return no tensor for an empty batch
            self.named = [SDPBackend.MATH]
        self.watched = not q.is_cuda and has_values(q)
        marks = (q.shape[0], q.shape[1], tiling.groups, tiling.tiles)
        self.trees = _AllExpanded(partial(self._tree, marks, q.device, valid))
        self.stats = Stats("dense", "dense", self.rule, why, self.trees)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Screened:
        """Attend; a mask is as scaled_dot_product_attention takes it."""
        if self.named is not None:
            with sdpa_kernel(self.named, set_priority=True):
                output = scaled_dot_product_attention(q, k, v, mask, scale=self.factor)
        else:
            output = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.factor)
        if self.watched:
            check_finite_scores(q, k, self.scale)
        return Screened(output, self.trees, self.stats)

    def _tree(
        self, shape: tuple[int, ...], device: torch.device, valid: Callable[[], Tensor] | None
    ) -> Tree:
        """Every tile expanded, for every query: in any order of the tokens the same."""
        marks = torch.ones(shape, dtype=torch.bool, device=device)
        whole = TiledAttention(marks, marks.sum(-1, dtype=torch.int32), marks)
        exists = None if valid is None else valid()
        return tiled.tree_of(whole, self.tiling, self.prefix, self.tau, self.rule, "raster", exists)


class _AllExpanded(Trees):
    """Shared by all calls that are alike, and hence made again whenever they are asked for."""

    @property
    def tree(self) -> Tree:
        """The trees."""
        return self._make()


def names_cudnn(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether dense attention is to be by cuDNN, the fastest on Hopper and later, and torch takes
    another unless it is told to. Naming it takes the host 0.03 ms."""
    if not q.is_cuda or torch.cuda.get_device_capability(q.device) < (9, 0):
        return False
    if torch.compiler.is_compiling():  # the compiler has a choice of its own
        return False
    if not tiled.recorded(q) and tiled.operations(q) < WORTH_NAMING:
        return False
    own_choice: int = torch._fused_sdp_choice(q, k, v)
    return own_choice != SDPBackend.CUDNN_ATTENTION.value


def likeness(q: Any, k: Any, v: Any, *options: Any) -> Hashable | None:
    """Equal for calls that are checked and served alike; None where a call is to be checked."""
    for tensor in (q, k, v):
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
            return None
    if not has_values(q):
        return None
    device = q.device
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
        if not q.dtype == k.dtype == v.dtype == dtype:
            return None
    return (
        q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, device, k.device, v.device,
        tiled.recorded(q), options, tuple(map(type, options)),
    )  # fmt: skip


def known(like: Hashable) -> DenseCall | None:
    """What serves a call like this, if one was served before."""
    try:
        return _known.get(like)
    except TypeError:  # an option without a hash is none that the checks accept
        return None


def remember(like: Hashable, call: DenseCall) -> None:
    """Calls like this one need no checks from now on."""
    if len(_known) >= _MOST_KNOWN:
        _known.clear()
    _known[like] = call
