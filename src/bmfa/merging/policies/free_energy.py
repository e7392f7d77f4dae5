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
- mass: pi_j is what the prefix queries give to token j, on average: the output is read from the class
  query. A model without prefix reads it from all tokens, so there pi_j is the mean over all queries.

    cost(a, b) = (pi_a + pi_b) |LN(x_a) - LN(x_b)|^2

Every second block merges, from a quarter of the depth on, and never the last, behind whose attention
nothing but the output is read. Early tokens have seen few perceptrons and an early class query has seen
little of its picture, so neither factor says much of what later blocks will read: with every second
block from the second on merging, DeiT-Tiny at r = 8 loses more than three times the output KL. And a
merging has a price of its own, whatever it merges. The few blocks share out the budget of all, and as
many tokens are left behind the last as ToMe leaves, as long as no block wants more than half of its
tokens. On DeiT-Tiny attention and perceptrons together read 3 % more tokens than under ToMe at r = 8,
5 % more at r = 12. The schedule has its part in what is gained: with the cosine of keys, ToMe's cost,
it gives 0.47 and 0.57 of ToMe's output KL, and mass times distortion 0.50 and 0.57 of that.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from bmfa.grid import Grid
from bmfa.merging.policies.base import Moment, Policy, Step, check_budget, check_pairs, removed


@dataclass(frozen=True)
class FreeEnergy(Policy):
    """Bipartite matching by mass times distortion; means weighted by size.

    The budget is that of ToMe, a whole number of tokens or a share for each block; the blocks that
    merge spend it for all.
    """

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
        return layer in _acting(depth)

    def step(self, moment: Moment) -> Step | None:
        """Merge."""
        r = min(self._removed(moment), moment.tokens // 2)
        if r == 0:
            return None
        # The layer norm of the tokens, and all parts of the mass together.
        return moment.merge(None, moment.parts, r, "sum")

    def _removed(self, moment: Moment) -> int:
        """The tokens that leave this block, the larger counts first where they differ."""
        acting = _acting(moment.depth)
        if moment.layer not in acting:
            return 0
        if isinstance(self.budget, int):
            done, total = acting.index(moment.layer), self.budget * moment.depth
            before, behind = (-(-total * count // len(acting)) for count in (done, done + 1))
            return behind - before
        return removed(self.budget ** (moment.depth / len(acting)), moment.tokens)


def _acting(depth: int) -> Sequence[int]:
    """The blocks that merge; of one or two blocks the last, as there is no other."""
    return range(max(1, depth // 4), depth - 1, 2) or range(depth - 1, depth)
