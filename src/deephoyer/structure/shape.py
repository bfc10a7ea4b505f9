"""The shape of a compacted network as plain data, and a fresh network brought into that shape.

`describe` is what a file keeps beside the tensors; `reshape_` needs no graph and no example inputs.
A description may come from anywhere: every word of it is checked against the fresh network before
anything is changed, and nothing in it is ever looked up outside that network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from deephoyer.errors import UserError, first_line
from deephoyer.structure.attention import narrow, opened
from deephoyer.structure.joints import ConstantLayer, Gather, Joint, replace
from deephoyer.structure.layers import CONV, LINEAR, NORM, WIRING, LayerKind, Renewed, kind_of, loose_tensors, put, size
from deephoyer.structure.narrowed import PLACE, RECORD, narrowed, set_size, sizes_of
from deephoyer.structure.remove import owner, resize

VERSION = 1
Entry = dict[str, Any]


class BadShape(UserError):
    """A description that doesn't fit the network it is applied to."""


def describe(model: nn.Module) -> dict[str, Any]:
    """The sizes of all layers and joints of a model; made of dicts, lists, strings and numbers.

    >>> describe(nn.Linear(3, 2))["modules"]
    {'': {'kind': 'linear', 'out': 2, 'in': 3, 'bias': True}}
    """
    modules: dict[str, Entry] = {}
    inside: set[str] = set()
    for name, module in model.named_modules():
        if isinstance(module, Gather):
            inside.add(_join(name, "layer"))
            modules[name] = _gather_entry(module)
        elif isinstance(module, ConstantLayer):
            modules[name] = {
                "kind": "constant",
                "of": module.kind,
                "out": module.value.numel(),
                "trained": isinstance(module.value, nn.Parameter),
            }
        elif name not in inside and (kind := kind_of(module)) is not None:
            modules[name] = _layer_entry(module, kind)
        if isinstance(module, Joint) and module.bears_name:
            modules[name]["named"] = True
    loose = {name: list(tensor.shape) for name, tensor in _loose(model).items() if not _made_anew(model, name)}
    sizes = {name: dict(sizes_of(module)) for name, module in model.named_modules() if hasattr(module, RECORD)}
    return {"version": VERSION, "modules": modules, "tensors": loose} | ({"sizes": sizes} if sizes else {})


def _layer_entry(module: nn.Module, kind: LayerKind) -> Entry:
    if kind is WIRING:
        return {"kind": kind.name, "in": int(module.in_channels), "source": list(module.source)}  # type: ignore
    entry: Entry = {"kind": kind.name, "out": size(module, kind, "out")}
    if "in" in kind.sides():
        entry["in"] = size(module, kind, "in")
        entry["bias"] = module.bias is not None
    if kind is CONV:
        entry["groups"] = int(module.groups)  # type: ignore[arg-type]
    return entry


def _gather_entry(joint: Gather) -> Entry:
    kind = kind_of(joint.layer)
    assert kind is not None
    sizes = {key: None if t is None else t.numel() for key, t in (("read", joint.read), ("write", joint.write))}
    return {"kind": "gather", **sizes, "fill": joint.fill is not None, "layer": _layer_entry(joint.layer, kind)}


def reshape_(model: nn.Module, description: Mapping[str, Any]) -> None:
    """Brings a freshly built model into the described shape, so that the state dict of the other fits.

    Values are left to `load_state_dict`; `check_joints` must be called after it.
    """
    _require(isinstance(description, Mapping), "it is not a mapping")
    wanted = {"version", "modules", "tensors"}
    _require(set(description) - {"sizes"} == wanted, "it must hold version, modules and tensors")
    _require(description["version"] == VERSION, f"its version is {description['version']!r}, not {VERSION}")
    steps = _module_steps(model, description["modules"]) + _tensor_steps(model, description["tensors"])
    steps += _size_steps(model, description.get("sizes", {}))
    renewed = Renewed()
    for step in steps:
        step(renewed)


def part_for(model: nn.Module, description: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a description that says this model's shape, if it was inside of the model described; else all.

    >>> outer = nn.Sequential(nn.Sequential(nn.Linear(3, 2)), nn.Linear(2, 1))
    >>> part_for(outer[0], describe(outer))["modules"]
    {'0': {'kind': 'linear', 'out': 2, 'in': 3, 'bias': True}}
    """
    known = {name for name, module in model.named_modules() if kind_of(module) is not None}
    modules = description.get("modules") if isinstance(description, Mapping) else None
    if not isinstance(modules, Mapping) or not known or known <= set(modules):
        return description
    first = min(known)
    for prefix in [name.removesuffix(first) for name in modules if name.endswith(f".{first}")]:
        if {name.removeprefix(prefix) for name in modules if name.startswith(prefix)} == known:
            return {
                key: {n.removeprefix(prefix): its for n, its in part.items() if n.startswith(prefix)}
                if isinstance(part, Mapping)
                else part
                for key, part in description.items()
            }
    return description


def check_joints(model: nn.Module) -> None:
    """Index tensors come from the same file: all must point inside what they pick from."""
    for name, module in model.named_modules():
        if not isinstance(module, Gather):
            continue
        kind = kind_of(module.layer)
        assert kind is not None
        for key, top in (("read", module.width), ("write", size(module.layer, kind, "out") + 1)):
            index = getattr(module, key)
            if index is not None and (index.min() < 0 or index.max() >= top):
                raise BadShape(f"shape: {name}.{key} points outside 0…{top - 1}.")
        module.find_places()


Step = Callable[[Renewed], None]


def _module_steps(model: nn.Module, modules: Any) -> list[Step]:
    _require(isinstance(modules, Mapping), "its modules are not a mapping")
    known = {name: module for name, module in model.named_modules() if kind_of(module) is not None}
    for name in modules:
        _require(isinstance(name, str) and name in known, f"the model has no layer {name!r}")
    for name in known:
        _require(name in modules, f"it says nothing of layer {name!r}")
    return [_module_step(model, name, known[name], modules[name]) for name in known]


def _module_step(model: nn.Module, name: str, module: nn.Module, entry: Any) -> Step:
    _require(isinstance(entry, Mapping) and isinstance(entry.get("kind"), str), f"{name!r} has no kind")
    kind = kind_of(module)
    assert kind is not None
    if entry["kind"] == "constant":
        return _constant_step(model, name, module, kind, entry)
    if entry["kind"] == "gather":
        return _gather_step(model, name, module, kind, entry)
    _check_layer(name, module, kind, entry)
    return lambda renewed: _shrink(module, kind, entry, renewed)


def _check_layer(name: str, module: nn.Module, kind: LayerKind, entry: Any) -> None:
    _require(isinstance(entry, Mapping) and entry.get("kind") == kind.name, f"{name!r} is a {kind.name} layer")
    _require(set(entry) == _keys(kind), f"{name!r} must have {', '.join(sorted(_keys(kind)))}")
    if kind is WIRING:
        width = _number(name, entry["in"], 1, size(module, kind, "in"))
        source = entry["source"]
        _require(isinstance(source, list) and 0 < len(source) <= size(module, kind, "out"), f"{name!r}: bad source")
        for s in source:
            _number(name, s, -1, width - 1)
        return
    out = _number(name, entry["out"], 1, size(module, kind, "out"))
    if "in" not in entry:
        return
    ins = _number(name, entry["in"], 1, size(module, kind, "in"))
    _require(isinstance(entry["bias"], bool), f"{name!r}: bias must be true or false")
    _require(bool(entry["bias"]) or module.bias is None, f"{name!r} has a bias")
    if kind is CONV:
        groups = _number(name, entry["groups"], 1, int(module.groups))  # type: ignore[arg-type]
        _require(out % groups == 0 and ins % groups == 0, f"{name!r}: {groups} groups don't divide its channels")
        per = int(module.in_channels) // int(module.groups)  # type: ignore[arg-type]
        _require(ins // groups <= per, f"{name!r}: groups of {ins // groups} channels, more than {per}")


def _keys(kind: LayerKind) -> set[str]:
    if kind is WIRING:
        return {"kind", "in", "source"}
    sides = {"in", "bias"} if "in" in kind.sides() else set()
    return {"kind", "out"} | sides | ({"groups"} if kind is CONV else set())


def _constant_step(model: nn.Module, name: str, module: nn.Module, kind: LayerKind, entry: Any) -> Step:
    _require(set(entry) - {"named"} == {"kind", "of", "out", "trained"}, f"{name!r}: a constant has of, out, trained")
    _require(kind in (LINEAR, CONV, NORM) and entry["of"] == kind.name, f"{name!r} is a {kind.name} layer")
    _require(isinstance(entry["trained"], bool), f"{name!r}: trained must be true or false")
    count = _number(name, entry["out"], 1, size(module, kind, "out"))
    like = next((t for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()), torch.zeros(1))
    value = like.detach().new_zeros(count)
    named = _named(name, entry)

    def step(renewed: Renewed) -> None:
        constant = ConstantLayer(module, value, entry["trained"])
        if named:
            constant.bear_name(value)
        replace(model, name, constant)

    return step


def _named(name: str, entry: Any) -> bool:
    named = entry.get("named", False)
    _require(isinstance(named, bool), f"{name!r}: named must be true or false")
    return bool(named)


def _gather_step(model: nn.Module, name: str, module: nn.Module, kind: LayerKind, entry: Any) -> Step:
    keys = {"kind", "read", "write", "fill", "layer"}
    _require(set(entry) - {"named"} == keys and name != "", f"{name!r}: a joint has read, write, fill and layer")
    _require(kind in (LINEAR, CONV), f"{name!r} can't have a joint")
    _check_layer(name, module, kind, entry["layer"])
    _require(isinstance(entry["fill"], bool), f"{name!r}: fill must be true or false")
    index: dict[str, Tensor | None] = {"read": None, "write": None}
    if entry["read"] is not None:
        _require(entry["read"] == entry["layer"]["in"], f"{name!r}: reads other than its inputs")
        index["read"] = torch.zeros(_number(name, entry["read"], 1, size(module, kind, "in")), dtype=torch.long)
    if entry["write"] is not None:
        index["write"] = torch.zeros(_number(name, entry["write"], 1, size(module, kind, "out")), dtype=torch.long)
    _require(not (entry["fill"] and entry["write"] is None), f"{name!r}: a fill without write")
    weight, named = module.weight, _named(name, entry)
    assert isinstance(weight, Tensor)

    def step(renewed: Renewed) -> None:
        width = size(module, kind, "in")
        _shrink(module, kind, entry["layer"], renewed)
        fill = weight.detach().new_zeros(entry["write"]) if entry["fill"] else None
        joint = Gather(module, index["read"], index["write"], fill, width)
        if named:
            joint.bear_name(weight)
        replace(model, name, joint)

    return step


def _shrink(module: nn.Module, kind: LayerKind, entry: Any, renewed: Renewed) -> None:
    if kind is WIRING:
        module.arrange(entry["in"], entry["source"])  # type: ignore[operator]
        return
    if entry.get("bias") and module.bias is None:
        like = module.weight
        assert isinstance(like, Tensor)
        module.bias = nn.Parameter(like.detach().new_zeros(entry["out"]), requires_grad=like.requires_grad)
    for name in dict.fromkeys([*kind.out, *kind.into]):
        tensor = getattr(module, name)
        if tensor is None:
            continue
        shape = list(tensor.shape)
        if name in kind.out:
            shape[kind.out[name]] = entry["out"]
        if name in kind.into:
            shape[kind.into[name]] = entry["in"] // entry.get("groups", 1)
        _resize(module, name, shape, renewed)
    for side in kind.sides():
        setattr(module, kind.out_size if side == "out" else str(kind.in_size), entry[side])
    if "groups" in entry:
        module.groups = entry["groups"]


def _resize(module: nn.Module, name: str, shape: list[int], renewed: Renewed) -> None:
    tensor = getattr(module, name)
    if (known := renewed.get(tensor)) is not None:
        _require(list(known.shape) == shape, f"two layers share {name!r} but not its shape")
        setattr(module, name, known)
    elif list(tensor.shape) != shape:
        put(module, name, tensor.detach()[tuple(slice(n) for n in shape)], renewed)
        resize(module)


def _tensor_steps(model: nn.Module, tensors: Any) -> list[Step]:
    _require(isinstance(tensors, Mapping), "its tensors are not a mapping")
    known = _loose(model)
    whole = [name for name in known if isinstance(owner(model, name)[0], nn.MultiheadAttention)]  # as files once had it
    whole += [name for name in known if _made_anew(model, name)]
    said = {id(known[name]): shape for name, shape in tensors.items() if name in known}
    fits = set(tensors) <= set(known) and all(id(t) in said or name in whole for name, t in known.items())
    _require(fits, f"its tensors must be {', '.join(known) or 'none'}")
    steps: list[Step] = []
    for name, tensor in known.items():  # tied ones by all of their names, of which the description may have one
        shape = tensors.get(name, said.get(id(tensor), list(tensor.shape)))
        full = tensor.shape
        _require(isinstance(shape, list) and len(shape) == len(full), f"{name!r} has {len(full)} dimensions")
        for n, most in zip(shape, full, strict=True):
            _number(name, n, min(1, most), most)
        module, attribute = owner(model, name)
        steps.append(lambda renewed, m=module, a=attribute, s=shape: _resize(m, a, s, renewed))  # type: ignore[misc]
    return steps


def _size_steps(model: nn.Module, sizes: Any) -> list[Step]:
    """What the modules' own code must be told: attributes, and sizes at calls."""
    _require(isinstance(sizes, Mapping), "its sizes are not a mapping")
    modules = dict(model.named_modules())
    steps: list[Step] = []
    for name, its in sizes.items():
        _require(isinstance(name, str) and name in modules, f"the model has no module {name!r}")
        _require(isinstance(its, Mapping), f"the sizes of {name!r} are not a mapping")
        for key, value in its.items():
            _require(isinstance(key, str), f"{name!r}: {key!r} is not a size")
            steps.append(_size_step(modules[name], name, key, value))
    return steps


def _size_step(module: nn.Module, name: str, key: str, value: Any) -> Step:
    if ":" in key:
        _require(PLACE.fullmatch(key) is not None, f"{name!r}: {key!r} is not a size of a call")
        size = _number(name, value, 0, 2**31)
        return lambda renewed: narrowed(module, key, size)
    before = vars(module).get(key)
    if isinstance(before, float) and isinstance(value, float):
        _require(0 < value < 1, f"{name!r}: {value!r} is no {key}")
        return lambda renewed: set_size(module, key, value)
    _require(isinstance(before, int) and not isinstance(before, bool), f"{name!r} has no size {key!r}")
    size = _number(name, value, 1, int(before or 0))
    if opened(module) and key == "num_heads":
        return lambda renewed: narrow(module, size)  # type: ignore[arg-type]
    return lambda renewed: set_size(module, key, size)


def _loose(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in loose_tensors(model) if not _of_a_joint(model, name)}


def _made_anew(model: nn.Module, name: str) -> bool:
    """Whether a buffer is none of the state dict's: a model makes it for itself, and maybe longer while it runs."""
    module, attribute = owner(model, name)
    return attribute in module._non_persistent_buffers_set


def _of_a_joint(model: nn.Module, name: str) -> bool:
    return isinstance(owner(model, name)[0], Gather | ConstantLayer)


def _number(name: str, value: Any, low: int, high: int) -> int:
    good = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
    _require(good, f"{name!r}: {value!r} is not a whole number in {low}…{high}")
    return int(value)


def _require(good: bool, what: str) -> None:
    if not good:
        raise BadShape(f"shape: the description doesn't fit this model: {first_line(what, 300)}.")


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
