"""Policies by their command-line names, NAME:VALUE."""

from collections.abc import Callable
from typing import Any

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
from bmfa.trees.rules.names import parse_number


def _budget(text: str) -> Any:
    """Parse an integer as a count to remove, integers with commas as a schedule of counts, and any
    other number as a fraction to keep.
    """
    return tuple(map(parse_number, text.split(","))) if "," in text else parse_number(text)


# Name of each policy, and the function that makes it from the text after the colon and a seed.
_PARSERS: dict[str, Callable[[str, int], Policy]] = {
    "tome": lambda text, seed: ToMe(_budget(text)),
    "pitome": lambda text, seed: PiToMe(_budget(text)),
    "tofu": lambda text, seed: ToFu(_budget(text)),
    "diffrate": lambda text, seed: DiffRate(text if text.endswith("g") else _budget(text)),
    "crossget": lambda text, seed: CrossGET(_budget(text)),
    "dct": lambda text, seed: DCT(parse_number(text)),
    "dct2": lambda text, seed: GridDCT(parse_number(text)),
    "evit": lambda text, seed: EViT(parse_number(text)),
    "fixed-pool": lambda text, seed: FixedPool(parse_number(text)),
    "free-energy": lambda text, seed: FreeEnergy(_budget(text)),
    "random-pool": lambda text, seed: RandomPool(_budget(text), seed),
}
POLICY_NAMES: tuple[str, ...] = tuple(_PARSERS)
_EXAMPLES = "tome:8, pitome:0.95, diffrate:0.8g, evit:0.7, free-energy:8"


def parse(text: str, seed: int = 0) -> Policy:
    """Make a policy from its command-line name.

    Args:
        text: NAME:VALUE. A value without a decimal point is a number of tokens to remove per block,
            several such numbers, with commas between them, the tokens to remove in each block; other
            numbers are the fraction to keep; `fixed-pool` takes the side of its tiles.
        seed: seed of `random-pool`; other policies ignore it.

    Returns:
        The policy; `str(policy)` gives the name back.

    Raises:
        ValueError: the name is unknown or the value is not accepted.

    Example:
        >>> import bmfa
        >>> bmfa.merging.parse("tome:8")
        ToMe(budget=8)
        >>> bmfa.merging.parse("pitome:0.95")
        PiToMe(budget=0.95)
    """
    name, _, value = text.partition(":")
    if name not in _PARSERS:
        names = ", ".join(POLICY_NAMES)
        raise ValueError(f"reduction {text!r} is unknown; pass NAME:VALUE with a name of {names}")
    if not value:
        raise ValueError(
            f"reduction {text!r} has no value; reductions read NAME:VALUE, e.g. {_EXAMPLES}"
        )
    try:
        return _PARSERS[name](value, seed)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"reduction {text!r}: {error}; reductions read NAME:VALUE, e.g. {_EXAMPLES}"
        ) from None
