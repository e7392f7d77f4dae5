"""How methods of single modules are replaced, and how attention is: by a function of q, k and v.

There are three ways: `InterceptedAttention` runs the forward of the module and replaces its call of
`scaled_dot_product_attention`; `InterfaceAttention` of `transformers_attention.py` names a function of
the attention interface of transformers; and the module of BLIP, which does neither, has a forward of its
own there (`BlipAttention`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from bmfa.models.screened_layer import REPLACEMENT, AttentionFunction


class Replacement:
    """Code that runs in place of a method of one module.

    The class of the instance is replaced by a subclass with another method, which reads its weights
    through `self`, so copies, pickles and the replicas of `nn.DataParallel` compute with their own. The
    replacement is in the module's `__dict__`: it follows copies, but is not in the state dict.
    """

    # `"__call__"` runs around hooks and a `forward` that a wrapper has set on the instance; in place of
    # `"forward"`, the latter would never run, so it is refused.
    method: ClassVar[str] = "forward"

    def install(self, module: nn.Module) -> None:
        """Replace the method.

        Raises:
            TypeError: If the module has a method of its own that would hide the replacement.
        """
        if self.method in module.__dict__:
            raise TypeError(
                f"{type(module).__name__} has a {self.method} of its own, set on the instance by a "
                "wrapper, which bmfa would have to replace; remove the wrapper, or apply it after bmfa"
            )
        module.__dict__[REPLACEMENT] = self
        kind: Any = type(module)
        module.__class__ = _subclass(kind, self.method)

    def restore(self, module: nn.Module) -> None:
        """Undo `install`."""
        del module.__dict__[REPLACEMENT]
        module.__class__ = type(module).__mro__[1]

    def run(self, module: Any, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute what the method returns; `method` is the one that is replaced."""
        raise NotImplementedError

    def describe(self) -> str:
        """Return what the repr of the module says."""
        return ""


def replacement_of(module: nn.Module) -> Replacement | None:
    """Return what is replaced in the module, or None."""
    return module.__dict__.get(REPLACEMENT)


@lru_cache(maxsize=256)
def _subclass(kind: Any, method: str) -> type[nn.Module]:
    """Make a subclass that has the name of `kind` and runs the replacement of the instance."""
    original = getattr(kind, method)

    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        replacement = replacement_of(self)
        if replacement is None:  # a wrapper has kept the method of a module that is restored
            return original(self, *args, **kwargs)
        return replacement.run(self, partial(original, self), *args, **kwargs)

    def extra_repr(self: nn.Module) -> str:
        replacement = replacement_of(self)
        texts = (kind.extra_repr(self), "" if replacement is None else replacement.describe())
        return ", ".join(text for text in texts if text)

    def reduce_ex(self: nn.Module, protocol: Any) -> Any:
        state: Any = super(subclass, self).__reduce_ex__(protocol)
        return _make, (kind, method), *state[2:]

    body = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "__reduce_ex__": reduce_ex,
        method: run,
        "extra_repr": extra_repr,
    }
    subclass: type[nn.Module] = type(kind.__name__, (kind,), body)
    return subclass


def _make(kind: Any, method: str) -> nn.Module:
    """Make an instance without state for unpickling, which adds the state."""
    subclass = _subclass(kind, method)
    return subclass.__new__(subclass)


@dataclass(eq=False)
class AttentionReplacement(Replacement):
    """Passes q, k, v of an attention module to a function; each way has a subclass."""

    function: AttentionFunction

    def describe(self) -> str:
        """Return the settings of the function."""
        return f"bmfa: {self.function.describe()}"

    def restore(self, module: nn.Module) -> None:
        """Undo `install`, and remove the hooks that follow the forward passes of the model."""
        super().restore(module)
        self.function.passes.remove()


@dataclass(eq=False)
class InterceptedAttention(AttentionReplacement):
    """Runs the module, its hooks and wrappers with `scaled_dot_product_attention` replaced."""

    method = "__call__"
    fused: bool = field(init=False, default=True)

    def install(self, module: nn.Module) -> None:
        """Replace the method, and choose the fused path: the other one computes the softmax itself."""
        super().install(module)
        self.fused = getattr(module, "fused_attn", True)
        if not self.fused:
            module.__dict__["fused_attn"] = True

    def restore(self, module: nn.Module) -> None:
        """Undo `install`."""
        super().restore(module)
        if not self.fused:
            module.__dict__["fused_attn"] = False

    def run(self, module: Any, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute the output of the module."""
        if isinstance(module, nn.MultiheadAttention) and _is_self_attention(module, args, **kwargs):
            return self._run_multihead(module, args[0])
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

    def _run_multihead(self, module: nn.MultiheadAttention, tokens: Tensor) -> tuple[Tensor, None]:
        """Compute the output of a module of torch, whose own forward calls a fused kernel."""
        x = tokens if module.batch_first else tokens.transpose(0, 1)  # (B, T, C)
        qkv = linear(x, module.in_proj_weight, module.in_proj_bias)
        q, k, v = split_heads(qkv, module.num_heads)
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
    args: Any,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    **masks: Any,
) -> bool:
    """True if a call is plain self-attention without masks and weights."""
    same = len(args) == 3 and args[0].dim() == 3 and args[0] is args[1] is args[2]
    masked = any(mask is not None and mask is not False for mask in masks.values())
    added = module.bias_k is not None or module.bias_v is not None or module.add_zero_attn
    return same and module._qkv_same_embed_dim and not (need_weights or masked or added)


def split_heads(qkv: Tensor, heads: int) -> tuple[Tensor, ...]:
    """Split (B, tokens, 3 * heads * d) into q, k, v, (B, heads, tokens, d) each."""
    split = torch.unflatten(qkv, -1, (3, heads, -1))
    return torch.unbind(split.permute(2, 0, 3, 1, 4))


def class_name(module: nn.Module) -> str:
    """Return the module path and name of the class."""
    return f"{type(module).__module__}.{type(module).__qualname__}"
