"""timm's Vision Transformers, and the embedded model, which is laid out as they are."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from bmfa.models.forwards import has_own_forward, override_method, restore_method
from bmfa.models.hosts import Host, class_name, class_names, refuse
from bmfa.models.reduced import Branches, SizedAttention, idle
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


# Plain layers: projections, and parts that do nothing unless the model is built with them.
SPELT = {"timm.layers.attention.Attention", "timm.models.vision_transformer.Attention"}
PROJECTIONS = ("qkv", "proj", "proj_drop")
SKIPPED = ("q_norm", "k_norm", "attn_drop", "norm", "gate")
PARTS = {*PROJECTIONS, *SKIPPED}

BRANCHES = {
    "timm.models.vision_transformer.Block": Branches(
        ("norm1", "attn", "ls1", "drop_path1"),
        ("norm2", "mlp", "ls2", "drop_path2"),
        frozenset({("timm.layers.mlp", "Mlp")}),
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


# Arguments of an attention layer that ask for nothing.
_IDLE = {"attn_mask": None, "is_causal": False}


def _skipped(part: nn.Module | None) -> bool:
    return part is None or idle(part)


class TimmReplacement(Replacement):
    """A replacement that the module's own forward is run under."""

    def install(self, module: nn.Module) -> None:
        """Replace the forward of the instance."""
        super().install(module)
        if hasattr(module, "fused_attn"):
            # Its other path spells the softmax out and never calls what is intercepted.
            self.kept["fused_attn"] = module.fused_attn
            module.__dict__["fused_attn"] = True
        override_method(module, self)

    def restore(self, module: nn.Module) -> None:
        """Undo `install`."""
        super().restore(module)
        for name, value in self.kept.items():
            setattr(module, name, value)
        restore_method(module)

    def run(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute the output of the attention module."""
        if len(args) == 1 and _is_plain(module, kwargs):
            return self._plain(module, args[0])
        with Interception(self):
            return forward(*args, **kwargs)

    def _plain(self, module: Any, x: Tensor) -> Tensor:
        """The layer spelt out: interception calls Python for every operation of its forward."""
        joint = module.qkv(x).unflatten(-1, (3, module.num_heads, -1))
        q, k, v = joint.permute(2, 0, 3, 1, 4).unbind(0)  # (B, heads, T, d) each
        output: Tensor = module.proj(self(q, k, v).transpose(1, 2).flatten(2))
        dropout = module.proj_drop
        return output if idle(dropout) else dropout(output)


def _is_plain(module: nn.Module, options: dict[str, Any]) -> bool:
    """Whether nothing but the projections lies between the input, q, k, v and the output."""
    parts = module._modules
    return (
        class_name(module) in SPELT
        and not has_own_forward(module)
        and parts.keys() <= PARTS
        and all(parts.get(name) is not None for name in PROJECTIONS)
        and all(_skipped(parts.get(name)) for name in SKIPPED)
        and all(_IDLE.get(name, options) is value for name, value in options.items())
    )


class TimmScreen(TimmReplacement, Screen):
    """A screen in timm."""


class TimmSized(TimmReplacement, SizedAttention):
    """Attention among merged tokens in timm."""


def find(model: nn.Module) -> list[Host]:
    """The vision towers in a model."""
    return [_host(model, module) for module in model.modules() if class_names(module) & TOWERS]


def _host(model: nn.Module, tower: Any) -> Host:
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
        tower,
        attentions,
        projection,
        int(tower.num_prefix_tokens),
        blocks,
        BRANCHES.get(names.pop()) if len(names) == 1 else None,
        model is not tower or getattr(tower, "global_pool", "token") != "token",
    )
