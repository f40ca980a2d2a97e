"""A worker's kernels: an impossible choice ends its start, and the metric names every op's path."""

from __future__ import annotations

import pytest
import torch
from prometheus_client import CollectorRegistry

from kvferry.kernels import dispatch
from kvferry.kernels.dense_decode import dense_decode
from kvferry.shared.device.kernel_paths import OPS, KernelCalls, choose_kernels, kernel_paths
from kvferry.shared.errors import ConfigurationError

CPU = torch.device("cpu")


def test_triton_on_a_cpu_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ConfigurationError, match="kernels is 'triton', and the device is cpu"):
        choose_kernels("triton", CPU)


def test_every_op_belongs_to_one_role_and_a_drafts_steps_to_both() -> None:
    ops = [op for role in OPS.values() for op in role]
    drafts = ["decoder_ops", "dense_decode"]
    assert sorted(ops) == sorted([*dispatch.TRITON_OPS, *dispatch.TORCH_OPS, *drafts])
    assert sorted(set(OPS["prefill"]) & set(OPS["decode"])) == drafts


def test_the_metric_names_each_ops_path_and_counts_its_calls() -> None:
    registry = CollectorRegistry()
    registry.register(KernelCalls("decode", CPU))

    def calls(op: str, path: str) -> float | None:
        return registry.get_sample_value("kvferry_decode_kernel_calls_total", {"op": op, "path": path})

    before = calls("dense_decode", "torch") or 0
    rows = torch.randn(1, 2, 8)
    dense_decode(rows[:, :1], rows, rows, scaling=1.0)
    assert calls("dense_decode", "torch") == before + 1
    assert all(calls(op, path) is not None for op, path in kernel_paths("decode", CPU).items())
    assert calls("window_scores", "torch") is None
