"""The benchmarks: what they show and write, never how long anything takes."""

import json

import pytest

from deephoyer.bench import regularizer, step, together


def test_bench_shows_ratios_and_writes_a_record(command, tmp_path):
    words = ("--device", "cpu", "--models", "lenet-300-100", "--seconds", "0.001", "--check", "--out", "made/it.json")
    status, out, _ = command("bench", *words)
    assert status == 0
    for word in ("lenet-300-100", "elements", "filters+channels", "÷ floor", "autograd loop ÷ ours", "results repeat"):
        assert word in out
    record = json.loads((tmp_path / "made" / "it.json").read_text())
    assert [case["groups"] for case in record["cases"]] == ["elements", "filters+channels"]
    for case in record["cases"]:
        assert all(case["ms"][side] > 0 for side in ("floor", "autograd, asks host", "autograd", "plain", "foreach"))
        assert all(found["repeats"] and found["relative error"] < 1e-3 for found in case["checks"].values())
    assert record["ratios"]["lenet-300-100 elements: ours / floor"] > 0
    assert record["machine"]["threads"] >= 1 and record["copy GB/s"] > 0


def test_without_torch_pruning_its_side_is_left_out_and_that_is_said(monkeypatch):
    monkeypatch.setattr(regularizer, "has_torch_pruning", lambda: False)
    options = regularizer.Options(networks=("lenet-300-100",), groups=("filters+channels",), budget=0.0)
    (record,) = regularizer.measured(options)
    assert "not installed" in record["notes"][0] and "torch-pruning" not in record["cases"][0]["ms"]
    titles, row = regularizer.rows(record)
    assert row[titles.index("torch-pruning ÷ ours")] == "–"


def test_a_step_is_compared_with_the_bare_one():
    record = step.measured(rounds=1, epochs=0)
    assert set(record["step_ms"]) == {"bare", "add_grad_", "autograd loop"}
    assert [row[0] for row in step.rows(record)[1:]] == ["step, bare", "step, add_grad_", "step, autograd loop"]


def test_a_sweep_is_timed_against_one_run():
    small = ["data={name: mnist, limit: 300}"]
    found = together.together(2, "cpu", 2, case="lenet-300-100", changes=small)
    assert found["networks"] == 2 and found["notes"] == []
    both, each = found["at once: seconds an epoch"], found["at once: seconds an epoch and network"]
    assert each == both / 2 and found["one: wall clock"] > 0
    assert "2 at once" in together.rows(found)[2]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["regularisers"], "Did you mean 'regularizer'?"),
        (["--models", "lenet"], "is not a network of this benchmark"),
        (["epochs", "--models", "lenet-6"], "Did you mean 'lenet-5'?"),
        (["step", "--models", "lenet-5"], "lenet-300-100 alone"),
        (["step", "--device", "cuda"], "measures on the CPU"),
        (["--device", "gpu"], "'gpu' is not a device"),
        (["--device", "cuda:1"], "Did you mean 'cuda'?"),
    ],
)
def test_bench_says_what_it_does_not_know(command, words, told):
    status, _, err = command("bench", *words)
    assert status == 2 and told in err.replace("\n           ", " ")
