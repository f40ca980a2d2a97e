"""`kvferry launch NAME`: the configuration with which a coding agent or chat program uses this server.

Each program's file and form are those of its own documentation; `docs/agents.md` says what works with it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from kvferry.shared.errors import ConfigurationError

_TIMEOUT_S = 60.0
_ANY_KEY = "none"
"""Of a server without keys; programs refuse an empty one."""
_MAX_ANSWER = 8192
"""What a program is told that an answer may have: it keeps so much of the context free."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """The server as programs are told of it.

    Attributes: url: without a path; window: tokens of the model's context.
    """

    url: str
    key: str
    model: str
    window: int

    @property
    def base(self) -> str:
        return f"{self.url}/v1"

    @property
    def answer(self) -> int:
        return min(_MAX_ANSWER, self.window // 4)


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program's configuration.

    Attributes:
        path: of the file, in the home or current folder; "" where a command with variables is all.
        text: of the file.
        start: the command that starts it.
    """

    title: str
    path: Callable[[Path], Path] | None
    text: Callable[[Served], str]
    start: Callable[[Served], str]


def launch(name: str, *, url: str = "http://127.0.0.1:8000", api_key: str = "", write: bool = False) -> int:
    """Print the configuration with which an agent or chat program uses a router, or write it.

    Args:
        name: claude, codex, opencode, aider, continue, cline, open-webui, llm or litellm.
        url: address of the router.
        api_key: API key that the program is to send, if the router wants one.
        write: write it to the program's file, which must not exist, in place of printing it.
    """
    if name not in PROGRAMS:
        raise ConfigurationError(f"there is no program {name!r}; there are {', '.join(PROGRAMS)}")
    program, served = PROGRAMS[name], _ask(url.rstrip("/").removesuffix("/v1"), api_key)
    path = program.path(Path.home()) if program.path is not None else None
    text = program.text(served)
    if path is None:
        sys.stdout.write(text)
    elif not write:
        sys.stdout.write(f"# {path}\n{text}\n# then: {program.start(served)}\n")
    else:
        if path.exists():
            raise ConfigurationError(f"{path} exists; add to it what kvferry launch {name} prints")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        path.chmod(0o600)  # it has the key
        sys.stdout.write(f"wrote {path}\nstart {program.title} with: {program.start(served)}\n")
    return 0


def _ask(url: str, api_key: str) -> Served:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        reply = httpx.get(f"{url}/v1/models", headers=headers, timeout=_TIMEOUT_S)
        model = reply.raise_for_status().json()["data"][0]
    except (httpx.HTTPError, ValueError, LookupError) as error:
        raise ConfigurationError(f"{url} does not say which model it serves: {error}") from None
    return Served(
        url=url, key=api_key or _ANY_KEY, model=str(model["id"]), window=int(model["max_model_len"])
    )


def _json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


def _claude(served: Served) -> str:
    variables = {
        "ANTHROPIC_BASE_URL": served.url,
        "ANTHROPIC_AUTH_TOKEN": served.key,
        "ANTHROPIC_MODEL": served.model,
        "ANTHROPIC_DEFAULT_OPUS_MODEL": served.model,
        "ANTHROPIC_DEFAULT_SONNET_MODEL": served.model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": served.model,
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(served.answer),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        # A line of the prompt that differs in each session; without it, KV is found across sessions.
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
    }
    return _json({"env": variables})


def _codex(served: Served) -> str:
    return f"""model = "{served.model}"
model_provider = "kvferry"
model_context_window = {served.window}

[model_providers.kvferry]
name = "kvferry"
base_url = "{served.base}"
wire_api = "responses"
env_key = "KVFERRY_API_KEY"
"""


def _opencode(served: Served) -> str:
    models = {
        served.model: {"name": served.model, "limit": {"context": served.window, "output": served.answer}}
    }
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "kvferry",
        "options": {"baseURL": served.base, "apiKey": served.key},
        "models": models,
    }
    return _json(
        {
            "$schema": "https://opencode.ai/config.json",
            "provider": {"kvferry": provider},
            "model": f"kvferry/{served.model}",
            "small_model": f"kvferry/{served.model}",
        }
    )


def _aider(served: Served) -> str:
    return f"""model: openai/{served.model}
weak-model: openai/{served.model}
openai-api-base: {served.base}
openai-api-key: {served.key}
show-model-warnings: false
"""


def _continue(served: Served) -> str:
    return f"""name: kvferry
version: 1.0.0
schema: v1
models:
  - name: {served.model}
    provider: openai
    model: {served.model}
    apiBase: {served.base}
    apiKey: {served.key}
    roles: [chat, edit, apply]
    defaultCompletionOptions:
      contextLength: {served.window}
      maxTokens: {served.answer}
"""


def _cline(served: Served) -> str:
    return f"""In Cline's settings choose the provider "OpenAI Compatible", with
  Base URL  {served.base}
  API Key   {served.key}
  Model ID  {served.model}
  Context   {served.window} tokens
"""


def _open_webui(served: Served) -> str:
    return f"""docker run -d -p 3000:8080 --add-host=host.docker.internal:host-gateway \\
  -e OPENAI_API_BASE_URL={served.base.replace("127.0.0.1", "host.docker.internal")} \\
  -e OPENAI_API_KEY={served.key} \\
  -v open-webui:/app/backend/data ghcr.io/open-webui/open-webui:main
"""


def _llm(served: Served) -> str:
    return f"""- model_id: kvferry
  model_name: {served.model}
  api_base: {served.base}
  api_key_name: kvferry
  supports_tools: true
  supports_schema: true
"""


def _litellm(served: Served) -> str:
    return f"""model_list:
  - model_name: {served.model}
    litellm_params:
      model: openai/{served.model}
      api_base: {served.base}
      api_key: {served.key}
"""


def _under(*names: str) -> Callable[[Path], Path]:
    return lambda home: home.joinpath(*names)


def _here(name: str) -> Callable[[Path], Path]:
    return lambda home: Path(name)


PROGRAMS = {
    "claude": Program(
        title="Claude Code",
        path=_under(".claude", "settings.json"),
        text=_claude,
        start=lambda served: "claude",
    ),
    "codex": Program(
        title="Codex",
        path=_under(".codex", "config.toml"),
        text=_codex,
        start=lambda served: f"KVFERRY_API_KEY={served.key} codex",
    ),
    "opencode": Program(
        title="opencode", path=_here("opencode.json"), text=_opencode, start=lambda served: "opencode"
    ),
    "aider": Program(title="aider", path=_here(".aider.conf.yml"), text=_aider, start=lambda served: "aider"),
    "continue": Program(
        title="Continue",
        path=_under(".continue", "config.yaml"),
        text=_continue,
        start=lambda served: "the editor, or cn",
    ),
    "cline": Program(title="Cline", path=None, text=_cline, start=lambda served: ""),
    "open-webui": Program(title="Open WebUI", path=None, text=_open_webui, start=lambda served: ""),
    "llm": Program(
        title="llm",
        path=_under(".config", "io.datasette.llm", "extra-openai-models.yaml"),
        text=_llm,
        start=lambda served: f"llm keys set kvferry --value {served.key}; llm -m kvferry 'hello'",
    ),
    "litellm": Program(
        title="LiteLLM",
        path=_here("litellm.yaml"),
        text=_litellm,
        start=lambda served: "litellm --config litellm.yaml",
    ),
}
