"""Small talk: what people say without a document, and the one sensible reply to each.

Each kind has one reply, so that a reply is right or wrong. `HELD_OUT_PROMPTS` are for evaluation only.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SmallTalk:
    """Several wordings of one message, and its reply."""

    prompts: tuple[str, ...]
    held_out_prompts: tuple[str, ...]
    reply: str


SMALL_TALK = (
    SmallTalk(
        prompts=(
            "hello",
            "hello .",
            "hello !",
            "hi",
            "hi !",
            "hi .",
            "hey",
            "hey !",
            "hello you",
            "hi there",
            "hi there !",
            "good morning",
            "good morning !",
            "good evening",
            "good afternoon",
            "hello assistant",
        ),
        held_out_prompts=("hello there", "hey there !", "good evening !", "hello , assistant !"),
        reply="hello ! how can i help you ?",
    ),
    SmallTalk(
        prompts=(
            "how are you ?",
            "how are you",
            "how are you today ?",
            "hello , how are you ?",
            "hi , how are you ?",
            "hi ! how are you doing ?",
            "how are you doing ?",
            "are you well ?",
        ),
        held_out_prompts=("hey , how are you ?", "how are you doing today ?"),
        reply="i am fine , thank you . how can i help you ?",
    ),
    SmallTalk(
        prompts=(
            "thanks",
            "thanks !",
            "thank you",
            "thank you .",
            "thank you !",
            "ok thanks",
            "thank you very much .",
            "great , thank you !",
            "thanks , that was good .",
        ),
        held_out_prompts=("thank you very much !", "ok , thanks !", "great , thanks ."),
        reply="you are welcome .",
    ),
    SmallTalk(
        prompts=(
            "who are you ?",
            "what are you ?",
            "what is your name ?",
            "tell me your name .",
            "do you have a name ?",
            "please tell me who you are .",
        ),
        held_out_prompts=("who are you", "please tell me your name ."),
        reply="i am a small assistant . i read documents and answer questions .",
    ),
    SmallTalk(
        prompts=(
            "what can you do ?",
            "what can i ask you ?",
            "how can you help me ?",
            "can you help me ?",
            "help",
            "help me please .",
            "i need help .",
            "what do you do ?",
        ),
        held_out_prompts=("can you help me please ?", "help me"),
        reply="give me a document and ask me what you need to know .",
    ),
    SmallTalk(
        prompts=(
            "goodbye",
            "goodbye !",
            "bye",
            "bye !",
            "see you later",
            "see you later !",
            "good night",
            "bye bye",
        ),
        held_out_prompts=("goodbye .", "ok , bye !"),
        reply="goodbye ! see you later .",
    ),
    SmallTalk(
        prompts=(
            "nice to meet you",
            "nice to meet you .",
            "it is nice to meet you !",
            "hello , nice to meet you .",
        ),
        held_out_prompts=("hi , nice to meet you !",),
        reply="nice to meet you too .",
    ),
    SmallTalk(
        prompts=(
            "how is the weather ?",
            "what do you think ?",
            "what do you like ?",
            "do you like music ?",
            "who made you ?",
            "do you like me ?",
            "tell me more .",
            "what is the weather like today ?",
            "are you happy ?",
            "do you like coffee ?",
            "why ?",
            "what is that ?",
        ),
        held_out_prompts=("how is the weather today ?", "do you like tea ?"),
        reply="i do not know .",
    ),
)

DOCUMENT_PROMPTS = (
    "please read this document .",
    "read this text .",
    "here is a document .",
    "remember this .",
    "",
)
"""Said behind a document that comes without a question."""

DOCUMENT_REPLY = "ok . what do you need to know ?"
