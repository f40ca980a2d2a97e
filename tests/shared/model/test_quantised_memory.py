"""Quantised weights are loaded without a copy of the model in full precision, by what a process holds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from kvtest.load_memory import measure_load
from kvtest.quantised_models import ONE_OF_EACH_LIBRARY, save_quantised
from kvtest.tiny_models import make_config

for name in ("accelerate", "bitsandbytes", "compressed_tensors", "torchao"):
    pytest.importorskip(name, reason="needs kvferry[quant]")


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
@pytest.mark.parametrize("kind", ONE_OF_EACH_LIBRARY)
def test_loading_never_holds_the_model_in_full_precision(kind: str, tmp_path: Path) -> None:
    """One kind of each library; `benchmarks/quantised_load.py` measures all."""
    large = make_config("llama", hidden_size=768, intermediate_size=2048, num_hidden_layers=6)
    folder = save_quantised(kind, tmp_path / "large", large)
    memory = measure_load(folder, warm_up=save_quantised(kind, tmp_path / "tiny"))
    assert memory.full_precision > 100 << 20, "a copy would be seen"
    assert memory.bound < memory.stored + memory.full_precision, (
        "what a whole copy would take beside the mapped file"
    )
    assert memory.peak < memory.bound
