"""Several processes that train one network: `torchrun --nproc-per-node N -m deephoyer run …`.

Each works on its share of every batch and of every evaluation, and all have the same weights. Only rank 0 writes, locks
the run's folder and reports; it sends what it reads there, and its errors, to the others. Without torchrun there is one
process, and nothing here does anything.
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
_connected = False


class ReportedByRank0(UserError):
    """A mistake that rank 0 reports to the user; the other processes end silently."""


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

    def on_main(self, work: Callable[[], T]) -> T:
        """The result of rank 0's work, for all processes; the others wait. An error of it ends them too."""
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
            raise ReportedByRank0(answer[1])
        result: T = answer[0]
        return result

    def together(self, work: Callable[[], T]) -> T:
        """Work that every process does; if one fails, all end, and the error is reported once."""
        if self.count == 1:
            return work()
        error = None
        try:
            result = work()
        except UserError as why:
            error = str(why)
        errors = self.gathered(error)
        first = next((i for i, text in enumerate(errors) if text is not None), None)
        if first is None:
            return result
        raise (UserError if self.main else ReportedByRank0)(errors[first])

    def data_parallel(self, model: nn.Module, device: torch.device) -> nn.Module | None:
        """The model wrapped so that gradients are averaged over all processes; None for a single process.

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


def reported_by_rank_0(why: UserError) -> bool:
    """Whether rank 0 reports this error: all had it before they were connected, or rank 0 has passed it on."""
    return isinstance(why, ReportedByRank0) or not _connected


def without_sync(parallel: nn.Module | None) -> Callable[[], AbstractContextManager[Any]]:
    """The context in which gradients are accumulated without averaging over processes."""
    if isinstance(parallel, nn.parallel.DistributedDataParallel):
        return parallel.no_sync
    return nullcontext


def rank() -> int:
    """The rank that torchrun gave to this process; 0 without torchrun."""
    return int(os.environ.get("RANK", 0)) if _by_torchrun() else 0


def _by_torchrun() -> bool:
    return int(os.environ.get("WORLD_SIZE", 1)) > 1 and "RANK" in os.environ and "MASTER_ADDR" in os.environ


def local_device(device: torch.device) -> torch.device:
    """The device of this process: with torchrun, each has another GPU."""
    if device.type != "cuda" or not _by_torchrun():
        return device
    if device.index is not None:
        raise UserError(
            f"device: {device} is a single GPU; with several processes write cuda, so that each uses another one."
        )
    local = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    if local.index >= torch.cuda.device_count():
        raise UserError(
            f"device: process {local.index} of this machine has no GPU; torch sees {torch.cuda.device_count()}."
        )
    torch.cuda.set_device(local)
    return local


@contextmanager
def process_group(device: torch.device, resumable: str) -> Iterator[Processes]:
    """The processes of this run, for as long as it lasts.

    If one dies, the others end too: they notice in the next step, or torchrun ends them. `resumable` then tells the
    user how to resume.
    """
    if not _by_torchrun():
        yield Processes()
        return
    global _connected
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    _connected = True
    number = dist.get_rank()
    before = signal.signal(signal.SIGTERM, lambda *_: _leave(number, resumable))
    try:
        yield Processes(number, dist.get_world_size())
    except RuntimeError as why:
        if not _lost(why):
            raise
        for later in (signal.SIGTERM, signal.SIGCHLD):  # torchrun ends what is left, the workers that read images too
            signal.signal(later, signal.SIG_IGN)
        raise UserError(f"another process of this run has ended. {resumable}") from None
    else:
        dist.destroy_process_group()
    finally:
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
            signal.signal(signal.SIGTERM, before)


def _leave(number: int, resumable: str) -> None:
    """Ends this process at once: the files on disk are intact at any moment."""
    who = f"process {number}: " if number else ""
    os.write(2, f"deephoyer: {who}ended by torchrun, as another process of this run has. {resumable}\n".encode())
    os._exit(128 + signal.SIGTERM)


def _lost(why: RuntimeError) -> bool:
    """Whether torch says here that another process has ended, or that torchrun is ending this one too."""
    if isinstance(why, dist.DistError) or re.search(r"DataLoader worker .* Terminated", str(why)):
        return True
    text = str(why).lower()
    return any(
        word in text for word in ("connection closed by peer", "connection reset", "gloo", "nccl", "broken pipe")
    )
