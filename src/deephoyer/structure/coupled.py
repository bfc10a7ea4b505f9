"""Coupled groups: for each removable channel, all slices across layers that must vanish before it can go.

A grouping like the others, but it needs the network's graph, so it is made from the model and example
inputs. The graph is proven before it is used: on a copy, every second or third channel of each set is zeroed and
removed, and the outputs must not differ; a module that can't take it keeps its channels.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from deephoyer.errors import UserError, true_or_false
from deephoyer.groups import Grouping, Slices, SliceUnit, Unit
from deephoyer.inference import Examples, call, outside_modes, plain_attention, same_start
from deephoyer.sharded import is_sharded
from deephoyer.structure.channels import ChannelGraph, ChannelSet, Place
from deephoyer.structure.equality import Differs, Outputs, all_nan, compare, drawn_answers
from deephoyer.structure.follow import CannotFollow, ChangesWeights, follow
from deephoyer.structure.inputs import one_sample, tensors_in
from deephoyer.structure.layers import CONV, LINEAR, filled, kind_of
from deephoyer.structure.remove import alive_outputs, homes_of, remove, replace_tensor, spare_last, tensor_of, zero
from deephoyer.structure.sizes import Setting, apply_sizes, learn_sizes
from deephoyer.structure.widened import HALF, Widened
from deephoyer.weights import CONVOLUTIONS, TRANSPOSED, Weight, all_weights, plain_name, with_values


class Coupled(Grouping):
    """every channel with all weights that must become zero together with it, across layers

    >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> [unit.names for unit in Coupled(net, torch.zeros(1, 4)).units([])]
    [['0.weight', '0.bias', '2.weight']]
    """

    name = "coupled"
    what = "channel"
    needs_graph = True

    def __init__(self, model: nn.Module, example_inputs: Examples, exact: bool = True):
        """Without `exact`, channels that a layer norm is over may go too, though it is not the same function then."""
        self.model, self.exact = with_values(model), true_or_false(exact, "coupled: exact")
        self.graph = proven(self.model, example_inputs, self.exact)
        self._wired = self.graph.wired()
        self._stacked = {weight.name for weight in all_weights(self.model) if weight.stacked}

    def _meant(self, one: ChannelSet) -> bool:
        """Whether a set of channels is of this kind of group."""
        return True

    @cached_property
    def sets(self) -> list[ChannelSet]:
        """All sets of channels; one that must stay says why in its `reason`."""
        return self._wired.sets()

    def units(self, weights: Sequence[Weight] = ()) -> list[Unit]:
        """One unit for each removable set whose layers are all among `weights`; all sets where none are given.

        Biases and norms belong to their layers and are not asked for. A set with a frozen parameter can't
        vanish and is left out.
        """
        meant = {id(weight.tensor) for weight in weights}
        # A channel that runs through a layer which is to be left alone must stay.
        others = {id(weight.tensor) for weight in all_weights(self.model)} - meant if meant else set()
        named = dict(self.model.named_parameters(remove_duplicate=False))
        units: list[Unit] = []
        frozen = 0.0
        for one in self.sets:
            parts = self._parts(one, named) if one.reason is None and self._meant(one) else []
            if not all(p.tensor.requires_grad for p in parts):
                frozen += one.share
            elif parts and not any(id(p.tensor) in others for p in parts):
                units.append(SliceUnit(one.name, parts, count=len(one.channels)))
        if not units:
            raise UserError(
                f"{self.name}: no {self.what} of this model can be removed{self._because(frozen)}. "
                "With parameters=, all layers that a channel runs through must be among them; and it must be made from "
                "this very model, not from a copy."
            )
        return units

    def held(self) -> dict[str, float]:
        """The reasons why channels cannot be removed, each with its fraction of all channels, the largest first."""
        shares: dict[str, float] = {}
        for one in self.sets:
            if one.reason is not None:
                shares[one.reason] = shares.get(one.reason, 0.0) + one.share
        return dict(sorted(shares.items(), key=lambda pair: -pair[1]))

    def _because(self, frozen: float) -> str:
        held = self.held() | ({"parameters of theirs are frozen (requires_grad)": frozen} if frozen else {})
        reasons = [(why, share) for why, share in held.items() if why not in ("network input", "network output")]
        reasons.sort(key=lambda pair: -pair[1])
        return ": " + "; ".join(f"{share:.0%} stay because {why}" for why, share in reasons[:3]) if reasons else ""

    def _parts(self, one: ChannelSet, named: dict[str, nn.Parameter]) -> list[Slices]:
        channels = torch.tensor(one.channels)  # in rising order
        parts: dict[tuple[int, int], Slices] = {}
        for place in one.places:
            lying = self._wired.places[place]
            at = torch.searchsorted(channels, lying).clamp(max=len(channels) - 1)
            for part in self._slices(place, torch.where(channels[at] == lying, at, -1), named):
                parts.setdefault((id(part.tensor), place[1]), part)  # shared ones once
        return list(parts.values())

    def _slices(self, place: Place, bins: Tensor, named: dict[str, nn.Parameter]) -> list[Slices]:
        name, dim = place
        if name not in named or place in self.graph.directions:
            return []  # a buffer, or a shortcut without weights; or what needs not be zero
        tensor = named[name]
        bins = bins.to(tensor.device)
        if name in self._stacked:  # by rows or columns of all matrices, as the other groups on it
            experts, rows = tensor.shape[:2]
            bins = bins.repeat(experts) if dim else bins.repeat_interleave(rows)
            return [Slices(plain_name(name), tensor, tuple(tensor.shape), (0, dim or 1), bins)]
        return [Slices.along(plain_name(name), tensor, dim, 1, bins)]


class Heads(Coupled):
    """every attention head with all its weights: rows of queries, keys and values, columns of the projection

    Heads that share a key (grouped queries) are one group.

    >>> net = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    >>> [unit.count for unit in Heads(net, torch.zeros(1, 3, 16)).units([])]
    [4]
    """

    name = "heads"
    what = "head"

    def _meant(self, one: ChannelSet) -> bool:
        return one.heads


class Neurons(Coupled):
    """every hidden neuron between two linear layers, with the row that computes it and the column that reads it

    Two layers that are multiplied (SwiGLU) lose the same neurons.

    >>> net = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    >>> [unit.names for unit in Neurons(net, torch.zeros(1, 3, 16)).units([])]
    [['linear1.weight', 'linear1.bias', 'linear2.weight']]
    """

    name = "neurons"
    what = "neuron"

    def _meant(self, one: ChannelSet) -> bool:
        readers = [place for place in one.places if place in self.graph.reads]
        linear = all(_is_matrix(self.model, name) for name, _ in one.places if name not in self.graph.wirings)
        return not one.heads and len(readers) == 1 and linear and readers[0] not in self.graph.writes


def _is_matrix(model: nn.Module, name: str) -> bool:
    """Whether a tensor is a matrix, or one for each of several experts; or the bias of such."""
    module, tensor = model.get_submodule(name.rpartition(".")[0]), tensor_of(model, name)
    return tensor.dim() <= 2 or (tensor.dim() == 3 and not isinstance(module, CONVOLUTIONS + TRANSPOSED))


@outside_modes
def proven(model: nn.Module, inputs: Examples, exact: bool = True) -> ChannelGraph:
    """The channel graph of a model, less what a trial removal shows to be wrong."""
    model = shared_copy(model)
    woken = _wake(model)
    before = [(p, p.data) for p in model.parameters() if not is_traceable_wrapper_subclass(p)]
    try:
        graph, outputs, sample = _followed(model, inputs, exact)
        changes = any(p.data_ptr() != data.data_ptr() for p, data in before)
    except ChangesWeights:
        changes = True
    if changes:
        for p, data in before:
            p.data = data
        model = clean_copy(model)
        graph, outputs, sample = _followed(model, inputs, exact, shared=False)
    graph.sample, graph.changes_weights = sample, changes
    if any(t.is_floating_point() and t.numel() and not t.abs().amax() < 1e6 for t in outputs):
        for parameter in woken:  # for which it is not made: in a deep one that was pruned they add up to infinity
            parameter.detach().zero_()
    tried: set[type[nn.Module]] = set()
    for _ in range(1 + 3 * len(graph.sets())):  # each time a kind of module is updated, or one set at least given up
        free = [(one, LOSE[i % len(LOSE)]) for i, one in enumerate(graph.sets()) if one.reason is None]
        trial = sample
        try:
            _try(model, graph, free, trial, learn=True)
            if sample is not inputs:  # with more examples, or with padding, a forward may take another way
                trial = inputs
                _try(model, graph, free, trial)
            return graph
        except Differs as why:
            if not _update(model, graph, why.module, tried):
                _give_up(model, graph, free, trial, why)
    raise CannotFollow("coupled: the model's channels can't be worked out; give an inner module instead.")


def _followed(
    model: nn.Module, inputs: Examples, exact: bool, shared: bool = True
) -> tuple[ChannelGraph, list[Tensor], Examples]:
    """The graph by one sample, where the model takes one; else by the inputs (the first sizes of some are no batch)."""
    sample = one_sample(inputs)
    copied = shared_copy if shared else clean_copy
    if sample is not inputs:
        with suppress(CannotFollow):
            graph, outputs = follow(copied(model), sample, exact, shared)
            if not uncalled(model, graph):
                return graph, outputs, sample
    return *follow(copied(model), inputs, exact, shared), inputs


def uncalled(model: nn.Module, graph: ChannelGraph) -> list[str]:
    """Layers that the examples don't reach: auxiliary heads; or experts, of which more examples may reach more.

    A layer whose weight is used without calling it, as in torch's attention, is reached.
    """
    used = {*graph.order, *(name.removesuffix(".weight") for name, _ in graph.places)}
    return [name for name, module in model.named_modules() if kind_of(module) in (LINEAR, CONV) and name not in used]


def clean_copy(model: nn.Module) -> nn.Module:
    """A copy in eval mode, which is all that is ever run or changed."""
    return _copied(model, {})


def shared_copy(model: nn.Module) -> nn.Module:
    """A copy in eval mode whose parameters are the model's own: to run, and to put others in their places."""
    return _copied(model, {id(p): p for p in model.parameters()})


def _copied(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    memo |= computed_attributes(model)
    for name, tensor in model.named_parameters():
        if is_traceable_wrapper_subclass(tensor) and not is_sharded(tensor):
            raise UserError(
                f"{name} is a {type(tensor).__name__}: compact the network before it is quantized or sharded."
            )
    try:
        with torch.no_grad():  # or parameters of a scripted copy would be computed from the original's
            copied = copy.deepcopy(model, memo).eval()
    except Exception as why:
        raise UserError(f"the model can't be copied (copy.deepcopy): {why}") from why
    for old, new in zip(model.parameters(), copied.parameters(), strict=False):
        if new.requires_grad != old.requires_grad:
            new.requires_grad_(old.requires_grad)
    return copied


def computed_attributes(model: nn.Module) -> dict[int, Any]:
    """For `copy.deepcopy`: what was computed and left in attributes (an attention map, a weight times its mask) is
    copied by its values."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        left = [value for name, value in vars(module).items() if name not in ("_parameters", "_buffers", "_modules")]
        memo |= {id(t): t.detach().clone() for t in tensors_in(left) if not t.is_leaf}
    return memo


class OnItsOwn(TorchFunctionMode):
    """Refuses a copy that computes with parameters of the network that it is a copy of."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._theirs = {id(parameter): name for name, parameter in model.named_parameters()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tensors_in((args, kwargs)):
            if (name := self._theirs.get(id(tensor))) is not None:
                raise UserError(
                    f"a copy of the model still computes with the original's {name}: a function that was put in the "
                    "place of a forward, or a hook, holds on to a module. Make it a method, or a functools.partial."
                )
        return func(*args, **(kwargs or {}))


LOSE = slice(None, None, 2), slice(1, None, 3), slice(1, None, 4)
"""Which channels of a set go in a trial: of neighbouring sets, two parts of a tensor, not as many of each."""
Trial = list[tuple[ChannelSet, slice]]
Computing = Callable[[], AbstractContextManager[Any]]


def _try(model: nn.Module, graph: ChannelGraph, sets: Trial, inputs: Examples, learn: bool = False) -> None:
    """Zeroes some channels of these sets in one copy, removes them from another, and compares.

    The sizes that the code must be told are learnt on the way, into the graph.
    """
    dead = torch.zeros(graph.count, dtype=torch.bool)
    for one, lost in sets:
        dead[torch.tensor(one.channels[lost] or one.channels)] = True  # a single one too
    dead = spare_last(graph, dead)
    if not dead.any():
        return

    def zeroed() -> nn.Module:
        with _disable_current_modes():
            big = clean_copy(model)
        zero(big, graph, dead)
        return big

    small = zeroed()
    inside: Outputs | None = [] if learn and graph.exact else None
    computing: Computing = nullcontext
    rounding = graph.rounding
    with OnItsOwn(model) if learn else nullcontext():
        if rounding in HALF:
            with suppress(Exception), Widened():  # some code asks for the very type of its weights
                drawn, before = drawn_answers(small, inputs, 1, inside)
                computing, rounding = Widened, torch.float32
                for name in graph.norms:  # whose scales change when some of their width goes, and would be rounded
                    small.get_submodule(name).float()
        if computing is nullcontext:
            drawn, before = drawn_answers(small, inputs, 1, inside)
    if all_nan(before):
        raise UserError("the model gives nothing but NaN, so there is nothing to compare.")
    learn |= any(rule.attribute is None for rule in graph.sizes)  # which code may compute from what was taken out
    # From the same copy: a large network is there twice, not three times.
    take_out(small, graph, dead, learn, computing)
    alive = alive_outputs(model, graph, dead, dead)
    with computing():
        compare(before, small, drawn, zeroed, alive, graph.exact, rounding, inside)


def take_out(
    model: nn.Module, graph: ChannelGraph, dead: Tensor, learn: bool = True, computing: Computing = nullcontext
) -> None:
    """Removes channels, and learns into the graph what sizes the code must then be told.

    It may get more of them wrong than without others: half of what is left is no longer the first of two parts.
    """
    remove(model, graph, dead)
    if learn:

        def run() -> None:
            with computing():
                call(model, graph.sample)

        with torch.no_grad(), plain_attention, same_start(model):
            wrong, asks = learn_sizes(model, graph.calls, dead, run, graph.updated)
        graph.sizes |= wrong
        apply_sizes(model, graph.sizes, graph.calls, dead, asks)


def _wake(model: nn.Module) -> list[Tensor]:
    """Numbers for parameters that are nothing but zeros (a head before training): they would hide all before them."""
    generator = torch.Generator().manual_seed(0)
    homes = homes_of(model)
    woken: list[Tensor] = []
    for parameter in [p for p in model.parameters() if p.is_floating_point() and not filled(p.detach(), 0).any()]:
        its = homes[id(parameter)]
        drawn = 0.1 * torch.randn(parameter.shape, generator=generator)
        replace_tensor(its, drawn.to(parameter))
        woken.append(getattr(*its[0]))
    return woken


def _update(model: nn.Module, graph: ChannelGraph, name: str, tried: set[type[nn.Module]]) -> bool:
    """Lets all modules of a kind have the new value of a number that they divide by; if that was tried, no longer.

    False where neither changes anything.
    """
    kind = type(model.get_submodule(name))
    its = {n for n, module in model.named_modules() if type(module) is kind}
    divide = {s.module for call in graph.calls.values() for s in call.asked if isinstance(s, Setting) and s.divides}
    if not its & divide or (kind in tried and not its & graph.updated):
        return False
    graph.updated = graph.updated - its if kind in tried else graph.updated | its
    tried.add(kind)
    graph.sizes = {rule for rule in graph.sizes if rule.call[0] not in its}
    return True


def _give_up(model: nn.Module, graph: ChannelGraph, free: Trial, inputs: Examples, why: Differs) -> None:
    """Fixes the sets that the module at fault sees: those that fail by themselves, or else all of them."""
    suspects: Trial = []
    name = why.module
    while not suspects:
        seen = set(graph.touched.get(name, ()))
        for (tensor, _), channels in graph.places.items():
            if tensor == name or tensor.rpartition(".")[0] == name:
                seen.update(channels.tolist())
        suspects = [(one, lost) for one, lost in free if seen.intersection(one.channels)]
        if not name and not suspects:
            if not free:
                raise CannotFollow(f"coupled: module {why.module!r} can't be followed: {why}") from why
            suspects = free
        name = name.rpartition(".")[0]
    for one, _ in _failing(model, graph, suspects, inputs) or suspects:
        graph.fixed.update(dict.fromkeys(one.channels, f"{why.module or 'the model'!r} has sizes written into it"))


def _failing(model: nn.Module, graph: ChannelGraph, sets: Trial, inputs: Examples) -> Trial:
    """The sets that fail by themselves, found by halves."""
    try:
        _try(model, graph, sets, inputs)
        return []
    except Differs:
        if len(sets) < 2:
            return sets
    half = len(sets) // 2
    return [one for part in (sets[:half], sets[half:]) for one in _failing(model, graph, part, inputs)]
