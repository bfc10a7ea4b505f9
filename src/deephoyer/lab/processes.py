"""Runs as child processes: several in parallel, retried after a GPU error of another run, ended with their parent.

Each is an ordinary `deephoyer run` in its own folder, so it can be resumed, shown and verified like any other, and one
that fails does not affect the others. A `Queue` provides the runs: a grid, a search or a comparison.
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

GPU_ERRORS = ("CUDA error", "CUDA driver error", "Triton Error [CUDA]", "cuDNN error")
DEEPHOYER = (sys.executable, "-m", "deephoyer")
IMPORTS = ("deephoyer.lab.cli", "deephoyer.lab.train.run", "deephoyer.lab.train.result", "torch._dynamo")
"""The modules that a run imports; torch imports the last one at an optimizer's first step."""
UNTIMED = "DEEPHOYER_UNTIMED"
END_WITH_STDIN = "DEEPHOYER_END_WITH_STDIN"
REPLACED = 1
"""How often a fork server that has died is replaced."""
REPORT_EVERY = 60.0
"""Seconds between two progress messages per run, where there is no terminal for a live table."""


@dataclass
class ChildRun:
    """One run: its overrides, its folder, and the state of its process."""

    overrides: list[str]
    folder: Path
    process: subprocess.Popen[bytes] | Forked | None = None
    log: IO[bytes] | None = None
    status: int | None = None
    retried: bool = False
    about: dict[str, Any] = field(default_factory=dict)
    """What its queue notes about it."""
    name: str = ""
    """Its name in messages; by default its overrides."""

    @property
    def title(self) -> str:
        return self.name or " ".join(self.overrides) or "(no overrides)"

    @property
    def busy(self) -> bool:
        return self.process is not None and self.status is None

    def line(self) -> str:
        """Its progress, or how it ended."""
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
        """Whether it failed on the GPU and was not retried yet: another process may have been the cause."""
        ended = self.status in (1, -signal.SIGABRT)  # by a Python exception, or in native code
        log = _text(self.folder / "log.txt")
        return ended and not self.retried and any(error in log for error in GPU_ERRORS)

    def failed_in_shared_process(self) -> bool:
        """Whether it failed and was not retried yet, in a process that may have executed other runs before, or whose
        server was killed."""
        shared = isinstance(self.process, Forked) and (self.process.kept or self.process.lost)
        return shared and not self.retried and self.status in (1, -signal.SIGABRT, -signal.SIGSEGV)

    def retry(self) -> ChildRun:
        self.process, self.status, self.retried = None, None, True
        return self

    def result(self) -> dict[str, Any] | None:
        """The summary that a finished run wrote."""
        path = self.folder / "summary.json"
        return json.loads(path.read_text(encoding="utf-8")) if self.status == 0 and path.exists() else None


class Queue:
    """Provides runs, and is notified when they end."""

    def next(self) -> ChildRun | None:
        """The next run to start; None while there is none."""
        raise NotImplementedError

    def open(self) -> bool:
        """Whether `next` may still return one, now or later."""
        raise NotImplementedError

    def ended(self, child: ChildRun) -> None:
        """The run has ended and will not be retried."""

    def interrupted(self, child: ChildRun) -> None:
        """The run was stopped with its parent; the same command resumes it later."""

    def tick(self, busy: Sequence[ChildRun]) -> None:
        """Called several times per second with the runs that are running or wait to be retried."""


class ListQueue(Queue):
    """A queue of runs that are all known in advance."""

    def __init__(self, runs: Sequence[ChildRun]):
        self._waiting = list(runs)

    def next(self) -> ChildRun | None:
        return self._waiting.pop(0) if self._waiting else None

    def open(self) -> bool:
        return bool(self._waiting)


def run_children(
    words: list[str],
    environment: dict[str, str],
    queue: Queue,
    jobs: int,
    show: Callable[[Sequence[ChildRun]], None] | None = None,
    say: Callable[[str], None] = lambda text: None,
    imports: Sequence[str] = (),
    keep: bool = False,
) -> None:
    """Executes the runs of a queue, `jobs` at a time, as `words` + overrides + `--out FOLDER`.

    If possible, they are forked from a process that has already loaded `imports` (`fork_server.py`); with `keep`, these
    processes are reused. Progress goes to `show`, or else to `say`; warnings always go to `say`. Ctrl-C, SIGTERM and
    SIGHUP stop the children first; they also end if this process is killed.
    """
    busy, faulted = list[ChildRun](), list[ChildRun]()
    reported = time.monotonic()
    warn, say = say, say if show is None else _silent
    with _signals_raise(), Starter(words, environment, imports, keep, warn) as start:
        try:
            while queue.open() or busy or faulted:
                while len(busy) < jobs and (child := queue.next()) is not None:
                    busy.append(child)  # before it starts, which may take seconds: Ctrl-C must find it here
                    start(child)
                    say(f"started: {child.title}")
                if faulted and not busy:
                    # Only when nothing runs: MPS recovers from a GPU error when its last client has ended. One at a
                    # time, as one of them may be the cause. The queue may still be open, for runs that depend on these.
                    start.close_server()
                    busy.append(faulted.pop(0).retry())
                    start(busy[0])
                for child in list(busy):
                    if not _poll(child):
                        continue
                    if jobs > 1 and child.failed_on_gpu():
                        busy.remove(child)
                        faulted.append(child)
                        say(f"failed on the GPU, will be retried: {child.title}")
                    elif child.failed_in_shared_process():
                        start(child.retry())
                        say(f"failed, retried in a new process: {child.title}")
                    else:
                        queue.ended(child)
                        busy.remove(child)  # after its queue has noted it: Ctrl-C must find it before
                        say(f"{child.line()}: {child.title}")
                queue.tick([*busy, *faulted])
                if show is not None:
                    show(busy)
                elif time.monotonic() - reported > REPORT_EVERY:
                    reported = time.monotonic()
                    for child in busy:
                        say(f"{child.title}: {child.line()}")
                time.sleep(0.2)
        except BaseException:  # above all Ctrl-C
            try:
                _stop(busy)
            finally:  # a second Ctrl-C, too
                for child in [*busy, *faulted]:
                    queue.interrupted(child)
            raise


class Starter:
    """Starts runs: forked from a server if possible; otherwise, and for a retry, as new processes."""

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
        self.close_server()

    def close_server(self) -> None:
        """Ends the server and its reused processes; a later run gets a new server."""
        if self.server is not None:
            self.server.close()
            self.server = None

    def __call__(self, child: ChildRun) -> ChildRun:
        log = folder_at(child.folder) / "log.txt"
        if not child.retried:
            log.write_bytes(b"")
        child.log = open(log, "ab")  # noqa: SIM115 (closed when the process ends; another one may be writing there, too)
        words = [*self.words, *child.overrides, "--out", str(child.folder)]
        if self.server is not None and self.server.gone:
            self._give_up(self.server)
        forked = None
        if fork_server.can_run(words) and not child.retried:
            forked = self._forked(words[1:], child.log)
        child.process = forked or subprocess.Popen(
            words,
            env=self.environment,
            stdin=subprocess.PIPE,  # closes when this process ends, for whatever reason
            stdout=child.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches the runs through us, not also through the terminal
        )
        return child

    def _forked(self, words: list[str], log: IO[bytes]) -> Forked | None:
        """The program, forked from the server, or from a new one if that has died; None if no server works."""
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
        """A server that died after it was ready is replaced; one that was never ready is not tried again."""
        self.servers_left = self.servers_left - 1 if server.served else 0
        if how := server.how_it_ended():
            then = "A new one is started" if self.servers_left else "Runs are started without it from now on"
            self.warn(f"the fork server {how}. {then}.")
        self.close_server()


def _silent(text: str) -> None:
    pass


def _poll(child: ChildRun) -> bool:
    """Whether its process has ended; then closes its log."""
    assert child.process is not None and child.log is not None
    child.status = child.process.poll()
    if child.status is None:
        return False
    child.log.close()
    if child.process.stdin is not None:
        child.process.stdin.close()
    return True


def _stop(busy: Sequence[ChildRun]) -> None:
    """Signals all children before waiting for any: a second Ctrl-C must not leave some running."""
    running = [child.process for child in busy if child.process is not None and child.process.poll() is None]
    for process in running:
        process.send_signal(signal.SIGINT)
    for process in running:
        process.wait()


@contextmanager
def _signals_raise() -> Iterator[None]:
    """SIGTERM, and SIGHUP of a terminal that is closed, end the parent like Ctrl-C: children are stopped first.

    Only the main thread can handle signals; one that is ignored, as by nohup, stays so.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminated(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    handled = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, terminated) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def is_child_run() -> bool:
    """Whether this process was started by `run_children`."""
    return os.environ.get(END_WITH_STDIN) == "1"


def is_untimed() -> bool:
    """Whether the final network is not to be timed, because other runs next to it would distort its time."""
    return os.environ.get(UNTIMED) == "1"


def end_with_parent() -> None:
    """In a child: when its standard input closes, the parent has ended, and this process ends as by Ctrl-C."""
    if not is_child_run():
        return
    # Commands that a shell starts in the background ignore SIGINT, with which runs are stopped.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    stdin = os.fstat(0)

    def watch() -> None:
        try:
            while os.read(0, 1):
                pass
        except OSError:
            pass
        if os.path.samestat(stdin, os.fstat(0)):  # else this run has ended, and its process executes another one
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
