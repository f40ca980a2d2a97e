"""A device that counts what a GPU would be asked: launches, copies from the host, and waits for results.

A tensor on it wraps one on the CPU, so code runs and gives its results; it says that it is on torch's meta
device, which has no data of its own. Triton kernels run in the interpreter, on what is wrapped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from triton.runtime.interpreter import InterpretedFunction

DEVICE = torch.device("meta")
_FREE = (
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "new_empty_strided",
    "_reshape_alias",
    "detach",
    "lift_fresh",
)
"""Operators that allocate or make a view, beside those whose schema says that they do."""
READS = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique2",
    "bincount",
    "is_nonzero",
    "equal",
    "item",
)
"""Operators after which the host waits: for a value, or for the size of a result."""


class CountedTensor(Tensor):
    """A tensor on the counted device. Attributes: inner: what it wraps."""

    inner: Tensor

    @staticmethod
    def __new__(cls, real: Tensor) -> CountedTensor:
        made: CountedTensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            real.shape,
            strides=real.stride(),
            storage_offset=real.storage_offset(),
            dtype=real.dtype,
            device=DEVICE,
        )
        made.inner = real
        return made

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{function} of a counted tensor outside its counting")


class _Constants(TorchFunctionMode):
    """Makes `torch.tensor(..., device=DEVICE)` a tensor on the host and a copy, as it is on a GPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.tensor and kwargs.get("device") == DEVICE:
            return function(*args, **{**kwargs, "device": "cpu"}).to(DEVICE)
        return function(*args, **kwargs)


class Counting(TorchDispatchMode):
    """Counts, while it is active.

    Attributes:
        launches: operators and Triton kernels that start a kernel or a copy on the device, by name.
        reads: operators after which the host waits for the device, by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.reads: Counter[str] = Counter()

    def __enter__(self) -> Counting:
        self._constants = _Constants()
        self._constants.__enter__()
        super().__enter__()
        self._run = InterpretedFunction.run

        def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            self.launches[kernel.fn.__name__] += 1
            return self._run(kernel, *(_inner(arg) for arg in args), **kwargs)

        InterpretedFunction.run = run
        return self

    def __exit__(self, *error: Any) -> None:
        InterpretedFunction.run = self._run
        super().__exit__(*error)
        self._constants.__exit__(*error)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        wrappers: dict[int, CountedTensor] = {}

        def unwrap(value: Any) -> Any:
            if isinstance(value, CountedTensor):
                wrappers[id(value.inner)] = value
                return value.inner
            return value

        name = function._schema.name.removeprefix("aten::")
        args, plain = tree_map(unwrap, args), tree_map(unwrap, kwargs)
        target = kwargs.get("device")
        if target == DEVICE:
            plain["device"] = torch.device("cpu")
        on_device = bool(wrappers) if target is None else target == DEVICE
        to_host = bool(wrappers) and target is not None and target != DEVICE
        if name == "copy_" and args[0] is not None:
            on_device = id(args[0]) in wrappers
            to_host = bool(wrappers) and not on_device
        if name == "_to_copy" and target is not None and not wrappers and target == DEVICE:
            name = "host_to_device"
        if to_host or (wrappers and (name in READS or _selects_by_mask(function, args))):
            self.reads[name] += 1
        if (wrappers or on_device) and name not in _FREE and not _is_view(function):
            self.launches[name] += 1
        result = function(*args, **plain)
        if name in ("_local_scalar_dense", "item", "equal", "is_nonzero"):
            return result

        def wrap(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if id(value) in wrappers:
                return wrappers[id(value)]
            return CountedTensor(value) if on_device else value

        return tree_map(wrap, result)


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, CountedTensor) else value


def _is_view(function: Any) -> bool:
    return bool(function.is_view)


def _selects_by_mask(function: Any, args: Sequence[Any]) -> bool:
    if function._schema.name not in ("aten::index", "aten::index_put", "aten::index_put_"):
        return False
    return any(isinstance(i, Tensor) and i.dtype == torch.bool for i in args[1])


def on_device(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Copies of tensors on the counted device."""
    return tuple(CountedTensor(tensor.clone()) for tensor in tensors)


def copied(tensor: Tensor) -> Tensor:
    """A copy on the host of a tensor that may be on the counted device."""
    return (tensor.inner if isinstance(tensor, CountedTensor) else tensor).clone()
