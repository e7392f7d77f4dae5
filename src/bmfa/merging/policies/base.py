"""The interface of a token-reduction policy: `LayerState` in, `ReducedTokens` out.

`bmfa/merging/policies/__init__.py` lists what to change to add a policy.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

import torch
from torch import Tensor

from bmfa.checks import check_integer, check_number
from bmfa.grid import Grid
from bmfa.merging.dispatch import Backend, merge_tokens, unit_mean_keys
from bmfa.merging.operation import assign, pool

# Fractions are decimal numbers such as 0.95: a product that misses an integer by less than this is
# rounding.
_ROUNDING = 1e-9


@dataclass(frozen=True, eq=False)
class LayerState:
    """The tokens of one block as a policy sees them, after its attention or after its MLP.

    Args:
        layer: index of the block.
        depth: number of blocks of the model.
        grid: grid of the spatial tokens before any reduction.
        prefix: number of leading tokens that are not spatial.
        x: (B, T, C) tokens, prefix tokens first.
        size: (B, T) float32, number of original tokens that each token stands for.
        k: (B, H, T, d) keys of the attention of this block.
        mass: (B, parts, T) float32; summed over its parts it is the attention that each token
            receives, averaged over the prefix queries (over all queries if prefix is 0) and summed
            over heads. None unless `Policy.reads_mass` asked for it.
        backend: backend of the merge operation.

    Example:
        >>> import torch
        >>> from bmfa import Grid, merging
        >>> x, k = torch.randn(1, 17, 8), torch.randn(1, 2, 17, 4)
        >>> state = merging.LayerState(0, 12, Grid(4, 4), 1, x, torch.ones(1, 17), k)
        >>> state.tokens
        16
    """

    layer: int
    depth: int
    grid: Grid
    prefix: int
    x: Tensor
    size: Tensor
    k: Tensor
    mass: Tensor | None = None
    backend: Backend = "auto"

    @property
    def tokens(self) -> int:
        """Number of tokens that can be reduced: T - prefix."""
        return self.x.shape[1] - self.prefix

    @property
    def unit_keys(self) -> Tensor:
        """(B, T, d) means over heads of the keys, each normalised to unit length."""
        return unit_mean_keys(self.k, self.backend)

    @property
    def cosines(self) -> Tensor:
        """(B, T - prefix, T - prefix) float32 cosines of the unit keys."""
        keys = self.unit_keys[:, self.prefix :].float()
        return keys @ keys.transpose(1, 2)

    @property
    def attention(self) -> Tensor:
        """(B, T) attention that each token receives, averaged over heads too; raises without mass."""
        return self.required_mass.sum(1) / self.k.shape[1]

    @property
    def required_mass(self) -> Tensor:
        """The mass, (B, parts, T); RuntimeError if it was not computed."""
        if self.mass is None:
            raise RuntimeError(
                "the attention mass was not computed; return True from reads_mass for this block"
            )
        return self.mass

    def merge_cheapest(
        self, r: int, *, keys: Tensor | None = None, weight: Tensor | None = None
    ) -> "ReducedTokens":
        """Merge the r cheapest pairs by bipartite matching; see `bmfa.merging.dispatch.merge_tokens`."""
        x, size, assignment = merge_tokens(
            self.x, self.size, keys, weight, r, prefix=self.prefix, backend=self.backend
        )
        return ReducedTokens(x, size, assignment)

    def merge_pairs(self, source: Tensor, destination: Tensor) -> "ReducedTokens":
        """Merge tokens at `source` (B, r) into those at `destination`; the order of the rest is kept.

        Positions count spatial tokens only. The merged tokens are averages weighted by size.
        """
        total = self.x.shape[1]
        assignment = assign(source + self.prefix, destination + self.prefix, total)
        return self.pooled(assignment, total - source.shape[1])

    def pooled(
        self, assignment: Tensor, count: int, weight: Tensor | None = None
    ) -> "ReducedTokens":
        """Average the tokens of each new position; see `bmfa.merging.operation.pool`."""
        x, size = pool(self.x, self.size, assignment, count, weight)
        return ReducedTokens(x, size, assignment)


@dataclass(frozen=True, eq=False)
class ReducedTokens:
    """The tokens that a policy returns, and how to map them back to the tokens it received.

    Args:
        x: (B, T', C) tokens, prefix tokens first.
        size: (B, T') float32, number of original tokens that each token stands for.
        assignment: (B, T) new position of every old token, -1 if it was pruned.
        unmerge_matrix: (T - prefix, T' - prefix) matrix from new to old spatial tokens, for
            policies that transform the sequence and have no assignment.

    Example:
        >>> import torch
        >>> from bmfa.merging import ReducedTokens
        >>> reduced = ReducedTokens(torch.zeros(1, 2, 8), torch.ones(1, 2), torch.tensor([[0, 1, 1]]))
        >>> reduced.x.shape[1]
        2
    """

    x: Tensor
    size: Tensor
    assignment: Tensor | None = None
    unmerge_matrix: Tensor | None = None


@dataclass(frozen=True)
class Policy:
    """Base class of token-reduction policies: immutable, with parameters checked on construction.

    Subclasses implement `reduce`, and override the class attributes and the other methods if
    needed. `str(policy)` is the command-line name, which `parse` reads back.

    Attributes:
        name: command-line name without the parameter.
        stage: the policy acts after this part of the block, "attention" or "mlp".
        proportional: True if attention adds log(size) to the scores.
        prunes: True if tokens can be dropped without being merged into another.
        transforms: True if the tokens that remain are linear combinations of all tokens, which have no
            position on the grid.

    Example:
        >>> from dataclasses import dataclass, fields
        >>> import torch
        >>> from bmfa import Grid, merging
        >>> @dataclass(frozen=True)
        ... class MergeFirstPair(merging.Policy):
        ...     def reduce(self, state):
        ...         first = torch.zeros(len(state.x), 1, dtype=torch.long)
        ...         return state.merge_pairs(first + 1, first)
        >>> x, k = torch.randn(1, 17, 8), torch.randn(1, 2, 17, 4)
        >>> state = merging.LayerState(0, 12, Grid(4, 4), 1, x, torch.ones(1, 17), k)
        >>> MergeFirstPair().reduce(state).size[0, :3].tolist()
        [1.0, 2.0, 1.0]
    """

    name: ClassVar[str] = ""
    stage: ClassVar[Literal["attention", "mlp"]] = "attention"
    proportional: ClassVar[bool] = True
    prunes: ClassVar[bool] = False
    transforms: ClassVar[bool] = False

    def __str__(self) -> str:
        values = [getattr(self, field.name) for field in fields(self)]
        return f"{self.name}:{values[0]!r}" if values else self.name

    def check(self, grid: Grid, prefix: int, depth: int) -> None:
        """Raise ValueError if the parameters do not fit a model with this grid, prefix and depth."""

    def reads_mass(self, layer: int, depth: int) -> bool:
        """Return True if `reduce` reads the attention mass of this block."""
        return False

    def reduce(self, state: LayerState) -> ReducedTokens | None:
        """Return the tokens that remain, or None if this block keeps all of them."""
        raise NotImplementedError


@dataclass(frozen=True)
class FractionPolicy(Policy):
    """Base class of policies whose parameter is the fraction that a block keeps, in (0, 1].

    Raises:
        ValueError: the fraction is out of range.
        TypeError: the fraction is not a number.
    """

    fraction: float

    def __post_init__(self) -> None:
        check_number("fraction kept", self.fraction, low=0.0, high=1.0, open_low=True)


@dataclass(frozen=True)
class BudgetPolicy(Policy):
    """Base class of policies with a budget: an int removes tokens, a float keeps a fraction per block.

    Args:
        budget: int, number of tokens that every block removes; or float in [`min_fraction`, 1],
            fraction of the spatial tokens that every block keeps; or a schedule, a tuple or list of
            the number of tokens that each block removes. With a number, a block with too few tokens
            removes what it can; a schedule that removes too many is refused in the forward pass.

    Raises:
        ValueError: the budget is out of range.
        TypeError: the budget is neither a number nor a schedule.
    """

    min_fraction: ClassVar[float] = 0.5  # a pair leaves one of two tokens
    budget: int | float | tuple[int, ...]

    def __post_init__(self) -> None:
        if isinstance(self.budget, (list, tuple)):
            object.__setattr__(self, "budget", check_schedule(self.budget))
        else:
            check_budget(self.budget, least=self.min_fraction)

    def __str__(self) -> str:
        if isinstance(self.budget, tuple):
            return f"{self.name}:{','.join(map(str, self.budget))}"
        return super().__str__()

    def check(self, grid: Grid, prefix: int, depth: int) -> None:
        if isinstance(self.budget, tuple):
            self._check_schedule(self.budget, grid, depth)
            return
        count, most = removed_count(self.budget, grid.size), self.max_removed(grid.size)
        if count > most:
            raise ValueError(
                f"{self} removes {count} tokens a block, but of the {grid.size} tokens of a "
                f"{grid.height}x{grid.width} grid at most {most} can be removed; pass at most {most}"
            )

    def reduce(self, state: LayerState) -> ReducedTokens | None:
        count = self.removed(state)
        return self.remove(state, count) if count else None

    def remove(self, state: LayerState, r: int) -> ReducedTokens:
        """Return the tokens that remain when r of them, at least 1, are merged or pruned."""
        raise NotImplementedError

    def max_removed(self, tokens: int) -> int:
        """Return how many of `tokens` spatial tokens one block can remove."""
        return tokens // 2

    def removed(self, state: LayerState) -> int:
        """Return how many tokens this block removes."""
        if isinstance(self.budget, tuple):
            return self.budget[state.layer]
        count = removed_count(self.budget, state.tokens)
        return min(count, self.max_removed(state.tokens))

    def _check_schedule(self, schedule: tuple[int, ...], grid: Grid, depth: int) -> None:
        if len(schedule) != depth:
            raise ValueError(
                f"{self} has {len(schedule)} counts, and the model has {depth} blocks; pass one for "
                "each block"
            )
        tokens = grid.size
        for block, count in enumerate(schedule):
            if count > (most := self.max_removed(tokens)):
                raise ValueError(
                    f"{self} removes {count} tokens in block {block}, but of the {tokens} tokens that "
                    f"a {grid.height}x{grid.width} grid has left there at most {most} can be removed; "
                    "pass fewer, or larger images"
                )
            tokens -= count


def check_budget(budget: object, *, least: float = 0.0) -> None:
    """Raise unless the budget is a count (int) or a fraction (float) from `least` (not 0) to 1."""
    if isinstance(budget, int) and not isinstance(budget, bool):
        check_integer("tokens removed from a block", budget, low=0)
    else:
        check_number("fraction kept by a block", budget, low=least, high=1.0, open_low=least == 0.0)


def check_schedule(schedule: Sequence[object]) -> tuple[int, ...]:
    """Return the counts of a schedule; raise unless they are integers from 0 on, at least one."""
    if not schedule:
        raise ValueError("a schedule without counts; pass one for each block of the model")
    return tuple(check_integer("tokens removed from a block", n, low=0) for n in schedule)


def removed_count(budget: int | float, tokens: int) -> int:
    """Return how many of `tokens` spatial tokens a budget removes."""
    if isinstance(budget, int):
        return budget
    return math.floor(tokens - budget * tokens + _ROUNDING)


def kept_count(fraction: float, tokens: int) -> int:
    """Return the least integer that is at least fraction * tokens."""
    return math.ceil(fraction * tokens - _ROUNDING)


def without_diagonal(cosines: Tensor) -> Tensor:
    """Return (B, n, n) with -inf on the diagonal, so that no token matches itself."""
    diagonal = cosines.new_full(cosines.shape[:2], -torch.inf)
    return cosines.diagonal_scatter(diagonal, dim1=1, dim2=2)
