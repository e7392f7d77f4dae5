"""Tables and numbers of sentences in README.md, benchmarks.md and merging.md are in the records."""

import json
import re
import sys
from collections.abc import Iterator

import tables
from bmfa.attention.dispatch import LEAST_TOKENS
from tables import record, row

README, PAGE, MERGING = (path.read_text("utf-8") for path in tables.TEXTS)


def test_tables_are_those_of_the_records():
    """After a change of a record, `make docs` writes them."""
    marked = []
    for text in (README, PAGE, MERGING):
        assert tables.with_tables(text) == text
        marked += [name for _, name in tables.MARKED.findall(text)]
    assert sorted(marked) == sorted(tables.TABLES)
    assert (README + PAGE + MERGING).count("\n|---") == len(marked), "a table without a marker"


def test_a_table_that_is_not_of_the_records_is_written_anew(tmp_path, monkeypatch, capsys):
    stale = tmp_path / "README.md"
    stale.write_text(README.replace("| DeiT-Tiny, 1,024 px | 1", "| DeiT-Tiny, 1,024 px | 9"))
    monkeypatch.setattr(tables, "TEXTS", (stale,))
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    for arguments, status, printed in ((["--check"], 1, "is not"), ([], 0, "is now"), ([], 0, "")):
        monkeypatch.setattr(sys, "argv", ["tables.py", *arguments])
        assert tables.main() == status and printed in capsys.readouterr().out
    assert stale.read_text("utf-8") == README


def h200(n: int, method: str) -> tables.Row:
    return row("attention-h200", what="attention", n=n, method=method)


def saliency(size: int, method: str) -> tables.Row:
    return row("model-saliency-h200", img_size=size, method=method)


def sentences() -> Iterator[str]:
    """Sentences with the numbers of the records."""
    gallery, settings = record("gallery")["rows"][0], record("attention-h200")["settings"]
    yield (
        f"A bright minority of {gallery['minority_area_percent']:.1f} % of the tokens holds "
        f"{gallery['gibbs_mass_percent']:.0f} % of the softmax mass"
    )
    even = settings["break_even_tokens"]
    yield f"from about {even:,} tokens on, on a CPU from {LEAST_TOKENS['native']:,}"
    yield f"a GPU runs dense attention below {LEAST_TOKENS['cuda']:,} tokens"
    yield f"the break-even point is {even:,} tokens"
    yield (
        f"to the power {settings['exponent_dense']:.2f}, that of tiles at "
        f"{settings['exponent_error_percent']:.1f} % error to the power "
        f"{settings['exponent_tiled']:.2f}"
    )
    limits = settings["limits"]
    yield f"bandwidth of a large copy, {limits['gigabytes_per_second']:,.0f} GB/s"
    yield f"speed of a large product, {limits['teraflops']:.0f} TFLOPS"
    yield f"the paper: {record('synthetic')['settings']['settings']} bright minorities"
    probed = row("probe-embedded", method="block-mean", group="all")
    yield f"The last two columns are {probed['instances']} instances"
    mean_only = h200(16384, "tiled-tiles:0")
    yield f"the error at 16,384 tokens is {mean_only['error_l2_percent']:.1f} %"
    yield f"has an error of {mean_only['worst_block_error_percent']:.1f} %, and the mean of the four"
    names = tables.GPU_ATTENTION.values()
    every = [one for name in names for one in tables.rows(name, what="attention")]
    tiled = [one for one in every if "tiled-" in one["method"]]
    memory = [one["extra_memory_percent"] for one in tiled]
    yield f"Scratch memory is {min(memory):.0f} to {max(memory):.0f} % of K and V"
    late = [one["milliseconds_eager"] - one["milliseconds"] for one in tiled]
    yield f"a call with tiles takes {min(late):.2f} to {max(late):.2f} ms longer"
    ratios = [
        one["largest_call_error_percent"] / (100 * float(one["method"].partition(":")[2]))
        for one in tiled
        if one["method"].startswith("tiled-error:")
    ]
    yield f"the error is {max(ratios):.1f} times its target"
    pisa = [h200(4096, f"pisa:{share}") for share in (0.05, 0.2)]
    listed = (f"{one['error_l2_percent']:.1f} % at {one['speedup']:.2f}x" for one in pisa)
    yield f"it has an error of {' and '.join(listed)}"
    yield f"speed to {h200(4096, 'auto')['speedup_eager']:.2f}x with 4,096 tokens"
    both = [h200(65536, f"{kind}-tiles:0.2")["speedup"] for kind in ("tiled", "mean")]
    yield f"tangent tiles run at {both[0]:.2f}x and mean tiles at {both[1]:.2f}x"
    moved, flash = (saliency(1792, method) for method in ("error:0.03", "full-flash"))
    yield f"moves the features by {moved['error_l2_percent']:.1f} % at 1,792 px"
    yield f"flash attention alone moves them by {flash['error_l2_percent']:.1f} %"
    speeds = [saliency(size, "error:0.05")["speedup"] for size in (1792, 3584)]
    yield f"runs at {speeds[0]:.2f}x at 1,792 px and at {speeds[1]:.2f}x at 3,584 px"
    random = row("attention-random-h200", what="attention", n=16384, method="auto")
    yield f"run at {random['speedup']:.2f}x: all heads"
    full, batch = row("evaluate-deit-h200", method="full"), record("evaluate-deit-h200")["settings"]
    yield f"DeiT-Tiny, {full['images']} ImageNet images, float16, one H200, batch {batch['batch_size']}"
    yield f"relative to {round(full['images_per_second'], -2):,.0f} of the full model"
    methods = ("gamma:0.05", "quadrant-gap:0.8", "optimal:0.002")
    trees = [row("evaluate-deit-h200", method=method)["speedup"] for method in methods]
    yield f"in the last four blocks runs at {min(trees):.2f}x to {max(trees):.2f}x of the full model"
    one = row("trees-cpu", what="trees", method="gamma:0.005", threads=1)
    cost = f"{one['microseconds_per_grid']:.1f} µs on one core, {one['speedup']:.0f} times less"
    yield f"A 16x16 tree takes {cost} than the grid-by-grid reference"
    costs = [one.get("multiple_of_softmax") for one in tables.rows("trees-cpu", dtype="float32")]
    costs = [cost for cost in costs if cost is not None]
    yield f"costs as much as {min(costs):.0f} to {max(costs):.0f} softmaxes"
    reduction = record("reduction-deit-cpu")["settings"]
    yield f"with its {reduction['interval'].split()[0]} % interval by the bootstrap"
    yield f"chosen on {reduction['choosing']} images of even index"
    whole = row("evaluate-rules-deit-h200", method="full")["gflops"]
    yield f"{whole:.1f} GFLOPs for DeiT-Tiny at 224 px, which is usually quoted as {whole / 2:.1f}"
    tome, ours = (
        row("reduction-deit-cpu", baseline="tome:12", schedule=kind, reported_on="both")
        for kind in ("baseline", "tuned")
    )
    yield f"gains {ours['gain_pp']:.1f} points of agreement over `tome:12`"
    yield f"({ours['agreement_percent']:.1f} % against {tome['agreement_percent']:.1f} %)"
    graphs = [
        row("evaluate-deit-h200", method=name, timed="graph")["speedup"]
        for name in ("tome:8", "free-energy:8", "tome:12", "free-energy:12")
    ]
    speeds = [f"{speed:.2f}x" for speed in graphs]
    yield f"`tome:8` runs at {speeds[0]}, `free-energy:8` at {speeds[1]}"
    yield f"`tome:12` at {speeds[2]} and `free-energy:12` at {speeds[3]}"


def test_numbers_of_sentences_are_those_of_the_records():
    texts = " ".join((README + PAGE + MERGING).split())
    assert [sentence for sentence in sentences() if sentence not in texts] == []


def test_records_keep_their_command_and_frame_and_no_folder_and_are_named():
    for path in sorted(tables.ROOT.glob("records/*.json")):
        text = path.read_text("utf-8")
        environment = json.loads(text)["environment"]
        assert environment["command"].startswith("bmfa ")
        assert {"torch", "device_name", "python"} <= environment.keys(), path
        # No path from a root, a home folder or a drive, at the start of a string or of a word.
        assert re.search(r'[\s"=\'(:,](?:/|~/|[A-Z]:\\)\w', text) is None, path
        assert f"`{path.stem}.json`" in PAGE or path.stem == "gallery"
