"""Where the tokens of each image are, in models whose sequences are not one grid in raster order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bmfa.checks import is_compiling
from bmfa.grid import Grid


@dataclass(frozen=True, eq=False)
class ImageGroup:
    """Images of one grid, which share a call of attention."""

    grid: Grid
    # (images, N) indices of the tokens in the flattened (B, T), in raster order
    index: Tensor
    # (images, P) indices of the padding behind the images, which attends to the keys of its image
    padding: Tensor


@dataclass(frozen=True, eq=False)
class Packing:
    """The images in the sequences (B, T) of one forward pass. Each attends to itself only."""

    groups: tuple[ImageGroup, ...]
    inverse: Tensor  # (B * T,) row of each token in the concatenated outputs of the groups
    shape: tuple[int, int]  # (B, T)

    def attend(
        self, attention: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> Tensor:
        """Compute attention inside each image.

        Args:
            attention: Called once for each group, with its q, k, v, (images, heads, N, d), and grid=.
            q: (B, heads, T, d) queries; k, v likewise.
            k: Keys.
            v: Values.
            scale: The factor of the scores of padding.

        Returns:
            (B, heads, T, e).

        Raises:
            ValueError: If q has another shape than the packing.
        """
        if (q.shape[0], q.shape[2]) != self.shape:
            raise ValueError(
                f"attention over {q.shape[0]} x {q.shape[2]} tokens, but the images of this forward "
                f"pass make {self.shape[0]} x {self.shape[1]}; screening needs all of them: switch off "
                "whatever drops or merges tokens"
            )
        flat = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]  # (B * T, heads, d)
        outputs = []
        for group in self.groups:
            # (images, heads, N, d) each
            query, key, value = (x[group.index].transpose(1, 2) for x in flat)
            outputs.append(attention(query, key, value, grid=group.grid))
            if group.padding.numel():
                query = flat[0][group.padding].transpose(1, 2)
                outputs.append(scaled_dot_product_attention(query, key, value, scale=scale))
        rows = torch.cat([x.transpose(1, 2).flatten(0, 1) for x in outputs])[self.inverse]
        return rows.view(*self.shape, *rows.shape[1:]).transpose(1, 2)


def pack(
    images: Sequence[tuple[Grid, Tensor]], shape: tuple[int, int], device: torch.device
) -> Packing:
    """Make a packing from the grid and the (N,) flat positions of the tokens of each image.

    The images fill one sequence, or every sequence begins with one of them and has padding behind it.
    """
    by_grid: dict[Grid, list[Tensor]] = {}
    for grid, index in images:
        by_grid.setdefault(grid, []).append(index)
    tokens, groups, order = shape[1], [], []
    for grid, indices in by_grid.items():
        index = torch.stack(indices)
        first = index[:, :1] // tokens * tokens
        length = tokens if shape[0] == len(images) else grid.size
        padding = first + torch.arange(grid.size, length)
        groups.append(ImageGroup(grid, index.to(device), padding.to(device)))
        order += [index.flatten(), padding.flatten()]
    inverse = torch.cat(order).argsort()
    return Packing(tuple(groups), inverse.to(device), shape)


def raster_order(positions: Tensor) -> tuple[Grid, Tensor]:
    """Return the grid that positions fill, and the order of the tokens that makes them a raster.

    Args:
        positions: (N, 2) row and column of each token, on the CPU.

    Returns:
        The grid, and the (N,) index of the token at each position of the raster.

    Raises:
        ValueError: If the positions do not fill a grid.
    """
    rows, columns = positions.long().unbind(-1)
    grid = Grid(int(rows.max()) + 1, int(columns.max()) + 1)
    index = rows * grid.width + columns
    order = index.argsort()
    if len(index) != grid.size or not torch.equal(index[order], torch.arange(grid.size)):
        raise ValueError(
            f"{len(index)} tokens of an image have positions up to row {grid.height - 1} and column "
            f"{grid.width - 1}, and do not fill that grid; screening needs every patch of an image "
            "once: pass complete images, or call bmfa.unpatch(model)"
        )
    return grid, order


# The message of torch.compile(fullgraph=True).
_REASON = (
    "the images of this model may have several grids, so bmfa breaks the graph at their attention: "
    "compile without fullgraph=True"
)
_outside: dict[str, Callable[..., Any]] = {}


def prepare_compiling() -> None:
    """Make `outside_graphs` ready, before torch.compile traces it."""
    if not _outside:
        _outside["call"] = torch.compiler.disable(_call, reason=_REASON)  # type: ignore[no-untyped-call]


def outside_graphs(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function; torch.compile breaks its graph there."""
    if not is_compiling():
        return function(*args, **kwargs)
    return _outside["call"](partial(function, *args, **kwargs))


def _call(function: Callable[[], Any]) -> Any:
    return function()
