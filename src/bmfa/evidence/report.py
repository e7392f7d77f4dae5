"""The evidence chain: every experiment the page is made of, on embedded data and a person's own."""

from collections.abc import Iterator, Sequence

from bmfa.data import EmbeddedScenes, InstanceFiles, InstanceSource
from bmfa.data.probes import MODES
from bmfa.evidence import report_models as model_chain
from bmfa.evidence.ablation import run as ablation
from bmfa.evidence.bench import trees as bench
from bmfa.evidence.methods import COMPARABLE_METHODS, DEFAULT_METHODS
from bmfa.evidence.pictures import cases
from bmfa.evidence.probes import run as probes
from bmfa.evidence.synthetic import run as synthetic
from bmfa.records import Record

PROBE_METHODS = (*DEFAULT_METHODS, *COMPARABLE_METHODS)
# One penalty for all settings, at the leaves that Algorithm 1 needs on the corner placement.
SYNTHETIC_METHODS = (*DEFAULT_METHODS, "optimal-leaves-pooled:0.05794")


def run(
    *,
    seed: int = 0,
    workers: int = 1,
    coco: Sequence[str] | None = None,
    lvis: Sequence[str] | None = None,
    own: model_chain.OwnModel | None = None,
    device: str = "cpu",
) -> Iterator[tuple[str, Record]]:
    """Run the experiments one by one; `coco` and `lvis` are (annotations, images).

    `own` adds a person's model on their pictures; `device` is where models run.
    """
    # Files that are missing are told of now, not after minutes.
    loaded = own.load() if own is not None else None
    files = {
        name: InstanceFiles(*paths) for name, paths in (("coco", coco), ("lvis", lvis)) if paths
    }
    yield "synthetic", synthetic.run(SYNTHETIC_METHODS, seed=seed)
    yield "failure-curve", synthetic.failure_curve(seed=seed)
    yield "gallery", synthetic.gallery(seed=seed)
    embedded = EmbeddedScenes(seed=seed)
    sources: dict[str, InstanceSource] = {"embedded": embedded, **files}
    for dataset, source in sources.items():
        for mode in MODES:
            record = probes.run(
                source,
                dataset=dataset,
                mode=mode,
                methods=PROBE_METHODS,
                workers=workers,
                seed=seed,
            )
            yield f"probe-{dataset}-{mode}", record
    yield "ablation", ablation.run(embedded, dataset="embedded", workers=workers)
    yield "cases", cases.run(embedded, dataset="embedded", seed=seed)
    yield from model_chain.run(loaded, seed=seed, device=device)
    yield "bench", bench.run(repeats=3, seed=seed)
