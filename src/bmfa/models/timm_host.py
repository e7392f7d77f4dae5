"""timm's Vision Transformers, and the embedded model, which is laid out as they are."""

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

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


class ReplacedForward:
    """The forward of one attention module under interception; copies and pickles with it."""

    def __init__(self, module: nn.Module, replacement: Replacement) -> None:
        self.module = module
        self.replacement = replacement

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with Interception(self.replacement):
            return type(self.module).forward(self.module, *args, **kwargs)


class SpeltForward(ReplacedForward):
    """The forward of a plain attention layer spelt out, where nothing but q, k, v comes between.

    Interception calls Python for every operation of the layer; any other layer runs under it.
    """

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        parts = self.module._modules
        qkv, proj, dropout = (parts[name] for name in PROJECTIONS)
        unmasked = not args and all(_IDLE.get(name, kwargs) is kwargs[name] for name in kwargs)
        plain = unmasked and all(_skipped(parts.get(name)) for name in SKIPPED)
        if not plain or qkv is None or proj is None or dropout is None:
            return super().__call__(x, *args, **kwargs)
        joint = qkv(x).unflatten(-1, (3, self.module.num_heads, -1))
        q, k, v = joint.permute(2, 0, 3, 1, 4).unbind(0)  # (B, heads, T, d) each
        mixed = self.replacement(q, k, v)
        output = proj(mixed.transpose(1, 2).flatten(2))
        return output if idle(dropout) else dropout(output)


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
        spelt = class_name(module) in SPELT and set(module._modules) <= {*SKIPPED, *PROJECTIONS}
        module.__dict__["forward"] = (SpeltForward if spelt else ReplacedForward)(module, self)

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
