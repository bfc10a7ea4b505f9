"""Whether two networks compute the same, up to rounding; and where they begin to differ if they don't.

Knows nothing of why they should.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn

from deephoyer.errors import UserError
from deephoyer.inference import Examples, call, same_start, try_call
from deephoyer.structure.inputs import drawn_like, outputs_in, tensors_in
from deephoyer.structure.layers import channel_dim, kind_of
from deephoyer.structure.ties import Choices, ChosenAlike
from deephoyer.weights import hookable_modules

MISTAKE = 100
"""A mistake in the structure differs by this many times what rounding may, where it happens; outputs may hide it."""
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}


class Differs(UserError):
    """A smaller network that computes something else; `module` is where that began."""

    def __init__(self, text: str, module: str):
        super().__init__(text)
        self.module = module


def error(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative to the scale of `a`; infinite where shapes or NaNs differ."""
    a, b = (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in (a.detach(), b.detach()))
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if a.numel() == 0:
        return 0.0
    if not a.is_floating_point():
        return 0.0 if torch.equal(a, b) else float("inf")
    scale, gap = a.abs().max().double(), (a.double() - b.double()).abs().max()
    if not gap.isfinite():  # infinity or NaN, in either
        strange = ~torch.isfinite(a) | ~torch.isfinite(b)
        alike = (a == b) | (a.isnan() & b.isnan())
        if not strange.any() or not alike[strange].all():
            return float("inf")
        return error(a.masked_fill(strange, 0), b.masked_fill(strange, 0))
    return float(gap / scale) if scale > 0 else float(gap)


def tolerance(*tensors: Tensor) -> float:
    return max((TOLERANCE.get(t.dtype.to_real(), 0.0) for t in tensors), default=0.0)


Matter = dict[str, tuple[Tensor, Tensor]]
Outputs = list[tuple[str, Tensor]]


def same(
    big: nn.Module,
    small: nn.Module,
    inputs: Examples,
    matter: Matter | None = None,
    more: int = 1,
    exact: bool = True,
    rounding: torch.dtype = torch.float64,
) -> float:
    """The largest relative error on the inputs and on `more` random ones; raises `Differs` beyond rounding.

    `rounding` is the coarsest type that the networks compute with. Without `exact` only shapes and NaNs must agree.
    `matter` says for some layers which of their channels correspond, to find where a difference began.
    """
    tries = ((inputs, answers(big, inputs)), *(drawn_answers(big, inputs, seed) for seed in range(1, 1 + more)))
    compared = [compare(before, small, t, lambda: big, matter, exact, rounding) for t, before in tries]
    if all(gap is None for gap in compared):
        raise UserError("the model gives nothing but NaN, so there is nothing to compare.")
    return max(gap or 0.0 for gap in compared)


def answers(model: nn.Module, inputs: Examples, inside: Outputs | None = None) -> list[Tensor]:
    """A network's outputs, in full precision; what each module gives goes into `inside`, in the order of the calls."""
    with torch.no_grad(), _full_precision():
        if inside is not None:
            inside.clear()
            with same_start(model), module_hooks(model, lambda name, tensor: inside.append((name, tensor.clone()))):
                outputs = outputs_in(try_call(model, inputs))
            if not hooks_change(model):
                return outputs
        with same_start(model):
            return outputs_in(try_call(model, inputs))


def drawn_answers(
    model: nn.Module, inputs: Examples, seed: int, inside: Outputs | None = None
) -> tuple[Examples, list[Tensor]]:
    """Random examples like these and a network's answers to them; the inputs themselves where it takes no others."""
    for drawn in drawn_like(inputs, seed):
        with suppress(Exception):
            return drawn, answers(model, drawn, inside)
    return inputs, answers(model, inputs, inside)


def compare(
    before: list[Tensor],
    small: nn.Module,
    inputs: Examples,
    big: Callable[[], nn.Module],
    matter: Matter | None = None,
    exact: bool = True,
    rounding: torch.dtype = torch.float64,
    inside: Outputs | None = None,
) -> float | None:
    """The largest relative error of a smaller network; None where there was nothing but NaN before.

    The larger one, whose answers these are, is asked for only where they differ, or are empty: of a detector that
    finds nothing, what its modules give is compared. Where `inside` says what they gave, none may give clearly
    something else, even if little of it reaches the outputs.
    """
    matter = matter or {}
    with torch.no_grad(), _full_precision():
        modules = ModuleComparison(inside or [], small, matter, TOLERANCE.get(rounding, 1.0), MISTAKE)
        apart = not inside or hooks_change(small)
        with nullcontext() if apart else module_hooks(small, modules.compare):
            worst = _worst(before, outputs_in(_run(small, inputs)))
        limit = max([TOLERANCE.get(rounding, 0.0), *(tolerance(t) for t in before)])
        if exact and not any(t.numel() for t in before):
            if name := first_difference(module_outputs(big(), inputs), small, inputs, matter):
                raise Differs(f"the smaller network gives something else from {name} on.", name)
            return worst
        if worst > limit and (exact or worst == float("inf")):
            larger = big()
            if (chosen := but_for_ties(larger, small, inputs, limit)) > limit:
                name = first_difference(module_outputs(larger, inputs), small, inputs, matter)
                raise Differs(
                    f"the smaller network's outputs differ by {worst:.1e} of their scale; "
                    f"the difference began at {name or 'the output'}.",
                    name,
                )
            worst = chosen
        if inside and apart:
            with module_hooks(small, modules.compare):
                _run(small, inputs)
        if modules.first:
            raise Differs(f"the smaller network gives something else in {modules.first}.", modules.first)
    return None if all_nan(before) else worst


def all_nan(outputs: list[Tensor]) -> bool:
    """Whether there are numbers, none of which is one."""
    filled = [t for t in outputs if t.numel()]
    return bool(filled) and all(bool(t.isnan().all()) for t in filled)


def _worst(before: list[Tensor], after: list[Tensor]) -> float:
    if len(before) != len(after):
        raise Differs("the smaller network gives another number of outputs.", "")
    return max((error(a, b) for a, b in zip(before, after, strict=True)), default=0.0)


def but_for_ties(big: nn.Module, small: nn.Module, inputs: Examples, limit: float) -> float:
    """The largest error where both choose alike between numbers that are equal."""
    with same_start(big), (choices := Choices()):
        before = outputs_in(call(big, inputs))
    if not choices.made:
        return float("inf")
    with same_start(small), ChosenAlike(choices, lambda a, b: error(a, b) <= limit):
        return _worst(before, outputs_in(call(small, inputs)))


@contextmanager
def _full_precision() -> Iterator[None]:
    """Without TensorFloat-32, whose rounding (1e-3) would hide a difference, or look like one."""
    if not torch.cuda.is_available():
        yield
        return
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    try:
        before = cudnn.allow_tf32, matmul.allow_tf32
    except RuntimeError:  # set through the newer switches, which these two refuse to report
        yield
        return
    cudnn.allow_tf32 = matmul.allow_tf32 = False
    try:
        yield
    finally:
        cudnn.allow_tf32, matmul.allow_tf32 = before


def _run(model: nn.Module, inputs: Examples) -> Any:
    """Runs a model that may have been cut wrongly: an exception says in which module."""
    try:
        with same_start(model):
            return call(model, inputs)  # as it will be used: hooks keep torch from its fast ways through some layers
    except UserError:
        raise
    except Exception as why:
        name = _where_it_fails(model, inputs)
        raise Differs(f"the smaller network fails in {name or 'its own forward'}: {why}", name) from why


def _where_it_fails(model: nn.Module, inputs: Examples) -> str:
    stack: list[str] = []
    hooks = []
    for name, module in hookable_modules(model):
        hooks.append(module.register_forward_pre_hook(lambda m, a, name=name: stack.append(name)))
        hooks.append(module.register_forward_hook(lambda m, a, y: stack.__delitem__(-1)))
    try:
        call(model, inputs)
    except Exception:
        return stack[-1] if stack else ""
    finally:
        for hook in hooks:
            hook.remove()
    return ""


def first_difference(before: Outputs, small: nn.Module, inputs: Examples, matter: Matter) -> str:
    """The first module whose outputs differ; empty where it is none, or the model itself."""
    modules = ModuleComparison(before, small, matter)
    with module_hooks(small, modules.compare), same_start(small):
        call(small, inputs)
    return modules.first


def module_outputs(model: nn.Module, inputs: Examples) -> Outputs:
    """What each module gives, in the order of the calls."""
    seen: Outputs = []
    answers(model, inputs, seen)
    return seen


class ModuleComparison:
    """Compares what each module of a smaller network gives, as it gives it, with what it gave in the larger one.

    In the channels that both have, and by more than so many times rounding, or the `limit`, of their own scale.
    """

    def __init__(self, before: Outputs, small: nn.Module, matter: Matter, limit: float = 0.0, times: int = 1) -> None:
        self._left: dict[str, list[tuple[int, Tensor]]] = {}
        for number, (name, tensor) in reversed([*enumerate(before)]):  # a module may be called several times
            self._left.setdefault(name, []).append((number, tensor))
        self._modules, self._matter, self._limit, self._times = dict(small.named_modules()), matter, limit, times
        self._differ: list[tuple[int, str]] = []

    @property
    def first(self) -> str:
        """The first module, in the order of the larger network's calls, that gives something else; empty for none."""
        return min(self._differ, default=(0, ""))[1]

    def compare(self, name: str, other: Tensor) -> None:
        if not self._left.get(name):
            return
        number, tensor = self._left[name].pop()
        kind = kind_of(self._modules[name])
        if name in self._matter and kind is not None:
            dim = channel_dim(self._modules[name], kind)
            mine, theirs = (index.to(other.device) for index in self._matter[name])
            tensor, other = tensor.index_select(dim, mine), other.index_select(dim, theirs)
        if other.shape == tensor.shape and error(tensor, other) > self._times * max(self._limit, tolerance(tensor)):
            self._differ.append((number, name))


@contextmanager
def module_hooks(model: nn.Module, receive: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Calls `receive` with the name and output of each module, in the order of the calls."""
    handles = []
    for name, module in hookable_modules(model):

        def hook(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
            for tensor in tensors_in(output)[:1]:
                if not tensor.is_nested:  # padded tokens left out, as torch's encoder does: it has no shape
                    receive(name, tensor)

        handles.append(module.register_forward_hook(hook))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def hooks_change(model: nn.Module) -> bool:
    """Whether a model computes otherwise with hooks on it: torch's encoder layers leave their fused kernel."""
    return any(isinstance(module, nn.TransformerEncoderLayer) for module in model.modules())
