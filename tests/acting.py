"""What a model says that acts through programs' tools, and what there is to count afterwards: for tests with programs."""

import json
from functools import cache
from typing import Any

from inference.engine import Engine
from tests.forced import Live, Policy, check_record, make_tiny_engine

SHELL = {
    **{"claude": ("Bash", "command"), "codex": ("exec_command", "cmd"), "pi": ("bash", "command")},
    **{"opencode": ("bash", "command"), "openhands": ("terminal", "command")},
}
"""the tool of each that runs a command, and what it calls the command"""
START, END = "<|im_start|>", "<|im_end|>"

tiny_engine = cache(make_tiny_engine)


def engine_for(program: str) -> Engine:
    """Codex says 38 kB before its first turn, opencode 31, OpenHands 26; and a token is a byte."""
    return tiny_engine(3 * 2**14 if program.partition(":")[0] in ("codex", "opencode", "openhands") else 2**14)


def call(program: str, command: str, **more: Any) -> str:
    """A call of the program's shell, as the model writes it."""
    tool, field = SHELL[program.partition(":")[0]]
    return tool_call(tool, json.dumps({field: command, **more}))


def tool_call(tool: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{tool}", "arguments": {arguments}}}\n</tool_call>'


def last(prompt: str) -> tuple[str, str]:
    """Role and text of the last message but the system's, which Claude Code puts behind the user's."""
    turns = [turn.partition("\n") for turn in prompt.split(START)[:-1]]
    role, _, text = next(turn for turn in reversed(turns) if turn[0] != "system")
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
