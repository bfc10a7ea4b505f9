"""The commands: they parse arguments, call other modules, and print; nothing is computed here.

A user's mistake is one or two lines on standard error and exit status 2; Ctrl-C is 130.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from deephoyer import __version__
from deephoyer.errors import UserError, unknown
from deephoyer.lab import comparison_commands, search_commands
from deephoyer.lab.cores import limit_threads
from deephoyer.lab.processes import end_with_parent, is_child_run
from deephoyer.lab.report import commands, page_commands
from deephoyer.lab.search_commands import errors, out

app = typer.Typer(
    name="deephoyer",
    help="Make neural networks sparse, small and fast while they train.",
    no_args_is_help=True,
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def deephoyer(
    version: Annotated[bool, typer.Option("--version", help="print the version", is_eager=True)] = False,
) -> None:
    """Make neural networks sparse, small and fast while they train."""
    if version:
        out.print(__version__)
        raise typer.Exit


@app.command("list")
def list_(
    what: Annotated[
        str,
        typer.Argument(help="recipes, models, data, penalties, groups, scores, rules, methods, comparisons or keys"),
    ] = "recipes",
) -> None:
    """Lists recipes, models, data, penalties and so on, one line each."""
    if what == "recipes":
        for folder, title in FOLDERS.items():
            out.print(_recipes(folder, title))
        out.print(
            "Run one with `deephoyer run NAME`. `deephoyer list` also takes models, data, penalties, groups, scores, "
            "rules, methods, comparisons and keys."
        )
        return
    kinds = _kinds()
    if what not in kinds:
        raise unknown("list", what, ["recipes", *kinds])
    table = Table(title=what, title_justify="left", title_style="bold", show_header=False, box=None, padding=(0, 2))
    for name, line in kinds[what]():
        table.add_row(escape(name), escape(line))
    out.print(table)


FOLDERS = {
    "": "to start with",
    "paper": "paper/: the paper's settings; use overrides for its other penalties",
    "small": "small/: our smallest networks",
    "compare": "compare/: penalties compared with equal search effort",
    "parts": "parts/: networks that other recipes start from or learn from",
}
"""The folders of recipes, in the order in which they are listed."""


def _recipes(folder: str, title: str) -> Table:
    """The recipes of a folder: what each is about, what it needs, what to expect."""
    from deephoyer.lab import recipe

    table = Table(title=f"\n{title}", title_justify="left", title_style="bold", show_header=False, box=None)
    table.add_column(no_wrap=True)
    table.add_column(ratio=2)
    table.add_column(ratio=1)
    for name in recipe.names():
        if name.rpartition("/")[0] == folder:
            said = recipe.describe(name)
            table.add_row(name, f"{said['about']}\n[dim]needs {said['needs']}[/dim]", _expected(said["expect"]))
    return table


def _expected(expect: Any) -> str:
    """The results of a recipe's records, in a few words."""
    if not isinstance(expect, dict):
        return str(expect or "")
    parts = [f"{expect['accuracy']:.2%}".replace("%", " %")]
    parts += [f"{expect[key]:,} {word}" for key, word in (("nonzeros", "weights"), ("macs", "MACs")) if key in expect]
    if "minutes" in expect:
        parts.append(f"{expect['minutes']:g} min on {expect.get('device', '?')}")
    return ", ".join(parts)


def _kinds() -> dict[str, Any]:
    from deephoyer.groups import GROUPINGS
    from deephoyer.lab import comparison_protocol, models
    from deephoyer.lab.data import DATASETS
    from deephoyer.lab.methods import METHODS
    from deephoyer.lab.recipe_keys import keys as every_key
    from deephoyer.penalties import PENALTIES
    from deephoyer.rules import RULES
    from deephoyer.scores import SCORES

    return {
        "models": models.describe,
        "data": DATASETS.describe,
        "penalties": PENALTIES.describe,
        "groups": GROUPINGS.describe,
        "scores": SCORES.describe,
        "rules": RULES.describe,
        "methods": METHODS.describe,
        "comparisons": lambda: [(n, comparison_protocol.read(n).about) for n in comparison_protocol.names()],
        "keys": lambda: [(key, f"{words} Default: {default}.") for key, _, default, words in every_key()],
    }


@app.command()
def run(
    recipe: Annotated[str, typer.Argument(help="a recipe's name, or a YAML file of your own")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[key=value ...]", help="e.g. seed=1")] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--out", help="the run's folder; by default in runs/, named after recipe, changes and seed"),
    ] = None,
) -> None:
    """Trains, regularizes, prunes and finetunes. Run the same command again to resume an interrupted run."""
    from deephoyer.lab import recipe as recipes
    from deephoyer.lab.runs.folder import RunFolder
    from deephoyer.lab.train.distributed import rank
    from deephoyer.lab.train.progress import Silent, reporter
    from deephoyer.lab.train.result import finish, read_record
    from deephoyer.lab.train.run import Run

    changes = overrides or []
    chosen = recipes.read(recipe, changes)
    place = folder or Path("runs") / recipes.folder_name(recipe, changes)
    first = rank() == 0  # only rank 0 reports
    if first:
        out.print(f"run folder: {place}")
    job = Run(chosen, place, reporter(out) if first else Silent(), recipes.Command(recipe, tuple(changes)))
    there = RunFolder(place)
    done = there.has_result_of(chosen)
    try:
        if not done:
            job.execute()
    except KeyboardInterrupt:
        _complain(f"interrupted. Run the same command again to resume from the last checkpoint in {place}.")
        raise typer.Exit(130) from None
    if not first:
        return
    _show(read_record(there) if done else finish(job), place)
    if not is_child_run():  # not for every run of a sweep; `deephoyer report` writes any of them
        from deephoyer.lab.report import run_page

        out.print(f"report: {run_page.write(place)[0]}")


@app.command()
def cp(
    recipe: Annotated[str, typer.Argument(help="a recipe's name")],
    target: Annotated[Path, typer.Argument(help="the file to write")],
    force: Annotated[bool, typer.Option("--force", help="overwrite an existing file")] = False,
) -> None:
    """Copies a recipe to a file that you can edit."""
    from deephoyer.files import write_atomically
    from deephoyer.lab import recipe as recipes

    text = recipes.text_of(recipe)
    if target.is_dir():
        target = target / f"{Path(recipe).name}.yaml"
    if target.exists() and not force:
        raise UserError(f"{target} exists already; --force overwrites it.")
    write_atomically(target, text.encode())
    out.print(f"wrote {target}; run it with: deephoyer run {target}")


@app.command()
def show(folder: Annotated[Path, typer.Argument(help="the folder of a finished run")]) -> None:
    """Shows the summary of a finished run again."""
    from deephoyer.lab.runs.folder import RunFolder
    from deephoyer.lab.train.result import read_record

    _show(read_record(RunFolder(folder)), folder)


Stored = Annotated[Path, typer.Argument(help="a run's folder, or a .safetensors file")]
ModelName = Annotated[
    str | None,
    typer.Option("--model", help="the model, if the file does not name it: NAME, or '{name: NAME, classes: 10}'"),
]


@app.command()
def compact(
    source: Stored,
    target: Annotated[
        Path | None, typer.Option("--out", help="the file to write; default: compact.safetensors in the same folder")
    ] = None,
    joints: Annotated[
        str | None,
        typer.Option(help="none, or gather: each layer keeps only its own live channels; default: as in its recipe"),
    ] = None,
    model: ModelName = None,
) -> None:
    """Removes the dead channels of a stored network, compares the outputs, and writes the smaller network."""
    from deephoyer.export import provenance, save
    from deephoyer.lab.open_network import chosen_model, file_of, open_network
    from deephoyer.structure import compact as smaller
    from deephoyer.structure import compact_report
    from deephoyer.summary import summary as measure

    network, example = open_network(source, chosen_model(model))
    origin = provenance(file_of(source)) if model is None else None
    joints = joints or (origin or {}).get("recipe", {}).get("joints", "none")
    small = smaller(network, example, joints=joints)
    place = target or (source if source.is_dir() else source.parent) / "compact.safetensors"
    size = save(small, place, provenance=origin)
    out.print(measure(small, example, baseline=network).comparison(out.width))
    if joints != "none":
        out.print("compared with compaction without joints:")
        out.print(measure(small, example, baseline=smaller(network, example)).comparison(out.width))
    report = compact_report(small)
    for layer, (count, why) in report.kept.items():
        out.print(f"kept: {count} constant channels into {layer}: {why}")
    out.print(
        f"{report.removed:,} channels removed, largest difference {report.error:.1e}; wrote {place}, {size:,} bytes"
    )


@app.command()
def export(
    source: Stored, target: Annotated[Path, typer.Argument(help="the .onnx file to write")], model: ModelName = None
) -> None:
    """Writes a stored network as ONNX, runs it with onnxruntime and compares the outputs."""
    from deephoyer.export import export as to_onnx
    from deephoyer.lab.open_network import chosen_model, open_network

    network, example = open_network(source, chosen_model(model))
    difference = to_onnx(network, example, target)
    out.print(f"wrote {target}; largest difference of onnxruntime's outputs: {difference:.1e}")


@app.command()
def summary(
    source: Stored,
    baseline: Annotated[Path | None, typer.Option(help="a network to compare with")] = None,
    model: ModelName = None,
) -> None:
    """Counts and times a stored network, and compares it with another if one is given."""
    from deephoyer.lab.open_network import chosen_model, open_network
    from deephoyer.summary import summary as measure

    network, example = open_network(source, chosen_model(model))
    other = open_network(baseline, chosen_model(model))[0] if baseline else None
    counted = measure(network, example, baseline=other)
    out.print(counted.table(out.width), counted.comparison(out.width), sep="\n")


@app.command()
def evaluate(
    source: Annotated[Path, typer.Argument(help="a run's folder, a .safetensors file, or a torch file of weights")],
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[data=… model=…]", help="if the file does not name them")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
) -> None:
    """Measures the accuracy of a stored network on a test set."""
    from deephoyer.lab import recipe as recipes
    from deephoyer.lab.runs.environment import pick_device
    from deephoyer.lab.train.evaluate import evaluate_file

    score, data = evaluate_file(source, recipes.choices(words or []), pick_device(device))
    lines = [f"top-1 {100 * score.accuracy:.2f} % ({score.right:,} of {score.images:,} images correct)"]
    if score.top5 is not None:
        lines.append(f"top-5 {100 * score.top5:.2f} % ({score.right5:,})")
    if data.crops and data.unreadable:
        names = list(data.unreadable.values())
        lines.append(f"{len(names):,} left out, for they can't be read: {', '.join(names[:10])}")
    out.print(f"{source} on {data.name}: {', '.join(lines)}")


for _command in (
    search_commands.sweep,
    search_commands.search,
    comparison_commands.compare,
    page_commands.report,
    page_commands.explain,
    commands.publish,
    commands.verify,
    commands.table,
    commands.figure,
):
    app.command()(_command)


@app.command()
def data(
    name: Annotated[str, typer.Argument(help="the data set's name")],
    source: Annotated[
        str | None, typer.Option("--from", help="a local folder or archive to use instead of downloading")
    ] = None,
) -> None:
    """Downloads a data set and checks it; or checks one that comes with the package."""
    from deephoyer.lab.data import fetch

    kept = fetch(name, source, lambda text: out.print(text))
    out.print(f"{name} is complete" + (f", in {kept}" if kept else ", in the package"))


def _show(result: dict[str, Any], folder: Path) -> None:
    from deephoyer.lab.train.result import tables

    for table in tables(result, out.width):
        out.print(table)
    out.print(f"run folder: {folder}")


def _complain(text: str) -> None:
    first, *rest = text.splitlines() or [""]
    errors.print(f"deephoyer: {first}", *rest, sep="\n" + " " * 11, markup=False)


def _complain_once(why: UserError) -> None:
    """Of several processes, rank 0 reports an error that all have; another process reports only its own."""
    number = os.environ.get("RANK", "0")
    if number == "0":
        _complain(str(why))
        return
    from deephoyer.lab.train.distributed import reported_by_rank_0

    if not reported_by_rank_0(why):
        _complain(f"process {number}: {why}")


def _recipe_keys() -> set[str]:
    from deephoyer.lab.recipe_keys import keys

    return {key for key, *_ in keys()}


def _import_own_names() -> None:
    """Runs the Python files in $DEEPHOYER_IMPORT, which give names to models, data and so on of the user's own."""
    for text in filter(None, os.environ.get("DEEPHOYER_IMPORT", "").split(os.pathsep)):
        path = Path(text)
        if not path.is_file():
            raise UserError(f"DEEPHOYER_IMPORT: there is no file {path}.")
        name = f"deephoyer_import_{path.stem}"
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise UserError(f"DEEPHOYER_IMPORT: {path} is not a Python file; its name must end in .py.")
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        if (folder := str(path.resolve().parent)) not in sys.path:
            sys.path.append(folder)  # for what it imports from there
        try:
            spec.loader.exec_module(module)
        except Exception as why:
            raise UserError(f"DEEPHOYER_IMPORT: {_line_of(path, why)}: {type(why).__name__}: {why}") from why


def _line_of(path: Path, why: Exception) -> str:
    """The place in a file at which an error came up, or the file."""
    frames = traceback.extract_tb(why.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename) == path.absolute()]
    number = why.lineno if isinstance(why, SyntaxError) and why.filename == str(path.absolute()) else None
    number = number or (lines[-1] if lines else None)
    return f"{path}, line {number}" if number else str(path)


def main() -> None:
    """The entry point: a user's mistake is reported in a line or two, with exit status 2."""
    end_with_parent()
    limit_threads()
    try:
        _import_own_names()
        status = app(standalone_mode=False)
    except UserError as why:
        _complain_once(why)
        status = 2
    except OSError as why:
        # A full or read-only disk can fail anywhere; files written before are intact.
        _complain(f"{why.filename or 'the disk'}: {why.strerror or why}.")
        status = 2
    except (typer.Abort, KeyboardInterrupt):
        _complain("interrupted.")
        status = 130
    except Exception as why:
        # Typer's usage errors print themselves; anything else is a bug.
        if not (hasattr(why, "show") and hasattr(why, "exit_code")):
            raise
        why.show()
        if (key := getattr(why, "option_name", "").lstrip("-")) in _recipe_keys():
            _complain(f"keys of a recipe are written without dashes: {key}=…")
        status = why.exit_code
    status = status if isinstance(status, int) else 0
    if "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1":
        # Threads that torch leaves after a process group may abort a process that has succeeded.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
