"""A fork server: it imports modules once and forks a child process for each Python program, which then starts fast.

Otherwise each of a thousand short runs would spend seconds on importing torch. The server never uses a GPU, so that its
children can; each has its own session, standard input and log, as if it had been started directly. A child that is
*kept* runs several programs one after another, as long as they succeed, since initializing a GPU takes another second.
Which programs are run is decided in `processes.py`.

Linux only: on other systems a forked process can't use all that its parent has loaded.
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
"""The largest request in bytes; Linux allows a little more."""
NO_PROGRAM = 0
"""A number that no program has."""


def can_run(words: list[str]) -> bool:
    """Whether this command starts a Python program that can be forked."""
    return sys.platform == "linux" and words[0] == sys.executable and words[1] in ("-m", "-c")


# The client


class ForkServer:
    """Starts a server. `ready()` waits for it; it ends with `close()`, or when this process ends.

    `imports` are modules; for `module:function` the function is called, to load data into memory.
    """

    def __init__(self, environment: dict[str, str], imports: Sequence[str] = ()):
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the server)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "deephoyer.lab.fork_server", str(theirs.fileno()), *imports],
            env={"OMP_WAIT_POLICY": "passive"} | environment,  # see deephoyer/__main__.py
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            start_new_session=True,
        )
        theirs.close()
        self._started = 0
        self._ended: dict[int, int] = {}
        self.served = self.gone = False

    def ready(self) -> bool:
        """Waits until its imports are done; False if it can't work on this system."""
        self.gone = self.gone or not _received(self._socket)
        self.served = not self.gone
        return self.served

    def start(self, words: list[str], log: IO[bytes], keep: bool = False) -> Forked | None:
        """Runs `python words` in a child, with its output in a log; None if the server has ended. With `keep`, a kept
        child is used if one is free."""
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
                self._drain()
                return None
        return Forked(self, self._started, ours, keep)

    def send(self, **request: int) -> None:
        """Sends another request; ignored if the server has ended."""
        try:
            self._socket.send(json.dumps(request).encode())
        except OSError:
            self._drain()

    def _drain(self) -> None:
        """Reads the remaining messages of a server that has ended: they still count."""
        self.status(NO_PROGRAM)

    def status(self, number: int, wait: bool = False) -> int | None:
        """The exit status of a child, negative for a signal; None while it runs, or if it is unknown."""
        while number not in self._ended and not self.gone:
            try:
                message = _received(self._socket, 0 if wait else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            if message:
                end = json.loads(message)
                self._ended[end["ended"]] = end["status"]
            else:
                self.gone = True
        return self._ended.get(number)

    def how_it_ended(self) -> str:
        """How the server ended, with the last line of its log, as a phrase; empty if it can't work on this system."""
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
    """A child of the server, with the part of `subprocess.Popen`'s interface that `processes.py` uses.

    Its standard input is a socket, which also shows when the child has closed the other end.
    """

    LOST = 1
    """The status of a child whose server was killed: it is asked to end, and its real status is unknown."""

    def __init__(self, server: ForkServer, number: int, stdin: socket.socket, kept: bool):
        self._server, self._number, self.stdin, self.kept = server, number, stdin, kept
        self.returncode: int | None = None
        self.lost = False

    def poll(self, wait: bool = False) -> int | None:
        if self.returncode is None:
            self.returncode = self._server.status(self._number, wait)
            if self.returncode is None and self._server.gone and self._has_ended(wait):
                self.returncode, self.lost = self.LOST, True
        return self.returncode

    def _has_ended(self, wait: bool) -> bool:
        """Asks a child without a server to end; returns whether it has."""
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
        """Through the server, which knows whether the process still exists."""
        self._server.send(signal=number, to=self._number)


def _received(line: socket.socket, flags: int = 0) -> bytes:
    """The next message; b"" if the other end is closed."""
    try:
        return line.recv(MESSAGE, flags)
    except ConnectionError:
        return b""


# The server


@dataclass
class Child:
    """A forked process: `number` is the program that it runs now, `line` the connection to a kept child."""

    number: int | None
    line: socket.socket | None = None

    def take(self, message: bytes, descriptors: list[int], number: int) -> bool:
        """Sends a free kept child its next program; False if it is not free."""
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
    """The first program of a child; a kept child receives the next ones on `line`."""

    words: list[str]
    number: int
    line: socket.socket | None


def serve(control: socket.socket, imports: Sequence[str]) -> Program | None:
    """Forks children until the other end is closed. Returns once in the server, and in each child with its program."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # pending in children until they can handle it
    named = [name.partition(":")[::2] for name in imports]
    modules = [importlib.import_module(module) for module, _ in named]
    threads = _threads()
    for module, (_, function) in zip(modules, named, strict=True):
        if function:
            getattr(module, function)()
    if _has_touched_a_gpu() or _threads() > threads:  # torch's worker threads: children would wait for them
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
                _report_ends(control, children)
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
    """Whether the GPU driver is in use: then it would not work in children."""
    opened = (Path(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd"))
    return any(os.path.realpath(path).startswith("/dev/nvidia") for path in opened)


def _relay(control: socket.socket, child: Child) -> None:
    """Forwards that a kept child has ended a program; it is free then, or about to end."""
    assert child.line is not None
    message = _received(child.line)
    if message:
        child.number = None
        control.send(message)
    else:
        child.line.close()
        child.line = None


def _report_ends(control: socket.socket, children: dict[int, Child]) -> None:
    while children:
        process, status = os.waitpid(-1, os.WNOHANG)
        if not process:
            return
        child = children.pop(process, None)
        if child is None:  # an import had started it
            continue
        if child.line is not None:  # its last message may not have been read yet
            _relay(control, child)
        if child.line is not None:
            child.line.close()
        if child.number is not None:
            control.send(_end(child.number, os.waitstatus_to_exitcode(status)))


def _end(number: int, status: int) -> bytes:
    return json.dumps({"ended": number, "status": status}).encode()


# The child


def _become_a_program(descriptors: list[int], servers: list[int]) -> None:
    """In a new child: closes what belongs to the server, and takes over its own standard input, output and error."""
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
    """Runs a program and, in a kept child, those that follow; returns the status of the last."""
    while True:
        status = run_python(program.words)
        sys.stdout.flush()
        sys.stderr.flush()
        if status or program.line is None:
            return status
        _release()
        program.line.send(_end(program.number, status))
        message, descriptors, _, _ = socket.recv_fds(program.line, MESSAGE, 2)
        if not message:
            return 0
        _take_over(descriptors)
        request = json.loads(message)
        program = Program(request["words"], request["start"], program.line)


def _release() -> None:
    """Between two programs: releases the log, the memory and the compiled code of the one that has ended."""
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
    """Does what `python words` does, for -m and -c; returns the exit status, or raises the program's exception."""
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
    except KeyboardInterrupt:  # in a child, before its program starts
        raise SystemExit(130) from None
    if program is not None:
        try:
            status = run_all(program)
        except ConnectionError:  # the server has ended
            status = 0
        # Like Python's own end, without the second that it takes to unload modules.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
