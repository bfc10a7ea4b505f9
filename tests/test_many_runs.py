"""Many runs: grids, their processes, what is left when some of them are killed."""

import json
import os
import signal
import subprocess
import sys

import pytest

import deephoyer as dh
from deephoyer.lab import cores, processes, sweep
from deephoyer.lab import recipe as recipes
from deephoyer.lab.fork_server import Forked, ForkServer
from deephoyer.lab.processes import IMPORTS, ChildRun, ListQueue, Starter, run_children
from deephoyer.lab.runs.folder import RunFolder
from deephoyer.lab.search import Axis
from deephoyer.lab.train.run import Run
from small_runs import QUICK, until


def test_a_sweep_runs_every_member_and_one_that_fails_leaves_the_others_alone(tmp_path):
    team = sweep.grid_runs("demo", QUICK, ["prune.value=0.1,1e9"], tmp_path)
    sweep.run_all("demo", QUICK, team, 2, None)
    good, bad = team
    assert good.status == 0 and good.result()["accuracy"]["finetuned"] > 0
    assert bad.status == 2 and "would leave nothing of" in bad.line()
    assert sweep.result_table(team).row_count == 2
    before = (good.folder / "summary.json").stat().st_mtime_ns
    again = sweep.grid_runs("demo", QUICK, ["prune.value=0.1"], tmp_path)
    sweep.run_all("demo", QUICK, again, 1, None)
    assert (good.folder / "summary.json").stat().st_mtime_ns == before
    assert json.loads((good.folder / "summary.json").read_text()) == again[0].result()


def test_a_member_whose_run_another_process_is_doing_waits_for_its_result(tmp_path):
    [member] = sweep.grid_runs("demo", QUICK, ["seed=0"], tmp_path)
    other = RunFolder(member.folder)
    other.open()

    def show(busy):
        if "another process" in (member.folder / "log.txt").read_text():
            other.close()

    sweep.run_queue(["demo", *QUICK], ListQueue([member]), 1, ["cpu"], show=show)
    assert member.status == 0, member.line()


def test_a_member_does_not_wait_for_a_process_that_was_stopped_and_says_which(tmp_path, monkeypatch):
    monkeypatch.setattr("deephoyer.lab.train.run.STOPPED_FOR", 1.0)
    monkeypatch.setenv(processes.END_WITH_STDIN, "1")  # as a member has it
    made = recipes.read("demo", QUICK)
    code = f"from deephoyer.lab.runs.folder import RunFolder as R; R({str(tmp_path)!r}).open(); print(1, flush=True); "
    holder = subprocess.Popen([sys.executable, "-c", code + "import time; time.sleep(600)"], stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline()
        assert RunFolder(tmp_path).stopped_holder() is None
        holder.send_signal(signal.SIGSTOP)
        with pytest.raises(dh.UserError, match=rf"process {holder.pid} is using it and is stopped"):
            Run(made, tmp_path).execute()
    finally:
        holder.kill()
        holder.wait()
    assert RunFolder(tmp_path).stopped_holder() is None
    with RunFolder(tmp_path).locked():
        assert (tmp_path / ".lock").read_text().split()[0] == str(os.getpid())


PATIENT = """
import pathlib, signal, sys, time
mine = pathlib.Path(sys.argv[-1])
def told(*_):
    (mine / "told").touch()
    end = time.monotonic() + 10
    while len(list(mine.parent.glob("*/told"))) < 2 and time.monotonic() < end:
        time.sleep(0.02)
    sys.exit(time.monotonic() >= end)
signal.signal(signal.SIGINT, told)
(mine / "ready").touch()
time.sleep(60)
"""


@pytest.fixture(params=["forked", "kept", "by themselves"])
def however_started(request, monkeypatch):
    if request.param == "by themselves":
        monkeypatch.setattr("deephoyer.lab.fork_server.can_run", lambda words: False)
    return request.param


def test_ctrl_c_is_told_to_all_members_before_any_is_waited_for(tmp_path, however_started):
    def show(busy):
        if len(list(tmp_path.glob("*/ready"))) == 2:
            raise KeyboardInterrupt

    team = [ChildRun([], tmp_path / name) for name in "ab"]
    with pytest.raises(KeyboardInterrupt):
        words, keep = [sys.executable, "-c", PATIENT], however_started == "kept"
        run_children(words, dict(os.environ), ListQueue(team), 2, show, keep=keep)
    assert [m.process.returncode for m in team] == [0, 0]


def test_a_second_ctrl_c_while_members_end_leaves_none_that_its_queue_was_not_told_of(tmp_path, monkeypatch):
    stopped = []

    class Noted(ListQueue):
        def interrupted(self, member):
            stopped.append(member)

    def ctrl_c(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "wait", ctrl_c)
    monkeypatch.setattr(Forked, "wait", ctrl_c)
    team = [ChildRun([], tmp_path / name) for name in "ab"]
    with pytest.raises(KeyboardInterrupt):
        run_children([sys.executable, "-c", "import time; time.sleep(60)"], dict(os.environ), Noted(team), 2, ctrl_c)
    assert stopped == team


FAULTY = """
import pathlib, sys, time
mine = pathlib.Path(sys.argv[-1])
tries = len(list(mine.glob("try*")))
(mine / f"try{tries}").touch()
(mine / "here").touch()
company = len(list(mine.parent.glob("*/here"))) > 1
time.sleep(0.5)
(mine / "here").unlink()
if mine.name == "killed":
    sys.exit(3)
if mine.name == "broken" or company or not tries:
    sys.exit("torch.AcceleratorError: CUDA error: unspecified launch failure")
"""


def test_members_that_failed_through_anothers_gpu_fault_are_retried_alone_once_all_have_left_the_gpu(
    tmp_path, however_started
):
    team = [ChildRun([], tmp_path / name) for name in ("killed", "faulted", "broken", "faulted too")]
    words, keep = [sys.executable, "-c", FAULTY], however_started == "kept"
    run_children(words, dict(os.environ), ListQueue(team), 4, keep=keep)
    assert [m.status for m in team] == [3, 0, 1, 0]
    assert [len(list(m.folder.glob("try*"))) for m in team] == [1, 2, 2, 2]
    assert "launch failure" in team[1].folder.joinpath("log.txt").read_text(), "the first failure can still be read"


class EndsDecide(ListQueue):
    """A queue that is open until all of its members have ended, as a comparison's and a search's are."""

    def __init__(self, members):
        super().__init__(members)
        self.left, self.alive = len(members), set()

    def open(self):
        return self.left > 0

    def ended(self, member):
        self.left -= 1

    def tick(self, busy):
        self.alive |= {(member.folder.name, member.retried, member.busy) for member in busy}


def test_a_faulted_member_is_retried_though_its_queue_waits_for_its_end_and_hears_of_it_until_then(tmp_path):
    team = [ChildRun([], tmp_path / name) for name in ("faulted", "killed")]
    queue = EndsDecide(team)
    run_children([sys.executable, "-c", FAULTY], dict(os.environ), queue, 2)
    assert [(m.status, m.retried) for m in team] == [(0, True), (3, False)]
    assert ("faulted", False, False) in queue.alive


def test_a_member_that_was_just_being_started_is_told_as_interrupted(tmp_path, monkeypatch):
    stopped = []

    class Noted(ListQueue):
        def interrupted(self, member):
            stopped.append(member)

    def ctrl_c(server):
        raise KeyboardInterrupt

    monkeypatch.setattr(ForkServer, "ready", ctrl_c)
    member = ChildRun([], tmp_path / "a")
    with pytest.raises(KeyboardInterrupt):
        run_children([sys.executable, "-c", "pass"], dict(os.environ), Noted([member]), 1)
    assert stopped == [member]


def test_values_of_a_grid_or_a_search_may_have_settings_of_their_own(tmp_path):
    first, second = "{name: l0, strength: 1}", "{name: admm, keep: 0.5}"
    words = [*QUICK, "prune.value=null", "prune.target={live: 0.1}"]
    members = sweep.grid_runs("demo", words, [f"method={first},{second}"], tmp_path)
    assert [m.overrides[0] for m in members] == [f"method={first}", f"method={second}"]
    assert Axis.read(f"method={first},{second}").values == (first, second)
    assert Axis.read("regularize.parameters='a,b',[c, 'd,]']").values == ("'a,b'", "[c, 'd,]']")
    for empty in ("1e-4,,2e-4", "1e-4,", ",1e-4"):
        with pytest.raises(dh.UserError, match="nothing between two commas"):
            sweep.grid_runs("demo", QUICK, [f"regularize.strength={empty}"], tmp_path)


@pytest.mark.parametrize("axis", ["seed", "seed=", "=1", "seed=1,1", "seed=one", "sed=1"])
def test_a_grid_that_makes_no_sense_is_refused_before_anything_runs(tmp_path, axis):
    with pytest.raises(dh.UserError):
        sweep.grid_runs("demo", QUICK, [axis], tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_member_that_was_killed_is_told_as_killed_and_by_what(tmp_path, however_started):
    team = [ChildRun([], tmp_path / "a")]
    words, keep = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], however_started == "kept"
    run_children(words, dict(os.environ), ListQueue(team), 1, keep=keep)
    assert team[0].line() == "failed: killed by SIGKILL"


PARENT = """
import os, sys
from pathlib import Path
from deephoyer.lab import fork_server
if sys.argv[2] == "by themselves":
    fork_server.can_run = lambda words: False
from deephoyer.lab.processes import ListQueue, ChildRun, run_children
child = "import pathlib, sys, time; from deephoyer.lab.processes import end_with_parent; end_with_parent(); "
child += "(pathlib.Path(sys.argv[-1]) / 'ready').touch(); time.sleep(60)"
members = ListQueue([ChildRun([], Path(sys.argv[1]) / "child")])
run_children([sys.executable, "-c", child], dict(os.environ), members, 1, keep=sys.argv[2] == "kept")
"""


@pytest.mark.parametrize(
    "end", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL], ids=["terminated", "hung up", "killed"]
)
def test_members_end_with_their_parent_however_it_ends(tmp_path, end, however_started):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path), however_started])
    until(lambda: (tmp_path / "child" / "ready").exists())
    children = _children_of(parent.pid)
    children += [below for child in children for below in _children_of(child)]
    parent.send_signal(end)
    assert parent.wait() == (-end if end == signal.SIGKILL else 128 + end)
    assert len(children) == (1 if however_started == "by themselves" else 2)
    until(lambda: not any(os.path.exists(f"/proc/{child}") for child in children))


SPEAKS = """
import os, signal, sys, time
print("out", sys.argv[1:], flush=True)
print("err", os.getsid(0) == os.getpid(), os.environ["DEEPHOYER_END_WITH_STDIN"], file=sys.stderr)
print(sys.stdin.read(), "input is over")
sys.exit(3)
"""


def test_a_forked_program_has_its_own_arguments_output_input_and_session_as_one_started_by_itself(tmp_path):
    logs = []
    for server in (ForkServer({**os.environ, "DEEPHOYER_END_WITH_STDIN": "1"}), None):
        with open(tmp_path / "log.txt", "wb") as log:
            if server is not None:
                assert server.ready()
                process = server.start(["-c", SPEAKS, "a b", "--c"], log)
            else:
                words, environment = [sys.executable, "-c", SPEAKS, "a b", "--c"], {"DEEPHOYER_END_WITH_STDIN": "1"}
                process = subprocess.Popen(words, env={**os.environ, **environment}, stdin=subprocess.PIPE,
                                           stdout=log, stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip
            assert process.poll() is None
            process.stdin.close()
            assert process.wait() == process.poll() == 3
        logs.append((tmp_path / "log.txt").read_text())
        if server is not None:
            server.close()
    assert logs[0] == logs[1] and "out ['a b', '--c']" in logs[0] and "err True 1" in logs[0]


COUNTS = """
import os, pathlib, sys
from deephoyer.lab.processes import end_with_parent
end_with_parent()
count = sys.modules.setdefault("counted", [])
count.append(1)
print(os.getpid(), len(count), sys.argv[1])
sys.exit({"fails": 3, "breaks": "broken"}.get(sys.argv[1], 0))
"""


def test_a_child_that_is_kept_runs_one_program_after_another_until_one_fails(tmp_path):
    with Starter([sys.executable, "-c", COUNTS], dict(os.environ), keep=True) as start:
        said, status = [], []
        for i, word in enumerate(["a", "b", "fails", "c", "breaks", "d"]):
            member = start(ChildRun([word], tmp_path / f"{i}"))
            status.append(member.process.wait())
            member.process.stdin.close()  # as when it is polled: nobody else must take that for his own
            member.log.close()
            said.append((member.folder / "log.txt").read_text().split())
    assert status == [0, 0, 3, 0, 1, 0]
    assert [(int(s[1]), s[2]) for s in said] == [(1, "a"), (2, "b"), (3, "fails"), (1, "c"), (2, "breaks"), (1, "d")]
    process = [s[0] for s in said]
    assert len(set(process[:3])) == len(set(process[3:5])) == 1 and len(set(process)) == 3
    assert said[4][3:] == ["broken"]


def test_a_run_that_failed_after_another_is_retried_by_itself(tmp_path):
    once = (
        "import sys; count = sys.modules.setdefault('counted', []); count.append(1); sys.exit(len(count) > 1 and 'no')"
    )
    team = [ChildRun([], tmp_path / name) for name in "ab"]
    run_children([sys.executable, "-c", once], dict(os.environ), ListQueue(team), 1, keep=True)
    assert [(m.status, m.retried) for m in team] == [(0, False), (0, True)]
    assert (tmp_path / "b" / "log.txt").read_text() == "no\n", "what it said first"


def test_runs_of_a_process_that_is_kept_are_those_that_each_would_be_by_itself(tmp_path):
    quick = [
        *QUICK,
        "method={name: l0, strength: 1.0}",
        "regularize.strength=0",
        "prune={rule: absolute, target: {density: 0.2}}",
    ]
    words = [sys.executable, "-m", "deephoyer", "run", "demo", *quick]
    for keep in (True, False):
        team = [ChildRun([f"seed={seed}"], tmp_path / f"{keep}{seed}") for seed in (0, 1)][not keep :]
        run_children(
            words, dict(os.environ) | {"DEEPHOYER_UNTIMED": "1"}, ListQueue(team), 1, imports=IMPORTS, keep=keep
        )
        assert {m.status for m in team} == {0} and not any(m.retried for m in team)
    kept, fresh = ((tmp_path / name / "finetuned.safetensors").read_bytes() for name in ("True1", "False1"))
    assert kept == fresh
    record = team[0].result()  # nobody timed it
    assert record["compact"]["total"]["parameters"] and record["changed_predictions"] == 0
    assert not record["compact"]["latency"] and "layer_ms" not in record


ENDS_SLOWLY = """
import pathlib, sys, time
from deephoyer.lab.processes import end_with_parent
mine = pathlib.Path(sys.argv[-1])
if (mine / "ready").exists() or mine.name == "second":
    sys.exit(mine.name == "first" and not (mine / "over").exists() and "two at once")
end_with_parent()
(mine / "ready").touch()
try:
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(1)
    (mine / "over").touch()
"""


@pytest.mark.parametrize("keep", [False, True], ids=["forked", "kept"])
def test_when_the_server_is_killed_its_programs_end_and_only_then_start_again_by_themselves(tmp_path, keep):
    team = [ChildRun([], tmp_path / name) for name in ("first", "second")]
    killed = []

    def show(busy):
        if (tmp_path / "first" / "ready").exists() and not killed:
            server = _children_of(os.getpid())[-1]
            killed.extend([server, *_children_of(server)])
            os.kill(server, signal.SIGKILL)

    run_children([sys.executable, "-c", ENDS_SLOWLY], dict(os.environ), ListQueue(team), 1, show, keep=keep)
    assert [(m.status, m.retried) for m in team] == [(0, True), (0, False)] and len(killed) == 2
    until(lambda: not os.path.exists(f"/proc/{killed[1]}"))


KILLS_ITS_PARENT = """
import os, pathlib, signal, sys, time
mine = pathlib.Path(sys.argv[-1])
with open(mine / "parents", "a") as file:
    print(os.getppid(), file=file)
if "kills" in mine.name and str(os.getppid()) != os.environ["CONDUCTOR"]:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(0.2)
"""


def test_a_server_that_died_is_replaced_once_and_what_it_said_is_told(tmp_path):
    (tmp_path / "warns.py").write_text("import sys; print('a driver is too old', file=sys.stderr)")
    me = str(os.getpid())
    environment = {**os.environ, "CONDUCTOR": me, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    team = [ChildRun([], tmp_path / name) for name in ("kills", "second", "third kills", "fourth")]
    messages = []
    words = [sys.executable, "-c", KILLS_ITS_PARENT]
    run_children(words, environment, ListQueue(team), 1, say=messages.append, imports=["warns"])
    assert [(m.status, m.retried) for m in team] == [(0, True), (0, False), (0, True), (0, False)]
    (first, own), (second,), (third, alone), (fourth,) = ((m.folder / "parents").read_text().split() for m in team)
    assert second == third != first and {own, alone, fourth} == {me} and me not in (first, second)
    killed = "the fork server was killed by SIGKILL; last line of its log: a driver is too old"
    assert [line for line in messages if "server" in line] == [
        f"{killed}. A new one is started.",
        f"{killed}. Runs are started without it from now on.",
    ]


def test_a_server_that_can_not_begin_says_why_and_runs_go_on_without_it(tmp_path):
    (tmp_path / "breaks.py").write_text("raise OSError('no space left')")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    team = [ChildRun([], tmp_path / name) for name in ("first", "second")]
    told, seen = [], []
    run_children([sys.executable, "-c", "pass"], environment, ListQueue(team), 1, seen.append, told.append, ["breaks"])
    assert [m.status for m in team] == [0, 0] and seen
    assert told == [
        "the fork server ended with status 1; last line of its log: OSError: no space left. "
        "Runs are started without it from now on."
    ]


def test_ctrl_c_after_the_server_was_killed_waits_for_its_programs(tmp_path):
    def show(busy):
        if (tmp_path / "first" / "ready").exists():
            os.kill(_children_of(os.getpid())[-1], signal.SIGKILL)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        members = ListQueue([ChildRun([], tmp_path / "first")])
        run_children([sys.executable, "-c", ENDS_SLOWLY], dict(os.environ), members, 1, show)
    assert (tmp_path / "first" / "over").exists()


@pytest.fixture
def server(tmp_path):
    """A server that has imported `left_behind`, which started a program of its own and forgot it."""
    (tmp_path / "left_behind.py").write_text("import subprocess\nsubprocess.Popen(['sleep', '0.2'])\n")
    server = ForkServer({**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}, ["left_behind"])
    assert server.ready()
    yield server
    server.close()


def _said(server, tmp_path, *words):
    with open(tmp_path / "log.txt", "wb") as log:
        process = server.start(["-c", *words], log)
        status = process.wait()
        process.stdin.close()
    return status, (tmp_path / "log.txt").read_text()


def test_a_forked_program_ends_as_python_ends_with_its_threads_and_what_they_and_exit_handlers_say(server, tmp_path):
    late = "import atexit, threading, time; atexit.register(print, 'at exit'); "
    late += "threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start(); print('main')"
    assert _said(server, tmp_path, late) == (0, "main\nthread\nat exit\n")


def test_a_server_outlives_programs_that_it_did_not_fork(server, tmp_path):
    for _ in range(2):
        assert _said(server, tmp_path, "import time; time.sleep(0.3)") == (0, "")


def test_words_that_are_too_many_for_a_message_are_left_to_who_asks_and_the_server_goes_on(server, tmp_path):
    with open(tmp_path / "log.txt", "wb") as log:
        assert server.start(["-c", "pass", "x" * 150_000], log) is None
    assert _said(server, tmp_path, "print('still here')") == (0, "still here\n")


def test_a_server_with_the_drivers_files_open_does_not_serve(tmp_path, monkeypatch):
    from deephoyer.lab import fork_server

    assert not fork_server._has_touched_a_gpu()
    monkeypatch.setattr(os.path, "realpath", lambda path: "/dev/nvidiactl")
    assert fork_server._has_touched_a_gpu()


def test_a_server_whose_threads_have_computed_does_not_serve_for_forked_programs_would_wait_for_them(tmp_path):
    (tmp_path / "computes.py").write_text("import torch\ndef at_once(): torch.ones(10**6).exp()\ndef never(): pass\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "2"}
    for function, serves in (("never", True), ("at_once", False)):
        server = ForkServer(environment, ["torch", f"computes:{function}"])
        assert server.ready() == serves
        server.close()


def test_runs_side_by_side_share_the_cores_that_this_process_may_use(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(cores, "_quotas", lambda *_: [])
    team, speaks = [ChildRun([], tmp_path / name) for name in "ab"], "import os; print(os.environ['OMP_NUM_THREADS'])"
    sweep.run_queue([], ListQueue(team), 2, ["cpu"] * 2, program=[sys.executable, "-c", speaks])
    assert [(m.folder / "log.txt").read_text() for m in team] == ["3\n", "3\n"]


@pytest.mark.parametrize(
    ("process", "files", "usable"),
    [
        ("0::/", {"cpu.max": "max 100000"}, 6),
        ("0::/", {"cpu.max": "250000 100000"}, 3),
        ("0::/a/b", {"a/cpu.max": "200000 100000", "a/b/cpu.max": "400000 100000"}, 2),
        ("0::/docker/only-outside", {"cpu.max": "50000 100000"}, 1),
        (
            "4:memory:/\n1:cpu,cpuacct:/",
            {"cpu,cpuacct/cpu.cfs_quota_us": "-1", "cpu,cpuacct/cpu.cfs_period_us": "1"},
            6,
        ),
        ("1:cpu:/x", {"cpu/x/cpu.cfs_quota_us": "400000\n", "cpu/x/cpu.cfs_period_us": "100000\n"}, 4),
        ("", {}, 6),
    ],
)
def test_the_quota_of_a_container_limits_the_cores_that_are_used(tmp_path, monkeypatch, process, files, usable):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    (tmp_path / "process").write_text(process)
    for name, content in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(content)
    assert cores.usable_cores(tmp_path / "process", tmp_path / "groups") == usable


def test_torch_starts_no_more_threads_than_a_container_lets_run_unless_told(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    for quotas, before, after in (([], None, None), ([2.0], None, "2"), ([2.0], "4", "4")):
        monkeypatch.setattr(cores, "_quotas", lambda *_, quotas=quotas: quotas)
        environment = {} if before is None else {cores.THREADS: before}
        monkeypatch.setattr(os, "environ", environment)
        cores.limit_threads()
        assert environment.get(cores.THREADS) == after and cores.threads_asked_for() == (before == "4")


def test_reading_mnist_starts_no_threads_that_a_fork_would_miss():
    count = "import os; from deephoyer.lab.data import mnist; n = len(os.listdir('/proc/self/task')); mnist.mnist(); "
    count += "assert len(os.listdir('/proc/self/task')) == n"
    subprocess.run([sys.executable, "-c", count], check=True, env={**os.environ, "OMP_NUM_THREADS": "2"})


@pytest.mark.cuda
@pytest.mark.parametrize("timed", [True, False], ids=["forked", "kept"])
def test_forked_members_train_on_the_gpu(tmp_path, monkeypatch, timed):
    monkeypatch.delenv("DEEPHOYER_UNTIMED", raising=False)
    quick = [*QUICK, "device=cuda"]
    team = sweep.grid_runs("demo", quick, ["seed=0,1,2,3"], tmp_path)
    sweep.run_queue(["demo", *quick], ListQueue(team), 2, ["cuda"] * 2, timed=timed)
    assert [m.status for m in team] == [0, 0, 0, 0] and not any(m.retried for m in team)
    assert all(isinstance(m.process, Forked) for m in team)


def _children_of(pid):
    """Process numbers whose parent is `pid`, as Linux tells them."""
    children = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as file:
                    parent = file.read().rpartition(")")[2].split()[1]
            except OSError:
                continue
            children += [int(entry)] if int(parent) == pid else []
    return children
