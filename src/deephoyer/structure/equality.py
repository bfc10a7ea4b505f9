"""Whether two networks compute the same, up to rounding; and where they begin to differ if they don't.

Knows nothing of why they should.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from deephoyer.errors import UserError
from deephoyer.inference import Examples, call
from deephoyer.structure.inputs import drawn_like, outputs_in, tensors_in
from deephoyer.structure.layers import channel_dim, kind_of
from deephoyer.structure.ties import Choices, ChosenAlike

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
    a, b = a.detach(), b.detach()
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if a.numel() == 0:
        return 0.0
    if not (a.is_floating_point() or a.is_complex()):
        return 0.0 if torch.equal(a, b) else float("inf")
    strange = ~torch.isfinite(a) | ~torch.isfinite(b)
    if strange.any() and not torch.equal(a[strange].nan_to_num(), b[strange].nan_to_num()):
        return float("inf")
    a, b = a.masked_fill(strange, 0), b.masked_fill(strange, 0)
    scale = a.abs().max().double()
    gap = (a.double() - b.double()).abs().max()
    return float(gap / scale) if scale > 0 else float(gap)


def tolerance(*tensors: Tensor) -> float:
    return max((TOLERANCE.get(t.dtype, 0.0) for t in tensors), default=0.0)


Matter = dict[str, tuple[Tensor, Tensor]]
Outputs = list[tuple[str, Tensor]]


def check_modules(
    before: Outputs, small: nn.Module, inputs: Examples, matter: Matter, rounding: torch.dtype = torch.float64
) -> None:
    """Raises `Differs` if a module gives clearly something else, even if little of it reaches the outputs."""
    with torch.no_grad(), _full_precision():
        if name := first_difference(before, small, inputs, matter, TOLERANCE.get(rounding, 1.0), MISTAKE):
            raise Differs(f"the smaller network gives something else in {name}.", name)


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


def answers(model: nn.Module, inputs: Examples) -> list[Tensor]:
    """A network's outputs, in full precision."""
    with torch.no_grad(), _full_precision():
        return outputs_in(_called(model, inputs))


def drawn_answers(model: nn.Module, inputs: Examples, seed: int) -> tuple[Examples, list[Tensor]]:
    """Random examples like these and a network's outputs for them; the inputs themselves where it takes no others."""
    for drawn in drawn_like(inputs, seed):
        with suppress(Exception):
            return drawn, answers(model, drawn)
    return inputs, answers(model, inputs)


def compare(
    before: list[Tensor],
    small: nn.Module,
    inputs: Examples,
    big: Callable[[], nn.Module],
    matter: Matter | None = None,
    exact: bool = True,
    rounding: torch.dtype = torch.float64,
) -> float | None:
    """The largest relative error of a smaller network; None where there was nothing but NaN before.

    The larger one, whose answers these are, is asked for only where they differ, or are empty: of a detector that
    finds nothing, what its modules give is compared.
    """
    with torch.no_grad(), _full_precision():
        worst = _worst(before, outputs_in(_run(small, inputs)))
        limit = max([TOLERANCE.get(rounding, 0.0), *(tolerance(t) for t in before)])
        if exact and not any(t.numel() for t in before):
            if name := first_difference(module_outputs(big(), inputs), small, inputs, matter or {}):
                raise Differs(f"the smaller network gives something else from {name} on.", name)
            return worst
        if worst > limit and (exact or worst == float("inf")):
            larger = big()
            if (chosen := but_for_ties(larger, small, inputs, limit)) > limit:
                name = first_difference(module_outputs(larger, inputs), small, inputs, matter or {})
                raise Differs(
                    f"the smaller network's outputs differ by {worst:.1e} of their scale; "
                    f"the difference began at {name or 'the output'}.",
                    name,
                )
            worst = chosen
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
    with (choices := Choices()):
        before = outputs_in(_called(big, inputs))
    if not choices.made:
        return float("inf")
    with ChosenAlike(choices, lambda a, b: error(a, b) <= limit):
        return _worst(before, outputs_in(_called(small, inputs)))


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
        return _called(model, inputs)  # as it will be used: hooks keep torch from its fast ways through some layers
    except UserError:
        raise
    except Exception as why:
        name = _where_it_fails(model, inputs)
        raise Differs(f"the smaller network fails in {name or 'its own forward'}: {why}", name) from why


def _where_it_fails(model: nn.Module, inputs: Examples) -> str:
    stack: list[str] = []
    hooks = []
    for name, module in model.named_modules():
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


def first_difference(
    before: Outputs, small: nn.Module, inputs: Examples, matter: Matter, limit: float = 0.0, times: int = 1
) -> str:
    """The first module, in the order of the calls, whose outputs differ in the channels that both have.

    By more than so many times rounding, or the `limit`, of their own scale.
    """
    theirs: dict[str, list[Tensor]] = {}
    for name, tensor in module_outputs(small, inputs):
        theirs.setdefault(name, []).append(tensor)
    for name, tensor in before:  # a module may be called several times
        if not theirs.get(name):
            continue
        other = theirs[name].pop(0)
        module = small.get_submodule(name)
        kind = kind_of(module)
        if name in matter and kind is not None:
            dim = channel_dim(module, kind)
            tensor = tensor.index_select(dim, matter[name][0].to(tensor.device))
            other = other.index_select(dim, matter[name][1].to(other.device))
        if other.shape == tensor.shape and error(tensor, other) > times * max(limit, tolerance(tensor)):
            return name
    return ""


def module_outputs(model: nn.Module, inputs: Examples) -> Outputs:
    """What each module gives, in the order of the calls."""
    seen: Outputs = []
    hooks = []
    for name, module in model.named_modules():

        def keep(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
            seen.extend((name, t.clone()) for t in tensors_in(output)[:1])

        hooks.append(module.register_forward_hook(keep))
    try:
        with torch.no_grad():
            _called(model, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def _called(model: nn.Module, inputs: Examples) -> Any:
    """The model's output, with the same random numbers each time: some networks draw which patches they look at."""
    cuda = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    with torch.random.fork_rng(devices=cuda):
        torch.manual_seed(0)
        return call(model, inputs)
