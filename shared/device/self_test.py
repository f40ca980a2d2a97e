"""A worker's self-test: before it serves, every kernel that its model can use runs against torch.

    parent: starts a child ──► reads its reports with a time limit ──► quarantines what failed
    child:  begin case ──► launched (compiled and queued) ──► done, with a problem or none ──► next case

The cases run in a process of their own, because a kernel that hangs or reads an illegal address takes its
process's device with it. After such an end another child goes on with the next op. What the child compiles is
in Triton's cache when the worker needs it. If no child can use the device at all, the cases run in the
worker, without a limit. The consequences of a quarantine are decided elsewhere (`kernels/quarantine.py`).
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import structlog
import torch

from kvferry.kernels import dispatch
from kvferry.kernels.cases import op_checks
from kvferry.kernels.decode_batch import BatchShape
from kvferry.kernels.quarantine import Reason, is_lost, quarantine, reason_of
from kvferry.shared.device.kernel_paths import OPS, Role
from kvferry.shared.model.spec import TORCH_DTYPES, DTypeName, Heads, LayerSpec, ModelSpec

_log = structlog.get_logger(__name__)

COMMAND = (sys.executable, "-P", "-m", "kvferry.shared.device.self_test")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long a child may take to import torch and use the device, and a case to compile (in Triton's
    interpreter it also runs in this time) and to run once it is launched."""

    start_s: float = 180.0
    compile_s: float = 300.0
    run_s: float = 5.0


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One op's result. Attributes: reason: None if its kernel is right; num_cases: cases run."""

    op: str
    reason: Reason | None
    detail: str
    num_cases: int
    seconds: float


def model_shapes(spec: ModelSpec, device: torch.device) -> list[BatchShape]:
    """Return the shapes that a model's kernels have: one for all layers with equal heads."""
    by_heads: dict[Heads, list[LayerSpec]] = {}
    for layer in spec.row_layers:
        by_heads.setdefault(spec.heads(layer), []).append(spec.layer(layer))
    return [
        BatchShape(
            num_layers=1,
            num_slots=1,
            num_kv_heads=heads.num_kv_heads,
            group_size=heads.group_size,
            head_dim=heads.head_dim,
            dtype=TORCH_DTYPES[spec.dtype],
            device=device,
            has_windows=any(each.window for each in layers),
            has_plain_softmax=all(each.has_plain_softmax for each in layers),
        )
        for heads, layers in by_heads.items()
    ]


def ops_with_kernels(role: Role, shape: BatchShape) -> list[str]:
    """Return the role's ops that would take a Triton kernel for this shape."""
    problem = dispatch.shape_problem(shape.dtype, shape.group_size, shape.head_dim, shape.device)
    if problem is not None:
        return []
    kernels = ("triton", "interpreter")
    return [op for op in OPS[role] if dispatch.planned_path(op, shape.device) in kernels]


def self_test(
    role: Role,
    shape: BatchShape,
    *,
    limits: Limits | None = None,
    command: Sequence[str] = COMMAND,
    progress: Callable[[str], None] = lambda op: None,
) -> list[Finding]:
    """Test the role's kernels and quarantine those that fail.

    Args:
        command: starts the child; it gets a JSON argument.
        progress: called with each op before it is tested.
    Returns: a finding for each tested op; none where torch runs everything.
    """
    ops = ops_with_kernels(role, shape)
    findings = []
    for finding in _findings(ops, shape, limits or Limits(), command, progress) if ops else ():
        findings.append(finding)
        _log.info(
            "kernel tested",
            op=finding.op,
            result=finding.reason or "right",
            cases=finding.num_cases,
            seconds=round(finding.seconds, 2),
            progress=f"{len(findings)} of {len(ops)}",
        )
        if finding.reason is not None:
            quarantine(finding.op, finding.reason, finding.detail)
    return findings


def _findings(
    ops: list[str], shape: BatchShape, limits: Limits, command: Sequence[str], progress: Callable[[str], None]
) -> Iterator[Finding]:
    left = list(ops)
    while left:
        child = _Child(left, shape, command)
        try:
            if not child.starts(limits.start_s):
                _log.warning("the self-test has no process of its own; it runs without time limits")
                for op in left:
                    progress(op)
                    yield run_op(op, shape)
                return
            while left:
                progress(left[0])
                finding = child.read_op(left[0], limits)
                yield finding
                del left[0]
                if child.has_ended:
                    break
        finally:
            child.end()


class _Child:
    """A child process and its reports."""

    def __init__(self, ops: Sequence[str], shape: BatchShape, command: Sequence[str]) -> None:
        names = {"dtype": str(shape.dtype).removeprefix("torch."), "device": str(shape.device)}
        task = {
            "ops": list(ops),
            "shape": vars(shape) | names,
            "mode": dispatch.mode(),
            "num_threads": torch.get_num_threads(),
        }
        self.has_ended = False
        self._process = subprocess.Popen(
            [*command, json.dumps(task)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._reports: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, name="kvferry-self-test", daemon=True).start()

    def starts(self, timeout_s: float) -> bool:
        """Wait for the start; return whether the child can use the device."""
        report = self._next(timeout_s)
        return report is not None and report["phase"] == "ready"

    def read_op(self, op: str, limits: Limits) -> Finding:
        """Read the result of one op. The child has ended after a hang or a crash."""
        begin_s, num_cases, name, limit_s = time.monotonic(), 0, "", limits.compile_s
        phase = "begin"

        def found(reason: Reason | None, detail: str) -> Finding:
            seconds = time.monotonic() - begin_s
            return Finding(op=op, reason=reason, detail=detail, num_cases=num_cases, seconds=seconds)

        while True:
            report = self._next(limit_s)
            if report is None:
                self.has_ended = True
                code = self._process.poll()
                if code is None:
                    what = "compile" if phase == "begin" else "run"
                    return found("hang", f"{name}: it did not {what} within {limit_s:g} s")
                return found("crash", f"{name}: the process that tested it ended with code {code}")
            phase = report["phase"]
            if phase == "end":
                self.has_ended = report["lost"]
                return found(report["reason"], report["detail"])
            name = report["name"]
            limit_s = limits.run_s if phase == "launched" else limits.compile_s
            num_cases += phase == "begin"

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()

    def _next(self, timeout_s: float) -> dict[str, Any] | None:
        try:
            return self._reports.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                if line.startswith("{"):  # a library may print, too
                    self._reports.put(json.loads(line))
        self._process.wait()
        self._reports.put(None)


# ---- in the child, or in the worker if there is none -----------------------------------------------------


def run_op(op: str, shape: BatchShape, report: Callable[..., None] = lambda **fields: None) -> Finding:
    """Run an op's cases until one fails.

    Args: report: called with `phase` and `name` at the beginning of a case and once it is launched.
    """
    begin_s, num_cases = time.monotonic(), 0
    problem: tuple[Reason, str] | None = None
    with torch.inference_mode():
        for case in op_checks(op, shape):
            num_cases += 1
            report(phase="begin", name=case.name)
            try:
                result = case.launch()
                report(phase="launched", name=case.name)
                if shape.device.type == "cuda":
                    torch.cuda.synchronize(shape.device)
                problem = case.problem(result)
            except Exception as error:
                problem = reason_of(error), f"{case.name}: {type(error).__name__}: {error}"
            if problem is not None:
                break
    reason, detail = problem or (None, "")
    seconds = time.monotonic() - begin_s
    return Finding(op=op, reason=reason, detail=detail, num_cases=num_cases, seconds=seconds)


def _end_with_parent() -> None:
    """End when the worker is killed, which closes the pipe: a child that hangs must not outlive it."""
    os.read(0, 1)  # without a lock that would be held when the process ends
    os._exit(1)


def _load_libraries(device: torch.device) -> None:
    """Use once the libraries that the references use: CUDA loads each at its first call, which takes seconds
    from a cold disk and is no kernel's fault."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        rows = torch.eye(64, dtype=dtype, device=device)
        torch.bmm(rows[None], rows[None]).softmax(-1).sort()
    torch.linalg.cholesky(rows)
    torch.cuda.synchronize(device)


def run_child(arguments: Sequence[str]) -> int:
    """Run the child process. Args: the task, as JSON. Returns its exit code."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # libraries may print to stdout
    reports = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def report(**fields: object) -> None:
        reports.write(json.dumps(fields) + "\n")

    task = json.loads(arguments[0])
    given = task["shape"]
    assert given["dtype"] in get_args(DTypeName)
    device = torch.device(given["device"])
    shape = BatchShape(**given | {"dtype": TORCH_DTYPES[given["dtype"]], "device": device})
    torch.set_num_threads(task["num_threads"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
        _load_libraries(device)
    dispatch.configure(task["mode"], device)
    report(phase="ready")
    for op in task["ops"]:
        finding = run_op(op, shape, report)
        lost = finding.reason is not None and is_lost()
        report(phase="end", op=op, reason=finding.reason, detail=finding.detail, lost=lost)
        if lost:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(run_child(sys.argv[1:]))
