"""Train the embedded model of `bmfa` from scratch on drawn images.

Run with: python tools/train_embedded.py --output embedded.safetensors --json record.json

The shipped weights, src/bmfa/models/embedded/embedded.safetensors, were made with the default options on
one H200; tools/train-embedded-h200.json is the record of that run.
"""

import argparse
import copy
import io
import json
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save as safetensors_bytes
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.utils.data import DataLoader, Dataset

from bmfa.checks import check_integer, check_number
from bmfa.data.drawn.badges import GRAIN, draw_badge_batch, draw_badge_parts, grain_weights
from bmfa.data.drawn.painting import UniformGenerator
from bmfa.evidence.metrics import mask_iou
from bmfa.files import write_atomic
from bmfa.models.embedded.model import (
    GRID_SIZE,
    IMAGE_SIZE,
    MASK_CELLS,
    MEAN,
    PATCH_SIZE,
    STD,
    EmbeddedViT,
    preprocess,
    to_cells,
)
from bmfa.records import Record, Row, environment

# Far from small seeds, which therefore give images that the model was not trained on.
SEED = 20_260_000
SECONDS = 350.0  # of training on one H200, for the shipped weights
HELD_OUT_SEED = 7
_STREAM = 3  # third part of the random key of a step; scenes have 1 and badges 2
_FIRST_BATCHES = 8  # batches of new images before the first step of a training by time
RATIOS = (1, 2, 4)  # sides of the images, relative to 128 pixels
# Ratio of each batch of new images, in turn: three quarters have the own size, so that drawing, which
# takes longer for larger images, spends most of its time on these.
_DRAWN_RATIOS = (1, 2, 4, 1, 1, 1, 2, 1, 1, 1, 1, 2, 1, 1, 1, 1)
Log = Callable[[Row], None]


@dataclass(frozen=True)
class Recipe:
    """Settings of the training.

    Worker processes draw images without grain into a buffer on the device; every step takes a random
    sample of it, flips, transposes and inverts each image at random, and adds grain of a random
    amplitude. A step has images of one size, and at twice the side a quarter as many.
    """

    batch: int = 384  # images of a step of 16x16 tokens
    drawn: int = 256  # images of 16x16 tokens that are drawn together
    reuse: int = 4  # steps for each batch that is drawn, in a training by steps
    buffer: int = 1600  # batches of each size that are kept
    grain: float = 48.0  # largest amplitude of the grain, in levels of 256
    grain_ramp: tuple[float, float] = (0.15, 0.5)  # its part at first; all of it from here on
    small_part: float = 0.7  # of the training, before images of 64x64 tokens
    small_odds: tuple[float, ...] = (0.9, 0.1, 0.0)  # of each of RATIOS in that part
    large_odds: tuple[float, ...] = (0.6, 0.2, 0.2)  # and after it
    learning_rate: float = 2e-3  # largest, after the warm-up
    weight_decay: float = 0.05  # of matrices alone
    warmup: float = 0.02  # part of the training
    smoothing: float = 0.02  # of labels
    mask_weight: float = 1.0  # of the loss of the mask, relative to that of the class
    tick_weight: float = 0.5  # of the loss of the ticks, which a third head finds in training alone
    average: float = 0.998  # decay of the moving average of the weights, which is what is written
    checkpoint_every: int = 2000  # steps
    log_every: int = 200  # steps
    evaluate_every: int = 2500  # steps
    held_out: tuple[int, int] = (1920, 192)  # images of 16x16 and of 64x64 tokens at the end
    held_out_grains: tuple[float, ...] = (0.0, 8.0, 16.0, 24.0, 32.0, 40.0, 48.0)

    def __post_init__(self) -> None:
        whole = ("batch", "drawn", "reuse", "buffer")
        for name in (*whole, "checkpoint_every", "log_every", "evaluate_every"):
            check_integer(name, getattr(self, name), low=1)

    def ratio(self, seed: int, step: int, progress: float) -> int:
        """Return the side of the images of a step, relative to 128 pixels."""
        odds = self.small_odds if progress < self.small_part else self.large_odds
        number = UniformGenerator(seed, step, _STREAM).number()
        for ratio, share in zip(RATIOS[:-1], odds, strict=False):
            number -= share
            if number < 0:
                return ratio
        return RATIOS[-1]

    def grain_limit(self, progress: float) -> float:
        """Return the largest amplitude of the grain: fine noise hides ticks until they are learned."""
        first, end = self.grain_ramp
        return self.grain * min(1.0, first + (1.0 - first) * progress / end)

    def learning_rate_factor(self, progress: float) -> float:
        """Return the factor in [0, 1]: linear warm-up, then cosine decay to 0."""
        if progress < self.warmup:
            return progress / self.warmup
        decayed = (progress - self.warmup) / (1.0 - self.warmup)
        return 0.5 + 0.5 * math.cos(math.pi * min(1.0, decayed))


def train(
    output: str | os.PathLike[str],
    *,
    seed: int = SEED,
    steps: int | None = None,
    seconds: float | None = None,
    stop_after: float | None = None,
    device: str | torch.device = "cpu",
    resume: str | os.PathLike[str] | None = None,
    log: Log | None = None,
    recipe: Recipe | None = None,
) -> Record | None:
    """Train the embedded model, write its weights and measure it on images it has not seen.

    The training has a number of steps, or it lasts a time and takes images as they are drawn. By steps
    everything random is a function of seed and step, so a run that is resumed from its checkpoint ends
    in the same state as an uninterrupted one, as long as the buffer holds all images: bit for bit on a
    CPU, up to the order of sums on a GPU.

    Args:
        output: The safetensors file to write.
        seed: The seed of images, views and initial weights.
        steps: The number of steps; None for a training by time.
        seconds: The time of the training in all calls together; `SECONDS` if neither is given.
        stop_after: The seconds after which this call stores its checkpoint and stops; None for no limit.
        device: The device to train on.
        resume: A checkpoint file; it is created if missing, and updated during the training.
        log: Called with every row of the record.
        recipe: The settings of the training; None for those of the shipped weights.

    Returns:
        The record of the training, or None if the call stopped before the end.

    Raises:
        ValueError: If a setting is out of range, a file cannot be written, the checkpoint is of another
            training, or there is a limit of time and no checkpoint.

    Example:
        >>> import tempfile
        >>> recipe = Recipe(batch=2, drawn=2, held_out=(2, 1), held_out_grains=(8.0,))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     record = train(f"{folder}/weights.safetensors", steps=1, recipe=recipe)
        >>> [row["tokens"] for row in record.rows if row["what"] == "held-out"]
        [256, 4096]
    """
    started = time.monotonic()
    recipe = Recipe() if recipe is None else recipe
    _check_settings(seed, steps, seconds, stop_after, resume)
    checkpoint = None if resume is None else Path(resume)
    _check_files(Path(output), checkpoint)
    if steps is None and seconds is None:
        seconds = SECONDS
    run = _TrainingRun(seed, steps, seconds, _check_device(device), recipe)
    if checkpoint is not None and checkpoint.exists():
        run.restore(checkpoint)
    for losses in run.remaining():
        last = run.progress() >= 1.0
        late = stop_after is not None and time.monotonic() - started > stop_after
        evaluate = run.step % recipe.evaluate_every == 0 and not last
        if last or evaluate or run.step % recipe.log_every == 0:
            run.note(losses, log, evaluate)
        if checkpoint is not None and (last or late or run.step % recipe.checkpoint_every == 0):
            run.store(checkpoint)
        if late and not last:
            return None
    save(run.average, Path(output), {"seed": str(seed), "steps": str(run.step)})
    rows = [
        held_out_row(run.average, ratio, count, grain, run.workers)
        for grain in recipe.held_out_grains
        for ratio, count in zip((1, RATIOS[-1]), recipe.held_out, strict=True)
    ]
    for row in rows:
        if log is not None:
            log(row)
    settings = {"seed": seed, "steps": run.step, **asdict(recipe), "held_out_seed": HELD_OUT_SEED}
    size: Row = {"parameters": sum(p.numel() for p in run.average.parameters())}
    size |= {"seconds": round(run.seconds, 1), "weights_bytes": Path(output).stat().st_size}
    drawn = {"images_drawn": sum(run.drawn.values()), "task_grain": GRAIN}
    frame = environment(run.device.type)
    return Record("train-embedded", settings | size | drawn, [*run.rows, *rows], frame)


class _TrainingRun:
    """Model, average of its weights, optimiser, rows of the log and the number of steps done."""

    def __init__(
        self,
        seed: int,
        steps: int | None,
        total: float | None,
        device: torch.device,
        recipe: Recipe,
    ) -> None:
        self.seed, self.steps, self.total, self.device = seed, steps, total, device
        self.recipe = recipe
        self.step, self.seconds = 0, 0.0
        self.rows: list[Row] = []
        self.workers = max(1, (os.cpu_count() or 2) - 1) if device.type == "cuda" else 0
        self.batches, self.drawn = 0, dict.fromkeys(RATIOS, 0)
        self.buffers = {ratio: ImageBuffer(device) for ratio in RATIOS}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = EmbeddedViT().to(device).train()
            self.tick_head = nn.Linear(self.model.mask_head.in_features, MASK_CELLS**2).to(device)
        with torch.no_grad():  # near the prior, as the heads of the model
            self.tick_head.weight.mul_(0.1)
            self.tick_head.bias.fill_(-4.0)
        self.average = copy.deepcopy(self.model).eval()
        weights = (1.0, recipe.mask_weight, recipe.tick_weight)
        self.loss_weights = torch.tensor(weights, device=device)
        self.parameters = [*self.model.parameters(), *self.tick_head.parameters()]
        self.optimiser = _make_optimiser(self.parameters, recipe)
        self.grain_weights = {
            ratio: torch.from_numpy(grain_weights(ratio * IMAGE_SIZE)).to(device)
            for ratio in RATIOS
        }

    def progress(self) -> float:
        """Return the part of the training that is done, 0 to 1."""
        if self.steps is not None:
            return self.step / self.steps
        return min(1.0, self.seconds / (self.total or SECONDS))

    def remaining(self) -> Iterator[Tensor]:
        """Run the remaining steps and yield the losses of class, mask and ticks (3,) of each."""
        earlier, started = self.seconds, time.monotonic()
        receive = self._by_time() if self.steps is None else self._by_steps()
        for _ in receive:
            progress = self.progress()
            if progress >= 1.0:
                return
            ratio = self.recipe.ratio(self.seed, self.step, progress)
            ratio = ratio if self.buffers[ratio].count else 1
            losses = self._losses(*self._sample(ratio, self.recipe.grain_limit(progress)))
            self.optimiser.zero_grad()
            (losses * self.loss_weights).sum().backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(self.parameters, 1.0)
            factor = self.recipe.learning_rate_factor(
                progress if self.steps is None else (self.step + 1) / (self.steps + 1)
            )
            for group in self.optimiser.param_groups:
                group["lr"] = self.recipe.learning_rate * factor
            self.optimiser.step()
            self.step += 1
            self._update_average()
            self.seconds = earlier + time.monotonic() - started
            yield losses.detach()

    def _by_steps(self) -> Iterator[None]:
        """Before every step, wait for the images that it may use."""
        needed = self.step // self.recipe.reuse + 1
        self.batches, self.drawn = max(0, needed - self.recipe.buffer), dict.fromkeys(RATIOS, 0)
        drawing = iter(self._loader())
        while True:
            while self.batches <= self.step // self.recipe.reuse:
                self._add(next(drawing))
            yield

    def _by_time(self) -> Iterator[None]:
        """Before every step, take the images that are ready."""
        ready: queue.Queue[tuple[Tensor, ...]] = queue.Queue(maxsize=8)
        ended = threading.Event()

        drawing = iter(self._loader())  # here, since processes are started best by the main thread

        def draw() -> None:
            for batch in drawing:
                while not ended.is_set():
                    try:
                        ready.put(batch, timeout=1.0)
                        break
                    except queue.Full:
                        continue
                if ended.is_set():
                    return

        thread = threading.Thread(target=draw, daemon=True)
        thread.start()
        try:
            for _ in range(_FIRST_BATCHES):
                self._add(ready.get())
            while True:
                while not ready.empty():
                    self._add(ready.get())
                yield
        finally:
            ended.set()
            thread.join(timeout=30.0)

    def _loader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Return new images in order; for a GPU, all CPU cores but one draw them."""
        batches = NewImages(self.seed, self.batches, self.recipe.drawn)
        if not self.workers:
            return DataLoader(batches, batch_size=None)
        return DataLoader(batches, batch_size=None, num_workers=self.workers, pin_memory=True)

    def _add(self, batch: tuple[Tensor, ...]) -> None:
        ratio = batch[0].shape[-1] // IMAGE_SIZE
        capacity = self.recipe.buffer * len(batch[0])
        self.buffers[ratio].add(batch, capacity)
        self.batches += 1
        self.drawn[ratio] += len(batch[0])

    @torch.no_grad()
    def _sample(self, ratio: int, grain: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return images (B, 3, S, S), labels and cells (B, 2, 4n, 4n) of mask and ticks, 0 to 1."""
        count = max(1, self.recipe.batch // ratio**2)
        generator = torch.Generator(self.device).manual_seed(self.seed + self.step)

        def random(*shape: int) -> Tensor:
            return torch.rand(*shape, generator=generator, device=self.device)

        held = self.buffers[ratio].count
        chosen = (
            (random(count) * held).long().clamp_(max=held - 1)
        )  # a float32 product may round up
        pixels, labels, cells = self.buffers[ratio].take(chosen)
        flags = random(4, count, 1, 1, 1) < 0.5
        weights = self.grain_weights[ratio]
        knots = 2.0 * random(count, weights.shape[1], weights.shape[1]) - 1.0
        amplitudes = grain * random(count, 1, 1)
        noise = amplitudes * (weights @ knots @ weights.T)  # (B, S, S)
        images = (pixels.float() + noise[:, None]).clamp_(0.0, 255.0)
        images = (images / 255.0 - MEAN) / STD
        shares = augment(cells.float() / (PATCH_SIZE // MASK_CELLS) ** 2, flags, invert=False)
        return augment(images, flags), labels, shares

    def _losses(self, images: Tensor, labels: Tensor, cells: Tensor) -> Tensor:
        kind = self.device.type
        grid = [side // MASK_CELLS for side in cells.shape[2:]]
        with torch.autocast(kind, dtype=torch.bfloat16, enabled=kind == "cuda"):
            features = self.model.forward_features(images)
            logits = self.model.class_logits(features)
            mask = self.model.mask_cells(features, *grid)
            ticks = to_cells(self.tick_head(features[:, 1:]), *grid)
        smoothing = self.recipe.smoothing
        return torch.stack(
            (
                cross_entropy(logits.float(), labels, label_smoothing=smoothing),
                mask_loss(mask.float(), cells[:, 0]),
                mask_loss(ticks.float(), cells[:, 1]),
            )
        )

    @torch.no_grad()
    def _update_average(self) -> None:
        """Move the average towards the weights, faster in the first steps."""
        decay = min(self.recipe.average, (1 + self.step) / (10 + self.step))
        averages: list[Tensor] = list(self.average.parameters())
        weights: list[Tensor] = list(self.model.parameters())
        torch._foreach_lerp_(averages, weights, 1.0 - decay)

    def note(self, losses: Tensor, log: Log | None, evaluate: bool) -> None:
        """Add a row to the log, with accuracy and IoU on a few held-out images."""
        row: Row = {"what": "training", "step": self.step, "seconds": round(self.seconds, 1)}
        names = ("class_loss", "mask_loss", "tick_loss")
        row |= zip(names, (round(value, 4) for value in losses.tolist()), strict=True)
        row["images_drawn"] = sum(self.drawn.values())
        if evaluate:
            for ratio, count in ((1, 240), (RATIOS[-1], 48)):
                measured = held_out_row(self.average, ratio, count, GRAIN, 0)
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
            "seconds_done": self.seconds,
            "batches": self.batches,
            "drawn": self.drawn,
            "rows": self.rows,
            "model": self.model.state_dict(),
            "tick_head": self.tick_head.state_dict(),
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
        self.tick_head.load_state_dict(saved["tick_head"])
        self.average.load_state_dict(saved["average"])
        self.optimiser.load_state_dict(saved["optimiser"])
        self.step, self.seconds = saved["step"], saved["seconds_done"]
        self.batches, self.drawn, self.rows = saved["batches"], saved["drawn"], saved["rows"]

    def _settings(self) -> dict[str, Any]:
        recipe = asdict(self.recipe)
        return {"seed": self.seed, "steps": self.steps, "seconds": self.total, "recipe": recipe}


def mask_loss(cells: Tensor, masks: Tensor) -> Tensor:
    """Compute binary cross-entropy plus the Dice loss, averaged over images.

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


def _make_optimiser(parameters: Sequence[nn.Parameter], recipe: Recipe) -> torch.optim.Optimizer:
    """Return AdamW with weight decay on matrices alone."""
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.dim() in (2, 4)]},
        {"params": [p for p in parameters if p.dim() not in (2, 4)], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups,
        lr=recipe.learning_rate,
        betas=(0.9, 0.98),
        weight_decay=recipe.weight_decay,
        fused=parameters[0].is_cuda,
    )


def _check_settings(
    seed: int,
    steps: int | None,
    seconds: float | None,
    stop_after: float | None,
    resume: str | os.PathLike[str] | None,
) -> None:
    check_integer("seed", seed, low=0, high=2**62)
    if steps is not None:
        check_integer("steps", steps, low=1)
    if steps is not None and seconds is not None:
        raise ValueError(
            f"steps is {steps} and seconds is {seconds:g}; pass one of them as the length"
        )
    for name, value in (("seconds", seconds), ("stop_after", stop_after)):
        if value is not None:
            check_number(name, value, low=0.0, open_low=True)
    if stop_after is not None and resume is None:
        raise ValueError(
            f"stop_after is {stop_after:g} without a checkpoint; pass resume=FILE to keep the work"
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


class NewImages(Dataset[tuple[Tensor, ...]]):
    """Batches of new images without grain: pixels, labels and pixels inside each mask cell."""

    def __init__(self, seed: int, start: int, images: int) -> None:
        self.seed, self.start, self.images = seed, start, images

    def __len__(self) -> int:
        return 2**31 - 1

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        number = self.start + index
        ratio = _DRAWN_RATIOS[number % len(_DRAWN_RATIOS)]
        first, size = number * self.images, ratio * IMAGE_SIZE
        indices = range(first, first + max(1, self.images // ratio**2))
        drawn = [draw_badge_parts(self.seed, index, size, 0.0) for index in indices]
        pixels = np.stack([one[0].transpose(2, 0, 1) for one in drawn])
        labels = np.array([one[1] for one in drawn])
        masks = np.stack([np.stack(one[2:]) for one in drawn])  # (B, 2, size, size)
        cell = PATCH_SIZE // MASK_CELLS
        cells = masks.reshape(len(masks), 2, size // cell, cell, size // cell, cell)
        counts = cells.sum((3, 5), dtype=np.uint8)  # 0 to 4 pixels
        return torch.from_numpy(pixels), torch.from_numpy(labels), torch.from_numpy(counts)


class ImageBuffer:
    """Images of one size on the device; the oldest are replaced when it is full."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.parts: list[Tensor] = []
        self.count, self.next = 0, 0

    def add(self, batch: Sequence[Tensor], capacity: int) -> None:
        """Add images, up to a capacity that is a multiple of their number."""
        size = len(batch[0])
        allocated = len(self.parts[0]) if self.parts else 0
        if self.next + size > allocated and allocated < capacity:
            # Doubled, so that the copies take little time in all.
            wanted = min(capacity, max(2 * allocated, size))
            grown = [p.new_empty(wanted, *p.shape[1:], device=self.device) for p in batch]
            for new, old in zip(grown, self.parts, strict=False):
                new[:allocated] = old
            self.parts, allocated = grown, wanted
        if self.next + size > allocated:
            self.next = 0
        for part, new in zip(self.parts, batch, strict=True):
            part[self.next : self.next + size].copy_(new, non_blocking=True)
        self.next += size
        self.count = max(self.count, self.next)

    def take(self, chosen: Tensor) -> list[Tensor]:
        """Return copies of the chosen images."""
        return [part[chosen] for part in self.parts]


def augment(images: Tensor, flags: Tensor, *, invert: bool = True) -> Tensor:
    """Flip, transpose and invert images.

    These operations keep all classes: a mirrored shape, texture or set of ticks is of the same class,
    and a badge may be lighter or darker than its background.

    Args:
        images: (B, C, S, S) preprocessed images, or masks.
        flags: (4, B, 1, 1, 1) torch.bool: which images to flip horizontally, to flip vertically, to
            transpose and to invert.
        invert: False ignores the last flags, for masks.

    Returns:
        (B, C, S, S) tensor.
    """
    horizontal, vertical, transpose, inverted = flags
    images = torch.where(horizontal, images.flip(-1), images)
    images = torch.where(vertical, images.flip(-2), images)
    images = torch.where(transpose, images.transpose(-1, -2), images)
    return torch.where(inverted, -images, images) if invert else images


def evaluate(
    model: EmbeddedViT,
    *,
    images: int,
    size: int = IMAGE_SIZE,
    seed: int = HELD_OUT_SEED,
    grain: float = GRAIN,
    batch_size: int = 32,
    workers: int = 0,
) -> Mapping[str, float]:
    """Measure top-1 accuracy and mask IoU on drawn images.

    Args:
        model: The model; its device and dtype are used.
        images: Number of images.
        size: Side of the images in pixels.
        seed: Seed of the images.
        grain: Amplitude of their grain.
        batch_size: Images in a batch.
        workers: Processes that draw; 0 draws in this one.

    Returns:
        `top1_percent` and `mask_iou`.

    Example:
        >>> sorted(evaluate(EmbeddedViT().eval(), images=2))
        ['mask_iou', 'top1_percent']
    """
    weight = model.head.weight
    right, overlap = 0, 0.0
    batches = _HeldOut(seed, images, size, grain, batch_size)
    for pixels, labels, masks in DataLoader(batches, batch_size=None, num_workers=workers):
        with torch.inference_mode():
            inputs = preprocess(pixels.to(weight.device)).to(weight.dtype)
            logits, found = model.forward_dense(inputs)
        right += int((logits.argmax(1).cpu() == labels).sum())
        overlap += float(mask_iou(found.cpu() > 0, masks).sum())
    return {
        "top1_percent": round(100.0 * right / images, 3),
        "mask_iou": round(overlap / images, 4),
    }


def held_out_row(model: EmbeddedViT, ratio: int, images: int, grain: float, workers: int) -> Row:
    """Return the row of a record that measures the model on held-out images.

    Args:
        model: The model.
        ratio: Side of the images relative to 128 pixels.
        images: Number of images.
        grain: Amplitude of their grain.
        workers: Processes that draw; 0 draws in this one.
    """
    size = ratio * IMAGE_SIZE
    measured = evaluate(
        model, images=images, size=size, grain=grain, batch_size=32 // ratio, workers=workers
    )
    frame: Row = {"what": "held-out", "img_size": size, "tokens": (size // PATCH_SIZE) ** 2}
    return frame | {"grain": grain, "images": images} | dict(measured)


class _HeldOut(Dataset[tuple[Tensor, ...]]):
    """Batches of images of a seed as the task has them."""

    def __init__(self, seed: int, images: int, size: int, grain: float, batch: int) -> None:
        self.seed, self.images, self.size, self.grain = seed, images, size, grain
        self.batch = batch

    def __len__(self) -> int:
        return -(-self.images // self.batch)

    def __getitem__(self, number: int) -> tuple[Tensor, ...]:
        if not 0 <= number < len(self):
            raise IndexError(number)
        first = number * self.batch
        indices = range(first, min(first + self.batch, self.images))
        drawn = draw_badge_batch(self.seed, indices, self.size, grain=self.grain)
        pixels, labels, masks = map(torch.from_numpy, drawn)
        return pixels, labels, masks


def save(model: EmbeddedViT, path: str | Path, metadata: Mapping[str, str]) -> None:
    """Write the weights to a safetensors file in half precision.

    Args:
        model: The model.
        path: The file, which is replaced atomically.
        metadata: Settings of the training, stored in the file.
    """
    state = {name: tensor.half().cpu() for name, tensor in model.state_dict().items()}
    # One entry: safetensors writes several in no fixed order, and equal weights must give equal files.
    recipe = {"recipe": json.dumps(dict(metadata), sort_keys=True)}
    write_atomic(path, safetensors_bytes(state, metadata=recipe))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Train the embedded model from scratch.")
    parser.add_argument("--output", default="embedded.safetensors", help="file for the weights")
    parser.add_argument("--json", help="file for the record of the training")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, help="length of the training in steps")
    parser.add_argument("--seconds", type=float, help=f"length in seconds; {SECONDS:g} by default")
    parser.add_argument("--resume", help="checkpoint to continue from; created if missing")
    parser.add_argument("--stop-after", type=float, help="seconds until this call stops")
    values = vars(parser.parse_args(arguments))
    json_path = values.pop("json")
    try:
        record = train(**values, log=_print_row)
    except ValueError as error:
        parser.error(str(error))
    if record is None:
        print(f"stopped; run the same command again to continue from {values['resume']}")
    elif json_path is not None:
        write_atomic(Path(json_path), record.to_json().encode())


def _print_row(row: Row) -> None:
    print("  ".join(f"{name} {value}" for name, value in row.items() if name != "what"), flush=True)


if __name__ == "__main__":
    main()
