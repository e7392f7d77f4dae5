"""timm's Vision Transformers, and the embedded model, which is laid out as they are."""

from typing import Any

from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from bmfa.models.hosts import Host, class_name, class_names, refuse
from bmfa.models.reduced import Branches, SizedAttention
from bmfa.models.screens import Replacement, Screen

TOWERS = {
    "timm.models.vision_transformer.VisionTransformer",
    "timm.models.eva.Eva",
    "bmfa.models.embedded.EmbeddedViT",
}
ATTENTIONS = {
    "timm.layers.attention.Attention",
    "timm.layers.attention.AttentionRope",
    "timm.models.vision_transformer.Attention",
    "timm.models.eva.EvaAttention",
    "bmfa.models.embedded.Attention",
}


BRANCHES = {
    "timm.models.vision_transformer.Block": Branches(
        ("norm1", "attn", "ls1", "drop_path1"), ("norm2", "mlp", "ls2", "drop_path2")
    ),
    "bmfa.models.embedded.Block": Branches(("norm1", "attn"), ("norm2", "mlp")),
}


class Interception(TorchFunctionMode):
    """Scaled dot-product attention is replaced; the rest of the layer runs as it is written."""

    def __init__(self, replacement: Replacement) -> None:
        super().__init__()
        self.replacement = replacement

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is scaled_dot_product_attention:
            return self.replacement(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class ReplacedForward:
    """The forward of one attention module under interception; copies and pickles with it."""

    def __init__(self, module: nn.Module, replacement: Replacement) -> None:
        self.module = module
        self.replacement = replacement

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with Interception(self.replacement):
            return type(self.module).forward(self.module, *args, **kwargs)


class TimmReplacement(Replacement):
    """A replacement that the module's own forward is run under."""

    def install(self, module: nn.Module) -> None:
        """Replace the forward of the instance."""
        super().install(module)
        if hasattr(module, "fused_attn"):
            # Its other path spells the softmax out and never calls what is intercepted.
            self.kept["fused_attn"] = module.fused_attn
            module.__dict__["fused_attn"] = True
        module.__dict__["forward"] = ReplacedForward(module, self)

    def restore(self, module: nn.Module) -> None:
        """Undo `install`."""
        super().restore(module)
        for name, value in self.kept.items():
            setattr(module, name, value)
        del module.__dict__["forward"]


class TimmScreen(TimmReplacement, Screen):
    """A screen in timm."""


class TimmSized(TimmReplacement, SizedAttention):
    """Attention among merged tokens in timm."""


def find(model: nn.Module) -> list[Host]:
    """The vision towers in a model."""
    return [_host(module) for module in model.modules() if class_names(module) & TOWERS]


def _host(tower: Any) -> Host:
    attentions = tuple(getattr(block, "attn", block) for block in tower.blocks)
    for attention in attentions:
        if class_name(attention) not in ATTENTIONS:
            refuse(tower, attention)
    projection = getattr(tower.patch_embed, "proj", None)
    if not isinstance(projection, nn.Conv2d):
        raise TypeError(
            f"{class_name(tower.patch_embed)} in {type(tower).__name__} is not served: its patches "
            "come from no convolution, so the grid is unknown; build the model with a PatchEmbed"
        )
    blocks = tuple(tower.blocks)
    names = {class_name(block) for block in blocks}
    return Host(
        TimmScreen,
        TimmSized,
        attentions,
        projection,
        int(tower.num_prefix_tokens),
        blocks,
        BRANCHES.get(names.pop()) if len(names) == 1 else None,
        getattr(tower, "global_pool", "token") != "token",
    )
