"""Names for things that users choose by a word: each registry can be listed, with a line a name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any, Generic, TypeVar

from deephoyer.errors import UserError, unknown

T = TypeVar("T")


class Registry(Generic[T]):
    """Maps a name to what makes the thing; `make` also accepts a finished thing, or a name with settings."""

    def __init__(self, kind: str, plural: str):
        self.kind, self.plural = kind, plural
        self._makers: dict[str, Callable[..., T] | str] = {}

    def add(self, name: str, maker: Callable[..., T] | str) -> None:
        """`maker` may be written "package.module:name", which is loaded when it is asked for."""
        self._makers[name] = maker

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __contains__(self, name: object) -> bool:
        return name in self._makers

    def __getitem__(self, name: str) -> Callable[..., T]:
        if name not in self._makers:
            raise unknown(self.kind, name, self, f"`deephoyer list {self.plural}` shows all.")
        maker = self._makers[name]
        if isinstance(maker, str):
            module, _, attribute = maker.partition(":")
            maker = self._makers[name] = getattr(import_module(module), attribute)
        return maker

    def make(self, choice: Any, /, **settings: Any) -> T:
        """The thing called `choice`, or `{"name": choice, …settings}`; anything else is the thing itself."""
        if isinstance(choice, Mapping):
            settings = {**choice, **settings}
            choice = settings.pop("name", None)
            if not isinstance(choice, str):
                raise UserError(f"{self.kind}: settings {sorted(settings)} need a name: {{name: …, …}}.")
        if not isinstance(choice, str):
            if settings:
                raise UserError(f"{self.kind}: settings {sorted(settings)} need a name, not {choice!r}.")
            return choice
        maker = self[choice]
        try:
            inspect.signature(maker).bind(**settings)
        except TypeError as why:
            takes = ", ".join(inspect.signature(maker).parameters) or "none"
            made = f" Pass one that is made: {maker.__name__}(…)." if not settings and inspect.isclass(maker) else ""
            raise UserError(f"{self.kind} {choice!r}: {why}; its settings: {takes}.{made}") from None
        return maker(**settings)

    def describe(self) -> list[tuple[str, str]]:
        """A line a name: the first line of each maker's docstring."""
        return [(name, (inspect.getdoc(self[name]) or "").split("\n")[0]) for name in self]
