"""The page as a browser draws it: without a network, in both colours, as wide as a phone."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import ovq.report.write
from ovq.report import report
from ovq.report.charts import save_png
from ovq.report.page import render
from ovq.report.records import read_suite
from ovq.report.sections import Section
from ovq.report.sections.ablations import ablations
from ovq.report.sections.pairs import recall

from .written import write_all, write_recall

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
DARK, LIGHT = 0, 1
# A page of a phone's width around the page, that tells in its own text what it sees there.
FRAME = """<iframe id="page" src="index.html" style="width:360px;height:800px;border:0"></iframe>
<p id="seen"></p><script>
const seen = [], page = document.getElementById("page");
function look() {
  const root = page.contentDocument.documentElement;
  seen.push(root.dataset.drawn, page.contentDocument.querySelectorAll("svg.marks").length,
    root.scrollWidth - root.clientWidth);
}
async function drawn(theme) {
  while (page.contentDocument?.documentElement?.dataset.drawn !== theme)
    await new Promise(resolve => setTimeout(resolve, 50));
  look();
}
(async () => {
  await drawn("dark");
  page.contentDocument.getElementById("theme").click();
  await drawn("light");
  const head = page.contentDocument.querySelectorAll("#status th")[1];
  for (let i = 0; i < 2; i++) {
    head.firstChild.click();
    seen.push(head.getAttribute("aria-sort"));
    const rows = [...head.closest("table").tBodies[0].rows];
    seen.push(rows.map(row => row.cells[1].textContent).join("+"));
  }
  const chart = page.contentDocument.querySelector("[data-chart=recall-every-32]");
  const lines = () => [...chart.querySelectorAll("g.mark-line path")].filter(
    line => (line.getAttribute("d") ?? "").length > 5).length;
  seen.push(lines());
  const name = chart.querySelector("g.role-legend-symbol path"), at = name.getBoundingClientRect();
  name.dispatchEvent(new page.contentWindow.MouseEvent("click", {bubbles: true,
    clientX: at.x + at.width / 2, clientY: at.y + at.height / 2, view: page.contentWindow}));
  await new Promise(resolve => setTimeout(resolve, 500));
  seen.push(lines());
  document.getElementById("seen").textContent = seen.join(" ");
})();
</script>"""


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A report of all suites and of a comparison; its pictures are what they are drawn from."""
    root = tmp_path_factory.mktemp("report")
    folders = [write_all(root / "runs"), ROOT / "results/compare", ROOT / "results/demo/recall-ovq"]

    def write_spec(chart, path):
        path.write_text(json.dumps(chart.spec))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ovq.report.write, "save_png", write_spec)
        return report(folders, root / "out"), root / "out"


def browse(path, tmp_path, scheme):
    """The document once its scripts have run, which must not complain."""
    run = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
            "--allow-file-access-from-files", f"--blink-settings=preferredColorScheme={scheme}",
            f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=60000",
            "--dump-dom", path.as_uri(),
        ],
        capture_output=True, encoding="utf-8", timeout=120, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in run.stderr
    return run.stdout


def charts_of(page):
    return re.findall(r'data-chart="([^"]+)"', page)


def test_every_chart_is_a_picture_too(written):
    found, output = written
    page = (output / "index.html").read_text()
    names, specs = charts_of(page), re.search(r'id="specs">(.*?)</script>', page, re.DOTALL)
    assert len(set(names)) == len(names) >= 20
    assert specs is not None
    for name in names:
        assert json.loads((output / f"{name}.png").read_text()) == json.loads(specs[1])[name]
    assert sorted(path.name for path in output.iterdir()) == sorted(p.name for p in found.files)
    assert {path.stem for path in found.files if path.suffix == ".png"} == set(names)


def test_pictures_are_pictures(tmp_path):
    models = {"ovq": "ovq", "unit": "ovq"}
    path = write_recall(tmp_path, "ablations", models=models, measure=lambda *_: {"accuracy": 0.5})
    drawn = {"recall": recall(read_suite(write_recall(tmp_path))).charts[0],
             "ablations": ablations(read_suite(path)).charts[0]}  # fmt: skip
    for name, chart in drawn.items():
        save_png(chart, tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_tables_have_means_spread_and_what_is_lacking(written):
    tables = (written[1] / "tables.md").read_text()
    assert "| ovq | 25% | 0.01 | 0.970 ± 0.001 (2 of 3) |" in tables
    assert "* linear_attention: 1 failed, of 4 runs; " in tables
    assert "out of memory" in tables
    assert "| recall | 10 | 0 | 1 | 1 | demo | 0, 1, 2 | 0.01, 0.001 |" in tables
    pictures = re.findall(r"\]\(([^)]+\.png)\)", tables)
    assert all((written[1] / picture).is_file() for picture in pictures)
    assert written[0].counts["another"]["done"] == 12


def test_nothing_of_the_page_is_fetched(written):
    page = (written[1] / "index.html").read_text()
    assert "default-src 'none'; script-src 'sha256-" in page
    assert "unsafe-eval" not in page
    outside = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert re.findall(r"(?:src|href)=\"(?!#)", outside) == []


@needs_chromium
def test_the_page_fits_a_phone_in_both_colours_sorts_and_chooses(written, tmp_path):
    found, output = written
    shutil.copy(output / "index.html", tmp_path)
    (tmp_path / "frame.html").write_text(FRAME)
    seen = re.search(r'id="seen">([^<]*)', browse(tmp_path / "frame.html", tmp_path, DARK))
    charts = sum(path.suffix == ".png" for path in found.files)
    dark, light = f"dark {charts} 0", f"light {charts} 0"
    up = "+".join(sorted((str(c["done"]) for c in found.counts.values()), key=int))
    down = "+".join(reversed(up.split("+")))
    assert seen is not None
    # Four lines: ours at two settings, and two of one; the first name is full attention's.
    assert seen[1] == f"{dark} {light} ascending {up} descending {down} 4 1"


@needs_chromium
def test_an_experiment_with_nothing_done_says_so(tmp_path):
    everything = [f"{m}-seed{s}" for m in ("full_attention_nope", "ovq", "linear_attention")
                  for s in range(3)]  # fmt: skip
    write_recall(tmp_path / "runs", missing=everything)
    found = report([tmp_path / "runs/recall"], tmp_path / "out")
    assert [path.name for path in found.files] == ["index.html", "tables.md"]
    page = browse(tmp_path / "out/index.html", tmp_path, LIGHT)
    assert "Nothing is measured yet." in page
    tables = (tmp_path / "out/tables.md").read_text()
    assert "| mqar |  |  |  |  | no record |" in tables
    assert "| recall |  |  |  |  | no record |" not in tables
    assert 'data-drawn="light"' in page
    assert charts_of(page) == []


def test_a_hostile_name_is_text():
    hostile = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    page = render(
        [Section(name="x", title=hostile, question=hostile)], version="0", command=hostile
    )
    assert "<img" not in page
    assert page.count("<script") == 2  # data and our own
