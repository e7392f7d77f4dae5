"""Free-energy merging: merge the pairs that change the free energy of attention the least.

A query reads the tokens through F = log sum_j s_j exp(u_j), with its scores u_j and the sizes s_j.
Merging a and b replaces their two terms by (s_a + s_b) exp(mean u), to first order the score of the
average token. The loss within the pair is its gap,

    G = log mean exp(u) - mean u  ~  variance(u) / 2  =  s_a s_b / (s_a + s_b)^2 (u_a - u_b)^2 / 2
      <=  (u_a - u_b)^2 / 8,

and by the global identity the loss of F is E = -log(1 - pi (exp(G) - 1)) ~ pi G, where pi is the
attention mass of the pair: mass times distortion. A pair without mass may differ, and a pair of
equal tokens may have any mass. Two approximations turn this into one cost for all queries:

- Distortion: the scores of a query are linear in the normalised token, so for queries without a
  preferred direction (u_a - u_b)^2 is proportional to |LN(x_a) - LN(x_b)|^2. The tokens are taken
  after the residual connection of attention: they are closer to what the next block reads than the
  keys are.
- Mass: pi_j is the average attention of the prefix queries on token j, because the class token is
  the output. A model without prefix averages its tokens, and there pi_j is the average over all
  queries.

    cost(a, b) = (pi_a + pi_b) |LN(x_a) - LN(x_b)|^2

Every second block merges, from a quarter of the depth on, except the last. Early tokens have passed
through few MLPs, and an early class query has read little of its image, so neither factor
predicts what later blocks read: if every second block from the second on merges, DeiT-Tiny at r = 8
loses more than three times the output KL.

These blocks share the budget of all blocks, so that as many tokens remain at the end as with ToMe,
unless a block would have to remove more than half of its tokens. On DeiT-Tiny attention and MLPs
read 3 % more tokens than with ToMe at r = 8, and 5 % more at r = 12. The schedule alone, with
ToMe's cosine of keys as the cost, gives 0.47 and 0.57 of ToMe's output KL; the cost gives 0.50 and
0.57 of that. `bmfa evaluate` measures both.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from bmfa.merging.policies.base import BudgetPolicy, LayerState, ReducedTokens, removed_count


@dataclass(frozen=True)
class FreeEnergy(BudgetPolicy):
    """Bipartite matching by attention mass times distortion; averages weighted by size.

    Args:
        budget: as for `ToMe`: int, number of tokens removed per block of the model; or float in
            [0.5, 1], fraction of the spatial tokens kept per block. The blocks that merge share the
            budget of all. A schedule, the number of tokens that each block removes, chooses the
            blocks as well; `bmfa.tune_reduction` finds one.

    Raises:
        ValueError: the budget is out of range.
        TypeError: the budget is neither a number nor a schedule.

    Example:
        >>> import bmfa
        >>> [layer for layer in range(12) if bmfa.merging.FreeEnergy(8).reads_mass(layer, 12)]
        [3, 5, 7, 9]
        >>> str(bmfa.merging.FreeEnergy([0, 0, 0, 12, 0, 20, 0, 0]))
        'free-energy:0,0,0,12,0,20,0,0'
    """

    name: ClassVar[str] = "free-energy"

    def reads_mass(self, layer: int, depth: int) -> bool:
        if isinstance(self.budget, tuple):
            return self.budget[layer] > 0
        return layer in _merging_blocks(depth)

    def remove(self, state: LayerState, r: int) -> ReducedTokens:
        return state.merge_cheapest(r, weight=state.required_mass)

    def removed(self, state: LayerState) -> int:
        if isinstance(self.budget, tuple):
            return super().removed(state)
        blocks = _merging_blocks(state.depth)
        if state.layer not in blocks:
            return 0
        if isinstance(self.budget, int):
            # Blocks remove equal counts; where they must differ by one, the earlier remove more.
            done, total = blocks.index(state.layer), self.budget * state.depth
            before, after = (-(-total * count // len(blocks)) for count in (done, done + 1))
            count = after - before
        else:
            count = removed_count(self.budget ** (state.depth / len(blocks)), state.tokens)
        return min(count, self.max_removed(state.tokens))


def _merging_blocks(depth: int) -> Sequence[int]:
    """Return the blocks that merge; the last one if the model has one or two blocks."""
    return range(max(1, depth // 4), depth - 1, 2) or range(depth - 1, depth)
