"""The passes in plain PyTorch, for every device.

A tensor is worked through in blocks: on a CPU they are small enough to stay in its cache between the
few operations on them, elsewhere large enough to be worth a launch each. So no temporary is larger than a
block, and the weights come from memory once for the sums and once more for the gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from deephoyer.kernels.layout import Matrix, Pairs, flat
from deephoyer.kernels.passes import DevicePlan, Passes
from deephoyer.penalties import Penalty, wide


class Foreach(Passes):
    """Plain PyTorch, in blocks."""

    name = "foreach"
    cpu_block = 1 << 19
    device_block = 1 << 24

    def element_sums(self, plan: DevicePlan, pairs: Pairs) -> Tensor:
        sums: list[Tensor] = []
        for element in plan.elements:
            weight = flat(pairs[element.at][0])
            parts = [self.block_sums(x) for x in self._blocks(weight)]
            for each in zip(*parts, strict=True):
                sums.append(each[0] if len(each) == 1 else torch.stack(each).sum())
        return torch.stack([s.to(plan.dtype) for s in sums]).view(-1, 2).t()

    def add_elements_(self, plan: DevicePlan, pairs: Pairs, sums: Tensor | None, times: Tensor | None) -> None:
        scales = torch.stack([e.term.scale.to(plan.dtype) for e in plan.elements])
        if times is not None:
            scales = scales * times.to(scales)
        lines = _lines(plan, sums, scales)
        for i, element in reversed(list(enumerate(plan.elements))):  # what was read last may still be in a cache
            weight, grad = pairs[element.at]
            assert grad is not None
            penalty = element.term.penalty
            for x, y in zip(self._blocks(flat(weight)), self._blocks(flat(grad)), strict=True):
                if penalty.scale_free:
                    a, b = lines[id(penalty)]
                    self.add_line_(x, y, a[i], b[i])
                else:
                    self.add_slope_(x, y, penalty, scales[i])

    def slice_squares(self, plan: DevicePlan, pairs: Pairs) -> Tensor:
        assert plan.slices is not None
        squares = torch.zeros(plan.slices.slices, dtype=plan.dtype, device=plan.device)
        for piece in plan.pieces:
            weight, m = pairs[piece.at][0], piece.matrix
            bands = flat(weight).view(m.groups, m.band, m.columns)
            columns = torch.zeros(m.groups, m.columns, dtype=plan.dtype, device=plan.device)
            for g, r in _tiles(m, self._block(weight)):
                rows, cols = self.tile_squares(bands[g, r])
                if piece.row >= 0:
                    at = piece.row + g.start * m.band + r.start
                    squares[at : at + rows.numel()] = rows.flatten()
                columns[g] += cols
            if piece.column >= 0:
                each = columns.view(m.groups, m.outer, m.channels, m.inner).sum((1, 3)).flatten()
                squares[piece.column : piece.column + each.numel()] = each
        return squares

    def add_slices_(self, plan: DevicePlan, pairs: Pairs, squares: Tensor, times: Tensor | None) -> None:
        assert plan.slices is not None
        c = plan.slices.coefficients(squares, times)
        for piece in reversed(plan.pieces):
            weight, grad = pairs[piece.at]
            if grad is None:
                continue
            m = piece.matrix
            shape = (m.groups, m.band, m.columns)
            weights, grads = flat(weight).view(shape), flat(grad).view(shape)
            by_row, by_column = _row_part(c, piece.row, m), _column_part(c, piece.column, m)
            for g, r in _tiles(m, self._block(weight)):
                self.add_tile_(weights[g, r], grads[g, r], by_row[g, r], by_column[g])

    # One block

    def block_sums(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = wide(x)
        r = torch.abs(x, out=self._scratch(x))
        return r.sum(), torch.dot(x, x) if x.is_cpu else r.square_().sum()

    def add_line_(self, x: Tensor, y: Tensor, a: float | Tensor, b: float | Tensor) -> None:
        """y += A·sign(x) − B·x"""
        same = x.dtype == y.dtype
        x = wide(x)
        sign = torch.sign(x, out=self._scratch(x))
        if isinstance(a, float) and isinstance(b, float) and same and x.dtype == y.dtype:
            y.add_(sign, alpha=a).add_(x, alpha=-b)
        else:
            y.add_(sign.mul_(a).sub_(x * b))

    def add_slope_(self, x: Tensor, y: Tensor, penalty: Penalty, scale: Tensor) -> None:
        """y += scale · p'(|x|) · sign(x)"""
        x = wide(x)
        y.add_(penalty.slope(torch.abs(x, out=self._scratch(x))).mul_(x.sign()).mul_(scale))

    def tile_squares(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[g, r, c] → sums of squares over c, and over r."""
        x = wide(x)
        square = torch.mul(x, x, out=self._scratch(x))
        return square.sum(2), square.sum(1)

    def add_tile_(self, x: Tensor, y: Tensor, by_row: Tensor, by_column: Tensor) -> None:
        """y += (by_row + by_column) · x"""
        same = x.dtype == y.dtype
        x = wide(x)
        c = torch.add(by_row.to(x.dtype), by_column.to(x.dtype), out=self._scratch(x))
        if same and x.dtype == y.dtype:
            y.addcmul_(x, c)
        else:
            y.add_(c.mul_(x))

    def _block(self, weight: Tensor) -> int:
        return self.cpu_block if weight.is_cpu else self.device_block

    def _blocks(self, x: Tensor) -> tuple[Tensor, ...]:
        block = self._block(x)
        return (x,) if x.numel() <= block else x.split(block)

    def _scratch(self, x: Tensor) -> Tensor | None:
        """Memory for one temporary of x's shape, the same at every call: fresh pages cost more than the arithmetic.

        None for a small one, which the allocator has at hand.
        """
        if x.numel() < 1 << 14:
            return None
        kept: dict[tuple[torch.device, torch.dtype], Tensor] = self.__dict__.setdefault("_kept", {})
        room = kept.get((x.device, x.dtype))
        if room is None or room.numel() < x.numel():
            room = kept[x.device, x.dtype] = torch.empty(x.numel(), dtype=x.dtype, device=x.device)
        return room[: x.numel()].view(x.shape)


Numbers = Sequence[float] | Sequence[Tensor]


def _lines(plan: DevicePlan, sums: Tensor | None, scales: Tensor) -> dict[int, tuple[Numbers, Numbers]]:
    """For each penalty A and B of all tensors, times their scales; as numbers where reading them does not wait."""
    lines: dict[int, tuple[Numbers, Numbers]] = {}
    for penalty in {id(e.term.penalty): e.term.penalty for e in plan.elements}.values():
        if penalty.scale_free and sums is not None:
            a, b = (scales * part for part in penalty.line(sums[0], sums[1]))
            lines[id(penalty)] = (a.tolist(), b.tolist()) if a.is_cpu else (a.unbind(), b.unbind())
    return lines


def _tiles(m: Matrix, block: int) -> Iterator[tuple[slice, slice]]:
    """Bands and rows that make about a block: rows of the one band, or several whole bands."""
    if m.groups == 1:
        step = max(block // max(m.columns, 1), 1)
        for at in range(0, m.band, step):
            yield slice(0, 1), slice(at, min(at + step, m.band))
    else:
        step = max(block // max(m.band * m.columns, 1), 1)
        for at in range(0, m.groups, step):
            yield slice(at, min(at + step, m.groups)), slice(0, m.band)


def _row_part(c: Tensor, first: int, m: Matrix) -> Tensor:
    if first < 0:
        return c.new_zeros(()).expand(m.groups, m.band, 1)
    return c[first : first + m.rows].view(m.groups, m.band, 1)


def _column_part(c: Tensor, first: int, m: Matrix) -> Tensor:
    if first < 0:
        return c.new_zeros(()).expand(m.groups, 1, m.columns)
    each = c[first : first + m.groups * m.channels].view(m.groups, 1, m.channels, 1)
    return each.expand(m.groups, m.outer, m.channels, m.inner).reshape(m.groups, 1, m.columns)
