"""What the screened layers of a model did: trees, leaf ratios, errors, attention."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from bmfa.attention import Screened, Stats
from bmfa.models.screens import Call, screens_in
from bmfa.tree import Tree


@dataclass(eq=False)
class LayerRecord:
    """One layer, an entry for each call of the model; tensors are (B, heads, queries, ...)."""

    trees: list[Tree] = field(default_factory=list)
    leaf_ratios: list[Tensor] = field(default_factory=list)
    errors: list[Tensor] = field(default_factory=list)  # E over the spatial keys
    attention: list[Tensor] = field(default_factory=list)  # over prefix + N keys, on the trees
    full_attention: list[Tensor] = field(default_factory=list)  # the same inputs without trees
    stats: list[Stats] = field(default_factory=list)


@dataclass(eq=False)
class Recording:
    """The records of all screened layers by their index."""

    layers: dict[int, LayerRecord] = field(default_factory=dict)
    keep_attention: bool = False

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
                record.attention.append(_attention(call, scores, screened.tree))
                record.full_attention.append(_attention(call, scores))

    def _mean(self, tensors: list[Tensor]) -> float:
        if not tensors:
            raise ValueError("nothing was recorded; call the model inside `with record(model)`")
        total = sum(float(tensor.double().sum()) for tensor in tensors)
        return total / sum(tensor.numel() for tensor in tensors)


@contextmanager
def record(model: nn.Module, *, attention: bool = False) -> Iterator[Recording]:
    """Record what the screened layers do while the block runs; with `attention` the weights too."""
    screens = [screen for _, screen in screens_in(model)]
    if not screens:
        raise ValueError(
            "the model is not patched; patch(model, rule=rules.ExactGap(0.0)) records it unchanged"
        )
    recording = Recording(keep_attention=attention)
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
