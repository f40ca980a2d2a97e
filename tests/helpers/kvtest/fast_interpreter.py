"""Makes Triton's interpreter faster: what it works out anew for every launch and value is kept, and what it
works out for nobody is left out.

It computes the same. Without this most of the time of tests that interpret kernels goes into looking for the
functions of `triton.language` that are to be replaced, which it does at every launch and at every call of a
function within a kernel, and into describing the shapes of tensors.
"""

from __future__ import annotations

import inspect
import math
import threading
from typing import Any


def install() -> None:
    """Replace parts of Triton's interpreter in this process, once; nothing if there is no Triton."""
    try:
        from triton.language import core, semantic
        from triton.runtime import interpreter
    except ImportError:
        return
    if interpreter._patch_builtin.__module__ == __name__:
        return
    _keep_builtins(core, interpreter)
    _keep_numpy_dtypes(core, interpreter)
    _keep_shapes(core)
    _keep_languages(interpreter)
    _leave_out_overflows(semantic)
    _leave_alone_equal_shapes(semantic)


def _keep_builtins(core: Any, interpreter: Any) -> None:
    """Search each module or class for builtins once."""
    found: dict[Any, list[tuple[str, Any, Any]]] = {}

    def replacement(member: Any, builder: Any) -> Any:
        semantic = interpreter.TritonSemantic(builder)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return member(*args, **kwargs)

        return call

    def patch(package: Any, builder: Any, scope: Any) -> None:
        if package not in found:
            found[package] = [
                (name, member, replacement(member, builder))
                for name, member in inspect.getmembers(package)
                if core.is_builtin(member)
            ]
        for name, member, new in found[package]:
            # a function within a kernel finds them replaced
            if getattr(package, name) is member:
                scope.set_attr(package, name, new)

    interpreter._patch_builtin = patch


def _keep_numpy_dtypes(core: Any, interpreter: Any) -> None:
    """Make the table of dtypes once."""
    plain, found = interpreter._get_np_dtype, {}

    def numpy_dtype(dtype: Any) -> Any:
        if isinstance(dtype, core.block_type):
            dtype = dtype.element_ty
        if isinstance(dtype, core.pointer_type):
            return plain(dtype)
        if dtype not in found:
            found[dtype] = plain(dtype)
        return found[dtype]

    interpreter._get_np_dtype = numpy_dtype


def _keep_shapes(core: Any) -> None:
    """Describe each shape once, and name types of blocks only when someone asks."""
    plain = core.block_type.__init__
    of_types: dict[tuple[int, ...], tuple[Any, int]] = {}
    of_tensors: dict[tuple[int, ...], tuple[Any, Any]] = {}
    kept: dict[int, tuple[Any, int]] = {}
    """By the id of a shape that is in the first; it stays there, so no other object gets its id."""

    def make_type(self: Any, element_ty: Any, shape: Any) -> None:
        self.element_ty = element_ty
        if id(shape) in kept:
            self.shape, self.numel = kept[id(shape)]
            return
        key = tuple([core._unwrap_if_constexpr(size) for size in shape])
        if key not in of_types:
            plain(self, element_ty, shape)
            of_types[key] = kept[id(self.shape)] = self.shape, self.numel
        self.shape, self.numel = of_types[key]

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        shape = tuple(type.shape) if type.is_block() else ()
        if shape not in of_tensors:
            sizes = [core.constexpr(size) for size in shape]
            of_tensors[shape] = core.tuple(sizes), core.constexpr(math.prod(shape))
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = of_tensors[shape]

    core.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>", lambda *_: None)
    core.block_type.__init__ = make_type
    core.tensor.__init__ = make_tensor


def _keep_languages(interpreter: Any) -> None:
    """Replace what kernels call once a launch, not again at each function that a kernel calls."""
    plain, of_functions, here = interpreter._patch_lang, {}, threading.local()

    def patch(function: Any) -> Any:
        if function not in of_functions:
            seen = [module for module in function.__globals__.values() if inspect.ismodule(module)]
            of_functions[function] = {
                id(module) for module in seen if module in (interpreter.tl, interpreter.tl.core)
            }
        before, own = getattr(here, "replaced", set()), of_functions[function]
        if own and own <= before:
            return interpreter._LangPatchScope()
        scope = plain(function)
        here.replaced, restore = before | own, scope.restore

        def restored() -> None:
            restore()
            here.replaced = before

        scope.restore = restored
        return scope

    interpreter._patch_lang = patch


def _leave_out_overflows(semantic: Any) -> None:
    """Look for overflows only where somebody is told: without debug, a kernel's asserts do nothing."""
    plain = semantic.TritonSemantic.binary_op_sanitize_overflow_impl

    def check(self: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
        if self.builder.options.debug:
            plain(self, lhs, rhs, binary_op)

    semantic.TritonSemantic.binary_op_sanitize_overflow_impl = check


def _leave_alone_equal_shapes(semantic: Any) -> None:
    """Broadcast only what has another shape; equal ones are the same object (`_keep_shapes`)."""
    plain = semantic.TritonSemantic.broadcast_impl_value

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if left.is_block() and right.is_block() and left.shape is right.shape:
            return lhs, rhs
        return plain(self, lhs, rhs)

    semantic.TritonSemantic.broadcast_impl_value = broadcast
