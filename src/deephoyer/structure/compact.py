"""A smaller network that computes the same: dead channels, neurons, inputs and branches taken out, and proof.

A channel is dead when nothing reads it; one that nothing reaches is a constant, folded into its readers
first, so that nothing reads it either. All is done on copies. Whatever something was taken out of is
compared to the original on the example inputs and on random ones each time.
"""

from __future__ import annotations

import dataclasses
import inspect
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from deephoyer.errors import UserError, one_of, shown, true_or_false
from deephoyer.inference import Examples, arguments, outside_modes
from deephoyer.pretrained import note_shape
from deephoyer.structure.channels import IN, OUT, ChannelGraph, Place
from deephoyer.structure.coupled import Coupled, clean_copy, shared_copy, take_out, uncalled
from deephoyer.structure.equality import Differs, same
from deephoyer.structure.fold_constants import Folded, fold, shared_layers
from deephoyer.structure.joints import ConstantLayer, around, gather, laid_out, merged, replace
from deephoyer.structure.layers import CONV, EMBEDDING, LINEAR, NORM, WIRING, filled, kind_of, size
from deephoyer.structure.remove import alive_outputs, own_parameters, spare_last, tensor_of, zero
from deephoyer.text_table import text_table
from deephoyer.weights import with_values

JOINTS = ("none", "gather")


@dataclass
class SetReport:
    """One coupled set: how many channels it had, how many went, and why it had to stay if it had to.

    Of attention heads `heads` says which stayed; of plain channels it is None.
    """

    name: str
    channels: int
    removed: int
    reason: str | None = None
    heads: list[bool] | None = None


@dataclass
class CompactReport:
    """What compaction did: to sets of channels, constants, whole layers, inputs; and how close the outputs are.

    `error` is the largest difference of an output, relative to the scale of all: rounding, where it is `exact`.

    `without` are optional arguments that the examples leave out, where constants were folded: with them those may be
    none. `idle` are layers that eval mode never calls (auxiliary heads): they are left as they were, and may
    no longer fit what feeds them in training.
    """

    sets: list[SetReport] = field(default_factory=list)
    folded: dict[str, int] = field(default_factory=dict)
    kept: dict[str, tuple[int, str]] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)
    without: list[str] = field(default_factory=list)
    joints: dict[str, dict[str, tuple[int, int]]] = field(default_factory=dict)
    exact: bool = True
    parameters_before: int = 0
    parameters_after: int = 0
    error: float = 0.0

    @property
    def removed(self) -> int:
        return sum(one.removed for one in self.sets)

    def __str__(self) -> str:
        """A table of the sets, and a line for everything else that was removed, or kept and why."""
        titles = ["coupled set", "why it stays", "channels", "removed"]
        rows = [[s.name, s.reason or "", f"{s.channels:,}", f"{s.removed:,}"] for s in self.sets]
        share = self.parameters_after / max(self.parameters_before, 1)
        lines = [
            text_table("removed channels", titles, rows, words=2),
            f"parameters: {self.parameters_before:,} → {self.parameters_after:,} ({share:.1%} left); largest output "
            f"difference: {self.error:.1e} of their scale{'' if self.exact else ', not exact: finetune it'}",
        ]
        if self.parameters_after == self.parameters_before:
            lines.append(
                "nothing was removed: a channel goes when all its weights are zero, as after "
                "dh.prune(model, …, groups=dh.Coupled(model, example_inputs))"
            )
        lines += [f"constants folded into {layer}: {count}" for layer, count in self.folded.items()]
        if self.folded and self.without:
            lines.append(
                f"what is folded is constant without {', '.join(self.without)}: "
                "what will be given must be among the example inputs"
            )
        lines += [f"constants kept before {layer or 'some layers'}: {why}" for layer, (_, why) in self.kept.items()]
        lines += [f"layers removed: {', '.join(self.dropped)}"] if self.dropped else []
        lines += [f"joints around: {', '.join(self.joints)}"] if self.joints else []
        lines += [idle_line(self.idle)] if self.idle else []
        return "\n".join(lines)


def idle_line(names: list[str]) -> str:
    return f"not called in eval mode, so unchanged; may no longer fit in training: {', '.join(names)}"


@outside_modes
def compact(
    model: nn.Module,
    example_inputs: Examples,
    *,
    groups: Coupled | None = None,
    joints: str = "none",
    exact: bool = True,
) -> nn.Module:
    """A new module with the same outputs, from which everything dead is removed; the model itself is unchanged.

    Example inputs that are not tensors (a flag, a number) are treated as constants of the network.
    `groups` shares the graph of a `Coupled` made from this model. With `joints="gather"` each layer also
    loses the inputs and outputs that are dead only in it, with index selection around it. With `exact=False`, which
    `groups` must then be made with too, dead channels that a layer norm is over go as well (a transformer's width):
    that is *not* the same function, to be finetuned, and the report says by how much it differs.

    >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> _ = net[0].weight.data[1].zero_(), net[0].bias.data[1].zero_()
    >>> compact(net, torch.randn(5, 4))
    Sequential(
      (0): Linear(in_features=4, out_features=2, bias=True)
      (1): ReLU()
      (2): Linear(in_features=2, out_features=2, bias=True)
    )
    """
    one_of("kind of joint", joints, JOINTS)
    true_or_false(exact, "compact: exact")
    if groups is not None and not isinstance(groups, Coupled):
        raise UserError(f"compact: groups is {shown(groups)}; it must be a `Coupled` of this model, or left out.")
    if groups is not None and groups.graph.exact != exact:
        raise UserError(f"compact: exact={exact}, but the groups were made with exact={groups.graph.exact}.")
    model = with_values(model)
    if groups is None:
        model = _without_masks(model)
    graph = _graph(model, groups or Coupled(model, example_inputs, exact))
    if joints == "gather":
        return _compacted(model, example_inputs, graph, _inner(graph), True)
    for jointed in (_reads_input(model, graph), []):
        # A forward of its own may ask a layer for what a joint doesn't have, its sizes or its weight.
        with suppress(Differs):
            return _compacted(model, example_inputs, graph, jointed, False)
    # Or use a layer's weight elsewhere too, as a decoder does that is its encoder turned round.
    return _compacted(model, example_inputs, graph, [], False, folds=False)


def _without_masks(model: nn.Module) -> nn.Module:
    """The model itself; or a copy in which what `torch.nn.utils.prune` masks is zero, where it masks anything."""
    if not prune.is_pruned(model):
        return model
    plain = clean_copy(model)
    for module, copied in zip(model.modules(), plain.modules(), strict=True):
        copied.training = module.training
        for hook in list(copied._forward_pre_hooks.values()):
            if isinstance(hook, prune.BasePruningMethod):
                prune.remove(copied, hook._tensor_name)
    return plain


def _compacted(
    model: nn.Module,
    example_inputs: Examples,
    graph: ChannelGraph,
    jointed: list[str],
    outputs: bool,
    folds: bool = True,
) -> nn.Module:
    """The smaller network; layers that are `jointed` may get a joint, behind them too where `outputs` says so.

    Constants are folded if it `folds`.
    """
    report = CompactReport(parameters_before=_count(model), exact=graph.exact)
    dead = dead_channels(model, graph)
    gone = spare_last(graph, dead)
    copied = clean_copy if graph.changes_weights else shared_copy
    if not folds or (torch.equal(dead, gone) and not _constants(model, graph, dead)):
        small = copied(model)
        take_out(small, graph, gone)
        own_parameters(small, model)
        changed = bool(gone.any())
    else:
        changed = True
        small = clean_copy(model)
        found = fold(small, example_inputs)
        graph = _with_new_biases(small, graph)
        dead = dead_channels(small, graph)
        gone = spare_last(graph, dead)
        zero(small, graph, dead & ~gone)
        take_out(small, graph, gone)
        report.folded, report.kept = found.folded, found.kept
        report.without = _left_open(small, example_inputs) if found.folded else []
        _stand_still(small, _inner(graph), fold(small, example_inputs), report)
    report.sets = _sets(graph, gone)
    _add_joints(small, jointed, outputs, report)
    report.idle = uncalled(model, graph)
    note_shape(small, example_inputs)  # before it is compared: a forward may read its configuration
    proven = any(one.reason is None for one in report.sets)  # where no set was tried, nothing was compared yet
    if changed or report.joints or not proven:  # else it is a copy
        alive = alive_outputs(model, graph, dead, gone)
        whole = copied(model)
        report.error = same(whole, small, example_inputs, alive, exact=graph.exact, rounding=graph.rounding)
    report.parameters_after = _count(small)
    _settle(small, model)
    small.compact_report = report  # type: ignore[assignment]
    return small


def compact_report(small: nn.Module) -> CompactReport:
    """What `compact` did to make this module."""
    report = getattr(small, "compact_report", None)
    if not isinstance(report, CompactReport):
        raise UserError("this module has no report: it wasn't made by `compact` in this process.")
    return report


def dead_channels(model: nn.Module, graph: ChannelGraph) -> Tensor:
    """Which channels nothing reads, or only what is read by nothing itself."""
    fixed = torch.zeros(graph.count, dtype=torch.bool)
    fixed[list(graph.fixed)] = True
    dims: dict[str, list[int]] = {}
    for name, dim in graph.places:
        dims.setdefault(name, []).append(dim)
    # A buffer that reads channels is never zero where it does: they must be.
    read_by = {place for place in graph.reads if place[0] in dict(model.named_buffers(remove_duplicate=False))}
    readers = {place: (place[0], dims[place[0]]) for place in graph.places if place in graph.reads - read_by}
    quiet = graph.quiet()
    for name in graph.norms:
        dims.pop(f"{name}.weight" if name else "weight", None)  # which only scales
    for name, dim in graph.places:
        made = name in dims and name not in graph.wirings and (name, dim) not in read_by
        if made and bool(quiet[graph.places[name, dim]].any()):
            readers.setdefault((name, dim), (name, dims[name]))
    readers |= {(name, IN): (name, [OUT, IN]) for name in graph.wirings}
    reads: dict[Place, Tensor] = {}
    dead = torch.zeros(graph.count, dtype=torch.bool)
    again = list(readers)
    while again:
        for place in again:
            reads[place] = _read_at(model, graph, place, readers[place][1], dead)
            if place not in graph.reads and place[0] not in graph.wirings:
                reads[place] &= quiet[graph.places[place]]
        read = fixed.clone()
        for place, its in reads.items():
            read[graph.places[place][its]] = True
        died = ~read & ~dead
        dead = ~read
        # Only who has lost something on its other side reads less than before.
        again = [
            p for p, (name, ds) in readers.items() if any(died[graph.places[name, d]].any() for d in ds if d != p[1])
        ]
    return ~fixed if not readers else dead


def _read_at(model: nn.Module, graph: ChannelGraph, place: Place, dims: list[int], dead: Tensor) -> Tensor:
    """Which indices of a place are read by something that is alive."""
    name, dim = place
    if name in graph.wirings:
        module: Any = model.get_submodule(name)
        source = torch.tensor(module.source)[~dead[graph.places[name, OUT]]]
        return torch.isin(torch.arange(len(graph.places[place])), source)
    tensor = tensor_of(model, name).detach()
    for d in dims:
        if d != dim and (gone := dead[graph.places[name, d]]).any():
            tensor = tensor.index_select(d, torch.nonzero(~gone).flatten().to(tensor.device))
    return filled(tensor, dim).cpu()


def _graph(model: nn.Module, groups: Coupled) -> ChannelGraph:
    graph = groups.graph
    for (name, dim), channels in graph.places.items():
        try:
            fits = name in graph.wirings or tensor_of(model, name).shape[dim] == len(channels)
        except (AttributeError, IndexError, AssertionError):
            raise UserError(
                f"compact: the groups are of another model: this one has no module with {name!r}."
            ) from None
        if not fits:
            raise UserError(f"compact: the groups are of another model: {name!r} is not the tensor they know.")
    return graph


def _constants(model: nn.Module, graph: ChannelGraph, dead: Tensor) -> bool:
    """Whether a layer that is alive has outputs that its input doesn't reach: there may be something to fold."""
    for name in graph.order:
        module: Any = model.get_submodule(name)
        kind = kind_of(module)
        if kind in (None, WIRING, EMBEDDING) or module.weight is None:
            continue
        assert kind is not None
        dim = kind.out["weight"]
        idle = ~filled(module.weight.detach(), dim).cpu()
        channels = graph.places.get((f"{name}.weight" if name else "weight", dim))
        if bool((idle if channels is None else idle & ~dead[channels]).any()):
            return True
    return False


def _with_new_biases(model: nn.Module, graph: ChannelGraph) -> ChannelGraph:
    """Folding gives a layer a bias that it didn't have: its places are those of the outputs."""
    places = dict(graph.places)
    known = {id(tensor_of(model, name)) for name, _ in places if name not in graph.wirings}
    for name in graph.order:
        module = model.get_submodule(name)
        kind = kind_of(module)
        prefix = f"{name}." if name else ""
        outs = places.get((f"{prefix}weight", 0))
        if kind in (LINEAR, CONV) and outs is not None and module.bias is not None and id(module.bias) not in known:
            places[f"{prefix}bias", 0] = outs
    return dataclasses.replace(graph, places=places)


def _left_open(model: nn.Module, inputs: Examples) -> list[str]:
    """The arguments that a model takes and these calls don't give: of which None is as good as nothing."""
    positional, named = arguments(inputs)
    try:
        signature = inspect.signature(model.forward)
        given = signature.bind(*positional, **named).arguments
    except (TypeError, ValueError):
        return []
    return [name for name, one in signature.parameters.items() if one.default is None and given.get(name) is None]


def _sets(graph: ChannelGraph, gone: Tensor) -> list[SetReport]:
    made = []
    for one in graph.sets():
        went = gone[torch.tensor(one.channels)]
        heads = (~went).tolist() if one.heads else None
        made.append(SetReport(one.name, len(one.channels), int(went.sum()), one.reason, heads))
    return made


def _inner(graph: ChannelGraph) -> list[str]:
    """All layers; a model that is one layer has no place for another."""
    return [name for name in graph.order if name]


def _reads_input(model: nn.Module, graph: ChannelGraph) -> list[str]:
    """Layers that read the network's own inputs, which can't be removed but can be passed over; or have a joint."""
    found = []
    for name in _inner(graph):
        kind = kind_of(model.get_submodule(name))
        if kind in (LINEAR, CONV):
            channels = graph.places.get((f"{name}.weight", 1))
            outside = channels is not None and {graph.fixed.get(c) for c in channels.unique().tolist()} == {
                "network input"
            }
            if outside or around(model, name) is not None:
                found.append(name)
    return found


def _stand_still(model: nn.Module, layers: list[str], found: Folded, report: CompactReport) -> None:
    """Replaces layers without weights, and norms of nothing but constants, by the constants they give."""
    for name in layers:
        module: Any = model.get_submodule(name)
        kind = kind_of(module)
        if kind is NORM and name in found.still:
            value = found.still[name]
        elif kind in (LINEAR, CONV) and not module.weight.any():
            value = module.weight.new_zeros(len(module.weight)) if module.bias is None else module.bias
        else:
            continue
        trained = module.bias is not None and module.bias.requires_grad
        whole = name
        if (outer := around(model, name)) is not None:
            whole, joint = outer
            value = laid_out(joint, value.detach(), 0) + (0 if joint.fill is None else joint.fill.detach())
        replace(model, whole, ConstantLayer(module, value, trained))
        report.dropped.append(name)


def _add_joints(model: nn.Module, layers: list[str], outputs: bool, report: CompactReport) -> None:
    shared = shared_layers(model)
    for name in layers:
        if name in report.dropped or name in shared:
            continue
        module = model.get_submodule(name)
        kind = kind_of(module)
        if kind is None or kind is WIRING:
            continue
        before = {side: size(module, kind, side) for side in kind.sides()}
        outer = around(model, name)
        joint = gather(module, outputs=outputs)
        if joint is not None:
            after = {side: size(module, kind, side) for side in before}
            report.joints[name] = {s: (after[s], before[s]) for s in before if after[s] != before[s]}
            if outer is None:
                replace(model, name, joint)
            else:
                replace(model, outer[0], merged(outer[1], joint))


def _count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _settle(small: nn.Module, model: nn.Module) -> None:
    """Modes as the model has them, and no gradients of old shapes."""
    modes = {name: module.training for name, module in model.named_modules()}
    for name, module in small.named_modules():
        module.training = modes.get(name, modes.get(name.rpartition(".")[0], model.training))
    for parameter in small.parameters():
        parameter.grad = None
