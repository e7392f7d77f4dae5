"""Draw mutants of the library by a seed, run the mirrored tests on each, and count how many die.

    python tools/mutants.py --count 120 --seed 0 --jobs 8 --json mutants.json

A mutant changes one statement: a comparison, an operator, a constant, a condition, a returned value or a
default, or the statement is deleted. Statements are drawn uniformly. Left out are imports, annotations,
docstrings, messages, `__repr__` and Triton kernels. Each test run has a copy of the tree for itself, and
no GPU. Tests that fail without a mutant are named and deselected.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import queue
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MIRRORS = {  # sources in src/bmfa, and the tests of each
    "attention": "tests/attention",
    "trees": "tests/trees",
    "merging": "tests/merging",
    "models": "tests/models",
    "energy.py": "tests/test_energy.py",
    "bounds.py": "tests/test_bounds.py",
}
PAIRS: list[tuple[type[ast.AST], type[ast.AST]]] = [
    (ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot),
    (ast.In, ast.NotIn), (ast.And, ast.Or), (ast.Add, ast.Sub), (ast.Mult, ast.Div),
]  # fmt: skip
SWAPS = {a: b for pair in PAIRS for a, b in (pair, pair[::-1])} | {ast.FloorDiv: ast.Mult}
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "shared", "*.egg-info")
MEMORY = 16 << 30  # bytes of data a test run may hold: a mutant may grow without end
UNNAMED = (ast.Attribute, ast.Subscript)  # without a name it assigns, a function ends at once
DELETED = (ast.Expr, ast.AugAssign, ast.Raise, ast.Assert, ast.Break, ast.Continue)
PARTS = (ast.expr, ast.comprehension, ast.keyword, ast.withitem, ast.arguments)
LEFT_OUT = ("annotation", "returns", "decorator_list")
TEXTS = ("__repr__", "__str__")
Change = tuple[ast.stmt, Any, Any, Any]  # of what statement, the object, its key, the new value
Mutant = tuple[Path, str, str]  # the file, the change in words, the whole file changed
Trees = queue.Queue[Path]  # the copies of the tree that no test run uses


def parts(node: ast.AST) -> Iterator[ast.AST]:
    """A node and its expressions, without the statements inside it, annotations and messages."""
    yield node
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            message = isinstance(child, ast.JoinedStr)
            if isinstance(child, PARTS) and not message and name not in LEFT_OUT:
                yield from parts(child)


def changes(node: Any) -> Iterator[tuple[Any, Any, Any]]:
    """All changes of a node: what is changed, at which attribute or index, and to what."""
    value = getattr(node, "value", None)
    for i, operation in enumerate(getattr(node, "ops", [])):
        yield node.ops, i, SWAPS[type(operation)]()
    if type(getattr(node, "op", None)) in SWAPS:
        yield node, "op", SWAPS[type(node.op)]()
    if isinstance(node, ast.Constant) and isinstance(value, bool):
        yield node, "value", not value
    elif isinstance(node, ast.Constant) and isinstance(value, int | float):
        yield node, "value", value + 1 if isinstance(value, int) else 2 * value or 1.0
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        yield node, "test", ast.UnaryOp(ast.Not(), node.test)
    for i, condition in enumerate(getattr(node, "ifs", [])):
        yield node.ifs, i, ast.UnaryOp(ast.Not(), condition)
    if isinstance(node, ast.Return) and value and ast.unparse(value) != "None":
        yield node, "value", ast.Constant(None)


def of_statement(body: list[ast.stmt], i: int, statement: ast.stmt) -> Iterator[Change]:
    docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    named = any(not isinstance(target, UNNAMED) for target in getattr(statement, "targets", []))
    if isinstance(statement, (ast.Assign, *DELETED)) and not docstring and not named:
        yield statement, body, i, ast.Pass()
    if not isinstance(statement, ast.Raise | ast.Assert):
        for node in parts(statement):
            yield from ((statement, *change) for change in changes(node))


def statements(node: ast.AST) -> Iterator[list[Change]]:
    """For each statement below a node, all its changes."""
    for _, value in ast.iter_fields(node):
        for i, child in enumerate(value if isinstance(value, list) else []):
            if isinstance(child, ast.AST) and getattr(child, "name", None) not in TEXTS:
                if isinstance(child, ast.stmt):
                    yield list(of_statement(value, i, child))
                yield from statements(child)


def draw(files: list[Path], count: int, seed: int) -> list[Mutant]:
    """One mutant of each of `count` statements."""
    drawn = []
    generator = random.Random(seed)
    modules = {path: ast.parse(path.read_text()) for path in files}
    choices = [(path, each) for path in files for each in statements(modules[path]) if each]
    for path, each in generator.sample(choices, min(count, len(choices))):
        statement, holder, key, value = generator.choice(each)
        fields = holder if isinstance(holder, list) else vars(holder)
        shown = holder if isinstance(holder, ast.expr) else statement
        line, before = (ast.unparse(node).splitlines()[0] for node in (statement, shown))
        kept, fields[key] = fields[key], value
        after = "deleted" if isinstance(value, ast.Pass) else ast.unparse(shown).splitlines()[0]
        change = f"{before}  ->  {after}" + f"  in  {line[:80]}" * (shown is not statement)
        place = f"{path.relative_to(ROOT)}:{statement.lineno}"
        drawn.append((path, f"{place}  {change}", ast.unparse(modules[path])))
        fields[key] = kept
    return drawn


def tests_of(path: Path) -> str:
    """The tests that mirror a source file."""
    return MIRRORS[path.relative_to(ROOT / "src" / "bmfa").parts[0]]


def run(tree: Path, options: list[str], seconds: float = 3600) -> tuple[int, str, float]:
    """Exit status, output and time of pytest in a copy of the tree; killed after these seconds."""
    stop = ["timeout", "-s", "KILL", str(seconds), "prlimit", f"--data={MEMORY}"]
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "--tb=no",
        "-rfE",
        f"--basetemp={tree}.tmp",
        *options,
    ]
    environment = {"PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    start = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        status = subprocess.run(
            [*stop, sys.executable, "-m", "pytest", *options], cwd=tree, env=os.environ | environment,
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        ).returncode  # fmt: skip
        output.seek(0)
        return status, output.read(), time.monotonic() - start


def prepared(tests: str, trees: Trees) -> tuple[float, list[str]]:
    """Seconds that a mutant may take, and the options that deselect what fails without one."""
    tree = trees.get()
    status, output, seconds = run(tree, [tests])
    trees.put(tree)
    if status not in (0, 1):
        raise SystemExit(f"{tests} cannot run without a mutant:\n{output[-3000:]}")
    failed = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    names = [line.split(" ", 1)[1].split(" - ")[0] for line in failed]
    print(f"{tests}: {seconds:.0f} s, deselected because they fail: {names}", flush=True)
    return 60 + 4 * seconds, [f"--deselect={name}" for name in names]


def judged(mutant: Mutant, limit: float, options: list[str], trees: Trees) -> dict[str, object]:
    """What becomes of a mutant under the tests that mirror its file."""
    path, change, source = mutant
    tree = trees.get()
    file = tree / path.relative_to(ROOT)
    file.write_text(source)
    status, output, seconds = run(tree, [tests_of(path), "-x", *options], limit)
    shutil.copy(path, file)
    trees.put(tree)
    result = "survived" if status == 0 else "timeout" if seconds >= limit else "killed"
    print(f"{result:8}  {change}  ({seconds:.0f} s)", flush=True)
    end = output.splitlines()[-2:]
    return {"result": result, "change": change, "seconds": round(seconds), "end": end}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=120, help="mutants to draw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="test runs at a time")
    parser.add_argument("--source", type=Path, nargs="+", help="files, instead of all with mirrors")
    parser.add_argument("--json", type=Path, help="where to write the results")
    given = parser.parse_args()
    roots = given.source or [ROOT / "src" / "bmfa" / name for name in MIRRORS]
    files = [f for root in roots for f in ([root] if root.is_file() else root.rglob("*.py"))]
    files = sorted({file.resolve() for file in files if "triton" not in file.parts})
    drawn, trees = draw(files, given.count, given.seed), Trees()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.jobs) as pool:
        for job in range(given.jobs):
            trees.put(shutil.copytree(ROOT, Path(folder) / str(job), ignore=NOT_COPIED))
        tests = sorted({tests_of(path) for path, _, _ in drawn})
        limits = dict(zip(tests, pool.map(lambda each: prepared(each, trees), tests), strict=True))
        rows = list(pool.map(lambda each: judged(each, *limits[tests_of(each[0])], trees), drawn))
    died = sum(row["result"] != "survived" for row in rows)
    print(f"{died} of {len(rows)} died: {100 * died / max(len(rows), 1):.1f} %")
    if given.json:
        given.json.write_text(json.dumps({"seed": given.seed, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
