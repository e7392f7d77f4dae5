"""How the attention of a module is replaced by a function of q, k and v.

There are three ways: `InterceptedAttention` runs the forward of the module and replaces its call of
`scaled_dot_product_attention`; `InterfaceAttention` of `transformers_attention.py` names a function of
the attention interface of transformers; and a few modules that do neither have a forward of their own
here (`BlipAttention`, and `DecomposedAttention` of `relative.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from bmfa.checks import is_compiling
from bmfa.models.override import override_method, restore_method
from bmfa.models.screened_layer import AttentionFunction

_ATTRIBUTE = "bmfa_attention"
_REPR = "extra_repr"  # the method of nn.Module that adds text to the repr of a module


@dataclass(frozen=True)
class _ModuleText:
    """In place of `extra_repr` of one module; an object, because functions of modules do not pickle."""

    text: str

    def __call__(self) -> str:
        return self.text


@dataclass(eq=False)
class AttentionReplacement:
    """Passes q, k, v of an attention module to a function; each way has a subclass.

    It is stored in the module's `__dict__`: it follows copies and pickles, but is not in the state dict.
    """

    function: AttentionFunction
    own_repr: Any = field(init=False, default=None)  # `extra_repr` that was set on the instance

    def install(self, module: nn.Module) -> None:
        """Replace the attention of the module."""
        parts = (module.extra_repr(), f"bmfa: {self.function.describe()}")
        self.own_repr = module.__dict__.get(_REPR)
        self.replace(module)
        module.__dict__[_ATTRIBUTE] = self
        module.__dict__[_REPR] = _ModuleText(", ".join(part for part in parts if part))

    def restore(self, module: nn.Module) -> None:
        """Undo `install`."""
        self.undo(module)
        del module.__dict__[_ATTRIBUTE]
        if isinstance(module.__dict__.get(_REPR), _ModuleText):
            del module.__dict__[_REPR]
            if self.own_repr is not None:
                module.__dict__[_REPR] = self.own_repr

    def replace(self, module: nn.Module) -> None:
        """Make the module call the function; `run` replaces its forward by default."""
        override_method(module, self)

    def undo(self, module: nn.Module) -> None:
        """Undo `replace`."""
        restore_method(module)

    def run(self, module: Any, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute the output of the module; `method` is the one that is overridden."""
        raise NotImplementedError


def replacement_of(module: nn.Module) -> AttentionReplacement | None:
    """Return what replaces the attention of the module, or None."""
    return module.__dict__.get(_ATTRIBUTE)


def replacements_in(model: nn.Module) -> list[tuple[nn.Module, AttentionReplacement]]:
    """List the modules of a model whose attention is replaced, with the replacements."""
    pairs = ((module, replacement_of(module)) for module in model.modules())
    return [(module, replacement) for module, replacement in pairs if replacement is not None]


@dataclass(eq=False)
class InterceptedAttention(AttentionReplacement):
    """Runs the module with `scaled_dot_product_attention` replaced."""

    fused: bool = field(init=False, default=True)

    def replace(self, module: nn.Module) -> None:
        """Run the module inside the interceptor, with its hooks and wrappers."""
        self.fused = getattr(module, "fused_attn", True)
        if not self.fused:  # the unfused path of timm computes the softmax itself
            module.__dict__["fused_attn"] = True
        override_method(module, self, "__call__")

    def undo(self, module: nn.Module) -> None:
        """Undo `replace`."""
        restore_method(module)
        if not self.fused:
            module.__dict__["fused_attn"] = False

    def run(self, module: Any, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute the output of the module."""
        if self.function.passes.idle and not is_compiling():
            self.function.passes.idle.discard(self.function.layer)
        if isinstance(module, nn.MultiheadAttention) and _is_self_attention(
            module, *args, **kwargs
        ):
            return self._run_multihead(module, *args, **kwargs)
        interceptor = Interceptor(self.attend)
        with interceptor:
            output = method(*args, **kwargs)
        if interceptor.calls == 0:
            raise RuntimeError(
                f"{class_name(module)}, attention module {self.function.layer}, has run without a call "
                "of torch.nn.functional.scaled_dot_product_attention, so its attention cannot be "
                "replaced: it computes the softmax itself or through another kernel "
                "(nn.MultiheadAttention does, unless it attends among the same tokens without masks "
                "and with need_weights=False); switch that off, name the modules that do call it, or "
                "call bmfa.unpatch(model)"
            )
        return output

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Run the function of the layer for one call of `scaled_dot_product_attention`."""
        one_head = query.dim() == 3  # (B, tokens, d)
        q, k, v = (x.unsqueeze(1) if one_head else x for x in (query, key, value))
        if q.dim() != 4 or k.dim() != 4 or q.shape[2] != k.shape[2]:
            raise ValueError(
                f"attention module {self.function.layer} attends from {tuple(query.shape)} queries to "
                f"{tuple(key.shape)} keys; supported is attention of (B, heads, tokens, d) among the "
                "same tokens: do not name modules of cross-attention or windows"
            )
        output = self.function(q, k, v, *args, **kwargs)
        return output.squeeze(1) if one_head else output

    def _run_multihead(
        self, module: nn.MultiheadAttention, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Compute the output of a module of torch, whose own forward calls a fused kernel."""
        tokens: Tensor = args[0] if args else kwargs["query"]
        x = tokens if module.batch_first else tokens.transpose(0, 1)  # (B, T, C)
        qkv = linear(x, module.in_proj_weight, module.in_proj_bias)
        qkv = qkv.view(*x.shape[:2], 3, module.num_heads, module.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # (B, heads, T, d) each
        output = self.function(q, k, v, dropout_p=module.dropout if module.training else 0.0)
        output = module.out_proj(output.transpose(1, 2).flatten(2))
        return output if module.batch_first else output.transpose(0, 1), None


class Interceptor(TorchFunctionMode):
    """Calls a function wherever `scaled_dot_product_attention` is called in this thread."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attend = attend
        self.calls = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is scaled_dot_product_attention:
            self.calls += 1
            return self.attend(*args, **(kwargs or {}))
        if func is torch.Tensor.unflatten:
            func = torch.unflatten  # torch.compile cannot trace the method inside a mode
        return func(*args, **(kwargs or {}))


def _is_self_attention(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> bool:
    """True if a call is plain self-attention without masks and weights."""
    masked = key_padding_mask is not None or attn_mask is not None or is_causal or need_weights
    added = module.bias_k is not None or module.bias_v is not None or module.add_zero_attn
    plain = module._qkv_same_embed_dim and query.dim() == 3 and query is key and key is value
    return plain and not masked and not added


def dropout_of(module: Any) -> float:
    """Return the probability of attention dropout of a module that applies it now."""
    if not module.training:
        return 0.0
    dropout = getattr(module, "attn_drop", getattr(module, "dropout", 0.0))
    return float(getattr(dropout, "p", dropout))


def class_name(module: nn.Module) -> str:
    """Return the module path and name of the class."""
    return f"{type(module).__module__}.{type(module).__qualname__}"
