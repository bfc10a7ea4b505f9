"""One call of an operation, and what rules about operations share: meeting element by element, and mixing.

The rules are in `moving.py`, `elementwise.py` and `products.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from deephoyer.structure.channel_ids import Labels, like, overlap
from deephoyer.structure.inputs import tensors_in


@dataclass
class Operation:
    """One call of an ATen function: `where` names the module it happened in, `asked` the sizes that its code gave.

    Calls have a `number` in the order in which they are made. `opened` says that the module is torch's attention, whose
    code is replaced when heads go.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    where: str
    counts_heads: Callable[[int], bool] = lambda size: False
    asked: Sequence[int] = ()
    number: int = 0
    opened: bool = False
    given: list[Tensor] = field(default_factory=list)
    outs: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.given, self.outs = tensors_in((self.args, self.kwargs)), tensors_in(self.out)

    @property
    def name(self) -> str:
        return str(self.func.overloadpacket.__name__)

    def argument(self, name: str, position: int, default: Any = None) -> Any:
        return self.kwargs.get(name, self.args[position] if len(self.args) > position else default)


Rule = Callable[[Labels, Operation], None]
Part = tuple[Sequence[int], list[Tensor]]  # a tensor's shape and its axes


def mixes(n: Labels, op: Operation) -> None:
    """What has no rule: it may mix all that it is given."""
    n.mix([axis for tensor in op.given for axis in n.of(tensor)], op.outs, may_mix(op))


def may_mix(op: Operation) -> str:
    return f"{op.name} in {op.where} may mix channels"


def meet(n: Labels, parts: Sequence[Part], where: str) -> list[Tensor]:
    """The axes of what tensors of these shapes and axes make together, element by element, broadcast.

    Channels that lie along the same dimension become the same. Where one tensor has channels along a dimension and
    another as many elements that are none, it would no longer fit when some go: they stay. Axes that share no
    dimension are all that is left, so there are never more of them than dimensions.
    """
    dims = max((len(shape) for shape, _ in parts), default=0)
    result: list[Tensor] = []
    for _, axes in parts:
        for axis in axes:
            axis = like(axis, dims)
            for other in [o for o in result if overlap(o, axis)]:
                n.joined.join(axis, other)
                result = [o for o in result if o is not other]
                for d in range(dims):
                    if other.shape[d] == 1 or axis.shape[d] == 1:
                        axis, other = axis.narrow(d, 0, 1), other.narrow(d, 0, 1)
            if axis.numel() > 1:
                result.append(axis)
    for shape, axes in parts:
        for d in range(1, len(shape) + 1):
            if shape[-d] > 1 and not any(axis.dim() >= d and axis.shape[-d] > 1 for axis in axes):
                for axis in result:
                    if n.varies(axis, -d):
                        n.joined.fix(axis, f"{where} meets them with a tensor of fixed size")
    return result


def unexpanded(tensor: Tensor) -> list[int]:
    """Its sizes, 1 where it was expanded: that follows what it was expanded to, as a trial shows."""
    return [1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]


def short(n: Labels, axis: Tensor, dim: int) -> Tensor:
    """The axis with one place along a dimension: its channels there belong together."""
    return axis if axis.shape[dim] == 1 else n.tie(axis, dim)


def shortened(n: Labels, axis: Tensor, dims: Sequence[int]) -> Tensor:
    for d in dims:
        axis = short(n, axis, d)
    return axis
