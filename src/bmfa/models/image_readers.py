"""Where the tokens of each image are, in models whose sequences are packed, padded or shuffled.

Hooks read, in every forward pass, the sizes of the images from the arguments of the model.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bmfa.checks import is_compiling
from bmfa.grid import Grid
from bmfa.models.override import override_method
from bmfa.models.packing import (
    Packing,
    index_device,
    outside_graphs,
    pack,
    prepare_compiling,
    raster_order,
)
from bmfa.models.passes import Passes
from bmfa.models.replacement import InterceptedAttention
from bmfa.packages import load_package


@dataclass(eq=False)
class ImageReader:
    """Hook of a model that begins each forward pass with its images."""

    passes: Passes
    read: Callable[..., Packing]  # called with the model and the arguments of its forward
    # Called with these, too: True if no size is a value of a tensor, so that a graph can contain `read`.
    is_static: Callable[..., bool]

    def watch(self, tower: nn.Module) -> None:
        """Read the arguments of the tower."""
        prepare_compiling()
        handle = tower.register_forward_pre_hook(self, with_kwargs=True)
        self.passes.handles.append(handle)

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        static = is_compiling() and self.is_static(module, *args, **kwargs)
        outside_graphs(self._begin, module, args, kwargs, traceable=static)

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.passes.begin(self.read(module, *args, **kwargs))


def never(*args: Any, **kwargs: Any) -> bool:
    """False: the sizes of the images are values of a tensor."""
    return False


def read_pixtral(
    tower: Any, pixel_values: Tensor, image_sizes: Any = None, **kwargs: Any
) -> Packing:
    """Read the images of Pixtral: each has its own crop of the batch, in raster order."""
    if image_sizes is None:
        image_sizes = [pixel_values.shape[-2:]] * pixel_values.shape[0]
    images, start = [], 0
    device = index_device(pixel_values)
    for height, width in image_sizes:
        grid = Grid(int(height) // tower.patch_size, int(width) // tower.patch_size)
        images.append((grid, torch.arange(start, start + grid.size, device=device)))
        start += grid.size
    return pack(images, (1, start), pixel_values.device, mask_is_padding=True)


def has_integer_sizes(
    tower: Any, pixel_values: Tensor, image_sizes: Any = None, **kwargs: Any
) -> bool:
    """True if the sizes of the images of Pixtral are integers, or follow from shapes."""
    if image_sizes is None:
        return True
    return not isinstance(image_sizes, Tensor) and not any(
        isinstance(size, Tensor) or any(isinstance(side, Tensor) for side in size)
        for size in image_sizes
    )


def read_qwen(tower: Any, hidden_states: Tensor, grid_thw: Tensor, **kwargs: Any) -> Packing:
    """Read the images of Qwen: blocks of patches, in windows if the model has some.

    Every frame of a video is an image of its own. The positions of the patches come from the functions
    of transformers that the model calls, which read what the caller has computed in advance.
    """
    vision = load_package("transformers.vision_utils")
    sizes = grid_thw.cpu()
    merge = int(tower.spatial_merge_size)
    positions = vision.get_vision_position_ids(sizes, merge, kwargs=dict(kwargs)).cpu()
    if hasattr(tower, "window_size"):
        window_index, _ = vision.get_vision_window_index(
            sizes,
            spatial_merge_size=merge,
            window_size=tower.window_size,
            patch_size=tower.patch_size,
            kwargs=dict(kwargs),
        )
        positions = positions.unflatten(0, (-1, merge * merge))[window_index.cpu()].flatten(0, 1)
    images, start = [], 0
    for frames, height, width in sizes.tolist():
        for _ in range(frames):
            end = start + height * width
            grid, order = raster_order(positions[start:end])
            images.append((grid, start + order))
            start = end
    return pack(images, (1, start), hidden_states.device, mask_is_padding=True)


def read_siglip2(
    tower: Any,
    pixel_values: Tensor,
    pixel_attention_mask: Tensor | None = None,
    spatial_shapes: Any = None,
    **kwargs: Any,
) -> Packing:
    """Read the images of SigLIP2, each padded to the longest of the batch."""
    batch, tokens = pixel_values.shape[:2]
    sizes = torch.as_tensor(spatial_shapes).cpu()
    exists = torch.arange(tokens) < sizes.prod(-1, keepdim=True)  # (B, T)
    mask = torch.ones_like(exists) if pixel_attention_mask is None else pixel_attention_mask.cpu()
    if not torch.equal(mask.bool(), exists):
        raise ValueError(
            f"spatial_shapes is {sizes.tolist()} and there are {tokens} patches in an image with "
            "padding, and pixel_attention_mask shows others; pass the mask of the processor, which "
            "hides the padding and nothing else, or call bmfa.unpatch(model)"
        )
    images = [
        (Grid(height, width), row * tokens + torch.arange(height * width))
        for row, (height, width) in enumerate(sizes.tolist())
    ]
    device = pixel_values.device
    return pack(images, (batch, tokens), device, mask_is_padding=True, padding_attends=True)


@dataclass(eq=False)
class ViTMAEReader:
    """Hook of the embeddings of ViT-MAE, which return the random order of the patches."""

    passes: Passes

    def watch(self, tower: Any) -> None:
        """Read the output of the embeddings."""
        handle = tower.embeddings.register_forward_hook(self, with_kwargs=True)
        self.passes.handles.append(handle)

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._read(module, output, *args, **kwargs)

    def _read(self, module: Any, output: Any, pixel_values: Tensor, *_: Any, **kwargs: Any) -> None:
        embeddings, _, order = output  # order (B, N): the index of each patch in the sequence
        batch, tokens = embeddings.shape[:2]
        if tokens != 1 + order.shape[1]:
            check_unmasked(module.config)
        height, width = (int(side) // int(module.patch_size) for side in pixel_values.shape[-2:])
        # The grid is known from shapes. The order is a tensor that may be computed in a graph.
        indices = torch.cat((order.new_zeros(batch, 1), 1 + order), 1)  # (B, tokens)
        grid = Grid(height, width)
        images = [(grid, row * tokens + index) for row, index in enumerate(indices.unbind(0))]
        self.passes.begin(pack(images, (batch, tokens), pixel_values.device))


def check_unmasked(config: Any) -> None:
    """Raise a ValueError if a configuration of ViT-MAE masks patches."""
    if ratio := getattr(config, "mask_ratio", 0.0):
        raise ValueError(
            f"mask_ratio is {ratio:g}, so ViT-MAE attends among the patches that are not masked, and "
            "these do not fill a grid; set model.config.mask_ratio = 0.0, or run the model without a "
            "patch"
        )


class NaFlexAttention(InterceptedAttention):
    """Attention of NaFlexViT, outside of a compiled graph where the grids are values of a tensor."""

    def run(self, module: Any, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute the output of the module."""
        images = self.function.passes.images
        traceable = isinstance(images, Packing) and images.traced
        return outside_graphs(super().run, module, method, *args, traceable=traceable, **kwargs)

    def __setstate__(self, state: dict[str, Any]) -> None:
        prepare_compiling()
        self.__dict__.update(state)


@dataclass(eq=False)
class NaFlexReader:
    """Override of the method of NaFlexViT that embeds patches, some of which may be padding."""

    passes: Passes

    def watch(self, tower: nn.Module) -> None:
        """Read the arguments of the method, which each of several entry points calls."""
        prepare_compiling()
        override_method(tower, self, "_forward_embeds")

    def run(self, module: Any, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute the embeddings, after reading where the patches of each image are."""
        coordinates = args[1] if len(args) > 1 else kwargs.get("patch_coord")
        outside_graphs(self._read, module, *args, traceable=coordinates is None, **kwargs)
        return method(*args, **kwargs)

    def _read(
        self,
        module: Any,
        x: Tensor,
        patch_coord: Tensor | None = None,
        patch_valid: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> None:
        prefix = self.passes.prefix
        device = index_device(x)
        if patch_coord is None:
            height, width = module.embeds.dynamic_feat_size(x.shape[-2:])
            grid = Grid(int(height), int(width))
            orders = [(grid, torch.arange(grid.size, device=device))] * x.shape[0]
            patches = grid.size
        else:
            coordinates = patch_coord.cpu()
            batch, patches = coordinates.shape[:2]
            valid = torch.ones(batch, patches) if patch_valid is None else patch_valid.cpu()
            orders = []
            for positions, exists in zip(coordinates, valid.bool(), strict=True):
                index = exists.nonzero().flatten()
                grid, order = raster_order(positions[index])
                orders.append((grid, index[order]))
        tokens = prefix + patches
        images = []
        for row, (grid, order) in enumerate(orders):
            index = torch.cat((torch.arange(prefix, device=device), prefix + order))
            images.append((grid, row * tokens + index))
        shape = (len(orders), tokens)
        self.passes.begin(pack(images, shape, x.device, mask_is_padding=attn_mask is None))
