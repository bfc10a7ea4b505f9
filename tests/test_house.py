"""The house: what the library loads, who imports whom, and that names are given once. Read from the source, not run."""

import ast
import importlib
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import deephoyer as dh

PACKAGE = Path(dh.__file__).parent
FILES = {".".join(p.relative_to(PACKAGE.parent).with_suffix("").parts): p for p in PACKAGE.rglob("*.py")}
MODULES = {name.removesuffix(".__init__"): path for name, path in FILES.items()}
LIBRARY = {name: path for name, path in MODULES.items() if not name.startswith(("deephoyer.lab", "deephoyer.__main__"))}
HEAVY = ("pydantic", "typer", "rich", "matplotlib", "yaml", "torchvision", "optuna", "jinja2", "deephoyer.lab")
POSIX = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty"}


def imports(path, deep):
    """The modules a file imports: with `deep` everywhere, else when it is loaded; not for type checkers alone."""
    found = []

    def visit(node):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if not deep and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            return
        if isinstance(node, ast.Import):
            found.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.append(whole if whole in MODULES else node.module)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


def loaded_by(code):
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {code}; print(*sys.modules)"], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_importing_the_package_loads_neither_torch_nor_the_lab():
    loaded = loaded_by("import deephoyer")
    assert not loaded & {"torch", "numpy", "safetensors", *HEAVY}


def test_touching_every_public_name_loads_nothing_of_the_lab():
    loaded = loaded_by("import deephoyer as dh; [getattr(dh, name) for name in dh.__all__]")
    assert "torch" in loaded and not loaded & set(HEAVY)


def test_public_names_are_the_same_for_type_checkers():
    tree = ast.parse(FILES["deephoyer.__init__"].read_text())
    (block,) = [n for n in tree.body if isinstance(n, ast.If)]
    seen = {(alias.name, alias.asname, node.module) for node in block.body for alias in node.names}
    assert seen == {(name, name, f"deephoyer.{home}") for name, home in dh._HOME.items()}


def test_a_module_named_like_a_function_does_not_hide_it():
    for name in ("deephoyer.summary", "deephoyer.export.onnx"):
        importlib.import_module(name)
    assert callable(dh.summary) and callable(dh.export) and {"summary", "export"} <= set(dir(dh))
    with pytest.raises(AttributeError, match="no attribute 'regularizr'"):
        dh.regularizr  # noqa: B018


def test_the_library_imports_neither_the_lab_nor_its_packages_nor_what_only_posix_has():
    for name, path in LIBRARY.items():
        for module in imports(path, deep=True):
            assert not module.startswith(HEAVY), f"{name} imports {module}"
            assert module.split(".")[0] not in POSIX, f"{name} imports {module}"


def test_no_two_files_have_the_same_name():
    counts = Counter(path.name for path in MODULES.values() if path.stem not in ("__init__", "__main__"))
    assert [name for name, n in counts.items() if n > 1] == []


def test_modules_import_each_other_in_one_direction():
    graph = {name: {m for m in imports(path, deep=False) if m in MODULES} - {name} for name, path in MODULES.items()}
    done, stack = set(), []

    def visit(name):
        assert name not in stack, " → ".join([*stack[stack.index(name) :], name])
        if name in done:
            return
        stack.append(name)
        for other in sorted(graph[name]):
            visit(other)
        stack.pop()
        done.add(name)

    for name in sorted(graph):
        visit(name)


def test_without_the_lab_the_command_says_what_to_install():
    code = (
        "import sys; sys.modules['typer'] = None; from deephoyer.__main__ import main; sys.argv = ['deephoyer']; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "deephoyer: the commands need typer: pip install 'deephoyer[lab]'\n"


def test_no_two_public_classes_have_the_same_name():
    found = Counter(
        node.name
        for name, path in FILES.items()
        if not name.startswith("deephoyer.integrations")  # each has the callback of its host
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, n in found.items() if n > 1] == []
