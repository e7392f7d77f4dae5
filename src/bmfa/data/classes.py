"""The classes of ImageNet-1K, in the order of a model's outputs."""

from functools import cache
from typing import Any

from bmfa.packages import load_package


@cache
def imagenet_wnids() -> tuple[str, ...]:
    """The 1000 WordNet ids, such as n01440764."""
    return tuple(_info().label_names())


@cache
def imagenet_names() -> tuple[str, ...]:
    """The 1000 names, such as tench."""
    info = _info()
    return tuple(info.index_to_description(index) for index in range(1000))


def _info() -> Any:
    return load_package("timm.data").ImageNetInfo()
