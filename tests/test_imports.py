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
KERNELS = {"attention": "reference eager native triton", "merging": "eager triton"}


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path, *, lazily: bool = True) -> set[str]:
    """Full names of the modules that a file imports; without `lazily`, at the top level alone."""
    tree = ast.parse(path.read_text())
    names: set[str] = set()
    for node in ast.walk(tree) if lazily else tree.body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path}: relative imports are not used"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


FILES = {module_name(path): path for path in sorted(SOURCE.rglob("*.py"))}


def internal(name: str) -> set[str]:
    """Modules of the package that a module imports."""
    return {other for other in imported(FILES[name]) if other in FILES and other != "bmfa"}


def part_of(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def test_calls_go_downwards():
    assert {part_of(name) for name in FILES} - {"__init__"} == set(RANK)
    for name in FILES.keys() - {"bmfa"}:
        parts = {part_of(other) for other in internal(name)}
        above = {part for part in parts if RANK[part] > RANK[part_of(name)]}
        assert not above, f"{name} imports {above}"
        assert "evidence" not in parts or part_of(name) in ("cli", "evidence"), name


def test_kernels_do_not_import_one_another():
    for folder, kernels in ((folder, names.split()) for folder, names in KERNELS.items()):
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


def test_optional_packages_are_imported_in_one_way_and_caches_are_bounded():
    """Through `bmfa.packages`, whose message names the extra; `import_module` is for own modules.

    `lru_cache` has a size, and `cache` is for functions without parameters.
    """
    for name, path in FILES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            called = node.func if isinstance(node, ast.Call) else None
            text = getattr(called, "id", getattr(called, "attr", ""))
            if name not in ("bmfa", "bmfa.packages"):
                assert text not in ("find_spec", "__import__"), f"{name} calls {text}"
                assert text != "import_module" or "bmfa." in ast.unparse(node.args[0]), name
            for mark in map(ast.unparse, getattr(node, "decorator_list", [])):
                if "lru_cache" in mark:
                    assert "maxsize=" in mark and "None" not in mark, f"{name}.{node.name}"
                assert "cache" != mark.rpartition(".")[2] or not ast.unparse(node.args), name
