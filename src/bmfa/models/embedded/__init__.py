"""The embedded model: a small Vision Transformer for the drawn images."""

from bmfa.models.embedded.model import (
    IMAGE_SIZE,
    MEAN,
    STD,
    WEIGHTS,
    EmbeddedViT,
    load,
    preprocess,
)

__all__ = ["IMAGE_SIZE", "MEAN", "STD", "WEIGHTS", "EmbeddedViT", "load", "preprocess"]
