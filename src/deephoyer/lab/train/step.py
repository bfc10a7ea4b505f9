"""An epoch of training steps, plain or replayed as a CUDA graph: forward, backward, penalty, optimizer.

Both do the same arithmetic in the same order. Masks are held by the optimizer's own hook
(`Masks.hold`), which a captured step includes, like what a method does within a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from deephoyer.lab.methods import Method
from deephoyer.lab.train.batches import Batch, Draw, Epoch, Streamed
from deephoyer.lab.train.epoch_tensors import EpochTensors
from deephoyer.lab.train.optim import set_rate
from deephoyer.regularizer import Regularizer

Forward = Callable[[Any], Tensor]
"""The mean loss of a draw, or of a batch."""


class PlainStep:
    """Runs steps one by one; `loss` sums the losses of the steps since `restart`.

    `parts` is the number of parts of a batch whose gradients are accumulated for one step. With several processes,
    `no_sync` is the context in which gradients are not averaged over them, and `mean` averages a loss over them.
    """

    def __init__(
        self,
        forward: Forward,
        optimizer: torch.optim.Optimizer,
        regularizer: Regularizer | None,
        device: torch.device,
        parts: int = 1,
        no_sync: Callable[[], AbstractContextManager[Any]] = nullcontext,
        mean: Callable[[Tensor], Tensor] = lambda loss: loss,
        method: Method | None = None,
    ):
        self.forward, self.optimizer, self.regularizer, self.device = forward, optimizer, regularizer, device
        self.parts, self.no_sync, self.mean, self.method = parts, no_sync, mean, method or Method()
        self.loss = torch.zeros((), device=device)

    def restart(self, loss: float = 0.0) -> None:
        """An epoch begins, or is resumed where the sum of its losses was `loss`."""
        self.loss.fill_(loss)

    def epoch(self, drawn: Epoch, rates: Sequence[float]) -> None:
        """All steps of an epoch, with a learning rate for each."""
        self._run_steps(drawn.to(self.device), rates, range(len(drawn)))

    def resume_epoch(
        self,
        drawn: Streamed,
        rates: Sequence[float],
        done: int,
        before: Callable[[int], None],
        after: Callable[[int], None],
    ) -> None:
        """The steps of an epoch after the first `done`, each between a call of `before` and one of `after`."""
        self._run_steps(drawn, rates, range(done, len(drawn)), before, after)

    def _run_steps(
        self,
        drawn: Epoch | Streamed,
        rates: Sequence[float],
        steps: range,
        before: Callable[[int], None] = lambda step: None,
        after: Callable[[int], None] = lambda step: None,
    ) -> None:
        now = None
        draws: Iterable[Draw | Batch] = drawn.steps(steps)
        for i, draw in zip(steps, draws, strict=True):
            if rates[i] != now:
                now = rates[i]
                set_rate(self.optimizer, now)
            before(i)
            self._step(draw)
            self._advance(1)
            after(i)

    def _step(self, draw: Draw | Batch) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._backward(draw) if self.parts == 1 else self._accumulated(draw)
        term = self.method.loss()
        if term is not None:
            term.backward()
        self.method.after_backward()
        if self.regularizer is not None:
            self.regularizer.add_grad_(advance=False)
        self.optimizer.step()
        self.method.after_step()
        self.loss += self.mean(loss)

    def _backward(self, draw: Draw | Batch) -> Tensor:
        loss = self.forward(draw)
        loss.backward()
        return loss.detach()

    def _accumulated(self, draw: Draw | Batch) -> Tensor:
        *early, last = draw.parts(self.parts)
        total = torch.zeros_like(self.loss)
        for part in early:
            with self.no_sync():
                loss = self.forward(part) / self.parts
                loss.backward()
            total += loss.detach()
        loss = self.forward(last) / self.parts
        loss.backward()
        return total + loss.detach()

    def _advance(self, steps: int) -> None:
        if self.regularizer is not None:
            for _ in range(steps):
                self.regularizer.step()


class CapturedStep(PlainStep):
    """The first steps run plainly on a side stream, as warm-up; then steps are captured once and replayed.

    An epoch's draws and rates lie in tables on the device, and the graph counts its own steps: a
    replay copies nothing. Small networks have several steps in a graph, for the pause between two
    replays is as long as some of their kernels.
    """

    WARM_UP = 3
    UNROLL = 10
    SMALL = 24  # parameter tensors; with more, a step is long enough by itself

    def __init__(self, *args: Any, **settings: Any):
        super().__init__(*args, **settings)
        self.stream = torch.cuda.Stream(self.device)
        self.tables: EpochTensors | None = None
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.hooks: tuple[int, ...] = ()
        self.warmed = 0

    def epoch(self, drawn: Epoch, rates: Sequence[float]) -> None:
        steps = len(drawn)
        if self.tables is None or not self.tables.fit(drawn):
            self.tables = EpochTensors(drawn, self.device)
            self.graphs.clear()
        hooks = tuple(self.optimizer._optimizer_step_post_hooks)
        if hooks != self.hooks:  # other masks are held than those that were captured
            self.hooks = hooks
            self.graphs.clear()
        self.tables.fill(drawn, rates)
        unroll = self._unroll(steps)
        plain = warm_up(steps, unroll, self.WARM_UP - self.warmed)
        self._warm_up(self.tables.drawn, rates, plain)
        self.tables.at(plain)
        if plain < steps and unroll not in self.graphs:
            self.graphs[unroll] = self._capture(self.tables, unroll)
        for _ in range(plain, steps, unroll):
            self.graphs[unroll].replay()
            self._advance(unroll)

    def _unroll(self, steps: int) -> int:
        """How many steps a graph holds: one where the host must fill in the next step's strength."""
        if self.regularizer is not None and not getattr(self.regularizer, "settled", False):
            return 1
        tensors = sum(len(group["params"]) for group in self.optimizer.param_groups)
        return largest_divisor(steps, self.UNROLL) if tensors <= self.SMALL else 1

    def _warm_up(self, drawn: Epoch, rates: Sequence[float], steps: int) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            self._run_steps(drawn, rates, range(steps))
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
        self.warmed += steps

    def _capture(self, tables: EpochTensors, unroll: int) -> torch.cuda.CUDAGraph:
        self.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        # Relaxed: pinned memory for a table may have to be allocated in between, which is harmless.
        with torch.cuda.graph(graph, capture_error_mode="relaxed"):
            block, rates = tables.next(unroll)
            for i in range(unroll):
                for group in self.optimizer.param_groups:
                    group["lr"].copy_(rates[i])
                self._step(block.step(i))
        return graph


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of a number that is not above `most`.

    >>> largest_divisor(540, 10), largest_divisor(391, 10)
    (10, 1)
    """
    return next(d for d in range(min(number, most), 0, -1) if number % d == 0)


def warm_up(steps: int, unroll: int, missing: int) -> int:
    """How many steps of an epoch run plainly, so that those missing are made up for and whole graphs are left.

    >>> warm_up(600, 10, 3), warm_up(600, 10, 0), warm_up(2, 1, 3)
    (10, 0, 2)
    """
    least = min(steps, max(0, missing))
    return least + (steps - least) % unroll
