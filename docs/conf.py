"""How the documentation is built: `make docs`. Pages are Markdown (MyST); the reference of recipe keys is made from the
schema, the API's from docstrings."""

from pathlib import Path

import deephoyer

project = "deephoyer"
author = "the deephoyer authors"
copyright = author
version = release = deephoyer.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "deephoyer"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
nitpicky = False


def _write_recipe_keys(app: object) -> None:
    from deephoyer.lab.recipe_keys import reference

    Path(__file__).with_name("recipe-keys.md").write_text(reference(), encoding="utf-8")


def setup(app) -> None:
    app.connect("builder-inited", _write_recipe_keys)
