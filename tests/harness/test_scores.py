"""Scores by lm-eval are the model's own, from any batch size; what does not fit is refused."""

import json
import logging

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ovq.harness import TASKS_FOLDER, UntruncatedLM, evaluate_tasks, load_model, load_tasks
from ovq.layers.registry import MIXERS
from ovq.tasks.tokenization import byte_tokenizer

from .toys import byte_marks_tokenizer, make_model, requests

ODD_TEXT = "Ā ÿ\u00ff\x00\n\n  naïve “x”\t🙂Ċ"


@pytest.mark.parametrize(
    "pattern", [["sliding_window", "ovq"], *([name] for name in sorted(MIXERS))], ids="+".join
)
def test_the_batch_size_changes_no_score(pattern):
    model = make_model(pattern)
    texts = ["a", "In the", "x" * 13, "Is it?\nAnswer:"]
    pairs = [(text, end) for text in texts for end in (" no", " word")]
    scores = {}
    for size in (1, 3, 8):
        lm = HFLM(pretrained=model, tokenizer=byte_marks_tokenizer(), batch_size=size)
        scores[size] = lm.loglikelihood(requests(*pairs), disable_tqdm=True)
    own = []
    for text, end in pairs:
        ids = torch.tensor([list((text + end).encode())])
        with torch.no_grad():
            logits = model(ids).logits[0].log_softmax(-1)
        places = torch.arange(len(text) - 1, ids.shape[1] - 1)
        own.append(float(logits[places, ids[0, places + 1]].sum()))
    for size in scores:
        torch.testing.assert_close([score for score, _ in scores[size]], own, atol=1e-5, rtol=1e-5)
        assert [greedy for _, greedy in scores[size]] == [greedy for _, greedy in scores[1]]
    assert len({round(score, 3) for score in own}) == len(own)


def test_a_prompt_that_does_not_fit_is_refused_here_and_warned_about_by_lm_eval(caplog):
    model = make_model(["sliding_window", "ovq"], max_position_embeddings=16)
    lm = UntruncatedLM(model, byte_marks_tokenizer())
    (whole,) = lm.loglikelihood(requests(("x" * 14, " yes"[:3])))  # the last token is not read
    assert whole[0] < 0
    with pytest.raises(ValueError, match=r"prompts must have at most 16 tokens.* got 17"):
        lm.loglikelihood(requests(("a", "b"), ("x" * 14, " yes")))
    assert lm.tok_batch_encode(["x" * 9], left_truncate_len=9)[0].shape == (1, 9)
    with pytest.raises(ValueError, match=r"prompts must have at most 9 tokens.* got 10"):
        lm.tok_batch_encode(["x" * 10], left_truncate_len=9)
    caplog.set_level(logging.WARNING, logger="lm_eval")
    lm = HFLM(pretrained=model, tokenizer=byte_marks_tokenizer())
    lm.loglikelihood(requests(("x" * 14, " yes")), disable_tqdm=True)
    assert any("Truncating" in message for message in caplog.messages)


def test_generation_tasks_run_with_padding(run):
    model, saved = load_model(str(run))
    lm = UntruncatedLM(model, saved, batch_size=2)
    prompts = ["In", "In the beginning"]
    options = {"until": ["\n\n"], "max_gen_toks": 4}
    asked = [Instance("generate_until", {}, (text, options), 0) for text in prompts]
    alone = [lm.generate_until([one], disable_tqdm=True)[0] for one in asked]
    assert lm.generate_until(asked, disable_tqdm=True) == alone


def test_the_saved_tokenizer_is_the_tasks(run):
    saved = AutoTokenizer.from_pretrained(run / "model")
    assert saved.encode(ODD_TEXT) == list(ODD_TEXT.encode())
    assert saved.decode(saved.encode(ODD_TEXT)) == ODD_TEXT
    assert len(saved) == 256
    assert {saved.bos_token_id, saved.eos_token_id, saved.pad_token_id} == {255}


def test_a_tokenizer_without_marks_begins_with_a_line_end():
    bare = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer())
    model = make_model(["sliding_window", "ovq"])
    ((score, _),) = UntruncatedLM(model, bare).loglikelihood(requests(("", "I")))
    expected = model(torch.tensor([[10]])).logits.detach()[0, 0].log_softmax(-1)[ord("I")]
    assert score == pytest.approx(float(expected))


def test_lm_evals_own_command_line_runs_a_saved_model(run, data, monkeypatch, capsys, tmp_path):
    from lm_eval import __main__ as command
    from lm_eval import evaluator
    from lm_eval.tasks._index import TaskIndex

    build = TaskIndex.build
    ours = staticmethod(lambda paths, **options: build([p for p in paths if p == TASKS_FOLDER]))
    monkeypatch.setattr(TaskIndex, "build", ours)  # thousands of files
    monkeypatch.setattr(command, "setup_logging", lambda: None)
    monkeypatch.setattr(evaluator, "add_env_info", lambda results: None)  # seconds
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    (expected,) = evaluate_tasks(str(run), load_tasks(["arc_easy"], data), output=tmp_path / "ours")
    monkeypatch.setattr(
        "sys.argv",
        ["lm_eval", "run", "--model", "hf", "--model_args", f"pretrained={run / 'model'}",
         "--tasks", "arc_easy", "--include_path", str(TASKS_FOLDER), "--metadata", f"data={data}",
         "--device", "cpu", "--batch_size", "3", "--output_path", str(tmp_path / "theirs")],
    )  # fmt: skip
    command.cli_evaluate()
    assert "arc_easy" in capsys.readouterr().out
    (written,) = (tmp_path / "theirs").rglob("results_*.json")
    found = json.loads(written.read_text())["results"]["arc_easy"]
    for metric in ("acc", "acc_norm"):
        assert found[f"{metric},none"] == expected["metrics"][metric]
        assert found[f"{metric}_stderr,none"] == pytest.approx(
            expected["metrics"][f"{metric}_stderr"]
        )
