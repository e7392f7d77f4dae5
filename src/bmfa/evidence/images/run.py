"""`bmfa screen`: the attention of one query of an image, its tree and the error of it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bmfa.attention.result import Screened
from bmfa.data.classification import LabelledImage
from bmfa.energy import gap
from bmfa.evidence.images.thumbnails import jpeg_uri
from bmfa.evidence.metrics import output_kl
from bmfa.evidence.model_methods import Layers, applied
from bmfa.models import LoadedModel, layer_indices, unpatch
from bmfa.models.families import find_vision_transformer
from bmfa.models.screened_layer import LayerInputs, observe
from bmfa.packages import load_package
from bmfa.records import Record, Row, environment
from bmfa.trees.certificates import exact_error
from bmfa.trees.rules import Rule, parse
from bmfa.trees.tree import Tree

DEFAULT_METHODS = ("optimal:0.002",)
CLASS_TOKEN = "class"
IMAGE_BYTES = 40_000
DIGITS = 7  # decimals of scores and attention in rows
PROTOCOL = (
    "scores and trees of one query and head, the layer's inputs those of the full model; error is E "
    "over all keys, prefix keys exact; gap is that of one leaf over the spatial keys; the class is "
    "what the model says with the layers screened"
)


@dataclass(frozen=True)
class View:
    """The query to show: by default in the last layer and in the head with the largest gap."""

    layer: int | None = None
    head: int | None = None
    query: str = CLASS_TOKEN  # or ROW,COLUMN of the grid, from 0

    def __post_init__(self) -> None:
        if self.query != CLASS_TOKEN and self.row_and_column is None:
            raise ValueError(
                f"query is {self.query!r}; pass {CLASS_TOKEN}, or ROW,COLUMN of a token such as 3,5"
            )

    @property
    def row_and_column(self) -> tuple[int, int] | None:
        """Row and column of the query; None for the class token."""
        parts = self.query.split(",")
        if len(parts) != 2 or not all(part.strip().isdecimal() for part in parts):
            return None
        return int(parts[0]), int(parts[1])


def run(
    model: LoadedModel,
    images: Sequence[LabelledImage],
    methods: Sequence[str] = DEFAULT_METHODS,
    *,
    view: View | None = None,
    layers: Layers = "last-4",
    image_bytes: int = IMAGE_BYTES,
    seed: int = 0,
    device: str = "cpu",
) -> Record:
    """Record full and screened attention of one query, its tree, its error E and a certificate.

    The model is patched during the run and has no patch afterwards.

    Args:
        model: The model.
        images: The images.
        methods: Names of rules.
        view: Layer, head and query.
        layers: Layers that are screened for the predicted class.
        image_bytes: Largest size of an image in the record.
        seed: Seed of random rules.
        device: Device of the model.

    Returns:
        A record of one row for each image and method.

    Raises:
        ValueError: If a method, a layer, the head or the query does not exist.

    Example:
        >>> from bmfa.data.classification import EmbeddedImages
        >>> from bmfa.models import load_model
        >>> record = run(load_model("embedded"), [EmbeddedImages(1)[0]], ["global-mean"])
        >>> record.rows[0]["leaves"], record.rows[0]["error"] <= record.rows[0]["certificate"]
        (1, True)
    """
    view = view or View()
    for method in methods:
        parse(method, seed)
    depth = len(find_vision_transformer(model.model).attentions)
    layer_indices(layers, depth)
    view = replace(view, layer=_layer(view.layer, depth))
    unpatch(model.model).to(device)
    rows: list[Row] = []
    with torch.inference_mode():
        for image in images:
            pixels = model.preprocess(image.pixels)[None].to(device)
            full = model.logits(pixels)
            uri = jpeg_uri(_to_image(model, pixels[0]), image_bytes)
            for method in methods:
                named = {"model": model.name, "title": image.name}
                row = named | _row(model, pixels, full, method, view, layers, seed)
                row["image"] = uri
                if image.label is not None:
                    row["label"] = image.label_name or _class_name(model, image.label)
                rows.append(row)
    settings = {
        "model": model.name,
        "preprocessing": asdict(model.preprocess),
        "images": [image.name for image in images],
        "methods": list(methods),
        **asdict(view),
        "layers": layers,
        "seed": seed,
        "protocol": PROTOCOL,
    }
    return Record("image", settings, rows, environment(device))


@dataclass(frozen=True, eq=False)
class Query:
    """One query of one head and all keys, in float64; q is multiplied by the scale."""

    head: int
    index: int
    q: Tensor  # (1, 1, d)
    keys: Tensor  # (1, prefix + N, d)
    prefix: int

    @classmethod
    def from_layer(cls, call: LayerInputs, view: View) -> "Query":
        """Choose the query, and the head, of a view."""
        index, heads = _query_index(view, call), call.q.shape[1]
        q, k = call.q[0].double() * call.scale, call.k[0].double()
        if view.head is None:
            scores = (q[:, index : index + 1] @ k.transpose(-2, -1))[:, 0]  # (heads, prefix + N)
            head = int(gap(scores[:, call.prefix :]).argmax())
        elif 0 <= view.head < heads:
            head = view.head
        else:
            raise ValueError(f"head is {view.head}; layer {call.layer} has heads 0 to {heads - 1}")
        return cls(head, index, q[head, index][None, None], k[head][None], call.prefix)

    def certificate(self, tree: Tree) -> float:
        """Return a proven bound on E, from the exact scores."""
        spatial, before = self.keys[:, self.prefix :], self.keys[:, : self.prefix]
        return float(exact_error(self.q, spatial, tree.flat(), before))


def _row(
    model: LoadedModel,
    pixels: Tensor,
    full: Tensor,
    method: str,
    view: View,
    layers: Layers,
    seed: int,
) -> Row:
    """Return the row of one method; the layer that is shown has the inputs of the full model."""
    calls: list[tuple[LayerInputs, Tree]] = []

    def keep(inputs: LayerInputs, screened: Screened) -> None:
        calls.append((inputs, screened.tree))

    with (
        applied(model.model, method, [view.layer or 0], seed),
        observe(model.model, keep),
    ):
        model.logits(pixels)
    with applied(model.model, method, layers, seed):
        screened = model.logits(pixels)
    call, trees = calls[-1]
    query = Query.from_layer(call, view)
    tree = trees[0, query.head, query.index : query.index + 1]
    return {
        "method": method,
        "layer": call.layer,
        "head": query.head,
        "query": view.query,
        "height": call.grid.height,
        "width": call.grid.width,
        **_attention(query, parse(method, seed), tree),
        **_predictions(model, full, screened),
    }


def _attention(query: Query, rule: Rule, tree: Tree) -> Row:
    """Return both distributions over the spatial keys, the tree, E and its bound."""
    scores = (query.q @ query.keys.transpose(-2, -1))[0, 0]  # (prefix + N,)
    before, spatial = scores[: query.prefix], scores[query.prefix :]
    screened = torch.cat((before, tree.reconstruct(spatial[None])[0]))
    full, approximate = scores.softmax(-1), screened.softmax(-1)
    error = float(scores.logsumexp(-1) - screened.logsumexp(-1))
    return {
        "scores": _round(spatial),
        "attention": _round(full[query.prefix :]),
        "screened_attention": _round(approximate[query.prefix :]),
        "prefix_percent": 100 * float(full[: query.prefix].sum()),
        "boxes": tree[0].leaf_boxes.tolist(),
        "leaves": int(tree.leaf_count[0]),
        "leaf_percent": 100 * float(tree.leaf_ratio[0]),
        "gap": float(gap(spatial)),
        "error": max(error, 0.0),
        "certificate": query.certificate(tree),
        "certificate_from": "scores",
        "moved_percent": 50 * float((full - approximate).abs().sum()),
    }


def _predictions(model: LoadedModel, full: Tensor, screened: Tensor) -> Row:
    """Return the classes that the full and the screened model predict, and the KL of the outputs."""
    row: Row = {}
    for name, logits in (("full", full), ("screened", screened)):
        shares = logits[0].double().log_softmax(-1).exp()
        first = int(shares.argmax())
        row |= {f"{name}_class": _class_name(model, first)}
        row |= {f"{name}_class_percent": 100 * float(shares[first])}
    return row | {"output_kl": float(output_kl(full, screened))}


def _class_name(model: LoadedModel, index: int) -> str:
    names = model.classes or ()
    return names[index] if index < len(names) else f"class {index}"


def _layer(layer: int | None, depth: int) -> int:
    if layer is None:
        return depth - 1
    if not 0 <= layer < depth:
        raise ValueError(f"layer is {layer}; the model has layers 0 to {depth - 1}")
    return layer


def _query_index(view: View, call: LayerInputs) -> int:
    """Return the index of the query among all tokens."""
    if view.row_and_column is None:
        if call.prefix == 0:
            raise ValueError("the model has no class token; pass the query as ROW,COLUMN")
        return 0
    (row, column), grid = view.row_and_column, call.grid
    if row >= grid.height or column >= grid.width:
        raise ValueError(
            f"query {view.query} is outside the {grid.height}x{grid.width} grid; rows are 0 to "
            f"{grid.height - 1}, columns 0 to {grid.width - 1}"
        )
    return call.prefix + row * grid.width + column


def _to_image(model: LoadedModel, pixels: Tensor) -> Any:
    """Return the image as the model sees it: resized, cropped, without the normalisation."""
    mean, std = (np.asarray(v, np.float32) for v in (model.preprocess.mean, model.preprocess.std))
    colours: NDArray[np.float32] = pixels.cpu().numpy().transpose(1, 2, 0) * std + mean
    eight_bits = (255 * colours).round().clip(0, 255).astype(np.uint8)
    return load_package("PIL.Image").fromarray(eight_bits)


def _round(values: Tensor) -> list[float]:
    return [round(value, DIGITS) for value in values.tolist()]
