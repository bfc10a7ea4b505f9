"""Makes `ten-minutes.ipynb` from `ten-minutes.md`, so that the page and the notebook can't say different things.

python docs/make_notebook.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("ten-minutes.md")
NOTEBOOK = PAGE.with_suffix(".ipynb")
LINK = f"[The same page as a notebook]({NOTEBOOK.name}).\n"


def notebook(page: str) -> str:
    """The page as a notebook: its Python blocks as cells of code, all else as cells of text; no outputs."""
    cells: list[dict[str, Any]] = []
    for number, part in enumerate(re.split(r"^```python\n(.*?)^```\n", page.replace(LINK, ""), flags=re.M | re.S)):
        if text := part.strip():
            kind: dict[str, Any] = {"cell_type": "markdown", "metadata": {}}
            if number % 2:
                kind = {"cell_type": "code", "metadata": {}, "execution_count": None, "outputs": []}
            cells.append({**kind, "id": f"cell-{len(cells)}", "source": text.splitlines(keepends=True)})
    about = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    content = {"cells": cells, "metadata": about, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    NOTEBOOK.write_text(notebook(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
