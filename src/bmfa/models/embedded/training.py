"""Train the embedded model; `bmfa train-embedded` runs this."""

import copy
import io
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.utils.data import DataLoader, Dataset

from bmfa.checks import check_integer, check_number
from bmfa.data.drawn.badges import draw_badge_batch
from bmfa.data.drawn.rng import UniformGenerator
from bmfa.files import write_atomic
from bmfa.models.embedded.model import (
    GRID_SIZE,
    IMAGE_SIZE,
    MASK_CELLS,
    PATCH_SIZE,
    EmbeddedViT,
    preprocess,
    save,
)
from bmfa.records import Record, Row, environment

# Far from small seeds, which therefore give pictures that the model was not trained on.
SEED = 20_260_000
STEPS = 9000
HELD_OUT_SEED = 7
RATIOS = (1, 2, 4)  # sizes of the pictures of a step: 128, 256 or 512 pixels
_STREAM = 3  # third part of the random key of a step; scenes have 1 and badges 2
Log = Callable[[Row], None]


@dataclass(frozen=True)
class Recipe:
    """Settings of the training; every step draws new pictures and shows each in several views.

    A step has pictures of one size, and at twice the side a quarter as many.
    """

    pictures: int = 256  # in a step of 16x16 tokens
    views: int = 4  # of each picture; half as many at 64x64 tokens, where attention takes the time
    small_part: float = 0.6  # of the steps, before pictures of 64x64 tokens
    small_odds: tuple[float, ...] = (0.85, 0.15, 0.0)  # of each of RATIOS in that part
    large_odds: tuple[float, ...] = (0.45, 0.25, 0.3)  # and after it
    learning_rate: float = 1.5e-3  # largest, after the warm-up
    weight_decay: float = 0.05  # of matrices alone
    warmup: int = 300  # steps
    smoothing: float = 0.03  # of labels
    mask_weight: float = 1.0  # of the loss of the mask, relative to that of the class
    average: float = 0.999  # decay of the moving average of the weights, which is what is written
    checkpoint_every: int = 500  # steps
    log_every: int = 100  # steps
    evaluate_every: int = 1000  # steps
    held_out: tuple[int, int] = (1920, 480)  # pictures of 16x16 and of 64x64 tokens at the end

    def __post_init__(self) -> None:
        for name in (
            "pictures",
            "views",
            "warmup",
            "checkpoint_every",
            "log_every",
            "evaluate_every",
        ):
            check_integer(name, getattr(self, name), low=1)

    def ratio(self, seed: int, step: int, steps: int) -> int:
        """Return the side of the pictures of a step, relative to 128 pixels."""
        odds = self.small_odds if step < self.small_part * steps else self.large_odds
        number = UniformGenerator(seed, step, _STREAM).number()
        for ratio, share in zip(RATIOS[:-1], odds, strict=False):
            number -= share
            if number < 0:
                return ratio
        return RATIOS[-1]

    def batch(self, ratio: int) -> tuple[int, int]:
        """Return the pictures of a step and the views of each."""
        views = self.views if ratio < RATIOS[-1] else max(1, self.views // 2)
        return max(1, self.pictures // ratio**2), views


def train(
    output: str | os.PathLike[str],
    *,
    seed: int = SEED,
    steps: int = STEPS,
    seconds: float | None = None,
    device: str | torch.device = "cpu",
    resume: str | os.PathLike[str] | None = None,
    log: Log | None = None,
    recipe: Recipe | None = None,
) -> Record | None:
    """Train the embedded model, write its weights and measure it on pictures it has not seen.

    Everything random is a function of seed and step, so a run that is resumed from its checkpoint ends
    in the same state as an uninterrupted one: bit for bit on a CPU, up to the order of sums on a GPU.

    Args:
        output: The safetensors file to write.
        seed: The seed of pictures, views and initial weights.
        steps: The number of steps.
        seconds: The time after which the run stores its checkpoint and stops; None for no limit.
        device: The device to train on.
        resume: A checkpoint file; it is created if missing, and updated during the training.
        log: Called with every row of the record.
        recipe: The settings of the training; None for those of the shipped weights.

    Returns:
        The record of the training, or None if the time was over before the last step.

    Raises:
        ValueError: If a setting is out of range, a file cannot be written, the checkpoint is of another
            training, or there is a limit of time and no checkpoint.

    Example:
        >>> import tempfile
        >>> recipe = Recipe(pictures=2, views=1, warmup=1, held_out=(2, 1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     record = train(f"{folder}/weights.safetensors", steps=1, recipe=recipe)
        >>> [row["tokens"] for row in record.rows if row["what"] == "held-out"]
        [256, 4096]
    """
    started = time.monotonic()
    recipe = Recipe() if recipe is None else recipe
    check_integer("seed", seed, low=0, high=2**62)
    check_integer("steps", steps, low=1)
    if seconds is not None:
        check_number("seconds", seconds, low=0.0, open_low=True)
    checkpoint = None if resume is None else Path(resume)
    if seconds is not None and checkpoint is None:
        raise ValueError(
            f"seconds is {seconds:g} without a checkpoint; pass resume=FILE to keep the work"
        )
    _check_files(Path(output), checkpoint)
    run = _TrainingRun(seed, steps, _check_device(device), recipe)
    if checkpoint is not None and checkpoint.exists():
        run.restore(checkpoint)
    earlier = run.seconds
    for losses in run.remaining():
        run.seconds = earlier + time.monotonic() - started
        last = run.step == steps
        late = seconds is not None and time.monotonic() - started > seconds
        evaluate = run.step % recipe.evaluate_every == 0 and not last
        if last or evaluate or run.step % recipe.log_every == 0:
            run.note(losses, log, evaluate)
        if checkpoint is not None and (last or late or run.step % recipe.checkpoint_every == 0):
            run.store(checkpoint)
        if late and not last:
            return None
    rows = [
        _held_out_row(run.average, ratio, count, run.device)
        for ratio, count in zip((1, RATIOS[-1]), recipe.held_out, strict=True)
    ]
    for row in rows:
        if log is not None:
            log(row)
    save(run.average, Path(output), {"seed": str(seed), "steps": str(steps)})
    settings = {"seed": seed, "steps": steps, **asdict(recipe), "held_out_seed": HELD_OUT_SEED}
    size = {"parameters": sum(p.numel() for p in run.average.parameters())}
    size |= {"seconds": round(run.seconds, 1), "weights_bytes": Path(output).stat().st_size}
    frame = environment(run.device.type)
    return Record("train-embedded", settings | size, [*run.rows, *rows], frame)


class _TrainingRun:
    """Model, average of its weights, optimiser, rows of the log and the number of steps done."""

    def __init__(self, seed: int, steps: int, device: torch.device, recipe: Recipe) -> None:
        self.seed, self.steps, self.device, self.recipe = seed, steps, device, recipe
        self.step, self.seconds = 0, 0.0
        self.rows: list[Row] = []
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = EmbeddedViT().to(device).train()
        self.average = copy.deepcopy(self.model).eval()
        self.optimiser = _make_optimiser(self.model, recipe)

    def remaining(self) -> Iterator[Tensor]:
        """Run the remaining steps and yield the losses of class and mask (2,) of each."""
        for pixels, labels, targets in _make_loader(self):
            losses = self._losses(*self._make_views(pixels, labels, targets))
            self.optimiser.zero_grad()
            (losses[0] + self.recipe.mask_weight * losses[1]).backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            for group in self.optimiser.param_groups:
                group["lr"] = self.recipe.learning_rate * self._learning_rate_factor()
            self.optimiser.step()
            self.step += 1
            self._update_average()
            yield losses.detach()

    def _learning_rate_factor(self) -> float:
        """Return the factor in [0, 1]: linear warm-up, then cosine decay to 0."""
        done = self.step + 1
        if done <= self.recipe.warmup:
            return done / self.recipe.warmup
        decayed = (done - self.recipe.warmup) / max(1, self.steps - self.recipe.warmup)
        return 0.5 + 0.5 * math.cos(math.pi * decayed)

    @torch.no_grad()
    def _update_average(self) -> None:
        """Move the average towards the weights, faster in the first steps."""
        decay = min(self.recipe.average, (1 + self.step) / (10 + self.step))
        averages, weights = list(self.average.parameters()), list(self.model.parameters())
        torch._foreach_lerp_(averages, weights, 1.0 - decay)

    def _make_views(
        self, pixels: Tensor, labels: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return several random views of each picture, with labels and masks, on the device."""
        views = self.recipe.batch(pixels.shape[1] // IMAGE_SIZE)[1]
        count = views * len(pixels)
        generator = torch.Generator().manual_seed(self.seed + self.step)
        flags = torch.randint(2, (4, count, 1, 1, 1), generator=generator).bool().to(self.device)
        pictures = preprocess(pixels.to(self.device, non_blocking=True)).repeat(views, 1, 1, 1)
        shares = targets.to(self.device, non_blocking=True).float()[:, None] / 4.0
        masks = augment(shares.repeat(views, 1, 1, 1), flags, invert=False)[:, 0]
        return augment(pictures, flags), labels.to(self.device).repeat(views), masks

    def _losses(self, pictures: Tensor, labels: Tensor, masks: Tensor) -> Tensor:
        kind = self.device.type
        with torch.autocast(kind, dtype=torch.bfloat16, enabled=kind == "cuda"):
            features = self.model.forward_features(pictures)
            logits = self.model.head(features[:, 0])
            cells = self.model.mask_cells(features, *(s // MASK_CELLS for s in masks.shape[1:]))
        smoothing = self.recipe.smoothing
        return torch.stack(
            (
                cross_entropy(logits.float(), labels, label_smoothing=smoothing),
                mask_loss(cells.float(), masks),
            )
        )

    def note(self, losses: Tensor, log: Log | None, evaluate: bool) -> None:
        """Add a row to the log, with accuracy and IoU on a few held-out pictures."""
        row: Row = {"what": "training", "step": self.step, "seconds": round(self.seconds, 1)}
        row |= zip(("class_loss", "mask_loss"), (round(v, 4) for v in losses.tolist()), strict=True)
        if evaluate:
            for ratio, count in ((1, 480), (RATIOS[-1], 48)):
                measured = _held_out_row(self.average, ratio, count, self.device)
                side = GRID_SIZE[0] * ratio
                for name in ("top1_percent", "mask_iou"):
                    row[f"{name}_{side}x{side}"] = measured[name]
        self.rows.append(row)
        if log is not None:
            log(row)

    def store(self, path: Path) -> None:
        """Write a checkpoint."""
        state = {
            "step": self.step,
            "seconds": self.seconds,
            "rows": self.rows,
            "model": self.model.state_dict(),
            "average": self.average.state_dict(),
            "optimiser": self.optimiser.state_dict(),
        }
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
        self.average.load_state_dict(saved["average"])
        self.optimiser.load_state_dict(saved["optimiser"])
        self.step, self.seconds, self.rows = saved["step"], saved["seconds"], saved["rows"]

    def _settings(self) -> dict[str, Any]:
        return {"seed": self.seed, "steps": self.steps, "recipe": asdict(self.recipe)}


def mask_loss(cells: Tensor, masks: Tensor) -> Tensor:
    """Compute binary cross-entropy plus the Dice loss, averaged over pictures.

    Args:
        cells: (B, h, w) logits.
        masks: (B, h, w) shares of the cells that the object covers, 0 to 1.

    Returns:
        A scalar.
    """
    inside = cells.sigmoid()
    both, total = (inside * masks).sum((1, 2)), (inside + masks).sum((1, 2))
    dice = 1.0 - (2.0 * both + 1.0) / (total + 1.0)
    return binary_cross_entropy_with_logits(cells, masks) + dice.mean()


def mask_iou(logits: Tensor, masks: Tensor) -> Tensor:
    """Compute the intersection over union of predicted and true masks.

    Args:
        logits: (B, H, W) logits; positive is inside.
        masks: (B, H, W) torch.bool.

    Returns:
        (B,) float64; 1 if both masks are empty.
    """
    inside = logits > 0
    both, either = ((inside & masks).sum((1, 2)), (inside | masks).sum((1, 2)))
    return torch.where(either > 0, both.double() / either.clamp(min=1), 1.0)


def evaluate(
    model: EmbeddedViT,
    *,
    pictures: int,
    size: int = IMAGE_SIZE,
    seed: int = HELD_OUT_SEED,
    batch_size: int = 32,
) -> Mapping[str, float]:
    """Measure top-1 accuracy and mask IoU on drawn pictures.

    Args:
        model: The model; its device and dtype are used.
        pictures: Number of pictures.
        size: Side of the pictures in pixels.
        seed: Seed of the pictures.
        batch_size: Pictures in a batch.

    Returns:
        `top1_percent` and `mask_iou`.

    Example:
        >>> sorted(evaluate(EmbeddedViT().eval(), pictures=2))
        ['mask_iou', 'top1_percent']
    """
    weight = model.head.weight
    right, overlap = 0, 0.0
    for start in range(0, pictures, batch_size):
        indices = range(start, min(start + batch_size, pictures))
        pixels, labels, masks = draw_badge_batch(seed, indices, size)
        with torch.inference_mode():
            images = preprocess(torch.from_numpy(pixels).to(weight.device)).to(weight.dtype)
            logits, found = model.forward_dense(images)
        right += int((logits.argmax(1).cpu() == torch.from_numpy(labels)).sum())
        overlap += float(mask_iou(found.cpu(), torch.from_numpy(masks)).sum())
    return {
        "top1_percent": round(100.0 * right / pictures, 3),
        "mask_iou": round(overlap / pictures, 4),
    }


def _held_out_row(model: EmbeddedViT, ratio: int, pictures: int, device: torch.device) -> Row:
    size = ratio * IMAGE_SIZE
    measured = evaluate(model, pictures=pictures, size=size)
    frame: Row = {"what": "held-out", "img_size": size, "tokens": (size // PATCH_SIZE) ** 2}
    return frame | {"pictures": pictures} | dict(measured)


def augment(pictures: Tensor, flags: Tensor, *, invert: bool = True) -> Tensor:
    """Flip, transpose and invert pictures.

    These operations keep all classes: a mirrored shape, texture or set of ticks is of the same class,
    and a badge may be lighter or darker than its background.

    Args:
        pictures: (B, C, S, S) preprocessed pictures, or masks.
        flags: (4, B, 1, 1, 1) torch.bool: which pictures to flip horizontally, to flip vertically, to
            transpose and to invert.
        invert: False ignores the last flags, for masks.

    Returns:
        (B, C, S, S) tensor.
    """
    horizontal, vertical, transpose, inverted = flags
    pictures = torch.where(horizontal, pictures.flip(-1), pictures)
    pictures = torch.where(vertical, pictures.flip(-2), pictures)
    pictures = torch.where(transpose, pictures.transpose(-1, -2), pictures)
    return torch.where(inverted, -pictures, pictures) if invert else pictures


class _PictureBatches(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """The new pictures of each step from `start` on: pixels, labels and pixels inside per mask cell."""

    def __init__(self, run: _TrainingRun) -> None:
        self.seed, self.start, self.steps, self.recipe = run.seed, run.step, run.steps, run.recipe

    def __len__(self) -> int:
        return self.steps - self.start

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        step = self.start + index
        ratio = self.recipe.ratio(self.seed, step, self.steps)
        first = step * self.recipe.pictures
        indices = range(first, first + self.recipe.batch(ratio)[0])
        pixels, labels, masks = draw_badge_batch(self.seed, indices, ratio * IMAGE_SIZE)
        cell = PATCH_SIZE // MASK_CELLS
        cells = masks.reshape(len(masks), masks.shape[1] // cell, cell, -1, cell)
        targets = cells.sum((2, 4), dtype="uint8")  # 0 to 4 pixels
        return torch.from_numpy(pixels), torch.from_numpy(labels), torch.from_numpy(targets)


def _make_loader(run: _TrainingRun) -> DataLoader[tuple[Tensor, Tensor, Tensor]]:
    """Return the batches in order; for a GPU, all CPU cores but one draw pictures in advance."""
    batches = _PictureBatches(run)
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
    if not isinstance(saved, dict) or not {"step", "model", "average", "optimiser"} <= saved.keys():
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
