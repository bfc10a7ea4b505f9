"""Tables of plain text, for whatever prints itself: summaries, statistics of a regularizer, a plan's report."""

from __future__ import annotations

from collections.abc import Sequence


def text_table(
    title: str, titles: Sequence[str], lines: Sequence[Sequence[str]], total: Sequence[str] = (), words: int = 1
) -> str:
    """Aligned columns under their titles, which may have two lines; the first `words` columns to the left.

    >>> print(text_table("networks", ["layer", "weights"], [["fc1", "1,200"]], ["total", "1,200"]))
    networks
    layer  weights
    ──────────────
    fc1      1,200
    ──────────────
    total    1,200
    """
    tall = max(t.count("\n") for t in titles)
    split = [("\n" * (tall - t.count("\n")) + t).split("\n") for t in titles]
    head = [list(row) for row in zip(*split, strict=True)]
    every = [*head, *lines, *([total] if total else [])]
    widths = [max(len(row[i]) for row in every) for i in range(len(titles))]
    rule = "─" * (sum(widths) + 2 * (len(widths) - 1))

    def laid(row: Sequence[str]) -> str:
        cells = (c.ljust(w) if i < words else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        return "  ".join(cells).rstrip()

    body = [*map(laid, lines), *([rule, laid(total)] if total else [])]
    top = [*map(laid, head), rule] if any(titles) else [rule]
    return "\n".join([title, *top, *body])
