"""Vision towers of transformers that pack images of different sizes into one sequence.

Pixtral, Qwen2-VL, Qwen2.5-VL and Qwen3-VL. The tower is told the size of each image; its tokens may
be in an order of its own. In every forward pass a hook of the tower makes a `Packing` from that, and the
attention modules pass the tokens of each image, in raster order, to the function of their layer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bmfa.grid import Grid
from bmfa.models.hosts.base import VisionTransformer, class_name
from bmfa.models.hosts.transformers import (
    OverridingAttention,
    attend_by_host,
    refuse_attentions,
    register_function,
    required_replacement,
)
from bmfa.models.packed_calls import (
    attend_images,
    begin_pass,
    carry_images,
    is_traced,
    runs_dense,
)
from bmfa.models.packing import (
    Packing,
    index_device,
    outside_graphs,
    pack,
    prepare_compiling,
    raster_order,
)
from bmfa.models.token_grid import TokenGrid
from bmfa.packages import load_package

# The name of the attention function in `config._attn_implementation`.
IMPLEMENTATION = "bmfa_packed"


class PackedAttention(OverridingAttention):
    """Runs the module's own forward on all images at once, with our attention inside of each."""

    implementation = IMPLEMENTATION

    @classmethod
    def register(cls) -> None:
        register_function(IMPLEMENTATION, packed_attention_forward)
        prepare_compiling()

    def run(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute the output of the attention module."""
        traced = is_traced(self.function.token_grid)
        return outside_graphs(self._run, forward, *args, traceable=traced, **kwargs)

    def _run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        packing = self.function.token_grid.packing
        x = args[0] if args else kwargs["hidden_states"]
        if runs_dense(self.function, packing, x):
            return forward(*args, **kwargs)
        if "cu_seqlens" in kwargs:  # of one sequence with all images, for one call of attention
            kwargs["cu_seqlens"] = torch.tensor([0, x.shape[0]], dtype=torch.int32)
        if "attention_mask" in kwargs:  # block-diagonal, which the packing replaces
            kwargs["attention_mask"] = None
        return forward(*args, **kwargs, bmfa_packing=packing)


def packed_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    bmfa_packing: Packing | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention function of transformers: (1, heads, tokens, d) to (1, tokens, heads, d)."""
    replacement = required_replacement(module)
    if bmfa_packing is None:
        return attend_by_host(
            replacement, module, query, key, value, attention_mask, scaling=scaling, dropout=dropout,
            **kwargs,
        )  # fmt: skip
    refuse_attentions(replacement.saved["config"], kwargs)
    attend = partial(attend_images, replacement.function, dropout=dropout, scale=scaling)
    output = bmfa_packing.attend(attend, query, key, value)
    return output.transpose(1, 2).contiguous(), None


@dataclass(frozen=True)
class PackedFamily:
    """The names of a family's attention class and patch projection, and how its images are read."""

    attention: str
    projection: str
    # Called with the tower and the arguments of its forward.
    read: Callable[..., Packing]
    # Called with these, too: True if no size is a value of a tensor, so that a graph can contain `read`.
    is_static: Callable[..., bool] = lambda *args, **kwargs: False
    not_tunable: str = ""  # why `tune` refuses the tower


@dataclass(eq=False)
class PackingReader:
    """Hook of a tower that makes the packing of each forward pass."""

    token_grid: TokenGrid
    family: str  # key of FAMILIES: pickles contain no functions

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        family = FAMILIES[self.family]
        static = torch.compiler.is_compiling() and family.is_static(module, *args, **kwargs)
        outside_graphs(self._read, module, args, kwargs, traceable=static)

    def _read(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        begin_pass(self.token_grid, FAMILIES[self.family].read(module, *args, **kwargs))


def _read_pixtral(
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
    return pack(images, (1, start), pixel_values.device)


def _has_integer_sizes(
    tower: Any, pixel_values: Tensor, image_sizes: Any = None, **kwargs: Any
) -> bool:
    if image_sizes is None:
        return True
    return not isinstance(image_sizes, Tensor) and not any(
        isinstance(size, Tensor) or any(isinstance(side, Tensor) for side in size)
        for size in image_sizes
    )


def _read_qwen(tower: Any, hidden_states: Tensor, grid_thw: Tensor, **kwargs: Any) -> Packing:
    """Read the images of Qwen: blocks of patches, in windows if the tower has some.

    Every frame of a video is an image of its own. The positions of the patches come from the functions
    of transformers that the tower calls, which read what the caller has computed in advance.
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
    return pack(images, (1, start), hidden_states.device)


_PATCHES = "it takes patches of images and grid_thw instead of (N, 3, height, width) pixels"
# By the class of the tower.
FAMILIES = {
    "pixtral.modeling_pixtral.PixtralVisionModel": PackedFamily(
        "PixtralAttention", "patch_conv", _read_pixtral, _has_integer_sizes
    ),
    "qwen2_vl.modeling_qwen2_vl.Qwen2VisionTransformerPretrainedModel": PackedFamily(
        "VisionAttention", "patch_embed.proj", _read_qwen, not_tunable=_PATCHES
    ),
    "qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel": PackedFamily(
        "Qwen2_5_VLVisionAttention", "patch_embed.proj", _read_qwen, not_tunable=_PATCHES
    ),
    "qwen3_vl.modeling_qwen3_vl.Qwen3VLVisionModel": PackedFamily(
        "Qwen3VLVisionAttention", "patch_embed.proj", _read_qwen, not_tunable=_PATCHES
    ),
    "qwen3_vl_moe.modeling_qwen3_vl_moe.Qwen3VLMoeVisionModel": PackedFamily(
        "Qwen3VLMoeVisionAttention", "patch_embed.proj", _read_qwen, not_tunable=_PATCHES
    ),
}
_WINDOWS = "attention inside windows"
_PACKED = "its images share one sequence and may have different sizes"


def find_towers(model: nn.Module) -> list[VisionTransformer]:
    """List the towers in a model that pack images."""
    hosts = []
    for tower in model.modules():
        name = class_name(tower).removeprefix("transformers.models.")
        if name in FAMILIES:
            hosts.append(_host(tower, name))
    return hosts


def _host(tower: Any, name: str) -> VisionTransformer:
    family = FAMILIES[name]
    pairs = [
        (block, child)
        for block in tower.modules()
        for child in block.children()
        if type(child).__name__ == family.attention
    ]
    full = getattr(tower, "fullatt_block_indexes", None)
    windows = set() if full is None else set(range(len(pairs))).difference(full)
    return VisionTransformer(
        replacement=PackedAttention,
        tower=tower,
        blocks=tuple(block for block, _ in pairs),
        attentions=tuple(child for i, (_, child) in enumerate(pairs) if i not in windows),
        projection=tower.get_submodule(family.projection),
        prefix=0,
        layout=None,
        reads_spatial_tokens=True,
        watch=partial(watch_tower, family=name),
        not_reducible=_PACKED,
        not_tunable=family.not_tunable,
        dense_blocks=dict.fromkeys(sorted(windows), _WINDOWS),
    )


def watch_tower(host: VisionTransformer, token_grid: TokenGrid, family: str) -> None:
    """Read the images of each forward pass, and let the blocks of the tower carry them."""
    reader = PackingReader(token_grid, family)
    token_grid.handle = host.tower.register_forward_pre_hook(reader, with_kwargs=True)
    carry_images(host, token_grid)
