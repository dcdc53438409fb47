"""Unmodified agent programs and SDKs on the gateway, with the real engine: what is recorded is what was sampled.

`make clients` installs them. A policy supplies the tokens (tests/forced.py), so that a tiny random model calls tools.
"""

import json
import subprocess
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from inference.engine import Engine
from tests.forced import Live, Policy, check_record, gateway, make_tiny_engine
from tests.programs import BIN, REPO, SDKS, SECONDS, Program, end

PROGRAMS = ("claude", "pi:chat", "pi:responses", "pi:messages", "codex")
SHELL = {"claude": ("Bash", "command"), "codex": ("exec_command", "cmd"), "pi": ("bash", "command")}
"""the tool of each that runs a command, and what it calls the command"""
START, END = "<|im_start|>", "<|im_end|>"

pytestmark = [pytest.mark.clients, pytest.mark.skipif(not BIN.exists(), reason="`make clients` installs them")]

tiny_engine = cache(make_tiny_engine)


def engine_for(program: str) -> Engine:
    """Codex says 38 kB before its first turn, and a token is a byte."""
    return tiny_engine(2**16 if program == "codex" else 2**14)


def call(program: str, command: str, **more: Any) -> str:
    """A call of the program's shell, as the model writes it."""
    tool, field = SHELL[program.partition(":")[0]]
    return tool_call(tool, json.dumps({field: command, **more}))


def tool_call(tool: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{tool}", "arguments": {arguments}}}\n</tool_call>'


def last(prompt: str) -> tuple[str, str]:
    """Role and text of the last message."""
    role, _, text = prompt.split(START)[-2].partition("\n")
    return role, text.rpartition(END)[0]


def asked(prompt: str, what: str) -> bool:
    role, text = last(prompt)
    return role == "user" and what in text


def worker(program: str, *calls: str) -> Policy:
    """Makes the calls when it is told to look, says what it saw, and is short otherwise."""

    def policy(prompt: str) -> str:
        if asked(prompt, "look around"):
            return "I look.\n" + "\n".join(calls or [call(program, "echo here")])
        role, text = last(prompt)
        return f"I saw {text.strip()[-4:]}.\n" if role == "tool" else " Done, ✓.\n"

    return policy


def counts(live: Live, name: str) -> dict[str, Any]:
    """After a check of the record against what the engine saw."""
    graph = live.graph(name)
    check_record(graph, live.front.seen)
    assert live.names == [name] and not live.front.refused
    return live.sessions.named(name).counts()


# ---- append-only: each program, each of its dialects


@pytest.mark.parametrize("program", PROGRAMS)
def test_calls_answers_and_resumes(program: str, tmp_path: Path) -> None:
    with gateway(engine_for(program), worker(program)) as live:
        client = Program(program, tmp_path, f"{live.url}/s/one")
        assert "I saw here." in client.run("please look around")
        assert "Done, ✓." in client.run("and now?", resume=True)
        found = counts(live, "one")
        assert (found["requests"], found["samples"], found["breaks"]) == (3, 1, 0)
        assert found["trained_tokens"] == found["sampled_tokens"] == sum(len(seen.ids) for seen in live.front.seen)
        assert found["nodes"] == {"live": 3} and found["agents"] == ["main"] and not found["auxiliary"]
        # the second and third prompts were found in the cache, up to their new parts
        for before, after in zip(live.front.seen, live.front.seen[1:], strict=False):
            whole = (*before.request.prompt_ids, *before.ids)
            assert after.request.prompt_ids[: len(whole)] == whole
