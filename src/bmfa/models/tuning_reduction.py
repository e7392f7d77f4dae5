"""Choose how many tokens each block of a model removes, on a person's images."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bmfa.checks import check_integer, check_number
from bmfa.grid import Grid
from bmfa.merging import POLICY_NAMES
from bmfa.merging.policies.base import BudgetPolicy
from bmfa.models.families import find_vision_transformer
from bmfa.models.flops import count_flops
from bmfa.models.hosts.base import replacements_in
from bmfa.models.image_sample import find_preprocessing, sample_images, split_counts
from bmfa.models.loading import LoadedModel
from bmfa.models.patching import unpatch
from bmfa.models.plan import ModelFingerprint
from bmfa.models.preprocessing import Preprocessing
from bmfa.models.reducing import reduce
from bmfa.models.reduction_plan import ReductionPlan, make_policy
from bmfa.models.schedule_search import CostModel, Schedule, ScheduleSearch, spread_schedule
from bmfa.records import Row

Progress = Callable[[int, int], None]  # schedules measured, of about how many

# Images that are used, half of them for choosing. The classes of 64 images are known to 1.6 points.
IMAGES = {"cuda": 512, "cpu": 128}
# Images that rank what to try; those that decide are all the choosing ones.
SAMPLED = 32
# Budgets between which an agreement is searched: 2^-6 is 1.6 % of the operations.
BISECTIONS = 6
# Share of the operations of the full model that a budget grows by if the agreement does not hold.
GROWTH = 0.02


def tune_reduction(
    model: nn.Module | LoadedModel,
    images: Any,
    policy: str = "free-energy",
    *,
    gflops: float | None = None,
    agreement: float | None = None,
    img_size: int | tuple[int, int] | None = None,
    preprocess: Preprocessing | None = None,
    options: Mapping[str, Any] | None = None,
    batch_size: int = 25,
    limit: int | None = None,
    seed: int = 0,
    rounds: int = 1,
    progress: Progress | bool = True,
) -> ReductionPlan:
    """Choose how many tokens each block of a classifier removes, for a target of GFLOPs or of agreement.

    Half of the images choose: they measure the change of the class probabilities for each block alone,
    a greedy allocation makes a schedule within the budget, and exchanges of tokens between blocks are
    kept where they lower the change of the whole model. The schedule is then measured on the other half.
    For a target of agreement, the budget grows until the target holds on a quarter of the images, and
    the last quarter, which took no part in the choice, is measured; with fewer than six images there
    is no such quarter.

    The model is the same afterwards, also if an error or Ctrl-C ends the call. Apply the plan with
    `bmfa.reduce(model, plan=plan)`.

    Args:
        model: A classifier that `reduce` supports, or what `load_model` returns.
        images: A (N, 3, height, width) tensor or a list of (3, height, width) tensors, preprocessed;
            a DataLoader of such tensors or of tuples that begin with one; or the path of a folder or
            zip of images. At least two images, all of one size; some hundred are better.
        policy: The name of a policy that takes a schedule, e.g. `"free-energy"` or `"tome"`.
        gflops: The GFLOPs of an image to stay within, two operations for a multiply-add. One of `gflops`
            and `agreement` is given.
        agreement: The share of the images whose class must be that of the full model, in (0, 1].
        img_size: The side, or (height, width), of images of a folder in pixels.
        preprocess: The preprocessing of images of a folder. None takes that of the model.
        options: Keyword arguments of every call of the model. None takes those of `load_model`.
        batch_size: The number of images in a call.
        limit: The number of images to use. None is 512 on CUDA and 128 elsewhere.
        seed: Seed of which images are used, and which of them choose.
        rounds: Rounds of exchanges of tokens between blocks, at least 0. A round measures about 30
            schedules.
        progress: True shows a progress bar on a terminal. A function is called with the schedules that
            are measured and about how many there will be.

    Returns:
        The plan.

    Raises:
        TypeError: If the model cannot be reduced or is no classifier, or an argument has a wrong type.
        ValueError: If an argument is out of range, the target cannot be reached, there are fewer than
            two images, they cannot be read or differ in size, or the model is patched. The model is
            unchanged.

    Example:
        >>> import bmfa, torch
        >>> loaded = bmfa.load_model("embedded")
        >>> images = torch.rand(4, 3, 112, 112, generator=torch.Generator().manual_seed(0))
        >>> plan = bmfa.tune_reduction(loaded, images, gflops=0.40)
        >>> plan.gflops <= 0.40 < plan.full_gflops
        True
        >>> model = bmfa.reduce(loaded.model, plan=plan)
    """
    check_target(gflops, agreement)
    check_policy(policy)
    module = model.model if isinstance(model, LoadedModel) else model
    host = find_vision_transformer(module)
    if replacements_in(module):
        raise ValueError("the model is patched or reduced; call bmfa.unpatch(model) first")
    if options is None:
        options = model.options if isinstance(model, LoadedModel) else {}
    batch_size = check_integer("batch_size", batch_size, low=1)
    seed = check_integer("seed", seed, low=0)
    device = next((p.device.type for p in module.parameters()), "cpu")
    most = IMAGES.get(device, IMAGES["cpu"]) if limit is None else limit
    images = sample_images(
        images,
        find_preprocessing(model, preprocess, img_size),
        check_integer("limit", most, low=2),
        torch.Generator().manual_seed(seed),
    )
    if len(images) < 2:
        raise ValueError(
            "there is only 1 image; pass at least two, because the schedule is checked on images "
            "that did not choose it"
        )
    choosing, checking, confirming = torch.split(images, split_counts(len(images)))
    tuner = ReductionTuner(
        module,
        dict(options),
        policy,
        choosing,
        batch_size,
        len(host.blocks),
        progress,
        check_integer("rounds", rounds, low=0),
    )
    with tuner:
        if gflops is not None:
            return tuner.plan_for_gflops(gflops, images[len(choosing) :], seed)
        assert agreement is not None
        return tuner.plan_for_agreement(agreement, checking, confirming, seed)


@dataclass(eq=False)
class ReductionTuner:
    """Measures schedules of a model; a context manager that leaves the model as it was."""

    model: nn.Module
    options: dict[str, Any]
    policy: str
    choosing: Tensor  # (n, 3, height, width)
    batch_size: int
    depth: int
    progress: Progress | bool = False
    rounds: int = 1
    measured: int = 0
    bar: Any = None
    training: list[nn.Module] = field(default_factory=list)
    search: ScheduleSearch = field(init=False)
    reference: Tensor = field(init=False)  # (n, classes) logits of the full model
    grid: Grid = field(init=False)
    counted: nn.Module = field(init=False)  # copy of the model in float32 on the CPU

    def __enter__(self) -> "ReductionTuner":
        self.training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        try:
            self.prepare()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()
        unpatch(self.model)
        for module in self.training:
            module.training = True

    def prepare(self) -> None:
        """Run the full model, and read its grid and its operations."""
        if self.progress is True and sys.stderr.isatty():
            from tqdm import tqdm

            self.bar = tqdm(unit=" schedules", leave=False, dynamic_ncols=True)
        reduce(self.model, make_policy(self.policy, (0,) * self.depth))  # raises if it cannot
        unpatch(self.model)
        with _grid_of(self.model) as grids:
            self.reference = self.logits(self.choosing)
        self.grid = grids[-1]
        self.counted = deepcopy(self.model).to("cpu", torch.float32).eval()
        policy = make_policy(self.policy, (0,) * self.depth)
        assert isinstance(policy, BudgetPolicy)
        first = 1 if self.policy == "diffrate" else 0  # its first block never merges
        cost = CostModel.fit(self.grid.size, self.depth, policy.max_removed, self.count_from(first))
        self.search = ScheduleSearch(
            self.grid.size,
            range(first, self.depth),
            self.depth,
            policy.max_removed,
            cost,
            self.kl,
            self.sampled_kl,
        )

    def count_from(self, first: int) -> Callable[[Schedule], int]:
        """Return a function that counts the operations of a schedule without its first blocks."""
        return lambda schedule: self.count((0,) * first + schedule[first:])

    def logits(self, images: Tensor) -> Tensor:
        """Return the (n, classes) logits of the model as it is now, in float64 on the CPU."""
        parameter = next(self.model.parameters())
        parts = []
        with torch.inference_mode():
            for batch in torch.split(images, self.batch_size):
                output = self.model(batch.to(parameter.device, parameter.dtype), **self.options)
                scores = output if isinstance(output, Tensor) else getattr(output, "logits", None)
                if not isinstance(scores, Tensor) or scores.dim() != 2:
                    raise TypeError(
                        f"{type(self.model).__name__} returns no (B, classes) logits; pass a classifier"
                    )
                parts.append(scores.double().cpu())
        logits = torch.cat(parts)
        if not bool(torch.isfinite(logits).all()):
            raise ValueError("the logits of the model are not finite; pass other images")
        return logits

    def reduced_logits(self, schedule: Schedule, images: Tensor) -> Tensor:
        """Return the logits with a schedule."""
        reduce(self.model, make_policy(self.policy, schedule))
        try:
            return self.logits(images)
        finally:
            unpatch(self.model)

    def kl(self, schedule: Schedule) -> float:
        """Return the output KL on the choosing images."""
        self._advance()
        return mean_kl(self.reference, self.reduced_logits(schedule, self.choosing))

    def sampled_kl(self, schedule: Schedule) -> float:
        """Return the output KL on some of the choosing images."""
        self._advance()
        some = self.choosing[:SAMPLED]
        return mean_kl(self.reference[:SAMPLED], self.reduced_logits(schedule, some))

    def count(self, schedule: Schedule) -> int:
        """Count the operations of an image with a schedule."""
        reduce(self.counted, make_policy(self.policy, schedule))
        pixels = self.choosing[:1].to("cpu", torch.float32)
        return count_flops(self.counted, pixels, self.options)

    def best_schedule(self, budget: float) -> Schedule:
        """Search the schedule with the least output KL of at most `budget` operations."""
        search = self.search
        if not search.alone:
            search.measure_alone()
        starts = self.starts(budget)
        if not starts:
            raise ValueError(self._unreachable(budget))
        schedule = search.improve(min(starts, key=search.measure), budget, self.rounds)
        for _ in range(search.tokens):  # the fit of the operations may be off by a few
            if not any(schedule) or self.count(schedule) <= budget:
                break
            last = max(block for block, removed in enumerate(schedule) if removed)
            schedule = tuple(n + (block == last) for block, n in enumerate(schedule))
        return schedule

    def starts(self, budget: float) -> list[Schedule]:
        """Return schedules of a budget to start from: greedy, fixed and regular ones that exist."""
        search, first = self.search, max(1, self.depth // 4)
        found = [
            search.greedy(budget),
            fixed_schedule(search, budget),
            even_schedule(search, budget, range(first, self.depth - 1)),
        ]
        for blocks in (range(first, self.depth - 2), range(max(1, first - 1), self.depth - 1)):
            found.append(proportional_schedule(search, budget, blocks))
        return [schedule for schedule in found if schedule is not None]

    def plan_for_gflops(self, gflops: float, confirming: Tensor, seed: int) -> ReductionPlan:
        """Make the plan for a number of operations."""
        budget = gflops * 1e9
        full = self.count((0,) * self.depth)
        schedule = (0,) * self.depth if full <= budget else self.best_schedule(budget)
        row = self.check(schedule, confirming, self.logits(confirming))
        return self._plan("gflops", gflops, schedule, [row], row, (0, len(confirming)), seed)

    def plan_for_agreement(
        self, agreement: float, checking: Tensor, confirming: Tensor, seed: int
    ) -> ReductionPlan:
        """Make the plan of least operations that keeps an agreement."""
        search, full = self.search, float(self.count((0,) * self.depth))
        search.measure_alone()
        low, high = 0.0, full
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            starts = self.starts(middle)
            schedule = min(starts, key=search.sample) if starts else None
            held = schedule is not None and agreement <= mean_agreement(
                self.reference, self.reduced_logits(schedule, self.choosing)
            )
            low, high = (low, middle) if held else (middle, high)
        reference, rows, budget = self.logits(checking), [], high
        while True:
            schedule = (0,) * self.depth if budget >= full else self.best_schedule(budget)
            rows.append(self.check(schedule, checking, reference))
            if rows[-1]["agreement"] >= agreement or not any(schedule):
                break
            budget += GROWTH * full
        last = rows[-1]
        if len(confirming):
            last = last | self._measure(schedule, confirming, self.logits(confirming))
        counts = (len(checking), len(confirming))
        return self._plan("agreement", agreement, schedule, rows, last, counts, seed)

    def check(self, schedule: Schedule, images: Tensor, reference: Tensor) -> Row:
        """Measure a schedule on images that did not choose it, and on those that did."""
        choosing = self._measure(schedule, self.choosing, self.reference)
        row: Row = {"schedule": list(schedule), "gflops": self.count(schedule) / 1e9}
        row |= {"choosing_kl": choosing["output_kl"], "choosing_agreement": choosing["agreement"]}
        return row | self._measure(schedule, images, reference)

    def _measure(self, schedule: Schedule, images: Tensor, reference: Tensor) -> Row:
        """Return output KL and agreement of a schedule; `reference` are logits of the full model."""
        logits = self.reduced_logits(schedule, images)
        return {
            "output_kl": mean_kl(reference, logits),
            "agreement": mean_agreement(reference, logits),
        }

    def _plan(
        self,
        target: str,
        value: float,
        schedule: Schedule,
        checks: list[Row],
        measured: Row,
        counts: tuple[int, int],
        seed: int,
    ) -> ReductionPlan:
        """Make the plan; `measured` is the last check, `counts` of checking and confirming images."""
        search = self.search
        alone = [
            {
                "block": block,
                "removed": count,
                "output_kl": change,
                "gflops": search.cost.flops(search.single(block, count)) / 1e9,
            }
            for (block, count), change in search.alone.items()
        ]
        return ReductionPlan(
            ModelFingerprint.of(self.model),
            (int(self.choosing.shape[-2]), int(self.choosing.shape[-1])),
            (self.grid.height, self.grid.width),
            self.policy,
            schedule,
            target,
            value,
            self.count((0,) * self.depth) / 1e9,
            measured["gflops"],
            search.predicted(schedule) if search.alone else 0.0,
            measured["choosing_kl"],
            measured["choosing_agreement"],
            measured["output_kl"],
            measured["agreement"],
            tuple(alone),
            tuple(checks),
            len(self.choosing),
            *counts,
            seed,
        )

    def _unreachable(self, budget: float) -> str:
        least: Schedule = (0,) * self.depth
        left = self.search.tokens
        for block in self.search.blocks:
            removed = self.search.most(left)
            least = tuple(removed if i == block else n for i, n in enumerate(least))
            left -= removed
        return (
            f"gflops is {budget / 1e9:g}, and {self.policy} needs at least about "
            f"{self.search.cost.flops(least) / 1e9:.3g} at this size; pass more"
        )

    def _advance(self) -> None:
        self.measured += 1
        search = self.search
        about = len(search.alone_counts()) * len(search.blocks) + 2 * self.depth + 12
        if self.bar is not None:
            self.bar.update()
        elif callable(self.progress):
            self.progress(self.measured, max(about, self.measured))


def fixed_schedule(search: ScheduleSearch, budget: float) -> Schedule | None:
    """Return the schedule of `FreeEnergy` with a count, with as many tokens removed as a budget needs.

    Every second block merges, from a quarter of the depth on, except the last.
    """
    blocks = range(max(1, search.depth // 4), search.depth - 1, 2)
    return even_schedule(search, budget, blocks)


def even_schedule(search: ScheduleSearch, budget: float, blocks: range) -> Schedule | None:
    """Return the schedule in which some blocks remove equal parts of what a budget needs."""
    for total in range(search.tokens if blocks else 0):
        schedule = search.clipped(spread_schedule(search.depth, blocks, total))
        if search.cost.flops(schedule) <= budget:
            return schedule
    return None


def proportional_schedule(search: ScheduleSearch, budget: float, blocks: range) -> Schedule | None:
    """Return the schedule in which some blocks remove one share of the tokens that are left to them."""
    for permille in range(1, 501 if blocks else 0):
        left, schedule = search.tokens, [0] * search.depth
        for block in blocks:
            schedule[block] = min(round(left * permille / 1000), search.most(left))
            left -= schedule[block]
        if search.cost.flops(tuple(schedule)) <= budget:
            return tuple(schedule)
    return None


def mean_kl(reference: Tensor, logits: Tensor) -> float:
    """Return the mean KL divergence of the class probabilities from those of the reference, in nats."""
    p, q = reference.log_softmax(-1), logits.log_softmax(-1)
    return max(0.0, float((p.exp() * (p - q)).sum(-1).mean()))


def mean_agreement(reference: Tensor, logits: Tensor) -> float:
    """Return the share of images whose class is that of the reference."""
    return float((logits.argmax(-1) == reference.argmax(-1)).double().mean())


@contextmanager
def _grid_of(model: nn.Module) -> Iterator[list[Grid]]:
    """Note the grids of the images that run through the model."""
    grids: list[Grid] = []

    def note(module: nn.Module, inputs: Any, output: Tensor) -> None:
        grids.append(Grid(int(output.shape[-2]), int(output.shape[-1])))

    handle = find_vision_transformer(model).projection.register_forward_hook(note)
    try:
        yield grids
    finally:
        handle.remove()


def check_target(gflops: object, agreement: object) -> None:
    """Raise unless one of a number of GFLOPs and an agreement is given, and in range."""
    if (gflops is None) == (agreement is None):
        given = "neither gflops nor agreement is" if gflops is None else "gflops and agreement are"
        raise ValueError(f"{given} given; pass one of them, e.g. gflops=1.5 or agreement=0.95")
    if gflops is not None:
        check_number("gflops", gflops, low=0.0, open_low=True)
    if agreement is not None:
        check_number("agreement", agreement, low=0.0, high=1.0, open_low=True)


def check_policy(policy: object) -> None:
    """Raise unless a name is that of a policy that takes a schedule."""
    accepted = [name for name in POLICY_NAMES if _takes_schedule(name)]
    if not isinstance(policy, str) or policy not in accepted:
        raise ValueError(
            f"policy is {policy!r}; pass the name of a policy that takes a schedule: "
            f"{', '.join(accepted)}"
        )


def _takes_schedule(name: str) -> bool:
    try:
        return isinstance(make_policy(name, (0, 0)), BudgetPolicy)
    except ValueError:
        return False
