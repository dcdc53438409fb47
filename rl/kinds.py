"""Environments by what the config calls them. Imports no jax, as a worker's start waits for it."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from rl.calculator import Calculator
from rl.coding import Coding
from rl.compacting import Tally
from rl.environments import AgentEnvironment, Arithmetic, Environment, ReasoningGym
from rl.recursive import Halves

ENVIRONMENTS: dict[str, Callable[..., Environment | AgentEnvironment] | str] = {
    "reasoning_gym": ReasoningGym,
    "arithmetic": Arithmetic,
    "calculator": Calculator,
    "coding": Coding,
    "tally": Tally,
    "halves": Halves,
    "harness": "rl.harness:Harness",  # a server comes with it
    "verifiers": "rl.verifiers_environment:Verifiers",
}


def make(kind: str, options: Mapping[str, Any]) -> Environment | AgentEnvironment:
    """The environment of a config's `kind`: a name in ENVIRONMENTS, or MODULE:CLASS of one's own.

    Raises:
        ValueError: there is no such kind, or it refuses the options.
    """
    made = ENVIRONMENTS.get(kind, kind)
    if isinstance(made, str) and ":" in made:
        module, _, name = made.partition(":")
        try:
            made = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"environment.kind: {kind!r} cannot be imported ({error}); it is MODULE:CLASS") from error
    if isinstance(made, str):
        raise ValueError(f"environment.kind: {kind!r} is unknown; use one of {sorted(ENVIRONMENTS)}, or MODULE:CLASS")
    try:
        return made(**options)
    except TypeError as error:
        raise ValueError(f"environment.options: {error}") from error
