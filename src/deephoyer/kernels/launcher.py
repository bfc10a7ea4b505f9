"""A kernel that is launched many times with arguments of the same types.

Triton's JIT looks at every argument of every launch to find the compiled kernel. Here that is done once, and the
kernel it found is launched from then on: all pointers handed in are to memory of our own, aligned alike,
and the whole numbers are never specialized on.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from triton.compiler import CompiledKernel


class Launcher:
    """So many programs of a kernel, with its constants; one for each device and each set of types."""

    def __init__(self, kernel: Any, programs: int, constants: Mapping[str, Any], options: Mapping[str, Any]):
        self.kernel, self.grid = kernel, (programs, 1, 1)
        self.constants, self.options = dict(constants), dict(options)
        order = inspect.signature(kernel.fn).parameters
        self.values = [self.constants[name] for name in order if name in self.constants]
        self.found: Any = None

    def __deepcopy__(self, memo: Any) -> Launcher:
        return self  # a compiled kernel can't be copied, and nothing here changes

    def __call__(self, *args: Any, foreign: bool = False) -> None:
        """`foreign` says that a tensor among the arguments is somebody else's: then the JIT must look."""
        if self.found is not None and not foreign:
            self.found(*args, *self.values)
            return
        compiled = self.kernel[self.grid](*args, **self.constants, **self.options)
        if isinstance(compiled, CompiledKernel) and not foreign:  # the interpreter has none
            self.found = compiled[self.grid]
