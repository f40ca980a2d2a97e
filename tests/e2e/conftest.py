"""The real stack for end-to-end tests: `kvferry serve`, its services as separate processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kvtest import documents
from kvtest.stack import serving
from kvtest.text_models import THINKING, make_text_model

from kvferry.shared.model.tokenizer import ChatTokenizer


@pytest.fixture(scope="session")
def make_document() -> Callable[..., object]:
    return documents.make_document


@pytest.fixture(scope="session")
def start_stack() -> Callable[..., object]:
    """`start_stack(*options)`: a context manager that serves; see `stack.py`."""
    return serving


@pytest.fixture(scope="session")
def stack(start_stack: Callable[..., object]) -> Iterator[object]:
    """The default stack, shared by the tests of a worker."""
    with start_stack() as running:
        yield running


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """A random model that writes any text, calls tools and thinks, in one process."""
    folder = make_text_model(tmp_path_factory.mktemp("text"), template=THINKING)
    with serving("--model", str(folder), "--model-name", "text", "--in-process") as running:
        yield running


@pytest.fixture(scope="session")
def tokenizer(demo_model_dir: Path) -> ChatTokenizer:
    return ChatTokenizer.load(demo_model_dir)
