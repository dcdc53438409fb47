"""Eight virtual CPU devices, strict shapes, deterministic property tests, and a counter of compiles."""

import atexit
import gc
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

# Before jax is imported, and for the processes that tests start. A setting that is there already wins.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    # of this run alone: jax writes entries in place, so two runs at once could read each other's half-written ones
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="twinax-jax-cache-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
elif worker := os.environ.get("PYTEST_XDIST_WORKER"):
    os.environ["JAX_COMPILATION_CACHE_DIR"] += f"/{worker}"
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import hypothesis
import jax
import pytest

from models.compiles import CompileCounter

jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile("twinax", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("twinax")


@pytest.fixture(scope="module", autouse=True)
def _let_go(request: pytest.FixtureRequest) -> Iterator[None]:
    """Programs that a file's caches hold go when it is done: each takes dozens of memory maps, and a process may have 65,530
    (Linux's vm.max_map_count); beyond them XLA dies while it compiles."""
    yield
    for value in vars(request.module).values():
        if hasattr(value, "cache_clear"):
            value.cache_clear()
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="module", autouse=True)
def _optimized(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compiling takes most of the tests' time, half as long without LLVM's optimisations. Files marked `plain_code` do without:
    test_parity and test_engine compare the bits of optimised code. Processes that they start have it from the environment."""
    name, plain = "jax_disable_most_optimizations", request.node.get_closest_marker("plain_code") is not None
    with pytest.MonkeyPatch.context() as patch:
        if plain:
            patch.setenv(name.upper(), "1")
            jax.config.update(name, True)
        yield
    if plain:
        jax.config.update(name, False)


@contextmanager
def _no_compiles() -> Iterator[CompileCounter]:
    with CompileCounter() as compiles:
        yield compiles
    assert compiles.count == 0, f"{compiles.count} compiles where none may be: {compiles.names}"


@pytest.fixture
def assert_no_compiles() -> Callable[[], AbstractContextManager[CompileCounter]]:
    """`with assert_no_compiles(): ...` fails if the block made XLA compile, or fetch a program from its cache."""
    return _no_compiles


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Lines that a passing run shows too, at its end: measured gaps, cells of a matrix."""
    return lambda line: request.node.user_properties.append(("measured", line))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    passed = terminalreporter.stats.get("passed", ())
    lines = [line for test in passed for name, line in test.user_properties if name == "measured"]
    if lines:
        terminalreporter.section("measured")
        for line in lines:
            terminalreporter.write_line(line)
