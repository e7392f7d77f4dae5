"""Record what the screened layers of a model do: trees, leaf ratios, errors, attention weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from bmfa.attention.result import Screened, Stats
from bmfa.models.screened_layer import LayerInputs, observe, screened_layers
from bmfa.trees.build import CHUNK_ELEMENTS
from bmfa.trees.keys import query_chunks
from bmfa.trees.tree import Tree


@dataclass(eq=False, repr=False)
class LayerRecord:
    """What one layer did; every list has an entry for each forward pass.

    `record` makes these.

    Args:
        stats: The statistics of `screened_attention`.
        trees: Trees of shape (B, heads, queries).
        leaf_ratios: (B, heads, queries) leaves as a fraction of the valid tokens.
        errors: (B, heads, queries) error E of the trees over the spatial keys. For attention over
            tiles it is the error of the partition, before the corrections of the form.
        attention: (B, heads, queries, prefix + N) the attention weights of the trees of the layer.
        full_attention: The weights of full attention on the same inputs.

    Example:
        >>> import bmfa, torch
        >>> model = bmfa.patch(bmfa.load_model("embedded").model, rule="fixed-depth:1", layers=[7])
        >>> with bmfa.record(model) as recording:
        ...     _ = model(torch.zeros(1, 3, 112, 112))
        >>> layer = recording[7]
        >>> len(layer.stats), layer.leaf_ratios[0].shape
        (1, torch.Size([1, 3, 197]))
    """

    stats: list[Stats] = field(default_factory=list)
    trees: list[Tree] = field(default_factory=list)
    leaf_ratios: list[Tensor] = field(default_factory=list)
    errors: list[Tensor] = field(default_factory=list)
    attention: list[Tensor] = field(default_factory=list)
    full_attention: list[Tensor] = field(default_factory=list)

    def __repr__(self) -> str:
        """Show how many there are of each: the tensors are large."""
        counts = ", ".join(f"{len(kept)} {name}" for name, kept in vars(self).items() if kept)
        return f"LayerRecord({counts})"


@dataclass(eq=False, repr=False)
class Recording:
    """The records of all screened layers; `recording[index]` is the `LayerRecord` of a layer.

    `record` makes these.

    Args:
        layers: The records by layer index.
        keep_trees: True if trees, leaf ratios and errors are recorded.
        keep_attention: True if attention weights are recorded.

    Example:
        >>> import bmfa, torch
        >>> model = bmfa.patch(bmfa.load_model("embedded").model, rule="fixed-depth:1", layers="last-2")
        >>> with bmfa.record(model) as recording:
        ...     _ = model(torch.zeros(1, 3, 112, 112))
        >>> sorted(recording.layers)
        [6, 7]
    """

    layers: dict[int, LayerRecord] = field(default_factory=dict)
    keep_trees: bool = True
    keep_attention: bool = False

    def __repr__(self) -> str:
        """Show the layers and the calls of each, without their tensors."""
        calls = {layer: len(record.stats) for layer, record in sorted(self.layers.items())}
        kept = f"trees={self.keep_trees}, attention={self.keep_attention}"
        return f"Recording(calls by layer: {calls}, {kept})"

    def __getitem__(self, layer: int) -> LayerRecord:
        try:
            return self.layers[layer]
        except KeyError:
            known = ", ".join(map(str, sorted(self.layers))) or "none: the model was not called"
            raise KeyError(f"layer {layer} was not recorded; recorded are {known}") from None

    @property
    def leaf_ratio(self) -> float:
        """Mean leaf ratio over layers, forward passes, images, heads and queries.

        Raises:
            ValueError: If no trees were recorded.

        Example:
            >>> import bmfa, torch
            >>> model = bmfa.load_model("embedded").model
            >>> model = bmfa.patch(model, rule="fixed-depth:1", layers=[7])
            >>> with bmfa.record(model) as recording:
            ...     _ = model(torch.zeros(1, 3, 112, 112))
            >>> round(recording.leaf_ratio * 196)
            4
        """
        return _mean([ratio for record in self.layers.values() for ratio in record.leaf_ratios])

    @property
    def error(self) -> float:
        """Mean error E over the spatial keys, of the same trees as `leaf_ratio`.

        Raises:
            ValueError: If no trees were recorded.

        Example:
            >>> import bmfa, torch
            >>> model = bmfa.load_model("embedded").model
            >>> model = bmfa.patch(model, rule=bmfa.rules.ExactGap(0.0), layers=[7])
            >>> with bmfa.record(model) as recording:
            ...     _ = model(torch.zeros(1, 3, 112, 112))
            >>> recording.error < 1e-6
            True
        """
        return _mean([error for record in self.layers.values() for error in record.errors])

    def __call__(self, inputs: LayerInputs, screened: Screened) -> None:
        """Record one call of a screened layer."""
        if self.keep_attention and screened.stats.form == "tiled":
            raise ValueError(
                f"layer {inputs.layer} attends over tiles, and the corrections of this form are not "
                "attention weights; call record(model) without attention=True, or patch the model "
                "with rule=... to record the weights of trees"
            )
        record = self.layers.setdefault(inputs.layer, LayerRecord())
        record.stats.append(screened.stats)
        if not (self.keep_trees or self.keep_attention):
            return
        with torch.no_grad():
            if self.keep_trees:
                record.trees.append(screened.tree)
                record.leaf_ratios.append(screened.tree.leaf_ratio)
                if screened.stats.form != "tiled":  # `stats.error` has the error of tiles
                    record.errors.append(_tree_errors(inputs, screened.tree))
            if self.keep_attention:
                q, k = _widened(inputs)
                scores = q @ k.transpose(-2, -1) * inputs.scale  # (B, heads, Q, prefix + N)
                full = _attention_weights(inputs, scores)
                weights = _attention_weights(inputs, scores, screened.tree)
                record.attention.append(weights)
                record.full_attention.append(full)


@contextmanager
def record(model: nn.Module, *, trees: bool = True, attention: bool = False) -> Iterator[Recording]:
    """Record the screened layers of a model inside a `with` block.

    Errors of trees are computed for a chunk of queries at a time. Only `attention` forms matrices of all
    queries and keys.

    Args:
        model: A patched model.
        trees: If True, record trees, leaf ratios and errors; otherwise statistics alone.
        attention: If True, record the attention weights too. Attention over tiles has no weights: a
            layer that uses it raises a ValueError in the forward pass.

    Returns:
        A context manager that yields a `Recording`; every forward pass inside the block adds to it.

    Raises:
        ValueError: If the model is not patched.

    Example:
        >>> import bmfa, torch
        >>> loaded = bmfa.load_model("embedded")
        >>> model = bmfa.patch(loaded.model, rule="fixed-depth:2", layers="last-1")
        >>> with bmfa.record(model, attention=True) as recording:
        ...     logits = loaded.logits(torch.zeros(1, 3, 112, 112))
        >>> recording[7].trees[0].shape  # images, heads, queries
        (1, 3, 197)
        >>> recording[7].attention[0].shape
        torch.Size([1, 3, 197, 197])
    """
    layers = screened_layers(model)
    if not layers:
        raise ValueError(
            "the model is not patched; to record it unchanged, call "
            "patch(model, rule=rules.ExactGap(0.0)) first"
        )
    recording = Recording(keep_trees=trees, keep_attention=attention)
    with observe(model, recording):
        yield recording


def _widened(inputs: LayerInputs) -> tuple[Tensor, Tensor]:
    """Return q and k in float32 or wider."""
    dtype = torch.promote_types(inputs.q.dtype, torch.float32)
    return inputs.q.detach().to(dtype), inputs.k.detach().to(dtype)


def _tree_errors(inputs: LayerInputs, tree: Tree) -> Tensor:
    """(B, heads, Q) errors E of trees over the spatial keys, a chunk of queries at a time."""
    q, k = (x.flatten(0, 1) for x in _widened(inputs))  # (B heads, tokens, d)
    keys, trees = k[:, inputs.prefix :].transpose(1, 2), tree.flat()
    errors, queries = [], q.shape[1]
    for heads, part, pairs in query_chunks(len(q), queries, inputs.grid.size, CHUNK_ELEMENTS):
        scores = q[heads, part] @ keys[heads] * inputs.scale  # (g, b, N)
        errors.append(trees[pairs].error(scores.flatten(0, 1)))
    return torch.cat(errors).view(tree.shape)


def _attention_weights(inputs: LayerInputs, scores: Tensor, tree: Tree | None = None) -> Tensor:
    """Return (B, heads, Q, prefix + N) softmax weights, uniform within each leaf of the trees."""
    spatial = scores[..., inputs.prefix :]
    if tree is not None:
        spatial = tree.reconstruct(spatial)
    if inputs.valid is not None:
        spatial = spatial.masked_fill(~inputs.valid[:, None, None], -torch.inf)
    return torch.cat((scores[..., : inputs.prefix], spatial), -1).softmax(-1)


def _mean(tensors: list[Tensor]) -> float:
    if not tensors:
        raise ValueError("no trees were recorded; call the model inside `with record(model)`")
    total = sum(float(tensor.double().sum()) for tensor in tensors)
    return total / sum(tensor.numel() for tensor in tensors)
