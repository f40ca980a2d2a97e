"""Built-in distortion tables are the paper's Table 14."""

import pytest

from kvferry.shared.compression.rdkv.epsilon import PAPER_TABLES, WIDTHS, EpsilonTable, paper_table
from kvferry.shared.errors import ConfigurationError


def test_tables_hold_the_papers_five_models():
    assert set(PAPER_TABLES) == {"LLaMA-3.1-8B", "LLaMA-2-13B", "Mistral-7B", "Qwen2.5-72B", "Qwen3-4B"}
    assert paper_table("LLaMA-3.1-8B").keys == (0.149, 0.0062, 2.2e-5)
    assert paper_table("Qwen2.5-72B").keys == (0.296, 0.0164, 4.4e-3)
    assert paper_table("Qwen3-4B").values == (0.313, 0.0139, 4.8e-5)


@pytest.mark.parametrize("model", PAPER_TABLES)
def test_more_bits_always_distort_less(model):
    table = paper_table(model)
    for curve in (table.key_curve, table.value_curve):
        assert len(curve) == len(WIDTHS)
        assert (curve[0], curve[-1]) == (1.0, 0.0)
        assert list(curve) == sorted(curve, reverse=True)


def test_an_unknown_model_is_named_with_those_there_are():
    with pytest.raises(ConfigurationError, match=r"'gpt'.*Qwen3-4B"):
        paper_table("gpt")


@pytest.mark.parametrize("entries", [(0.1, 0.2), (0.1, float("nan"), 0.0), (0.1, -0.1, 0.0)])
def test_impossible_tables_are_refused(entries):
    with pytest.raises(ConfigurationError, match="epsilon of values"):
        EpsilonTable(keys=(0.3, 0.01, 0.0), values=entries)
