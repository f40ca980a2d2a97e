"""Questions about one document: its KV is computed once, and each question ships a compressed selection."""

from __future__ import annotations

import os

import httpx
import openai

url = os.environ.get("KVFERRY_URL", "http://127.0.0.1:8000")
key = os.environ.get("KVFERRY_API_KEY", "none")
filler = "the old sailor painted the quiet bridge . " * 60
text = (
    f"remember that the pin of the red castle is 4 2 7 1 . {filler}"
    f"remember that the pin of the blue tower is 9 0 3 5 . {filler}"
)
document = httpx.post(
    f"{url}/v1/documents",
    json={"id": "example", "text": text, "kv_compression": {"method": "rocketkv", "token_budget": 128}},
    headers={"Authorization": f"Bearer {key}"},
    timeout=600,
).raise_for_status()
print("document:", document.json()["tokens"], "tokens")

client = openai.OpenAI(base_url=f"{url}/v1", api_key=key)
model = client.models.list().data[0].id
for place in ("red castle", "blue tower"):
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": f"what is the pin of the {place} ?"}],
        max_tokens=16,
        temperature=0,
        extra_body={
            "document_ids": ["example"],
            "session_id": "example-" + place.replace(" ", "-"),
            "session_mode": "replace",
        },
    )
    kv = (answer.model_extra or {})["kv"]
    print(f"{place}: {answer.choices[0].message.content}")
    print(f"  reused {kv['reused_tokens']} tokens, shipped {kv['shipped_bytes']} of {kv['full_bytes']} bytes")
