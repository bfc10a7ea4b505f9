"""Settings for all tests: the same examples in every run, and few threads.

`pytest --hypothesis-profile=hunt` looks further, with new examples each time.
"""

import os
import subprocess
import sys
from contextlib import contextmanager

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # for the runs that tests start, see deephoyer/__main__.py
os.environ.setdefault("DEEPHOYER_UNTIMED", "1")  # networks of finished runs are timed where a test asks: `timed`

import pytest
import torch
from hypothesis import HealthCheck, settings

from deephoyer.lab import cli

slow_is_fine = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "print_blob": True}
settings.register_profile("same", derandomize=True, database=None, max_examples=40, **slow_is_fine)
settings.register_profile("hunt", max_examples=1000, **slow_is_fine)
settings.load_profile("same")

torch.set_num_threads(1)


def pytest_addoption(parser):
    parser.addoption("--screenshots", help="a folder for pictures of the pages that browser tests open")


def pytest_collection_modifyitems(items):
    """What is marked `cuda` is skipped, by name, where there is no GPU."""
    if not torch.cuda.is_available():
        for item in items:
            if "cuda" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """Runs `deephoyer …` in an empty folder and gives its exit status and what it said."""
    monkeypatch.chdir(tmp_path)

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["deephoyer", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        return ended.value.code, said.out, said.err

    return call


@contextmanager
def _timed():
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("DEEPHOYER_UNTIMED", raising=False)
        yield


@pytest.fixture(scope="session")
def timed():
    """`with timed():` has the networks of runs that finish there timed, as without tests they always are."""
    return _timed


@pytest.fixture
def interpreted():
    """Runs the tests of a file whose names hold `key` with Triton's interpreter, which must be chosen at the start."""

    def call(file, key):
        words = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", file, "-k", key]
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        done = subprocess.run(words, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-4000:]

    return call
