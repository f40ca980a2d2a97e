"""LiteLLM: any OpenAI-compatible server by its address."""

from __future__ import annotations

import os

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # no prices from the internet

import litellm
import openai

base_url = os.environ.get("KVFERRY_URL", "http://127.0.0.1:8000") + "/v1"
api_key = os.environ.get("KVFERRY_API_KEY", "none")
model = openai.OpenAI(base_url=base_url, api_key=api_key).models.list().data[0].id
question = "remember that the pin of the red castle is 4 2 7 1 . what is the pin of the red castle ?"
options = {
    "model": f"openai/{model}",
    "base_url": base_url,
    "api_key": api_key,
    "messages": [{"role": "user", "content": question}],
    "max_tokens": 16,
    "temperature": 0,
}
answer = litellm.completion(**options)
print("answer:", answer.choices[0].message.content)
chunks = litellm.completion(**options, stream=True)
print("streamed:", "".join(chunk.choices[0].delta.content or "" for chunk in chunks))
