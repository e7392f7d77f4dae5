"""Vision Transformers of timm, and the embedded model, which has their layout."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from bmfa.models.hosts.base import (
    AttentionFunction,
    AttentionReplacement,
    BlockLayout,
    VisionTransformer,
    class_name,
    is_noop,
)
from bmfa.models.hosts.unsupported import raise_unsupported
from bmfa.models.override import has_instance_forward, override_method, restore_method

TOWERS = {
    "timm.models.vision_transformer.VisionTransformer",
    "timm.models.eva.Eva",
    "bmfa.models.embedded.model.EmbeddedViT",
}
ATTENTIONS = {
    "timm.layers.attention.Attention",
    "timm.layers.attention.AttentionRope",
    "timm.models.vision_transformer.Attention",
    "timm.models.eva.EvaAttention",
    "bmfa.models.embedded.model.Attention",
}
# Blocks whose tokens can be reduced.
LAYOUTS = {
    "timm.models.vision_transformer.Block": BlockLayout(
        ("norm1", "attn", "ls1", "drop_path1"), ("norm2", "mlp", "ls2", "drop_path2")
    ),
    "timm.models.eva.EvaBlock": BlockLayout(
        ("norm1", "attn", "gamma_1", "drop_path1"),
        ("norm2", "mlp", "gamma_2", "drop_path2"),
        rotary="rope",
    ),
    "bmfa.models.embedded.model.Block": BlockLayout(("norm1", "attn"), ("norm2", "mlp")),
}

# Attention classes whose forward is only their projections if the optional parts do nothing.
_STANDARD = {"timm.layers.attention.Attention", "timm.models.vision_transformer.Attention"}
_PROJECTIONS = ("qkv", "proj", "proj_drop")
_OPTIONAL_PARTS = ("q_norm", "k_norm", "attn_drop", "norm", "gate")
_DEFAULTS = {"attn_mask": None, "is_causal": False}


class TimmAttention(AttentionReplacement):
    """Runs the module's own forward with `scaled_dot_product_attention` replaced."""

    def _replace(self, module: nn.Module) -> None:
        if hasattr(module, "fused_attn"):
            # The unfused path computes the softmax itself instead of calling the replaced function.
            self.saved["fused_attn"] = module.fused_attn
            module.__dict__["fused_attn"] = True
        override_method(module, self)

    def _undo(self, module: nn.Module) -> None:
        for name, value in self.saved.items():
            setattr(module, name, value)
        restore_method(module)

    def uses_host(self, x: Any) -> bool:
        """True if the module computes its own attention for the input x."""
        return self.function.uses_host(x)

    def run(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute the output of the attention module."""
        if len(args) == 1 and _is_projections_only(module, kwargs):
            return _attention_forward(module, args[0], self.function)
        with ReplaceSDPA(self.function):
            return forward(*args, **kwargs)


class ReplaceSDPA(TorchFunctionMode):
    """Calls another function wherever `scaled_dot_product_attention` is called."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is scaled_dot_product_attention:
            return self.function(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _attention_forward(module: Any, x: Tensor, function: AttentionFunction) -> Tensor:
    """Compute timm's `Attention.forward` directly: a TorchFunctionMode slows every operation down."""
    qkv = module.qkv(x).unflatten(-1, (3, module.num_heads, -1))
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # (B, heads, T, d) each
    output: Tensor = module.proj(function(q, k, v).transpose(1, 2).flatten(2))
    dropout = module.proj_drop
    return output if is_noop(dropout) else dropout(output)


def _is_projections_only(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    """Return True if the forward of the module is only `qkv`, attention and `proj`."""
    parts = module._modules
    if class_name(module) not in _STANDARD or has_instance_forward(module):
        return False
    for name, part in parts.items():  # a loop, because a generator costs a call for each element
        if name in _PROJECTIONS:
            if part is None:
                return False
        elif part is not None and not (name in _OPTIONAL_PARTS and is_noop(part)):
            return False
    return not kwargs or all(_DEFAULTS.get(name, kwargs) is value for name, value in kwargs.items())


def find_towers(model: nn.Module) -> list[VisionTransformer]:
    """List the timm vision towers in a model."""
    return [
        _host(model, module)
        for module in model.modules()
        if any(f"{c.__module__}.{c.__qualname__}" in TOWERS for c in type(module).__mro__)
    ]


def _host(model: nn.Module, tower: Any) -> VisionTransformer:
    blocks = tuple(tower.blocks)
    attentions = tuple(getattr(block, "attn", block) for block in blocks)
    for attention in attentions:
        if class_name(attention) not in ATTENTIONS:
            raise_unsupported(tower, attention)
    projection = getattr(tower.patch_embed, "proj", None)
    if not isinstance(projection, nn.Conv2d):
        raise TypeError(
            f"{class_name(tower.patch_embed)} in {type(tower).__name__} is not supported: its patches "
            "do not come from a convolution, so the grid is unknown; build the model with a PatchEmbed"
        )
    names = {class_name(block) for block in blocks}
    return VisionTransformer(
        replacement=TimmAttention,
        tower=tower,
        blocks=blocks,
        attentions=attentions,
        projection=projection,
        prefix=int(tower.num_prefix_tokens),
        layout=LAYOUTS.get(names.pop()) if len(names) == 1 else None,
        reads_spatial_tokens=model is not tower
        or getattr(tower, "global_pool", "token") != "token",
    )
