"""Plans for token reduction: how many tokens each block of a model removes, in a readable JSON file."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from bmfa.files import write_atomic
from bmfa.grid import Grid
from bmfa.merging import Policy, parse
from bmfa.merging.policies.base import check_schedule
from bmfa.models.plan import ModelFingerprint, format_plan, read_plan, read_sides
from bmfa.records import Record, Row, environment

_KIND = "reduction"


@dataclass(frozen=True)
class ReductionPlan:
    """The tokens that each block of a model removes at one image size, with what was measured.

    `bmfa.tune_reduction` makes these, and `bmfa.reduce(model, plan=...)` applies them.

    Args:
        model: The fingerprint of the model.
        img_size: The height and width of the images in pixels.
        grid: The height and width of the grid of tokens.
        policy: The name of the policy, e.g. `"free-energy"`.
        schedule: The number of tokens that each block removes.
        target: What was requested, `"gflops"` or `"agreement"`.
        target_value: The GFLOPs of an image, or the share of the images that keep their class.
        full_gflops: The GFLOPs of an image in the full model.
        gflops: The GFLOPs of an image with this schedule.
        predicted_kl: The sum of the output KL of the blocks alone, in nats.
        choosing_kl: The output KL on the images that were used for choosing.
        choosing_agreement: The share of these images whose class is that of the full model.
        output_kl: The output KL on images that took no part in the choice: the mean divergence of the
            class probabilities from those of the full model. On the checking images, if there are none.
        agreement: The share of the same images whose class is that of the full model.
        alone: What was measured for each block alone: block, removed, output_kl and gflops.
        checks: What was measured for each schedule that was checked, in order, with `output_kl` and
            `agreement` on the checking images (the confirming ones for a target of GFLOPs); the last one
            is the plan.
        choosing: The number of images on which the schedule was chosen.
        checking: The number of images on which a target of agreement was checked, which chooses, too;
            0 for a target of GFLOPs.
        confirming: The number of images that took no part in the choice, 0 if there were too few.
        seed: The seed of the split into these.
        environment: Versions, device and processor.

    Example:
        >>> import bmfa, torch
        >>> loaded = bmfa.load_model("embedded")
        >>> images = torch.rand(4, 3, 112, 112, generator=torch.Generator().manual_seed(0))
        >>> plan = bmfa.tune_reduction(loaded, images, gflops=0.42)
        >>> len(plan.schedule), plan.gflops <= 0.42
        (8, True)
    """

    model: ModelFingerprint
    img_size: tuple[int, int]
    grid: tuple[int, int]
    policy: str
    schedule: tuple[int, ...]
    target: str
    target_value: float
    full_gflops: float
    gflops: float
    predicted_kl: float
    choosing_kl: float
    choosing_agreement: float
    output_kl: float
    agreement: float
    alone: tuple[Row, ...]
    checks: tuple[Row, ...]
    choosing: int
    checking: int
    confirming: int
    seed: int
    environment: Mapping[str, Any] = field(default_factory=lambda: environment())

    @property
    def reduction(self) -> Policy:
        """The policy with its schedule, as `bmfa.reduce` takes it.

        Example:
            >>> str(ReductionPlan.load("plan.json").reduction)  # doctest: +SKIP
            'free-energy:0,0,0,24,8,20,0,24,0,20,0,0'
        """
        return make_policy(self.policy, self.schedule)

    @property
    def holds(self) -> bool:
        """True if the target is kept; one of agreement on the images that took no part in the choice."""
        if self.target == "gflops":
            return self.gflops <= self.target_value
        return self.agreement >= self.target_value

    def __str__(self) -> str:
        removed = ", ".join(f"{i}: {n}" for i, n in enumerate(self.schedule) if n) or "none"
        images = f"{self.confirming} unseen" if self.confirming else f"{self.checking} checking"
        return (
            f"{self.policy}, tokens removed by block: {removed}\n"
            f"{self.gflops:.3f} of {self.full_gflops:.3f} GFLOPs; on {images} images "
            f"{100 * self.agreement:.1f} % keep their class, output KL {self.output_kl:.4f}"
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a JSON file, whole or not at all.

        Args:
            path: The file; its folder is created if it is missing.

        Raises:
            OSError: If the file cannot be written.

        Example:
            >>> plan.save("plan.json")  # doctest: +SKIP
        """
        write_atomic(Path(path), self.to_json())

    def to_json(self) -> str:
        """Return the text of the file that `save` writes.

        Returns:
            JSON text.

        Example:
            >>> print(plan.to_json()[:24])  # doctest: +SKIP
            {
              "plan": "reduction",
        """
        return format_plan(_KIND, asdict(self))

    def to_record(self) -> Record:
        """Return the plan as the record of an experiment.

        Returns:
            A record with a row for each block: `block`, `removed` and `tokens_left`, which counts
            spatial tokens; its settings have the totals.

        Example:
            >>> plan.to_record().rows[3]  # doctest: +SKIP
            {'block': 3, 'removed': 24, 'tokens_left': 172}
        """
        rows, left = [], self.token_grid.size
        for block, removed in enumerate(self.schedule):
            left -= removed
            rows.append({"block": block, "removed": removed, "tokens_left": left})
        settings = {k: v for k, v in asdict(self).items() if k not in ("environment", "schedule")}
        settings["schedule"] = list(self.schedule)
        return Record("tune-reduction", settings, rows, self.environment)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "ReductionPlan":
        """Read a plan.

        Args:
            path: A file that `save` wrote.

        Returns:
            The plan.

        Raises:
            OSError: If the file cannot be read.
            ValueError: If it is not a plan for token reduction, or of another version.

        Example:
            >>> bmfa.reduce(model, plan=ReductionPlan.load("plan.json"))  # doctest: +SKIP
        """
        data = read_plan(path, _KIND)
        try:
            plan = cls(
                model=ModelFingerprint(**data.pop("model")),
                img_size=read_sides(data.pop("img_size")),
                grid=read_sides(data.pop("grid")),
                schedule=check_schedule(data.pop("schedule")),
                alone=tuple(data.pop("alone")),
                checks=tuple(data.pop("checks")),
                **data,
            )
            make_policy(plan.policy, plan.schedule)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} is not a complete plan ({error}); make it again with bmfa.tune_reduction"
            ) from None
        if len(plan.schedule) != plan.model.layers:  # one number would be a count for every block
            raise ValueError(
                f"{path} is not a complete plan (it has {len(plan.schedule)} numbers of tokens for "
                f"{plan.model.layers} blocks); make it again with bmfa.tune_reduction"
            )
        return plan

    def check_model(self, model: nn.Module) -> None:
        """Raise unless the plan is for this model.

        Args:
            model: A model that `reduce` supports.

        Raises:
            TypeError: If the model is not supported.
            ValueError: If the plan is for another model.

        Example:
            >>> plan.check_model(model)  # doctest: +SKIP
        """
        self.model.check(model, "bmfa.tune_reduction")

    @property
    def token_grid(self) -> Grid:
        """The grid of tokens.

        Example:
            >>> ReductionPlan.load("plan.json").token_grid  # doctest: +SKIP
            Grid(height=14, width=14)
        """
        return Grid(*self.grid)


def make_policy(name: str, schedule: tuple[int, ...]) -> Policy:
    """Make a policy with a schedule.

    Raises:
        ValueError: If the policy is unknown or takes no schedule.
    """
    counts = ",".join(map(str, schedule))
    return parse(f"{name}:{counts}")
