"""Who asks, and what for: read from what agent programs send of themselves.

    client         session                      agent                     parent
    Codex          session-id                   thread-id, of a child     x-codex-parent-thread-id
    Claude Code    x-claude-code-session-id     x-claude-code-agent-id    x-claude-code-parent-agent-id
    opencode       x-parent-session-id, else    x-session-id,             "main"
                   x-session-id or -affinity    of a child
    Pi             session_id                   -                         -
    litellm        x-litellm-session-id         -                         -
    any            x-session                    x-agent-id                x-parent-agent-id

Any client's headers of the last row come before its own; the rows above it are asked from top to bottom. Codex also has its ids
in x-codex-turn-metadata (JSON), and the same in the body's client_metadata. The root's own agent is "main", and a child whose
parent is not named is the root's. opencode names no root: the session of a child of a child is its parent's own.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from inference.errors import ApiError
from rl.messages import CallKind, Message, Tool
from rl.wires import Identity

MAX_ID = 200
MAIN = "main"
METADATA = "x-codex-turn-metadata"

SYSTEM_MARKS: tuple[tuple[str, CallKind], ...] = (
    ("You are a context summarization", "compaction"),  # Pi, opencode
    ("tasked with summarizing conversations", "compaction"),  # opencode before, Claude Code's background sessions
    ("that summarizes internal chat history", "compaction"),  # Qwen Code
    ("title generator", "title"),  # opencode
)
"""of requests without tools: what the system prompt says"""
USER_MARKS: tuple[tuple[str, CallKind], ...] = (
    ("CRITICAL: Respond with TEXT ONLY. Do NOT call any tools", "compaction"),  # Claude Code, tools and all
    ("You are performing a CONTEXT CHECKPOINT COMPACTION", "compaction"),  # Codex
    ("You are maintaining a context-aware state summary", "compaction"),  # OpenHands
)
"""what the last message says that is no system's, if it is a user's"""


def identity(headers: Mapping[str, str], body: Any = None) -> Identity:
    """Who asks (table above).

    Args:
        headers: names in lower case.
        body: as JSON has it; only Codex's `client_metadata` is read.

    Raises:
        ApiError: an id has a control character or is too long.
    """
    metadata = _metadata(headers, body)

    def given(name: str, key: str = "") -> str | None:
        value = headers.get(name) or metadata.get(key)
        return _checked(name, value) if isinstance(value, str) and value else None

    session, agent, parent = given("x-session"), given("x-agent-id"), given("x-parent-agent-id")
    if codex := given("session-id", "session_id"):
        root, above = codex, given("x-codex-parent-thread-id", "parent_thread_id")
        child = above or headers.get("x-openai-subagent") or metadata.get("thread_source") == "subagent"
        own = given("thread-id", "thread_id") if child else None
    elif claude := given("x-claude-code-session-id"):
        root, own, above = claude, given("x-claude-code-agent-id"), given("x-claude-code-parent-agent-id")
    elif opencode := given("x-session-id") or given("x-session-affinity"):
        root = given("x-parent-session-id") or opencode
        own, above = (opencode if root != opencode else None), None
    else:
        root, own, above = given("session_id") or given("x-litellm-session-id"), None, None
    if agent is None:
        agent, parent = own, parent or (MAIN if above == root else above)
    if agent in (None, MAIN, session or root):
        return Identity(session=session or root)
    return Identity(session=session or root, agent=agent, parent=parent or MAIN)


def kind_of_call(headers: Mapping[str, str], body: Any, messages: Sequence[Message], tools: Sequence[Tool]) -> CallKind:
    """What a request is for. A mark may be missed, or be quoted by a user: that costs one turn that is trained, or is not."""
    metadata = _metadata(headers, body)
    kind = metadata.get("request_kind")
    if kind == "compaction" or ("compaction" in metadata and kind is None):
        return "compaction"
    # Claude Code puts system messages behind it
    last = next((message for message in reversed(messages) if message["role"] != "system"), None)
    for mark, call_kind in USER_MARKS:
        if last is not None and last["role"] == "user" and mark in last["content"]:
            return call_kind
    system = "\n".join(message["content"] for message in messages if message["role"] == "system")
    for mark, call_kind in () if tools else SYSTEM_MARKS:
        if mark in system:
            return call_kind
    return "turn"


def _metadata(headers: Mapping[str, str], body: Any) -> dict[str, Any]:
    """Codex's, from the body and, before that, the header."""
    inside = body.get("client_metadata") if isinstance(body, dict) else None
    found: dict[str, Any] = dict(inside) if isinstance(inside, dict) else {}
    return found | _object(found.get(METADATA)) | _object(headers.get(METADATA))


def _object(text: Any) -> dict[str, Any]:
    """An object in JSON text; what is none says nothing."""
    try:
        value = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _checked(name: str, value: str) -> str:
    if len(value) > MAX_ID or not value.isprintable():
        raise ApiError(f"{name}: an id has at most {MAX_ID} characters, and none that cannot be printed", param=name)
    return value
