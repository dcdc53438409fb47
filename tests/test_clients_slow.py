"""opencode and the OpenHands SDK, unmodified, on the gateway: as tests/test_clients.py, but not in CI.

`make clients-slow` installs them; `pytest -m clients_slow` runs these.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.acting import call, counts, engine_for, worker
from tests.forced import gateway
from tests.programs import OPENCODE, OPENHANDS, REPO, SECONDS, Program, end

QUIET = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "DO_NOT_TRACK": "1", "OPENHANDS_SUPPRESS_BANNER": "1"}

pytestmark = [
    pytest.mark.clients_slow,
    pytest.mark.skipif(not (OPENCODE.exists() and OPENHANDS.exists()), reason="`make clients-slow` installs them"),
]


@pytest.mark.parametrize("wire", ["chat", "responses", "messages"])
def test_opencode(wire: str, tmp_path: Path) -> None:
    """It asks for a title beside its first turn, in the same session: auxiliary, and not trained on."""
    program = f"opencode:{wire}"
    acts = worker(program, call(program, "echo here", description="look"))
    with gateway(engine_for(program), lambda prompt: "A title." if "title generator" in prompt else acts(prompt)) as live:
        client = Program(program, tmp_path, f"{live.url}/s/one")
        assert "I saw here." in client.run("please look around")
        assert "Done, ✓." in client.run("and now?", resume=True)
        found = counts(live, "one")
        assert (found["requests"], found["samples"], found["breaks"]) == (4, 1, 0)
        assert found["auxiliary"] == ["title"] and found["agents"] == ["main"] and found["nodes"] == {"live": 4}
        sampled = sum(len(seen.ids) for seen in live.front.seen)
        assert (found["trained_tokens"], found["sampled_tokens"]) == (sampled - len("A title.") - 1, sampled)


@pytest.mark.parametrize("model", ["openai/tiny", "hosted_vllm/tiny", "anthropic/tiny"])
def test_openhands(model: str, tmp_path: Path) -> None:
    with gateway(engine_for("openhands"), worker("openhands")) as live:
        assert run_openhands(live.url, model, tmp_path)[-1] == " Done, ✓.\n"
        found = counts(live, "one")
        assert (found["requests"], found["samples"], found["breaks"]) == (3, 1, 0)
        assert found["trained_tokens"] == found["sampled_tokens"] == sum(len(seen.ids) for seen in live.front.seen)
        assert found["nodes"] == {"live": 3} and found["agents"] == ["main"] and not found["auxiliary"]
        messages = [message for node in live.graph("one").nodes for message in node.messages]
        assert ["here" in message["content"] for message in messages if message["role"] == "tool"] == [True]


@pytest.mark.parametrize(("model", "samples"), [("openai/tiny", 3), ("hosted_vllm/tiny", 3), ("anthropic/tiny", 1)])
def test_openhands_with_thinking(model: str, samples: int, tmp_path: Path) -> None:
    """In Chat Completions it drops what the model thought, in Messages it sends it back.

    What is dropped the model does not see again, so that each turn is then a sample of its own. Each is trained, once.
    """
    acts = worker("openhands")
    with gateway(engine_for("openhands"), lambda prompt: f"<think>\nHm.\n</think>\n\n{acts(prompt)}", thinking=True) as live:
        assert run_openhands(live.url, model, tmp_path)[-1] == " Done, ✓.\n"
        found = counts(live, "one")
        assert (found["requests"], found["samples"], found["breaks"]) == (3, samples, samples - 1)
        assert found["trained_tokens"] == found["sampled_tokens"] == sum(len(seen.ids) for seen in live.front.seen)


def run_openhands(url: str, model: str, folder: Path) -> list[str]:
    """The texts of its answers, in two turns."""
    process = subprocess.Popen(
        [
            str(OPENHANDS),
            str(REPO / "tests/clients/slow/openhands_client.py"),
            f"{url}/s/one" + ("" if model.startswith("anthropic") else "/v1"),
            model,
        ],
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(folder), "LANG": "C.UTF-8", **QUIET},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        said, errors = process.communicate(timeout=SECONDS)
    finally:
        end(process)
    assert process.returncode == 0, errors
    return json.loads(said.splitlines()[-1])
