"""Where the tokens of each image are, in models whose sequences are packed or padded.

These functions read the sizes of the images from the module and the arguments of its forward.
"""

from dataclasses import replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from bmfa.grid import Grid
from bmfa.models.packing import Packing, pack, raster_order
from bmfa.packages import load_package


def read_pixtral(
    encoder: Any, pixel_values: Tensor, image_sizes: Any = None, **kwargs: Any
) -> Packing:
    """Read the images of Pixtral: each has its own crop of the batch, in raster order."""
    if image_sizes is None:
        image_sizes = [pixel_values.shape[-2:]] * pixel_values.shape[0]
    images, start = [], 0
    for height, width in image_sizes:
        grid = Grid(int(height) // encoder.patch_size, int(width) // encoder.patch_size)
        images.append((grid, torch.arange(start, start + grid.size)))
        start += grid.size
    return pack(images, (1, start), pixel_values.device)


def read_sequence(encoder: Any, *args: Any, whole_clips: bool = False, **kwargs: Any) -> Packing:
    """Read the images of encoders that take `grid_thw`: blocks of patches, in windows if there are some.

    The positions of the patches come from the functions of transformers that the model calls, which read
    what the caller has computed in advance.

    Args:
        encoder: The vision encoder.
        args: Arguments of its forward.
        whole_clips: True if the frames of a video attend to each other; else each is an image.
        kwargs: Arguments of its forward.
    """
    vision = load_package("transformers.vision_utils")
    given = signature(encoder.forward).bind(*args, **kwargs).arguments
    others, sizes = given.get("kwargs", {}), given["grid_thw"].cpu()
    merge = given.get("merge_sizes", getattr(encoder, "spatial_merge_size", 1))
    positions = vision.get_vision_position_ids(sizes, merge, kwargs=dict(others)).cpu()
    if hasattr(encoder, "window_size"):
        window_index, _ = vision.get_vision_window_index(
            sizes,
            spatial_merge_size=merge,
            window_size=encoder.window_size,
            patch_size=encoder.patch_size,
            kwargs=dict(others),
        )
        positions = positions.unflatten(0, (-1, merge * merge))[window_index.cpu()].flatten(0, 1)
    images, start = [], 0
    for frames, height, width in sizes.tolist():
        clip = []
        for _ in range(frames):
            end = start + height * width
            grid, order = raster_order(positions[start:end])
            clip.append((grid, start + order))
            start = end
        if whole_clips:
            clip = [(replace(grid, frames=frames), torch.cat([order for _, order in clip]))]
        images += clip
    return pack(images, (1, start), next(iter(given.values())).device)


def read_siglip2(
    encoder: Any,
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
    return pack(images, (batch, tokens), pixel_values.device)
