"""The parts of a reduced model: its blocks and attention layers, and the pass they share."""

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from bmfa.grid import Grid
from bmfa.models.screens import Place, Replacement, valid_keys
from bmfa.reduction import Moment, Policy
from bmfa.reduction.backends import attend

_NAME = "bmfa_reduced"


@dataclass(frozen=True)
class Branches:
    """The two residual branches of a block: the names of their modules, one after the other."""

    attention: tuple[str, ...]
    mlp: tuple[str, ...]
    # Classes, by module and name, whose children run one after the other.
    sequences: frozenset[tuple[str, str]] = frozenset()


@dataclass(eq=False)
class Pass:
    """Pictures on their way through the blocks; what `unmerge` needs outlives the pass.

    Copies and pickles of a model take the policy along, not the pictures.
    """

    place: Place
    policy: Policy
    depth: int
    backend: str
    dense: bool
    layer: int = 0  # the block now running
    grid: Grid | None = None
    tokens: int = 0  # with the prefix
    size: Tensor | None = None  # (B, T) float32; None while every token stands for itself
    keys: Tensor | None = None
    mass: Tensor | None = None
    targets: list[Tensor] = field(default_factory=list)
    spreads: list[Tensor] = field(default_factory=list)

    def __getstate__(self) -> dict[str, Any]:
        return Pass(self.place, self.policy, self.depth, self.backend, self.dense).__dict__

    def enter(self, layer: int, x: Tensor) -> None:
        """A block begins; the first one begins a pass."""
        if layer == 0:
            grid = self.place.of(x.shape[1])
            self.policy.check(grid, self.place.prefix, self.depth)
            self.grid, self.layer, self.tokens = grid, 0, x.shape[1]
            self.size, self.targets, self.spreads = None, [], []
        if layer != self.layer or x.shape[1] != self.tokens or self.grid is None:
            raise RuntimeError(
                f"block {layer} runs on {x.shape[1]} tokens where block {self.layer} on {self.tokens} "
                "was next; call the whole model, without gradient checkpointing"
            )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attention of the block now running."""
        reads_mass = self.policy.reads_mass(self.layer, self.depth)
        self.keys, self.mass = k, None
        size = self.size if self.policy.proportional else None
        if size is None and not reads_mass:
            return scaled_dot_product_attention(q, k, v, scale=scale)
        size = self._ones(k) if size is None else size
        output, self.mass = attend(
            q,
            k,
            v,
            size,
            scale=scale,
            prefix=self.place.prefix,
            mass=reads_mass,
            others=self.policy.reads_others,
            backend=self.backend,
        )
        return output

    def reduce(self, x: Tensor, stage: Literal["attention", "mlp"]) -> Tensor:
        """The tokens that the policy leaves at this stage of the block."""
        if stage != self.policy.stage or self.keys is None or self.grid is None:
            return x
        size = self._ones(self.keys) if self.size is None else self.size
        moment = Moment(
            self.layer,
            self.depth,
            self.grid,
            self.place.prefix,
            x,
            size,
            self.keys,
            self.mass,
            self.backend,
        )
        if torch.is_autocast_enabled(x.device.type):
            # Costs differ by less than half types resolve, so autocast ends here.
            with torch.autocast(x.device.type, enabled=False):
                step = self.policy.step(moment)
        else:
            step = self.policy.step(moment)
        if step is None:
            return x
        self.size, self.tokens = step.size, step.x.shape[1]
        self.targets += [] if step.target is None else [step.target]
        self.spreads += [] if step.spread is None else [step.spread]
        return step.x

    def leave(self, x: Tensor) -> Tensor:
        """A block ends; the last one ends the pass."""
        self.keys = self.mass = None
        self.layer += 1
        if self.layer < self.depth:
            return x
        if self.size is not None:
            self.size = self.size.detach()
        return self.restore(x) if self.dense else x

    def restore(self, tokens: Tensor) -> Tensor:
        """(B, prefix + N, C) of the last tokens (B, T', C)."""
        prefix = self.place.prefix
        if self.spreads:
            matrix = torch.linalg.multi_dot(self.spreads) if self.spreads[1:] else self.spreads[0]
            spatial = matrix.to(tokens.dtype) @ tokens[:, prefix:]
            return torch.cat((tokens[:, :prefix], spatial), 1)
        if not self.targets:
            return tokens
        source = self.source()
        return tokens.gather(1, source.unsqueeze(-1).expand(-1, -1, tokens.shape[2]))

    def source(self) -> Tensor:
        """(B, prefix + N) the last token that holds each token of the grid.

        A token that was pruned has that of the nearest one on the grid that was not, the first in
        raster order among equals.
        """
        first, *others = (target.long() for target in self.targets)
        source = first
        for target in others:
            source = target.gather(1, source.clamp(min=0)).where(source >= 0, source)
        if self.grid is not None and bool((source < 0).any()):
            spatial = source[:, self.place.prefix :]
            for row in spatial:
                _fill_pruned(row, self.grid)
        return source

    def _ones(self, k: Tensor) -> Tensor:
        return torch.ones(k.shape[0], k.shape[2], device=k.device)


class ReducedBlock:
    """The forward of one block with the policy at work; copies and pickles with the block."""

    def __init__(self, block: nn.Module, layer: int, branches: Branches, run: Pass) -> None:
        self.block = block
        self.layer = layer
        self.branches = branches
        self.run = run

    def install(self) -> None:
        """Replace the forward of the instance."""
        self.block.__dict__[_NAME] = self
        self.block.__dict__["forward"] = self

    def restore(self) -> None:
        """Undo `install`."""
        del self.block.__dict__[_NAME]
        del self.block.__dict__["forward"]

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.run.enter(self.layer, x)
        norm, attention, *rest = self.branches.attention
        attended = getattr(self.block, attention)(getattr(self.block, norm)(x), *args, **kwargs)
        x = x + self._chain(attended[0] if isinstance(attended, tuple) else attended, rest)
        x = self.run.reduce(x, "attention")
        x = x + self._chain(x, self.branches.mlp)
        x = self.run.reduce(x, "mlp")
        return self.run.leave(x)

    def _chain(self, x: Tensor, names: tuple[str, ...] | list[str]) -> Tensor:
        for name in names:
            module = getattr(self.block, name)
            kind = type(module)
            if (kind.__module__, kind.__name__) in self.branches.sequences and not hooked(module):
                x = in_order(module, x)
            elif not idle(module):
                x = module(x)
        return x


@dataclass(eq=False)
class SizedAttention(Replacement):
    """Attention among tokens that stand for several."""

    run: Pass

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
            raise ValueError("causal attention is not reduced; unpatch the model")
        if dropout_p > 0.0:
            raise ValueError(
                f"attention dropout of {dropout_p:g} is not served; "
                "call model.eval(), or build the model with attention dropout 0"
            )
        if attn_mask is not None and valid_keys(attn_mask, self.place.prefix) is not None:
            raise ValueError(
                "attention masks are not served on merged tokens; pass pictures without padding"
            )
        scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
        return self.run.attend(query, key, value, scale)


def idle(module: nn.Module) -> bool:
    """Whether a module does nothing now; small models spend more time calling than computing."""
    kind = type(module)
    nothing = kind is nn.Identity or (kind is nn.Dropout and not module.training)
    return nothing and not hooked(module)


def hooked(module: nn.Module) -> bool:
    """Whether calling the module runs more than its forward."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


def in_order(module: nn.Module, x: Tensor) -> Tensor:
    """The children of a module, one after the other."""
    for child in module._modules.values():
        if child is not None and not idle(child):
            x = child(x)
    return x


def reduced_blocks(model: nn.Module) -> list[ReducedBlock]:
    """The reduced blocks of a model."""
    found = (module.__dict__.get(_NAME) for module in model.modules())
    return [block for block in found if block is not None]


def _fill_pruned(source: Tensor, grid: Grid) -> None:
    """Give the pruned of (N) tokens, those with source -1, the source of their nearest neighbour."""
    place = torch.arange(grid.size, device=source.device)
    at = torch.stack((place // grid.width, place % grid.width), -1)
    pruned, present = source < 0, source >= 0
    distance = (at[pruned].unsqueeze(1) - at[present]).square().sum(-1)
    source[pruned] = source[present][distance.argmin(1)]
