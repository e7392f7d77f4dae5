"""How far the output of a model moves when its attention changes."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bmfa.models.families import find_vision_transformer

Function = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Measure:
    """A change of the output of a model, and how the changes of several layers add.

    Args:
        name: `"features"`, `"logits"` or the name of a function.
        outputs: Computes from a model, images and keyword arguments what is compared.
        compare: Computes change^power from two outputs, averaged over the images of a batch.
        power: The power of the change that adds over layers: 2 for features, 1 for the KL of logits;
            None if it is not known how changes add.
    """

    name: str
    outputs: Callable[[nn.Module, Tensor, Mapping[str, Any]], Any]
    compare: Callable[[Any, Any], float]
    power: int | None

    def change(self, mean: float) -> float:
        """Return the change from the mean of `compare` over all images."""
        return math.pow(mean, 1.0 / (self.power or 1))


def find_measure(measure: str | Function) -> Measure:
    """Return the measure of a name, or of a function of two outputs.

    Raises:
        TypeError: If it is neither a string nor a function.
        ValueError: If the name is unknown.
    """
    if isinstance(measure, str) and measure in MEASURES:
        return MEASURES[measure]
    if not callable(measure):
        raise (ValueError if isinstance(measure, str) else TypeError)(
            f"measure is {measure!r}; pass 'features', 'logits' or a function of two outputs"
        )
    name = getattr(measure, "__name__", type(measure).__name__)

    def compare(reference: Any, output: Any) -> float:
        value = measure(reference, output)
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(
                f"the measure {name!r} returned {type(value).__name__}, which is not one number; return "
                "a float that is 0 for equal outputs"
            ) from None

    return Measure(name, _call, compare, None)


def features(model: nn.Module, images: Tensor, options: Mapping[str, Any]) -> list[Tensor]:
    """Compute the tokens after the last block, or else the floating-point outputs of the model.

    They are those of `forward_features` (timm and the embedded model) or `last_hidden_state`
    (transformers, also of the vision encoder inside a classifier).

    Args:
        model: The model.
        images: (B, 3, height, width).
        options: Keyword arguments of the call.

    Returns:
        Tensors that begin with B.
    """
    forward_features = getattr(model, "forward_features", None)
    if callable(forward_features):
        return output_tensors(forward_features(images))
    encoder = find_vision_transformer(model).encoder
    captured: list[Any] = []
    handle = encoder.register_forward_hook(lambda module, inputs, output: captured.append(output))
    try:
        output = _call(model, images, options)
    finally:
        handle.remove()
    for candidate in (output, *captured[-1:]):
        hidden = getattr(candidate, "last_hidden_state", None)
        if isinstance(hidden, Tensor):
            return [hidden]
    return output_tensors(output)


def output_tensors(output: Any) -> list[Tensor]:
    """List the floating-point tensors in an output."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, Mapping):
        output = list(output.values())
    if isinstance(output, Sequence) and not isinstance(output, str):
        return [tensor for part in output for tensor in output_tensors(part)]
    return []


def logits(model: nn.Module, images: Tensor, options: Mapping[str, Any]) -> Tensor:
    """Compute the class scores, (B, classes), (B, ..., classes) or (B, classes, height, width)."""
    output = _call(model, images, options)
    scores = getattr(output, "logits", output)
    if not isinstance(scores, Tensor):
        raise TypeError(
            f"{type(model).__name__} returns {type(output).__name__} without logits; pass a "
            "classifier, or to tune measure='features' or a function of two outputs"
        )
    return scores


def squared_distance(reference: list[Tensor], output: list[Tensor]) -> float:
    """Return the mean over images of |output - reference|^2 / |reference|^2."""
    if not reference:
        raise TypeError(
            "the output of the model has no floating-point tensor; pass a function of two outputs as "
            "measure"
        )
    exact = torch.cat([tensor.double().flatten(1) for tensor in reference], 1)
    changed = torch.cat([tensor.double().flatten(1) for tensor in output], 1)
    ratio = (changed - exact).square().sum(1) / exact.square().sum(1)
    return float(ratio.mean())


def kl_divergence(reference: Tensor, output: Tensor) -> float:
    """Return the mean KL divergence of the class probabilities from those of the reference, in nats."""
    dim = 1 if reference.dim() == 4 else -1  # (B, classes, height, width), as in cross_entropy
    p = reference.double().log_softmax(dim)
    q = output.double().log_softmax(dim)
    divergence = float((p.exp() * (p - q)).sum(dim).mean())
    # Rounding makes the divergence of nearly equal distributions slightly negative.
    return max(0.0, divergence) if math.isfinite(divergence) else math.nan


def disagreement(reference: Tensor, output: Tensor) -> float:
    """Return the share of images whose class is not that of the reference."""
    return float((output.argmax(-1) != reference.argmax(-1)).double().mean())


def _call(model: nn.Module, images: Tensor, options: Mapping[str, Any]) -> Any:
    return model(images, **options)


MEASURES = {
    "features": Measure("features", features, squared_distance, 2),
    "logits": Measure("logits", logits, kl_divergence, 1),
}
DISAGREEMENT = Measure("agreement", logits, disagreement, None)
