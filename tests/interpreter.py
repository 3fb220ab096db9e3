"""Triton's interpreter without the work that changes no number, which is most of its time for small kernels.

It replaces functions of `triton.language` at each call of a device function, though they are replaced already; it
computes checks of integer overflow and drops what they find; and it makes tables and types anew wherever it needs one.
Where a version of Triton has no such parts, its interpreter is left as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

_PATCH = pytest.MonkeyPatch()


def start() -> bool:
    """Whether Triton's interpreter is known, and quick from now on."""
    return _quicken(_PATCH)


@contextmanager
def plain() -> Iterator[None]:
    """As Triton has it."""
    _PATCH.undo()
    try:
        yield
    finally:
        start()


def _quicken(patch: pytest.MonkeyPatch) -> bool:
    try:
        import triton.language as tl
        from triton.runtime import interpreter

        patch_all, function, builder = (
            interpreter._patch_lang,
            interpreter.InterpretedFunction,
            interpreter.interpreter_builder,
        )
        error, type_of, options = interpreter.InterpreterError, interpreter._get_np_dtype, builder.options
        unchecked = dataclasses.replace(options, sanitize_overflow=False)
        is_builtin, blocks, tensors = tl.core.is_builtin, tl.core.block_type, tl.core.tensor
    except (ImportError, AttributeError, TypeError):
        return False

    languages: dict[Any, list[Any]] = {}

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn not in languages:
            languages[self.fn] = [v for v in self.fn.__globals__.values() if v is tl or v is tl.core]
        if any(is_builtin(lang.load) for lang in languages[self.fn]):  # not replaced yet
            patch_all(self.fn)
        fn = self.rewrite()
        try:
            return fn(*args, **kwargs)
        except Exception as e:
            raise error(repr(e)) from e

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *(getattr(s, "value", s) for s in shape)
        remembered(self, key, element_ty, shape)
        self.element_ty = element_ty

    def tensor(self: Any, handle: Any, type: Any) -> None:
        told(self, type.name, handle, type)
        self.handle, self.type, self.dtype = handle, type, type.scalar

    remembered, told = _once(blocks.__init__), _once(tensors.__init__)
    types: dict[str, Any] = {}

    def looked_up(of: Any) -> Any:
        if of.name not in types:
            types[of.name] = type_of(of)
        return types[of.name]

    patch.setattr(function, "__call__", call)
    patch.setattr(blocks, "__init__", block)
    patch.setattr(tensors, "__init__", tensor)
    patch.setattr(interpreter, "_get_np_dtype", looked_up)
    if not options.debug:  # with it, what the checks find is an error
        patch.setattr(builder, "options", unchecked)
    return True


def _once(real: Callable[..., None]) -> Callable[..., None]:
    """`real`, an __init__, for the first object of a key; others are given its attributes."""
    made: dict[Any, dict[str, Any]] = {}

    def init(self: Any, key: Any, *args: Any) -> None:
        if key not in made:
            real(self, *args)
            made[key] = dict(vars(self))
        vars(self).update(made[key])

    return init
