"""A plan in Lightning, the Hugging Face Trainer and Accelerate: real trainings, the same weights as in a plain loop."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import deephoyer as dh
from deephoyer.pace import Stages
from deephoyer.plan import Plan
from deephoyer.targets import Target

EPOCHS = 5
TARGET = Target(macs=0.3)
SETTINGS = {"stages": Stages(0.2, 0.4), "rounds": 2}
X = torch.zeros(2, 10)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 3))


def images():
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(48, 10, generator=draw)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()


def accuracy(model):
    x, y = images()
    with torch.no_grad():
        return float((model.eval()(x).argmax(1) == y).float().mean())


def plain_loop():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plan = Plan(model, X, optimizer, TARGET, EPOCHS, **SETTINGS)
    for _ in range(EPOCHS):
        model.train()
        for x, y in DataLoader(TensorDataset(*images()), batch_size=8):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        plan.epoch(accuracy(model))
    return plan.finish(), plan


def assert_same(small, expected):
    found, wanted = small.state_dict(), expected.state_dict()
    assert found.keys() == wanted.keys() and all(torch.equal(found[k], wanted[k]) for k in wanted)


# Lightning


def lightning_module():
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = network()

        def training_step(self, batch, _):
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch, _):
            self.log("val_acc", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    return Module()


def lightning_fit(folder, callback, epochs=EPOCHS, resume=None, others=(), **settings):
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint

    class Kill(Callback):
        def on_train_epoch_start(self, trainer, module):
            if trainer.current_epoch == epochs:
                raise KeyboardInterrupt

    saves = ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    quiet |= {"default_root_dir": folder}
    module = lightning_module()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(callbacks=[*others, callback, saves, Kill()], num_sanity_val_steps=1, **quiet, **settings)
        train, val = (
            DataLoader(TensorDataset(*images()), batch_size=8),
            DataLoader(TensorDataset(*images()), batch_size=48),
        )
        with contextlib.suppress(KeyboardInterrupt, SystemExit):
            trainer.fit(module, train, val, ckpt_path=resume)
    return callback


def test_lightning_ends_with_the_weights_of_the_plain_loop_also_when_killed_and_resumed(tmp_path):
    pytest.importorskip("lightning.pytorch")
    from deephoyer.integrations.lightning import PlanCallback

    make = lambda: PlanCallback(TARGET, X, monitor="val_acc", **SETTINGS)  # noqa: E731
    expected, plan = plain_loop()
    whole = lightning_fit(tmp_path / "whole", make(), max_epochs=EPOCHS)
    assert_same(whole.small, expected)
    assert whole.report.reached == plan.report.reached and whole.report.score == pytest.approx(plan.report.score)
    for cut in (2, 4):
        killed = lightning_fit(tmp_path / f"{cut}", make(), epochs=cut, max_epochs=EPOCHS)
        assert killed.plan.done == cut and not killed.plan.optimizers[0]._optimizer_step_post_hooks
        last = str(tmp_path / f"{cut}" / f"epoch={cut - 1}.ckpt")
        resumed = lightning_fit(tmp_path / f"{cut}", make(), resume=last, max_epochs=EPOCHS)
        assert_same(resumed.small, expected)
    again = lightning_fit(tmp_path / "again", resumed, max_epochs=EPOCHS)  # nothing is left in it of the run before
    assert_same(again.small, expected)
    stopped = lightning_fit(tmp_path / "stopped", again, epochs=1, max_epochs=EPOCHS)
    assert stopped.plan.done == 1 and stopped.small is None


def test_lightning_by_steps_ends_at_the_target(tmp_path):
    pytest.importorskip("lightning.pytorch")
    from deephoyer.integrations.lightning import PlanCallback

    done = lightning_fit(tmp_path, PlanCallback(TARGET, X, network="net"), max_epochs=-1, max_steps=30)
    assert done.plan.by_steps and done.report.reached == pytest.approx(0.3, rel=0.02)


def test_lightning_gives_each_score_once_to_the_epoch_or_step_that_was_validated(tmp_path):
    pytest.importorskip("lightning.pytorch")
    from deephoyer.integrations.lightning import PlanCallback

    make = lambda target: PlanCallback(target, X, monitor="val_acc", **SETTINGS)  # noqa: E731
    seldom = lightning_fit(tmp_path, make(TARGET), max_epochs=EPOCHS, check_val_every_n_epoch=2)
    assert [line["epoch"] for line in seldom.report.history if "score" in line] == [2, 4]
    assert seldom.report.reached == pytest.approx(0.3, rel=0.02) and seldom.report.epoch == 4
    target = Target(macs=0.3, drop=1.0)
    steps = lightning_fit(tmp_path, make(target), max_epochs=-1, max_steps=30, val_check_interval=0.5)
    assert [line["step"] for line in steps.report.history if "score" in line] == list(range(3, 31, 3))
    assert steps.report.reached == pytest.approx(0.3, rel=0.02) and steps.report.score is not None


def test_a_lightning_plan_by_steps_with_scores_that_is_killed_ends_bit_for_bit_the_same(tmp_path):
    pytest.importorskip("lightning.pytorch")
    from deephoyer.integrations.lightning import PlanCallback

    make = lambda: PlanCallback(TARGET, X, monitor="val_acc", **SETTINGS)  # noqa: E731
    length = {"max_epochs": -1, "max_steps": 30}
    whole = lightning_fit(tmp_path / "whole", make(), **length)
    lightning_fit(tmp_path / "cut", make(), epochs=2, **length)
    resumed = lightning_fit(tmp_path / "cut", make(), resume=str(tmp_path / "cut" / "epoch=1.ckpt"), **length)
    assert_same(resumed.small, whole.small)
    assert resumed.report.history == whole.report.history


def test_a_lightning_run_to_try_the_code_leaves_the_file_of_another_alone(tmp_path):
    pytest.importorskip("lightning.pytorch")
    from deephoyer.integrations.lightning import PlanCallback

    tried = lightning_fit(tmp_path, PlanCallback(TARGET, X, **SETTINGS), fast_dev_run=True)
    assert tried.small is not None and not (tmp_path / "small.safetensors").exists()


def test_example_inputs_follow_the_precision_that_lightning_gives_the_network(tmp_path):
    pytest.importorskip("lightning.pytorch")
    from deephoyer.integrations.lightning import PlanCallback

    done = lightning_fit(tmp_path, PlanCallback(TARGET, X, **SETTINGS), max_epochs=EPOCHS, precision="64-true")
    assert done.small[0].weight.dtype == torch.float64 and done.report.reached == pytest.approx(0.3, rel=0.02)


def test_after_fit_the_lightning_module_holds_the_smaller_network_and_so_does_a_file(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch")
    from deephoyer.integrations.lightning import PlanCallback

    module, callback = lightning_module(), PlanCallback(TARGET, X, monitor="val_acc", **SETTINGS)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    folder = tmp_path / "of a run" / "that nobody has made"
    settings = quiet | {"default_root_dir": folder, "enable_checkpointing": False}
    trainer = lightning.Trainer(max_epochs=EPOCHS, callbacks=[callback], **settings)
    data = DataLoader(TensorDataset(*images()), batch_size=48)
    trainer.fit(module, data, data)
    assert module.net is callback.small
    assert trainer.validate(module, data, verbose=False)[0]["val_acc"] == pytest.approx(callback.report.score)
    loaded = dh.load(folder / "small.safetensors", model=network())
    assert torch.equal(loaded(X), callback.small(X))


def test_a_lightning_module_may_be_the_network_itself(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch")
    from deephoyer.integrations.lightning import PlanCallback

    class Itself(type(lightning_module())):
        def __init__(self):
            super().__init__()
            net = self._modules.pop("net")
            self.first, self.rest = net[0], net[1:]

        def forward(self, x):
            return self.rest(self.first(x).view(-1, 32))

        @property
        def net(self):  # what its steps call
            return self

    module, callback = Itself(), PlanCallback(TARGET, X, monitor="val_acc", **SETTINGS)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = lightning.Trainer(max_epochs=EPOCHS, callbacks=[callback], default_root_dir=tmp_path, **quiet)
    data = DataLoader(TensorDataset(*images()), batch_size=48)
    trainer.fit(module, data, data)
    assert module.first.out_features < 32 and torch.equal(module(X), callback.small(X))
    assert trainer.validate(module, data, verbose=False)[0]["val_acc"] == pytest.approx(callback.report.score)
    assert torch.equal(dh.load(tmp_path / "small.safetensors", model=Itself())(X), module(X))


def test_lightning_is_told_what_is_missing(tmp_path):
    pytest.importorskip("lightning.pytorch")
    from deephoyer.integrations.lightning import PlanCallback

    for callback, told in [
        (PlanCallback(TARGET), "give example_inputs="),
        (PlanCallback(TARGET, X, network="body"), "no network 'body'"),
        (PlanCallback(Target(macs=0.3, drop=0.01), X), "say which with monitor="),
        (PlanCallback(TARGET, X, monitor="acc"), "logs no 'acc' to be monitored. Logged: val_acc"),
    ]:
        with pytest.raises(dh.UserError, match=told):
            lightning_fit(tmp_path, callback, max_epochs=2)
    with pytest.raises(dh.UserError, match="give the trainer max_epochs or max_steps"):
        lightning_fit(tmp_path, PlanCallback(TARGET, X), max_epochs=-1)
    from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging

    with pytest.raises(dh.UserError, match="StochasticWeightAveraging validates and keeps averages of weights"):
        lightning_fit(tmp_path, PlanCallback(TARGET, X), others=[StochasticWeightAveraging(1e-2)], max_epochs=2)
    with pytest.raises(dh.UserError, match="Average validates and keeps averages of weights"):
        lightning_fit(
            tmp_path, PlanCallback(TARGET, X), others=[type("Average", (WeightAveraging,), {})()], max_epochs=2
        )
    with pytest.raises(dh.UserError, match="a score of every epoch"):
        drop = PlanCallback(Target(macs=0.3, drop=0.01), X, monitor="val_acc")
        lightning_fit(tmp_path, drop, max_epochs=2, check_val_every_n_epoch=2)


# Hugging Face


class Rows(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, i):
        x, y = images()
        return {"x": x[i], "labels": y[i]}


class Classifier(nn.Module):
    """What the trainer asks of a model: keyword arguments, and a loss where there are labels."""

    def __init__(self):
        super().__init__()
        self.net = network()

    def forward(self, x, labels=None):
        logits = self.net[1:](self.net[0](x).view(-1, 32))  # a size that is written out
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


def trainer_of(folder, callback, **settings):
    transformers = pytest.importorskip("transformers")

    class InOrder(transformers.Trainer):
        def get_train_dataloader(self):
            return self.accelerator.prepare(DataLoader(Rows(), batch_size=8))

        def create_optimizer(self, *_):
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
            return self.optimizer

    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=8,
        lr_scheduler_type="constant",
        learning_rate=0.1,
        max_grad_norm=0.0,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="epoch",
        **settings,
    )
    metric = lambda found: {"accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())}  # noqa: E731
    return InOrder(Classifier(), arguments, eval_dataset=Rows(), compute_metrics=metric, callbacks=[callback])


def test_the_hugging_face_trainer_ends_with_the_weights_of_the_plain_loop_also_when_resumed(tmp_path):
    transformers = pytest.importorskip("transformers")
    from deephoyer.integrations.transformers import PlanCallback

    class Kill(transformers.TrainerCallback):
        def on_epoch_begin(self, args, state, control, **_):
            if state.epoch == 3:
                raise KeyboardInterrupt

    make = lambda: PlanCallback(TARGET, {"x": X}, monitor="accuracy", **SETTINGS)  # noqa: E731
    epochs = {"num_train_epochs": EPOCHS, "eval_strategy": "epoch"}
    expected, plan = plain_loop()
    callback = make()
    trainer = trainer_of(tmp_path / "whole", callback, **epochs)
    trainer.train()
    assert_same(callback.small.net, expected)
    assert callback.report.reached == plan.report.reached and callback.report.score == pytest.approx(plan.report.score)
    assert trainer.evaluate()["eval_accuracy"] == pytest.approx(callback.report.score)
    killed = trainer_of(tmp_path / "cut", make(), **epochs)
    killed.add_callback(Kill())
    with pytest.raises(KeyboardInterrupt):
        killed.train()
    resumed = make()
    trainer_of(tmp_path / "cut", resumed, **epochs).train(resume_from_checkpoint=True)
    assert_same(resumed.small.net, expected)


def test_the_hugging_face_trainer_by_steps_ends_at_the_target(tmp_path):
    pytest.importorskip("transformers")
    from deephoyer.integrations.transformers import PlanCallback

    callback = PlanCallback(TARGET, {"x": X}, monitor="eval_loss", higher_is_better=False)
    trainer_of(tmp_path, callback, max_steps=20, eval_strategy="steps", eval_steps=5).train()
    assert callback.report.reached == pytest.approx(0.3, rel=0.02) and callback.report.score < 0
    assert callback.small(x=X)["logits"].shape == (2, 3)
    loaded = dh.load(tmp_path / "small.safetensors", model=Classifier())
    assert torch.equal(loaded(x=X)["logits"], callback.small(x=X)["logits"])


def test_epochs_that_the_hugging_face_trainer_does_not_evaluate_count_as_well(tmp_path):
    pytest.importorskip("transformers")
    from deephoyer.integrations.transformers import PlanCallback

    callback = PlanCallback(TARGET, {"x": X}, monitor="accuracy", **SETTINGS)
    trainer = trainer_of(tmp_path, callback, num_train_epochs=EPOCHS, eval_strategy="epoch", eval_delay=3)
    trainer.train()
    assert [(line["epoch"], "score" in line) for line in callback.report.history] == [
        (1, False), (2, False), (3, True), (4, True), (5, True),
    ]  # fmt: skip
    assert not any("plan/score" in line for line in trainer.state.log_history), "it would be that of another epoch"


def test_after_training_the_hugging_face_trainer_has_the_smaller_model_and_its_folder_too(tmp_path):
    transformers = pytest.importorskip("transformers")
    from deephoyer.integrations.transformers import PlanCallback

    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.BertConfig(vocab_size=20, max_position_embeddings=8, num_labels=2, **shape)
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(config)
    whole = sum(p.numel() for p in model.bert.encoder.parameters())
    rows = [{"input_ids": torch.tensor([i % 20, 3, 5, 7]), "labels": i % 2} for i in range(16)]
    example = {"input_ids": torch.tensor([[1, 2, 3, 4]])}
    callback = PlanCallback(Target(parameters=0.7), example, rounds=1)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"),
        num_train_epochs=3,
        per_device_train_batch_size=8,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows, callbacks=[callback])
    trainer.train()
    assert trainer.model is model and sum(p.numel() for p in model.bert.encoder.parameters()) < whole
    assert trainer.evaluate()["eval_loss"] > 0
    expected = model.eval()(**example).logits
    assert torch.equal(dh.from_pretrained(tmp_path / "out")(**example).logits, expected)
    trainer.save_model(str(tmp_path / "again"))
    assert torch.equal(dh.from_pretrained(tmp_path / "again")(**example).logits, expected)


def test_the_hugging_face_callback_tells_what_does_not_go(tmp_path):
    pytest.importorskip("transformers")
    from deephoyer.integrations.transformers import PlanCallback

    for settings, told in [
        ({"num_train_epochs": 1.5}, "not whole"),
        ({"num_train_epochs": 2}, "eval_strategy='epoch'"),
        ({"num_train_epochs": 2, "eval_strategy": "epoch", "load_best_model_at_end": True}, "the plan chooses"),
    ]:
        with pytest.raises(dh.UserError, match=told):
            trainer_of(tmp_path, PlanCallback(TARGET, {"x": X}, monitor="eval_accuracy"), **settings).train()
    with pytest.raises(dh.UserError, match="say which with monitor="):
        trainer_of(tmp_path, PlanCallback(Target(macs=0.3, drop=0.01), {"x": X}), num_train_epochs=2).train()


# Accelerate


def test_accelerate_with_accumulation_ends_at_the_target():
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(TensorDataset(*images()), batch_size=8, shuffle=True)
    )
    plan = Plan(model, X, optimizer, TARGET, EPOCHS)
    for _ in range(EPOCHS):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
        plan.epoch()
    small = plan.finish()
    assert plan.report.reached == pytest.approx(0.3, rel=0.02) and small(X).shape == (2, 3)
