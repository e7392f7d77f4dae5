"""The public rules, which decide the blocks of a tree that are split; defined in `trees/rules`."""

from bmfa.trees.rules import *  # noqa: F403
from bmfa.trees.rules import __all__ as __all__
