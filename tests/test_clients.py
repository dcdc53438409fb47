"""Unmodified agent programs and SDKs on the gateway, with the real engine: what is recorded is what was sampled.

`make clients` installs them. A policy supplies the tokens (tests/forced.py), so that a tiny random model calls tools.
"""

import json
import subprocess
import threading
from pathlib import Path

import pytest

from tests.acting import SHELL, asked, call, counts, engine_for, last, tool_call, worker
from tests.forced import Seen, gateway
from tests.programs import BIN, REPO, SDKS, SECONDS, Program, end

PROGRAMS = ("claude", "pi:chat", "pi:responses", "pi:messages", "codex")

pytestmark = [pytest.mark.clients, pytest.mark.skipif(not BIN.exists(), reason="`make clients` installs them")]


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


SDK_WAYS = (
    *("openai:chat", "openai:chat:stream", "openai:responses", "openai:responses:stream"),
    *("anthropic:messages", "anthropic:messages:stream", "litellm:openai", "litellm:hosted_vllm", "litellm:anthropic"),
)


@pytest.mark.parametrize("way", SDK_WAYS)
def test_sdks(way: str) -> None:
    """tests/clients/sdk_client.py, in the SDKs' own environment: two turns, the first with two calls."""
    calls = [tool_call("look", '{"at" : 1.0, "all": true}'), tool_call("look", '{"at": 2, "why": "\\u00e9 \\"x\\""}')]
    with gateway(engine_for(way), worker("", *calls)) as live:
        ran = subprocess.run(
            [str(SDKS), str(REPO / "tests/clients/sdk_client.py"), way, f"{live.url}/s/one"],
            env={"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert ran.returncode == 0, ran.stderr
        found = counts(live, "one")
        assert (found["requests"], found["samples"], found["breaks"]) == (3, 1, 0)
        assert found["trained_tokens"] == found["sampled_tokens"]
        said = json.loads(ran.stdout.splitlines()[-1])  # litellm says things of its own
        assert said["texts"] == ["I look.", "I saw ok 2.\n", " Done, ✓.\n"]
        usage = [[len(seen.request.prompt_ids), len(seen.ids)] for seen in live.front.seen]
        assert said["usage"] == usage


# ---- what programs do to a history


@pytest.mark.parametrize("program", ["claude", "pi:chat", "pi:responses", "pi:messages"])
def test_arguments_come_back_in_another_form(program: str, tmp_path: Path) -> None:
    """Programs write arguments anew: spaces, escapes and 1.0 are lost. The record goes on from what was sampled."""
    tool, name = SHELL[program.partition(":")[0]]
    odd = [tool_call(tool, f'{{ "{name}" :"echo \\u0068ere", "timeout": {t} }}') for t in ("50.0", "6e1")]
    with gateway(engine_for(program), worker(program, *odd)) as live:
        client = Program(program, tmp_path, f"{live.url}/s/one")
        assert "I saw here." in client.run("please look around")
        found = counts(live, "one")
        assert (found["requests"], found["samples"], found["breaks"]) == (2, 1, 0)
        assert len([message for message in live.graph("one").nodes[2].messages if message["role"] == "tool"]) == 2


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_call_that_is_none_is_text(program: str, tmp_path: Path) -> None:
    with gateway(engine_for(program), worker(program, '<tool_call>\n{"name": "x", "arguments": {"a\n</tool_call>')) as live:
        client = Program(program, tmp_path, f"{live.url}/s/one")
        assert "<tool_call>" in client.run("please look around")
        client.run("and now?", resume=True)
        found = counts(live, "one")
        assert (found["requests"], found["samples"], found["breaks"]) == (2, 1, 0)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_is_killed_in_the_middle_of_an_answer(program: str, tmp_path: Path) -> None:
    begun = threading.Event()

    def watch(seen: Seen) -> None:
        if len(seen.ids) == 12:
            begun.set()

    def policy(prompt: str) -> str:
        return "x" * 4000 if asked(prompt, "for long") else "Done."

    with gateway(engine_for(program), policy) as live:
        live.front.after = watch
        url = f"{live.url}/s/one"
        process = Program(program, tmp_path / "killed", url).start("go on for long")
        try:
            assert begun.wait(SECONDS)
        finally:
            end(process)
        session = live.sessions.named("one")
        for _ in range(600):
            if not session.running and not live.front.engine.num_in_flight:
                break
            threading.Event().wait(0.05)
        assert counts(live, "one")["nodes"] == {"abandoned": 1} and not session.running
        assert counts(live, "one")["samples"] == 0
        assert "Done." in Program(program, tmp_path / "after", url).run("be short")
        found = counts(live, "one")
        assert (found["samples"], found["trained_tokens"], found["nodes"]) == (1, 6, {"abandoned": 1, "live": 1})


# ---- compaction and sub-agents


def test_codex_compacts(tmp_path: Path) -> None:
    """At its limit of tokens, which it knows from the usage that it is told, in the middle of a turn."""

    def policy(prompt: str) -> str:
        if asked(prompt, "CONTEXT CHECKPOINT COMPACTION"):
            return "There were numbers."
        if asked(prompt, "please look around"):
            return call("codex", "seq 1000 1 1500")
        return call("codex", "echo more") if last(prompt)[0] == "tool" else "Done."

    with gateway(engine_for("codex"), policy) as live:
        client = Program("codex", tmp_path, f"{live.url}/s/one", settings=["model_auto_compact_token_limit = 40600"])
        assert "Done." in client.run("please look around")
        found = counts(live, "one")
        assert (found["requests"], found["samples"], found["breaks"]) == (4, 2, 1)
        assert found["auxiliary"] == ["compaction"] and found["agents"] == ["main"]
        sampled = [len(seen.ids) for seen in live.front.seen]
        assert found["trained_tokens"] == sum(sampled) - sampled[2] and found["sampled_tokens"] == sum(sampled)


def test_codex_has_a_sub_agent(tmp_path: Path) -> None:
    spawn = tool_call("multi_agent_v1__spawn_agent", '{"message": "child: look around"}')

    def policy(prompt: str) -> str:
        role, text = last(prompt)
        if role == "user" and "child: look around" in text:
            return call("codex", "echo here")
        if role == "user" and "please look around" in text:
            return spawn
        if role == "tool" and "agent_id" in text:
            agent = text.split('"agent_id":"')[1].split('"')[0]
            return tool_call("multi_agent_v1__wait_agent", json.dumps({"targets": [agent]}))
        return "I saw it."

    with gateway(engine_for("codex"), policy) as live:
        client = Program("codex", tmp_path, f"{live.url}/s/one")
        assert "I saw it." in client.run("please look around")
        found = counts(live, "one")
        assert (found["requests"], found["samples"], found["breaks"]) == (5, 2, 0)
        graph = live.graph("one")
        main, child = graph.calls
        assert (child.parent, child.depth, found["agents"]) == (main.id, 1, ["main", child.agent])
        assert found["trained_tokens"] == found["sampled_tokens"]
        # it was spawned where the parent's call ends
        assert child.position == len(graph.path_ids(graph.nodes[1].id))


def test_claude_code_has_a_sub_agent(tmp_path: Path) -> None:
    what = {"description": "look", "prompt": "child: look around", "subagent_type": "general-purpose"}

    def policy(prompt: str) -> str:
        if asked(prompt, "child: look around"):
            return call("claude", "echo here")
        if asked(prompt, "please look around"):
            return tool_call("Agent", json.dumps(what))
        return "I saw it."

    with gateway(engine_for("codex"), policy) as live:
        client = Program("claude", tmp_path, f"{live.url}/s/one", options=["--tools=Bash,Task"])
        assert "I saw it." in client.run("please look around")
        found = counts(live, "one")
        assert (found["requests"], found["samples"], found["breaks"]) == (4, 2, 0)
        graph = live.graph("one")
        main, child = graph.calls
        assert (child.parent, child.depth, found["agents"]) == (main.id, 1, ["main", child.agent])
        assert child.position == len(graph.path_ids(graph.nodes[1].id))
