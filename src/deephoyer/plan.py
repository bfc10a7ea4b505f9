"""A plan: takes the training loop somebody has through regularizing, pruning and finetuning, to a target.

The loop stays the user's, and so do optimizer, learning rate, data and validation: the plan is told when an epoch (or a
step) is over, and does the rest through hooks of the optimizer. For more say in it, take `Regularizer`, `prune`,
`Masks.hold` and `compact`, of which a plan is made.
"""

from __future__ import annotations

import copy
import math
import warnings
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Self, Unpack

import torch
from torch import Tensor, nn

from deephoyer.cutting import Choosing, Cut, Cutter, agreed
from deephoyer.errors import UserError, not_negative, positive_whole, shown
from deephoyer.errors import score as score_of
from deephoyer.groups import Kinds
from deephoyer.inference import Examples
from deephoyer.masks import Hold, Masks
from deephoyer.optimizers import bare, held_by, nested, silence
from deephoyer.pace import Pace, Stages
from deephoyer.penalties import Penalty, wide
from deephoyer.plan_report import PlanReport
from deephoyer.regularizer import Regularizer
from deephoyer.structure import compact_report
from deephoyer.targets import Target
from deephoyer.text_table import text_table
from deephoyer.weights import named_parameters, unwrap

PROBES = 8
"""Optimizer steps whose gradients say how strong the penalty is to begin with."""
LINES = 40
"""How many lines of history a plan that counts steps has, besides those with scores."""
PART_OF_THE_WAY = 0.1
"""How far the penalty takes the density towards what the next prune keeps: it shows which channels are to go."""
LOOK_EVERY = 10
"""After how many steps it is looked whether the penalty has done enough: once it acts, densities fall ever faster."""


class Plan:
    """Makes a network as small or fast as the target says, inside your own training loop.

    `protect`, `multiple`, `least`, `by_cost`, `score` and `loss` control which channels are removed, as in
    `deephoyer.cutting.Choosing`; the docs list all options.

    >>> model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> plan = Plan(model, torch.zeros(1, 8), optimizer, Target(macs=0.25), epochs=4)
    >>> for epoch in range(4):
    ...     for _ in range(10):
    ...         model(torch.randn(16, 8)).square().mean().backward()
    ...         optimizer.step(); optimizer.zero_grad()
    ...     plan.epoch()
    >>> plan.finish()[0].out_features
    8
    """

    def __init__(
        self,
        model: nn.Module,
        example_inputs: Examples,
        optimizer: Any,
        target: Target,
        epochs: int | None = None,
        *,
        steps: int | None = None,
        penalty: str | Penalty = "l1",
        groups: Kinds | None = None,
        strength: float | None = None,
        pull: float = 0.01,
        control: bool = True,
        weigh: str = "size",
        stages: Stages | None = None,
        rounds: int | None = None,
        batches: Iterable[Any] | None = None,
        baseline: float | None = None,
        **choosing: Unpack[Choosing],
    ):
        self.total = _length(epochs, steps)
        self.by_steps = steps is not None
        self.model, self.target = unwrap(model), target
        self.optimizers = [bare(o) for o in (optimizer if isinstance(optimizer, list | tuple) else [optimizer])]
        self.pace = Pace(target, self.total, stages, rounds)
        with torch.random.fork_rng(devices=[]):  # making a plan leaves the user's random numbers alone
            self.cutter = Cutter(model, example_inputs, target, groups, batches=batches, **choosing)
        self.regularizer = Regularizer(
            model,
            penalty,
            self.cutter.groups,
            1.0 if strength is None else strength,
            self.cutter.parameters,
            weigh=weigh,
        )
        self.pull, self.control = not_negative(pull, "pull"), control
        self.baseline = None if baseline is None else score_of(baseline, "plan: the baseline")
        if self.baseline is not None and not math.isfinite(self.baseline):
            raise UserError(f"plan: the baseline is {shown(baseline)}; no drop can be measured from that.")
        self.done = 0
        self.masks: Masks | None = None
        self.history: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.report: PlanReport | None = None
        self._given = strength is not None
        self._probed: list[list[float]] = []
        self._density_whole = self.regularizer.effective_density().item()
        self._enough: float | None = None
        self._resting = False
        self._share = self.cutter.share_now()
        self._best: dict[str, Any] | None = None
        self._held: list[Hold] = []
        self._watch: list[Any] = []  # the hook that looks at steps, while there is one
        self._attached = False
        self._stopped = False
        self._stepped = False  # whether an optimizer of the plan was seen to make a step
        self._stepping: list[torch.optim.Optimizer] = []  # those watched
        self._gradients: dict[int, Tensor] = {}  # the norm of each weight's gradient, when it was used last
        weakref.finalize(self, _silence_hooks, self.regularizer, self._held, self._watch).atexit = False
        if self.pull or self._given:  # what no optimizer holds is told now, not in the middle of training
            self.regularizer.attach(*self._trainers()).detach()
        self._follow()

    # Where it stands

    def __str__(self) -> str:
        """Where it stands, or the report once it is finished."""
        if self.report is not None:
            return str(self.report)
        cells = [[name, f"{value:.4g}"] for name, value in self.metrics().items()]
        return text_table(f"{self.target.title()}: {self.stage}, {self.done} of {self.total}", ["", "now"], cells)

    @property
    def stage(self) -> str:
        if self.report is not None:
            return "done"
        if self.pace.over:
            return "finetune"
        return "dense" if self.done < round(self.pace.stages.dense * self.total) else "regularize"

    def metrics(self) -> dict[str, float]:
        """The current state as numbers, for TensorBoard (`writer.add_scalars("plan", plan.metrics(), epoch)`)."""
        strength = sum(self.regularizer.strength_now().values()) / len(self.regularizer.schedules)
        line = {
            "share": self._share,
            "round": float(self.pace.level),
            "strength": strength if self._attached else 0.0,
            "effective_density": self.regularizer.effective_density().item(),
        }
        score = self.history[-1].get("score") if self.history else None
        return line if score is None else {**line, "score": score}

    # What the loop calls

    def epoch(self, score: float | None = None) -> None:
        """Call it after every epoch, with the validation score if there is one (higher is better)."""
        if self.by_steps:
            raise UserError("plan: it was made with steps=; call plan.step() after each of them, not plan.epoch().")
        self._tick(score, told=True)

    def step(self, score: float | None = None) -> None:
        """Call it after every step, with the score if the network was validated."""
        if not self.by_steps:
            raise UserError("plan: it was made with epochs=; call plan.epoch() after each of them, not plan.step().")
        self._tick(score, told=(self.done + 1) % max(1, self.total // LINES) == 0)

    def _tick(self, score: float | None, told: bool) -> None:
        if self.report is not None or self.done >= self.total:
            unit = "steps" if self.by_steps else "epochs"
            raise UserError(f"plan: its {self.total} {unit} are over; call plan.finish().")
        score = agreed(None if score is None else score_of(score, "plan: the score"))
        if self.target.drop is not None and score is None and not self.by_steps:
            raise UserError("plan: the target allows a drop, so it needs your validation score: plan.epoch(score).")
        if self._stopped:
            raise UserError(f"plan: it was stopped after {self.done} of {self.total}; make a new one to go on.")
        stage = self.stage
        self.done += 1
        if told or score is not None:
            self._keep_zeros()
        if told or score is not None:
            self.history.append(
                {
                    "step" if self.by_steps else "epoch": self.done,
                    "stage": stage,
                    "share": self._share,
                    "strength": self.regularizer.strength_now() if self._attached else {},
                    **({} if score is None else {"score": score}),
                }
            )
        if score is not None:
            self._remember(score)
        if score is not None and self.pace.level and not self._within(score):
            self._recover()
        elif (rounds := self.pace.due(self.done)) and self._allowed(score):
            self._prune(rounds)
        self._follow()

    def finish(self) -> nn.Module:
        """Returns the compacted network and sets `plan.report`. The model itself has the same zeros."""
        if self.report is not None:
            raise UserError("plan: it is finished already.")
        if self.done == 0:
            unit = "step" if self.by_steps else "epoch"
            self._tell(f"plan.{unit}() was never called: call it after every {unit}, which is when it prunes.")
        if not self.pace.over and self.target.drop is None:
            self._note(f"finished after {self.done} of {self.total}, before the last prune: it is not finetuned.")
            self._prune(self.pace.rounds - self.pace.level)
        self._keep_zeros()
        if self._best is not None:
            self._restore(self._best)
        self._release()
        small = self.cutter.compacted()
        self.report = self._reported(small)
        return small

    def stop(self) -> None:
        """Takes everything off the optimizer: nothing is regularized and no zeros are held from now on.

        The model stays as it is. `finish()` may still be called. Used as `with Plan(...) as plan:`, a plan is stopped
        when the block is left, by an exception as well; one that is dropped stops by itself.
        """
        self._release()
        self._stopped = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # Regularizing

    def _trainers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that hold weights of the model: one of a GAN's critic may step at any time, or never."""
        return [o for o in self.optimizers if _holds_some(o, self.model)] or self.optimizers

    def _follow(self) -> None:
        """Attaches and detaches what the stage needs."""
        if self.stage != "regularize" or self._resting:
            self._detach()
            return
        if self._enough is None and self.control and (self.pull or self._given):
            kept = self.cutter.plan(self.pace.after()).kept()
            now = self.regularizer.effective_density().item()
            self._enough = now + PART_OF_THE_WAY * (kept * self._density_whole - now)
        if not self._watch and (self.pull or self._given):
            look = torch.compiler.disable(_weakly(self._look))  # in a compiled step, too
            self._stepping = [nested(optimizer)[-1] for optimizer in self._trainers()]
            self._watch += [optimizer.register_step_post_hook(look) for optimizer in self._stepping]
        self._attach()

    def _attach(self) -> None:
        if not self._attached and (self._given or self._calibrated()):
            self.regularizer.attach(*self._trainers())
            self._attached = True

    def _detach(self) -> None:
        self.regularizer.detach()
        self._attached = False
        self._watch_no_more()

    def _watch_no_more(self) -> None:
        for handle in self._watch:
            handle.remove()
        self._watch.clear()

    def _calibrated(self) -> bool:
        return len(self._probed) >= PROBES

    @torch.no_grad()
    def _look(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """After a step: calibrates the strength by the first of them, then sees whether the penalty has done enough."""
        self._stepped = True
        probing = not self._given and not self._calibrated()
        if probing:
            self._measure(optimizer)
        if optimizer is not self._stepping[-1]:
            return
        if probing:
            self._calibrate()
        elif self._attached and self.regularizer.steps % LOOK_EVERY == 0 and self._pressed():
            self._resting = True  # until the next prune
            self.regularizer.detach()  # the hook itself goes at the next tick: not while they are called
            self._attached = False

    def _pressed(self) -> bool:
        """Whether the density has fallen far enough: pressed on, layers lose more than they need."""
        return self._enough is not None and self.regularizer.effective_density().item() <= self._enough

    def _measure(self, optimizer: torch.optim.Optimizer) -> None:
        """How large the loss's gradients are that this optimizer has used: the next one may find them gone."""
        scale = getattr(optimizer, "grad_scale", None)
        mine = held_by(optimizer)
        for tensor in {id(t): t for term in self.regularizer.terms for t in term.unit.tensors}.values():
            if id(tensor) in mine and tensor.grad is not None:
                norm = wide(tensor.grad).norm().cpu()
                self._gradients[id(tensor)] = norm if scale is None else norm / scale.cpu()

    def _calibrate(self) -> None:
        """After one of the first steps: how large the loss's gradient is, and the penalty's at strength 1."""
        if not self._gradients:
            return
        loss = torch.stack(list(self._gradients.values())).norm().item()
        self._gradients.clear()
        penalty = _penalty_norm(self.regularizer)
        if math.isfinite(loss) and loss > 0 and penalty > 0:
            self._probed.append([loss, penalty])
        if self._calibrated():
            mean = [sum(values) / PROBES for values in zip(*self._probed, strict=True)]
            self.regularizer.strengthen(self.pull * mean[0] / mean[1])
            self._attach()

    # Pruning

    def _allowed(self, score: float | None) -> bool:
        """Whether the network may be cut further: not while it has lost more than it may."""
        if self.target.drop is None:
            return True
        if self.base is None:
            self._tell(
                "the first prune waits for a score to measure the allowed drop from; none was given when it was due."
            )
            return False
        return self.pace.level == 0 or (score is not None and self._within(score))

    def _prune(self, rounds: int) -> None:
        if self._watch and not self._stepped:
            self._tell("the optimizer given made no step while it regularized: does another one train the model?")
        cut = agreed(self.cutter.aim(self.pace.after(rounds)))
        assert isinstance(cut, Cut)
        self._hold(self.cutter.apply(cut))
        self.pace.pruned(rounds, self.done)
        self._share = cut.share
        self._enough, self._resting = None, False

    def _recover(self) -> None:
        """The score is too low: the network trains without the penalty; if that takes too long, less is pruned."""
        self._resting = True
        best, pace = self._best, self.pace
        if best is None or self.done - pace.pruned_at < pace.patience or best["aimed"] <= pace.share:
            return
        self._restore(best)
        pace.smaller_rounds()
        if pace.due(self.done):
            self._prune(1)

    def _restore(self, best: Mapping[str, Any]) -> None:
        """The weights and zeros of an epoch that was kept."""
        self._let_zeros_go()
        self.model.load_state_dict(best["model"])
        self.pace.back_to(best["level"], best["aimed"])
        self.masks, self._share = None, best["share"]
        if best["masks"] is not None:
            self._hold(Masks(best["masks"], self.model))

    def _hold(self, masks: Masks) -> None:
        self._let_zeros_go()
        self._watch_no_more()  # `_follow` looks again, after the new holds: at weights whose zeros are zero
        self.masks = masks
        self._held += [masks.hold(o, self.model) for o in self.optimizers if _holds_some(o, self.model)]

    def _keep_zeros(self) -> None:
        """What the hooks can't see: weights put into the model from elsewhere, or trained by somebody else."""
        back = [] if self.masks is None else self.masks.undone(self.model)
        if self.masks is not None and back:
            some = ", ".join(back[:3]) + (", …" if len(back) > 3 else "")
            self.masks.apply(self.model)
            self._tell(
                f"weights of {some} that had been pruned were back, and are zero again: other weights were loaded, "
                "or another optimizer trains the model than the one given."
            )

    def _release(self) -> None:
        self._detach()
        self._let_zeros_go()

    def _let_zeros_go(self) -> None:
        for held in self._held:
            held.release()
        self._held.clear()

    # Scores

    @property
    def base(self) -> float | None:
        """The score that drops are measured from: the one given, or the best; without a drop the best before a prune.

        A pruned network may still be learning, and then come to more than the whole one had.
        """
        if self.baseline is not None:
            return self.baseline
        scored = [line for line in self.history if "score" in line]
        if self.target.drop is None:
            scored = [line for line in scored if line["share"] == self.history[0]["share"]]
        return max((line["score"] for line in scored), default=None)

    def _within(self, score: float) -> bool:
        base = self.base
        return self.target.drop is None or base is None or score >= base - self.target.drop - 1e-9

    def _remember(self, score: float) -> None:
        """Keeps the weights of the epoch that would be handed back if training ended now."""
        pace = self.pace
        if self.target.drop is None and not pace.over:
            return
        if self._best is None or self._rank(pace.level, pace.share, score) > self._rank(
            self._best["level"], self._best["aimed"], self._best["score"]
        ):
            weights = {name: _kept(value) for name, value in self.model.state_dict().items()}
            self._best = {
                "level": pace.level,
                "aimed": pace.share,
                "share": self._share,
                "epoch": self.done,
                "score": score,
                "model": weights,
                "masks": None if self.masks is None else dict(self.masks),
            }

    def _rank(self, level: int, share: float, score: float) -> tuple[bool, float, float]:
        """What is kept: the smallest network of those within the drop, else the one with the best score."""
        within = level == 0 or self._within(score)
        return within, -share if within else 0.0, score

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _tell(self, text: str) -> None:
        """For the report, and at once, since much of the training may lie ahead."""
        if text not in self.notes:
            warnings.warn(f"plan: {text}", stacklevel=5)
        self._note(text)

    # Saving

    def state_dict(self) -> dict[str, Any]:
        """The state to resume from, to be saved with those of the model and the optimizer: tensors and plain data."""
        return {
            "made": self._made(),
            "done": self.done,
            "pace": self.pace.state_dict(),
            "regularizer": self.regularizer.state_dict(),
            "masks": None if self.masks is None else self.masks.state_dict(),
            "best": self._best,
            "history": [dict(line) for line in self.history],
            "notes": list(self.notes),
            "probed": [list(pair) for pair in self._probed],
            "density_whole": self._density_whole,
            "enough": self._enough,
            "resting": self._resting,
            "share": self._share,
            "stuck": list(self.cutter.stuck),
        }

    def _made(self) -> str:
        """What a plan that is resumed has to have in common with the one that was saved."""
        return f"{self.total} {'steps' if self.by_steps else 'epochs'}, {self.pace.rounds} rounds, {self.target.size()}"

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes from a `state_dict`; load the states of the model and the optimizer as well."""
        if not isinstance(state, Mapping) or (missing := [key for key in self.state_dict() if key not in state]):
            lacks = f": it has no {missing[0]!r}" if isinstance(state, Mapping) else ""
            raise UserError(f"plan: {shown(state)} is not what a plan's state_dict() gives{lacks}.")
        if state["made"] != self._made():
            raise UserError(
                f"plan: this state is of a plan of {state['made']}, not of {self._made()}; make it the same."
            )
        self._release()
        self._stopped = False
        self.done = int(state["done"])
        self.pace.load_state_dict(state["pace"])
        self.regularizer.load_state_dict(state["regularizer"])
        self._best = None if state["best"] is None else dict(state["best"])
        self.history = [dict(line) for line in state["history"]]
        self.notes = list(state["notes"])
        self._probed = [list(pair) for pair in state["probed"]]
        self._density_whole, self._enough = state["density_whole"], state["enough"]
        self._resting = bool(state["resting"])
        self._stepped = bool(self._probed) or self.regularizer.steps > 0
        self._share, self.cutter.stuck = state["share"], list(state["stuck"])
        self.masks = None
        if state["masks"] is not None:
            self._hold(Masks.from_state_dict(state["masks"], self.model))
        self._follow()

    # The end

    def _reported(self, small: nn.Module) -> PlanReport:
        reached = self.cutter.share_of(small)
        notes = list(self.notes)
        missed, stopped = self.cutter.why_not(reached), self.pace.share > self.pace.goal
        if missed is not None or (stopped and self.target.open_ended):
            far, _, why = (missed or "").partition(": ")
            why = f"{self._why_no_further()}." if stopped else why
            notes.append(f"{far}: {why}" if far else why)
        if self.target.drop is not None and self.pace.level > 0 and self._best is None:
            notes.append("no score was given after the last prune: what it lost is not known.")
        if self._stepped and self.pull and not self._given and not self._calibrated():
            notes.append(
                f"there was no penalty: finding its strength takes {PROBES} steps with gradients while it regularizes, "
                f"and {len(self._probed)} were seen; strength= needs none."
            )
        return PlanReport(
            target=self.target,
            reached=reached,
            epoch=int(self._best["epoch"]) if self._best else self.done,
            score=self._best["score"] if self._best else None,
            base=self.base,
            widths=self.cutter.widths(),
            notes=notes,
            history=self.history,
            idle=compact_report(small).idle if hasattr(small, "compact_report") else [],
        )

    def _why_no_further(self) -> str:
        """Why not all rounds are in what is handed back, as far as scores have shown."""
        if self.base is None:
            return "no score was given to measure the drop from"
        unit = "step" if self.by_steps else "epoch"
        shares = {line[unit]: line["share"] for line in self.history if "score" in line}
        kept, moment = self._share, self.pace.next_moment
        if any(share < kept for share in shares.values()):
            return f"cutting further lost more than the drop of {self.target.drop:g} that is allowed"
        if self._best and self._best["epoch"] <= self.pace.pruned_at:
            return "it was pruned further, but no score was given after that"
        if self.done < moment:
            return f"finished after {self.done} of {self.total}, before the next prune was due"
        if self._best and self._best["epoch"] == self.total:
            return f"the {unit}s were over before it was pruned further"
        scored = any(at >= moment and share == kept for at, share in shares.items())
        return f"{'the score was too low' if scored else 'no score was given'} when the next prune was due"


def _silence_hooks(regularizer: Regularizer, held: list[Hold], watch: list[Any]) -> None:
    """What a plan leaves on optimizers when nobody has it any more."""
    for handle in (*regularizer.handles, *(handle for hold in held for handle in hold.handles), *watch):
        silence(handle)


def _weakly(method: Any) -> Any:
    """A hook that does not keep the object alive whose method it calls."""
    held = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        if (method := held()) is not None:
            method(*args)

    return call


def _kept(value: Any) -> Any:
    """A copy of what a state dict holds; a module's extra state may be anything."""
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


@torch.no_grad()
def _penalty_norm(regularizer: Regularizer) -> float:
    """The norm of the penalty's gradient, with the strengths as they are."""
    squares = []
    for term in regularizer.terms:
        c = term.penalty.coefficient(term.magnitudes()) * term.scale
        for laid, tensor in zip(term.unit.spread(c), term.unit.tensors, strict=True):
            squares.append((laid * wide(tensor)).square().sum().cpu())
    return torch.stack(squares).sum().sqrt().item()


def _holds_some(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
    held = held_by(optimizer)
    return any(id(p) in held for _, p in named_parameters(model))


def _length(epochs: int | None, steps: int | None) -> int:
    if (epochs is None) == (steps is None):
        raise UserError("plan: say how long you will train: either epochs= or steps=.")
    return positive_whole(epochs, "plan: epochs") if steps is None else positive_whole(steps, "plan: steps")
