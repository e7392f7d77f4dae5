"""The result of `screened_attention`: the output, and statistics and trees on demand."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from html import escape
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bmfa.attention.call import Call, Form
from bmfa.attention.choice import excess, relative_error, upper_bound
from bmfa.attention.tiling import TiledAttention, slots_with_tokens
from bmfa.attention.trees import tile_tree
from bmfa.trees.tree import Tree

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ErrorEstimate:
    """Relative L2 error of the output of a call, measured at probe queries.

    A probe is a query that is also attended exactly. No probe takes part in the choices that determine
    its own output, unless a missed target made the call choose again (`met`).

    Attributes:
        target: The `error` of the call, or None if it was given `leaves`.
        estimate: sqrt(sum |output - exact|^2 / sum |exact|^2), estimated for all queries of the call.
        p95: 95th percentile of |output - exact| / |exact|, estimated for all queries of the call.
        uncertainty: Standard error of `estimate`; infinity with the probes of a single group.
        upper: Upper bound on the error for a confidence of 95 %, `estimate * exp(2.33 * uncertainty /
            estimate)`. It held in 97 to 100 % of calls on real q, k, v, and in 87 to 94 % of calls made
            to defeat the probes: where a few queries have most of the error and the probes miss them,
            it is too small.
        probes: Number of probes, all images and heads together. 0 for dense attention.
        met: True if `estimate` is at most the target; None without a target. Triton warns if it is not;
            torch operations and native kernels compute a call again if it is not, or if `upper` is above
            1.3 times the target: once with lower thresholds, and then exactly.

    Example:
        >>> import torch, bmfa
        >>> q, k, v = torch.randn(3, 1, 2, 4096, 32, generator=torch.Generator().manual_seed(0))
        >>> stats = bmfa.screened_attention(0.3 * q, k, v, grid=(64, 64), allow_dense=False).stats
        >>> stats.error.target, stats.error.probes, stats.error.met
        (0.03, 128, True)
    """

    target: float | None
    estimate: float
    p95: float
    uncertainty: float
    probes: int

    @property
    def met(self) -> bool | None:
        """True if `estimate` is at most the target; None without a target."""
        return None if self.target is None else self.estimate <= self.target

    @property
    def upper(self) -> float:
        """Upper bound on the error for a confidence of 95 %; see the attribute."""
        return upper_bound(self.estimate, self.uncertainty)

    @classmethod
    def from_probes(
        cls, probes: Tensor, target: float | None, probes_per_group: int = 1
    ) -> "ErrorEstimate":
        """Estimate the error from `TiledAttention.probes`. Waits for the device.

        Args:
            probes: (B, H, P, 3), as in `TiledAttention`. Probes of weight 0 do not count.
            target: Target for the error, or None.
            probes_per_group: Number of probes of a group, which are consecutive.
        """
        groups = _in_groups(probes, probes_per_group)
        values = groups[groups[:, 0, 2] > 0].reshape(-1, 3)
        estimate, uncertainty = relative_error(groups)
        if estimate == 0.0:
            return cls(target, 0.0, 0.0, 0.0, len(values))
        error, norm, weight = values.T
        with np.errstate(divide="ignore"):  # infinity where the exact output is 0
            relative = np.sqrt(np.divide(error, norm, out=np.zeros_like(error), where=error > 0))
        order = relative.argsort()
        share = weight[order].cumsum() / weight.sum()
        p95 = relative[order[min(int((share < 0.95).sum()), len(values) - 1)]]
        return cls(target, estimate, float(p95), uncertainty, len(values))


def excess_of_probes(probes: Tensor, target: float, probes_per_group: int) -> float:
    """Return `choice.excess` for `TiledAttention.probes`. Waits for the device."""
    return excess(*relative_error(_in_groups(probes, probes_per_group)), target)


def _in_groups(probes: Tensor, probes_per_group: int) -> Array:
    """(groups, probes_per_group, 3) float64 probes in NumPy: a check of every call must be cheap."""
    return probes.detach().cpu().numpy().reshape(-1, probes_per_group, 3).astype(np.float64)


# What has warned: patched models by their name, and other calls.
_warned: set[Call | tuple[str, ...]] = set()


def warn_if_missed(probes: Tensor, call: Call) -> None:
    """Warn if the error that the probes measure misses its target, as `ErrorEstimate.met` has it.

    Once for a patched model or calls of one kind.
    """
    estimate = relative_error(_in_groups(probes, call.tiling.probes_per_group))[0]
    kind = call.caller[1:] or call
    assert call.error is not None
    if estimate <= call.error or kind in _warned:  # NaN meets no target
        return
    _warned.add(kind)
    where = f" in {' of '.join(call.caller)}" if call.caller else ""
    warnings.warn(
        f"screened_attention measured an output error of {estimate:.3g}{where}, and the target is "
        f"{call.error:.3g}; for these inputs pass a smaller error=, or leaves=1.0 for exact attention "
        "(stats.error has that of every call, bmfa.summary(model) of every layer)",
        UserWarning,
        stacklevel=2,
    )


# The measurement on its way from a CUDA device to the host, if there is one: an event of the copy, the
# probes in pinned memory, and their call.
_on_its_way: list[tuple[Any, Tensor, Call]] = []


def check_later(probes: Tensor, call: Call) -> None:
    """Check the error of a call on CUDA at a later call, so that nothing waits for the device.

    One measurement at a time is on its way to the host. Calls in between, calls that are recorded in a
    graph, and calls of a kind that has warned before are not checked.
    """
    with torch.cuda.device(probes.device):
        if torch.cuda.is_current_stream_capturing():
            return
        if _on_its_way:
            copied, measured, earlier = _on_its_way[0]
            if not copied.query():
                return
            _on_its_way.clear()
            warn_if_missed(measured, earlier)
        if (call.caller[1:] or call) not in _warned:
            measured = torch.empty(probes.shape, dtype=probes.dtype, pin_memory=True)
            measured.copy_(probes, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(torch.cuda.current_stream(probes.device))
            _on_its_way.append((copied, measured, call))


@dataclass(frozen=True, repr=False, eq=False)
class Stats:
    """What ran, why, and what is known of its error.

    `repr`, and the table in a notebook, show `density`, `error.estimate` and `error.upper`, and so wait
    for the device.

    Attributes:
        backend: `"native"`, `"eager"`, `"triton"` or `"dense"` (SDPA).
        form: `"tiled"`, `"tree"` or `"dense"`.
        reason: Why this backend ran.
        call: Description of the call: grid, prefix, scale and the setting.
        valid: (B or 1, N) bool, the spatial tokens that exist, or None.

    Example:
        >>> import torch, bmfa
        >>> q, k, v = torch.randn(3, 1, 2, 196, 16, generator=torch.Generator().manual_seed(0))
        >>> stats = bmfa.screened_attention(q, k, v, grid=(14, 14)).stats
        >>> stats.form, stats.reason
        ('dense', 'auto: dense attention is as fast below 2304 tokens, and there are 196')
    """

    backend: str
    form: Form
    reason: str
    call: Call
    valid: Tensor | None = None
    tiles: TiledAttention | None = None  # of the form "tiled"
    make_tree: Callable[[], Tree] | None = None  # of the form "tree"

    def _shown(self) -> dict[str, str]:
        """Return what `repr` shows, as text. Waits for the device, as `density` and `error` do."""
        shown = {"backend": self.backend, "form": self.form, "setting": self.setting}
        if self.measure_error is not None:
            error = self.measure_error()  # without the warning of `error`
            shown["density"] = f"{self.density:.3g}"
            shown["error"] = f"{error.estimate:.3g}, at most {error.upper:.3g}"
        return shown | {"reason": self.reason}

    def __repr__(self) -> str:
        return f"Stats({', '.join(f'{name}={text!r}' for name, text in self._shown().items())})"

    def _repr_html_(self) -> str:
        rows = (
            f"<tr><th>{n}</th><td>{escape(text)}</td></tr>" for n, text in self._shown().items()
        )
        return f"<table>{''.join(rows)}</table>"

    @property
    def setting(self) -> str:
        """The rule or the budget, as text."""
        return self.call.setting

    @property
    def expanded_count(self) -> Tensor | None:
        """(B, H, groups) int32 expanded tiles of each group of queries, or None."""
        return None if self.tiles is None else self.tiles.expanded_count

    @property
    def measure_error(self) -> Callable[[], ErrorEstimate] | None:
        """A function that returns `error` without its warning, or None."""
        if self.form == "dense":
            return partial(ErrorEstimate, self.call.error, 0.0, 0.0, 0.0, 0)
        if self.tiles is None:
            return None
        count = self.call.tiling.probes_per_group
        return partial(ErrorEstimate.from_probes, self.tiles.probes, self.call.error, count)

    @cached_property
    def error(self) -> ErrorEstimate | None:
        """Measured relative L2 error of the output. Waits for the device.

        0 for dense attention, None for a tree for each query. If the target is missed, reading this
        property warns, once for a patched model or calls of one kind in a process. Calls by Triton warn
        of an earlier one; other backends compute a call again that misses its target.
        """
        if self.measure_error is None:
            return None
        measured = self.measure_error()
        if measured.met is False and self.tiles is not None:
            warn_if_missed(self.tiles.probes, self.call)
        return measured

    @property
    def density(self) -> float | None:
        """Mean share of the tiles that a group of queries expands. Waits for the device.

        The mean is over images, heads and groups. Tiles without a valid token and groups without a
        valid query do not count. 1.0 for dense attention, None for a tree for each query.
        """
        if self.tiles is None:
            return 1.0 if self.form == "dense" else None
        counts = self.tiles.expanded_count.double()
        if self.valid is None:
            return float(counts.mean()) / self.call.tiling.tiles
        tiles, groups = (sizes > 0 for sizes in self._sizes(counts.device))
        shares = counts / tiles.sum(-1).view(-1, 1, 1)
        return float(shares[groups.unsqueeze(1).expand_as(shares)].mean())

    @property
    def leaf_ratio(self) -> float:
        """Mean number of leaves as a fraction of the valid tokens. Waits for the device.

        The mean is over images, heads and queries; in the form "tiled", invalid queries do not
        count. Prefix tokens are not leaves. 1.0 for dense attention.
        """
        if self.make_tree is not None:
            return float(self.make_tree().leaf_ratio.mean())
        if self.tiles is None:
            return 1.0
        expanded = self.tiles.expanded
        tiles, groups = (sizes.double().unsqueeze(1) for sizes in self._sizes(expanded.device))
        sizes = tiles.unsqueeze(1)  # (B or 1, 1, 1, T)
        leaves = torch.where(expanded, sizes, sizes.clamp(max=1)).sum(-1)  # (B, H, R)
        ratios = leaves / sizes.sum(-1)
        queries = groups.expand_as(ratios)
        # Queries before the grid see every token.
        before = self.call.query_prefix * ratios.shape[0] * ratios.shape[1]
        return float(((ratios * queries).sum() + before) / (queries.sum() + before))

    def _sizes(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """(B or 1, T) valid tokens of each tile, and (B or 1, R) valid queries of each group."""
        tiling = self.call.tiling
        queries_valid = self.valid if tiling.query_grid is None else None
        tiles = slots_with_tokens(tiling, self.valid, device).sum(-1)
        return tiles, slots_with_tokens(tiling.queries, queries_valid, device).sum(-1)


class Screened:
    """The result of `screened_attention`. It unpacks as `output, stats`.

    Attributes:
        output: (B, H, Q, e) output in the dtype of q.
        stats: What ran, why, and what is known of its error.

    Example:
        >>> import torch, bmfa
        >>> q, k, v = torch.randn(3, 1, 2, 64, 16, generator=torch.Generator().manual_seed(0))
        >>> output, stats = bmfa.screened_attention(q, k, v, grid=(8, 8), rule="gamma:0.1")
        >>> output.shape, stats.form
        (torch.Size([1, 2, 64, 16]), 'tree')
    """

    def __init__(self, output: Tensor, stats: Stats) -> None:
        self.output = output
        self.stats = stats

    @cached_property
    def tree(self) -> Tree:
        """The partition of the spatial keys of every image, head and query, (B, H, Q).

        Trees are built when this property is first read, and take much more memory than the output:
        a boolean for every query and block. In the form "tiled" a leaf is a token of an expanded tile
        or an unexpanded tile. The attention inside an unexpanded tile is not uniform, so `tree.error`
        and `tree.output_bound` raise a ValueError; `stats.error` has the error of the output, and
        `bmfa.certify` a bound on it.

        Returns:
            A `Tree` of shape (B, H, Q).

        Example:
            >>> import torch, bmfa
            >>> q, k, v = torch.randn(3, 1, 2, 64, 16, generator=torch.Generator().manual_seed(0))
            >>> bmfa.screened_attention(q, k, v, grid=(8, 8), rule="fixed-depth:1").tree
            Tree(128 trees (1, 2, 64) on 8x8, fixed-depth:1: 4 leaves, 6.25 % of tokens)
        """
        stats = self.stats
        if stats.make_tree is not None:
            return stats.make_tree()
        if stats.tiles is not None:
            expanded = stats.tiles.expanded
        else:  # dense attention: every token is a leaf
            tiling = stats.call.tiling
            shape = (*self.output.shape[:2], tiling.groups, tiling.tiles)
            expanded = torch.ones(shape, dtype=torch.bool, device=self.output.device)
        return tile_tree(expanded, stats.valid, stats.call)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.output, self.stats))

    def __repr__(self) -> str:
        return f"Screened(output={tuple(self.output.shape)}, stats={self.stats!r})"

    def _repr_html_(self) -> str:
        return f"<p>output {tuple(self.output.shape)}</p>{self.stats._repr_html_()}"
