"""Registry of methods: the name, kind, parameter, inputs and figure mark of each, stated once.

A method is named `NAME` or `NAME:VALUE` on the command line and in records. Rules are parsed by
`bmfa.trees.rules`, reductions by `bmfa.merging`; this module describes them and imports neither, so
that `bmfa methods` starts without torch.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["summary", "rule", "reduction", "full", "bench", "historical"]
Line = Literal["solid", "dotted", "dashed", "long-dashed", "dash-dot", "dash-dot-dot"]

FULL = "full"
# Default methods of the experiments on score grids: the paper's six, then further rules.
DEFAULT_METHODS = (
    *(
        "block-mean",
        "mean-variance",
        "fixed-depth:1",
        "fixed-depth:2",
        "gamma:0.005",
        "edge-aware",
    ),
    *("gamma-h2:0.005", "exact-gap:0.005", "certified:0.005", "mass:0.002", "optimal:0.001"),
)
# Further rules with about as many leaves as gamma:0.005 on the probes, so that gaps are comparable.
COMPARABLE_METHODS = (
    *("gamma-h2:0.2", "exact-gap:1.2", "certified:1.3", "mass:0.0004", "optimal:0.005"),
)


@dataclass(frozen=True)
class Mark:
    """Marker and line of a method in figures.

    Args:
        colour: Name of a colour role of `bmfa.evidence.page.plots`, with a light and a dark value.
        marker: Marker in Matplotlib's notation.
        line: Line style.
        width: Line width in points.
        hollow: True if the marker is filled with the background.
        size: Marker size in points.
    """

    colour: str
    marker: str
    line: Line = "solid"
    width: float = 1.4
    hollow: bool = False
    size: float = 6.0


@dataclass(frozen=True)
class Method:
    """One method of the experiments.

    Args:
        name: Name on the command line and in records, without its value.
        kind: `"summary"` (a closed form on a score grid), `"rule"` (a tree), `"reduction"` (merges
            or prunes tokens), `"full"` (the unchanged model), `"bench"` (a setting or a peer of
            `bmfa bench attention`) or `"historical"` (in recorded runs alone).
        title: Short title for panels of figures.
        description: What the method does, as a phrase.
        reads: The inputs its decisions depend on.
        parameter: Meaning of the value after the colon; empty if the method takes none.
        mark: Its mark in figures; None for the neutral mark of methods without one.
        marks_by_value: Marks of particular values that differ from `mark`.

    Example:
        >>> METHODS["tome"].kind, METHODS["tome"].reads
        ('reduction', 'keys')
    """

    name: str
    kind: Kind
    title: str
    description: str
    reads: str
    parameter: str = ""
    mark: Mark | None = None
    marks_by_value: Mapping[str, Mark] = field(default_factory=dict, hash=False)

    @property
    def usage(self) -> str:
        """The name as it is passed on the command line, for example `gamma:VALUE`."""
        return f"{self.name}:VALUE" if self.parameter else self.name


EPSILON = "threshold ε, in units of the scores"
BUDGET = "tokens removed in every block (an integer) or share of tokens kept (0 to 1)"
# What a method of each kind is.
KINDS: Mapping[Kind, str] = {
    "full": "the model as it is",
    "summary": "one number for a block, in closed form",
    "rule": "a tree for each query and head",
    "reduction": "fewer tokens after a block",
    "bench": "settings and peers of bmfa bench",
    "historical": "in recorded runs alone; the package no longer computes it",
}
KEPT = "share of tokens kept (0 to 1)"
BLOCKS_KEPT = "share of the blocks computed exactly (0 to 1)"

# fmt: off
_ALL = (
    Method("block-mean", "summary", "Mean of the block",
           "one leaf: the mean of all tokens, the paper's Sparge-style mean", "mean",
           mark=Mark("mean", "o")),
    Method("mean-variance", "summary", "Mean and variance",
           "the mean plus half of the variance; may overestimate", "mean and variance",
           mark=Mark("variance", "v", "dash-dot")),
    Method("fixed-depth", "rule", "Fixed depth", "every block of one depth", "block means",
           "depth of the blocks", Mark("fixed", "s", "dashed", size=5.5),
           {"1": Mark("fixed", "s", "dotted", hollow=True, size=5.5)}),
    Method("gamma", "rule", "Algorithm 1", "Algorithm 1 of the paper: split while Γ exceeds ε",
           "block means", EPSILON, Mark("gamma", "D", width=2.2, size=5.5)),
    Method("gamma-h2", "rule", "Look-ahead",
           "Algorithm 1 with Γ from two levels below; gamma-hN reads N levels below", "block means",
           EPSILON, Mark("lookahead", "^", "long-dashed", size=6.5)),
    Method("exact-gap", "rule", "Exact gap", "split while the exact gap exceeds ε", "all scores",
           EPSILON, Mark("exact", "P", "dash-dot-dot", size=7.0)),
    Method("certified", "rule", "Certified",
           "split until a proven bound shows that the gap is at most ε",
           "block maxima and variances", EPSILON,
           Mark("certified", "h", "dashed", hollow=True, size=9.0)),
    Method("mass", "rule", "Mass rule", "Algorithm 1 with Γ weighted by the block's mass",
           "block means, Z of all scores", "threshold on the mass that a block loses",
           Mark("mass", "<", "dotted", size=6.5)),
    Method("mass-coarse", "rule", "Coarse mass rule",
           "the mass rule with the coarse Z of the tree so far", "block means",
           "threshold on the mass that a block loses"),
    Method("optimal", "rule", "Optimal tree",
           "the tree with the least error at a price for each leaf", "all scores",
           "price of a leaf", Mark("optimal", "*", width=2.2, size=10.0)),
    Method("optimal-leaves", "rule", "Optimal tree, leaves",
           "the optimal tree with a number of leaves", "all scores",
           "leaves of each tree: a count (an integer) or a fraction of the tokens"),
    Method("optimal-leaves-pooled", "rule", "Optimal trees, pooled leaves",
           "optimal trees under one price that share a number of leaves", "all scores of the batch",
           "mean leaves of a tree: a count (an integer) or a fraction of the tokens"),
    Method("optimal-error", "rule", "Optimal tree, error",
           "the smallest optimal tree whose error is within a budget", "all scores",
           "budget of E for each tree"),
    Method("optimal-error-pooled", "rule", "Optimal trees, pooled error",
           "optimal trees under one price whose mean error is within a budget",
           "all scores of the batch", "budget of the mean E"),
    Method("edge-aware", "summary", "All tokens", "the paper's oracle: every token kept",
           "annotations", mark=Mark("ink", "X", "dotted", size=6.5)),
    Method("quadrant-gap", "rule", "Quadrant gap",
           "our fit to the rule of the paper's model tables: a quadrant whose gap exceeds ε is kept "
           "token by token, any other is its mean", "all scores", EPSILON,
           Mark("exact", ">", "dash-dot")),
    Method("random-quadrants", "rule", "Random quadrants",
           "the same with quadrants kept at random, with probability p", "nothing",
           "probability p of keeping a quadrant", Mark("random", "d", "dotted", hollow=True)),
    Method("variance", "rule", "Variance", "the same by the variance of the quadrant",
           "means and squares", EPSILON, Mark("variance", "v", "dashed", hollow=True)),
    Method("fixed-blocks", "rule", "Fixed blocks", "square blocks of one size", "block means",
           "side of a block in tokens", Mark("fixed", "p", "dashed")),
    Method("global-mean", "rule", "One mean", "one leaf: the mean of all keys", "mean",
           mark=Mark("mean", "o")),
    Method(FULL, "full", "Full attention", "the unchanged model", "all tokens",
           mark=Mark("ink", "X", size=6.5)),
    Method("tome", "reduction", "ToMe", "merges the most similar pairs of keys in every block",
           "keys", BUDGET, Mark("gamma", "o", "dashed")),
    Method("pitome", "reduction", "PiToMe", "ToMe restricted to tokens in dense clusters", "keys",
           BUDGET, Mark("lookahead", "^", "dash-dot", hollow=True)),
    Method("tofu", "reduction", "ToFu", "prunes in early blocks and merges in late ones",
           "keys and features", BUDGET, Mark("variance", "s", "dotted", size=5.5)),
    Method("diffrate", "reduction", "DiffRate",
           "prunes and merges at a rate for each block; learned rates exist for DeiT-Tiny alone",
           "attention and features", f"{BUDGET}, or a budget of GFLOPs such as 0.8g",
           Mark("exact", "X", "dashed", size=6.5)),
    Method("crossget", "reduction", "CrossGET",
           "merges by a matching among all tokens; the vision part of CrossGET", "keys", BUDGET,
           Mark("fixed", "D", "dash-dot", hollow=True, size=5.5)),
    Method("dct", "reduction", "DCT", "keeps the low frequencies of the token sequence", "features",
           KEPT, Mark("mass", "p", "dotted", hollow=True)),
    Method("dct2", "reduction", "2-D DCT", "keeps the low frequencies of the token grid",
           "features", KEPT, Mark("mass", "s", "dotted", hollow=True, size=5.5)),
    Method("evit", "reduction", "EViT",
           "keeps the tokens that the class token attends to and fuses the others", "attention",
           KEPT, Mark("optimal", "P", "dash-dot-dot", hollow=True)),
    Method("random-pool", "reduction", "Random pooling", "merges tokens at random in every block",
           "nothing", BUDGET, Mark("random", "<", "dotted", hollow=True)),
    Method("fixed-pool", "reduction", "Fixed pooling", "merges square blocks of tokens", "nothing",
           "side of a block in tokens", Mark("mean", ">", "dashed", hollow=True)),
    Method("free-energy", "reduction", "Free energy",
           "ours: merges the pairs that cost the least free energy, mass times distortion, in every "
           "second block from a quarter of the depth on", "attention and features",
           "tokens removed per block on average over all blocks (an integer) or mean share of tokens "
           "kept per block (0 to 1)", Mark("certified", "*", width=2.2, size=10.0)),
    Method("dense", "bench", "Dense", "the fastest path of scaled_dot_product_attention",
           "all tokens", mark=Mark("ink", "X", size=6.5)),
    Method("tiles", "bench", "Tiles", "tiled attention with a share of the tiles expanded",
           "all keys, by mean queries", "share of the tiles expanded (0 to 1)",
           Mark("optimal", "s", "dashed", size=5.5)),
    Method("leaves", "bench", "Leaves", "tiled attention with a budget of leaves",
           "all keys, by mean queries", "leaves as a fraction of the tokens"),
    Method("error", "bench", "Error target", "tiled attention with an error target",
           "all keys, by mean queries", "error target", Mark("certified", "^", "dash-dot")),
    Method("at-error", "bench", "Tiles at one error", "tiled attention, interpolated at one error",
           "all keys, by mean queries", mark=Mark("optimal", "*", width=2.2, size=10.0)),
    Method("mean-tiles", "historical", "Mean tiles",
           "tiles by mean key and value with corrections, the scheme before tangent tiles",
           "tile means", "share of the tiles expanded (0 to 1)",
           Mark("fixed", "o", "dashed", hollow=True)),
    Method("topk", "historical", "Keep or drop",
           "reads the tiles with most mass for each 8x8 queries and drops the others",
           "all keys, by mean queries", "share of the tiles kept (0 to 1)",
           Mark("random", "v", "dash-dot", hollow=True)),
    Method("monarch", "historical", "Monarch attention",
           "a Monarch matrix of grid rows and columns by alternating maximisation", "all tokens",
           "updates of both factors", Mark("lookahead", "h", "dash-dot-dot")),
    Method("sparge", "bench", "SpargeAttention",
           "attention of the package spas_sage_attn over a share of the blocks", "block means",
           BLOCKS_KEPT, Mark("gamma", "v", "dotted")),
    Method("natten", "bench", "NATTEN", "neighbourhood attention of the package natten", "nothing",
           "share of the keys in a neighbourhood (0 to 1)",
           Mark("lookahead", "p", "dotted", hollow=True)),
    Method("pisa", "bench", "PISA",
           "piecewise sparse attention, other blocks by their mean and slope", "block means",
           BLOCKS_KEPT, Mark("exact", "D", "dotted", size=5.5)),
    Method("pisa-0th", "bench", "PISA, order 0",
           "piecewise sparse attention, other blocks by their mean", "block means", BLOCKS_KEPT,
           Mark("mass", "o", "dotted", hollow=True)),
)
# fmt: on
METHODS: Mapping[str, Method] = {method.name: method for method in _ALL}

_LOOKAHEAD = re.compile(r"gamma-h\d+")


def family(name: str) -> str:
    """Return a method name without its value.

    Example:
        >>> family("gamma:0.005")
        'gamma'
    """
    return name.partition(":")[0]


def find_method(name: str) -> Method | None:
    """Return the registered method of a name with or without its value.

    Args:
        name: A name of the command line or of a record, such as `"tome:8"`. `gamma-hN` for any N
            is the method `gamma-h2`.

    Returns:
        The method, or None if the name is not registered.

    Example:
        >>> find_method("gamma-h3:0.005").title
        'Look-ahead'
    """
    base = family(name)
    return METHODS["gamma-h2"] if _LOOKAHEAD.fullmatch(base) else METHODS.get(base)


def find_mark(name: str) -> Mark | None:
    """Return the mark of a method in figures, or None if it has none of its own.

    Example:
        >>> find_mark("fixed-depth:1").line, find_mark("fixed-depth:2").line
        ('dotted', 'dashed')
    """
    method = find_method(name)
    if method is None:
        return None
    return method.marks_by_value.get(name.partition(":")[2], method.mark)


def is_kind(name: str, *kinds: Kind) -> bool:
    """Return True if the name is registered as one of these kinds.

    Example:
        >>> is_kind("dct2:0.9", "reduction"), is_kind("dct2:0.9", "rule")
        (True, False)
    """
    method = find_method(name)
    return method is not None and method.kind in kinds


def names(kinds: Iterable[Kind]) -> list[str]:
    """Return the names of these kinds, in the order of the registry.

    Example:
        >>> names(["summary"])
        ['block-mean', 'mean-variance', 'edge-aware']
    """
    wanted = set(kinds)
    return [method.name for method in METHODS.values() if method.kind in wanted]
