"""Progress of a run: bars on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


class Silent:
    """Prints nothing; the interface of all reporters."""

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def stage(self, name: str, epochs: int, done: int) -> None:
        pass

    def epoch(self, metrics: dict[str, Any]) -> None:
        pass


REPORT_EVERY = 30.0
"""Seconds between two lines about a running stage, where there is no terminal for a bar."""


class Lines(Silent):
    """A line from time to time and one at the end of each stage, for logs and pipes."""

    def __init__(self, console: Console):
        self.console = console
        self.name, self.epochs, self._reported = "", 0, time.monotonic()

    def note(self, text: str) -> None:
        self.console.print(text, highlight=False)

    def stage(self, name: str, epochs: int, done: int) -> None:
        self.name, self.epochs = name, epochs

    def epoch(self, metrics: dict[str, Any]) -> None:
        now, done = time.monotonic(), metrics["epoch"]
        if done < self.epochs and now - self._reported < REPORT_EVERY:
            return
        self._reported = now
        count = plural(self.epochs, "epoch") if done == self.epochs else f"{done} of {plural(self.epochs, 'epoch')}"
        self.note(f"{self.name}: {count}, {describe(metrics)}")


class Bars(Lines):
    """A progress bar with the time left, the loss, the accuracy, the penalty and the effective density."""

    def __init__(self, console: Console):
        super().__init__(console)
        self.bar = Progress(
            TextColumn("{task.description:<10}"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[now]}"),
            console=console,
        )
        self.task: TaskID | None = None

    def __enter__(self) -> Bars:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def stage(self, name: str, epochs: int, done: int) -> None:
        self.task = self.bar.add_task(name, total=epochs, completed=done, now="")

    def epoch(self, metrics: dict[str, Any]) -> None:
        if self.task is not None:
            self.bar.update(self.task, completed=metrics["epoch"], now=describe(metrics))


def plural(number: int, word: str) -> str:
    """
    >>> plural(1, "epoch"), plural(1200, "epoch")
    ('1 epoch', '1,200 epochs')
    """
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def describe(metrics: dict[str, Any]) -> str:
    """The numbers of an epoch in a line."""
    parts = [f"loss {metrics['loss']:.4f}"]
    for key, title in (("held_out", "held-out"), ("test", "test")):
        if key in metrics:
            parts.append(f"{title} {100 * metrics[key]:.2f} %")
        if f"{key}_top5" in metrics:
            parts.append(f"top-5 {100 * metrics[f'{key}_top5']:.2f} %")
    if "penalty" in metrics:
        parts.append(f"penalty {metrics['penalty']:.4g}")
    if "effective_density" in metrics:
        parts.append(f"effective density {100 * metrics['effective_density']:.2f} %")
    return "  ".join(parts)


def reporter(console: Console) -> Silent:
    """Bars on a terminal, lines elsewhere."""
    return Bars(console) if console.is_terminal else Lines(console)
