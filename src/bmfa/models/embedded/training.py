"""Train the embedded model; `bmfa train-embedded` runs this."""

import io
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
from bmfa.data.drawn.glyphs import draw_glyph_batch
from bmfa.files import write_atomic
from bmfa.models.embedded.model import EmbeddedViT, preprocess, save

# Far from small seeds, which therefore give pictures that the model was not trained on.
SEED = 20_260_000
STEPS = 4400
ProgressCallback = Callable[[int, int, float], None]  # step, number of steps, loss


@dataclass(frozen=True)
class Recipe:
    """Settings of the training; every step draws new pictures and shows each in several views."""

    pictures: int = 256  # in a step
    views: int = 4  # of each picture
    learning_rate: float = 1.5e-3  # largest, after the warm-up
    weight_decay: float = 0.05  # of matrices alone
    warmup: int = 300  # steps
    smoothing: float = 0.05  # of labels
    checkpoint_every: int = 500  # steps
    progress_every: int = 50  # steps

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
    progress: ProgressCallback | None = None,
    recipe: Recipe | None = None,
) -> EmbeddedViT:
    """Train the embedded model and write its weights.

    Everything random is a function of seed and step, so a run that is resumed from its checkpoint ends
    in the same state as an uninterrupted one: bit for bit on a CPU, up to the order of sums on a GPU.

    Args:
        output: The safetensors file to write.
        seed: The seed of pictures, views and initial weights.
        steps: The number of steps.
        device: The device to train on.
        resume: A checkpoint file; it is created if missing, and updated during the training.
        progress: Called with the step, the number of steps and the loss.
        recipe: The settings of the training; None for those of the shipped weights.

    Returns:
        The model in evaluation mode.

    Raises:
        ValueError: If a setting is out of range, a file cannot be written, or the checkpoint is of
            another training.

    Example:
        >>> import tempfile
        >>> recipe = Recipe(pictures=2, views=1, warmup=1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model = train(f"{folder}/weights.safetensors", steps=1, recipe=recipe)
        >>> model.training
        False
    """
    recipe = Recipe() if recipe is None else recipe
    check_integer("seed", seed, low=0, high=2**62)
    check_integer("steps", steps, low=1)
    checkpoint = None if resume is None else Path(resume)
    _check_files(Path(output), checkpoint)
    run = _TrainingRun(seed, steps, _check_device(device), recipe)
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


class _TrainingRun:
    """Model, optimiser and the number of steps that are done."""

    def __init__(self, seed: int, steps: int, device: torch.device, recipe: Recipe) -> None:
        self.seed, self.steps, self.device, self.recipe = seed, steps, device, recipe
        self.step = 0
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = EmbeddedViT().to(device).train()
        self.optimiser = _make_optimiser(self.model, recipe)

    def remaining(self) -> Iterator[Tensor]:
        """Run the remaining steps and yield the loss of each."""
        for pixels, labels in _make_loader(self):
            loss = self._loss(*self._make_views(pixels, labels))
            self.optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            for group in self.optimiser.param_groups:
                group["lr"] = self.recipe.learning_rate * self._learning_rate_factor()
            self.optimiser.step()
            self.step += 1
            yield loss.detach()

    def _learning_rate_factor(self) -> float:
        """Return the factor in [0, 1]: linear warm-up, then cosine decay to 0."""
        done = self.step + 1
        if done <= self.recipe.warmup:
            return done / self.recipe.warmup
        decayed = (done - self.recipe.warmup) / max(1, self.steps - self.recipe.warmup)
        return 0.5 + 0.5 * math.cos(math.pi * decayed)

    def _make_views(self, pixels: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return several random views of each picture, with their labels, on the device."""
        count, views = len(pixels), self.recipe.views
        generator = torch.Generator().manual_seed(self.seed + self.step)
        flags = torch.randint(2, (4, count * views, 1, 1, 1), generator=generator).bool()
        pictures = preprocess(pixels.to(self.device, non_blocking=True)).repeat(views, 1, 1, 1)
        return augment(pictures, flags.to(self.device)), labels.to(self.device).repeat(views)

    def _loss(self, pictures: Tensor, labels: Tensor) -> Tensor:
        kind = self.device.type
        with torch.autocast(kind, dtype=torch.bfloat16, enabled=kind == "cuda"):
            logits = self.model(pictures)
        return cross_entropy(logits.float(), labels, label_smoothing=self.recipe.smoothing)

    def store(self, path: Path) -> None:
        """Write a checkpoint."""
        model, optimiser = self.model.state_dict(), self.optimiser.state_dict()
        state = {"step": self.step, "model": model, "optimiser": optimiser}
        content = io.BytesIO()
        torch.save(self._settings() | state, content)
        write_atomic(path, content.getvalue())

    def restore(self, path: Path) -> None:
        """Continue from a checkpoint with the same settings."""
        saved = _read_checkpoint(path)
        for name, value in self._settings().items():
            if saved.get(name) != value:
                raise ValueError(
                    f"checkpoint {path} has {name} {saved.get(name)} and this run {value}; "
                    "pass the settings it was written with, or another checkpoint file"
                )
        self.model.load_state_dict(saved["model"])
        self.optimiser.load_state_dict(saved["optimiser"])
        self.step = saved["step"]

    def _settings(self) -> dict[str, Any]:
        return {"seed": self.seed, "steps": self.steps, "recipe": asdict(self.recipe)}


def augment(pictures: Tensor, flags: Tensor) -> Tensor:
    """Flip, transpose and invert pictures.

    These operations keep all ten classes: nine figures are their own mirror images up to a rotation, a
    mirrored spiral is still a spiral, and a figure may be lighter or darker than its background.

    Args:
        pictures: (B, C, S, S) preprocessed pictures.
        flags: (4, B, 1, 1, 1) torch.bool: which pictures to flip horizontally, to flip vertically, to
            transpose and to invert.

    Returns:
        (B, C, S, S) tensor.
    """
    horizontal, vertical, transpose, invert = flags
    pictures = torch.where(horizontal, pictures.flip(-1), pictures)
    pictures = torch.where(vertical, pictures.flip(-2), pictures)
    pictures = torch.where(transpose, pictures.transpose(-1, -2), pictures)
    return torch.where(invert, -pictures, pictures)


class _PictureBatches(Dataset[tuple[Tensor, Tensor]]):
    """The new pictures of each step from `start` on."""

    def __init__(self, seed: int, start: int, steps: int, pictures: int) -> None:
        self.seed, self.start, self.steps, self.pictures = seed, start, steps, pictures

    def __len__(self) -> int:
        return self.steps - self.start

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        first = (self.start + index) * self.pictures
        pixels, labels = draw_glyph_batch(self.seed, range(first, first + self.pictures))
        return torch.from_numpy(pixels), torch.from_numpy(labels)


def _make_loader(run: _TrainingRun) -> DataLoader[tuple[Tensor, Tensor]]:
    """Return the batches in order; for a GPU, all CPU cores but one draw pictures in advance."""
    batches = _PictureBatches(run.seed, run.step, run.steps, run.recipe.pictures)
    if run.device.type != "cuda":
        return DataLoader(batches, batch_size=None)
    workers = max(1, (os.cpu_count() or 2) - 1)
    return DataLoader(batches, batch_size=None, num_workers=workers, pin_memory=True)


def _make_optimiser(model: EmbeddedViT, recipe: Recipe) -> torch.optim.Optimizer:
    """Return AdamW with weight decay on matrices alone."""
    parameters = list(model.parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.dim() in (2, 4)]},
        {"params": [p for p in parameters if p.dim() not in (2, 4)], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=recipe.weight_decay
    )


def _read_checkpoint(path: Path) -> dict[str, Any]:
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises errors of zipfile, pickle and others
        raise ValueError(
            f"{path} is not a complete checkpoint ({type(error).__name__}); delete it to start again"
        ) from None
    if not isinstance(saved, dict) or not {"step", "model", "optimiser"} <= saved.keys():
        raise ValueError(f"{path} is not a checkpoint of this training; pass another file")
    return saved


def _check_device(device: str | torch.device) -> torch.device:
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device {str(device)!r} cannot be used ({reason}); pass cpu") from None
    return torch.device(device)


def _check_files(*paths: Path | None) -> None:
    """Refuse files that cannot be written before the training, not after it."""
    for path in paths:
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise ValueError(f"{path} cannot be written; pass a file in an existing folder")
