"""The embedded model: a small Vision Transformer for the drawn pictures, and how it was trained."""

from bmfa.models.embedded.model import (
    CLASS_COUNT,
    GRID_SIZE,
    IMAGE_SIZE,
    MEAN,
    PATCH_SIZE,
    STD,
    WEIGHTS,
    EmbeddedViT,
    load,
    preprocess,
    save,
)

__all__ = [
    "CLASS_COUNT",
    "GRID_SIZE",
    "IMAGE_SIZE",
    "MEAN",
    "PATCH_SIZE",
    "STD",
    "WEIGHTS",
    "EmbeddedViT",
    "load",
    "preprocess",
    "save",
]
