"""What each layer of a patched or reduced model did in the last forward pass, as a table."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from bmfa.attention.result import ErrorEstimate
from bmfa.models.families import check_module
from bmfa.models.passes import ForwardPass, LayerCall
from bmfa.models.screened_layer import ScreenedLayer, screened_layers
from bmfa.models.tables import Parts, Table, by_reason
from bmfa.models.token_reduction import TokenReduction, find_reduction

_UNKNOWN = "unknown"
_NOT_CALLED = "the model has not finished a forward pass in this thread"
_COMPILED = "the pass ran in a compiled graph, which reports nothing; call the model without it"
_NOT_PATCHED = "the layer is not patched"
_LAYER_COLUMNS = ("layer", "form", "backend", "density", "error", "settings", "reason")
_BLOCK_COLUMNS = ("block", "tokens", "removed")


@dataclass(frozen=True, eq=False, repr=False)
class LayerSummary:
    """What one layer of a patched model did; `summary` makes these.

    Attributes:
        layer: Index of the layer.
        settings: Settings of the layer; None if it is not patched.
        form: `"tiled"`, `"tree"`, `"dense"`, or `"unknown"` if the layer has
            not run in this thread or ran in a compiled graph.
        backend: `"native"`, `"eager"`, `"triton"`, `"dense"` (SDPA in bmfa), `"host"`
            (the attention of the model itself) or `"unknown"`.
        calls: The calls of the layer, one for each grid of the images.
        note: What is said of a layer without calls.

    Example:
        >>> import bmfa, torch
        >>> model = bmfa.patch(bmfa.load_model("embedded").model, error=0.05, layers=[7])
        >>> _ = model(torch.zeros(1, 3, 112, 112))
        >>> row = bmfa.summary(model).rows[7]
        >>> row.form, row.backend, row.settings
        ('dense', 'host', 'error=0.05')
        >>> row.reason
        'auto: dense attention is as fast below 2304 tokens, and there are 196'
    """

    layer: int
    settings: str | None
    form: str
    backend: str
    calls: tuple[LayerCall, ...] = ()
    note: str = ""

    @cached_property
    def reason(self) -> str:
        """Why this ran, for tiles how many were expanded. Waits for the device when first read."""
        return self.note or " / ".join(dict.fromkeys(call.explain() for call in self.calls))

    @cached_property
    def density(self) -> float | None:
        """Mean share of the tiles that a group of queries expands. Waits for the device when first read.

        1.0 for dense attention; None for a tree for each query, and if it is not known. If images of
        several grids share a pass, the mean over their calls.
        """
        if not self.calls:
            return 1.0 if self.form == "dense" else None
        known = [density for call in self.calls if (density := call.density) is not None]
        return sum(known) / len(known) if known else None

    @cached_property
    def error(self) -> ErrorEstimate | None:
        """Measured relative L2 error of the output, as `stats.error`. Waits for the device when first
        read.

        None for a tree for each query, for the attention of the host, which is exact, and if it is not
        known. If images of several grids share a pass, that of the call with the largest error.
        """
        known = [error for call in self.calls if (error := call.error) is not None]
        return max(known, key=lambda error: error.estimate) if known else None

    def as_dict(self) -> dict[str, Any]:
        """Return the row as a flat dictionary of numbers and text. Waits for the device.

        Example:
            >>> import bmfa
            >>> model = bmfa.patch(bmfa.load_model("embedded").model, layers=[7])
            >>> bmfa.summary(model).rows[7].as_dict()["form"]
            'unknown'
        """
        names = ("layer", "settings", "form", "backend", "density")
        found = {"error": "estimate", "error_p95": "p95", "error_met": "met"}
        errors = {name: getattr(self.error, one, None) for name, one in found.items()}
        row = {name: getattr(self, name) for name in names}
        return row | errors | {"reason": self.reason}

    def cells(self) -> tuple[str, ...]:
        """Return the row as text."""
        density, error = self.density, self.error
        missed = " (missed)" if error is not None and error.met is False else ""
        return (
            str(self.layer),
            self.form,
            self.backend,
            "-" if density is None else f"{100 * density:.1f} %",
            "-" if error is None else f"{100 * error.estimate:.2f} %{missed}",
            self.settings or "-",
            self.reason,
        )

    def __repr__(self) -> str:
        return (
            f"LayerSummary(layer={self.layer}, {self.form}, {self.backend}, reason={self.reason!r})"
        )


@dataclass(frozen=True)
class BlockSummary:
    """What one block of a reduced model kept; `summary` makes these.

    Args:
        layer: Index of the block.
        settings: The policy.
        tokens: Tokens of an image after the block, prefix tokens included; None if not known.
        removed: Tokens that the block removed; None if not known.

    Example:
        >>> import bmfa, torch
        >>> model = bmfa.reduce(bmfa.load_model("embedded").model, "tome:8")
        >>> _ = model(torch.zeros(1, 3, 112, 112))
        >>> bmfa.summary(model).rows[0]
        BlockSummary(layer=0, settings='tome:8', tokens=189, removed=8)
    """

    layer: int
    settings: str
    tokens: int | None
    removed: int | None

    def as_dict(self) -> dict[str, Any]:
        """Return the row as a flat dictionary.

        Example:
            >>> BlockSummary(0, "tome:8", 189, 8).as_dict()["removed"]
            8
        """
        return dict(vars(self))

    def cells(self) -> tuple[str, ...]:
        """Return the row as text."""
        counts = (self.tokens, self.removed)
        return (str(self.layer), *("-" if count is None else str(count) for count in counts))


@dataclass(frozen=True, eq=False, repr=False)
class Summary(Table):
    """What the layers of a model did in the last finished forward pass of this thread.

    `summary` makes these. `str` and `repr` are a text table; they read the measured values, and so wait
    for the device. Iterating gives the rows.

    Attributes:
        rows: One `LayerSummary` for each layer of a patched model, or one `BlockSummary` for each block
            of a reduced one.
        title: The model, its input and how it is changed.
        notes: Sentences about what the table cannot show.

    Example:
        >>> import bmfa, torch
        >>> model = bmfa.reduce(bmfa.load_model("embedded").model, "free-energy:8")
        >>> _ = model(torch.zeros(1, 3, 112, 112))
        >>> bmfa.summary(model)
        EmbeddedViT, reduced by free-energy:8
        block  tokens  removed
            0     197        0
            1     197        0
            2     175       22
            3     175        0
            4     154       21
            5     154        0
            6     133       21
            7     133        0
    """

    title: str
    rows: tuple[LayerSummary, ...] | tuple[BlockSummary, ...]
    notes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[LayerSummary | BlockSummary]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, layer: int) -> LayerSummary | BlockSummary:
        return self.rows[layer]

    def parts(self) -> Parts:
        """Return the title, the table and the notes."""
        patched = isinstance(self.rows[0], LayerSummary)
        head, numbers = (_LAYER_COLUMNS, 1) if patched else (_BLOCK_COLUMNS, len(_BLOCK_COLUMNS))
        return self.title, [head, *(row.cells() for row in self.rows)], numbers, self.notes


def summary(model: nn.Module) -> Summary:
    """Say for each layer what ran in the last finished forward pass of this thread, and why.

    For a patched model: the form and the backend of attention, the reason, the share of the tiles that
    were expanded and the measured error. For a reduced model: the tokens that each block kept. Looking
    costs the forward pass nothing: it waits for no device and keeps neither q, k, v nor trees, and a
    model that runs its own forward makes no call in its layers. The measured values are read from the
    device when the table is printed.

    Passes inside a graph of `torch.compile` report nothing, and the table says so. Copies and pickles of
    a model start without a pass.

    Args:
        model: A patched or reduced model.

    Returns:
        A `Summary`, whose `str` is a table.

    Raises:
        TypeError: If `model` is not a module.
        ValueError: If the model is neither patched nor reduced.

    Example:
        >>> import bmfa, torch
        >>> model = bmfa.load_model("embedded").model
        >>> _ = bmfa.patch(model, rule="fixed-depth:2", layers=[6, 7])(torch.zeros(1, 3, 112, 112))
        >>> [(row.layer, row.form, row.backend) for row in bmfa.summary(model)][5:]
        [(5, 'dense', 'host'), (6, 'tree', 'eager'), (7, 'tree', 'eager')]
    """
    layers = screened_layers(check_module(model))
    if layers:
        return _patched_summary(model, layers)
    reduction = find_reduction(model)
    if reduction is not None:
        return _reduced_summary(model, reduction)
    raise ValueError(
        "the model is neither patched nor reduced; call bmfa.patch(model) or "
        "bmfa.reduce(model, 'free-energy:8') first"
    )


def _patched_summary(model: nn.Module, layers: list[ScreenedLayer]) -> Summary:
    passes, by_index = layers[0].passes, {layer.layer: layer for layer in layers}
    finished, depth = passes.thread.finished, max(passes.depth, 1 + max(by_index))
    rows = tuple(_layer_row(index, by_index.get(index), finished) for index in range(depth))
    title = f"{type(model).__name__}, {len(layers)} of {depth} layers patched"
    if finished is not None and not finished.compiled:
        shape, dtype, device = finished.output
        title += f"; tokens {shape} {str(dtype).removeprefix('torch.')} on {device}"
    unchanged = "Not in this table, because they run as before: blocks"
    notes = tuple(f"{line}." for line in by_reason(unchanged, passes.other_blocks))
    if passes.compiled and (finished is None or not finished.compiled):
        note = "The model was compiled; passes inside a compiled graph are not in this table."
        notes = (*notes, note)
    return Summary(title, rows, notes)


def _layer_row(
    index: int, layer: ScreenedLayer | None, finished: ForwardPass | None
) -> LayerSummary:
    settings = None if layer is None else layer.describe()
    if finished is None or finished.compiled:
        reason = _NOT_CALLED if finished is None else _COMPILED
        return LayerSummary(index, settings, _UNKNOWN, _UNKNOWN, note=reason)
    if layer is None:
        return LayerSummary(index, None, "dense", "host", note=_NOT_PATCHED)
    calls = finished.calls.get(index)
    if not calls:
        return LayerSummary(index, settings, _UNKNOWN, _UNKNOWN, note="the layer did not run")
    texts = ((call.form, call.backend) for call in calls)
    form, backend = (" / ".join(dict.fromkeys(parts)) for parts in zip(*texts, strict=True))
    return LayerSummary(index, settings, form, backend, tuple(calls))


def _reduced_summary(model: nn.Module, reduction: TokenReduction) -> Summary:
    state, policy = reduction.passes.thread.last_state, str(reduction.policy)
    title = f"{type(model).__name__}, reduced by {policy}"
    if state is None:
        rows = tuple(BlockSummary(i, policy, None, None) for i in range(reduction.depth))
        return Summary(title, rows, (f"{_NOT_CALLED.capitalize()}.",))
    before = (reduction.passes.prefix + state.grid.size, *state.kept)
    rows = tuple(
        BlockSummary(i, policy, kept, before[i] - kept) for i, kept in enumerate(state.kept)
    )
    return Summary(title, rows)
