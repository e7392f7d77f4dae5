"""Policies by their command-line names, NAME:VALUE."""

from collections.abc import Callable

from bmfa.merging.policies.base import Policy
from bmfa.merging.policies.crossget import CrossGET
from bmfa.merging.policies.dct import DCT, GridDCT
from bmfa.merging.policies.diffrate import DiffRate
from bmfa.merging.policies.evit import EViT
from bmfa.merging.policies.fixed_pool import FixedPool
from bmfa.merging.policies.free_energy import FreeEnergy
from bmfa.merging.policies.pitome import PiToMe
from bmfa.merging.policies.random_pool import RandomPool
from bmfa.merging.policies.tofu import ToFu
from bmfa.merging.policies.tome import ToMe


def _budget(text: str) -> int | float:
    """A whole number is a count of tokens to remove from each block, any other a share to keep."""
    return int(text) if text.isdecimal() else float(text)


MAKERS: dict[str, Callable[[str], Policy]] = {
    "tome": lambda text: ToMe(_budget(text)),
    "pitome": lambda text: PiToMe(_budget(text)),
    "tofu": lambda text: ToFu(_budget(text)),
    "diffrate": lambda text: DiffRate(text if text.endswith("g") else _budget(text)),
    "crossget": lambda text: CrossGET(_budget(text)),
    "dct": lambda text: DCT(float(text)),
    "dct2": lambda text: GridDCT(float(text)),
    "evit": lambda text: EViT(float(text)),
    "fixed-pool": lambda text: FixedPool(int(text)),
    "free-energy": lambda text: FreeEnergy(_budget(text)),
}
EXAMPLES = "tome:8, pitome:0.95, diffrate:0.8g, evit:0.7, free-energy:8"


def parse(text: str, seed: int = 0) -> Policy:
    """The policy of a name such as `tome:8`, `pitome:0.95` or `diffrate:0.8g`."""
    name, _, value = text.partition(":")
    try:
        if name == "random-pool":
            return RandomPool(_budget(value), seed)
        if name in MAKERS:
            return MAKERS[name](value)
    except ValueError as error:
        raise ValueError(
            f"reduction {text!r}: {error}; reductions read NAME:VALUE, e.g. {EXAMPLES}"
        ) from None
    names = ", ".join((*MAKERS, "random-pool"))
    raise ValueError(f"reduction {text!r} is unknown; pass NAME:VALUE with a name of {names}")
