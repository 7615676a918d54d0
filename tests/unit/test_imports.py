"""Planning works without torch, CUDA stays in one file, and nothing is pickled.

The rules are read off the source, and, because a module can import a heavy one through another, off a fresh interpreter.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "lohan"
LIGHT = ["config.py", "errors.py", "model/shape.py", "plan", "schedule", "simulate"]
"""what a laptop without torch can run"""
HEAVY = {"torch", "numpy", "transformers"}
PICKLES = {"pickle", "cloudpickle", "dill", "shelve", "joblib"}


def sources(paths: list[str]) -> list[Path]:
    """The Python files below those files and folders of the package, where they exist."""
    found = []
    for path in (PACKAGE / name for name in paths):
        found += sorted(path.rglob("*.py")) if path.is_dir() else [path] if path.exists() else []
    return found


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def names_used(tree: ast.AST) -> Iterator[str]:
    """Every imported module, and every attribute written out as module.name, with all names in front of it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def uses(tree: ast.AST, forbidden: set[str]) -> list[str]:
    """The names in a module that are, or are below, forbidden ones."""
    return [name for name in names_used(tree) if any(f"{name}.".startswith(f"{word}.") for word in forbidden)]


def uses_in(paths: list[Path], forbidden: set[str]) -> dict[str, list[str]]:
    found = {module_name(path): uses(ast.parse(path.read_text()), forbidden) for path in paths}
    return {name: words for name, words in found.items() if words}


@pytest.mark.parametrize(
    "source",
    ["import torch.nn", "from torch import cuda", "def f():\n    import torch.cuda as c", "import torch\ntorch.cuda.sync()"],
)
def test_the_rules_see_what_they_forbid(source: str) -> None:
    assert uses(ast.parse(source), {"torch"})
    assert not uses(ast.parse("from lohan.torch_free import torches"), {"torch"})


def test_light_modules_name_no_heavy_ones() -> None:
    files = sources(LIGHT)
    assert PACKAGE / "errors.py" in files and PACKAGE / "model" / "shape.py" in files
    assert uses_in(files, HEAVY) == {}


@pytest.mark.parametrize("module", [module_name(path) for path in sources(LIGHT)])
def test_a_light_module_imports_no_heavy_ones(module: str) -> None:
    """In a fresh interpreter, so that imports of imports count."""
    code = f"import sys, {module}; print(*sorted({HEAVY!r} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []


def test_cuda_is_named_in_one_file() -> None:
    files = [path for path in sources(["."]) if path != PACKAGE / "device" / "cuda.py"]
    assert uses_in(files, {"torch.cuda"}) == {}


def test_nothing_is_pickled() -> None:
    """torch.save and torch.load are pickles too."""
    assert uses_in(sources(["."]), PICKLES | {"torch.save", "torch.load"}) == {}
