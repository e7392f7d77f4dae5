"""Vision towers of transformers whose sequences are padded or shuffled: SigLIP2 and ViT-MAE.

SigLIP2 takes images of different sizes in one batch, each padded to the longest. ViT-MAE puts the
patches of every image in a random order, also if it drops none. In every forward pass a hook makes a
`Packing` that says where the patches of each image are; attention is computed for each image in
raster order.
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
    TransformersAttention,
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
from bmfa.models.packing import outside_graphs, pack, prepare_compiling
from bmfa.models.token_grid import TokenGrid

# The name of the attention function in `config._attn_implementation`.
IMPLEMENTATION = "bmfa_padded"


class PaddedAttention(TransformersAttention):
    """Gives the module a configuration of its own that names the attention function of this file."""

    implementation = IMPLEMENTATION

    @classmethod
    def register(cls) -> None:
        register_function(IMPLEMENTATION, padded_attention_forward)
        prepare_compiling()


def padded_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention function of transformers: (B, heads, tokens, d) to (B, tokens, heads, d)."""
    call = partial(_attend, module, query, key, value, attention_mask, scaling, dropout)
    traced = is_traced(required_replacement(module).function.token_grid)
    return outside_graphs(call, traceable=traced, **kwargs)  # type: ignore[no-any-return]


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None,
    dropout: float,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    replacement = required_replacement(module)
    function = replacement.function
    packing = function.token_grid.packing
    if runs_dense(function, packing, query):
        return attend_by_host(
            replacement, module, query, key, value, attention_mask, scaling=scaling, dropout=dropout,
            **kwargs,
        )  # fmt: skip
    refuse_attentions(replacement.saved["config"], kwargs)
    if attention_mask is not None and not packing.own_mask:
        raise ValueError(
            "an attention mask is not supported in this patched model; leave it out, or call "
            "bmfa.unpatch(model)"
        )
    attend = partial(attend_images, function, dropout=dropout, scale=scaling)
    output = packing.attend(attend, query, key, value, scaling)
    return output.transpose(1, 2).contiguous(), None


@dataclass(eq=False)
class Siglip2Reader:
    """Hook of the tower of SigLIP2, which is told the size of each image."""

    token_grid: TokenGrid

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        outside_graphs(self._read, *args, **kwargs)

    def _read(
        self,
        pixel_values: Tensor,
        pixel_attention_mask: Tensor | None = None,
        spatial_shapes: Any = None,
        **kwargs: Any,
    ) -> None:
        batch, tokens = pixel_values.shape[:2]
        sizes = torch.as_tensor(spatial_shapes).cpu()
        patches = sizes.prod(-1, keepdim=True)  # (B, 1)
        exists = torch.arange(tokens) < patches  # (B, T)
        mask = (
            torch.ones_like(exists) if pixel_attention_mask is None else pixel_attention_mask.cpu()
        )
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
        shape, device = (batch, tokens), pixel_values.device
        packing = pack(images, shape, device, own_mask=True, padding_attends=True)
        begin_pass(self.token_grid, packing)


@dataclass(eq=False)
class ViTMAEReader:
    """Hook of the embeddings of ViT-MAE, which return the order of the patches."""

    token_grid: TokenGrid

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._read(module, output, *args, **kwargs)

    def _read(self, module: Any, output: Any, pixel_values: Tensor, *_: Any, **kwargs: Any) -> None:
        embeddings, _, order = output  # order (B, N): the index of each patch in the sequence
        batch, tokens = embeddings.shape[:2]
        if tokens != 1 + order.shape[1]:
            raise ValueError(_masked(module.config.mask_ratio))
        height, width = (int(side) // int(module.patch_size) for side in pixel_values.shape[-2:])
        # The grid is known from shapes. The order is a tensor that may be computed in a graph.
        indices = torch.cat((order.new_zeros(batch, 1), 1 + order), 1)  # (B, tokens)
        grid = Grid(height, width)
        images = [(grid, row * tokens + index) for row, index in enumerate(indices.unbind(0))]
        begin_pass(self.token_grid, pack(images, (batch, tokens), pixel_values.device))


def _masked(ratio: float) -> str:
    return (
        f"mask_ratio is {ratio:g}, so ViT-MAE attends among the patches that are not masked, and these "
        "do not fill a grid; set model.config.mask_ratio = 0.0, or run the model without a patch"
    )


def _watch_siglip2(host: VisionTransformer, token_grid: TokenGrid) -> None:
    reader = Siglip2Reader(token_grid)
    token_grid.handle = host.tower.register_forward_pre_hook(reader, with_kwargs=True)
    carry_images(host, token_grid)


def _watch_vit_mae(host: VisionTransformer, token_grid: TokenGrid) -> None:
    embeddings: Any = host.tower.embeddings
    reader = ViTMAEReader(token_grid)
    token_grid.handle = embeddings.register_forward_hook(reader, with_kwargs=True)
    carry_images(host, token_grid)


@dataclass(frozen=True)
class PaddedFamily:
    """The names of a family's attention class and patch projection, and how its images are read."""

    attention: str
    projection: str
    prefix: int
    watch: Callable[[VisionTransformer, TokenGrid], None]
    not_reducible: str
    not_tunable: str = ""


# By the class of the tower.
FAMILIES = {
    "siglip2.modeling_siglip2.Siglip2VisionModel": PaddedFamily(
        "Siglip2Attention",
        "embeddings.patch_embedding",
        0,
        _watch_siglip2,
        "its images have different sizes, so that they would keep different numbers of tokens",
        "it takes patches of images and spatial_shapes instead of (N, 3, height, width) pixels",
    ),
    "vit_mae.modeling_vit_mae.ViTMAEModel": PaddedFamily(
        "ViTMAEAttention",
        "embeddings.patch_embeddings.projection",
        1,
        _watch_vit_mae,
        "its patches are in a random order, so that the grid of the policies is not theirs",
    ),
}


def find_towers(model: nn.Module) -> list[VisionTransformer]:
    """List the towers in a model whose sequences are padded or shuffled."""
    hosts = []
    for tower in model.modules():
        family = FAMILIES.get(class_name(tower).removeprefix("transformers.models."))
        if family is not None:
            hosts.append(_host(tower, family))
    return hosts


def _host(tower: Any, family: PaddedFamily) -> VisionTransformer:
    if ratio := getattr(tower.config, "mask_ratio", 0.0):
        raise ValueError(_masked(ratio))
    pairs = [
        (block, child)
        for block in tower.modules()
        for child in block.children()
        if type(child).__name__ == family.attention
    ]
    return VisionTransformer(
        replacement=PaddedAttention,
        tower=tower,
        blocks=tuple(block for block, _ in pairs),
        attentions=tuple(child for _, child in pairs),
        projection=tower.get_submodule(family.projection),
        prefix=family.prefix,
        layout=None,
        reads_spatial_tokens=True,
        watch=family.watch,
        not_reducible=family.not_reducible,
        not_tunable=family.not_tunable,
    )
