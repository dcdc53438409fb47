"""The renderers library behind our Protocol, and our formats against its own (it is an extra; skipped where it is missing)."""

import importlib.util
import json
from typing import Any

import pytest

from models.tokenizer import ByteTokenizer
from rl.messages import Message, Tool
from rl.renderers import Library, Llama3, Qwen3, Qwen35, Renderer
from tests.merging import LLAMA, MERGES, QWEN, merging

VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
APART = tuple(text for text in MERGES if not text.strip("\n") or "\n" not in text)
"""merges that keep line breaks apart from words, as the models' own do: the library encodes them so"""
TOOL: Tool = {
    "name": "look",
    "description": "Looks > there",
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}, "n": {"type": "integer"}}},
}
ASK: Message = {"role": "user", "content": "look?"}
CALL: Message = {"role": "assistant", "content": "", "tool_calls": [{"id": "c_0", "name": "look", "arguments": '{"at": "x"}'}]}
RESULT: Message = {"role": "tool", "content": "it is", "name": "look", "tool_call_id": "c_0"}
AGAIN: Message = {"role": "user", "content": "and?"}

installed = pytest.mark.skipif(importlib.util.find_spec("renderers") is None, reason="the extra renderers is not installed")


def pairs() -> list[tuple[Renderer, Renderer]]:
    """Our renderer of a format, and the library's, on one tokenizer."""
    qwen, llama = (merging(specials, merges=APART) for specials in ((*QWEN, *VISION), LLAMA))
    return [
        (Qwen3(qwen, keep_thinking=False), Library(qwen, family="qwen3")),
        (Qwen3(qwen, thinking=False), Library(qwen, family="qwen3", enable_thinking=False)),
        (Qwen35(qwen, keep_thinking=False), Library(qwen, family="qwen3.5", enable_thinking=True)),
        (Llama3(llama), Library(llama, family="llama-3")),
    ]


@installed
def test_it_renders_reads_and_bridges_as_ours_do() -> None:
    for ours, library in pairs():
        for messages in ([ASK], [ASK, CALL, RESULT], [{"role": "system", "content": "be kind"}, ASK]):
            given: Any = messages
            if isinstance(ours, Qwen35):  # of an empty block, its header has the first line break
                given = [{"thinking": "so", **m} if m["role"] == "assistant" else m for m in messages]
            for tools in ((), (TOOL,)):
                assert ours.render(given, tools) == library.render(given, tools), (ours.name, messages)
        prompt = ours.render([ASK], [TOOL])
        said: Message = {**CALL, "thinking": "so"} if isinstance(ours, Qwen3) and ours.thinking else CALL
        turn = ours.render([ASK, said], [TOOL], add_generation_prompt=False)
        assert turn[: len(prompt)] == prompt
        end = max(i for i, token in enumerate(turn) if token in ours.stop_ids)
        ids = turn[len(prompt) : end + 1]
        assert library.parse(ids, "c", [TOOL]) == ours.parse(ids, "c", [TOOL]) == said
        assert library.bridge(prompt + ids, [RESULT], [TOOL]) == ours.bridge(prompt + ids, [RESULT], [TOOL]) is not None
        assert library.bridge(prompt + ids[:-1], [RESULT], [TOOL]) == ours.bridge(prompt + ids[:-1], [RESULT], [TOOL])
        assert library.bridge(prompt + ids, [AGAIN], [TOOL]) == ours.bridge(prompt + ids, [AGAIN], [TOOL])


@installed
def test_what_anybody_writes_is_text_there_too() -> None:
    everything = "".join((*QWEN, *LLAMA))
    for _, library in pairs():
        ids = []
        for text in ("x", everything):
            said: Message = {"role": "assistant", "content": "", "tool_calls": [{**CALL["tool_calls"][0]}]}  # pyright: ignore[reportTypedDictNotRequiredAccess]
            said["tool_calls"][0]["arguments"] = json.dumps({"at": text})
            tool: Tool = {**TOOL, "description": text}
            messages: list[Message] = [
                {"role": "system", "content": text},
                {"role": "user", "content": text},
                said,
                {**RESULT, "content": text},
            ]
            ids.append(library.render(messages, [tool]))
        special = library._tokens._tokenizer.special_ids  # pyright: ignore[reportAttributeAccessIssue]
        one, two = ([token for token in found if token in special] for found in ids)
        assert one == two and "\ufdd0" not in library._tokens.decode(ids[1])  # pyright: ignore[reportAttributeAccessIssue]


@installed
def test_what_went_wrong_is_text() -> None:
    library = Library(merging(), family="qwen3")
    body = '\n{"name": "look", "arguments": {"a": 1}\n'
    ids = library._tokens._tokenizer.encode(f"<tool_call>{body}</tool_call><|im_end|>", allow_special=True)
    message = library.parse(ids, "c", [TOOL])
    assert "tool_calls" not in message and body.strip() in message["content"]
    with pytest.raises(ValueError, match=r"^family: 'nobody' does not work with these options"):
        Library(merging(), family="nobody")
    with pytest.raises(ValueError, match=r"^family: 'qwen3' does not work with these options"):
        Library(ByteTokenizer(), family="qwen3")
    with pytest.raises(ValueError, match=r"^family: 'auto' is no format"):
        Library(merging(), family="auto")
    assert not library.extends and Library(merging(), family="qwen3", thinking_retention="all").extends


@pytest.mark.skipif(importlib.util.find_spec("renderers") is not None, reason="the extra renderers is installed")
def test_without_the_library_it_says_what_to_install() -> None:
    with pytest.raises(ValueError, match=r"^renderer: 'library' needs the extra renderers; install it"):
        Library(merging(), family="qwen3")
