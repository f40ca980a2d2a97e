"""What the evaluation's tests share: the demo model, loaded once a module."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.shared.model.bridge import TransformersModel
from kvferry.shared.model.loading import load_model
from kvferry.shared.model.tokenizer import ChatTokenizer


@pytest.fixture(scope="module")
def model(demo_model_dir: Path) -> TransformersModel:
    return load_model(demo_model_dir, name="demo", device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def tokenizer(demo_model_dir: Path) -> ChatTokenizer:
    return ChatTokenizer.load(demo_model_dir)
