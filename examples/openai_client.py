"""OpenAI's client: a conversation as a session, a stream, and the Responses API."""

from __future__ import annotations

import os

import openai

client = openai.OpenAI(
    base_url=os.environ.get("KVFERRY_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("KVFERRY_API_KEY", "none"),
)
model = client.models.list().data[0].id

first = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "remember that the pin of the red castle is 4 2 7 1 ."}],
    max_tokens=16,
    temperature=0,
    extra_body={"session_id": "example", "session_mode": "replace", "kv_compression": {"method": "rocketkv"}},
)
print("first:", first.choices[0].message.content)

stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "what is the pin of the red castle ?"}],
    max_tokens=16,
    temperature=0,
    stream=True,
    extra_body={"session_id": "example"},
)
pieces = [choice.delta.content or "" for chunk in stream for choice in chunk.choices]
print("second:", "".join(pieces))

response = client.responses.create(model=model, input="tell me a story", max_output_tokens=12)
more = client.responses.create(
    model=model, input="and then ?", max_output_tokens=12, previous_response_id=response.id
)
assert more.usage is not None
print("story:", response.output_text, "|", more.output_text)
print("cached tokens:", more.usage.input_tokens_details.cached_tokens)
