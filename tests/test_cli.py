"""The commands: their names and options, and that bad input is one line and exit code 2."""

import importlib
import io
import json
import math
import re
import runpy
import sys

import pytest
from rich.console import Console
from typer.testing import CliRunner

from ovq.cli import app, shared
from ovq.cli import run as run_command
from ovq.recipes import RECIPES, make_run
from ovq.report import report

# The flags are an interface: a change here is a change for users.
OPTIONS = {
    "build": {"--verbose"},
    "bench": {"--output", "--quick", "--threads"},
    "recipes": set(),
    "train": {"--output", "--seed", "--steps", "--source", "--threads"},
    "evaluate": {
        "--lengths", "--num-centroids", "--num-sequences", "--tasks", "--data", "--limit",
        "--batch-size", "--output", "--again", "--threads",
    },
    "generate": {
        "--prompt", "--prompt-file", "--held-out", "--max-new-tokens", "--temperature", "--top-k",
        "--seed", "--state", "--threads",
    },
    "read": {"--file", "--output", "--state", "--max-tokens", "--record", "--threads"},
    "convert": {
        "--pattern", "--output", "--tokens", "--first-tokens", "--slots", "--distance",
        "--distill", "--distill-steps", "--distill-length", "--threads",
    },
    "perplexity": {"--file", "--lengths", "--output", "--threads"},
    "inspect": {"--text", "--output", "--max-tokens", "--layer", "--threads"},
    "fidelity": {"--output", "--model", "--text", "--quick", "--threads"},
    "compare": {
        "--output", "--mixers", "--lengths", "--pure", "--budget", "--quick", "--threads",
    },
    "experiment": {"--output", "--scale", "--quick", "--only", "--list", "--threads"},
    "report": {"--output"},
}  # fmt: skip


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


class Interrupt:
    """A finder of modules that is interrupted at one of them.

    With ``reported`` that is said as transformers says what stops its lazy imports.
    """

    def __init__(self, module, reported=False):
        self.module, self.reported = module, reported

    def find_spec(self, name, path=None, target=None):
        if name != self.module:
            return
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            if self.reported:
                raise ModuleNotFoundError("Could not import module 'Trainer'") from error
            raise


def bad_input(*arguments):
    """The one line that a command with bad input writes."""
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    return lines[0]


def test_commands_and_options_are_frozen():
    import typer

    command = typer.main.get_command(app)
    found = {
        name: {o for p in sub.params for o in p.opts if o.startswith("--") and o != "--help"}
        for name, sub in command.commands.items()
    }
    assert found == OPTIONS


def test_recipes_lists_every_recipe():
    result = invoke("recipes")
    assert result.exit_code == 0
    assert all(name in result.stdout for name in RECIPES)


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_recipe_is_a_run_of_its_own_name(name):
    config = make_run(name, seed=3, steps=5)
    assert config.name == name
    assert (config.training.seed, config.training.num_steps) == (3, 5)
    assert type(config).from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_unknown_recipe():
    line = bad_input("train", "nonsense")
    assert "RECIPE" in line
    assert all(name in line for name in RECIPES)


def test_missing_and_empty_text_folders(tmp_path):
    output = tmp_path / "run"
    for source in (tmp_path / "nowhere", tmp_path):
        line = bad_input("train", "demo-book", "--source", source, "--output", output)
        assert str(source) in line
    assert not output.exists()


def test_a_file_that_is_not_utf8(tmp_path):
    (tmp_path / "book.txt").write_bytes(b"caf\xe9 " * 100)
    output = tmp_path / "run"
    assert "book.txt" in bad_input("train", "demo-book", "--source", tmp_path, "-o", output)
    assert not output.exists()


def test_source_with_a_recipe_that_reads_none(tmp_path):
    assert "--source" in bad_input("train", "demo-recall-ovq", "--source", tmp_path)


@pytest.mark.parametrize("command", ["evaluate", "report"])
def test_a_folder_that_is_no_run(tmp_path, command):
    line = bad_input(command, tmp_path)
    assert "RUN must be a run folder" in line
    assert str(tmp_path) in line
    assert "RUN must be" in bad_input("generate", tmp_path, "--prompt", "x")


def test_exactly_one_prompt(tmp_path):
    assert "exactly one of" in bad_input("generate", tmp_path)
    assert "exactly one of" in bad_input("generate", tmp_path, "--prompt", "x", "--held-out", "3")


def test_lengths_must_be_numbers(tmp_path):
    assert "lengths must be whole numbers" in bad_input("evaluate", tmp_path, "--lengths", "64,x")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run folder made by the commands."""
    folder = tmp_path_factory.mktemp("runs") / "recall"
    result = invoke("train", "demo-recall-ovq", "--steps", "2", "-o", folder)
    assert result.exit_code == 0, result.output
    result = invoke(
        "evaluate", folder, "--lengths", "128,256", "--num-centroids", "8,T/4",
        "--num-sequences", "2",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "256" in result.stdout
    return folder


def test_train_evaluate_generate_report(run, tmp_path):
    result = invoke("generate", run, "--prompt", "f1 f2 k3 v4 ? k3", "--max-new-tokens", "2")
    assert result.exit_code == 0, result.output
    assert "state:" in result.stdout
    result = invoke("report", run, "-o", tmp_path)
    assert result.exit_code == 0, result.output
    table = (tmp_path / "table.md").read_text()
    assert table.count("| demo-recall-ovq |") == 4
    assert (tmp_path / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    assert [row["length"] for row in report([run], tmp_path).rows] == [128, 128, 256, 256]


def test_an_evaluation_says_what_it_does_not_measure_again(run):
    options = ("--lengths", "128", "--num-centroids", "8,T/2", "--num-sequences", "2")
    result = invoke("evaluate", run, f"{run}/", *options)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("1 of 2 settings were measured before") == 1
    assert "measured before" not in invoke("evaluate", run, *options, "--again").stdout


def test_an_output_that_cannot_be_written_fails_before_the_work(run, tmp_path, monkeypatch):
    def work(*arguments, **options):
        pytest.fail("the work began")

    for name in ("loading.load_run", "benchmark.benchmark", "train.make_model"):
        monkeypatch.setattr(f"ovq.{name}", work)
    file = tmp_path / "file"
    file.write_text("precious")
    for output in (file, file / "below"):
        for command in (["train", "demo-recall-ovq"], ["bench"], ["report", run]):
            line = bad_input(*command, "-o", output)
            assert line.startswith(f"ovq: --output must be a folder, got {output}"), line
    line = bad_input("inspect", run, "--text", file, "-o", tmp_path)
    assert line == f"ovq: --output must be a file, got the folder {tmp_path}"
    assert file.read_text() == "precious"


@pytest.fixture
def text(tmp_path):
    """A file that recall runs can read."""
    path = tmp_path / "pairs.txt"
    path.write_text("f1 f2 k3 v4 f5 f6 k7 v8 f9 ? k3")
    return path


def test_read_and_go_on(run, text, tmp_path):
    state, record = tmp_path / "pairs.state", tmp_path / "record.json"
    read = ("read", run, "--file", text, "-o", state)
    result = invoke(*read, "--max-tokens", "9", "--record", record)
    assert result.exit_code == 0, result.output
    assert "9 tokens read in" in result.stdout
    assert json.loads(record.read_text())["file_bytes"] == state.stat().st_size
    for prompt in ([], ["--prompt", "? k7"]):
        result = invoke("generate", run, "--state", state, *prompt, "--max-new-tokens", "2")
        assert result.exit_code == 0, result.output
        assert "9 tokens of pairs.txt" in result.stdout
        assert f"after the {9 + 2 * bool(prompt)} tokens in all" in result.stdout
    result = invoke(*read[:-1], tmp_path / "both.state", "--state", state)
    assert result.exit_code == 0, result.output
    assert "after 20 tokens" in result.stdout


def test_an_interrupted_read_goes_on(run, text, tmp_path, monkeypatch):
    import ovq.reading

    def interrupted(model, ids, reading, piece):
        yield next(ovq.reading.read_pieces(model, ids, reading, 4))
        raise KeyboardInterrupt

    command = ("read", run, "--file", text, "-o", tmp_path / "pairs.state")
    monkeypatch.setattr(ovq.reading, "read_pieces", ovq.reading.read, raising=False)
    monkeypatch.setattr(ovq.reading, "read", interrupted)
    result = invoke(*command)
    assert result.exit_code == 130
    assert "interrupted at token 4 of 11: the same command goes on" in result.stdout
    monkeypatch.undo()
    result = invoke(*command)
    assert result.exit_code == 0, result.output
    assert "7 tokens read in" in result.stdout


def test_what_cannot_be_read(run, text, tmp_path):
    state, empty, latin = (tmp_path / name for name in ("a.state", "empty.txt", "latin.txt"))
    empty.write_text("")
    latin.write_bytes(b"caf\xe9")

    def line(file=text, output=state, *options):
        return bad_input("read", run, "--file", file, "-o", output, *options)

    assert "nowhere.txt" in line(tmp_path / "nowhere.txt")
    assert "file must be UTF-8" in line(latin)
    assert "text must hold at least one token" in line(empty)
    assert "--output must be a new file or a state file" in line(text, text)
    assert "--output must be a file, got the folder" in line(text, tmp_path)
    assert "--output must be another file than --state" in line(text, state, "--state", state)
    assert "path must be a whole safetensors file" in line(text, state, "--state", text)
    assert "path must" in bad_input("generate", run, "--state", text)
    assert not state.exists()


def test_a_prompt_with_tokens_the_vocabulary_lacks(run):
    line = bad_input("generate", run, "--prompt", "k3 hello")
    assert "hello" in line


def test_a_prompt_file_that_is_not_utf8(run, tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_bytes(b"\xff")
    assert "prompt_file must be UTF-8" in bad_input("generate", run, "--prompt-file", path)


def test_a_folder_of_another_configuration(run):
    line = bad_input("train", "demo-recall-ovq", "--steps", "3", "-o", run)
    assert "training.num_steps = 2, not 3" in line


def test_a_run_not_evaluated_cannot_be_reported(run, tmp_path):
    content = json.loads((run / "run.json").read_text())
    del content["evaluation"]
    (tmp_path / "run.json").write_text(json.dumps(content))
    assert "ovq evaluate" in bad_input("report", tmp_path, "-o", tmp_path / "report")
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["nonsense"], "nonsense"),
        (["train"], "RECIPE"),
        (["generate", "x", "--prompt", "y", "--max-new-tokens", "0"], "--max-new-tokens"),
        (["evaluate", "x", "--num-sequences", "many"], "--num-sequences"),
        (["report", "x", "--frobnicate"], "--frobnicate"),
    ],
)
def test_wrong_usage_is_one_line(arguments, named, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["ovq", *arguments])
    with pytest.raises(SystemExit) as stopped:
        run_command()
    assert stopped.value.code == 2
    line = capsys.readouterr().err.strip()
    assert named in line
    assert "\n" not in line


@pytest.mark.parametrize("reported", [False, True])
@pytest.mark.parametrize("module", ["ovq.recipes", "ovq.train", "ovq.run_config", "transformers"])
def test_an_interrupt_while_a_command_imports_is_one_line(module, reported, monkeypatch, capsys):
    for name in [name for name in sys.modules if f"{name}.".startswith(f"{module}.")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("ovq.recipes", "ovq.train", "ovq.run_config"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupt(module, reported), *sys.meta_path])
    monkeypatch.setattr("sys.argv", ["ovq", "train", "demo-recall-ovq"])
    with pytest.raises(SystemExit) as stopped:
        run_command()
    assert stopped.value.code == 130
    assert capsys.readouterr().err == "ovq: interrupted\n"


def test_an_interrupt_while_the_command_line_itself_imports_is_one_line(monkeypatch, capsys):
    for name in [name for name in sys.modules if f"{name}.".startswith("typer.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Interrupt("typer"), *sys.meta_path])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(shared.__file__)
    assert stopped.value.code == 130
    assert capsys.readouterr().err == "ovq: interrupted\n"


def test_fidelity_takes_a_model_and_a_text_together_and_reads_the_text_first(tmp_path):
    folder = tmp_path / "out"
    assert "given together" in bad_input("fidelity", "--model", "none", "-o", folder)
    missing = bad_input(
        "fidelity", "--model", "none", "--text", tmp_path / "no.txt", "-o", folder
    )  # fmt: skip
    assert "no.txt" in missing


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_time_left_is_whole_on_narrow_lines(monkeypatch, width):
    page = io.StringIO()
    monkeypatch.setattr(shared, "console", Console(file=page, width=width))
    with shared.progress_bar("recall, minutes", "{task.fields[what]}", "{task.fields[loss]}") as go:
        go(0, 40, what="", loss="")
        go(8, 40, what="recall/full_attention_nope-lr0.003-seed2 step 606 of 1600", loss="0.26")
    (line,) = page.getvalue().splitlines()
    assert len(line) <= width
    assert re.search(r" 8/40 .* \d:\d\d:\d\d left (\d|-):(\d\d|--):(\d\d|--)$", line.rstrip())


@pytest.mark.parametrize(("total", "steps"), [(0.17, 1000), (1000, 1000), (7, 7), (40.0, 3000)])
def test_output_to_a_file_has_a_line_at_the_first_step_and_at_every_tenth(
    monkeypatch, total, steps
):
    page = io.StringIO()
    monkeypatch.setattr(shared, "console", Console(file=page, width=120))
    told = []
    with shared.progress_bar("minutes", "{task.fields[what]}") as update:
        for step in range(steps + 1):
            done = step * total // steps if isinstance(total, int) else step / steps * total
            update(done, total, what=f"step {step} of")
            if len(page.getvalue().splitlines()) > len(told):
                told.append(step)
    assert told[0] == 1
    tenths = sorted({1, *(math.ceil(steps * tenth / 10) for tenth in range(1, 11))})
    assert told == pytest.approx(tenths, abs=1)  # 0.3 * 10 is less than 3
    assert told[-1] == steps


def test_no_part_of_a_name_is_markup_or_broken_off(monkeypatch):
    page = io.StringIO()
    monkeypatch.setattr(shared, "console", Console(file=page, width=60))
    name = "runs/[red]" + "x" * 80 + "[/blue]"
    shared.say(f"{name}: done")
    shared.print_table(("run", "loss"), [("[red]a[/red]", "1")])
    with shared.progress_bar("[b]c", "{task.fields[what]}") as update:
        update(0, 2, what="")
        update(1, 2, what="[d]")
    said, _, row, progress = page.getvalue().splitlines()
    assert said == f"{name}: done"
    assert row.split() == ["[red]a[/red]", "1"]
    assert "[b]c" in progress
    assert "[d]" in progress


def test_counts_of_whole_things_are_whole_and_minutes_have_a_tenth(monkeypatch):
    page = io.StringIO()
    monkeypatch.setattr(shared, "console", Console(file=page, width=120))
    for done, total in ((1, 2), (0.25, 0.5)):
        with shared.progress_bar("x") as update:
            update(0, total)
            update(done, total)
    first, second = page.getvalue().splitlines()
    assert " 1/2 " in first
    assert " 0.2/0.5 " in second


def measure_nothing(*arguments):
    pytest.fail("measured before the output was looked at")


MEASURED = {
    "bench": ("ovq.benchmark", "benchmark"),
    "compare": ("ovq.comparison", "compare"),
    "fidelity": ("ovq.fidelity.measure", "measure"),
}


@pytest.mark.parametrize("command", ["bench", "compare", "fidelity"])
@pytest.mark.parametrize("name", ["table.md", "png", "json"])
def test_no_file_of_something_else_is_written_over(tmp_path, monkeypatch, command, name):
    name = name if name == "table.md" else f"{command}.{name}"
    (tmp_path / name).write_text('{"precious": 1}')
    module, function = MEASURED[command]
    monkeypatch.setattr(importlib.import_module(module), function, measure_nothing)
    message = bad_input(command, "--quick", "-o", tmp_path)
    assert message.startswith("ovq: --output must be")
    assert name in message
    assert (tmp_path / name).read_text() == '{"precious": 1}'
    assert len(list(tmp_path.iterdir())) == 1


def test_no_page_or_record_takes_the_place_of_something_else(tmp_path):
    text = tmp_path / "book.txt"
    text.write_text("precious")
    line = bad_input("inspect", tmp_path, "--text", text, "-o", text)
    assert "--output must be a new file or such a page" in line
    line = bad_input("read", tmp_path, "--file", text, "-o", tmp_path / "s", "--record", text)
    assert "--record must be a new file or such a record" in line
    assert text.read_text() == "precious"


def test_the_list_of_experiments_can_be_of_some_models(tmp_path):
    found = invoke("experiment", "recall", "--list", "--only", "ovq,mamba2", "-o", tmp_path)
    assert found.exit_code == 0
    named = re.findall(r"^recall: (\w+) ", found.stdout, re.MULTILINE)
    assert named == ["ovq", "mamba2"]
    assert "minutes left" not in found.stdout


@pytest.mark.parametrize("only", [",,,", "ovq,none"])
def test_no_model_or_an_unknown_one_is_not_all_of_them(tmp_path, only):
    line = bad_input("experiment", "recall", "--list", "--only", only, "-o", tmp_path)
    assert line.startswith("ovq: --only must name some of full_attention_nope, ovq,")


def test_a_file_is_no_folder_of_experiments(tmp_path):
    (tmp_path / "file").write_text("")
    line = bad_input("experiment", "recall", "--list", "-o", tmp_path / "file")
    assert line.startswith("ovq: --output must be a folder")
