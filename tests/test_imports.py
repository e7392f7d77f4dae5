"""The direction of imports: parts use the parts below them, and kernels do not use one another."""

import ast
from pathlib import Path

import bmfa

SOURCE = Path(bmfa.__file__).parent
# From the bottom to the top; a part may import those of its own line and of the lines above it.
LAYERS = (
    ("checks", "files", "packages", "quantiles"),
    ("energy", "bounds", "grid"),
    ("trees", "rules"),
    ("attention",),
    ("merging",),
    ("records", "timing", "environment"),
    ("data",),
    ("models",),
    ("evidence",),
    ("cli", "__main__"),
)
RANK = {part: rank for rank, parts in enumerate(LAYERS) for part in parts}
CORE = {part for parts in LAYERS[:4] for part in parts}  # imports torch and numpy only
KERNELS = {
    "attention": ("reference", "eager", "native", "triton"),
    "merging": ("eager", "triton"),
}


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path, *, lazily: bool = True) -> set[str]:
    """Full names of the modules that a file imports; without `lazily`, at the top level alone."""
    tree = ast.parse(path.read_text())
    nodes = ast.walk(tree) if lazily else iter(tree.body)
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports are not used"
            names.add(node.module or "")
            if (node.module or "").partition(".")[0] == "bmfa":
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


FILES = {module_name(path): path for path in sorted(SOURCE.rglob("*.py"))}


def internal(name: str) -> set[str]:
    """Modules of the package that a module imports."""
    return {other for other in imported(FILES[name]) if other in FILES and other != "bmfa"}


def part_of(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def test_every_part_has_a_layer():
    assert {part_of(name) for name in FILES} - {"__init__"} == set(RANK)


def test_calls_go_downwards():
    wrong = {
        (name, other)
        for name in FILES.keys() - {"bmfa"}
        for other in internal(name)
        if RANK[part_of(other)] > RANK[part_of(name)]
    }
    assert not wrong, "a part imports one above it"


def test_evidence_is_imported_by_the_command_line_alone():
    importers = {
        part_of(name) for name in FILES if any(part_of(x) == "evidence" for x in internal(name))
    }
    assert importers <= {"cli", "evidence"}


def test_kernels_do_not_import_one_another():
    for folder, kernels in KERNELS.items():
        of = {name: name.split(".")[3:4] for name in FILES if f".{folder}.kernels." in name}
        assert {kernel for parts in of.values() for kernel in parts} == set(kernels)
        for name, (kernel,) in of.items():
            others = [f"bmfa.{folder}.kernels.{other}." for other in kernels if other != kernel]
            wrong = {x for x in internal(name) if any(f"{x}.".startswith(o) for o in others)}
            assert not wrong, f"{name} imports {', '.join(sorted(wrong))}"


def test_the_core_imports_torch_and_numpy_alone():
    """At the top level; Triton kernels import triton, and are themselves loaded on first use."""
    standard = set(__import__("sys").stdlib_module_names) | {"torch", "numpy", "bmfa"}
    for name, path in FILES.items():
        if part_of(name) not in CORE or ".kernels.triton" in name:
            continue
        outside = {other.partition(".")[0] for other in imported(path, lazily=False)} - standard
        assert not outside, f"{name} imports {', '.join(sorted(outside))}"


def test_optional_packages_are_imported_in_one_way():
    """Through `bmfa.packages`, whose message names the extra; `import_module` is for own modules."""
    for name, path in FILES.items():
        if name == "bmfa.packages":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            called = node.func if isinstance(node, ast.Call) else None
            text = getattr(called, "id", getattr(called, "attr", ""))
            assert text not in ("find_spec", "__import__"), f"{name} calls {text}"
            if text == "import_module":
                argument = ast.unparse(node.args[0])
                assert name == "bmfa" or "bmfa." in argument, f"{name}: import_module({argument})"


def test_caches_are_bounded():
    """`lru_cache` has a size, and `cache` is for functions without parameters."""
    for name, path in FILES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            for mark in getattr(node, "decorator_list", []):
                text = ast.unparse(mark)
                if "lru_cache" in text:
                    assert "maxsize=" in text and "None" not in text, f"{name}.{node.name}"
                elif text in ("cache", "functools.cache"):
                    assert not ast.unparse(node.args), f"{name}.{node.name} caches without a bound"
