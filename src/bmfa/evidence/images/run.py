"""`bmfa screen`: the attention of one query of an image, its tree and the error of it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from bmfa.data.classification import LabelledImage
from bmfa.energy import gap
from bmfa.evidence.images.thumbnails import jpeg_uri, seen_image
from bmfa.evidence.metrics import output_kl
from bmfa.evidence.model_methods import Layers, applied, class_name, predicted_class
from bmfa.models import LoadedModel, layer_indices, unpatch
from bmfa.models.families import find_vision_transformer
from bmfa.models.screened_layer import LayerInputs, observe
from bmfa.records import Record, Row, environment
from bmfa.trees.certificates import exact_error
from bmfa.trees.rules import parse
from bmfa.trees.tree import Tree

DEFAULT_METHODS = ("optimal:0.002",)
CLASS_TOKEN = "class"
LAYERS = "last-4"  # screened for the predicted class
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
    layers: Layers = LAYERS,
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
    layer = depth - 1 if view.layer is None else view.layer
    view = replace(view, layer=_check_index("layer", layer, depth, "the model"))
    unpatch(model.model).to(device)
    rows: list[Row] = []
    with torch.inference_mode():
        for image in images:
            pixels = model.preprocess(image.pixels)[None].to(device)
            full = model.logits(pixels)
            uri = jpeg_uri(seen_image(model.preprocess, pixels[0]), image_bytes)
            for method in methods:
                named = {"model": model.name, "title": image.name}
                row = named | _row(model, pixels, full, method, view, layers, seed)
                row["image"] = uri
                if image.label is not None:
                    row["label"] = image.label_name or class_name(model, image.label)
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
    with (
        applied(model.model, method, [view.layer or 0], seed),
        observe(model.model, lambda inputs, screened: calls.append((inputs, screened.tree))),
    ):
        model.logits(pixels)
    with applied(model.model, method, layers, seed):
        moved = model.logits(pixels)
    call, trees = calls[-1]
    index, q, k = _query_index(view, call), call.q[0].double() * call.scale, call.k[0].double()
    head = _head(view.head, q[:, index : index + 1], k, call)
    row: Row = {"method": method, "layer": call.layer, "head": head, "query": view.query}
    row |= {"height": call.grid.height, "width": call.grid.width}
    tree = trees[0, head, index : index + 1]
    row |= _attention(q[head, index][None, None], k[head][None], call.prefix, tree)
    for name, logits in (("full", full), ("screened", moved)):
        row[f"{name}_class"], row[f"{name}_class_percent"] = predicted_class(model, logits)
    return row | {"output_kl": float(output_kl(full, moved))}


def _head(head: int | None, q: Tensor, k: Tensor, call: LayerInputs) -> int:
    """Return the head to show, by default the one with the largest gap of its (heads, 1, d) query."""
    if head is None:
        scores = (q @ k.transpose(-2, -1))[:, 0]  # (heads, prefix + N)
        return int(gap(scores[:, call.prefix :]).argmax())
    return _check_index("head", head, len(q), f"layer {call.layer}")


def _attention(q: Tensor, keys: Tensor, prefix: int, tree: Tree) -> Row:
    """Return both distributions over the spatial keys, the tree, E and a proven bound on it.

    Args:
        q: (1, 1, d) query, multiplied by the scale.
        keys: (1, prefix + N, d).
        prefix: Number of keys before the spatial ones.
        tree: The tree of the query.
    """
    scores = (q @ keys.transpose(-2, -1))[0, 0]  # (prefix + N,)
    before, spatial = scores[:prefix], scores[prefix:]
    screened = torch.cat((before, tree.reconstruct(spatial[None])[0]))
    full, approximate = scores.softmax(-1), screened.softmax(-1)
    error = float(scores.logsumexp(-1) - screened.logsumexp(-1))
    return {
        "scores": _round(spatial),
        "attention": _round(full[prefix:]),
        "screened_attention": _round(approximate[prefix:]),
        "prefix_percent": 100 * float(full[:prefix].sum()),
        "boxes": tree[0].leaf_boxes.tolist(),
        "leaves": int(tree.leaf_count[0]),
        "leaf_percent": 100 * float(tree.leaf_ratio[0]),
        "gap": float(gap(spatial)),
        "error": max(error, 0.0),
        "certificate": float(exact_error(q, keys[:, prefix:], tree.flat(), keys[:, :prefix])),
        "certificate_from": "scores",
        "moved_percent": 50 * float((full - approximate).abs().sum()),
    }


def _check_index(name: str, index: int, count: int, owner: str) -> int:
    if not 0 <= index < count:
        raise ValueError(f"{name} is {index}; {owner} has {name}s 0 to {count - 1}")
    return index


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


def _round(values: Tensor) -> list[float]:
    return [round(value, DIGITS) for value in values.tolist()]
