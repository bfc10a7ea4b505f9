"""The page of a run: whole by itself, honest about what is missing, and alive in a real browser."""

import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import deephoyer as dh
from deephoyer.lab.recipe import Command
from deephoyer.lab.report import run_page
from deephoyer.lab.report.record import read_all
from deephoyer.lab.train.result import finish
from deephoyer.lab.train.run import Run
from deephoyer.structure import compact_report

QUICK = [
    "data={name: mnist, limit: 300}",
    "device=cpu",
    "pretrain.epochs=2",
    "regularize.epochs=2",
    "finetune.epochs=1",
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, timed):
    """The folder of a small run, and its page."""
    folder = tmp_path_factory.mktemp("runs") / "small"
    command = Command("demo", tuple(QUICK))
    with timed():
        finish(Run(command.read(), folder, command=command).execute())
    return folder


@pytest.fixture
def folder(finished, tmp_path):
    """A copy that a test may damage."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def test_a_page_is_one_file_of_at_most_two_megabytes_that_asks_nobody_for_anything(folder):
    path, facts = run_page.write(folder)
    text = path.read_text(encoding="utf-8")
    assert path == folder / "report.html" and len(text.encode()) < 2_000_000 and not facts.missing
    markup = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)  # what scripts ask for is seen in a browser
    assert not re.search(r"""(src|href)=["'](https?:)?//""", markup)


def test_a_page_shows_the_headline_the_layers_the_stages_and_how_to_load_the_result(folder):
    summary = json.loads((folder / "summary.json").read_text())
    text = run_page.write(folder)[0].read_text(encoding="utf-8")
    assert f"{summary['sparse']['total']['nonzeros']:,}" in text
    assert f"{summary['accuracy']['finetuned']:.2%}" in text
    for row in summary["sparse"]["rows"]:
        assert f'<th scope="row">{row["name"]}</th>' in text
    assert "pretrain (1–2), regularize (3–4), finetune (5–5)" in text
    assert "compact.safetensors" in text and "deephoyer run demo" in text


def test_a_run_records_what_single_layers_take_and_the_page_shows_it(folder):
    summary = json.loads((folder / "summary.json").read_text())
    times = summary["layer_ms"]
    names = {row["name"] for row in summary["sparse"]["rows"]}
    assert times["batch"] == 64 and set(times["dense"]) == names and set(times["compact"]) <= names
    text = run_page.write(folder)[0].read_text(encoding="utf-8")
    assert "ms before" in text and f"{times['dense']['fc1']:.3g}" in text


def test_times_that_vary_too_much_are_marked_on_the_page(folder):
    path = folder / "summary.json"
    summary = json.loads(path.read_text())
    for part, low, high in ((summary["compact"], 0.9, 1.1), (summary["compact"]["baseline"], 1.9, 2.1)):
        part["latency"] = [{"batch": 1, "median_ms": (low + high) / 2, "low_ms": low, "high_ms": high, "runs": 9}]
    path.write_text(json.dumps(summary))
    assert "2.00 × faster" in (page := run_page.write(folder)[0].read_text()) and "noisy" not in page
    summary["compact"]["latency"][0]["high_ms"] = 3.0
    path.write_text(json.dumps(summary))
    assert "~2.00 × faster (noisy)" in run_page.write(folder)[0].read_text()


def test_a_transformers_page_shows_which_heads_stayed_in_which_layer(folder):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    x = torch.randn(1, 3, 16)
    small = dh.shrink(layer, x, dh.Target(parameters=0.8), groups=dh.Heads(layer, x))
    report = asdict(compact_report(small))
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**summary, "compact_report": report}))
    text = run_page.write(folder)[0].read_text(encoding="utf-8")
    left = small.self_attn.num_heads
    assert "Heads × layers" in text and f"<td>{left} of 4</td>" in text and text.count('kept">■') == left


@pytest.mark.parametrize(
    "name",
    ["summary.json", "metrics.jsonl", "recipe.yaml", "environment.json", "command.json", "regularized.safetensors"],
)
@pytest.mark.parametrize("how", ["lost", "damaged", "cut"])
def test_a_folder_with_a_missing_or_damaged_part_still_gives_a_page_that_says_so(folder, name, how):
    path = folder / name
    if how == "lost":
        path.unlink()
    elif how == "damaged":
        path.write_bytes(b"\xff\xfe{" + path.read_bytes()[:50])
    else:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    page, facts = run_page.write(folder)
    if how == "cut" and name == "recipe.yaml":
        return  # half of a YAML text may be a YAML text
    assert any(name in line for line in facts.missing), facts.missing
    assert "Not everything of this run could be read" in page.read_text(encoding="utf-8")


def test_words_of_a_run_cannot_become_part_of_the_page(folder):
    words = {"base": "demo</script><script>alert(1)</script>", "overrides": ["<b>=1"]}
    (folder / "command.json").write_text(json.dumps(words))
    text = run_page.write(folder)[0].read_text(encoding="utf-8")
    assert "<script>alert" not in text and "&lt;script&gt;alert" in text


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(dh.UserError, match="is not the folder of a run"):
        run_page.write(tmp_path)
    with pytest.raises(dh.UserError, match="no such folder"):
        run_page.write(tmp_path / "nothing")


def test_runs_are_compared_on_one_page_damaged_ones_too(folder, tmp_path):
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    (other / "summary.json").unlink()
    text = run_page.write_comparison([folder, other], tmp_path / "both.html").read_text(encoding="utf-8")
    assert '<th scope="row">run</th>' in text and '<th scope="row">other</th>' in text and "summary.json" in text


def test_every_published_run_is_a_point_of_the_results_page(tmp_path):
    results = Path(__file__).parents[1] / "results"
    records = list(read_all(results))
    text = run_page.write_results(records, results, tmp_path / "results.html").read_text(encoding="utf-8")
    assert f"{len(records)} published runs" in text and len(text.encode()) < 2_500_000
    assert all(json.dumps(record.command)[1:-1] in text for record in records[:20])
    with pytest.raises(dh.UserError, match="no records"):
        run_page.write_results([], results, tmp_path / "none.html")


def test_summaries_and_explanations_are_shown_in_notebooks():
    net = torch.nn.Sequential(torch.nn.Linear(3, 2))
    assert dh.summary(net, torch.zeros(1, 3), latency=False)._repr_html_().startswith("<pre>")


# In a browser


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("there is no Chromium here")
    with api.sync_playwright() as play:
        running = play.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 390], ids=["desk", "phone"])
def test_the_page_lives_in_a_browser(browser, folder, scheme, width, request):
    path, _ = run_page.write(folder)
    page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 900})
    troubles, asked = [], []
    page.on("console", lambda message: troubles.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("request", lambda asking: asked.append(asking.url))
    page.goto(path.as_uri())
    page.wait_for_function("Bokeh.documents.length > 0 && document.querySelectorAll('.bk-Figure').length >= 4")
    assert asked == [path.as_uri()] and not troubles
    marks = "name => Bokeh.documents.flatMap(d => d.get_model_by_name(name)?.renderers ?? []).length"
    for plot in ("epochs", "pressure", "structure", "magnitudes"):
        assert page.evaluate(marks, plot) > 0, plot
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "nothing sticks out"

    def column():
        return page.eval_on_selector_all(
            "table.sortable >> nth=0 >> tbody tr", "rows => rows.map(r => +r.cells[4].dataset.value)"
        )

    page.click("table.sortable >> nth=0 >> th:nth-child(5) button")
    assert column() == sorted(column(), reverse=True)
    page.keyboard.press("Enter")
    assert column() == sorted(column())
    before = page.evaluate(
        "JSON.stringify(Bokeh.documents.map(d => d.get_model_by_name('magnitude bars')).find(m => m).data)"
    )
    page.select_option("#magnitude-choice", "3")
    after = page.evaluate(
        "JSON.stringify(Bokeh.documents.map(d => d.get_model_by_name('magnitude bars')).find(m => m).data)"
    )
    assert before != after and "kept" in page.inner_text("#magnitude-words")
    if request.config.getoption("--screenshots"):
        page.screenshot(path=f"{request.config.getoption('--screenshots')}/{scheme}-{width}.png", full_page=True)
    page.close()


@pytest.mark.browser
def test_filters_choose_what_the_results_page_shows(browser, tmp_path, request):
    results = Path(__file__).parents[1] / "results"
    path = run_page.write_results(list(read_all(results)), results, tmp_path / "results.html")
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    troubles = []
    page.on("console", lambda message: troubles.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.goto(path.as_uri())
    page.wait_for_function("document.querySelectorAll('#runs tbody tr').length > 0")
    points = "Bokeh.documents.map(d => d.get_model_by_name('records')).find(m => m).data.size.length"
    everything = page.evaluate(points)
    page.select_option("#filter-protocol", "held-out")
    fewer = page.evaluate(points)
    assert 0 < fewer < everything and page.inner_text("#filter-count") == f"{fewer} runs"
    page.select_option("#filter-network", "resnet-56")
    assert page.inner_text("#filter-count") == "0 runs", "none of them was selected on held-out images"
    page.select_option("#filter-protocol", "")
    assert page.locator("#runs tbody tr").count() == page.evaluate(points) and not troubles
    if request.config.getoption("--screenshots"):
        page.screenshot(path=f"{request.config.getoption('--screenshots')}/results.png", full_page=False)
    page.close()
