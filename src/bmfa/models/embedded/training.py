"""How the embedded model was made: one recipe, resumable, and its measure."""

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from bmfa.checks import check_integer
from bmfa.data.drawn.embedded import figure_batch
from bmfa.models.embedded import EmbeddedViT, preprocess, save

# Far from the small seeds people type, so that those give pictures the model never saw.
SEED = 20_260_000
STEPS = 4400
Progress = Callable[[int, int, float], None]


@dataclass(frozen=True)
class Recipe:
    """What a step is made of: fresh pictures, each in several views, and the optimiser's settings."""

    pictures: int = 256
    views: int = 4
    learning_rate: float = 1.5e-3
    weight_decay: float = 0.05
    warmup: int = 300
    smoothing: float = 0.05
    checkpoint_every: int = 500
    progress_every: int = 50

    def __post_init__(self) -> None:
        for name in ("pictures", "views", "warmup", "checkpoint_every", "progress_every"):
            check_integer(name, getattr(self, name), low=1)


def train(
    output: str | os.PathLike[str],
    *,
    seed: int = SEED,
    steps: int = STEPS,
    device: str | torch.device = "cpu",
    resume: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    recipe: Recipe | None = None,
) -> EmbeddedViT:
    """Train from the seed and write the weights to `output`; returns the model in eval mode.

    Everything random is a function of seed and step, so a run continued from its checkpoint
    `resume` (created where missing) ends in the state of an uninterrupted one: bit for bit on a
    CPU, to the order of sums on a GPU. `progress` gets the step, the number of steps and the loss.
    """
    recipe = Recipe() if recipe is None else recipe
    check_integer("seed", seed, low=0, high=2**62)
    check_integer("steps", steps, low=1)
    checkpoint = None if resume is None else Path(resume)
    _check_files(Path(output), checkpoint)
    run = _Run(seed, steps, _check_device(device), recipe)
    if checkpoint is not None and checkpoint.exists():
        run.restore(checkpoint)
    for loss in run.remaining():
        last = run.step == steps
        if checkpoint is not None and (last or run.step % recipe.checkpoint_every == 0):
            run.store(checkpoint)
        if progress is not None and (last or run.step % recipe.progress_every == 0):
            progress(run.step, steps, loss.item())
    save(run.model, Path(output), {"seed": str(seed), "steps": str(steps)})
    return run.model.eval()


def evaluate(model: EmbeddedViT, seed: int, count: int, *, batch: int = 100) -> float:
    """Top-1, a fraction, on the first `count` pictures of a seed."""
    check_integer("count", count, low=1)
    device = model.head.weight.device
    correct = 0
    with torch.inference_mode():
        for start in range(0, count, batch):
            pixels, labels = figure_batch(seed, range(start, min(start + batch, count)))
            chosen = model(preprocess(pixels).to(device)).argmax(-1)
            correct += int((chosen.cpu() == torch.from_numpy(labels)).sum())
    return correct / count


class _Run:
    """One training run: model, optimiser and the steps done."""

    def __init__(self, seed: int, steps: int, device: torch.device, recipe: Recipe) -> None:
        self.seed, self.steps, self.device, self.recipe = seed, steps, device, recipe
        self.step = 0
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = EmbeddedViT().to(device).train()
        self.optimiser = _optimiser(self.model, recipe)

    def remaining(self) -> Iterator[Tensor]:
        """Take the steps that are left; each yields its loss."""
        for pixels, labels in _loader(self):
            loss = self._loss(*self._views(pixels, labels))
            self.optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            for group in self.optimiser.param_groups:
                group["lr"] = self.recipe.learning_rate * self._rate()
            self.optimiser.step()
            self.step += 1
            yield loss.detach()

    def _rate(self) -> float:
        """Of the learning rate: a straight line up, then half a cosine down to 0."""
        done = self.step + 1
        if done <= self.recipe.warmup:
            return done / self.recipe.warmup
        left = (done - self.recipe.warmup) / max(1, self.steps - self.recipe.warmup)
        return 0.5 + 0.5 * math.cos(math.pi * left)

    def _views(self, pixels: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Each picture in several views, on the device."""
        count, views = len(pixels), self.recipe.views
        generator = torch.Generator().manual_seed(self.seed + self.step)
        coins = torch.randint(2, (4, count * views, 1, 1, 1), generator=generator).bool()
        pictures = preprocess(pixels.to(self.device, non_blocking=True)).repeat(views, 1, 1, 1)
        return view(pictures, coins.to(self.device)), labels.to(self.device).repeat(views)

    def _loss(self, pictures: Tensor, labels: Tensor) -> Tensor:
        half = self.device.type == "cuda"
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=half):
            scores = self.model(pictures)
        return cross_entropy(scores.float(), labels, label_smoothing=self.recipe.smoothing)

    def store(self, path: Path) -> None:
        """Write a checkpoint; the file is the old one or the new one, never a part."""
        partial = path.with_name(f"{path.name}.partial")
        with partial.open("wb") as file:
            torch.save(self._settings() | self._state(), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)

    def restore(self, path: Path) -> None:
        """Continue from a checkpoint of the same run."""
        saved = _read(path)
        for name, value in self._settings().items():
            if saved.get(name) != value:
                raise ValueError(
                    f"checkpoint {path} has {name} {saved.get(name)} and this run {value}; "
                    "pass the settings it was made with, or another checkpoint file"
                )
        self.model.load_state_dict(saved["model"])
        self.optimiser.load_state_dict(saved["optimiser"])
        self.step = saved["step"]

    def _settings(self) -> dict[str, Any]:
        return {"seed": self.seed, "steps": self.steps, "recipe": asdict(self.recipe)}

    def _state(self) -> dict[str, Any]:
        model, optimiser = self.model.state_dict(), self.optimiser.state_dict()
        return {"step": self.step, "model": model, "optimiser": optimiser}


def view(pictures: Tensor, coins: Tensor) -> Tensor:
    """Mirror, transpose and invert pictures (B, C, S, S) where coins (4, B, 1, 1, 1) say so.

    All ten classes survive this: nine figures are their own mirror images up to a rotation, a
    mirrored spiral is still a spiral, and a figure may be lighter or darker than what is around it.
    """
    across, down, diagonal, inverted = coins
    pictures = torch.where(across, pictures.flip(-1), pictures)
    pictures = torch.where(down, pictures.flip(-2), pictures)
    pictures = torch.where(diagonal, pictures.transpose(-1, -2), pictures)
    return torch.where(inverted, -pictures, pictures)


class _Batches(Dataset[tuple[Tensor, Tensor]]):
    """The fresh pictures of each step from `start` on."""

    def __init__(self, seed: int, start: int, steps: int, pictures: int) -> None:
        self.seed, self.start, self.steps, self.pictures = seed, start, steps, pictures

    def __len__(self) -> int:
        return self.steps - self.start

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        first = (self.start + place) * self.pictures
        pixels, labels = figure_batch(self.seed, range(first, first + self.pictures))
        return torch.from_numpy(pixels), torch.from_numpy(labels)


def _loader(run: _Run) -> DataLoader[tuple[Tensor, Tensor]]:
    """Batches in order; beside a GPU, all processors but one draw ahead of it."""
    batches = _Batches(run.seed, run.step, run.steps, run.recipe.pictures)
    if run.device.type != "cuda":
        return DataLoader(batches, batch_size=None)
    workers = max(1, (os.cpu_count() or 2) - 1)
    return DataLoader(batches, batch_size=None, num_workers=workers, pin_memory=True)


def _optimiser(model: EmbeddedViT, recipe: Recipe) -> torch.optim.Optimizer:
    """AdamW, decaying the matrices alone."""
    parameters = list(model.parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.dim() in (2, 4)]},
        {"params": [p for p in parameters if p.dim() not in (2, 4)], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=recipe.weight_decay
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises what its parts raise: zip, pickle or end of file
        raise ValueError(
            f"{path} is no whole checkpoint ({type(error).__name__}); delete it to start afresh"
        ) from None
    if not isinstance(saved, dict) or not {"step", "model", "optimiser"} <= saved.keys():
        raise ValueError(f"{path} is no checkpoint of this training; pass another file")
    return saved


def _check_device(device: str | torch.device) -> torch.device:
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device {str(device)!r} cannot be used ({reason}); pass cpu") from None
    return torch.device(device)


def _check_files(*paths: Path | None) -> None:
    """Refuse before long work what could not be written after it."""
    for path in paths:
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise ValueError(f"{path} cannot be written; pass a file in a folder that exists")
