"""An agent's loop: the model calls a tool, gets its result, and goes on, as turns of one session.

Only what is new is sent, and only what is new is computed.
"""

from __future__ import annotations

import json
import os
import secrets
from typing import Any

import openai

NUM_TURNS = 3
client = openai.OpenAI(
    base_url=os.environ.get("KVFERRY_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("KVFERRY_API_KEY", "none"),
)
model = client.models.list().data[0].id
tools: Any = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Look up the population of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]


def look_up(city: str) -> str:
    return {"Paris": "2.1 million", "Rome": "2.7 million"}[city]


session = {"session_id": f"agent-{secrets.token_hex(4)}", "session_mode": "append"}
new: list[Any] = [{"role": "user", "content": "Which is larger, Paris or Rome? Look both up."}]
for turn in range(NUM_TURNS):
    is_last = turn == NUM_TURNS - 1
    answer = client.chat.completions.create(
        model=model,
        messages=new,
        tools=tools,
        tool_choice="none" if is_last else "required",
        parallel_tool_calls=False,
        max_tokens=24 if is_last else 200,
        extra_body=session,
    )
    message, usage = answer.choices[0].message, answer.usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    print(f"turn {turn}: {usage.prompt_tokens} tokens, {usage.prompt_tokens_details.cached_tokens} cached")
    new = []
    for call in message.tool_calls or ():
        assert call.type == "function"
        result = look_up(**json.loads(call.function.arguments))
        print(f"  {call.function.name}({call.function.arguments}) = {result}")
        new.append({"role": "tool", "tool_call_id": call.id, "content": result})
    if not new:
        print("  answer:", message.content)
        break
