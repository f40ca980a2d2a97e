"""Options of `kvferry bench`."""

from __future__ import annotations

from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from kvferry.shared.process.config import Settings
from kvferry.shared.process.options import ACCESS, COMPRESSION, TIMEOUTS, Seconds, group

LOAD = group("Load")
ARRIVALS = group("Arrivals")
BOUNDS = group("Latency bounds")
RESULTS = group("Results")

Arrivals = Literal["closed", "poisson", "bursts", "even"]
Api = Literal["chat", "completions"]


class BenchConfig(Settings):
    """Options of `kvferry bench`."""

    url: Annotated[str, ACCESS] = Field("http://127.0.0.1:8000", description="address of the server")
    api_key: Annotated[str, ACCESS] = Field(
        "", repr=False, description="API key to send, if the server wants one"
    )
    chat_model: Annotated[str, ACCESS] = Field(
        "", description="model to ask for; empty: the first that the server lists"
    )
    beside: Annotated[str, ACCESS] = Field(
        "", description="address of another OpenAI-compatible server, which gets the same load in turn"
    )
    beside_api_key: Annotated[str, ACCESS] = Field("", repr=False, description="API key for that server")
    beside_model: Annotated[str, ACCESS] = Field(
        "", description="model to ask for there; empty: the first that it lists"
    )
    method: Annotated[str, COMPRESSION] = Field(
        "", description="compression method, where the server is a kvferry; empty: the router's default"
    )
    token_budget: Annotated[int, COMPRESSION] = Field(
        0, ge=0, description="token budget of each request, likewise; 0: the router's default"
    )
    api: Annotated[Api, LOAD] = Field("chat", description="endpoint: chat/completions or completions")
    mix: Annotated[str, LOAD] = Field(
        "512:64",
        description="comma-separated kinds of requests, PROMPT:ANSWER[@WEIGHT] in tokens; 100:16@4,4000:64@1 "
        "has four short ones for a long one",
    )
    conversations: Annotated[int, LOAD] = Field(32, ge=1, description="conversations to run")
    turns: Annotated[int, LOAD] = Field(
        1, ge=1, description="requests of each, one after another, in a session"
    )
    think_s: Annotated[Seconds, LOAD] = Field(
        0.0, ge=0, description="pause between an answer and the conversation's next request"
    )
    documents: Annotated[int, LOAD] = Field(
        0, ge=0, description="number of documents; each conversation begins with one of them"
    )
    document_tokens: Annotated[int, LOAD] = Field(1024, ge=1, description="tokens of each document")
    cancel: Annotated[float, LOAD] = Field(
        0.0, ge=0, le=1, description="share of requests that the client cancels at a random token"
    )
    ignore_eos: Annotated[bool, LOAD] = Field(
        True, description="answers have their full length (kvferry, vLLM and SGLang know the field)"
    )
    bench_tokenizer: Annotated[str, LOAD] = Field(
        "demo",
        description="folder, GGUF file or hub id of the tokenizer that prompts are made with; demo is the "
        "shipped one",
    )
    seed: Annotated[int, LOAD] = Field(0, ge=0, description="of prompts, arrivals and cancellations")
    arrivals: Annotated[Arrivals, ARRIVALS] = Field(
        "closed",
        description="closed: the next conversation begins when one ends; poisson, bursts and even begin them "
        "by the clock",
    )
    concurrency: Annotated[int, ARRIVALS] = Field(8, ge=1, description="conversations at a time; closed only")
    rate: Annotated[float, ARRIVALS] = Field(
        1.0, gt=0, description="conversations that begin in a second on average; not closed"
    )
    burst: Annotated[int, ARRIVALS] = Field(
        8, ge=1, description="conversations that begin together; bursts only"
    )
    first_token_bound_s: Annotated[Seconds, BOUNDS] = Field(
        0.0, ge=0, description="goodput counts requests whose first token came within this; 0: no bound"
    )
    per_token_bound_s: Annotated[Seconds, BOUNDS] = Field(
        0.0, ge=0, description="and whose further tokens took this on average; 0: no bound"
    )
    total_bound_s: Annotated[Seconds, BOUNDS] = Field(
        0.0, ge=0, description="and that were complete within this; 0: no bound"
    )
    bench_timeout_s: Annotated[Seconds, TIMEOUTS] = Field(
        300.0, gt=0, description="how long one request may take"
    )
    repeats: Annotated[int, RESULTS] = Field(
        1, ge=1, description="runs of the load, each with other prompts; the median run is shown"
    )
    warmup: Annotated[int, RESULTS] = Field(
        2, ge=0, description="requests of each kind before the first run, not counted"
    )
    out: Annotated[str, RESULTS] = Field(
        "", description="folder for results.json and a requests.jsonl with each request; empty: no files"
    )
    plots: Annotated[bool, RESULTS] = Field(
        False, description="also draw plots into that folder; needs matplotlib (kvferry[eval])"
    )

    @field_validator("url", "beside")
    @classmethod
    def _is_url(cls, value: str) -> str:
        if value and (not value.startswith(("http://", "https://")) or not urlsplit(value).hostname):
            raise ValueError("must be http://host:port or https://host:port")
        return value

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.api == "completions" and (self.turns > 1 or self.documents):
            raise ValueError("api is 'completions', which has no turns and no documents; it must be 'chat'")
        if self.plots and not self.out:
            raise ValueError("plots need a folder; give out")
        return self
