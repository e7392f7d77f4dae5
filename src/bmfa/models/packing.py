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

# Attention over (images, heads, prefix + N, d) tokens of images with the same grid.
ImageAttention = Callable[[Grid, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class ImageGroup:
    """Images of one grid, which share a call of attention."""

    grid: Grid
    # (images, prefix + N) indices of the tokens in the flattened (B, T); spatial ones in raster order
    index: Tensor
    # (images, P) indices of padding that attends to the keys of its image; None if there is none
    padding: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Packing:
    """The images in the sequences (B, T) of one forward pass. Each attends to itself only."""

    groups: tuple[ImageGroup, ...]
    # (B * T,) row of each token in the concatenated outputs of the groups. Tokens of no image have a
    # row behind these, one for each sequence.
    inverse: Tensor
    padded: bool  # True if there are tokens of no image
    shape: tuple[int, int]  # (B, T)
    mask_is_padding: bool = False  # True if attention masks hide nothing but padding
    traced: bool = False  # True if it was made inside a graph of torch.compile

    def attend(
        self,
        attention: ImageAttention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float | None = None,
    ) -> Tensor:
        """Compute attention inside each image.

        Args:
            attention: Called once for each group, with its grid and its q, k, v.
            q: (B, heads, T, d) queries; k, v likewise.
            k: Keys.
            v: Values.
            scale: The factor of the scores of padding that attends to an image.

        Returns:
            (B, heads, T, e). Other tokens of no image get the mean of the values of their sequence,
            which is what softmax returns if all keys are hidden with the same large negative number.

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
            inputs = [x[group.index].transpose(1, 2) for x in flat]  # (images, heads, P + N, d)
            output = attention(group.grid, inputs[0], inputs[1], inputs[2])
            outputs.append(output.transpose(1, 2).flatten(0, 1))
            if group.padding is not None:
                query = flat[0][group.padding].transpose(1, 2)
                output = scaled_dot_product_attention(query, inputs[1], inputs[2], scale=scale)
                outputs.append(output.transpose(1, 2).flatten(0, 1))
        if self.padded:
            outputs.append(v.mean(2).to(outputs[0].dtype))  # (B, heads, e)
        rows = torch.cat(outputs)[self.inverse]  # (B * T, heads, e)
        return rows.view(*self.shape, *rows.shape[1:]).transpose(1, 2)


def pack(
    images: Sequence[tuple[Grid, Tensor]],
    shape: tuple[int, int],
    device: torch.device,
    *,
    mask_is_padding: bool = False,
    padding_attends: bool = False,
) -> Packing:
    """Make a packing from the grid and the (prefix + N,) flat positions of the tokens of each image.

    Images may share no token. With `padding_attends`, every sequence has one image, at its start,
    and the tokens behind it attend to the keys of the image.
    """
    by_grid: dict[tuple[int, int], list[Tensor]] = {}  # torch.compile cannot trace grids as keys
    for grid, index in images:
        by_grid.setdefault((grid.height, grid.width), []).append(index)
    groups = [(Grid(*sides), torch.stack(indices)) for sides, indices in by_grid.items()]
    batch, tokens = shape
    padding: list[Tensor | None] = [None] * len(groups)
    if padding_attends:
        padding = [_behind(index, tokens) for _, index in groups]
    parts = [(index, behind) for (_, index), behind in zip(groups, padding, strict=True)]
    rows = torch.cat([part.flatten() for pair in parts for part in pair if part is not None])
    # The row behind the outputs that belongs to the sequence of each token.
    sequence = torch.arange(batch * tokens, device=rows.device) // tokens
    inverse = (len(rows) + sequence).scatter(0, rows, torch.arange(len(rows), device=rows.device))
    return Packing(
        tuple(
            ImageGroup(grid, index.to(device), None if behind is None else behind.to(device))
            for (grid, index), behind in zip(groups, padding, strict=True)
        ),
        inverse.to(device),
        len(rows) < batch * tokens,
        shape,
        mask_is_padding,
        is_compiling(),
    )


def index_device(x: Tensor) -> torch.device:
    """Device for indices of tokens: that of x in a graph; else the CPU, with one copy at the end."""
    return x.device if is_compiling() else torch.device("cpu")


def _behind(index: Tensor, tokens: int) -> Tensor | None:
    """Return (images, P) indices behind the images in their sequences, None if there are none."""
    count = index.shape[1]
    if count == tokens:
        return None
    return index[:, :1] // tokens * tokens + torch.arange(count, tokens, device=index.device)


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
    "the grids of these images are values of a tensor, which a graph cannot read, so bmfa breaks the "
    "graph here: compile without fullgraph=True, or pass images whose grids follow from shapes and "
    "integers; 'Compiled models' in docs/models.md lists them"
)
_outside: dict[str, Callable[..., Any]] = {}


def prepare_compiling() -> None:
    """Make `outside_graphs` ready, before torch.compile traces it."""
    if not _outside:
        _outside["call"] = torch.compiler.disable(_call, reason=_REASON)  # type: ignore[no-untyped-call]


def outside_graphs(
    function: Callable[..., Any], *args: Any, traceable: bool = False, **kwargs: Any
) -> Any:
    """Call a function; torch.compile breaks its graph there, unless the function is traceable."""
    if traceable or not is_compiling():
        return function(*args, **kwargs)
    return _outside["call"](partial(function, *args, **kwargs))


def _call(function: Callable[[], Any]) -> Any:
    return function()
