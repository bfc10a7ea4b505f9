"""One training step, plain or replayed as a CUDA graph: forward, backward, penalty, optimizer.

Both do the same arithmetic in the same order. Masks are held by the optimizer's own hook
(`Masks.hold`), which a captured step captures with the rest.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from deephoyer.regularizer import Regularizer
from deephoyer.train.rates import set_rate

Forward = Callable[[Tensor, "Tensor | None", "Tensor | None"], Tensor]
Draw = tuple[Tensor, "Tensor | None", "Tensor | None"]


class PlainStep:
    """Runs a step as it is called; `loss` sums the losses of the steps since `restart`."""

    def __init__(
        self,
        forward: Forward,
        optimizer: torch.optim.Optimizer,
        regularizer: Regularizer | None,
        device: torch.device,
        shape: tuple[int, ...] = (),
    ):
        self.forward, self.optimizer, self.regularizer = forward, optimizer, regularizer
        self.loss = torch.zeros(shape, device=device)

    def epoch(self, drawn, rates) -> None:
        now = None
        for i, rate in enumerate(rates):
            if rate != now:
                set_rate(self.optimizer, rate)
                now = rate
            self(drawn.step(i))

    def restart(self) -> None:
        self.loss.zero_()

    def __call__(self, draw: Draw) -> None:
        self._once(draw)
        if self.regularizer is not None:
            self.regularizer.step()

    def _once(self, draw: Draw) -> None:
        loss = self.forward(*draw)
        self.optimizer.zero_grad(set_to_none=True)
        loss.sum().backward()
        if self.regularizer is not None:
            self.regularizer.add_grad_(advance=False)
        self.optimizer.step()
        self.loss += loss.detach()


class CapturedStep(PlainStep):
    """The first steps run plainly on a side stream, as warm-up; then the step is captured once and replayed."""

    WARM_UP = 3

    def __init__(
        self, forward: Forward, optimizer: torch.optim.Optimizer, regularizer: Regularizer | None, device: torch.device
    ):
        super().__init__(forward, optimizer, regularizer, device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.calls = 0
        self.stream = torch.cuda.Stream(device)
        self.slots: list[Tensor | None] = []

    def _once(self, draw: Draw) -> None:
        self.calls += 1
        if self.calls <= self.WARM_UP:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                super()._once(draw)
            torch.cuda.current_stream().wait_stream(self.stream)
            return
        if self.graph is None:
            self._capture(draw)
        for slot, value in zip(self.slots, draw, strict=True):
            if slot is not None and value is not None:
                slot.copy_(value)
        assert self.graph is not None
        self.graph.replay()

    def _capture(self, draw: Draw) -> None:
        self.slots = [None if t is None else t.clone() for t in draw]
        self.optimizer.zero_grad(set_to_none=True)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            super()._once((self.slots[0], self.slots[1], self.slots[2]))  # type: ignore[arg-type]
