"""What plots show: one style per method, intervals within 0 to 100 %, the legend outside the panels."""

from __future__ import annotations

import pytest
from kvtest.methods import PRESETS

from kvferry.tools.evaluation.plots import STYLES, accuracy_figure, style
from kvferry.tools.evaluation.summary import Cell, Scores

pytest.importorskip("matplotlib")


def cell(task: str, method: str, accuracy: float, share: float) -> Cell:
    scores = Scores(
        accuracy=accuracy, half_width=0.2, contained=1.0, nll=0.0, agreement=1.0,
        accuracy_by_turn=(accuracy,),
        kept_bytes=1.0, kept_share=share, read_bytes=1.0, read_share=share,
    )  # fmt: skip
    return Cell(
        task=task, num_tokens=512, depth=None, setting="aware", method=method, budget=f"{share}",
        num_examples=4, scores=scores,
    )  # fmt: skip


def test_every_method_has_a_style_of_its_own() -> None:
    assert set(STYLES) == set(PRESETS)
    assert len(set(STYLES.values())) == len(STYLES)


def test_a_name_outside_the_table_has_the_same_style_in_every_process() -> None:
    assert style("snapkv:window=16") == ("maroon", "D")
    assert style("snapkv:window=16") not in STYLES.values()
    assert len({style(f"method-{i}") for i in range(40)}) > 20


def test_methods_look_the_same_in_every_panel_and_intervals_end_at_0_and_100() -> None:
    cells = [
        cell("single_needle", "snapkv", 1.0, 0.1),
        cell("single_needle", "snapkv", 0.9, 0.05),
        cell("single_needle", "random", 0.0, 0.1),
        cell("multi_key_8", "random", 0.1, 0.1),
        cell("multi_key_8", "snapkv", 0.5, 0.1),
    ]
    figure = accuracy_figure(cells, "title", "kept")
    figure.canvas.draw()
    seen: dict[str, set[str]] = {}
    for panel in figure.axes:
        assert panel.get_legend() is None
        for container in panel.containers:
            line, _, bars = container
            seen.setdefault(line.get_marker(), set()).add(line.get_color())
            for start, end in (segment[:, 1] for segment in bars[0].get_segments()):
                assert 0 <= start <= end <= 100
    assert seen == {"o": {"tab:blue"}, "x": {"tab:gray"}}
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["snapkv", "random"]
    assert legend.get_window_extent().x0 >= figure.axes[-1].get_window_extent().x1


def test_a_figure_without_measured_cells_has_no_legend() -> None:
    unmet = Cell(
        task="single_needle", num_tokens=512, depth=None, setting="aware", method="rocketkv", budget="1%",
        num_examples=4, scores=None,
    )  # fmt: skip
    assert accuracy_figure([unmet], "title", "kept").legends == []
