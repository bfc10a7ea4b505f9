"""Running somebody's model on example inputs without leaving a trace in it.

Example inputs are a tensor, a tuple or list of positional arguments, or a dict of keyword arguments.
The accounting, the timing and the exports all call a model through here.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from deephoyer.errors import UserError, first_line

P = ParamSpec("P")
T = TypeVar("T")
Examples = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]


class _Switched:
    """Something of the process's own, switched off: threads that are in at the same time share it, and the last one
    out restores.
    """

    def __init__(self, get: Callable[[], T], put: Callable[[T], None], off: T) -> None:
        self._get, self._put, self._off = get, put, off
        self._lock, self._inside, self._before = threading.Lock(), 0, off

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = self._get()
                self._put(self._off)
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._put(self._before)


class _Shared:
    """A context manager that changes the whole process: the first thread in enters it, the last one out leaves it."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make = make
        self._lock, self._inside = threading.Lock(), 0
        self._entered = ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._entered.enter_context(self._make())
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._entered.close()


def _libraries() -> tuple[bool, bool]:
    return bool(torch.backends.mkldnn.enabled), torch.backends.cudnn.enabled


def _set_libraries(enabled: tuple[bool, bool]) -> None:
    torch.backends.mkldnn.enabled, torch.backends.cudnn.enabled = enabled  # type: ignore[assignment]


plain_attention = _Switched(torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled, False)
"""Within it torch's fused attention layers, which hide the linear layers inside them, are taken apart."""
unchecked_distributions = _Switched(lambda: Distribution._validate_args, Distribution.set_default_validate_args, False)
"""Within it torch's distributions don't look at the values that they are given, which looks like a decision by them."""
plain_recurrence = _Switched(_libraries, _set_libraries, (False, False))
"""Within it recurrent layers run as the products that they are made of, not as one operation of oneDNN or cuDNN."""
not_compiled = _Shared(lambda: torch.compiler.set_stance("force_eager"))
"""Within it what was compiled runs as it was written, operation by operation."""


class UncheckedOneHot(TorchFunctionMode):
    """Within it `F.one_hot` doesn't look at the values that it is given, which looks like a decision by them.

    It does where it isn't told how many classes there are: then that is one.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.one_hot:
            return func(*args, **(kwargs or {}))
        x, classes = _one_hot(*args, **(kwargs or {}))
        if classes < 1:
            return func(x, classes)
        return (x.unsqueeze(-1) == torch.arange(classes, device=x.device)).long()


def _one_hot(tensor: Tensor, num_classes: int = -1) -> tuple[Tensor, int]:
    return tensor, int(num_classes)


@contextmanager
def at_rest(model: nn.Module) -> Iterator[nn.Module]:
    """In eval mode and without gradients; afterwards every module is in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield model
    finally:
        for module, mode in modes:
            module.training = mode


def outside_modes(function: Callable[P, T]) -> Callable[P, T]:
    """Runs what follows tensors through a network outside of `torch.inference_mode()` and of what was compiled, which
    would hide operations, and of `torch.autocast`, whose rounding would look like a difference.

    Tensors that were made in inference mode are copied.
    """

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch.inference_mode(False), _no_autocast(), not_compiled:
            positional, named = pytree.tree_map(_copied, (args, kwargs))
            return function(*positional, **named)

    return wrapped


@contextmanager
def _no_autocast() -> Iterator[None]:
    with ExitStack() as off:
        for place in ("cpu", "cuda", "mps", "xpu"):
            if torch.is_autocast_enabled(place):
                off.enter_context(torch.autocast(place, enabled=False))
        yield


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) and value.is_inference() else value


def call(model: nn.Module, examples: Examples) -> Any:
    """The model's output for the examples, which are moved to where the model is.

    >>> call(nn.Linear(2, 3), torch.zeros(5, 2)).shape
    torch.Size([5, 3])
    """
    args, kwargs = moved(examples, device_of(model))
    return model(*args, **kwargs)


def moved(examples: Examples, place: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The examples as positional and keyword arguments; their tensors, those in lists and dicts too, at that place."""
    args, kwargs = arguments(examples)
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(place), (args, kwargs))


@contextmanager
def same_start(model: nn.Module) -> Iterator[None]:
    """Within it a network starts as it does every time: it draws the same random numbers, and what it writes into its
    buffers and attributes (a hidden state, the range of what it has seen) is gone afterwards.
    """
    with same_numbers(model), state_kept(model.modules()):
        yield


@contextmanager
def same_numbers(model: nn.Module) -> Iterator[None]:
    """Within it a network draws the same random numbers every time; those that are drawn afterwards don't change.

    >>> model, before = nn.Identity(), torch.get_rng_state()
    >>> with same_numbers(model):
    ...     _ = torch.rand(1)
    >>> torch.equal(torch.get_rng_state(), before)
    True
    """
    place = device_of(model)
    with torch.random.fork_rng([place] if place.type == "cuda" else [], device_type="cuda"):
        torch.manual_seed(0)
        yield


@contextmanager
def state_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Modules run on copies of their buffers, and of tensors that are plain attributes; afterwards they have their own,
    and all attributes are what they were: how long a table is that was made for longer inputs.

    >>> norm = nn.BatchNorm1d(1)
    >>> with state_kept([norm]):
    ...     _ = norm(torch.ones(2, 1))
    >>> norm.running_mean.item()
    0.0
    """
    plain = [module for module in modules if not isinstance(module, torch.jit.ScriptModule)]
    homes = [home for module in plain for home in (module._buffers, vars(module))]
    before = [dict(home) for home in homes]
    tensors = {id(value): value for home in homes for value in home.values() if isinstance(value, Tensor)}
    copies = {key: tensor.detach().clone() for key, tensor in tensors.items()}
    for home in homes:
        home.update({key: copies[id(value)] for key, value in home.items() if isinstance(value, Tensor)})
    try:
        yield
    finally:
        for home, values in zip(homes, before, strict=True):
            home.clear()
            home.update(values)


def try_call(model: nn.Module, examples: Examples, what: str = "example inputs") -> Any:
    """The same, with whatever fails in the model told in a line."""
    try:
        return call(model, examples)
    except UserError:
        raise
    except Exception as why:
        raise UserError(f"the model can't be run on the {what}: {first_line(why)}.") from why


def arguments(examples: Examples) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The examples as positional and keyword arguments."""
    if isinstance(examples, Tensor):
        return (examples,), {}
    if isinstance(examples, Mapping):
        return (), dict(examples)
    if isinstance(examples, tuple | list):
        return tuple(examples), {}
    raise UserError(f"example inputs: a tensor, a tuple or a dict of tensors is wanted, not {type(examples).__name__}.")


def batch_of(examples: Examples) -> int:
    """How many examples there are: the first size of the first tensor, or the number of images in a list of them.

    >>> batch_of(({"image": torch.zeros(4, 3), "label": torch.zeros(4)},))
    4
    """
    for value in pytree.tree_leaves(arguments(examples), is_leaf=_is_image_list):
        if _is_image_list(value):
            return len(value)
        if isinstance(value, Tensor) and value.dim() > 0 and len(value) > 0:
            return len(value)
    raise UserError("example inputs: there is no tensor with a batch dimension among them.")


def with_batch(examples: Examples, size: int) -> Examples:
    """The same examples, repeated or cut to a batch of `size`; what has another first size is left alone."""
    batch = batch_of(examples)

    def fit(value: Any) -> Any:
        if _is_image_list(value) and len(value) == batch:
            return [value[i % batch] for i in range(size)]
        if not isinstance(value, Tensor) or value.dim() == 0 or len(value) != batch:
            return value
        return value[torch.arange(size, device=value.device) % batch]

    args, kwargs = pytree.tree_map(fit, arguments(examples), is_leaf=_is_image_list)
    return kwargs if kwargs else args


def _is_image_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(image, Tensor) for image in value)


def device_of(model: nn.Module) -> torch.device:
    """Where the model's first parameter or buffer is."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")
