"""Recipes: what may stand in them, and what a slip is told."""

import pytest

import deephoyer as dh
from deephoyer.lab import recipe

PAPER = {
    "hs": [(2e-4, 0.03), (1e-4, 0.03)],
    "hoyer": [(0.02, 0.05), (0.01, 0.08)],
    "transformed-l1": [(2e-5, 0.3), (2e-5, 0.6)],
    "group-hs": [(0.002, 0.8), (0.1, 0.008)],
}


@pytest.mark.parametrize("name", recipe.names())
def test_every_recipe_that_ships_can_be_read_and_names_its_own_command(name):
    made = recipe.read(name)
    lines = recipe.text_of(name).splitlines()
    assert lines[0].startswith("# ") and lines[1] == f"# deephoyer run {name}"
    assert recipe.parse(made.to_yaml(), "again") == made


@pytest.mark.parametrize("method", PAPER)
def test_the_papers_strengths_thresholds_and_epochs_stand_in_the_recipes(method):
    for net, (strength, threshold) in zip(("lenet-300-100", "lenet-5"), PAPER[method], strict=True):
        made = recipe.read(f"{net}-{method}")
        assert (made.regularize.strength, made.prune.value) == (strength, threshold)
        assert (made.regularize.epochs, made.finetune.epochs) == (250, 100)


@pytest.mark.parametrize(("net", "strength"), [("resnet-56", 2e-4), ("resnet-110", 7e-5)])
def test_the_papers_schedule_on_cifar_stands_in_the_recipes(net, strength):
    made = recipe.read(f"{net}-group-hs")
    assert made.regularize.strength == strength and made.regularize.groups == "filters+channels"
    assert (made.prune.rule, made.prune.value, made.prune.groups) == ("absolute", 1e-4, "elements")
    assert (made.batch_size, made.shift, made.flip, made.select) == (128, 4, True, "test-best")
    for stage in (made.pretrain, made.regularize, made.finetune):
        assert (stage.epochs, stage.optimizer, stage.lr, stage.momentum) == (164, "sgd", 0.1, 0.9)
        assert (stage.milestones, stage.gamma, stage.weight_decay) == ((81, 122), 0.1, 1e-4)
    for other in ("group-lasso", "group-hs-coupled"):
        theirs = recipe.read(f"{net}-{other}")
        assert (theirs.pretrain, theirs.finetune) == (made.pretrain, made.finetune)


def test_an_override_reaches_anything_in_the_recipe():
    changes = ["seed=7", "regularize.strength=3e-4", "data={name: mnist, normalize: true}", "prune.rule=absolute"]
    made = recipe.read("demo", changes)
    assert made.seed == 7 and made.regularize.strength == 3e-4 and made.prune.rule == "absolute"
    assert made.data == {"name": "mnist", "normalize": True}


@pytest.mark.parametrize(
    ("change", "where", "hint"),
    [
        ("regularize.penalty=hoyer_sq", "regularize.penalty", "hoyer-square"),
        ("regularize.groups=filter", "regularize.groups", "filters"),
        ("regularize.strength=-1", "regularize.strength", "0 or more"),
        ("regularize.strength=.nan", "regularize.strength", "finite"),
        ("regularize.strength={filters: 1}", "regularize", "elements"),
        ("regularize.epoch=3", "regularize", "epochs"),
        ("prune.value=-2", "prune", "0 or more"),
        ("prune.rule=absolut", "prune", "absolute"),
        ("model=lenet5", "model", "lenet-5"),
        ("data=mnits", "data", "mnist"),
        ("pretrain.epochs=many", "pretrain.epochs", "integer"),
        ("finetune.schedule=step", "finetune", "milestones"),
        ("finetune.lr=0", "finetune.lr", "greater than 0"),
        ("device=tpu", "device", "cpu"),
        ("seed=-1", "seed", "0"),
        ("pretrain.checkpoint=x.safetensors", "pretrain", "not both"),
        ("prune.multiple=0", "prune.multiple", "greater than or equal to 1"),
        ("prune={groups: filters+channels, multiple: 8, value: 1}", "prune", "one kind of group"),
        ("finetune.lr_warmup=-1", "finetune.lr_warmup", "greater than or equal to 0"),
        ("finetune={epochs: 2, lr_warmup: 3}", "finetune", "would not be reached"),
        ("regularize={epochs: 1, strenght: 4e-4}", "regularize", "'strength'"),
        ("distill={model: lenet5, checkpoints: [a]}", "distill.model", "lenet-5"),
        ("distill={model: [lenet-5, lenet5], checkpoints: [a, b]}", "distill.model", "lenet-5"),
        (
            "distill={model: [lenet-5, lenet-5], checkpoints: [a]}",
            "distill",
            "2 models are listed for 1 checkpoints; list one",
        ),
        (
            "distill={model: [lenet-5], checkpoints: [a, b]}",
            "distill",
            "1 models are listed for 2 checkpoints; list one",
        ),
    ],
)
def test_a_slip_is_told_with_its_place_and_a_way_out(change, where, hint):
    with pytest.raises(dh.UserError) as told:
        recipe.read("demo", [change])
    text = str(told.value)
    assert text.startswith(f"recipe demo: {where}:") and hint in text
    assert len(text.splitlines()) <= 2


@pytest.mark.parametrize("text", ["", "- 1", "model: [", "model: a\nmodel: b", "!!python/object:os.system {}", "\0"])
def test_text_that_is_no_recipe_is_refused(text):
    with pytest.raises(dh.UserError, match=r"recipe mine\.yaml: "):
        recipe.parse(text, "mine.yaml")


@pytest.mark.parametrize("override", ["seed", "=3", "model.name.first=1", "seed=[1"])
def test_an_override_that_is_none_is_refused(override):
    with pytest.raises(dh.UserError, match=r"override|keys|YAML"):
        recipe.read("demo", [override])


def test_one_model_is_for_all_checkpoints_and_a_list_has_one_for_each():
    settings = {"name": "lenet-300-100", "dropout": 0.1}
    for model, kinds in [("lenet-5", ("lenet-5", "lenet-5")), (f"[lenet-5, {settings}]", ("lenet-5", settings))]:
        made = recipe.read("demo", [f"distill={{model: {model}, checkpoints: [a, b]}}"])
        assert made.distill.teachers() == list(zip(kinds, "ab", strict=True))
        assert recipe.parse(made.to_yaml(), "again") == made


def test_a_number_with_an_exponent_is_a_number():
    assert recipe.read("demo", ["finetune.lr=1e-3"]).finetune.lr == 1e-3
