"""The compile counter sees what it must: first calls, and calls served by the persistent cache."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import jax
import numpy as np
import pytest

from models.compiles import CompileCounter

NoCompiles = Callable[[], AbstractContextManager[CompileCounter]]


def test_first_call_counts_and_second_does_not(assert_no_compiles: NoCompiles) -> None:
    x = np.arange(3.0)

    @jax.jit
    def double(x: jax.Array) -> jax.Array:
        return x * 2

    with CompileCounter() as compiles:
        double(x)
    assert compiles.count == 1
    assert compiles.seconds > 0
    assert "double" in compiles.names[0]
    with assert_no_compiles():
        double(x)


def test_fixture_fails_on_a_new_shape(assert_no_compiles: NoCompiles) -> None:
    double = jax.jit(lambda x: x * 2)
    double(np.arange(3.0))
    with pytest.raises(AssertionError, match="1 compiles where none may be"), assert_no_compiles():
        double(np.arange(4.0))


def test_persistent_cache_hit_counts() -> None:
    """Two functions of one program: the second comes from the cache on disk, and would still stall an engine."""
    hits: list[str] = []
    jax.monitoring.register_event_listener(lambda event, **labels: hits.append(event) if "cache_hits" in event else None)
    x = np.arange(5.0)
    with CompileCounter() as compiles:
        jax.jit(lambda x: x * 3 + 1)(x)
        jax.jit(lambda x: x * 3 + 1)(x)
    assert hits, "the persistent cache of tests/conftest.py did not serve the second function"
    assert compiles.count == 2


def test_counters_nest_and_start_from_zero() -> None:
    with CompileCounter() as outer:
        jax.jit(lambda x: x + 4)(np.arange(2.0))
        with CompileCounter() as inner:
            jax.jit(lambda x: x + 5)(np.arange(2.0))
        jax.jit(lambda x: x + 6)(np.arange(2.0))
    assert (outer.count, inner.count) == (3, 1)
    with outer:
        pass
    assert outer.count == 0
