"""Perplexity of a text: that of one call, at every length, kept model by model."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

import ovq.perplexity as module
from ovq.conversion import Conversion, convert_to_run
from ovq.harness.results import read_results
from ovq.harness.results import table as scores_table
from ovq.loading import load_text_model
from ovq.perplexity import keep, markdown, measure, read_record, table, token_losses
from ovq.report import markdown_table
from tests.test_cli import bad_input, invoke

PATTERNS = ("full_attention", "sliding_window_sinks", "windowed_ovq")


@pytest.fixture(scope="module")
def runs(source_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for name in PATTERNS:
        plan = Conversion(pattern=name, tokens=40, num_first_tokens=2)
        convert_to_run(str(source_folder), plan, folder / name)
    return folder


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("piece", [1000, 64, 100])
def test_pieces_are_one_call(runs, name, piece, monkeypatch):
    model, _ = load_text_model(runs / name)
    ids = torch.randint(256, (201,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(ids[None]).logits[0, :-1]
    expected = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")
    monkeypatch.setattr(module, "PIECE", piece)
    seen = []
    found = token_losses(model, ids, lambda *done: seen.append(done))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert seen[-1][1] == 201


def test_what_is_measured(runs, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 16)
    model, _ = load_text_model(runs / "windowed_ovq")
    ids = torch.randint(256, (300,), generator=torch.Generator().manual_seed(0))
    found, losses = measure(model, ids, [2, 50, 200]), token_losses(model, ids[:200])
    assert found["nll"]["50"] == pytest.approx(losses[:49].mean().item(), abs=1e-6)
    assert found["nll"]["2"] == pytest.approx(losses[0].item(), abs=1e-6)
    assert found["state_bytes"]["200"] == model.state_size(200)
    assert len(found["nll_of_blocks"]) == math.ceil(199 / 16)
    assert found["layers"] == ["windowed_ovq"] * 3
    for lengths, message in (([], "rise"), ([5, 5], "rise"), ([1, 5], "rise"), ([301], "at least")):
        with pytest.raises(ValueError, match=message):
            measure(model, ids, lengths)


def test_a_table_and_its_distances():
    ours = {"nll": {"1025": 2.0}, "state_bytes": {"1025": 10}, "nll_of_blocks": [1.0, 2, 3, 2]}
    other = {"nll": {"1025": 2.5}, "state_bytes": {"1025": 9}, "nll_of_blocks": [1.5, 2, 4, 2.5]}
    record = {"lengths": [1025], "models": {"a": ours, "b": other}}
    columns, rows = table(record)
    assert columns[0] == "model"
    assert rows[0][:3] == ("a", "10", f"{math.exp(2):.2f}")
    assert rows[0][-1] == "-"
    error = torch.tensor([0.5, 0, 1, 0.5]).std().item() / 2
    assert rows[1][-1] == f"500.0 ± {1e3 * error:.1f}"
    assert markdown(record).count("\n") == 4


def test_the_command_goes_on_with_what_is_there(runs, tmp_path):
    text, output = tmp_path / "book.txt", tmp_path / "record.json"
    text.write_text("it was the best of times, it was the worst of times; " * 20)
    options = ("--file", text, "--lengths", "100,400", "-o", output)
    first = invoke("perplexity", runs / PATTERNS[0], *options)
    assert first.exit_code == 0, first.output
    both = invoke("perplexity", runs / PATTERNS[0], runs / PATTERNS[2], *options)
    assert both.stdout.count("measured before") == 1
    record = json.loads(output.read_text())
    assert [name.rsplit("/")[-1] for name in record["models"]] == [PATTERNS[0], PATTERNS[2]]
    assert output.with_suffix(".md").read_text() == markdown(record)
    other = tmp_path / "run"  # the same weights in another pattern are another model
    shutil.copytree(runs / PATTERNS[0], other)
    assert "measured before" not in invoke("perplexity", other, *options).stdout
    shutil.rmtree(other)
    shutil.copytree(runs / PATTERNS[1], other)
    assert "measured before" not in invoke("perplexity", other, *options).stdout
    assert "measured before" in invoke("perplexity", other, *options).stdout
    text.write_text("another text " * 100)
    assert "of the same text and lengths" in bad_input("perplexity", runs / PATTERNS[0], *options)
    output.write_text("{}")
    foreign = bad_input("perplexity", runs / PATTERNS[0], *options)
    assert "a file of format 'ovq-perplexity'" in foreign
    text.write_text("short")
    short = bad_input("perplexity", runs / PATTERNS[0], "--file", text, "--lengths", "100")
    assert "--lengths must be at most the 5 tokens" in short


def test_a_record_is_kept_model_by_model(tmp_path):
    path = tmp_path / "record.json"
    record = read_record(path, "a book", "text", [10])
    one = {"nll": {"10": 1.0}, "state_bytes": {"10": 8}, "nll_of_blocks": [1.0]}
    keep(path, record, "one", one)
    assert read_record(path, "a book", "text", [10])["models"] == {"one": one}
    for other in (("b", "text", [10]), ("a book", "tex", [10]), ("a book", "text", [11])):
        with pytest.raises(ValueError, match="of the same text and lengths"):
            read_record(path, *other)
    path.write_text(path.read_text()[:-20])
    with pytest.raises(ValueError, match="--output must be a whole "):
        read_record(path, "a book", "text", [10])


def test_the_table_of_the_results_is_the_records():
    folder = Path(__file__).parents[2] / "results/convert"
    record = json.loads((folder / "moby_dick.json").read_text(encoding="utf-8"))
    page = (folder / "README.md").read_text(encoding="utf-8")
    assert len(record["models"]) == 5
    assert f"<!-- from moby_dick.json -->\n{markdown(record)}<!-- end -->" in page


def test_the_scores_of_the_results_are_the_records():
    folder = Path(__file__).parents[2] / "results/convert"
    results = read_results(folder / "multiple_choice.json")
    columns, rows = scores_table(results)
    shown = markdown_table(columns[:-1], [row[:-1] for row in rows])
    page = (folder / "README.md").read_text(encoding="utf-8")
    assert f"<!-- from multiple_choice.json -->\n{shown}<!-- end -->" in page
    by_model = {name: [r["metrics"] for r in results if r["model"] == name] for name in
                ("smollm2-135m", "runs/ovq")}  # fmt: skip
    assert len(by_model["runs/ovq"]) == 7
    for source, ours in zip(*by_model.values(), strict=True):
        assert source["acc"] == pytest.approx(ours["acc"], abs=0.01)


def test_convert_from_the_command_line(source_folder, tmp_path):
    run = tmp_path / "run"
    options = ("--tokens", 40, "--first-tokens", 2, "-o", run)
    done = invoke("convert", source_folder, "--pattern", "windowed_ovq*2,full_attention", *options)
    assert done.exit_code == 0, done.output
    assert "2 windowed_ovq of 40, 1 full_attention" in done.stdout
    written = invoke("generate", run, "--prompt", "it was", "--max-new-tokens", 3)
    assert written.exit_code == 0, written.output
    assert "state:" in written.stdout
    held = bad_input("generate", run, "--held-out", 10)
    assert "must have been trained by `ovq train`" in held
    assert "pattern must hold the mixers" in bad_input(
        "convert", source_folder, "--pattern", "mamba2", "-o", tmp_path / "other"
    )
    (tmp_path / "book.txt").write_text("it was the best of times")
    state = tmp_path / "book.state"
    read = invoke("read", run, "--file", tmp_path / "book.txt", "-o", state)
    assert read.exit_code == 0, read.output
    went_on = invoke("generate", run, "--state", state, "--max-new-tokens", 3)
    assert went_on.exit_code == 0, went_on.output
