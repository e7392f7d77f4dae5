"""Search the schedule of a merging policy, the tokens that each block removes, for a budget.

The change of a schedule is the mean KL divergence of the class probabilities from those of the full
model. It varies less between samples of images than a count of images whose class changes.

1. Alone: the change if one block removes some tokens, for each block and a few counts.
2. Greedy: starting from no merges, the block with the least predicted change for each operation saved
   removes a few tokens more, until the budget holds. Changes are taken to add, each for the share of
   the tokens that a block removes. A token removed early saves more operations, because all later
   blocks work without it.
3. Exchange: whole schedules are measured. Each block removes a few tokens more, and a few fewer; the
   best exchanges between two blocks at the same budget are tried, and kept if the change falls.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Schedule = tuple[int, ...]

# Shares of the tokens that a block removes alone; the change between them is interpolated by a power.
ALONE_SHARES = (1 / 12, 1 / 4)
# Steps of the greedy allocation and of the exchanges, as shares of the tokens: 4 and 8 of 196.
GREEDY_SHARE = 1 / 48
EXCHANGE_SHARE = 1 / 24
# Exchanges that are measured for each step: those with the least predicted change.
EXCHANGES = 3
# Schedules whose operations are counted to fit `CostModel`, twice its coefficients.
COUNTED_SCHEDULES = 14


@dataclass(frozen=True, eq=False)
class CostModel:
    """Operations of a schedule, as a polynomial of the tokens that enter each block.

    A block costs a T + b T^2 for its attention, c (T - r) for its MLP, and, if it merges,
    d + e T + f T^2 for the matching; the rest of the model is a constant. The coefficients are fitted to
    counts, so the formula holds for any policy whose matching is at most quadratic.
    """

    tokens: int  # spatial tokens before the first block
    coefficients: NDArray[np.float64]  # (7,)

    @classmethod
    def fit(
        cls, tokens: int, depth: int, most: Callable[[int], int], count: Callable[[Schedule], int]
    ) -> "CostModel":
        """Fit the coefficients to counted schedules.

        Args:
            tokens: Spatial tokens before the first block.
            depth: Number of blocks.
            most: Returns how many of some tokens one block can remove.
            count: Counts the operations of a schedule.
        """
        random = np.random.default_rng(0)
        schedules: list[Schedule] = [(0,) * depth]
        while len(schedules) < COUNTED_SCHEDULES:
            left, schedule = tokens, []
            for _ in range(depth):
                merges = random.random() < 0.5
                removed = int(random.integers(1, max(2, tokens // depth))) if merges else 0
                schedule.append(min(removed, most(left)))
                left -= schedule[-1]
            schedules.append(tuple(schedule))
        rows = np.array([_cost_terms(tokens, schedule) for schedule in schedules])
        counts = np.array([count(schedule) for schedule in schedules], dtype=np.float64)
        scale = np.abs(rows).max(0).clip(min=1.0)
        solution = np.linalg.lstsq(rows / scale, counts, rcond=None)[0]
        return cls(tokens, solution / scale)

    def flops(self, schedule: Schedule) -> float:
        """Return the operations of a schedule."""
        return float(np.dot(_cost_terms(self.tokens, schedule), self.coefficients))


def _cost_terms(tokens: int, schedule: Schedule) -> NDArray[np.float64]:
    before = tokens - np.cumsum((0, *schedule[:-1]), dtype=np.float64)
    removed = np.array(schedule, dtype=np.float64)
    merging = removed > 0
    return np.array(
        [
            1.0,
            before.sum(),
            np.square(before).sum(),
            (before - removed).sum(),
            merging.sum(),
            before[merging].sum(),
            np.square(before[merging]).sum(),
        ]
    )


@dataclass(eq=False)
class ScheduleSearch:
    """Searches schedules of one model and one policy.

    Args:
        tokens: Spatial tokens before the first block.
        blocks: The blocks that may remove tokens.
        depth: Number of blocks.
        most: Returns how many of some tokens one block can remove.
        cost: Operations of a schedule.
        change: Measures the change of a schedule on the choosing images.
        sampled_change: The same on some of them. It ranks what to try; whether an exchange is kept is
            decided by `change`.
    """

    tokens: int
    blocks: Sequence[int]
    depth: int
    most: Callable[[int], int]
    cost: CostModel
    change: Callable[[Schedule], float]
    sampled_change: Callable[[Schedule], float]
    alone: dict[tuple[int, int], float] = field(default_factory=dict)  # by block and count
    measured: dict[Schedule, float] = field(default_factory=dict)
    sampled: dict[Schedule, float] = field(default_factory=dict)

    def measure(self, schedule: Schedule) -> float:
        """Return the change of a schedule, measured once."""
        if schedule not in self.measured:
            self.measured[schedule] = self.change(schedule) if any(schedule) else 0.0
        return self.measured[schedule]

    def sample(self, schedule: Schedule) -> float:
        """Return the change of a schedule on some of the images, measured once."""
        if schedule not in self.sampled:
            self.sampled[schedule] = self.sampled_change(schedule) if any(schedule) else 0.0
        return self.sampled[schedule]

    def fits(self, schedule: Schedule) -> bool:
        """True if every block has the tokens that the schedule removes."""
        left = self.tokens
        for removed in schedule:
            if not 0 <= removed <= self.most(left):
                return False
            left -= removed
        return True

    def measure_alone(self) -> None:
        """Measure each block alone."""
        for block in self.blocks:
            for count in self.alone_counts():
                self.alone[block, count] = self.sample(self.single(block, count))

    def alone_counts(self) -> list[int]:
        """Return the counts that a block removes alone."""
        counts = (max(1, round(share * self.tokens)) for share in ALONE_SHARES)
        return sorted({min(count, self.most(self.tokens)) for count in counts} - {0})

    def single(self, block: int, count: int) -> Schedule:
        """Return the schedule in which one block removes tokens."""
        return tuple(count if index == block else 0 for index in range(self.depth))

    def predicted_alone(self, block: int, count: float) -> float:
        """Interpolate the change of a block alone, by powers of the count between the measured ones."""
        if count == 0:
            return 0.0
        counts = self.alone_counts()
        changes = [max(self.alone[block, n], 1e-12) for n in counts]
        if len(counts) == 1:
            return changes[0] * (count / counts[0]) ** 2
        i = min(max(sum(n < count for n in counts), 1), len(counts) - 1)
        (n0, n1), (c0, c1) = counts[i - 1 : i + 1], changes[i - 1 : i + 1]
        slope = max(math.log(c1 / c0) / math.log(n1 / n0), 1.0)  # at least linear
        return float(c0 * (count / n0) ** slope)

    def predicted(self, schedule: Schedule) -> float:
        """Return the sum of the changes of the blocks alone, each for the share of its tokens.

        A block that removes r of the T tokens that are left is taken to change as much as if it removed
        the same share of all tokens.
        """
        left, total = self.tokens, 0.0
        for block, removed in enumerate(schedule):
            if removed:
                total += self.predicted_alone(block, removed * self.tokens / left)
            left -= removed
        return total

    def greedy(self, budget: float) -> Schedule | None:
        """Return a schedule of at most `budget` operations, None if there is none."""
        first, schedule = max(1, round(GREEDY_SHARE * self.tokens)), (0,) * self.depth
        while (flops := self.cost.flops(schedule)) > budget:
            options: list[tuple[float, Schedule]] = []
            predicted = self.predicted(schedule)
            # Near the end only smaller steps fit, and where matching costs more than a few tokens
            # save, only larger ones do.
            for step in (first, 1, *(first << n for n in range(1, 8))):
                options = [
                    (added / saved, grown)
                    for block in self.blocks
                    if (grown := self.clipped(self._changed(schedule, block, step)))[block]
                    > schedule[block]
                    and (saved := flops - self.cost.flops(grown)) > 0
                    and (added := self.predicted(grown) - predicted) < math.inf
                ]
                if options:
                    break
            if not options:
                return None
            schedule = min(options)[1]
        return self._relax(schedule, budget)

    def clipped(self, schedule: Schedule) -> Schedule:
        """Let blocks remove no more tokens than they can, now that earlier ones remove more."""
        left, clipped = self.tokens, []
        for removed in schedule:
            clipped.append(min(removed, self.most(left)))
            left -= clipped[-1]
        return tuple(clipped)

    def improve(self, schedule: Schedule, budget: float, rounds: int = 1) -> Schedule:
        """Exchange tokens between blocks where the measured change falls."""
        step = max(1, round(EXCHANGE_SHARE * self.tokens))
        for _ in range(rounds):
            schedule = self._exchange(schedule, budget, step)
        return schedule

    def fill(self, schedule: Schedule, block: int, budget: float) -> Schedule | None:
        """Let a block remove just as many tokens as the budget needs; None if it cannot."""
        grown = schedule
        while self.cost.flops(grown) > budget:
            grown = self._changed(grown, block, 1)
            if not self.fits(grown):
                return None
        return grown

    def _exchange(self, schedule: Schedule, budget: float, step: int) -> Schedule:
        flops, sampled = self.cost.flops(schedule), self.sample(schedule)
        price: dict[int, float] = {}  # change for each operation saved, if a block removes more
        credit: dict[int, float] = {}  # change avoided for each operation, if it removes fewer
        for block in self.blocks:
            more = self._changed(schedule, block, step)
            if self.fits(more) and (saved := flops - self.cost.flops(more)) > 0:
                price[block] = (self.sample(more) - sampled) / saved
            fewer = self._changed(schedule, block, -min(step, schedule[block]))
            if fewer != schedule and (spent := self.cost.flops(fewer) - flops) > 0:
                credit[block] = (sampled - self.sample(fewer)) / spent
        pairs = [(price[b] - credit[a], a, b) for a in credit for b in price if a != b]
        change, tried = self.measure(schedule), set()
        for gain, giver, taker in sorted(pairs)[:EXCHANGES]:
            if gain >= 0:
                break
            for amount in (2 * step, step):
                fewer = self._changed(schedule, giver, -min(amount, schedule[giver]))
                exchanged = self.fill(fewer, taker, budget)
                if exchanged is None or exchanged in tried:
                    continue
                tried.add(exchanged)
                if self.measure(exchanged) < change:
                    schedule, change = exchanged, self.measure(exchanged)
                    break
        return schedule

    def _relax(self, schedule: Schedule, budget: float) -> Schedule:
        """Return tokens while the budget holds, from the block with the largest predicted change."""
        returned = True
        while returned:
            returned = False
            for block in sorted(self.blocks, key=lambda b: -self._marginal(schedule, b)):
                fewer = self._changed(schedule, block, -1)
                if schedule[block] > 0 and self.cost.flops(fewer) <= budget:
                    schedule, returned = fewer, True
                    break
        return schedule

    def _marginal(self, schedule: Schedule, block: int) -> float:
        if schedule[block] == 0:
            return 0.0
        return self.predicted(schedule) - self.predicted(self._changed(schedule, block, -1))

    @staticmethod
    def _changed(schedule: Schedule, block: int, difference: int) -> Schedule:
        changed = list(schedule)
        changed[block] += difference
        return tuple(changed)


def spread_schedule(depth: int, blocks: Iterable[int], total: int) -> Schedule:
    """Remove a total in some blocks in equal parts; the earlier remove one more where they differ."""
    chosen = list(blocks)
    parts: Mapping[int, int] = {
        block: total // len(chosen) + (index < total % len(chosen))
        for index, block in enumerate(chosen)
    }
    return tuple(parts.get(index, 0) for index in range(depth))
