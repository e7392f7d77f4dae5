"""What each method is, and what it reads of the scores."""

from collections.abc import Sequence

from bmfa.evidence.page.markup import Column, table

# Name, what it is, what it reads.
KNOWN: Sequence[tuple[str, str, str]] = (
    ("sparge-mean", "one leaf: the mean of all tokens", "mean"),
    ("mean-variance", "the mean plus half of the variance; may overestimate", "mean and variance"),
    ("fixed-depth", "every block of one depth", "block means"),
    ("gamma", "Algorithm 1 of the paper: split while Γ exceeds ε", "block means"),
    ("gamma-h2", "Algorithm 1, Γ from two levels below", "block means"),
    ("exact-gap", "split while the exact gap exceeds ε", "all scores"),
    (
        "certified",
        "split until a proven bound says the gap is at most ε",
        "block maxima and variances",
    ),
    ("mass", "Algorithm 1 with Γ weighed by the block's mass", "block means, Z of all scores"),
    ("optimal", "the best tree there is at a price for each leaf", "all scores"),
    ("edge-aware", "the paper's oracle: every token kept", "annotations"),
    (
        "quadrant-gap",
        "our fit to the rule of the paper's model tables: each quarter kept token by token where its "
        "gap exceeds ε, else its mean",
        "all scores",
    ),
    ("random-quadrants", "the same by the throw of a coin of probability p", "nothing"),
    ("variance", "the same by the variance of the quarter", "means and squares"),
    ("fixed-blocks", "tiles of so many tokens a side", "block means"),
    ("global-mean", "one leaf: the mean of all keys", "mean"),
    ("tome", "merges so many pairs of alike keys in every layer", "keys"),
    ("pitome", "the same, tokens in crowds first", "keys"),
    ("tofu", "prunes early and merges late", "keys and features"),
    (
        "diffrate",
        "prunes and merges by a rate for each layer; learned ones for DeiT-Tiny alone",
        "attention and features",
    ),
    ("crossget", "merges by a matching among all tokens, the vision part alone", "keys"),
    ("dct", "keeps the low frequencies of the sequence", "features"),
    ("evit", "keeps what the class token attends to, fuses the rest", "attention"),
    ("random-pool", "merges so many tokens at random in every layer", "nothing"),
    ("fixed-pool", "merges tiles of so many tokens a side", "nothing"),
    (
        "free-energy",
        "ours: merges the pairs that cost the least free energy, mass times distortion",
        "attention and features",
    ),
)


def key(methods: Sequence[str]) -> str:
    """A table of the methods that appear, with what each is and reads."""
    families = list(dict.fromkeys(method.partition(":")[0] for method in methods))
    rows = [row for row in KNOWN if row[0] in families]
    if not rows:
        return ""
    columns = [Column("Name", code=True), Column("What it is"), Column("Reads")]
    return table(
        "The methods; the number after a name is its ε, depth, price, probability or budget",
        columns,
        rows,
    )
