"""What the screened layers of a model did: trees, leaf ratios, errors, attention."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from bmfa.attention.api import Screened, Stats
from bmfa.models.screens import Call, screens_in
from bmfa.trees.tree import Tree


@dataclass(eq=False)
class LayerRecord:
    """One layer, an entry for each call of the model; tensors are (B, heads, queries, ...)."""

    trees: list[Tree] = field(default_factory=list)
    leaf_ratios: list[Tensor] = field(default_factory=list)
    # E of the trees over the spatial keys; with tiles, without their corrections (Tree.error)
    errors: list[Tensor] = field(default_factory=list)
    # The weights over prefix + N keys that the layer used: those of its trees, or full attention
    # where `fallback` recomputed a query
    attention: list[Tensor] = field(default_factory=list)
    full_attention: list[Tensor] = field(default_factory=list)  # the same inputs without trees
    stats: list[Stats] = field(default_factory=list)


@dataclass(eq=False)
class Recording:
    """The records of all screened layers by their index."""

    layers: dict[int, LayerRecord] = field(default_factory=dict)
    keep_attention: bool = False
    fallbacks: dict[int, float | None] = field(default_factory=dict, repr=False)  # of each layer

    def __getitem__(self, layer: int) -> LayerRecord:
        try:
            return self.layers[layer]
        except KeyError:
            known = ", ".join(map(str, sorted(self.layers))) or "none: no picture was seen"
            raise KeyError(f"layer {layer} was not recorded; recorded are {known}") from None

    @property
    def leaf_ratio(self) -> float:
        """The mean over layers, calls, pictures, heads and queries."""
        return self._mean(
            [ratio for record in self.layers.values() for ratio in record.leaf_ratios]
        )

    @property
    def error(self) -> float:
        """The mean of E over the spatial keys, likewise."""
        return self._mean([error for record in self.layers.values() for error in record.errors])

    def heard(self, call: Call, screened: Screened) -> None:
        """Keep one call of a layer."""
        if self.keep_attention and screened.stats.form == "tiled":
            raise ValueError(
                f"layer {call.layer} attends over tiles: it adds corrections to mean tiles, so its "
                "output is no average of the values by attention weights; record(model) without "
                "attention=True, or patch(model, rule=...) and record the weights of trees"
            )
        record = self.layers.setdefault(call.layer, LayerRecord())
        with torch.no_grad():
            working = torch.promote_types(call.q.dtype, torch.float32)
            q, k = call.q.detach().to(working), call.k.detach().to(working)
            scores = q @ k.transpose(-2, -1) * call.scale  # (B, heads, Q, prefix + N)
            record.trees.append(screened.tree)
            record.leaf_ratios.append(screened.tree.leaf_ratio)
            record.errors.append(screened.tree.error(scores[..., call.prefix :]))
            record.stats.append(screened.stats)
            if self.keep_attention:
                full = _attention(call, scores)
                record.full_attention.append(full)
                record.attention.append(self._used(call, scores, screened, full))

    def _used(self, call: Call, scores: Tensor, screened: Screened, full: Tensor) -> Tensor:
        """The weights that the layer used."""
        weights = _attention(call, scores, screened.tree)
        bound, limit = screened.stats.certificate, self.fallbacks.get(call.layer)
        if bound is None or limit is None:
            return weights
        return torch.where((bound <= limit).unsqueeze(-1), weights, full)

    def _mean(self, tensors: list[Tensor]) -> float:
        if not tensors:
            raise ValueError("nothing was recorded; call the model inside `with record(model)`")
        total = sum(float(tensor.double().sum()) for tensor in tensors)
        return total / sum(tensor.numel() for tensor in tensors)


@contextmanager
def record(model: nn.Module, *, attention: bool = False) -> Iterator[Recording]:
    """Record what the screened layers do while the block runs.

    Args:
        model: A patched model with its tokens in raster order.
        attention: Whether to keep the attention weights too. Attention over tiles has none: where it
            runs, the forward pass raises a ValueError.

    Returns:
        A context manager that gives a `Recording`, filled by every forward pass inside the block.

    Raises:
        ValueError: If the model is not patched.
    """
    screens = [screen for _, screen in screens_in(model)]
    if not screens:
        raise ValueError(
            "the model is not patched; patch(model, rule=rules.ExactGap(0.0)) records it unchanged"
        )
    fallbacks = {screen.layer: screen.options.get("fallback") for screen in screens}
    recording = Recording(keep_attention=attention, fallbacks=fallbacks)
    before = [screen.listener for screen in screens]
    for screen in screens:
        screen.listener = recording
    try:
        yield recording
    finally:
        for screen, listener in zip(screens, before, strict=True):
            screen.listener = listener


def _attention(call: Call, scores: Tensor, tree: Tree | None = None) -> Tensor:
    """(B, heads, Q, prefix + N) softmax weights, spread evenly over each leaf where there are trees."""
    spatial = scores[..., call.prefix :]
    if tree is not None:
        spatial = tree.reconstruct(spatial)
    if call.valid is not None:
        spatial = spatial.masked_fill(~call.valid[:, None, None], -torch.inf)
    return torch.cat((scores[..., : call.prefix], spatial), -1).softmax(-1)
