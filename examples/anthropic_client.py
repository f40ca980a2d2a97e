"""Anthropic's client: a message, a stream, and a prompt's tokens."""

from __future__ import annotations

import os

import anthropic

client = anthropic.Anthropic(
    base_url=os.environ.get("KVFERRY_URL", "http://127.0.0.1:8000"),
    api_key=os.environ.get("KVFERRY_API_KEY", "none"),
)
model = client.models.list().data[0].id
question: anthropic.types.MessageParam = {
    "role": "user",
    "content": "remember that the pin of the red castle is 4 2 7 1 . what is the pin of the red castle ?",
}

counted = client.messages.count_tokens(model=model, messages=[question])
print("prompt:", counted.input_tokens, "tokens")

greedy = {"temperature": 0}

message = client.messages.create(model=model, max_tokens=16, messages=[question], extra_body=greedy)
print("answer:", "".join(block.text for block in message.content if block.type == "text"))
print("because of:", message.stop_reason)

with client.messages.stream(model=model, max_tokens=16, messages=[question], extra_body=greedy) as stream:
    print("streamed:", "".join(stream.text_stream))
