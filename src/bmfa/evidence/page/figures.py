"""The figures by name: each is called with records and gives SVG, or PNG on request."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bmfa.evidence.ablation import figures as ablations
from bmfa.evidence.bench import figures as attention_bench
from bmfa.evidence.classification import figures as evaluation
from bmfa.evidence.closed_loop import figures as model_curves
from bmfa.evidence.closed_loop import layer_figures as layer_curves
from bmfa.evidence.page.records import Evidence
from bmfa.evidence.page.sheet import Sheet, styled
from bmfa.evidence.pictures import attention_cases, attention_maps, galleries
from bmfa.evidence.probes import figures as scatter
from bmfa.evidence.synthetic import figures as curves
from bmfa.records import Record


@dataclass(frozen=True)
class Plot:
    """A figure made from records alone; `needs` names the experiments it reads."""

    name: str
    label: str
    needs: tuple[str, ...]
    draw: Callable[[Evidence, bool], Sheet]
    ready: Callable[[Evidence], bool] = lambda evidence: True

    def drawable(self, records: Record | Sequence[Record]) -> bool:
        """Whether the records hold what it shows."""
        evidence = Evidence(records)
        return all(map(evidence.has, self.needs)) and self.ready(evidence)

    def __call__(
        self, records: Record | Sequence[Record], *, narrow: bool = False, inline: bool = False
    ) -> str:
        """The figure as SVG, 880 pixels wide, or 360 for a narrow screen, and a margin.

        `inline` leaves margin, colours and font to the page in which the SVG will stand.
        """
        name = f"{self.name}-narrow" if narrow else self.name
        with styled():
            return self.draw(Evidence(records), narrow).to_svg(name, self.label, inline)

    def png(
        self, records: Record | Sequence[Record], *, narrow: bool = False, scale: float = 2.0
    ) -> bytes:
        """The figure as PNG in light colours, `scale` times as many pixels as the SVG has."""
        with styled():
            return self.draw(Evidence(records), narrow).to_png(scale)


gallery = Plot(
    "gallery",
    "A bright minority, and what the mean, Algorithm 1 and the optimal tree keep of it",
    ("gallery",),
    galleries.gallery,
)
failure_curve = Plot(
    "failure-curve",
    "Gap against the advantage of the minority for every method, the critical point marked",
    ("failure-curve",),
    curves.failure_curve,
)
placements = Plot(
    "placements",
    "Mean gap and leaf ratio of every method for every placement of the minority",
    ("synthetic",),
    curves.placements,
)
motivation = Plot(
    "motivation",
    "A block whose small bright part carries most of the softmax mass",
    ("cases",),
    galleries.motivation,
)
pipeline = Plot(
    "pipeline",
    "From a picture to its scores, its tree and the trade-off over all instances",
    ("cases", "probe"),
    galleries.pipeline,
)
trade_off = Plot(
    "trade-off",
    "Mean gap against leaf ratio for every method and data source, with the paper's points",
    ("synthetic", "probe"),
    scatter.trade_off,
)
distribution = Plot(
    "distribution",
    "Gap at every percentile of the instances for every method",
    ("probe",),
    curves.distribution,
)
ablation = Plot(
    "ablation",
    "Error, leaf ratio and run time over threshold, depth, grid and look-ahead",
    ("ablation",),
    ablations.ablation,
)
cases = Plot(
    "cases",
    "Instances with their scores, and the trees of Algorithm 1 and of the optimal rule",
    ("cases",),
    galleries.cases,
)
closed_loop = Plot(
    "closed-loop",
    "Agreement with the full model and output KL against leaf ratio, ours beside the paper's",
    ("closed-loop",),
    model_curves.closed_loop,
)
layers = Plot(
    "layers",
    "Agreement and output KL over the layers that are screened, several and one alone",
    ("closed-loop",),
    layer_curves.layers,
    layer_curves.ready,
)
top1 = Plot(
    "top1",
    "Top-1 accuracy against leaf ratio, ours beside the paper's",
    ("evaluate",),
    model_curves.top1,
    lambda evidence: bool(model_curves.screened(evidence)),
)
accuracy = Plot(
    "accuracy",
    "Top-1 accuracy against images per second for every method",
    ("evaluate",),
    evaluation.accuracy,
    lambda evidence: bool(evaluation.timed(evidence)),
)
reductions = Plot(
    "reductions",
    "Agreement and output KL of token reductions against operations",
    ("evaluate",),
    model_curves.reductions,
    lambda evidence: bool(model_curves.reduced(evidence)),
)
pictures = Plot(
    "attention-cases",
    "Pictures with the class token's attention, full and screened, and the trees of several rules",
    ("picture",),
    attention_cases.attention_cases,
)
attention_time = Plot(
    "attention-time",
    "Time of attention against the number of tokens, with the fitted exponents",
    ("bench",),
    attention_bench.time_figure,
    attention_bench.ready,
)
attention_error = Plot(
    "attention-error",
    "Error of attention against its speed, for every number of tokens",
    ("bench",),
    attention_bench.error_figure,
    attention_bench.error_ready,
)
# Drawn for one picture at a time, so not on the page.
screen = Plot(
    "screen",
    "A picture with its tree, a query's attention full and screened, and the difference",
    ("picture",),
    attention_maps.screen,
)

ALL: dict[str, Plot] = {
    plot.name: plot
    for plot in (
        *(gallery, failure_curve, placements, motivation, pipeline, trade_off),
        *(distribution, ablation, cases, closed_loop, layers, top1, accuracy, reductions, pictures),
        *(attention_time, attention_error),
    )
}
