"""LangChain: a conversation, and a tool that the model must call."""

from __future__ import annotations

import os

import openai
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

base_url = os.environ.get("KVFERRY_URL", "http://127.0.0.1:8000") + "/v1"
api_key = os.environ.get("KVFERRY_API_KEY", "none")
model = openai.OpenAI(base_url=base_url, api_key=api_key).models.list().data[0].id


@tool
def count_words(count: int) -> str:
    """Say how many words there are."""
    return f"{count} words"


chat = ChatOpenAI(model=model, base_url=base_url, api_key=lambda: api_key, max_tokens=200, temperature=0)
messages = [HumanMessage("how many words are there?")]
answer = chat.bind_tools([count_words], tool_choice="required", parallel_tool_calls=False).invoke(messages)
print("calls:", [(call["name"], call["args"]) for call in answer.tool_calls])
results = [
    ToolMessage(count_words.invoke(call["args"]), tool_call_id=call["id"]) for call in answer.tool_calls
]
print("answer:", chat.bind(max_tokens=16).invoke([*messages, answer, *results]).content)
print("streamed:", "".join(str(chunk.content) for chunk in chat.bind(max_tokens=16).stream("hello")))
