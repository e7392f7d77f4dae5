"""`bmfa explore`: the queries and keys of the layers of a model for one image."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bmfa.data.classification import LabelledImage
from bmfa.energy import gap
from bmfa.evidence.explorer.packing import PackedHead, pack_head, query_slices
from bmfa.evidence.images.thumbnails import jpeg_uri, seen_image
from bmfa.evidence.model_methods import applied, class_name, predicted_class
from bmfa.grid import Grid
from bmfa.models import LoadedModel, layer_indices, unpatch
from bmfa.models.families import find_vision_transformer
from bmfa.models.screened_layer import LayerInputs, observe
from bmfa.records import Record, Row, environment
from bmfa.trees.build import screen

# Bytes of queries and keys in a page if no layers are asked for: with the image and the program the
# page stays below 4.5 MB, and below 6 MB together with the page of `bmfa report` (1.6 MB).
PAGE_BYTES = 4_000_000
IMAGE_BYTES = 120_000
# Longest side of the shown image in pixels: two device pixels for each CSS pixel of a panel.
IMAGE_SIDE = 1024
BASE64_GROWTH = 4 / 3
# The page begins where Algorithm 1 misses most, at the threshold of the chapters on images.
START_RULE = "gamma:0.05"
START_LEAVES = (0.05, 0.35)  # shares of leaves of a tree that is neither trivial nor nearly full
START_QUERIES = 512  # of a longer sequence about as many queries, evenly spaced, are tried
LATER = 1e6  # above any E, so that other trees come after those in START_LEAVES
PROTOCOL = (
    "queries and keys of the full model, rounded to 16 bits; gap is that of one leaf over the spatial "
    "keys, over all queries; rounding is the largest difference that 16 bits make in a score"
)


@dataclass(frozen=True, eq=False)
class ExploredLayer:
    """The heads of one layer; queries and keys are the prefix tokens, then the grid in raster order."""

    layer: int
    grid: Grid
    prefix: int
    heads: Sequence[PackedHead]
    valid: NDArray[np.bool_] | None  # (N,) spatial tokens that exist

    def to_json(self) -> dict[str, Any]:
        """Return what the page holds."""
        return {
            "layer": self.layer,
            "height": self.grid.height,
            "width": self.grid.width,
            "prefix": self.prefix,
            "dim": int(self.heads[0].q.shape[1]),
            "valid": None if self.valid is None else self.valid.astype(int).tolist(),
            "heads": [head.to_json() for head in self.heads],
        }

    def rows(self) -> list[Row]:
        """Return a row for each head, with the gap of one leaf over the spatial keys of its queries."""
        valid = None if self.valid is None else torch.from_numpy(self.valid)
        rows: list[Row] = []
        for index, head in enumerate(self.heads):
            parts = (head.scores(part) for part in query_slices(len(head.q), len(head.k)))
            spatial = (torch.from_numpy(part[:, self.prefix :]) for part in parts)
            gaps = torch.cat([gap(scores, valid=valid) for scores in spatial])
            row: Row = {"layer": self.layer, "head": index}
            row |= {"height": self.grid.height, "width": self.grid.width, "prefix": self.prefix}
            row |= {"dim": int(head.q.shape[1]), "mean_gap": float(gaps.numpy().mean())}
            rows.append({**row, "max_gap": float(gaps.max()), "rounding": head.rounding})
        return rows


@dataclass(frozen=True, eq=False)
class Exploration:
    """What the page shows, and the record of it.

    Args:
        title: Name of the image.
        model: Name of the model.
        image: JPEG of the image as the model sees it, as a data URI.
        prediction: The class that the model predicts, with its probability; empty if it has none.
        label: The class of the image; empty if it is unknown.
        toy: True for the embedded model, which knows drawn images only.
        drawn: True for one of its own images.
        layers: The layers, in order.
        depth: Number of layers of the model.
        start: Layer, head and query that the page shows first.
        record: One row for each layer and head.
    """

    title: str
    model: str
    image: str
    prediction: str
    label: str
    toy: bool
    drawn: bool
    layers: Sequence[ExploredLayer]
    depth: int
    start: dict[str, int]
    record: Record


def run(
    model: LoadedModel,
    image: LabelledImage,
    *,
    layers: str | list[int] | None = None,
    drawn: bool = False,
    device: str = "cpu",
) -> Exploration:
    """Record the queries and keys of a model for one image.

    The model runs once for each layer, with that layer observed and all others unchanged, and has no
    patch afterwards.

    Args:
        model: The model.
        image: The image.
        layers: Layers to record: `"all"`, `"last-4"` or indices. None records as many of the last layers
            as fit a page of 4 MB, at least one.
        drawn: True if the image is one that the package draws for its embedded model.
        device: Device of the model.

    Returns:
        The data of the page, and a record of one row for each layer and head.

    Raises:
        ValueError: If a layer does not exist, or no chosen layer has one grid of queries and keys.

    Example:
        >>> from bmfa.data.classification import EmbeddedImages
        >>> from bmfa.models import load_model
        >>> exploration = run(load_model("embedded"), EmbeddedImages(1)[0], layers="last-1")
        >>> sorted(exploration.start), exploration.toy
        (['head', 'layer', 'query'], True)
    """
    depth = len(find_vision_transformer(model.model).attentions)
    chosen = list(range(depth)) if layers is None else sorted(layer_indices(layers, depth))
    unpatch(model.model).to(device)
    pixels = model.preprocess(image.pixels)[None].to(device)
    with torch.inference_mode():
        prediction = _prediction(model, pixels)
        found, left_out = _record_layers(
            model, pixels, chosen, PAGE_BYTES if layers is None else None
        )
    if not found:
        raise ValueError(
            f"{model.name} has no layer to explore: {left_out[0]}; choose other layers, or a model "
            "whose layers attend over one grid"
        )
    label = image.label_name or ("" if image.label is None else class_name(model, image.label))
    settings = {
        "model": model.name,
        "preprocessing": asdict(model.preprocess),
        "image": image.name,
        "layers": [layer.layer for layer in found],
        "left_out": left_out,
        "prediction": prediction,
        "label": label,
        "protocol": PROTOCOL,
    }
    rows = [row for layer in found for row in layer.rows()]
    return Exploration(
        title=image.name,
        model=model.name,
        image=_image_uri(model, image),
        prediction=prediction,
        label=label,
        toy=model.name == "embedded",
        drawn=drawn,
        layers=found,
        depth=depth,
        start=_start(found),
        record=Record("explore", settings, rows, environment(device)),
    )


def _record_layers(
    model: LoadedModel, pixels: Tensor, chosen: Sequence[int], max_bytes: int | None
) -> tuple[list[ExploredLayer], list[str]]:
    """Return the layers, only the last ones if `max_bytes` limits them, and why others are missing."""
    found: list[ExploredLayer] = []
    left_out: list[str] = []
    used = 0.0
    for index in reversed(chosen):
        calls = _observe_layer(model, pixels, index)
        if reason := _unsuitable(calls):
            left_out.append(f"layer {index} {reason}")
            continue
        used += (calls[0].q.numel() + calls[0].k.numel()) * 2 * BASE64_GROWTH
        if max_bytes is not None and used > max_bytes and found:
            break
        found.insert(0, _explored(calls[0]))
    return found, left_out


def _observe_layer(model: LoadedModel, pixels: Tensor, layer: int) -> list[LayerInputs]:
    """Return the inputs of the calls of one layer in the full model."""
    calls: list[LayerInputs] = []
    # The output of the observed layer is not used: the layers before it are those of the full model.
    with (
        applied(model.model, "global-mean", [layer]),
        observe(model.model, lambda inputs, _: calls.append(inputs)),
    ):
        model.model(pixels, **model.options)
    return calls


def _unsuitable(calls: Sequence[LayerInputs]) -> str:
    """Return why the calls of a layer are not one grid of queries and keys, or an empty text."""
    if len(calls) != 1 or calls[0].q.shape[0] != 1:
        return "attends inside of windows or over several grids"
    if calls[0].grid.frames != 1:
        return "attends over several images at once"
    if calls[0].q.shape[2] != calls[0].k.shape[2]:
        return "has fewer queries than keys"
    return ""


def _explored(call: LayerInputs) -> ExploredLayer:
    q, k = (x[0].double().cpu().numpy() for x in (call.q, call.k))  # (heads, prefix + N, d)
    shared = q.shape[0] // k.shape[0]  # query heads of each key head
    heads = [pack_head(one, k[head // shared], call.scale) for head, one in enumerate(q)]
    valid = None
    if call.valid is not None and not bool(call.valid[0].all()):
        valid = call.valid[0].cpu().numpy()
    return ExploredLayer(call.layer, call.grid, call.prefix, heads, valid)


def _start(layers: Sequence[ExploredLayer]) -> dict[str, int]:
    """Return the layer, head and query of the grid to show first: the largest E of `START_RULE`.

    Trees with a share of leaves in `START_LEAVES` go first, then other trees that split; a single leaf
    shows no tree and comes last. Among equals the last layer is taken.
    """
    best, start = -torch.inf, {"layer": layers[-1].layer, "head": 0, "query": 0}
    for layer in reversed(layers):
        valid = None if layer.valid is None else torch.from_numpy(layer.valid)
        step = 1 + layer.grid.size // START_QUERIES
        queries = slice(layer.prefix, None, step)
        for index, head in enumerate(layer.heads):
            scores = torch.from_numpy(head.scores(queries)[:, layer.prefix :])
            tree = screen(scores, layer.grid, START_RULE, valid=valid)
            ratio, (low, high) = tree.leaf_ratio, START_LEAVES
            later = 2 - (tree.leaf_count > 1).int() - ((ratio >= low) & (ratio <= high)).int()
            errors = tree.error(scores) - LATER * later
            if valid is not None:
                errors = errors.where(valid[::step], -torch.inf)
            if float(errors.max()) > best:
                best, query = float(errors.max()), step * int(errors.argmax())
                start = {"layer": layer.layer, "head": index, "query": query}
    return start


def _prediction(model: LoadedModel, pixels: Tensor) -> str:
    """Return the predicted class with its probability; empty if the model is not a classifier."""
    try:
        name, percent = predicted_class(model, model.logits(pixels))
    except TypeError:
        return ""
    return f"{name} ({percent:.1f} %)"


def _image_uri(model: LoadedModel, image: LabelledImage) -> str:
    """Return the image with the crop of the model, at a higher resolution if the file has it."""
    height, width = model.preprocess.size
    rows, columns, _ = image.pixels.shape
    factor = max(1, min(IMAGE_SIDE // max(height, width), rows // height, columns // width))
    preprocess = replace(model.preprocess, size=(height * factor, width * factor))
    return jpeg_uri(seen_image(preprocess, preprocess(image.pixels)), IMAGE_BYTES)
