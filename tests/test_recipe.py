"""Recipes: what may stand in them, and what a slip is told."""

import re

import pytest
from pydantic import create_model

import deephoyer as dh
from deephoyer.errors import UserError
from deephoyer.lab import recipe
from deephoyer.lab.choices import several
from deephoyer.lab.schema import Recipe
from deephoyer.lab.stages import Training

PAPER = {
    "hoyer-square": [(2e-4, 0.03), (1e-4, 0.03)],
    "hoyer": [(0.02, 0.05), (0.01, 0.08)],
    "transformed-l1": [(2e-5, 0.3), (2e-5, 0.6)],
}
NETS = ("paper/lenet-300-100", "paper/lenet-5")


@pytest.mark.parametrize("name", recipe.names())
def test_every_recipe_that_ships_can_be_read_and_says_what_a_person_wants_to_know(name):
    made = recipe.read(name)
    assert recipe.text_of(name).splitlines()[0] == f"# deephoyer run {name}"
    assert made.about and made.needs and made.expect
    assert recipe.parse(made.to_yaml(), "again") == made
    assert not [words for _, words in made.networks() if "results/" in str(words)]


def test_the_recipes_are_few_enough_to_choose_from():
    assert len(recipe.names()) <= 36
    assert {name.rpartition("/")[0] for name in recipe.names()} == {"", "paper", "small", "compare", "parts"}


def test_a_recipe_in_another_encoding_is_told_with_its_line(tmp_path):
    (tmp_path / "own.yaml").write_bytes("about: fine\nneeds: Größe\n".encode("latin-1"))
    with pytest.raises(UserError, match=r"own\.yaml: line 2 is not UTF-8; save the file in that encoding"):
        recipe.read(str(tmp_path / "own.yaml"))


@pytest.mark.parametrize("penalty", PAPER)
def test_the_papers_strengths_thresholds_and_epochs_stand_in_the_recipes(penalty):
    for net, (strength, threshold) in zip(NETS, PAPER[penalty], strict=True):
        said = f"regularize.penalty={penalty} regularize.strength={strength:g} prune.value={threshold}"
        changes = [] if penalty == "hoyer-square" else said.replace("e-05", "e-5").split()
        assert all(change in recipe.text_of(net) for change in changes)
        made = recipe.read(net, changes)
        assert (made.regularize.strength, made.prune.value, made.regularize.parameters) == (strength, threshold, "*")
        assert (made.regularize.epochs, made.finetune.epochs, made.data) == (
            250,
            100,
            {"name": "mnist", "normalize": True},
        )
        assert {made.pretrain.lr, made.regularize.lr, made.finetune.lr} == {1e-3}


@pytest.mark.parametrize(("net", "strength", "threshold"), [(NETS[0], 0.002, 0.8), (NETS[1], 0.1, 0.008)])
def test_the_papers_structural_settings_stand_in_the_recipes(net, strength, threshold):
    made = recipe.read(f"{net}-structure")
    assert (made.regularize.strength, made.prune.value, made.regularize.groups) == (
        strength,
        threshold,
        "filters+channels",
    )
    assert (made.regularize.parameters, made.prune.parameters, made.regularize.weight_decay) == (None, None, 1e-4)


@pytest.mark.parametrize(("net", "strength"), [("resnet-56", 2e-4), ("resnet-110", 7e-5)])
def test_the_papers_schedule_on_cifar_stands_in_the_recipes(net, strength):
    made = recipe.read(f"paper/{net}")
    assert made.regularize.strength == strength and made.regularize.groups == "filters+channels"
    assert (made.prune.rule, made.prune.value, made.prune.groups) == ("absolute", 1e-4, "elements")
    assert (made.batch_size, made.shift, made.flip, made.epoch_selection) == (128, 4, True, "test-best")
    for stage in (made.pretrain, made.regularize, made.finetune):
        assert (stage.epochs, stage.optimizer, stage.lr, stage.momentum) == (164, "sgd", 0.1, 0.9)
        assert (stage.milestones, stage.gamma, stage.weight_decay) == ((81, 122), 0.1, 1e-4)


@pytest.mark.parametrize("old", recipe.renamed()["recipes"])
def test_an_old_name_is_answered_with_words_that_give_a_recipe(old):
    words = recipe.renamed()["recipes"][old]
    made = recipe.Command.parse(words).read()
    assert str(made.model) in old or made.model["name"] in old
    with pytest.raises(dh.UserError, match="was renamed") as told:
        recipe.read(old)
    assert str(told.value).endswith(f"deephoyer run {words}")


@pytest.mark.parametrize("old", recipe.renamed()["keys"])
def test_an_old_key_is_told_with_its_new_name(old):
    with pytest.raises(dh.UserError, match="no longer a recipe key") as told:
        recipe.read("demo", [f"{old}=x"])
    assert recipe.renamed()["keys"][old] in str(told.value)


def test_the_identity_leaves_out_seed_device_words_and_defaults():
    made = recipe.read("demo")
    for same in ("seed=3", "device=cpu", "about=mine", "expect=null", "shift=0", "finetune.momentum=0.9", "rounds=1.0"):
        assert recipe.read("demo", [same]).digest() == made.digest(), same
    for choice in ("prune.rule={name: std-ratio}", "data={name: mnist}", "regularize.strength=0.0004"):
        assert recipe.read("demo", [choice]).digest() == made.digest(), choice
    for other in (
        "shift=1",
        "finetune.lr=2e-3",
        "prune.value=0.2",
        "finetune=null",
        "model={name: lenet-300-100, dropout: 0.1}",
    ):
        assert recipe.read("demo", [other]).digest() != made.digest(), other


def test_a_new_key_with_a_default_changes_no_identity():
    Later = create_model("Later", __base__=Training, patience=(int, 7))
    Grown = create_model("Grown", __base__=Recipe, mood=(str, "good"), finetune=(Later | None, None))
    for name in ("demo", "small/resnet-56-gather-pruned-twice"):
        old = recipe.read(name)
        grown = Grown.model_validate(old.model_dump(mode="json"))
        assert grown.digest() == old.digest()
        assert grown.model_copy(update={"mood": "bad"}).digest() != old.digest()


def test_a_recipe_extends_another_key_by_key_and_null_takes_away(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "extends: small/lenet-300-100\nmodel: lenet-5\ndistill: null\nfinetune: {epochs: 7}\n"
    )
    (tmp_path / "next.yaml").write_text("extends: mine.yaml\nprune: {value: null, target: {density: 0.1}}\n")
    made, under = recipe.read(str(tmp_path / "next.yaml")), recipe.read("small/lenet-300-100")
    assert (made.model, made.distill, made.finetune.epochs, made.finetune.schedule) == ("lenet-5", None, 7, "cosine")
    assert (made.prune.value, made.prune.target.density, made.prune.parameters) == (None, 0.1, "*")
    assert made.about is None and made.regularize == under.regularize


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("extends: mine.yaml", "extends itself"),
        ("extends: folder/../mine.yaml", "extends itself"),
        ("extends: lenet-5-bets", "is not a recipe"),
        ("extends: [demo]", "not the name of a recipe"),
        ("extends: demo\nfinetune: {epoch: 3}", "finetune: 'epoch' is not a key"),
    ],
)
def test_an_extension_that_leads_nowhere_is_told(tmp_path, monkeypatch, text, told):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(text)
    (tmp_path / "folder").mkdir()
    with pytest.raises(dh.UserError, match=told) as error:
        recipe.read("mine.yaml")
    assert len(str(error.value).splitlines()) <= 2


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("strength=3", "Did you mean regularize.strength?"),
        ("lr=3", "Did you mean pretrain.lr, regularize.lr or finetune.lr?"),
        ("regularize.macs=3", "prune.target.macs"),
        ("strenght=3", "Did you mean regularize.strength?"),
        ("effective-density=0.1", "Did you mean regularize.effective_density?"),
        ("epoch_selektion=held-out", "Did you mean epoch_selection?"),
        ("regularize.strenght=null", "Did you mean regularize.strength?"),
        ("model=resnet18", "model: 'resnet18' is not a model of ours. Did you mean torchvision:resnet18"),
        ("model=torchvision:resnet-18", "demo: model: torchvision has no network 'resnet-18'"),
        ("finetune=3", "finetune: should have keys and values, like {epochs: 3}; it is 3"),
        ("finetune.milestones=3", "finetune.milestones: should be a list"),
        ("finetune.epochs=many", "finetune.epochs: should be a whole number; it is 'many'"),
        ("device=gpu", "'gpu' is not a device: it is auto, cpu, cuda"),
    ],
)
def test_a_mistyped_key_or_value_is_answered_with_what_was_meant(change, told):
    with pytest.raises(dh.UserError) as why:
        recipe.read("demo", [change])
    assert told in str(why.value)


def test_folders_are_named_shortly_and_found_again(tmp_path):
    name = recipe.folder_name(
        "small/lenet-5-structure", ["seed=4", "regularize.groups=coupled", "prune.groups=coupled"]
    )
    assert re.fullmatch(r"small-lenet-5-structure-[0-9a-f]{8}-s4", name)
    assert name == recipe.folder_name(
        "small/lenet-5-structure", ["prune.groups=coupled", "regularize.groups=coupled", "seed=4"]
    )
    assert recipe.folder_name("demo", ["device=cpu", "shift=0"]) == "demo-s0"
    assert recipe.folder_name("demo", ["shift=1"]) != recipe.folder_name("demo", ["shift=2"])


def test_the_words_of_another_run_are_checked_when_the_recipe_is_read():
    with pytest.raises(dh.UserError, match=r"start: parts/resnet-56-dens: .*Did you mean"):
        recipe.read("demo", ["start=parts/resnet-56-dens"])
    made = recipe.read("demo", ["start=parts/lenet-5-teacher seed=1 epoch_selection=test-best"])
    assert made.start == "parts/lenet-5-teacher epoch_selection=test-best seed=1"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("pretrain=null regularize=null prune=null finetune=null", "no stage"),
        ("regularize=null rounds=2", "needs both"),
        ("regularize=null finetune=null distill={teachers:[a.safetensors]}", "has neither"),
    ],
)
def test_stages_that_make_no_run_are_refused(change, told):
    with pytest.raises(dh.UserError, match=told):
        recipe.read("demo", change.split())


def test_groups_rules_and_penalties_take_a_name_or_settings_alike():
    changes = ["regularize.groups=[filters, {name: channels}]", "prune.rule={name: density, value: 0.1, scope: global}"]
    made = recipe.read("demo", [*changes, "prune.value=null", "regularize.penalty={name: transformed-l1, a: 2}"])
    assert made.prune.make() == dh.Density(0.1, "global")
    assert several(made.regularize.groups) == ["filters", {"name": "channels"}]
    assert recipe.read("demo", ["regularize.groups={name: coupled}"]).regularize.groups == "coupled"
    for slip in (
        "regularize.groups={name: coupled, of: 3}",
        "regularize.groups={name: filters, of: 3}",
        "prune.rule={name: density, values: 0.1}",
    ):
        with pytest.raises(dh.UserError, match="its settings"):
            recipe.read("demo", [slip])


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
        ("regularize.strength=yes", "regularize.strength", "should be a number; it is True"),
        ("regularize.strength={elements: yes}", "regularize.strength", "should be a number"),
        ("pretrain.epochs=on", "pretrain.epochs", "should be a number; it is True"),
        ("prune.groups=elements+elements", "prune.groups", "each once"),
        ("regularize.epoch=3", "regularize", "epochs"),
        ("prune.target={macs:0.5}", "prune.target", "a space after a colon"),
        ("prune.value=-2", "prune", "0 or more"),
        ("prune.rule=absolut", "prune.rule", "absolute"),
        ("model=lenet5", "model", "lenet-5"),
        ("model=mine", "model", "one of your own needs DEEPHOYER_IMPORT"),
        ("data=mnits", "data", "mnist"),
        ("pretrain.epochs=many", "pretrain.epochs", "whole number"),
        ("pretrain.epochs=0.5", "pretrain.epochs", "whole number"),
        ("finetune.schedule=step", "finetune", "milestones"),
        ("finetune.lr=0", "finetune.lr", "greater than 0"),
        ("device=tpu", "device", "cpu"),
        ("seed=-1", "seed", "0"),
        ("prune.multiple=0", "prune.multiple", "greater than or equal to 1"),
        ("prune={groups: filters+channels, multiple: 8, value: 1}", "prune", "a single kind of group"),
        ("finetune.lr_warmup=-1", "finetune.lr_warmup", "greater than or equal to 0"),
        ("finetune={epochs: 2, lr_warmup: 3}", "finetune", "would never be reached"),
        ("regularize={epochs: 1, strenght: 4e-4}", "regularize", "regularize.strength"),
        ("distill={teachers: [{file: a, model: lenet5}]}", "distill.teachers.0.model", "lenet-5"),
        ("distill={teachers: []}", "distill.teachers", "at least 1"),
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


def test_a_number_with_an_exponent_is_a_number():
    assert recipe.read("demo", ["finetune.lr=1e-3"]).finetune.lr == 1e-3


def test_a_target_of_accuracy_is_not_met_on_test_images_where_the_last_epoch_is_kept():
    words = ["epoch_selection=last", "prune={rule: absolute, target: {drop: 0.01}}"]
    with pytest.raises(dh.UserError, match="would be met on test images"):
        recipe.read("demo", words)
    recipe.read("demo", [words[1]])


def test_a_recipe_without_its_folder_is_answered_with_all_that_have_that_name():
    with pytest.raises(dh.UserError, match="Did you mean 'compare/lenet-5', 'paper/lenet-5' or 'small/lenet-5'"):
        recipe.read("lenet-5")
    with pytest.raises(dh.UserError, match="Did you mean 'paper/alexnet'"):
        recipe.read("paper/alexnt")


def test_the_folder_of_a_run_in_place_of_a_recipe_is_told_what_is_in_it(tmp_path):
    (tmp_path / "recipe.yaml").write_text("model: lenet-5")
    with pytest.raises(dh.UserError, match=r"is the folder of a run: its recipe is .*/recipe\.yaml"):
        recipe.read("demo", [f"start={tmp_path}"])


def test_settings_of_whatever_has_a_name_alone_can_be_overridden():
    changed = recipe.read(
        "demo", ["method=iterative-magnitude", "method.steps=3", "prune.score=taylor", "prune.score.batches=2"]
    )
    assert changed.method == {"name": "iterative-magnitude", "steps": 3}
    assert changed.prune.score == {"name": "taylor", "batches": 2}
