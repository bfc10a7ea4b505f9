"""Several processes that train one network: `torchrun --nproc-per-node N -m deephoyer run …`.

Each has its own share of every batch and of every evaluation, and all have the same weights. Rank 0 alone writes, locks
the run's folder and reports; what it finds there, and what goes wrong with it, it shares with the others. Without
torchrun there is one process, and nothing here does anything.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deephoyer.errors import UserError

T = TypeVar("T")
_met = False


class ToldElsewhere(UserError):
    """A mistake that rank 0 tells the user; the other processes end in silence."""


class Processes:
    """This process among those of its run."""

    def __init__(self, rank: int = 0, count: int = 1):
        self.rank, self.count = rank, count

    @property
    def main(self) -> bool:
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of what every process has."""
        if self.count > 1:
            dist.all_reduce(tensor)
        return tensor

    def mean(self, tensor: Tensor) -> Tensor:
        return self.sum(tensor) / self.count if self.count > 1 else tensor

    def by_main(self, work: Callable[[], T]) -> T:
        """What rank 0 makes of some work, for all; the others wait. Its mistake ends them too."""
        if self.count == 1:
            return work()
        answer: list[Any] = [None, None]
        if self.main:
            try:
                answer[0] = work()
            except UserError as why:
                answer[1] = str(why)
                dist.broadcast_object_list(answer)
                raise
        dist.broadcast_object_list(answer)
        if answer[1] is not None:
            raise ToldElsewhere(answer[1])
        made: T = answer[0]
        return made

    def together(self, work: Callable[[], T]) -> T:
        """Work that all do; where it goes wrong for one, all end, and it is told once."""
        if self.count == 1:
            return work()
        trouble = None
        try:
            made = work()
        except UserError as why:
            trouble = str(why)
        troubles = self.gathered(trouble)
        first = next((i for i, text in enumerate(troubles) if text is not None), None)
        if first is None:
            return made
        raise (UserError if self.main else ToldElsewhere)(troubles[first])

    def spread(self, model: nn.Module, device: torch.device) -> nn.Module | None:
        """What to call in the model's place, so that gradients become means over all processes; None for one alone.

        Every process then has rank 0's weights, and before each step its batch-norm statistics.
        """
        if self.count == 1:
            return None
        return nn.parallel.DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)

    def share_buffers(self, model: nn.Module) -> None:
        """Buffers become rank 0's: each process has batch-norm statistics of its own share of the last batch."""
        if self.count > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer, 0)

    def gathered(self, thing: T) -> list[T]:
        """What every process has, by rank."""
        if self.count == 1:
            return [thing]
        things: list[Any] = [None] * self.count
        dist.all_gather_object(things, thing)
        return things


def told_by_another(why: UserError) -> bool:
    """Whether rank 0 tells the user of it: all found it before they met, or rank 0 has handed it on."""
    return isinstance(why, ToldElsewhere) or not _met


def without_sync(spread: nn.Module | None) -> Callable[[], AbstractContextManager[Any]]:
    """The context in which gradients are accumulated without those of other processes."""
    if isinstance(spread, nn.parallel.DistributedDataParallel):
        return spread.no_sync
    return nullcontext


def rank() -> int:
    """This process's rank as torchrun has it, 0 without it."""
    return int(os.environ.get("RANK", 0)) if _by_torchrun() else 0


def _by_torchrun() -> bool:
    return int(os.environ.get("WORLD_SIZE", 1)) > 1 and "RANK" in os.environ and "MASTER_ADDR" in os.environ


def own_device(device: torch.device) -> torch.device:
    """The device of this process: each has a GPU of its own."""
    if device.type != "cuda" or not _by_torchrun():
        return device
    if device.index is not None:
        raise UserError(f"device: {device} is one GPU; with several processes write cuda, and each takes its own.")
    own = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    if own.index >= torch.cuda.device_count():
        raise UserError(
            f"device: process {own.index} of this machine has no GPU; torch sees {torch.cuda.device_count()}."
        )
    torch.cuda.set_device(own)
    return own


@contextmanager
def joined(device: torch.device, resumable: str) -> Iterator[Processes]:
    """The processes of this run, for as long as it lasts.

    One that dies takes the others with it: they notice in the next step, or torchrun ends them. `resumable` says to the
    user where the run stands then.
    """
    if not _by_torchrun():
        yield Processes()
        return
    global _met
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    _met = True
    number = dist.get_rank()
    before = signal.signal(signal.SIGTERM, lambda *_: _leave(number, resumable))
    try:
        yield Processes(number, dist.get_world_size())
    except RuntimeError as why:
        if not _lost(why):
            raise
        for later in (signal.SIGTERM, signal.SIGCHLD):  # torchrun ends what is left, the workers that read images too
            signal.signal(later, signal.SIG_IGN)
        raise UserError(f"another process of this run is gone. {resumable}") from None
    else:
        dist.destroy_process_group()
    finally:
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
            signal.signal(signal.SIGTERM, before)


def _leave(number: int, resumable: str) -> None:
    """Ends this process at once, wherever it is: what is on disk is whole at any moment."""
    who = f"process {number}: " if number else ""
    os.write(2, f"deephoyer: {who}ended by torchrun, as another process of this run has. {resumable}\n".encode())
    os._exit(128 + signal.SIGTERM)


def _lost(why: RuntimeError) -> bool:
    """Whether it is torch's way to say that a peer is gone, or that torchrun has begun to end this process too."""
    if isinstance(why, dist.DistError) or re.search(r"DataLoader worker .* Terminated", str(why)):
        return True
    text = str(why).lower()
    return any(
        word in text for word in ("connection closed by peer", "connection reset", "gloo", "nccl", "broken pipe")
    )
