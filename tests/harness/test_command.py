"""Results are kept and not measured twice; `ovq evaluate --tasks` prints them or one line."""

import json
import re
import shutil
from pathlib import Path

import datasets.config
import huggingface_hub.constants
import lm_eval.tasks
import pytest
from typer.testing import CliRunner

import ovq.harness.measure
from ovq.cli import app
from ovq.harness import TASKS_FOLDER, evaluate_tasks, load_tasks
from ovq.harness.items import local_names
from ovq.runs import read_run, write_run
from ovq.train import train

from ..tiny import tiny_run

LM_EVAL_TASKS = Path(lm_eval.tasks.__file__).parent


@pytest.fixture
def measured(monkeypatch):
    """The tasks that are measured, in order."""
    done, measure_task = [], ovq.harness.measure.measure_task

    def counted(model, tokenizer, task, **options):
        done.append(task.task_name)
        return measure_task(model, tokenizer, task, **options)

    monkeypatch.setattr(ovq.harness.measure, "measure_task", counted)
    return done


def test_results_stand_in_the_run_file_and_nothing_is_measured_twice(run, data, measured, tmp_path):
    folder = shutil.copytree(run, tmp_path / "run")
    tasks = load_tasks(["piqa", "lambada_openai"], data)
    told, seen = [], []

    class KilledError(BaseException):
        pass

    def kill(task, done, total):
        if task == "lambada_openai":
            raise KilledError

    with pytest.raises(KilledError):
        evaluate_tasks(str(folder), tasks, progress=kill)
    results = evaluate_tasks(
        str(folder), tasks, progress=lambda *where: seen.append(where),
        known=lambda *numbers: told.append(numbers),
    )  # fmt: skip
    assert measured == ["piqa", "lambada_openai", "lambada_openai"]
    assert told == [(1, 2)]
    assert seen == [("lambada_openai", 2, 2)]
    kept = read_run(folder)["harness"]["results"]
    assert [{"model": str(folder)} | one for one in kept] == sorted(
        results, key=lambda one: one["task"]
    )
    piqa = results[0]
    assert (piqa["num_items"], piqa["limit"], piqa["items"]["file"]) == (3, None, "piqa.jsonl")
    assert piqa["metrics"].keys() == {"acc", "acc_stderr", "acc_norm", "acc_norm_stderr"}
    assert results[1]["metrics"].keys() == {"perplexity", "acc", "acc_stderr"}
    del measured[:]
    evaluate_tasks(str(folder), tasks, limit=2)
    evaluate_tasks(str(folder), tasks, limit=2, batch_size=1)
    assert measured == ["piqa", "lambada_openai"]
    evaluate_tasks(str(folder), tasks, limit=2, again=True)
    assert measured == ["piqa", "lambada_openai"] * 2


def test_other_items_or_weights_are_measured_again(llama, data, measured, tmp_path):
    items, model, output = tmp_path / "items", tmp_path / "model", tmp_path / "scores.json"
    shutil.copytree(data, items)
    shutil.copytree(llama, model)
    for _ in range(2):
        evaluate_tasks(str(model), load_tasks(["piqa"], items), output=output)
    assert measured == ["piqa"]
    (items / "piqa.jsonl").write_text((items / "piqa.jsonl").read_text().replace("cup", "mug"))
    evaluate_tasks(str(model), load_tasks(["piqa"], items), output=output)
    assert measured == ["piqa"] * 2
    (model / "model.safetensors").write_bytes(
        (llama / "model.safetensors").read_bytes()[:-4] + b"1234"
    )
    evaluate_tasks(str(model), load_tasks(["piqa"], items), output=output)
    assert measured == ["piqa"] * 3
    assert len(json.loads(output.read_text())["results"]) == 1


def test_the_command_compares_a_run_and_another_model(run, llama, data, tmp_path):
    output = tmp_path / "scores.json"
    arguments = ["evaluate", run, f"{run}/", llama, "--tasks", "piqa, winogrande", "--data", data,
                 "--limit", 2, "--batch-size", 3, "-o", output]  # fmt: skip
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    lines = [line for line in result.stdout.splitlines() if " ± " in line]
    assert [("piqa" in line, "winogrande" in line) for line in lines] == [(1, 0), (0, 1)] * 2
    content = json.loads(output.read_text())
    assert {one["model"] for one in content["results"]} == {str(run), str(llama)}
    assert len(content["results"]) == 4
    assert "harness" not in read_run(run)


def test_a_run_that_was_not_trained_here_keeps_its_scores_too(llama, data, measured, tmp_path):
    shutil.copytree(llama, tmp_path / "model")
    write_run(tmp_path, {"config": {"source": "llama"}, "status": "done"})
    for _ in range(2):
        (result,) = evaluate_tasks(str(tmp_path), load_tasks(["winogrande"], data))
    assert measured == ["winogrande"]
    (kept,) = read_run(tmp_path)["harness"]["results"]
    assert {"model": str(tmp_path)} | kept == result


def bad_input(*arguments):
    result = CliRunner().invoke(app, ["evaluate", *(str(argument) for argument in arguments)])
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.strip().splitlines()
    return line


def test_bad_input_is_one_line_that_names_the_rule(run, data, tmp_path, monkeypatch):
    recall = tmp_path / "recall"
    train(tiny_run(num_steps=1), recall)
    assert "must have a tokenizer" in bad_input(recall, "--tasks", "piqa", "--data", data)
    assert "piqa.jsonl" in bad_input(run, "--tasks", "piqa", "--data", tmp_path)
    assert "RUN must be a run" in bad_input(tmp_path, "--tasks", "piqa", "--data", data)
    (tmp_path / "piqa.jsonl").write_text('{"query": "x"}\n[1]\n')
    assert "line 2" in bad_input(run, "--tasks", "piqa", "--data", tmp_path)
    assert "--lengths" in bad_input(run, "--tasks", "piqa", "--lengths", "8")
    assert "--tasks only" in bad_input(run, "--limit", "8")
    other = tmp_path / "other.json"
    other.write_text("{}")
    options = ("--tasks", "piqa", "--data", data)
    assert "format" in bad_input(run, *options, "-o", other)
    assert other.read_text() == "{}"
    monkeypatch.setattr("ovq.harness.items.TaskManager.task_index", {})
    monkeypatch.setattr("lm_eval.tasks._index.TaskIndex.build", lambda self, paths: {})
    assert "known to lm-eval, got 'nonsense'" in bad_input(run, "--tasks", "nonsense")


def test_a_hub_out_of_reach_is_one_line_that_says_what_to_do(run, data, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    line = bad_input(run, "--tasks", LM_EVAL_TASKS / "hellaswag/hellaswag.yaml")
    assert "HF_HUB_OFFLINE" in line
    assert "--data" in line
    options = ("--tasks", TASKS_FOLDER / "piqa.yaml", "--data", data)
    assert "got no-such/model: " in bad_input("no-such/model", *options)


@pytest.mark.plain
def test_the_code_of_the_page_runs(run, data, tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[2] / "docs/evaluation.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    shutil.copytree(run, tmp_path / "runs/demo-book")
    shutil.copytree(data, tmp_path / "items")
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "docs/evaluation.md", "exec"), {"__name__": "page"})
    assert "acc_norm" in capsys.readouterr().out
    assert [name for name in local_names() if f"`{name}`" not in page] == []
