"""The regularizer: which parameters, which penalty on which groups, how strong.

`loss()` is differentiable; `add_grad_()` adds the same gradient in closed form, without an autograd
graph; `attach(optimizer)` calls that before every optimizer step. Not here: data, stages, masks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from deephoyer import strength as strengths
from deephoyer.errors import UserError, first_line, not_negative, one_of, shown, unknown
from deephoyer.groups import Kinds, Unit, groupings, weights_for
from deephoyer.kernels import Backend, choose
from deephoyer.optimizers import Replaced, bare, closure_of, held_by, nested, with_closure, within_a_step
from deephoyer.penalties import PENALTIES, HoyerSquare, Penalty, hoyer_measure, trimming_threshold
from deephoyer.sharded import reshard
from deephoyer.terms import Scale, Term
from deephoyer.text_table import text_table
from deephoyer.weights import left_out, told

WEIGHINGS = ("alike", "size")


class Regularizer:
    """strength × penalty(magnitudes of groups), summed over the selected parameters of a model.

    `groups` may join several kinds with `+`; `strength` is a number, a schedule from
    `deephoyer.strength`, any callable of the step, or one of these for each kind of group. `backend`
    says how the gradient is computed (see `deephoyer.kernels`); it changes the speed, not the numbers.
    `weigh="size"` scales the strength of every unit so that the size of its groups does not weaken the pull on a
    single weight: channels of a residual stream are then penalized as much as those inside a block.
    `left_out` (and the `repr`) lists every parameter that is not regularized, with its kind.

    >>> model = nn.Linear(4, 3)
    >>> reg = Regularizer(model, "hoyer-square", "filters+channels", strength={"filters": 1e-4, "channels": 2e-4})
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> _ = reg.attach(optimizer)
    >>> model(torch.ones(2, 4)).sum().backward(); optimizer.step()
    """

    def __init__(
        self,
        model: nn.Module,
        penalty: str | Penalty = "hoyer-square",
        groups: Kinds = "elements",
        strength: Any = 1e-4,
        parameters: str | Iterable[str] | None = None,
        backend: str = "auto",
        weigh: str = "alike",
    ):
        one_of("way to weigh groups", weigh, WEIGHINGS)
        self.penalty = PENALTIES.make(penalty)
        if not isinstance(self.penalty, Penalty):
            raise UserError(f"penalty: {shown(penalty)} is neither a penalty nor the name of one; HoyerSquare() is.")
        reshard(model)
        chosen = groupings(groups)
        weights = weights_for(model, chosen, parameters)
        self.schedules = _schedules(strength, [g.name for g in chosen])
        self.steps = 0
        self.terms: list[Term] = []
        self._scales: dict[tuple[str, float], Scale] = {}
        found = [(grouping.name, unit) for grouping in chosen for unit in grouping.units(weights)]
        if not found:
            raise UserError(f"groups: {shown(groups)} makes no group of any selected parameter.")
        factors = _factors(self.penalty, [unit for _, unit in found]) if weigh == "size" else [1.0] * len(found)
        for (kind, unit), factor in zip(found, factors, strict=True):
            scale = self._scales.setdefault((kind, factor), Scale())
            self.terms.append(Term(kind, unit, self.penalty, scale))
        self.left_out = left_out(model, (name for _, unit in found for name in unit.names))
        self._replaced = Replaced(model, (t for term in self.terms for t in term.unit.tensors), "attach()")
        self.handles: list[Any] = []
        self._backend = choose(self.terms, backend)
        self._backend_name = backend
        for term in self.terms:
            term.strength.beside(term.unit.tensors[0])  # now, not while a graph may be captured
        self._rescale()

    # The penalty and its gradient

    def loss(self) -> Tensor:
        """The penalty, to be added to the training loss; call `step()` yourself if the strength is scheduled.

        It is that of the model's own parameters, whatever `torch.func.functional_call` is given in their place.
        """
        if not torch.compiler.is_compiling() and torch._C._functorch.maybe_current_level() is not None:
            raise UserError(
                "reg.loss() within torch.func has no gradient, as it knows only the model's own parameters: put the "
                "gradients that torch.func.grad gives into their .grad, then call reg.add_grad_()."
            )
        total = torch.stack([term.value().to(self.terms[0].scale) for term in self.terms]).sum()
        if self.handles and total.requires_grad:
            total.register_hook(self._tell_twice)
        return total

    def _tell_twice(self, grad: Tensor) -> None:
        if self.handles:
            warnings.warn(
                "reg.loss() is in the loss of a regularizer that is attached: its gradient counts twice. "
                "Leave it out of the loss, or detach().",
                stacklevel=2,
            )

    @torch.no_grad()
    def add_grad_(self, advance: bool = True) -> None:
        """Adds the penalty's gradient to every `.grad`, and advances a scheduled strength by a step.

        Call it between `backward()` and the optimizer's step: before clipping to have the penalty
        clipped too, after it (as `attach` does) to leave it whole. In a captured step, pass
        `advance=False` and call `step()` outside of the capture.
        """
        self._backend.add_grad_()
        if advance:
            self.step()

    def step(self) -> None:
        """Advances a scheduled strength. `add_grad_` and an attached optimizer do it themselves."""
        moves = not self.settled
        self.steps += 1
        if moves:
            self._rescale()

    @property
    def settled(self) -> bool:
        """Whether the strength no longer changes: it is constant, or its warm-up is over."""
        return all(strengths.settled(s, self.steps) for s in self.schedules.values())

    def strengthen(self, factor: float) -> None:
        """Multiplies the strength of every kind of group, schedules and all; a factor below 1 weakens.

        >>> reg = Regularizer(nn.Linear(4, 3), strength=1e-4)
        >>> reg.strengthen(2); reg.strength_now()
        {'elements': 0.0002}
        """
        factor = not_negative(factor, "strengthen: the factor")
        self.schedules = {kind: strengths.multiplied(s, factor) for kind, s in self.schedules.items()}
        self._rescale()

    def _rescale(self) -> None:
        now = self.strength_now()
        for (kind, factor), scale in self._scales.items():
            scale.set(now[kind] * factor)

    # In somebody's training loop

    def attach(self, *optimizers: torch.optim.Optimizer) -> Regularizer:
        """Adds the gradient before every step of the optimizers, which together must hold all parameters.

        A group whose weights are shared out among them (matrices to Muon, biases to AdamW) is pulled before the step of
        each, as it is then. Of SAM and Lookahead the optimizer inside is attached to. With AMP's GradScaler the
        gradient is added after unscaling; a fused optimizer that unscales by itself gets it scaled likewise. Clipping
        comes before the step, so it does not touch the penalty.
        """
        if self.handles:
            raise UserError("this regularizer is attached already; call detach() first.")
        optimizers = tuple(dict.fromkeys(nested(bare(optimizer))[-1] for optimizer in optimizers))
        if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
            raise UserError(
                "attach: LBFGS weighs losses against each other, so the penalty must be in the loss: "
                "add reg.loss() to it in the closure instead of attach(). A plan has no penalty with pull=0."
            )
        if any(group.get("maximize") for optimizer in optimizers for group in optimizer.param_groups):
            raise UserError(
                "attach: an optimizer with maximize=True would make the penalty grow. Minimize the negative instead: "
                "maximize=False, and -objective as the loss."
            )
        for optimizer, backends in zip(optimizers, self._share_out(optimizers), strict=True):
            hook = torch.compiler.disable(self._hook(backends, optimizer is optimizers[-1]))  # in a compiled step, too
            self.handles.append(optimizer.register_step_pre_hook(hook))
        return self

    def detach(self) -> None:
        """Undoes `attach`."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def _share_out(self, optimizers: tuple[torch.optim.Optimizer, ...]) -> list[list[Backend]]:
        """For each optimizer what adds the gradients of its parameters: terms that are its own, and parts of others."""
        owned = [held_by(optimizer) for optimizer in optimizers]
        own: list[list[Term]] = [[] for _ in optimizers]
        parts: list[list[Term]] = [[] for _ in optimizers]
        holder = {tensor: i for i, ids in reversed(list(enumerate(owned))) for tensor in ids}
        for term in self.terms:
            # A frozen tensor may be nobody's; one that is somebody's stays so when it is thawed.
            trained = {
                id(t): n
                for n, t in zip(term.unit.names, term.unit.tensors, strict=True)
                if t.requires_grad or id(t) in holder
            }
            lost = [name for tensor, name in trained.items() if tensor not in holder]
            if lost or not optimizers:
                raise UserError(
                    f"attach: {(lost or term.unit.names)[0]} is regularized, but no optimizer given holds it. "
                    "Give every optimizer of this very model (not of a copy), or leave it out with parameters=."
                )
            for tensor, name in trained.items():
                if isinstance(optimizers[holder[tensor]], torch.optim.SparseAdam):
                    raise UserError(
                        f"attach: {name} is regularized, but SparseAdam takes no gradient of all its weights. Give it "
                        "another optimizer, or leave it out with parameters=, in a plan with protect=."
                    )
            whole = next((i for i, ids in enumerate(owned) if ids.issuperset(trained)), None)
            if whole is not None:
                own[whole].append(term)
                continue
            for i in sorted({holder[tensor] for tensor in trained}):
                parts[i].append(term)
            for each in term.unit.tensors:
                holder.setdefault(id(each), holder[next(iter(trained))])
        return [
            [*self._backends(own[i]), *self._backends(parts[i], frozenset(t for t, h in holder.items() if h == i))]
            for i in range(len(optimizers))
        ]

    def _backends(self, terms: list[Term], only: frozenset[int] | None = None) -> list[Backend]:
        if not terms:
            return []
        return [self._backend if terms == self.terms and only is None else choose(terms, self._backend_name, only)]

    def _hook(self, backends: list[Backend], last: bool) -> Any:
        @torch.no_grad()
        def add(optimizer: torch.optim.Optimizer) -> None:
            self._replaced.check()
            for backend in backends:
                backend.add_grad_(getattr(optimizer, "grad_scale", None))

        def before_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if within_a_step(optimizer):
                return None
            advances = last  # at one of a step's closures, if several are called
            closure = closure_of(args, kwargs)

            def with_penalty() -> Any:
                """Lightning steps with a closure that computes the gradients: the penalty's come right after."""
                nonlocal advances
                loss = None if closure is None else closure()
                add(optimizer)
                if advances:
                    self.step()
                advances = False
                return loss

            if closure is None:
                return with_penalty()
            return with_closure(args, kwargs, with_penalty)

        return before_step

    # Looking at it

    def __repr__(self) -> str:
        """Says which parameters are meant, and what was left out."""
        names = list(dict.fromkeys(name for term in self.terms for name in term.unit.names))
        meant = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
        kinds = " and ".join(self.schedules)
        text = f"Regularizer({self.penalty!r} on {kinds} of {len(names)} parameters: {meant}"
        return f"{text}; {told(self.left_out)})" if self.left_out else f"{text})"

    def strength_now(self) -> dict[str, float]:
        """The strength of each kind of group at this step."""
        return {kind: not_negative(self._asked(s), f"strength of {kind}") for kind, s in self.schedules.items()}

    def _asked(self, schedule: Callable[[int], Any]) -> Any:
        try:
            return schedule(self.steps)
        except Exception as why:
            told = f"{shown(schedule)} can't be asked about step {self.steps}: {first_line(why)}"
            raise UserError(f"strength: {told}.") from why

    @torch.no_grad()
    def stats(self) -> Stats:
        """For each unit: its penalty's value (without strength), the effective density H_S/n, the Hoyer measure,
        the trimming threshold, and the fraction of its groups below it. The line `backend` says how many
        units each backend works on. It is a dict of dicts that prints as a table."""
        units = {f"{term.unit.name} ({term.kind})": _unit_stats(term) for term in self.terms}
        return Stats({"backend": {name: float(n) for name, n in self._backend.shares().items()}, **units})

    @torch.no_grad()
    def effective_density(self) -> Tensor:
        """Σ H_S(r) / Σ n over all units: roughly the fraction of groups that will be left. Does not synchronize."""
        r = [term.magnitudes() for term in self.terms]
        hs = torch.stack([HoyerSquare().value(x).to(r[0]) for x in r]).sum()
        return hs / sum(x.numel() for x in r)

    # Saving

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "strength": {k: strengths.to_state(s) for k, s in self.schedules.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the step and the strengths; a strength that is your own callable is not restored."""
        if not isinstance(state, Mapping) or not isinstance(state.get("strength"), Mapping) or "steps" not in state:
            raise UserError(f"{shown(state)} is not what a regularizer's state_dict() gives.")
        saved = dict(state["strength"])
        if set(saved) != set(self.schedules):
            raise UserError(f"this state is for groups {sorted(saved)}, the regularizer has {sorted(self.schedules)}.")
        loaded = {kind: strengths.from_state(s) for kind, s in saved.items() if s is not None}
        self.steps = int(not_negative(state["steps"], "the steps of a regularizer's state"))
        self.schedules.update(loaded)
        self._rescale()


class Stats(dict[str, dict[str, float]]):
    """Numbers by unit and name, as a dict of dicts; prints as a table.

    >>> print(Stats({"backend": {"plain": 1.0}, "fc (elements)": {"value": 2.0, "effective_density": 0.5}}))
    computed by: plain 1
    unit           value  effective density
    ───────────────────────────────────────
    fc (elements)      2                0.5
    """

    def flat(self) -> dict[str, float]:
        """One number for each unit and name: `writer.add_scalars("penalty", reg.stats().flat(), step)`."""
        return {f"{unit}/{name}": value for unit, line in self.items() for name, value in line.items()}

    def __str__(self) -> str:
        units = {unit: line for unit, line in self.items() if unit != "backend"}
        names = list(dict.fromkeys(name for line in units.values() for name in line))
        lines = [[unit, *(f"{line[name]:.4g}" for name in names)] for unit, line in units.items()]
        shares = ", ".join(f"{name} {n:g}" for name, n in self.get("backend", {}).items())
        return text_table(f"computed by: {shares}", ["unit", *(name.replace("_", " ") for name in names)], lines)


def _schedules(strength: Any, kinds: list[str]) -> dict[str, strengths.Schedule]:
    if not isinstance(strength, Mapping):
        return {kind: strengths.schedule(strength) for kind in kinds}
    for kind in strength:
        if kind not in kinds:
            raise unknown("group of this regularizer", kind, kinds)
    missing = [k for k in kinds if k not in strength]
    if missing:
        raise UserError(f"strength: {missing[0]!r} has none; give one for each of {', '.join(kinds)}.")
    return {kind: strengths.schedule(strength[kind]) for kind in kinds}


def _factors(penalty: Penalty, units: list[Unit]) -> list[float]:
    """By how much more each unit is regularized: 1 for the one with the smallest groups.

    The pull on a weight w is p'(r) · w / r, and r grows with the root of the size. A penalty that is blind to
    scale has a slope p' that falls as 1 / r on top of that.
    """
    sizes = [unit.sizes().double().mean().item() for unit in units]
    power = 1.0 if penalty.scale_free else 0.5
    return [(size / min(sizes)) ** power for size in sizes]


def _unit_stats(term: Term) -> dict[str, float]:
    r = term.magnitudes()
    threshold = trimming_threshold(r)
    return {
        "value": term.penalty.value(r).item(),
        "effective_density": HoyerSquare().value(r).item() / r.numel(),
        "hoyer_measure": hoyer_measure(r).item(),
        "trimming_threshold": threshold.item(),
        "share_below": (r < threshold).float().mean().item(),
    }
