"""A history that goes on: ids of a sampled path, and the messages behind it, without encoding anything of the path again."""

from collections.abc import Sequence

from rl.messages import Message, Tool
from rl.renderers import Renderer


def go_on(renderer: Renderer, prior: list[int], messages: list[Message], start: int, tools: Sequence[Tool]) -> list[int] | None:
    """ids of the whole history, up to the next turn of the assistant.

    Args:
        prior: ids of the messages before `start`; they end in a sampled turn.

    Returns:
        None: the renderer has no form for it that begins with `prior`; it is to be rendered anew.
    """
    ids, new = prior, list[Message]()
    for i in range(start, len(messages)):
        if messages[i]["role"] != "assistant":
            new.append(messages[i])
            continue
        bridge = renderer.bridge(ids, new, tools)
        said = _said(renderer, messages[: i + 1], tools)
        if bridge is None or said is None:
            return None
        ids, new = [*ids, *bridge, *said], []
    bridge = renderer.bridge(ids, new, tools)
    return None if bridge is None else [*ids, *bridge]


def _said(renderer: Renderer, messages: list[Message], tools: Sequence[Tool]) -> list[int] | None:
    """ids of the last message, an assistant's that was not sampled, up to the end of its turn."""
    before = renderer.render(messages[:-1], tools)
    whole = renderer.render(messages, tools, add_generation_prompt=False)
    if whole[: len(before)] != before:
        return None
    ends = [i for i in range(len(before), len(whole)) if whole[i] in renderer.stop_ids]
    return whole[len(before) : ends[-1] + 1] if ends else None
