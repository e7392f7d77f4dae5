"""Ours: merge the pairs whose merging costs the least free energy.

Attention of a query reads the tokens through F = log sum_j s_j exp(u_j), u_j its scores and s_j the
sizes. Merging a and b replaces their two terms by (s_a + s_b) exp(mean u), the score of the mean token
to first order. What is lost locally is the gap of the pair,

    G = log mean exp(u) - mean u  ~  variance(u) / 2  =  s_a s_b / (s_a + s_b)^2 (u_a - u_b)^2 / 2
      <=  (u_a - u_b)^2 / 8,

and what is lost of F is, by the global identity, E = -log(1 - pi (exp(G) - 1)) ~ pi G, where pi is the
attention mass of the pair: mass times distortion. A pair without mass may differ and harm nothing, and
equal tokens merge for nothing whatever their mass. Two readings make that a cost for all queries:

- distortion: a query's scores are linear in the normalised token, so over queries of no preferred
  direction (u_a - u_b)^2 is proportional to |LN(x_a) - LN(x_b)|^2. The tokens are those behind the
  residual of the attention just computed, nearer to what the next block reads than its keys are.
- mass: pi_j is what the class query gives to token j plus what the other queries give to it on
  average: the output is read from the one, and the one reads from the others in every later block.

    cost(a, b) = (pi_a + pi_b) |LN(x_a) - LN(x_b)|^2

Nothing merges in the first block. Its tokens have seen no perceptron and its class query is the same
for every picture, so neither factor says much of what later blocks will read: merging there alone
costs DeiT-Tiny as much as merging in all the others. The blocks behind it share out its budget, and
as many tokens are left behind the last block as ToMe leaves; the tokens of all blocks together are
3 % more than ToMe's at r = 8, 5 % at r = 12. Under this schedule ToMe's cost alone, the cosine of
keys, gives about twice the output KL that mass times distortion gives.
"""

from dataclasses import dataclass
from typing import ClassVar

from bmfa.grid import Grid
from bmfa.reduction.base import Moment, Policy, Step, check_budget, check_pairs, removed


@dataclass(frozen=True)
class FreeEnergy(Policy):
    """Bipartite matching by mass times distortion; means weighted by size.

    The budget is that of ToMe, a whole number of tokens or a share for each block, the first block's
    spread over the others.
    """

    reads_others: ClassVar[bool] = True
    budget: int | float

    def __post_init__(self) -> None:
        check_budget(self.budget, least=0.5)

    def __str__(self) -> str:
        return f"free-energy:{self.budget!r}"

    def check(self, grid: Grid, prefix: int, depth: int) -> None:
        """At most half of the tokens find a partner."""
        check_pairs(self, self.budget, grid)

    def reads_mass(self, layer: int, depth: int) -> bool:
        """In the blocks that merge."""
        return layer >= _first(depth)

    def step(self, moment: Moment) -> Step | None:
        """Merge."""
        r = min(self._removed(moment), moment.tokens // 2)
        if r == 0:
            return None
        # The layer norm of the tokens, and all parts of the mass together.
        return moment.merge(None, moment.parts, r, "sum")

    def _removed(self, moment: Moment) -> int:
        """The tokens that leave this block: L blocks' worth in the L - 1 behind the first."""
        first = _first(moment.depth)
        acting = moment.depth - first
        if moment.layer < first:
            return 0
        if isinstance(self.budget, int):
            total, done = self.budget * moment.depth, moment.layer - first
            return total * (done + 1) // acting - total * done // acting
        return removed(self.budget ** (moment.depth / acting), moment.tokens)


def _first(depth: int) -> int:
    """The first block that merges; a single block has no other to leave it to."""
    return min(1, depth - 1)
