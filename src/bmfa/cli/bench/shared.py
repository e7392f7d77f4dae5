"""The options of the benchmarks of attention, and how records are shown: text, Markdown, figures."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from bmfa.cli.groups import POSITIONAL
from bmfa.cli.output import Output, table_of
from bmfa.packages import require_packages
from bmfa.records import Record


@dataclass(frozen=True)
class Benchmark:
    """What is timed, and records to show instead.

    Args:
        model (NAME): embedded or timm:NAME, with random weights unless --weights is given; bench
            attention also takes random: normal q, k, v without a model.
        weights (FILE): Weights of the model: safetensors or a state dict.
        data_dir (DIR): Folder of images; embedded ones by default.
        method (NAME:VALUE): tiles:SHARE of the tiles to expand, error:TARGET or leaves:SHARE of the
            tokens; may be repeated. A default list without it.
        dtype (NAME): bfloat16 (the default on a GPU), float16 or float32 (the default elsewhere).
        repeats (N): Timings; their median counts (5 on a GPU, 3 elsewhere).
        records (FILE): Show this record without running anything; repeat for several.
        files ([FILE]...): Further files for --records.
        markdown: Print the table as Markdown.
        figures (DIR): Write the figures to DIR as PNG.
    """

    model: str = "embedded"
    weights: str | None = None
    data_dir: str | None = None
    method: list[str] | None = None
    dtype: str | None = None
    repeats: int | None = None
    records: list[str] | None = None
    files: Annotated[list[str] | None, POSITIONAL] = None
    markdown: bool = False
    figures: str | None = None

    def __post_init__(self) -> None:
        require_packages(("PIL",), "images")  # before the work
        if self.figures is not None:
            require_packages(("matplotlib",), "report")

    def timings(self, device: str) -> int:
        """Return the number of timings, by default that of the device."""
        return (5 if device.startswith("cuda") else 3) if self.repeats is None else self.repeats

    def show_files(self, output: Output, columns: str) -> bool:
        """Show the records of `--records`; return False if there are none."""
        paths = [*(self.records or ()), *(self.files or ())]
        for path in paths:
            record = Record.from_json(Path(path).read_text("utf-8"), path)
            self.show(output, record, columns)
        return bool(paths)

    def show(self, output: Output, record: Record, columns: str, notes: Sequence[str] = ()) -> None:
        """Print the table of a benchmark as text or Markdown, and write its figures."""
        from bmfa.evidence.bench import chapter
        from bmfa.evidence.page import figures

        files: dict[str | Path, Callable[[], bytes]] = {}
        for name in () if self.figures is None else ("attention-time", "attention-error"):
            if figures.ALL[name].drawable(record):
                path = Path(self.figures or ".") / f"{name}.png"
                files[path] = partial(figures.ALL[name].png, record)
        if self.markdown:
            table = chapter.markdown(record)
            return output.finish(record, columns, table=table, figures=files, announce=False)
        rows = [row for row in record.rows if row.get("what") != "kernel"]
        table = table_of(rows, columns, output.wide)
        output.finish(record, columns, table=table, notes=notes, figures=files)
