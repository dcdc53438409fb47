"""What every entry point shares."""

import sys
from collections.abc import Callable
from pathlib import Path

import jax
from absl import logging


def run_main(main: Callable[[], None]) -> None:
    """Runs an entry point. A user's mistake (ValueError) or a file that cannot be used (OSError) ends it with one
    `error: ...` line on standard error and exit code 2; any other exception is a bug and keeps its traceback."""
    try:
        main()
    except (ValueError, OSError) as error:
        text = "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
        print(f"error: {text or type(error).__name__}", file=sys.stderr)
        sys.exit(2)


def set_up_jax() -> None:
    """A persistent compilation cache in runs/, so that the same command starts faster the second time; quiet libraries."""
    logging.set_verbosity(logging.WARNING)
    jax.config.update("jax_compilation_cache_dir", str(Path("runs/.jax_cache").absolute()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
