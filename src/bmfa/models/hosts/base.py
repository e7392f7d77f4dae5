"""What a host provides: its layers, and how their attention is replaced by another function.

`bmfa.models.hosts.find_vision_transformer` finds the host of a model.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from bmfa.grid import Grid
from bmfa.models.override import has_instance_forward
from bmfa.models.padding_mask import valid_keys
from bmfa.models.token_grid import TokenGrid

_ATTRIBUTE = "bmfa_attention"
_REPR = "extra_repr"  # the method of nn.Module that adds text to the repr of a module


@dataclass(eq=False)
class AttentionFunction:
    """Replaces `scaled_dot_product_attention` in one layer; it checks the arguments of the host."""

    layer: int
    token_grid: TokenGrid

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
    ) -> Tensor:
        if is_causal:
            raise ValueError(
                "causal attention is not supported in patched or reduced models, whose tokens form a "
                "grid; call bmfa.unpatch(model)"
            )
        if dropout_p > 0.0:
            raise ValueError(
                f"attention dropout of {dropout_p:g} is not supported in patched or reduced models; "
                "call model.eval(), or build the model with attention dropout 0"
            )
        scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
        valid = (
            None
            if attn_mask is None
            else valid_keys(attn_mask, self.token_grid.prefix, self.token_grid.suffix)
        )
        return self.compute(query, key, value, scale, valid)

    def describe(self) -> str:
        """Return the settings of the layer as text, for the repr of its module."""
        return ""

    def uses_host(self, x: Tensor) -> bool:
        """True if the host computes this call itself.

        Args:
            x: (B, tokens, C) input of the attention, or (B, heads, tokens, d) queries.
        """
        return False

    def uses_host_on(self, grid: Grid, x: Tensor) -> bool:
        """True if the host computes this call itself; x has tokens of images with this grid."""
        return self.uses_host(x)

    def compute(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, valid: Tensor | None
    ) -> Tensor:
        """Map q, k, v (B, heads, tokens, d) to the output; valid is (B or 1, N) as in `valid_keys`."""
        raise NotImplementedError


@dataclass(frozen=True)
class _ModuleText:
    """In place of `extra_repr` of one module; an object, because functions of modules do not pickle."""

    text: str

    def __call__(self) -> str:
        return self.text


@dataclass(eq=False)
class AttentionReplacement:
    """Passes q, k, v of an attention module to a function; each host has a subclass.

    It is stored in the module's `__dict__`: it follows copies and pickles, but is not in the state dict.
    While it is not active, the module runs as the host defines it.
    """

    function: AttentionFunction
    active: bool = field(init=False, default=False)
    saved: dict[str, Any] = field(init=False, default_factory=dict)  # attributes to restore
    own_repr: Any = field(init=False, default=None)  # `extra_repr` that was set on the instance

    def install(self, module: nn.Module, *, active: bool = True) -> None:
        """Store the replacement in the module, and activate it if `active`."""
        module.__dict__[_ATTRIBUTE] = self
        parts = (module.extra_repr(), f"bmfa: {self.function.describe()}")
        self.own_repr = module.__dict__.get(_REPR)
        module.__dict__[_REPR] = _ModuleText(", ".join(part for part in parts if part))
        if active:
            self.activate(module)

    def activate(self, module: nn.Module) -> None:
        """Replace the attention of the module."""
        if not self.active:
            self._replace(module)
            self.active = True

    def deactivate(self, module: nn.Module) -> None:
        """Undo `activate`."""
        if self.active:
            self.active = False
            self._undo(module)

    def restore(self, module: nn.Module) -> None:
        """Undo `install`."""
        self.deactivate(module)
        del module.__dict__[_ATTRIBUTE]
        if isinstance(module.__dict__.get(_REPR), _ModuleText):
            del module.__dict__[_REPR]
            if self.own_repr is not None:
                module.__dict__[_REPR] = self.own_repr

    def _replace(self, module: nn.Module) -> None:
        raise NotImplementedError

    def _undo(self, module: nn.Module) -> None:
        raise NotImplementedError


@dataclass(frozen=True)
class BlockLayout:
    """Names of the modules in the two residual branches of a block, in the order of their calls.

    After the attention and the MLP, a name may also be that of a parameter, which scales the branch, or
    of an attribute that is None.
    """

    attention: tuple[str, ...]
    mlp: tuple[str, ...]
    # Argument of the block with the rotary tables, whose second last axis is that of the spatial tokens.
    rotary: str = ""


@dataclass(frozen=True, eq=False)
class VisionTransformer:
    """A vision tower and its parts, in the order in which they run."""

    replacement: Callable[[AttentionFunction], AttentionReplacement]
    tower: nn.Module
    blocks: tuple[nn.Module, ...]
    attentions: tuple[nn.Module, ...]
    projection: nn.Module  # convolution that makes patches into tokens
    prefix: int  # class, distillation and register tokens
    layout: BlockLayout | None  # None if its tokens cannot be reduced
    reads_spatial_tokens: bool  # True if something after the last block may read them
    suffix: int = 0  # detection tokens and others behind the grid
    # Installs what knows the grids; None if the output of the projection has the shape of the grid.
    watch: Callable[["VisionTransformer", TokenGrid], None] | None = None
    # Blocks whose attention is not among `attentions`, and why it stays as it is.
    dense_blocks: dict[int, str] = field(default_factory=dict)
    make_token_grid: Callable[[int, int], TokenGrid] = TokenGrid  # from prefix and suffix
    not_reducible: str = (
        ""  # why tokens cannot be reduced, if the layout is None and the class does not say
    )
    not_tunable: str = ""  # why `tune` cannot run the model: what it takes instead of pixels


def replacement_of(module: nn.Module) -> AttentionReplacement | None:
    """Return what replaces the attention of the module, or None."""
    return module.__dict__.get(_ATTRIBUTE)


def replacements_in(model: nn.Module) -> list[tuple[nn.Module, AttentionReplacement]]:
    """List the modules of a model whose attention is replaced, with the replacements."""
    pairs = ((module, replacement_of(module)) for module in model.modules())
    return [(module, replacement) for module, replacement in pairs if replacement is not None]


def attention_heads(module: Any, width: int) -> tuple[int, int] | None:
    """Return the number of heads of an attention module and their dimension, None if unknown.

    Args:
        module: An attention module.
        width: The width of the tokens, from which the dimension follows if the module does not have it.
    """
    names = ("num_heads", "num_attention_heads", "heads")
    heads = next((getattr(module, name) for name in names if hasattr(module, name)), None)
    if not heads:
        return None
    width = getattr(module, "dim_out", width)  # of a block that changes the width
    dimension = int(getattr(module, "head_dim", None) or width // int(heads))
    if hasattr(module, "rel_pos_h"):  # one more for each row and column, see `relative.py`
        dimension += (len(module.rel_pos_h) + len(module.rel_pos_w)) // 2 + 1
    return int(heads), dimension


def class_name(module: nn.Module) -> str:
    """Return the module path and name of the class."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def is_noop(module: nn.Module) -> bool:
    """Return True if calling the module returns its input: skipping it saves time in small models."""
    kind = type(module)
    if not (kind is nn.Identity or (kind is nn.Dropout and not module.training)):
        return False
    return not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or has_instance_forward(module)
    )
