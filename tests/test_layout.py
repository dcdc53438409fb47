"""The shape of the repository: who may import whom, where packages come from, how long files are."""

import ast
import importlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("launch", "configs", "rl", "inference", "models", "sharding")
"""left may import right, never back"""
MAX_LINES = 400
"""the house rule is 300; this is where it stops being a matter of taste"""


def imported(source: str) -> Iterator[tuple[int, str]]:
    """Line and top-level name of everything a file imports, inside functions too, and by `import_module("x")`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module.split(".")[0]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value.split(".")[0]


def backward(package: str, source: str) -> list[str]:
    """Imports of a file in `package` that point to the left."""
    left = PACKAGES[: PACKAGES.index(package)]
    return [f"line {line}: imports {name}" for line, name in imported(source) if name in (*left, "tests")]


def files() -> list[Path]:
    """Files that git tracks or would track."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listing.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listing.stdout.splitlines() if (ROOT / name).is_file()]


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_to_the_right(package: str) -> None:
    faults = [
        f"{path.relative_to(ROOT)} {fault}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for fault in backward(package, path.read_text())
    ]
    assert not faults, f"{' -> '.join(PACKAGES)}: left may import right, never back: {faults}"


@pytest.mark.parametrize(
    "line",
    [
        "import rl",
        "from rl.losses import LOSSES",
        "def f():\n    from rl import losses",
        "import importlib\nimportlib.import_module('rl.losses')",
        "import numpy, configs.quickstart",
    ],
)
def test_a_backward_import_is_found(line: str) -> None:
    assert len(backward("models", line)) == 1
    assert not backward("launch", line)


@pytest.mark.parametrize("package", PACKAGES)
def test_package_is_the_checkout(package: str) -> None:
    """A published package of the same name must not be picked up in its place."""
    module = importlib.import_module(package)
    assert module.__file__ is not None
    assert Path(module.__file__).resolve() == ROOT / package / "__init__.py"
    assert module.__doc__, f"{package}/__init__.py says what the package is for"


def test_tests_are_not_a_package() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_files_stay_short() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if (lines := len(path.read_text().splitlines())) >= MAX_LINES
    }
    assert not long, f"split these: {long}"


def test_no_package_index_is_named() -> None:
    """Which index pip uses is the machine's business."""
    hosts = ["pypi" + ".org", "python" + "hosted", "index" + "-url", "find" + "-links"]
    for variable in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "UV_INDEX_URL", "UV_DEFAULT_INDEX"):
        named = [urlsplit(url).hostname for url in os.environ.get(variable, "").split()]
        hosts += [host for host in named if host and host not in ("localhost", "127.0.0.1", "::1")]
    faults = []
    for path in files():
        text = path.read_bytes().decode(errors="ignore")
        faults += [f"{path.relative_to(ROOT)} names {host}" for host in hosts if host in text]
    assert not faults
