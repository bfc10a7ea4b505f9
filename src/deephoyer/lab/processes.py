"""Runs as child processes: several at once, watched, retried after another's GPU fault, ended with their parent.

Each is an ordinary `deephoyer run` in a folder of its own, so it can be resumed, shown and verified like any other,
and one that fails leaves the others alone. Which runs there are is said by a `Queue`: a grid and a search are two.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from deephoyer.files import folder_at
from deephoyer.lab import fork_server
from deephoyer.lab.fork_server import Forked, ForkServer
from deephoyer.lab.train.progress import describe

GPU_TROUBLES = ("CUDA error", "CUDA driver error", "Triton Error [CUDA]", "cuDNN error")
DEEPHOYER = (sys.executable, "-m", "deephoyer")
IMPORTS = ("deephoyer.lab.cli", "deephoyer.lab.train.run", "deephoyer.lab.train.result", "torch._dynamo")
"""What a run needs; torch imports the last of them by itself at an optimizer's first step."""
UNTIMED = "DEEPHOYER_UNTIMED"
END_WITH_STDIN = "DEEPHOYER_END_WITH_STDIN"
REPLACED = 1
"""How often a server that has died is replaced."""
TOLD_EVERY = 60.0
"""Seconds between two lines about runs that go on, where there is no terminal to show them on."""


@dataclass
class Member:
    """One run: the overrides it adds, its folder, and how its process does."""

    overrides: list[str]
    folder: Path
    process: subprocess.Popen[bytes] | Forked | None = None
    log: IO[bytes] | None = None
    status: int | None = None
    retried: bool = False
    about: dict[str, Any] = field(default_factory=dict)
    """What its queue wants to remember of it."""
    name: str = ""
    """What it is called in messages; without one, by its overrides."""

    @property
    def title(self) -> str:
        return self.name or " ".join(self.overrides) or "(no overrides)"

    @property
    def busy(self) -> bool:
        return self.process is not None and self.status is None

    def line(self) -> str:
        """What it is doing now, or how it ended."""
        if self.status is not None:
            return "done" if self.status == 0 else f"failed: {self.log_tail()}"
        if self.process is None:
            return "waiting"
        last = _last_line(self.folder / "metrics.jsonl")
        if not last:
            return "starting"
        try:
            metrics = json.loads(last)
            return f"{metrics['stage']} {metrics['epoch']}: {describe(metrics)}"
        except (ValueError, KeyError):
            return "running"

    def log_tail(self) -> str:
        """Why it ended: the signal that killed it, or the last line it wrote."""
        if self.status is not None and self.status < 0:
            return f"killed by {signal.Signals(-self.status).name}"
        return _last_line(self.folder / "log.txt") or f"exit status {self.status}"

    def failed_on_gpu(self) -> bool:
        """Whether it failed on the GPU, for the first time: the fault may have been another process's."""
        ended = self.status in (1, -signal.SIGABRT)  # told by Python, or by what lies under it
        words = _text(self.folder / "log.txt")
        return ended and not self.retried and any(trouble in words for trouble in GPU_TROUBLES)

    def failed_in_shared_process(self) -> bool:
        """Whether it was an error, for the first time, in a process that may have done other runs before, or whose
        server was killed."""
        shared = isinstance(self.process, Forked) and (self.process.kept or self.process.lost)
        return shared and not self.retried and self.status in (1, -signal.SIGABRT, -signal.SIGSEGV)

    def again(self) -> Member:
        self.process, self.status, self.retried = None, None, True
        return self

    def result(self) -> dict[str, Any] | None:
        """The summary that a finished run wrote."""
        path = self.folder / "summary.json"
        return json.loads(path.read_text(encoding="utf-8")) if self.status == 0 and path.exists() else None


class Queue:
    """Where members come from and where their ends are told."""

    def next(self) -> Member | None:
        """The next member to start; None while there is none."""
        raise NotImplementedError

    def open(self) -> bool:
        """Whether `next` may still give one, now or later."""
        raise NotImplementedError

    def ended(self, member: Member) -> None:
        """It has ended, for good."""

    def interrupted(self, member: Member) -> None:
        """It was stopped with its parent; the same command goes on with it later."""

    def tick(self, busy: Sequence[Member]) -> None:
        """Called several times a second, with what is running or waits to be retried."""


class ListedMembers(Queue):
    """A queue of members that are all known from the start."""

    def __init__(self, members: Sequence[Member]):
        self._waiting = list(members)

    def next(self) -> Member | None:
        return self._waiting.pop(0) if self._waiting else None

    def open(self) -> bool:
        return bool(self._waiting)


def conduct(
    words: list[str],
    environment: dict[str, str],
    queue: Queue,
    jobs: int,
    show: Callable[[Sequence[Member]], None] | None = None,
    say: Callable[[str], None] = lambda text: None,
    imports: Sequence[str] = (),
    keep: bool = False,
) -> None:
    """Runs what the queue gives, `jobs` at a time, as `words` + overrides + `--out FOLDER`.

    Where it can be, they are forked from a process that has the `imports` already (`fork_server.py`), with `keep` one
    after another in processes that go on. What happens is said, unless it is shown; what should not happen always is.
    Ctrl-C and SIGTERM stop the children first; they also end by themselves if this process is killed outright.
    """
    busy, faulted = list[Member](), list[Member]()
    told = time.monotonic()
    warn, say = say, say if show is None else _nothing
    with _sigterm_raises(), Starter(words, environment, imports, keep, warn) as start:
        try:
            while queue.open() or busy or faulted:
                while len(busy) < jobs and (member := queue.next()) is not None:
                    busy.append(member)  # before it starts, which may take seconds: Ctrl-C then finds it here
                    start(member)
                    say(f"started: {member.title}")
                if faulted and not busy:
                    # Only now: a GPU's server is in order again when the last process has left it. Alone, for one
                    # of them may have been the cause. The queue may be open still, for what follows from them.
                    start.let_go()
                    busy.append(faulted.pop(0).again())
                    start(busy[0])
                for member in list(busy):
                    if not _poll(member):
                        continue
                    busy.remove(member)
                    if jobs > 1 and member.failed_on_gpu():
                        faulted.append(member)
                        say(f"failed on the GPU, will be retried: {member.title}")
                    elif member.failed_in_shared_process():
                        busy.append(member.again())
                        start(member)
                        say(f"failed, retried in a new process: {member.title}")
                    else:
                        queue.ended(member)
                        say(f"{member.line()}: {member.title}")
                queue.tick([*busy, *faulted])
                if show is not None:
                    show(busy)
                elif time.monotonic() - told > TOLD_EVERY:
                    told = time.monotonic()
                    for member in busy:
                        say(f"{member.title}: {member.line()}")
                time.sleep(0.2)
        except BaseException:  # Ctrl-C most of all
            _stop(busy)
            for member in [*busy, *faulted]:
                queue.interrupted(member)
            raise


class Starter:
    """Starts members: forked from a server where that goes, each by itself elsewhere and when it is retried."""

    def __init__(
        self,
        words: list[str],
        environment: dict[str, str],
        imports: Sequence[str] = (),
        keep: bool = False,
        warn: Callable[[str], None] = lambda text: None,
    ):
        self.words, self.environment = words, environment | {END_WITH_STDIN: "1"}
        self.imports, self.keep, self.warn = imports, keep, warn
        self.server: ForkServer | None = None
        self.servers_left = 1 + REPLACED

    def __enter__(self) -> Starter:
        return self

    def __exit__(self, *_: object) -> None:
        self.let_go()

    def let_go(self) -> None:
        """Processes that are kept end; what is started from now on has a new one."""
        if self.server is not None:
            self.server.close()
            self.server = None

    def __call__(self, member: Member) -> Member:
        member.log = open(folder_at(member.folder) / "log.txt", "ab" if member.retried else "wb")  # noqa: SIM115 (closed when the process ends)
        words = [*self.words, *member.overrides, "--out", str(member.folder)]
        if self.server is not None and self.server.gone:
            self._give_up(self.server)
        forked = None
        if fork_server.can_run(words) and not member.retried:
            forked = self._forked(words[1:], member.log)
        member.process = forked or subprocess.Popen(
            words,
            env=self.environment,
            stdin=subprocess.PIPE,  # closes when this process is gone, however that came
            stdout=member.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches the members through us, once, and not through the terminal as well
        )
        return member

    def _forked(self, words: list[str], log: IO[bytes]) -> Forked | None:
        """The program, forked from a server, a new one if the last has died; None if it has to start by itself."""
        while self.servers_left:
            if self.server is None:
                self.server = ForkServer(self.environment, self.imports)
                self.server.ready()
            forked = None if self.server.gone else self.server.start(words, log, self.keep)
            if not self.server.gone:
                return forked
            self._give_up(self.server)
        return None

    def _give_up(self, server: ForkServer) -> None:
        """One that died after it served has a successor; one that can't serve here would fare no better again."""
        self.servers_left = self.servers_left - 1 if server.served else 0
        if how := server.how_it_ended():
            then = "A new one is started" if self.servers_left else "Runs are started without it from now on"
            self.warn(f"the fork server {how}. {then}.")
        self.let_go()


def _nothing(text: str) -> None:
    pass


def _poll(member: Member) -> bool:
    """Whether its process has ended; its log is closed then."""
    assert member.process is not None and member.log is not None
    member.status = member.process.poll()
    if member.status is None:
        return False
    member.log.close()
    if member.process.stdin is not None:
        member.process.stdin.close()
    return True


def _stop(busy: Sequence[Member]) -> None:
    """All are told before any is waited for: a second Ctrl-C must not leave some running."""
    running = [m.process for m in busy if m.process is not None and m.process.poll() is None]
    for process in running:
        process.send_signal(signal.SIGINT)
    for process in running:
        process.wait()


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """SIGTERM ends the parent as Ctrl-C does: children stopped first. Only the main thread can listen to signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminated(*_: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def is_member() -> bool:
    """Whether this process is one of many that another one started."""
    return os.environ.get(END_WITH_STDIN) == "1"


def is_untimed() -> bool:
    """Whether nobody asks how fast the network is in the end: beside others no time would be right."""
    return os.environ.get(UNTIMED) == "1"


def end_with_parent() -> None:
    """In a child: when its standard input closes, the parent is gone, and this process ends as by Ctrl-C."""
    if not is_member():
        return
    # A shell that starts its commands in the background has them ignore Ctrl-C, by which members are stopped.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    mine = os.fstat(0)

    def watch() -> None:
        try:
            while os.read(0, 1):
                pass
        except OSError:
            pass
        if os.path.samestat(mine, os.fstat(0)):  # else this run is over, and its process has gone on to another
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=watch, daemon=True).start()


def _last_line(path: Path) -> str:
    lines = _text(path).strip().splitlines()
    return lines[-1] if lines else ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
