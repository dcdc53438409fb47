"""Whether the machine was quiet while something was timed, and what memory it took."""

import os
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

STAT = Path("/proc/stat")
STATUS = Path("/proc/self/status")
ENOUGH = 0.1
"""CPUs that others may keep busy before a timing means little; threads that wait for each other lose far more than that"""


class Others:
    """Context manager that measures how many CPUs other processes kept busy while its block ran."""

    cpus: float | None = None
    """None where the system does not tell (it has no /proc/stat)"""

    def __enter__(self) -> Self:
        self._started, self._before = time.perf_counter(), _others()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._before is not None and (after := _others()) is not None:
            self.cpus = max(0.0, after - self._before) / (time.perf_counter() - self._started)


def _others() -> float | None:
    """Seconds of CPU that all other processes have used since boot. A child counts as another until it has ended."""
    if not STAT.is_file():
        return None
    user, nice, system, _, _, irq, softirq, steal = map(int, STAT.read_text().split("\n", 1)[0].split()[1:9])
    own = os.times()
    used = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    return used - own.user - own.system - own.children_user - own.children_system


def warn(cpus: float | None, when: str) -> None:
    """One line on standard error when others were busy."""
    if cpus is not None and cpus > ENOUGH:
        print(f"warning: other processes kept {cpus:.1f} CPUs busy {when}; timings need a quiet machine", file=sys.stderr)


def peak_bytes() -> int | None:
    """This process's largest resident size; None where the system does not tell. (getrusage's begins at the parent's.)"""
    if not STATUS.is_file():
        return None
    [line] = (line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
