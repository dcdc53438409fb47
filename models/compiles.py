"""How often XLA compiled while a block ran: the engine, the benchmarks and the tests hold it at 0 after warm-up."""

from types import TracebackType
from typing import Any, ClassVar, Self

import jax

EVENT = "/jax/core/compile/backend_compile_duration"
"""Recorded for each program handed to XLA, whether it compiles or comes from the persistent cache."""


class CompileCounter:
    """Context manager that counts compiles of this process, of every thread, between entering and leaving.

    Counters nest and may be used again, each time from 0.
    """

    _active: ClassVar[list["CompileCounter"]] = []
    _listening: ClassVar[bool] = False

    def __init__(self) -> None:
        self.count = 0
        """programs compiled or fetched from the persistent cache"""
        self.seconds = 0.0
        """time they took, wall seconds added over threads"""
        self.names: list[str] = []
        """names of the jitted functions, in order"""

    def __enter__(self) -> Self:
        if not CompileCounter._listening:
            jax.monitoring.register_event_duration_secs_listener(_on_duration)
            CompileCounter._listening = True
        self.count, self.seconds, self.names = 0, 0.0, []
        CompileCounter._active.append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        CompileCounter._active.remove(self)


def _on_duration(event: str, duration_secs: float, **labels: Any) -> None:
    if event != EVENT:
        return
    for counter in tuple(CompileCounter._active):
        counter.count += 1
        counter.seconds += duration_secs
        counter.names.append(str(labels.get("fun_name", "?")))
