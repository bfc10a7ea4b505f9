"""The trained transformers in a tiny size: all stages, with and without compiling, resumed, timed, shown."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import character_gpt
import cifar_vit
import trained_fronts
import trained_transformers
from character_gpt import Characters
from cifar_vit import Photographs

SHORT = ("--brief", "--densities", "0.5", "--strengths", "1e-3")


def said(monkeypatch, capsys, task, *words):
    monkeypatch.setattr(sys, "argv", ["it", *map(str, words)])
    trained_transformers.main(task, None)
    return capsys.readouterr().out


def results(folder, seed=0):
    return json.loads((folder / f"seed-{seed}.json").read_text())


@pytest.mark.parametrize("task", [Characters, Photographs])
def test_a_tiny_network_goes_through_all_stages_and_resumes(monkeypatch, capsys, tmp_path, task):
    words = (*SHORT, "--out", tmp_path, "--methods", "group-hs", "random")
    first = said(monkeypatch, capsys, task, *words)
    half, dense = results(tmp_path)["group-hs-0.001-0.5-0"], results(tmp_path)["continued-0"]
    assert half["macs"] < 0.8 * dense["macs"] and half["compacted"] == pytest.approx(half["last"], abs=1e-4)
    assert ("held_out" in half) == (task is Photographs)
    again = said(monkeypatch, capsys, task, *words)
    assert "  step" not in again and again.strip() == first[first.index("| network") :].strip()
    more = said(monkeypatch, capsys, task, *words, "magnitude")  # goes on from networks in files
    said(monkeypatch, capsys, task, *SHORT, "--out", tmp_path / "at once", "--methods", "random", "magnitude")
    assert "plain-0" not in more
    assert results(tmp_path)["magnitude-0-0.5-0"] == results(tmp_path / "at once")["magnitude-0-0.5-0"]


def test_training_that_comes_to_nan_stops_and_keeps_nothing(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(Characters, "scores", lambda self, model: {"score": float("nan")})
    with pytest.raises(SystemExit, match="the score is NaN at step 4"):
        said(monkeypatch, capsys, Characters, *SHORT, "--out", tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))


def test_compiled_blocks_train_as_plain_ones_and_are_compiled_once(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("deephoyer.lab.train.compiling.BACKEND", "aot_eager")
    monkeypatch.setattr(Photographs, "brief", cifar_vit.Sizes(**{**vars(Photographs.brief), "dropout": 0.0}))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    words = (*SHORT, "--methods", "group-lasso")
    said(monkeypatch, capsys, Photographs, *words, "--compile", "--out", tmp_path / "compiled")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    said(monkeypatch, capsys, Photographs, *words, "--out", tmp_path / "plain")
    ours, theirs = (
        trained_transformers.dh.load(
            tmp_path / how / "continued-0.safetensors", cifar_vit.ViT(Photographs.brief)
        ).state_dict()
        for how in ("compiled", "plain")
    )
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_a_seed_has_a_process_of_its_own_that_goes_on_without_compiling_where_that_fails(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(Path(character_gpt.__file__).parent)!r})\n"
        "from deephoyer.lab.train import compiling\n"
        "compiling.BACKEND = lambda graph, inputs: 1 / 0\n"
        "import trained_transformers\nfrom character_gpt import Characters\n"
        "trained_transformers.main(Characters, None)\n"
    )
    words = [*SHORT, "--methods", "magnitude", "--compile", "--together", "--out", tmp_path / "out"]
    done = subprocess.run([sys.executable, "-W", "ignore", script, *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "| magnitude | 0.5 |  | 1 |" in done.stdout
    log = (tmp_path / "out" / "seed-0.log").read_text()
    assert "ZeroDivisionError" in log and "continuing with --no-compile" in log


def test_kept_networks_are_timed_and_the_times_shown(monkeypatch, capsys, tmp_path):
    words = (*SHORT, "--methods", "magnitude", "--out", tmp_path)
    assert "tokens/s" not in said(monkeypatch, capsys, Characters, *words)
    assert "| tokens/s | × dense |" in said(monkeypatch, capsys, Characters, *words, "--speeds")
    assert results(tmp_path)["magnitude-0-0.5-0"]["tokens_per_second"] > 0


def test_strengths_are_chosen_by_what_was_held_out_and_among_those_with_all_seeds():
    def run(last, **more):
        return {"last": last, "best": last, "macs": 50, "parameters": 10, **more}

    results = {
        "dense": [run(0.9), run(0.9)],
        "group-hs-1e-05-0.5": [run(0.8, held_out=0.5), run(0.8, held_out=0.5)],
        "group-hs-0.001-0.5": [run(0.7, held_out=0.6), run(0.7, held_out=0.6)],
        "group-hs-0.01-0.5": [run(0.9, held_out=0.9)],
    }
    _, row = trained_fronts.rows(results, Photographs.shown)
    assert (row.method, row.kept, row.strength, row.tried, len(row.runs)) == ("group-hs", "0.5", "0.001", 2, 2)
    without = {name: [{**r, "held_out": r["last"]} for r in runs] for name, runs in results.items()}
    assert trained_fronts.rows(without, Photographs.shown)[1].strength == "1e-05"


def test_the_figure_has_every_method(tmp_path):
    folder = Path(character_gpt.__file__).parent.parent / "results" / "bench" / "character-gpt"
    for path in trained_fronts.save(trained_fronts.read(folder), Characters.shown, tmp_path):
        assert path.stat().st_size > 1000
    drawn = (tmp_path / "character-gpt.svg").read_text()
    assert all(f"<!-- {word}" in drawn for word in ("group-hs", "group-lasso", "dense", "continued"))


@pytest.mark.cuda
@pytest.mark.parametrize("script", [character_gpt, cifar_vit])
def test_compiled_steps_are_captured_on_a_gpu_and_nothing_is_given_up(tmp_path, script):
    words = [*SHORT, "--methods", "group-hs", "--device", "cuda", "--compile", "--out", tmp_path]
    done = subprocess.run([sys.executable, script.__file__, *words], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "going on with" not in done.stdout and "| group-hs | 0.5 |" in done.stdout
