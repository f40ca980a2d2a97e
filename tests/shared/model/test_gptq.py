"""GPTQ and AWQ checkpoints are loaded as they are, where gptqmodel is installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from kvtest.gptq_models import make_and_load

MISSING = [name for name in ("gptqmodel", "optimum", "accelerate") if find_spec(name) is None]


@pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}")
@pytest.mark.timeout(900)  # gptqmodel compiles its kernels
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_tokens_are_those_of_generate_and_weights_stay_quantised(method: str, tmp_path: Path) -> None:
    loaded = make_and_load(method, tmp_path)
    assert loaded.weights == f"{method} int4"
    assert len(set(loaded.expected)) > 20
    assert loaded.tokens == loaded.expected
    assert loaded.stored_bytes < 0.7 * loaded.num_weights, "of float32 weights it would be 4"
