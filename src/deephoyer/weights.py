"""Which parameters of a module are meant, and which of their dimensions are outputs and inputs.

Groupings, rules and the accounting all start from the list that `find_weights` gives: matrices and filters that inputs
are multiplied by, whatever their layer's class or their parameter is called. `left_out` says what is not among them,
and why. Not here: what is done with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.weight_norm import WeightNorm
from torch.optim.swa_utils import AveragedModel

from deephoyer.errors import UserError, shown

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
LAYERS = (nn.Linear, *CONVOLUTIONS, *TRANSPOSED)
UNKNOWN_USE = "of unknown use"
AROUND = (nn.DataParallel, nn.parallel.DistributedDataParallel, AveragedModel)
WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


@dataclass(frozen=True, eq=False)
class Weight:
    """A parameter with its place: which dimension is its outputs, which its inputs.

    Dimension 0 is whole, dimension 1 is cut by convolution groups. If neither is dimension 0, it numbers the matrices.
    """

    name: str
    tensor: Tensor
    out_dim: int = 0
    in_dim: int = 1
    groups: int = 1

    @property
    def stacked(self) -> bool:
        """Whether it is one matrix per expert of a mixture, each with outputs and inputs of its own."""
        return 0 not in (self.out_dim, self.in_dim)


def find_weights(model: nn.Module, parameters: str | Iterable[str] | None = None, frozen: bool = False) -> list[Weight]:
    """The parameters that match the glob patterns `parameters`, each once however often it is tied.

    By default what inputs are multiplied by: weights of linear, convolution and recurrent layers, projections of
    attention, Hugging Face's `Conv1D`, the stacked matrices of a mixture of experts; no biases, norms or embeddings
    (`left_out` names them). A model without any such layer has every matrix of its own taken, dimension 0 for its
    outputs. A pattern that starts with `!` takes out what
    earlier ones took in, or of the default if there are only such.
    Frozen parameters are left alone unless `frozen` is true; empty ones always are.

    >>> [w.name for w in find_weights(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))]
    ['0.weight']
    >>> [w.name for w in find_weights(nn.Linear(3, 2), "*")]
    ['weight', 'bias']
    """
    patterns = patterns_of(parameters)
    default = _default(model)
    placed = {id(tensor): place for tensor, place in reversed(default.values())}
    found: dict[int, Weight] = {}
    unmatched = set(patterns or ())
    only_out = all(p.startswith("!") for p in patterns or ())
    for name, tensor in named_parameters(model):
        wanted = _wanted(name, patterns or (), unmatched, only_out and name in default)
        if not wanted or id(tensor) in found or not (tensor.requires_grad or frozen):
            continue
        _refuse_unusable(name, tensor)
        if tensor.numel():
            found[id(tensor)] = Weight(name, tensor, *placed.get(id(tensor), (0, 1, 1)))
    positive = {p for p in unmatched if not p.startswith("!")}
    if positive:
        names = [n for n, _ in named_parameters(model)]
        some = ", ".join(names[:6]) + (", …" if len(names) > 6 else "")
        raise UserError(f"parameters: no parameter matches {shown(sorted(positive)[0])}. There is {some or 'none'}.")
    if not found and patterns:
        raise UserError(f"parameters: {', '.join(map(shown, patterns[:6]))} leaves no trainable parameter to work on.")
    if not found and (computed := _computed(model)):
        raise UserError(
            f"no parameters to work on: {computed[0]} is computed from other tensors (weight norm, a parametrization, "
            "a mask of torch.nn.utils.prune). Make it plain again, or say with parameters= which are meant."
        )
    if not found:
        raise UserError(
            "no parameters to work on: the model has no trainable linear, convolution or recurrent weights"
            f"{_trainable(model)}."
        )
    return list(found.values())


def all_weights(model: nn.Module) -> list[Weight]:
    """What inputs are multiplied by, frozen, tied and computed ones included, each under all of its names.

    >>> tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)); tied[1].weight = tied[0].weight
    >>> [w.name for w in all_weights(tied)]
    ['0.weight', '1.weight']
    """
    found = [Weight(name, tensor, *place) for name, (tensor, place) in _default(model, computed=True).items()]
    return [weight for weight in found if not is_lazy(weight.tensor)]


def all_computed(model: nn.Module) -> bool:
    """Whether layers have weights that are computed from other tensors, and none has one of its own.

    >>> layer = nn.Linear(2, 2)
    >>> all_computed(layer), all_computed(nn.utils.parametrizations.weight_norm(layer))
    (False, True)
    """
    return bool(_computed(model)) and not _default(model)


def directions(model: nn.Module) -> dict[str, tuple[str, int]]:
    """What weight norm divides by its length: by name, which parameter has the lengths and along which dimension.

    >>> directions(nn.utils.parametrizations.weight_norm(nn.Linear(2, 3)))
    {'parametrizations.weight.original1': ('parametrizations.weight.original0', 0)}
    """
    found: dict[str, tuple[str, int]] = {}
    for name, module in named_modules(model):
        prefix = f"{name}." if name else ""
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, WeightNorm):
                found[f"{prefix}{hook.name}_v"] = (f"{prefix}{hook.name}_g", hook.dim)
        if isinstance(module, ParametrizationList) and isinstance(module[0], _WeightNorm):
            found[f"{prefix}original1"] = (f"{prefix}original0", module[0].dim)
    return found


def left_out(model: nn.Module, covered: Iterable[str]) -> dict[str, str]:
    """The parameters that are not `covered`, with what each is; tied ones under no second name.

    Biases and norms go with their layers and are seldom meant; a matrix of unknown use may well be.

    >>> left_out(nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 2)), ["1.weight"])
    {'0.weight': 'embedding', '1.bias': 'bias or norm'}
    """
    names, kinds = set(covered), {name: type(module) for name, module in named_modules(model)}
    every = dict(named_parameters(model))
    seen = {id(every[name]) for name in names if name in every}
    default = _default(model)
    computed = tuple(_computed(model))  # 0.weight, from 0.parametrizations.weight.original0 or from 0.weight_orig
    found: dict[str, str] = {}
    for name, tensor in every.items():
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        owner = kinds.get(name.rpartition(".")[0], nn.Module)
        if name.replace("parametrizations.", "").startswith(computed):
            found[name] = "what a weight is computed from"
        elif name in default:
            found[name] = "in no group" if tensor.requires_grad else "frozen"
        else:
            found[name] = _use(name, owner, tensor)
    return found


def _use(name: str, owner: type[nn.Module], tensor: Tensor) -> str:
    """What a parameter that is no known layer's weight is likely to be, by its name and the class of its module."""
    if issubclass(owner, (nn.Embedding, nn.EmbeddingBag)):
        return "embedding"
    small = tensor.dim() < 2 or "Norm" in owner.__name__ or name.endswith("bias")
    return "bias or norm" if small else UNKNOWN_USE


def told(left: Mapping[str, str]) -> str:
    """What was left out, in a line; every name of those that are seldom expected.

    >>> told({"cls": "of unknown use", "a.bias": "bias or norm", "b.bias": "bias or norm"})
    'left out: 1 of unknown use (cls), 2 bias or norm'
    """
    kinds: dict[str, list[str]] = {}
    for name, kind in left.items():
        kinds.setdefault(kind, []).append(name)
    rank = sorted(kinds, key=lambda kind: (kind == "bias or norm", kind == "embedding"))
    shown = []
    for kind in rank:
        names = kinds[kind]
        some = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
        shown.append(f"{len(names)} {kind}" + ("" if kind == "bias or norm" else f" ({some})"))
    return "left out: " + ", ".join(shown) if shown else ""


def named_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters under the names they have in the plain module, whatever it is wrapped in; tied ones repeated.

    So a mask made while training through torch.compile, DistributedDataParallel or activation
    checkpointing fits the module that was wrapped.
    """
    for name, tensor in unwrap(model).named_parameters(remove_duplicate=False):
        yield plain_name(name), tensor


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules under the names they have in the plain module, whatever it is wrapped in; shared ones repeated."""
    for name, module in unwrap(model).named_modules(remove_duplicate=False):
        yield plain_name(f"{name}.").removesuffix("."), module


def hookable_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules that take a hook, which scripted ones don't."""
    for name, module in model.named_modules():
        if not isinstance(module, torch.jit.ScriptModule):
            yield name, module


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside `torch.compile`, the data-parallel wrappers and an average of weights."""
    if not isinstance(model, nn.Module):
        raise UserError(f"{shown(model)} is not a model: a torch.nn.Module is wanted, not {type(model).__name__}.")
    while isinstance(model, AROUND) or hasattr(model, "_orig_mod"):
        model = model._orig_mod if hasattr(model, "_orig_mod") else model.module  # type: ignore[assignment]
    if isinstance(model, torch.jit.ScriptModule):
        raise UserError("the model is compiled by TorchScript, and its layers can't be changed: give the one it is of.")
    return model


def with_values(model: nn.Module, meta: bool = False) -> nn.Module:
    """The module inside wrappers; a `UserError` where a tensor of it is stored sparse, or is on the meta device."""
    model = unwrap(model)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor) or tensor.layout != torch.strided or (tensor.is_meta and not meta):
            _refuse_unusable(name, tensor)
    return model


def patterns_of(parameters: Any, key: str = "parameters") -> list[str] | None:
    """A glob pattern or several as a list; None where nothing is said."""
    if parameters is None or isinstance(parameters, str):
        return None if parameters is None else [parameters]
    several = isinstance(parameters, Iterable) and not isinstance(parameters, Tensor)
    patterns = list(parameters) if several else [parameters]
    if not all(isinstance(p, str) for p in patterns):
        raise UserError(f"{key}: {shown(parameters)} is neither a glob pattern nor a list of them.")
    return patterns


def _refuse_unusable(name: str, tensor: Tensor) -> None:
    """What has no real values of its own can be neither regularized nor pruned."""
    if is_lazy(tensor):
        raise UserError(f"{name} has no shape yet, as its layer is lazy: run one batch through the model first.")
    if tensor.is_meta:
        raise UserError(f"{name} is on the meta device and has no values yet: load or initialize the model first.")
    if tensor.layout != torch.strided:
        raise UserError(f"{name} is stored sparse ({tensor.layout}); make it dense first: to_dense().")
    if not tensor.is_floating_point():
        what = "complex" if tensor.is_complex() else "quantized or whole"
        raise UserError(
            f"{name} holds {what} numbers ({tensor.dtype}): only real floating-point weights can be worked on."
        )


def plain_name(name: str) -> str:
    """The name of a parameter in the plain module, whatever that and the modules in it are wrapped in.

    >>> plain_name("blocks.0._orig_mod.weight")
    'blocks.0.weight'
    """
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _default(model: nn.Module, computed: bool = False) -> dict[str, tuple[Tensor, tuple[int, int, int]]]:
    """By name, what inputs are multiplied by; and its dimension of outputs, of inputs, its convolution groups."""
    found: dict[str, tuple[Tensor, tuple[int, int, int]]] = {}
    for prefix, module in named_modules(model):
        for name, place in _places(module).items():
            tensor = getattr(module, name, None) if computed else dict(module._parameters.items()).get(name)
            if isinstance(tensor, Tensor):
                found[f"{prefix}.{name}".removeprefix(".")] = (tensor, place)
    return found or _matrices(model)


def _matrices(model: nn.Module) -> dict[str, tuple[Tensor, tuple[int, int, int]]]:
    """What a model without known layers has instead: matrices that its forward multiplies by itself (`x @ self.w`)."""
    if _computed(model):
        return {}
    owners = {name: type(module) for name, module in named_modules(model)}
    return {
        name: (tensor, (0, 1, 1))
        for name, tensor in named_parameters(model)
        if not is_lazy(tensor) and _use(name, owners.get(name.rpartition(".")[0], nn.Module), tensor) == UNKNOWN_USE
    }


def _places(module: nn.Module) -> dict[str, tuple[int, int, int]]:
    """The module's own parameters that inputs are multiplied by, with output dimension, input dimension, groups."""
    plain = (0, 1, 1)
    if isinstance(module, TRANSPOSED):
        return {"weight": (1, 0, module.groups)}
    if isinstance(module, CONVOLUTIONS):
        return {"weight": (0, 1, module.groups)}
    if isinstance(module, (nn.Linear, nn.Bilinear)):
        return {"weight": plain}
    if isinstance(module, nn.MultiheadAttention):
        return dict.fromkeys(("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"), plain)
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        return {name: plain for name in module._parameters if name.startswith("weight_")}
    return _of_experts(module) or _by_its_sizes(module)


def _of_experts(module: nn.Module) -> dict[str, tuple[int, int, int]]:
    """A mixture's stacked matrices, one per expert, and the matrix of its router.

    Such a module says how many experts there are. Which side is which: Hugging Face's `is_transposed`, or the first
    matrix reads the width that the module calls hidden.
    """
    counts = {n for key, n in vars(module).items() if "expert" in key and type(n) is int and n > 1}
    stacks = {n: p for n, p in _matrices_of(module) if p.dim() == 3 and p.shape[0] in counts}
    if not stacks:
        router = dict(_matrices_of(module)).get("weight")
        return {"weight": (0, 1, 1)} if router is not None and router.dim() == 2 and router.shape[0] in counts else {}
    hidden = {getattr(module, key, None) for key in ("hidden_size", "hidden_dim", "input_size")}
    _, rows, columns = next(iter(stacks.values())).shape
    transposed = getattr(module, "is_transposed", rows in hidden and columns not in hidden)
    return dict.fromkeys(stacks, (2, 1, 1) if transposed else (1, 2, 1))


def _matrices_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in module._parameters.items():
        if tensor is not None and not is_lazy(tensor) and _use(name, type(module), tensor) == UNKNOWN_USE:
            yield name, tensor


def _by_its_sizes(module: nn.Module) -> dict[str, tuple[int, int, int]]:
    """A layer of somebody's own with a matrix `weight`, whose attributes say which side is which.

    Hugging Face's `Conv1D` is a linear layer with its matrix transposed and calls its outputs `nf`.
    """
    weight = dict(module._parameters.items()).get("weight")  # of a scripted module it is no dict
    if weight is None or is_lazy(weight) or weight.dim() != 2:
        return {}
    for out, into in (("out_features", "in_features"), ("out_channels", "in_channels")):
        sizes = getattr(module, out, None), getattr(module, into, None)
        if sizes == tuple(weight.shape):
            return {"weight": (0, 1, 1)}
        if sizes == tuple(reversed(weight.shape)):
            return {"weight": (1, 0, 1)}
    if getattr(module, "nf", None) == weight.shape[1]:
        return {"weight": (1, 0, 1)}
    return {}


def _trainable(model: nn.Module) -> str:
    """What there is instead of weights, and how to choose from it, as the end of a sentence."""
    shapes = {name: "×".join(map(str, t.shape)) for name, t in named_parameters(model) if t.requires_grad}
    if not shapes:
        return ", and nothing else that is trainable"
    some = ", ".join(f"{name} ({shape})" for name, shape in list(shapes.items())[:6])
    more = ", …" if len(shapes) > 6 else ""
    return f". Trainable are {some}{more}: name what is meant, as in parameters=[{next(iter(shapes))!r}]"


def _computed(model: nn.Module) -> list[str]:
    """Weights of layers that are no parameters but made from some."""
    layers = ((name, module) for name, module in named_modules(model) if isinstance(module, LAYERS))
    return [f"{name}.weight".removeprefix(".") for name, m in layers if m._parameters.get("weight") is None]


def _wanted(name: str, patterns: Iterable[str], unmatched: set[str], wanted: bool) -> bool:
    for pattern in patterns:
        if fnmatchcase(name, pattern.removeprefix("!")):
            unmatched.discard(pattern)
            wanted = not pattern.startswith("!")
    return wanted
