"""Follows channels through a network: one forward pass in which every tensor carries the channels along its dimensions.

What each operation does to them is in `moving.py`, `elementwise.py` and `products.py`. Because the numbers go through
the very operations that the values go through, flattening, shuffling and concatenation come out right without a rule
for each, and a layer is whatever uses a parameter, of whichever class it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils.hooks import RemovableHandle

from deephoyer.errors import UserError, first_line
from deephoyer.inference import (
    Examples,
    UncheckedOneHot,
    arguments,
    call,
    plain_attention,
    plain_recurrence,
    same_numbers,
    unchecked_distributions,
)
from deephoyer.structure import elementwise, moving, products
from deephoyer.structure.asked_sizes import (
    CREATES,
    SLICES,
    SPLITS,
    Asking,
    Call,
    CallCounter,
    kind_of_call,
    slices_of,
    split_dim,
    written_bounds,
)
from deephoyer.structure.attention import opened
from deephoyer.structure.channel_ids import Labels
from deephoyer.structure.channels import IN, OUT, Blocks, ChannelGraph, Place
from deephoyer.structure.elementwise import LAYS_OUT, TEMPLATES
from deephoyer.structure.inputs import outputs_in, tensors_in
from deephoyer.structure.layers import WIRING, kind_of
from deephoyer.structure.operations import Operation, Rule, meet, mixes
from deephoyer.structure.rms import RmsNorm, rms_norm
from deephoyer.structure.sizes import Setting, SizedCall, SizeRule, counts_heads, mark_settings


class CannotFollow(UserError):
    """The network's channels can't be worked out; the message names the module."""


class ChangesWeights(CannotFollow):
    """The network writes into its own parameters while it runs, and so must have its own."""


def follow(
    model: nn.Module, inputs: Examples, exact: bool = True, shared: bool = True
) -> tuple[ChannelGraph, list[Tensor]]:
    """The channels of a model in eval mode, and its outputs; the model must be a copy, since its numbers are marked.

    Parameters that it `shared` with another are not written into.
    """
    arguments(inputs)
    if (given := tensors_in(inputs)) and not any(t.numel() for t in given):
        raise UserError("example inputs: there is no number in them, so nothing could be compared; give one example.")
    mark_settings(model)
    turned: frozenset[int] = frozenset()
    best: tuple[ChannelGraph, list[Tensor]] | None = None
    while True:  # as a rule once, and twice more where heads are not called so: for queries and keys, then for values
        graph, outputs, wrong = _followed(model, inputs, given, exact, turned, shared)
        if best is None or graph.free() > best[0].free():
            best = graph, outputs
        if not wrong:
            return best
        turned |= wrong


def _followed(
    model: nn.Module, inputs: Examples, given: list[Tensor], exact: bool, turned: frozenset[int], shared: bool
) -> tuple[ChannelGraph, list[Tensor], frozenset[int]]:
    """The graph, the outputs, and the views of which it took the wrong dimension for channels."""
    follower = Follower(model, exact, turned, shared)
    for tensor in given:
        if not tensor.is_floating_point() and not tensor.is_complex():
            follower.n.set_discrete(tensor)
    with torch.no_grad(), plain_attention, plain_recurrence, unchecked_distributions, UncheckedOneHot():
        try:
            with same_numbers(model), Asking(follower.asks), follower:
                outputs = call(model, inputs)
        except CannotFollow:
            raise
        except Exception as why:
            where = follower.where()
            raise CannotFollow(
                f"the model can't be run on the example inputs: {where} fails: {first_line(why)}."
            ) from why
        finally:
            follower.unhook()  # or what it holds, every tensor on the way, would wait for the garbage collector
    tensors = outputs_in(outputs)
    if not tensors:
        raise CannotFollow(
            f"the model gives a {type(outputs).__name__} in which no tensor was found, so nothing could be compared; "
            "outputs may be tensors in tuples, lists, dicts and data classes."
        )
    follower.n.fix(tensors, "network output")
    return follower.graph(), tensors, follower.n.wrong_guesses()


class Follower(TorchDispatchMode):
    """Sees every operation, and knows in which module it happens."""

    def __init__(
        self, model: nn.Module, exact: bool, turned: frozenset[int] = frozenset(), shared: bool = True
    ) -> None:
        super().__init__()
        self.n = Labels(model, exact, turned)
        self._operations = 0
        self._seen: dict[str, list[Tensor]] = {}
        self._order: dict[str, None] = {}
        self._stack: list[str] = []
        self._asleep = 0
        self._asked: list[int] = []
        self._counter = CallCounter()
        self._sizes: set[SizeRule] = set()
        self._branching: dict[str, str] = {}
        self._choosing: dict[str, str] = {}
        self._passed: dict[str, list[Tensor]] = {}  # what goes into and comes out of the modules that each one calls
        self._calls: dict[Call, SizedCall] = {}
        self._modules = dict(model.named_modules())
        self._wirings: dict[str, tuple[Tensor, Tensor]] = {}
        self._norms: dict[str, tuple[RmsNorm, Tensor]] = {}
        self._shared = {
            p.untyped_storage().data_ptr()
            for p in model.parameters()
            if shared and p.numel() and not is_traceable_wrapper_subclass(p)
        }
        self._whole: dict[int, Tensor] = {}  # whole numbers and masks that were computed
        self._hooks: list[RemovableHandle] = []
        for name, module in self._modules.items():
            self._hook(name, module)

    def where(self) -> str:
        name = self._stack[-1] if self._stack else ""
        kind = type(self._modules[name]).__name__
        return f"module {name!r} ({kind})" if name else f"the model itself ({kind})"

    def asks(self, func: Any, args: Any, kwargs: Any, sizes: list[int]) -> Any:
        """A call that names sizes: what they are, and which channels lie along them in what it gives."""
        self._asked, call = sizes, self._counter.next()
        try:
            out = func(*args, **kwargs)
        finally:
            self._asked = []
        tensors = tensors_in(out)
        if func in SLICES:
            bounds = [(dim, bound) for dim, start, stop in slices_of(*args) for bound in (start, stop)]
            # A single place is the code's own: where its numbers are used, all stay (`moving.takes`).
            whole = [
                (dim, [] if stop - start == 1 else self._lying(args[0], dim))
                for dim, start, stop in slices_of(*args)
                for _ in (start, stop)
            ]
            lying = [[rows[:bound] for rows in lie] for (_, bound), (_, lie) in zip(bounds, whole, strict=True)]
            cuts = [
                (bound, args[0].dim() - dim, args[0].shape[dim], lie)
                for bound, (dim, lie) in zip(written_bounds(*args), whole, strict=True)
            ]
            self._calls.setdefault(call, SizedCall("slice", sizes, [int(bound) for _, bound in bounds], lying, cuts))
            return out
        if func in CREATES:
            made = [d for d, size in enumerate(sizes) if isinstance(size, Setting) and tensors[0].shape[d] > 1]
            self.n.set(tensors[0], [self.n.fresh(tensors[0], d, None) for d in made])
        cuts = []
        if func in SPLITS:
            dim = split_dim(args, kwargs)
            lie = [(t, dim) for t in tensors[: len(sizes)]]
            along = self._lying(args[0], dim)
            cuts = [(int(size), args[0].dim() - dim, args[0].shape[dim], along) for size in sizes]
        else:
            lie = [(tensors[0], d) for d in range(tensors[0].dim())]
        if len(lie) == len(sizes):
            shape, lying = [t.shape[d] for t, d in lie], [self._lying(t, d) for t, d in lie]
            self._calls.setdefault(call, SizedCall(kind_of_call(func), sizes, shape, lying, cuts))
        return out

    def _lying(self, tensor: Tensor, dim: int) -> list[Tensor]:
        size = tensor.shape[dim]
        return [axis.movedim(dim, 0).reshape(size, -1) for axis in self.n.of(tensor) if axis.shape[dim] == size > 1]

    # Modules.

    def _hook(self, name: str, module: nn.Module) -> None:
        if isinstance(module, torch.jit.ScriptModule):  # it takes no hooks, and no tensors of other sizes
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                self.n.fix([tensor], f"module {name!r} is scripted by torch.jit")
            return
        wiring = kind_of(module) is WIRING
        norm = None if wiring else rms_norm(module)
        opaque = wiring or norm is not None

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._stack.append(name)
            self._counter.enter(name)
            self._asleep += opaque
            if opaque:
                self.n.use(tensors_in((args, kwargs)))

        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            with torch._C.DisableTorchFunction():  # or what is done here would be counted among the network's calls
                account(module, args, kwargs, output)

        def account(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if wiring:
                self._wire(name, module, tensors_in((args, kwargs))[0], output)
            if norm is not None:
                self._normalise(name, module, norm, tensors_in((args, kwargs))[0], output)
            if opened(module):
                self._open_attention(name, module)
            self._check(name, module, tensors_in((args, kwargs)))
            if name in self._choosing and (other := self._unused(name)) is not None:
                self._branching.setdefault(name, f"{self.where()} {self._choosing[name]}, and {other!r} is not used")
            if name in self._branching:
                self._keep_whole(name, module, tensors_in((args, kwargs, output)))
            self._asleep -= opaque
            self._counter.leave()
            self._stack.pop()
            if self._stack:
                self._passed.setdefault(self._stack[-1], []).extend(tensors_in((args, kwargs, output)))

        self._hooks.append(module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
        self._hooks.append(module.register_forward_hook(leave, with_kwargs=True))

    def _unused(self, name: str) -> str | None:
        """A parameter of a module, or inside it, that no operation was given."""
        prefix = f"{name}." if name else ""
        own = self._modules[name].named_parameters()
        return next((prefix + n for n, p in own if p.is_floating_point() and not self.n.is_met(p)), None)

    def unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _wire(self, name: str, module: Any, x: Tensor, y: Tensor) -> None:
        """Channels that are laid elsewhere without weights: two sides that may go each by itself."""
        read = self.n.along(x, 1)
        ins = self.n.line(read[0], 1) if read else self.n.fresh(x, 1, "network input").flatten()
        if name not in self._wirings:
            self._wirings[name] = (self.n.joined.new(module.out_channels), ins)
        outs, before = self._wirings[name]
        self.n.joined.join(before, ins)
        self.n.set(y, [outs.view([-1 if d == 1 else 1 for d in range(y.dim())])])

    def _normalise(self, name: str, module: Any, norm: RmsNorm, x: Tensor, y: Tensor) -> None:
        """Channels that a norm by the mean square is over may go when they are zero, which nobody else asks for."""
        n = self.n
        axes = n.along(x, norm.dim)
        if axes:
            self._norms.setdefault(name, (norm, n.line(axes[0], norm.dim)))
        shape = [-1 if d == norm.dim % x.dim() else 1 for d in range(x.dim())]
        own = [p for p in module._parameters.values() if p is not None]
        parts = [(x.shape, n.of(x)), *((p.view(shape).shape, [a.view(shape) for a in n.of(p)]) for p in own)]
        n.set(y, meet(n, parts, self.where()))

    def _keep_whole(self, name: str, module: nn.Module, tensors: list[Tensor]) -> None:
        """For other inputs a module may do something else with all that its own code has in hand, which stays.

        That is its own parameters, what it is given and gives, and what the modules that it calls are given and give.
        """
        reason = self._branching[name]
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        self.n.fix([*tensors, *own, *self._passed.get(name, [])], reason)
        for axis in self._seen.get(name, []):
            self.n.joined.fix(axis, reason)

    def _check(self, name: str, module: nn.Module, given: list[Tensor]) -> None:
        """Attributes that a forward compares with the sizes of its inputs follow those."""
        if opened(module):
            return  # its code is replaced
        for value in vars(module).values():
            if not isinstance(value, Setting) or not value.checked:
                continue
            size = int(value)
            for tensor in given:
                for dim in range(tensor.dim()):
                    if tensor.shape[dim] == size and (lying := self._lying(tensor, dim)):
                        call = (name, -2 - list(vars(module)).index(value.name))
                        self._calls.setdefault(call, SizedCall("check", [size], [size], [lying]))
                        self._sizes.add(SizeRule(call, 0, (name, value.name)))

    def _open_attention(self, name: str, module: Any) -> None:
        """torch's attention says how many heads it has; whole ones go."""
        weight = f"{name}.out_proj.weight" if name else "out_proj.weight"
        self.n.blocks.append(Blocks(name, "num_heads", (weight, 1), int(module.head_dim)))

    # Operations.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = tensors_in(args[:1]) if self._shared and func._schema.is_mutable else ()
        if any(tensor.untyped_storage().data_ptr() in self._shared for tensor in written):
            raise ChangesWeights(f"{self.where()} writes into a parameter of the network.")
        if self._asleep:
            out = func(*args, **kwargs)
            self._note_rounding(tensors_in(out))
            return out
        self._note_branches(func, args)
        module = self._stack[-1] if self._stack else ""
        op = Operation(func, args, kwargs, func(*args, **kwargs), self.where(), lambda size: self._heads(module, size))
        self._operations += 1
        op.asked, op.opened, op.number = self._asked, opened(self._modules[module]), self._operations
        self._account(op)
        self._note(module, op)
        return op.out

    def _account(self, op: Operation) -> None:
        """Labels what the operation gave."""
        n = self.n
        if op.name not in TEMPLATES:
            n.use(op.given)
        for tensor in op.given:
            if id(tensor) not in self._whole and not tensor.is_floating_point() and not n.is_discrete(tensor):
                n.set_constant(tensor)  # a list in an index, of which no operation was seen
        self._whole.update((id(t), t) for t in op.outs if not t.is_floating_point())
        self._note_rounding(op.outs)
        weight = op.name.rstrip("_") in LAYS_OUT and all(n.is_weight(t) for t in op.given[:1])
        if all(n.is_constant(t) for t in op.given) and "rand" not in op.name and op.name != "empty":
            for tensor in op.outs:
                n.set_constant(tensor)
        else:
            discrete = bool(op.given) and all(n.is_constant(t) or n.is_discrete(t) for t in op.given)
            for tensor in op.outs:
                n.set_computed(tensor)
                if discrete:
                    n.set_discrete(tensor)
        if op.name in ("convolution", "deform_conv2d"):
            n.of(op.args[1], dims=2)  # the places of a kernel are no channels
        if op.outs and not any(t.numel() for t in op.outs) and not all(t.numel() for t in op.given):
            n.fix(op.given, f"nothing comes to {op.where} for these examples")
        elif any(n.known(t) for t in op.given) or rule_of(op) is elementwise.makes:
            try:
                rule_of(op)(n, op)
                fits = all(n.fits(t) for t in op.outs)
            except Exception:  # an operation used in a way that its rule doesn't know
                fits = False
            if not fits:
                n.fix(op.given, f"{op.name} in {op.where} is not understood")
                for tensor in op.outs:
                    n.set(tensor, [])
        if op.opened and not any(n.known(t) for t in op.given):
            for tensor in op.outs:
                n.set_passing(tensor)  # a mask laid out for each head
        if weight and op.given:
            for tensor in op.outs:
                n.set_view(tensor)
        elif (made_from := scaled_weight(n, op)) is not None:
            n.set(op.outs[0], n.of(made_from))  # of all that met, what the channels are named after
            n.set_view(op.outs[0])

    def _heads(self, module: str, size: int) -> bool:
        """Whether a module says somewhere that it has so many heads."""
        while True:
            settings = vars(self._modules[module])
            for name, value in settings.items():
                if isinstance(value, int) and int(value) == size and counts_heads(name):
                    return True
            if not module or any(counts_heads(name) for name in settings):
                return False
            module = module.rpartition(".")[0]

    def _note_branches(self, func: Any, args: Any) -> None:
        name = func.overloadpacket.__name__
        module = self._stack[-1] if self._stack else ""
        masks = name == "index" and any(t.dtype == torch.bool for t in tensors_in(args[1]))
        if masks or name in ("nonzero", "masked_select"):
            self._choosing[module] = "picks by the values of a tensor what it hands on"
        if name not in ("_local_scalar_dense", "is_nonzero", "equal"):
            return
        given = [t for t in tensors_in(args) if not self.n.is_constant(t)]
        if all(self.n.is_discrete(t) for t in given):
            if given:
                self._choosing.setdefault(module, "decides by the whole numbers or masks that it is given")
            return
        self._branching.setdefault(module, f"{self.where()} decides by the values of a tensor")

    def _note_rounding(self, tensors: list[Tensor]) -> None:
        """The coarsest type on the way: Hugging Face's norms compute in float32, whatever they are given."""
        for tensor in tensors:
            numbers = tensor.is_floating_point() or tensor.is_complex()
            if numbers and torch.finfo(tensor.dtype).eps > torch.finfo(self.n.rounding).eps:
                self.n.rounding = tensor.dtype.to_real()

    def _note(self, module: str, op: Operation) -> None:
        """Which channels a module's own operations see, for when its sizes prove to be fixed."""
        seen = self._seen.setdefault(module, [])
        for tensor in (*op.given, *op.outs):
            seen += self.n.of(tensor)
        for tensor in op.given:
            if self.n.is_weight(tensor):
                self._order.setdefault(module)

    # What was found.

    def graph(self) -> ChannelGraph:
        n, find = self.n, self.n.joined.find
        n.finish()
        nodes: dict[Place, Tensor] = dict(n.places)
        for name, (outs, ins) in self._wirings.items():
            nodes[name, OUT], nodes[name, IN] = outs, ins
        roots = {place: find(its) for place, its in nodes.items()}
        for its in roots.values():
            if len(its) > 1 and bool((its == its[0]).all()):
                n.joined.fix(its[:1], "all channels of a layer hang together")
        known = torch.unique(torch.cat([torch.zeros(0, dtype=torch.long), *roots.values()]))
        places = {place: torch.searchsorted(known, its) for place, its in roots.items()}
        wires = [pair for name in self._wirings for pair in self._wires(name, places)]

        def channels(axes: list[Tensor]) -> set[int]:
            if not axes:
                return set()
            once = {(a.data_ptr(), a.shape, a.stride()): a for a in axes}  # most are views of the same few
            its = torch.unique(find(torch.cat([a.flatten() for a in once.values()])))
            at = torch.searchsorted(known, its).clamp(max=len(known) - 1) if len(known) else its[:0]
            return set(at[known[at] == its].tolist()) if len(known) else set()

        def numbered(nodes: Tensor) -> Tensor:
            its = find(nodes.contiguous())
            at = torch.searchsorted(known, its).clamp(max=len(known) - 1)
            return torch.where(known[at] == its, at, -1)

        number = {root: i for i, root in enumerate(known.tolist())}
        return ChannelGraph(
            places=places,
            reads=n.reads,
            writes=n.writes,
            fixed={number[root]: why for root, why in n.joined.reasons().items() if root in number},
            heads=channels(n.heads),
            summed=channels(n.summed),
            directions=n.directions,
            aligned=n.aligned,
            touched={name: channels(axes) for name, axes in self._seen.items()},
            order=list(self._order),
            wirings=list(self._wirings),
            wires=wires,
            blocks=list(dict.fromkeys(block for block in n.blocks if block.place in places)),
            exact=n.exact,
            rounding=n.rounding,
            sizes=set(self._sizes),
            norms={name: (norm, numbered(nodes)) for name, (norm, nodes) in self._norms.items()}
            | {name: (RmsNorm("eps", 0.0), numbered(nodes)) for name, nodes in n.layer_norms.items()},
            calls={call: known.numbered(numbered) for call, known in self._calls.items() if any(known.channels)},
            count=len(known),
        )

    def _wires(self, name: str, places: dict[Place, Tensor]) -> Iterator[tuple[int, int]]:
        module: Any = self._modules[name]
        for out, source in zip(places[name, OUT].tolist(), module.source, strict=True):
            if source >= 0:
                yield int(places[name, IN][source]), out


def scaled_weight(n: Labels, op: Operation) -> Tensor | None:
    """The weight that an operation gives scaled: times a mask or a number, or a function of it (fake quantization).

    Zeros of the weight are zeros of the result.
    """
    name = op.name.rstrip("_")
    if len(op.outs) != 1 or not all(n.is_constant(t) for t in op.given):
        return None
    if name not in ("mul", "div") and not (len(op.given) == 1 and _keeps_zero(op)):
        return None
    factors = op.given[:1] if name == "div" else op.given
    whole = [t for t in factors if n.is_weight(t) and t.shape == op.outs[0].shape and t.dim() > 1]
    return min(whole, key=n.is_buffer, default=None)


def _keeps_zero(op: Operation) -> bool:
    """Whether an operation on single elements makes zero of zero."""
    if torch.Tag.pointwise not in op.func.tags or op.args[0] is not op.given[0]:
        return False
    return not op.func(op.args[0].new_zeros(1), *op.args[1:], **op.kwargs).any()


def rule_of(op: Operation) -> Rule:
    name = op.name.rstrip("_") or op.name
    rule = products.RULES.get(name) or moving.RULES.get(name) or elementwise.RULES.get(name)
    if rule is not None:
        return rule
    if op.name.startswith("_scaled_dot_product"):
        return products.attends
    if torch.Tag.pointwise in op.func.tags:
        return elementwise.pointwise
    return elementwise.spatial if op.name.startswith(elementwise.SPATIAL) else mixes
