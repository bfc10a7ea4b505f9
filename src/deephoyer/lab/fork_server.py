"""Python programs that start fast: a server that has imported what they need, and forks a child for each of them.

Importing torch takes seconds of a core, which each of a thousand short runs would pay. The server pays once. It never
touches a GPU, so that its children may; each has a session, a standard input and a log of its own, as if it had been
started by itself. A child that is *kept* runs one program after another, as long as they end well: beginning with a
GPU takes a second, too. Which programs those are, and what is made of their ends, is for `processes.py`.

Linux alone: elsewhere a fork may not do what its parent has begun.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

MESSAGE = 1 << 17
"""Bytes that a request may have; Linux gives room for a little more."""
NOBODY = 0
"""A number that no program has."""


def can_run(words: list[str]) -> bool:
    """Whether these words start a program of Python's that can be forked."""
    return sys.platform == "linux" and words[0] == sys.executable and words[1] in ("-m", "-c")


# The side of who asks


class ForkServer:
    """A server of one's own. `ready()` waits for it; it ends with `close()`, or with this process however that ends.

    `imports` are modules; of `module:function` the function is called, for what it keeps in memory.
    """

    def __init__(self, environment: dict[str, str], imports: Sequence[str] = ()):
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        none = subprocess.DEVNULL
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the server)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "deephoyer.lab.fork_server", str(theirs.fileno()), *imports],
            env={"OMP_WAIT_POLICY": "passive"} | environment,  # see deephoyer/__main__.py
            pass_fds=[theirs.fileno()],
            stdin=none,
            stdout=none,
            stderr=self._errors,
            start_new_session=True,
        )
        theirs.close()
        self._started = 0
        self._ended: dict[int, int] = {}
        self.served = self.gone = False

    def ready(self) -> bool:
        """Waits until it has imported what it imports; False if it can't serve here."""
        self.gone = self.gone or not _received(self._socket)
        self.served = not self.gone
        return self.served

    def start(self, words: list[str], log: IO[bytes], keep: bool = False) -> Forked | None:
        """Has a child run `python words`, its output in a log; None if the server is gone. With `keep` that is one that
        is kept, if one is free."""
        request = json.dumps({"start": self._started + 1, "words": words, "keep": keep}).encode()
        if len(request) > MESSAGE:
            return None
        self._started += 1
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._socket, [request], [theirs.fileno(), log.fileno()])
            except OSError:
                ours.close()
                self._hear_out()
                return None
        return Forked(self, self._started, ours, keep)

    def tell(self, **request: int) -> None:
        """Asks for something else; nobody hears it if the server is gone."""
        try:
            self._socket.send(json.dumps(request).encode())
        except OSError:
            self._hear_out()

    def _hear_out(self) -> None:
        """Reads what a server that is gone told before, until nothing more comes: it still counts."""
        self.status(NOBODY)

    def status(self, number: int, wait: bool = False) -> int | None:
        """The exit status of a child, negative for a signal; None while it runs or if nobody knows any more."""
        while number not in self._ended and not self.gone:
            try:
                told = _received(self._socket, 0 if wait else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            if told:
                end = json.loads(told)
                self._ended[end["ended"]] = end["status"]
            else:
                self.gone = True
        return self._ended.get(number)

    def how_it_ended(self) -> str:
        """Of one that is gone, for people: by what, and the last line it wrote; nothing where it can't serve here."""
        try:
            status = self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            return "does not answer"
        if status == 0:
            return ""
        end = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f"{end}; last line of its log: {lines[-1]}" if lines else end

    def close(self) -> None:
        self._socket.close()
        self._process.terminate()
        self._process.wait()
        self._errors.close()


class Forked:
    """A child of the server: what `processes.py` needs of a `subprocess.Popen`.

    Its standard input is a socket, by which this side sees when the child no longer holds the other end.
    """

    LOST = 1
    """The status of one whose server was killed: it is told to end, and how it ends is not known."""

    def __init__(self, server: ForkServer, number: int, stdin: socket.socket, kept: bool):
        self._server, self._number, self.stdin, self.kept = server, number, stdin, kept
        self.returncode: int | None = None
        self.lost = False

    def poll(self, wait: bool = False) -> int | None:
        if self.returncode is None:
            self.returncode = self._server.status(self._number, wait)
            if self.returncode is None and self._server.gone and self._left(wait):
                self.returncode, self.lost = self.LOST, True
        return self.returncode

    def _left(self, wait: bool) -> bool:
        """Tells a child without a server to end; whether it has."""
        try:
            self.stdin.shutdown(socket.SHUT_WR)
            return not _received(self.stdin, 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:  # nobody is at the other end
            return True

    def wait(self) -> int:
        while (status := self.poll(wait=True)) is None:
            pass
        return status

    def send_signal(self, number: int) -> None:
        """By the server, who knows whether the process's number is still its own."""
        self._server.tell(signal=number, to=self._number)


def _received(line: socket.socket, flags: int = 0) -> bytes:
    """The next message; b"" if the other end is closed, however that came."""
    try:
        return line.recv(MESSAGE, flags)
    except ConnectionError:
        return b""


# The server's side


@dataclass
class Child:
    """A process of the server's; `number` is of the program that it runs now, `line` leads to one that is kept."""

    number: int | None
    line: socket.socket | None = None

    def take(self, message: bytes, descriptors: list[int], number: int) -> bool:
        """Gives a free child that is kept its next program; False if it can't have it."""
        if self.number is not None or self.line is None:
            return False
        try:
            socket.send_fds(self.line, [message], descriptors)
        except OSError:  # it has just ended
            return False
        self.number = number
        return True


@dataclass
class Program:
    """What a child has to run first; one that is kept hears on `line` of the next."""

    words: list[str]
    number: int
    line: socket.socket | None


def serve(control: socket.socket, imports: Sequence[str]) -> Program | None:
    """Forks until the other end is closed. Returns once in the server, and in each child with what it has to run."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # for children: kept until they can listen
    named = [name.partition(":")[::2] for name in imports]
    modules = [importlib.import_module(module) for module, _ in named]
    threads = _threads()
    for module, (_, function) in zip(modules, named, strict=True):
        if function:
            getattr(module, function)()
    if _has_touched_a_gpu() or _threads() > threads:  # those that torch computes with: children would wait for them
        return None
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    children: dict[int, Child] = {}
    try:
        control.send(b"{}")
        while True:
            lines = {child.line.fileno(): child for child in children.values() if child.line is not None}
            ready, _, _ = select.select([control.fileno(), woken, *lines], [], [])
            for child in (lines[place] for place in ready if place in lines):
                _relay(control, child)
            if woken in ready:
                os.read(woken, 4096)
                _tell_ends(control, children)
            if control.fileno() not in ready:
                continue
            message, descriptors, _, _ = socket.recv_fds(control, MESSAGE, 2)
            if not message:
                return None
            request = json.loads(message)
            if "signal" in request:
                for process in [p for p, child in children.items() if child.number == request["to"]]:
                    os.kill(process, request["signal"])
                continue
            number, keep = request["start"], request["keep"]
            if not (keep and any(child.take(message, descriptors, number) for child in children.values())):
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) if keep else (None, None)
                process = os.fork()
                if process == 0:
                    used = [child.line for child in children.values()]
                    servers = [line.detach() for line in (control, ours, *used) if line is not None]
                    _become_a_program(descriptors, [*servers, woken, wake])
                    return Program(request["words"], number, theirs)
                children[process] = Child(number, ours)
                if theirs is not None:
                    theirs.close()
            for descriptor in descriptors:
                os.close(descriptor)
    except ConnectionError:
        return None


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _has_touched_a_gpu() -> bool:
    """Whether the driver is in use: then it would not work in children."""
    opened = (Path(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd"))
    return any(os.path.realpath(path).startswith("/dev/nvidia") for path in opened)


def _relay(control: socket.socket, child: Child) -> None:
    """Passes on that a child which is kept has ended a program; it is free then, or about to end itself."""
    assert child.line is not None
    told = _received(child.line)
    if told:
        child.number = None
        control.send(told)
    else:
        child.line.close()
        child.line = None


def _tell_ends(control: socket.socket, children: dict[int, Child]) -> None:
    while children:
        process, status = os.waitpid(-1, os.WNOHANG)
        if not process:
            return
        child = children.pop(process, None)
        if child is None:  # an import had started it
            continue
        if child.line is not None:  # its last word may not have been heard yet
            _relay(control, child)
        if child.line is not None:
            child.line.close()
        if child.number is not None:
            control.send(_end(child.number, os.waitstatus_to_exitcode(status)))


def _end(number: int, status: int) -> bytes:
    return json.dumps({"ended": number, "status": status}).encode()


# A child's side


def _become_a_program(descriptors: list[int], servers: list[int]) -> None:
    """Nothing of the server's is left, standard input, output and errors are its own."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setsid()
    _take_over(descriptors)
    for descriptor in servers:
        os.close(descriptor)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def _take_over(descriptors: list[int]) -> None:
    stdin, log = descriptors
    for place, descriptor in ((0, stdin), (1, log), (2, log)):
        os.dup2(descriptor, place)
    for descriptor in descriptors:
        os.close(descriptor)


def run_all(program: Program) -> int:
    """Runs a program and, of a child that is kept, those that follow it; gives the status of the last."""
    while True:
        status = run_python(program.words)
        sys.stdout.flush()
        sys.stderr.flush()
        if status or program.line is None:
            return status
        _let_go()
        program.line.send(_end(program.number, status))
        message, descriptors, _, _ = socket.recv_fds(program.line, MESSAGE, 2)
        if not message:
            return 0
        _take_over(descriptors)
        request = json.loads(message)
        program = Program(request["words"], request["start"], program.line)


def _let_go() -> None:
    """Between two programs: of the one that has ended neither its log nor its memory nor what it compiled is held."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for place in (0, 1, 2):
        os.dup2(nothing, place)
    os.close(nothing)
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def run_python(words: list[str]) -> int:
    """What `python words` does, for -m and -c; its status, if that is no error of Python's."""
    kind, program, *rest = words
    sys.argv = [kind if kind == "-c" else program, *rest]
    try:
        if kind == "-m":
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        return (end.code or 0) & 0xFF
    return 0


def main() -> None:
    try:
        program = serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
    except KeyboardInterrupt:  # in a child, before it has begun
        raise SystemExit(130) from None
    if program is not None:
        try:
            status = run_all(program)
        except ConnectionError:  # the server is gone
            status = 0
        # As Python ends, but for a second that goes by over what was imported.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
