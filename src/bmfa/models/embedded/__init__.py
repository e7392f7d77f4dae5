"""The embedded model: a small Vision Transformer for the drawn images, and how it was trained."""

from bmfa.models.embedded.model import (
    IMAGE_SIZE,
    MEAN,
    STD,
    WEIGHTS,
    EmbeddedViT,
    load,
    preprocess,
    save,
)

__all__ = ["IMAGE_SIZE", "MEAN", "STD", "WEIGHTS", "EmbeddedViT", "load", "preprocess", "save"]
