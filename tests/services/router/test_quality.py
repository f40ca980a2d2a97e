"""A wanted quality becomes a retention by the model's curve and the prompt, and is reported."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from kvferry.shared.compression.curves import Calibration, ModelCurves, QualityCurve
from kvferry.tools.evaluation.fitting import save_curves

METHODS = ("snapkv", "rocketkv", "rdkv")
EASY = " ".join(["the red castle is old ."] * 20)
HARD = (
    "the pin of the red castle is 4 2 7 1 . every evening the sailor walked near the mill and slept . "
    "alice painted the old bridge because a wolf arrived quickly . there was some bread behind the gate ."
)


def write_curves(folder: Path, fingerprint: str = "feedc0de") -> Path:
    curve = QualityCurve(calibration=Calibration(alpha=4.0, beta=-12.0), lowest_nll=0.0, highest_nll=9.0)
    save_curves(
        folder,
        ModelCurves(
            model="demo",
            fingerprints={"float32": fingerprint},
            curves=dict.fromkeys(METHODS, curve),
            origin={},
        ),
    )
    return folder


def body(prompt: str, **compression: object) -> dict[str, Any]:
    return {"model": "demo", "prompt": prompt, "max_tokens": 4, "kv_compression": compression}


async def test_quality_picks_the_prompts_retention_for_both_workers_and_reports_it(
    start_stack: Callable[..., Awaitable[Any]], tmp_path: Path
) -> None:
    stack = await start_stack(calibration=str(write_curves(tmp_path)))
    seen = []
    for prompt in (EASY, HARD):
        reply = await stack.http.post("/v1/completions", json=body(prompt, method="snapkv", quality=0.9))
        assert reply.status_code == 200, reply.text
        kv = reply.json()["kv"]
        assert kv["quality"] == 0.9
        asked = [stack.prefill[0].requests[-1].ticket.plan.plan, stack.decode[0].requests[-1].plan]
        assert [plan.budget.retention for plan in asked] == [kv["retention"]] * 2
        assert asked[0].method == "snapkv"
        seen.append(kv["retention"])
    easy, hard = seen
    assert 0 < easy < hard < 1


async def test_a_higher_quality_keeps_more_and_1_keeps_everything(
    start_stack: Callable[..., Awaitable[Any]], tmp_path: Path
) -> None:
    stack = await start_stack(calibration=str(write_curves(tmp_path)))
    retentions = []
    for quality in (0.5, 0.95, 1.0):
        reply = await stack.http.post("/v1/completions", json=body(HARD, quality=quality))
        retentions.append(reply.json()["kv"]["retention"])
    assert retentions[0] < retentions[1] < retentions[2] == 1.0


async def test_streams_report_the_choice_too(
    start_stack: Callable[..., Awaitable[Any]], tmp_path: Path
) -> None:
    stack = await start_stack(calibration=str(write_curves(tmp_path)))
    request = {**body(HARD, method="rocketkv", quality=0.9), "stream": True}
    reply = await stack.http.post("/v1/completions", json=request)
    assert '"quality":0.9' in reply.text.replace(" ", "")
    assert '"retention":' in reply.text


async def test_other_requests_report_no_quality(stack: Any) -> None:
    reply = await stack.http.post("/v1/completions", json=body(HARD, method="snapkv", retention=0.5))
    assert reply.status_code == 200
    assert not {"quality", "retention"} & reply.json()["kv"].keys()


async def test_without_a_curve_the_answer_is_400_and_says_what_to_run(
    start_stack: Callable[..., Awaitable[Any]], tmp_path: Path
) -> None:
    stack = await start_stack(calibration=str(write_curves(tmp_path)))
    reply = await stack.http.post("/v1/completions", json=body(HARD, method="h2o", quality=0.9))
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == "kv_compression.quality"
    assert "kvferry calibrate --model MODEL --methods h2o" in error["message"]
    assert "(calibrated: rdkv, rocketkv, snapkv)" in error["message"]
    reply = await stack.http.post("/v1/completions", json=body(HARD, method="full", quality=0.9))
    assert "which takes no budget" in reply.json()["error"]["message"]


async def test_a_curve_that_is_measured_while_the_router_runs_is_found(
    start_stack: Callable[..., Awaitable[Any]], tmp_path: Path
) -> None:
    stack = await start_stack(calibration=str(tmp_path))
    request = body(HARD, method="snapkv", quality=0.9)
    assert (await stack.http.post("/v1/completions", json=request)).status_code == 400
    write_curves(tmp_path)
    reply = await stack.http.post("/v1/completions", json=request)
    assert reply.status_code == 200, reply.text
    assert reply.json()["kv"]["quality"] == 0.9


async def test_curves_are_of_the_methods_own_parameters(
    start_stack: Callable[..., Awaitable[Any]], tmp_path: Path
) -> None:
    stack = await start_stack(calibration=str(write_curves(tmp_path)))
    request = body(HARD, method="snapkv", quality=0.9, parameters={"window": 16})
    reply = await stack.http.post("/v1/completions", json=request)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "kv_compression.quality"


async def test_another_models_curves_are_not_used(
    start_stack: Callable[..., Awaitable[Any]], tmp_path: Path
) -> None:
    stack = await start_stack(calibration=str(write_curves(tmp_path, fingerprint="0badf00d")))
    reply = await stack.http.post("/v1/completions", json=body(HARD, method="snapkv", quality=0.9))
    assert reply.status_code == 400
    assert "(calibrated: none)" in reply.json()["error"]["message"]
