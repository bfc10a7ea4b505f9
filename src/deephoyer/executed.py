"""Multiply-accumulates that a network executes, at the level of operations: matrix products, convolutions, attention.

The model is run once under a dispatch mode that sees every operation with its tensors, whatever module, function or
tensor subclass it comes from. Formulas are torch's own (`torch.utils.flop_counter`, two FLOPs for each MAC), and ours
for what that does not count: recurrent layers in one operation, products with vectors, grouped and integer products.
Each operation is put down to the weight it uses, or to the module that called it where it uses none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from deephoyer.inference import Examples, arguments, at_rest, batch_of, plain_attention, try_call
from deephoyer.weights import named_modules, unwrap

aten = torch.ops.aten
Parts = list[tuple[list[Tensor], int]]
"""MACs of an operation, with the tensors that it multiplies; they are put down to the first that is a weight."""


def executed(
    model: nn.Module, examples: Examples, weights: Mapping[str, Tensor]
) -> tuple[dict[str, int], dict[str, int]]:
    """MACs of one example: by the names in `weights`, and those without a weight by the module that executes them.

    >>> layer = nn.Linear(4, 2)
    >>> executed(layer, torch.zeros(3, 4), {"weight": layer.weight})
    ({'weight': 8}, {})
    """
    model, batch = unwrap(model), batch_of(examples)
    counting = _Counting(weights)
    with counting, _open(model, counting), at_rest(model), _second_is_batch(model, examples) as second:
        try_call(model, examples)
    batch = second[0] if second else batch
    used, other = counting.used, counting.other
    return {name: n // batch for name, n in used.items()}, {name: n // batch for name, n in other.items()}


@contextmanager
def _open(model: nn.Module, counting: _Counting) -> Iterator[None]:
    """Says which module is at work; torch's fused transformer layers, which hide their products, are taken apart."""
    hooks: list[Any] = []
    for name, module in named_modules(model):
        if isinstance(module, torch.jit.ScriptModule):
            continue  # which takes no hooks
        hooks.append(module.register_forward_pre_hook(lambda m, args, name=name: counting.inside.append(name)))
        hooks.append(module.register_forward_hook(lambda m, args, y: counting.inside.__delitem__(-1), always_call=True))
    try:
        with plain_attention:
            yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _second_is_batch(model: nn.Module, examples: Examples) -> Iterator[list[int]]:
    """The number of examples, where torch's layers for sequences say that it is the second size and the length the
    first (`batch_first=False`): they are given as many of both as the network is."""
    given = [t for t in pytree.tree_leaves(arguments(examples)) if isinstance(t, Tensor) and t.dim() > 1]
    found: list[int] = []

    def look(module: Any, args: Any) -> None:
        if args and isinstance(args[0], Tensor) and args[0].dim() == 3 and args[0].shape[:2] == given[0].shape[:2]:
            found.append(int(args[0].shape[1]))

    of_sequences = [m for _, m in named_modules(model) if given and getattr(m, "batch_first", True) is False]
    hooks = [module.register_forward_pre_hook(look) for module in of_sequences]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


class _Counting(TorchDispatchMode):
    def __init__(self, weights: Mapping[str, Tensor]):
        super().__init__()
        self.used: Counter[str] = Counter()
        self.other: Counter[str] = Counter()
        self.inside: list[str] = []
        self._spans: dict[int, list[tuple[int, int, str]]] = {}
        self._of_module: dict[str, list[str]] = {}
        for name, tensor in weights.items():
            self._of_module.setdefault(name.rpartition(".")[0], []).append(name)
            start = int(tensor.storage_offset())
            if (key := _storage(tensor)) is not None:
                self._spans.setdefault(key, []).append((start, start + tensor.numel(), name))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func._overloadpacket
        formula = FORMULAS.get(packet)
        from torch.utils.flop_counter import flop_registry  # loads Triton, which not everyone who imports us needs

        if formula is None and packet not in flop_registry:
            if func is not torch.ops.prim.device.default:
                with self:
                    out = func.decompose(*args, **kwargs)
                if out is not NotImplemented:
                    return out
            return func(*args, **kwargs)
        out = func(*args, **kwargs)
        if formula is not None:
            parts = formula(out, args)
        else:
            parts = [(_tensors(args), flop_registry[packet](*args, **kwargs, out_val=out) // 2)]
        for given, macs in parts:
            self._note(next((name for t in given if (name := self._name(t)) is not None), None), macs)
        return out

    def _note(self, name: str | None, macs: int) -> None:
        here = self.inside[-1] if self.inside else ""
        if name is None and len(own := self._of_module.get(here, [])) == 1 and own[0].rpartition(".")[2] == "weight":
            name = own[0]  # a copy of a layer's weight, in another precision or computed
        if name is None:
            self.other[here] += macs
        else:
            self.used[name] += macs

    def _name(self, tensor: Tensor) -> str | None:
        """The weight that a tensor is a view of; of tied ones the one of the module at work."""
        spans = self._spans.get(_storage(tensor) or 0, ())
        start = int(tensor.storage_offset()) if spans else 0
        names = [name for first, end, name in spans if first <= start < end]
        here = self.inside[-1] if self.inside else ""
        return next((n for n in names if n.rpartition(".")[0] == here), names[0] if names else None)


def _storage(tensor: Tensor) -> int | None:
    """What tensors over the same memory have in common; None for those without memory of their own."""
    try:
        return tensor.untyped_storage().data_ptr() or None
    except (RuntimeError, NotImplementedError):  # a subclass that wraps others
        return None


def _tensors(args: Any) -> list[Tensor]:
    return [a for a in args if isinstance(a, Tensor)]


def _recurrent(x: Tensor, weights: list[Tensor]) -> Parts:
    """One layer in one direction: every step multiplies by both matrices."""
    return [([w], x.numel() // max(1, x.shape[-1]) * w.numel()) for w in weights if w.dim() == 2]


def _product(out: Any, args: Any) -> Parts:
    """Every output is a sum over the last dimension of the first factor."""
    return [(_tensors(args), out.numel() * args[0].shape[-1])]


def _trilinear(out: Any, args: Any) -> Parts:
    """`F.bilinear`: three factors get further dimensions, and are multiplied at every place of all these."""
    factors: list[Tensor] = args[:3]
    wide = [_expanded(t, dims) for t, dims in zip(factors, args[3:6], strict=True)]
    return [(list(reversed(factors)), prod(max(sizes) for sizes in zip(*wide, strict=True)))]


def _expanded(tensor: Tensor, dims: list[int]) -> list[int]:
    sizes = list(tensor.shape)
    for dim in sorted(dims):
        sizes.insert(dim, 1)
    return sizes


_NAMED: dict[str, Callable[[Any, Any], Parts]] = {
    "mv": lambda out, args: [(_tensors(args), args[0].numel())],
    "addmv": lambda out, args: [(_tensors(args), args[1].numel())],
    "dot": lambda out, args: [(_tensors(args), args[0].numel())],
    "vdot": lambda out, args: [(_tensors(args), args[0].numel())],
    "addbmm": lambda out, args: [(_tensors(args), out.numel() * args[1].shape[0] * args[1].shape[-1])],
    "_trilinear": _trilinear,
    "_int_mm": _product,
    "_grouped_mm": _product,
    "mkldnn_rnn_layer": lambda out, args: _recurrent(args[0], _tensors(args[1:5])),
    "_cudnn_rnn": lambda out, args: _recurrent(args[0], args[1]),
    "_weight_int8pack_mm": _product,
    "_weight_int4pack_mm": _product,
    "_weight_int4pack_mm_for_cpu": _product,
}
FORMULAS = {getattr(aten, name): formula for name, formula in _NAMED.items() if hasattr(aten, name)}
"""By operation, those that this torch has; each is asked with the output and the arguments."""
