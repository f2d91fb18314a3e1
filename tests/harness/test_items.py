"""The prompts and metrics of local items are those of lm-eval's own task files."""

from pathlib import Path

import datasets
import lm_eval.tasks
import pytest
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks._yaml_loader import load_yaml

from ovq.harness import load_tasks
from ovq.harness.items import local_names

from .toys import ITEMS

LM_EVAL_TASKS = Path(lm_eval.tasks.__file__).parent


def of_arc(item):
    labels = [str(number) for number in range(1, len(item["choices"]) + 1)]
    choices = {"text": item["choices"], "label": labels}
    return {"question": item["query"][10:], "choices": choices, "answerKey": labels[item["gold"]]}


def of_piqa(item):
    first, second = item["choices"]
    return {"goal": item["query"][10:-1], "sol1": first, "sol2": second, "label": item["gold"]}


def of_openbookqa(item):
    return of_arc(item) | {"question_stem": item["query"]}


def of_boolq(item):
    passage, _, question = item["query"][9:-1].rpartition("\nQuestion: ")
    return {"passage": passage, "question": question, "label": item["gold"]}


def of_winogrande(item):
    first, second = item["context_options"]
    start = next(i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    start = first.rindex(" ", 0, start + 1) + 1
    return {
        "sentence": f"{first[:start]}_ {item['continuation']}",
        "option1": first[start:],
        "option2": second[start:],
        "answer": str(item["gold"] + 1),
    }


def of_lambada(item):
    return {"text": f"{item['context']} {item['continuation']}"}


# lm-eval's own file of each task, and an item in the form that it asks for.
OWN_TASKS = {
    "arc_easy": ("arc/arc_easy.yaml", of_arc),
    "arc_challenge": ("arc/arc_challenge.yaml", of_arc),
    "piqa": ("piqa/piqa.yaml", of_piqa),
    "openbookqa": ("openbookqa/openbookqa.yaml", of_openbookqa),
    "boolq": ("super_glue/boolq/default.yaml", of_boolq),
    "winogrande": ("winogrande/default.yaml", of_winogrande),
    "lambada_openai": ("lambada/lambada_openai.yaml", of_lambada),
    "hellaswag": ("hellaswag/hellaswag.yaml", dict),
}


def prompts_of(task):
    task.build_all_requests()
    return [instance.args for instance in task.instances]


def test_every_local_task_has_lm_evals_own_beside_it():
    assert sorted(OWN_TASKS) == local_names()


@pytest.mark.parametrize("name", sorted(OWN_TASKS))
def test_prompts_and_metrics_are_lm_evals(name, data):
    (ours,) = load_tasks([name], data).values()
    path, form = OWN_TASKS[name]
    items = [form(item) for item in ITEMS["openbook_qa" if name == "openbookqa" else name]]
    given = datasets.Dataset.from_list(items)
    config = load_yaml(LM_EVAL_TASKS / path) | {
        "custom_dataset": lambda **options: dict.fromkeys(("train", "validation", "test"), given)
    }
    for key in ("tag", "include"):
        config.pop(key, None)
    own = ConfigurableTask(config=config)
    assert prompts_of(ours) == prompts_of(own)
    assert len(set(prompts_of(ours))) == len(prompts_of(ours))
    assert ours.aggregation() == own.aggregation()
    assert ours.higher_is_better() == own.higher_is_better()
    assert own.VERSION == ours.VERSION
    for ours_doc, own_doc in zip(ours.eval_docs, own.eval_docs, strict=True):
        assert ours.doc_to_target(ours_doc) == own.doc_to_target(own_doc)
        answers = [(-1.0 * len(args[1]), False) for args in prompts_of(ours)][:4]
        if ours.config.doc_to_choice:
            answers = answers[: len(ours.doc_to_choice(ours_doc))]
        scored = ours.process_results(ours_doc, answers)
        assert scored == own.process_results(own_doc, answers)
        assert scored.keys() == ours.aggregation().keys()
