"""Agent programs as `make clients` and `make clients-slow` install them: how they start, with nothing of the user's own."""

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).parents[1]
CLIENTS = Path(os.environ.get("TWINAX_CLIENTS", REPO / ".clients"))
BIN = CLIENTS / "node_modules/.bin"
SDKS, TRAINERS = CLIENTS / "sdks/bin/python", CLIENTS / "trainers/bin/python"
SLOW = Path(os.environ.get("TWINAX_CLIENTS_SLOW", REPO / ".clients-slow"))
OPENCODE, OPENHANDS = SLOW / "node_modules/.bin/opencode", SLOW / "openhands/bin/python"
SECONDS = 240.0
"""longest that a program may take: tests share the machine"""


@dataclass
class Program:
    """A program, its home and the folder that it works in.

    Args:
        name: "codex", "claude", "pi:WIRE" or "opencode:WIRE".
        url: of the gateway, path prefix included.
        settings: lines more for Codex's file.
        options: of Claude Code. With --bare it says little of its own.
    """

    name: str
    home: Path
    url: str
    settings: Sequence[str] = ()
    options: Sequence[str] = ("--bare",)

    def __post_init__(self) -> None:
        self.work = self.home / "work"
        self.work.mkdir(parents=True)
        if self.name == "codex":
            write(
                self.home / ".codex/config.toml", "\n".join([*CODEX, *self.settings, *CODEX_SECTIONS]).replace("URL", self.url)
            )
        elif self.name.startswith("pi"):
            write(self.home / ".pi/agent/models.json", json.dumps(pi_models(self.url)))
        elif self.name.startswith("opencode"):
            write(self.home / ".config/opencode/opencode.json", json.dumps(opencode_config(self.name, self.url)))

    def start(self, prompt: str, *, resume: bool = False) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            self._command(prompt, resume),
            cwd=self.work,
            env={"PATH": os.environ["PATH"], "HOME": str(self.home), "LANG": "C.UTF-8", **self._environment()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, prompt: str, *, resume: bool = False, code: int = 0) -> str:
        """What it prints. Fails if it ends otherwise than with `code`, or not in time."""
        process = self.start(prompt, resume=resume)
        try:
            said, _ = process.communicate(timeout=SECONDS)
        finally:
            end(process)
        assert process.returncode == code, f"{self.name} ended with {process.returncode}:\n{said}"
        return said

    def _command(self, prompt: str, resume: bool) -> list[str]:
        if self.name == "codex":
            again = ["resume", "--last"] if resume else []
            return [str(BIN / "codex"), "exec", "--json", "--skip-git-repo-check", *again, prompt]
        if self.name == "claude":
            again = ["-c"] if resume else []
            plain = [*self.options, "--model", "tiny", "--dangerously-skip-permissions", "--output-format", "json"]
            return [str(BIN / "claude"), "-p", *again, *plain, prompt]
        again = ["--continue"] if resume else []
        if self.name.startswith("opencode"):
            return [str(OPENCODE), "run", *again, "--model", "twinax/tiny", prompt]
        return [str(BIN / "pi"), "-p", *again, "--provider", self.name.replace(":", "-"), "--model", "tiny", prompt]

    def _environment(self) -> dict[str, str]:
        if self.name == "codex":
            return {"TWINAX_API_KEY": "none", "CODEX_HOME": str(self.home / ".codex")}
        if self.name == "claude":
            off = ("DISABLE_TELEMETRY", "DISABLE_ERROR_REPORTING", "DISABLE_AUTOUPDATER", "IS_SANDBOX")
            return dict.fromkeys((*off, "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC"), "1") | {
                "ANTHROPIC_BASE_URL": self.url,
                "ANTHROPIC_API_KEY": "none",
                "CLAUDE_CONFIG_DIR": str(self.home / ".claude"),
            }
        if self.name.startswith("opencode"):
            off = ("AUTOUPDATE", "MODELS_FETCH", "DEFAULT_PLUGINS", "LSP_DOWNLOAD")
            return {f"OPENCODE_DISABLE_{name}": "1" for name in off}
        return {"PI_OFFLINE": "1"}


CODEX = (
    'model = "tiny"',
    'model_provider = "twinax"',
    'approval_policy = "never"',
    'sandbox_mode = "danger-full-access"',
    "check_for_update_on_startup = false",
)
CODEX_SECTIONS = (
    *("[analytics]", "enabled = false", "[otel]", 'exporter = "none"'),
    *("[model_providers.twinax]", 'name = "twinax"', 'base_url = "URL/v1"', 'env_key = "TWINAX_API_KEY"'),
    *('wire_api = "responses"', "request_max_retries = 0", "stream_max_retries = 0"),
)


def pi_models(url: str) -> dict[str, object]:
    model = {"id": "tiny", "reasoning": True, "contextWindow": 32000, "maxTokens": 4096}
    return {
        "providers": {
            f"pi-{name}": {"baseUrl": url + path, "api": api, "apiKey": "none", "models": [model]}
            for name, path, api in (
                ("chat", "/v1", "openai-completions"),
                ("responses", "/v1", "openai-responses"),
                ("messages", "", "anthropic-messages"),
            )
        }
    }


def opencode_config(name: str, url: str) -> dict[str, object]:
    package, path = {
        "chat": ("@ai-sdk/openai-compatible", "/v1"),
        "responses": ("@ai-sdk/openai", "/v1"),
        "messages": ("@ai-sdk/anthropic", "/v1"),
    }[name.partition(":")[2]]
    models = {"tiny": {"reasoning": True, "limit": {"context": 48000, "output": 4096}}}
    provider = {"npm": package, "options": {"baseURL": url + path, "apiKey": "none"}, "models": models}
    plain = {"autoupdate": False, "share": "disabled", "permission": "allow"}
    return {**plain, "small_model": "twinax/tiny", "provider": {"twinax": provider}}


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def end(process: "subprocess.Popen[str]") -> None:
    """A program and all that it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.communicate()
