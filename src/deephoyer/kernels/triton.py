"""The passes as Triton kernels: all tensors of a model in a few launches, for CUDA.

Element-wise: three launches (sums of chunks, sums of tensors, gradient); on slices four (squares of
tiles, of slices, coefficients, gradient). Weights of several types, or some whose addresses or sizes
don't allow 16-byte loads, take a launch a type more. There is no temporary as large as the weights,
no waiting for the device, and no atomics. This file launches; the device code is next to it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.compiler import CompiledKernel

from deephoyer.kernels import triton_elements, triton_slices
from deephoyer.kernels.launch_tables import ChunkTable, TileTable, chunk_table, tile_table
from deephoyer.kernels.layout import Pairs
from deephoyer.kernels.passes import DevicePlan, Passes
from deephoyer.kernels.pointer_tables import PointerTables
from deephoyer.kernels.slices import one_penalty
from deephoyer.kernels.triton_slopes import kind_of
from deephoyer.penalties import Penalty

TYPES: dict[torch.dtype | None, tl.dtype] = {
    torch.float64: tl.float64, torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16,
}  # fmt: skip
BLOCK = 4096  # elements a program has in registers at a time
HEIGHT, WIDTH = 32, 128  # the same for slices: rows and columns
LARGE = {"num_warps": 8, "enable_fp_fusion": True}
SMALL = {"num_warps": 4, "enable_fp_fusion": True}
FACE_BLOCK, FACE_DEEP = 64, 16
Make = Callable[[DevicePlan, Pairs, list[bool]], Any]


class Launcher:
    """So many programs of a kernel, with its constants; one for each device and each set of types.

    Triton's JIT looks at every argument of every launch to find the compiled kernel. Here that is done once, and the
    kernel it found is launched from then on: all pointers handed in are to memory of our own, aligned alike,
    and the whole numbers are never specialized on.
    """

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


@dataclass(eq=False)
class ElementWork:
    """Launches over chunks: the sums of each, the sums of each tensor, the gradient."""

    table: ChunkTable
    sums: list[tuple[int, Launcher]]  # with the first chunk of each
    totals: Launcher
    adds: list[tuple[int, Launcher]]


@dataclass(eq=False)
class SliceWork:
    """Launches over tiles: squares, squares of each slice, coefficients (None: in plain PyTorch), the gradient."""

    table: TileTable
    squares: list[tuple[int, Launcher]]
    faces: Launcher | None
    coefficients: Launcher | None
    adds: list[tuple[int, Launcher]]


@dataclass(eq=False)
class LaunchState:
    """What launches need at every step: for each kind of work the tensors, the strengths, and where all was last.

    A strength has one tensor for each device and type, and a plan is for one of each: so the tensors stay the same.
    """

    pointers: PointerTables
    one: Tensor
    at: dict[str, list[int]]
    scales: dict[str, list[Tensor]]
    work: dict[tuple[str, tuple[bool, ...]], Any] = field(default_factory=dict)
    last: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    found: dict[str, Any] = field(default_factory=dict)  # by the first pass, for the second


class Triton(Passes):
    """Fused kernels for CUDA."""

    name = "triton"

    def add_grad_(self, times: Tensor | None = None) -> None:
        # A compiler that traced a launch would see tables of addresses, not the gradients that are written.
        if torch.compiler.is_compiling():
            self._untraced(times)
        else:
            super().add_grad_(times)

    @torch.compiler.disable
    def _untraced(self, times: Tensor | None) -> None:
        super().add_grad_(times)

    def _run(self, plan: DevicePlan, pairs: Pairs, times: Tensor | None) -> None:
        with _current(plan.device):
            super()._run(plan, pairs, times)

    def takes(self, penalty: Penalty, element_wise: bool) -> bool:
        return not element_wise or kind_of(penalty) is not None

    def captured(self, plan: DevicePlan) -> bool:
        return plan.tables is not None and bool(plan.tables.pointers.captured)

    def element_sums(self, plan: DevicePlan, pairs: Pairs) -> Tensor:
        state = _state(plan)
        state.found["elements"] = found = _prepared(state, "elements", plan, pairs, element_work)
        work, (weights, _, _) = found
        table = work.table
        partial = torch.empty(2 * table.chunks, dtype=plan.dtype, device=plan.device)
        sums = torch.empty(2, len(plan.elements), dtype=plan.dtype, device=plan.device)
        for begin, launch in work.sums:
            launch(weights, table.chunk_of, table.first, table.lengths, partial, begin, table.chunks)
        work.totals(partial, table.first, table.ends, sums, table.chunks, len(plan.elements))
        return sums

    def add_elements_(self, plan: DevicePlan, pairs: Pairs, sums: Tensor | None, times: Tensor | None) -> None:
        state = _state(plan)
        found = state.found.pop("elements", None) or _prepared(state, "elements", plan, pairs, element_work)
        work, (weights, grads, scales) = found
        if sums is None:  # a separable penalty doesn't look at them
            sums = torch.empty(2, len(plan.elements), dtype=plan.dtype, device=plan.device)
        table, count, factor = work.table, len(plan.elements), state.one if times is None else times
        tables = (weights, grads, table.chunk_of, table.first, table.lengths)
        for begin, launch in work.adds:
            launch(*tables, sums, scales, factor, begin, count, foreign=times is not None)

    def slice_squares(self, plan: DevicePlan, pairs: Pairs) -> Tensor:
        assert plan.slices is not None
        state = _state(plan)
        state.found["slices"] = found = _prepared(state, "slices", plan, pairs, slice_work)
        work, (weights, _, _) = found
        table = work.table
        partial = torch.empty(table.partials, dtype=plan.dtype, device=plan.device)
        squares = torch.zeros(plan.slices.slices, dtype=plan.dtype, device=plan.device)
        for begin, launch in work.squares:
            launch(weights, table.tile_of, table.matrices, partial, begin)
        if work.faces is not None:
            work.faces(partial, table.block_of, table.faces, squares)
        return squares

    def add_slices_(self, plan: DevicePlan, pairs: Pairs, squares: Tensor, times: Tensor | None) -> None:
        work, (weights, grads, scales) = _state(plan).found.pop("slices")
        c = self._coefficients(plan, work, scales, squares, times)
        for begin, launch in work.adds:
            launch(weights, grads, work.table.tile_of, work.table.matrices, c, begin)

    def _coefficients(
        self, plan: DevicePlan, work: SliceWork, scales: Tensor, squares: Tensor, times: Tensor | None
    ) -> Tensor:
        assert plan.slices is not None
        if work.coefficients is None:
            return plan.slices.coefficients(squares, times)
        c = torch.empty(plan.slices.groups, dtype=plan.dtype, device=plan.device)
        factor = _state(plan).one if times is None else times
        gathered = plan.slices.gather(squares)
        work.coefficients(gathered, work.table.starts, scales, factor, c, foreign=times is not None)
        return plan.slices.scatter(c)


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Kernels are launched on the current device."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


# What is launched, made once for tensors that are of these types and aligned like this


def element_work(plan: DevicePlan, pairs: Pairs, aligned: list[bool]) -> ElementWork:
    table = chunk_table(plan, pairs, aligned)
    sums, adds = [], []
    for at in table.launches:
        programs = at.end - at.begin
        shape = {"ALIGNED": at.aligned, "CHUNK": table.chunk, "BLOCK": BLOCK}
        types = {"DTYPE": TYPES[at.dtype], "WIDE": _wide(at.dtype)}
        sums.append((at.begin, Launcher(triton_elements.element_sums, programs, types | shape, LARGE)))
        kind, p0, p1 = kind_of(at.penalty) or (0, 0.0, 0.0)
        types |= {"GRAD": TYPES[at.grad], "SCALE": TYPES[at.scale], "KIND": kind, "P0": p0, "P1": p1}
        adds.append((at.begin, Launcher(triton_elements.element_add, programs, types | shape, LARGE)))
    constants = {"WIDE": TYPES[plan.dtype], "BLOCK": 1024}
    totals = Launcher(triton_elements.tensor_sums, len(plan.elements), constants, SMALL)
    return ElementWork(table, sums, totals, adds[::-1])


def slice_work(plan: DevicePlan, pairs: Pairs, aligned: list[bool]) -> SliceWork:
    table = tile_table(plan, pairs, aligned, WIDTH, FACE_BLOCK)
    squares, adds, faces = [], [], None
    for at in table.launches:
        programs = at.end - at.begin
        shape = {"ALIGNED": at.aligned, "TALL": table.tall, "HEIGHT": HEIGHT, "WIDTH": WIDTH}
        types = {"DTYPE": TYPES[at.dtype], "WIDE": _wide(at.dtype)}
        squares.append((at.begin, Launcher(triton_slices.tile_squares, programs, types | shape, LARGE)))
        if at.grad is not None:
            types["GRAD"] = TYPES[at.grad]
            adds.append((at.begin, Launcher(triton_slices.tile_add, programs, types | shape, LARGE)))
    if len(table.block_of):
        constants = {"WIDE": TYPES[plan.dtype], "BLOCK": FACE_BLOCK, "DEEP": FACE_DEEP}
        faces = Launcher(triton_slices.face_squares, len(table.block_of), constants, SMALL)
    return SliceWork(table, squares, faces, _coefficient_launcher(plan), adds[::-1])


def _coefficient_launcher(plan: DevicePlan) -> Launcher | None:
    assert plan.slices is not None
    penalty = one_penalty(plan.slices.terms)
    alike = all(t.scale.dtype == plan.dtype for t in plan.slices.terms)
    known = kind_of(penalty) if penalty is not None and alike else None
    if known is None:
        return None
    constants = {"SCALE": TYPES[plan.dtype], "WIDE": TYPES[plan.dtype], "BLOCK": 1024}
    constants |= dict(zip(("KIND", "P0", "P1"), known, strict=True))
    return Launcher(triton_slices.group_coefficients, len(plan.slices.terms), constants, SMALL)


def _state(plan: DevicePlan) -> LaunchState:
    if plan.tables is None:
        at = {"elements": [e.at for e in plan.elements], "slices": [p.at for p in plan.pieces]}
        terms = {"elements": [e.term for e in plan.elements], "slices": plan.slices.terms if plan.slices else []}
        scales = {kind: [t.scale for t in found] for kind, found in terms.items()}
        one = torch.ones((), dtype=plan.dtype, device=plan.device)
        plan.tables = LaunchState(PointerTables(plan.device), one, at, scales)
    state: LaunchState = plan.tables
    return state


def _prepared(state: LaunchState, kind: str, plan: DevicePlan, pairs: Pairs, make: Make) -> tuple[Any, list[Tensor]]:
    """The work of this kind, for where the tensors are now, and the tables that say where."""
    at = state.at[kind]
    sections = (*pairs.pick(at).addresses(), tuple(map(Tensor.data_ptr, state.scales[kind])))
    last, work = state.last.get(kind, (None, None))
    if sections != last:
        aligned = tuple((w | g) % 16 == 0 for w, g in zip(sections[0], sections[1], strict=True))
        if (kind, aligned) not in state.work:
            by_place = dict(zip(at, aligned, strict=True))
            state.work[kind, aligned] = make(plan, pairs, [by_place.get(i, False) for i in range(len(pairs))])
        work = state.work[kind, aligned]
        state.last[kind] = sections, work
    return work, state.pointers.table(sections)


def _wide(dtype: torch.dtype) -> tl.dtype:
    return tl.float64 if dtype == torch.float64 else tl.float32
