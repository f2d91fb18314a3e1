"""Items of a few words in the forms of the local files, and small models of bytes."""

import torch
from lm_eval.api.instance import Instance
from transformers import PreTrainedTokenizerFast

from ovq.models import OVQConfig, OVQForCausalLM
from ovq.tasks.tokenization import END_OF_TEXT, byte_tokenizer, with_end_of_text

QUESTIONS = [
    {"query": "Question: What is wet?", "choices": ["sand", "the sea", "dust", "ash"], "gold": 1},
    {"query": "Question: Where do owls sleep?", "choices": ["in trees", "a", "b", "c"], "gold": 0},
    {"query": "Question: A bell is", "choices": ["soft", "loud.", "sweet", "far away"], "gold": 3},
]
ITEMS = {
    "arc_easy": QUESTIONS,
    "arc_challenge": QUESTIONS[::-1],
    "piqa": [
        {"query": "Question: dry a cup\n", "choices": ["Use a towel.", "Use  soup."], "gold": 0},
        {"query": "Question: open a jar?\n", "choices": ["Twist", "Sing to it"], "gold": 1},
        {"query": "Question: fold paper\n", "choices": ["Crease it", "Soak it"], "gold": 0},
    ],
    "openbook_qa": [{**item, "query": item["query"][10:]} for item in QUESTIONS],
    "boolq": [
        {"query": "Passage: Ice.\nQuestion: is ice hot?", "choices": ["no", "yes"], "gold": 0},
        {"query": "Passage: A\nQuestion: b.\nQuestion: is c?", "choices": ["no", "yes"], "gold": 1},
    ],
    "winogrande": [
        {
            "context_options": ["Ann beat Bo as Ann", "Ann beat Bo as Bo"],
            "continuation": "was quick.",
            "gold": 0,
        },
        {
            "context_options": ["A mug hit a cup and the mug", "A mug hit a cup and the cup"],
            "continuation": "'s handle broke.",
            "gold": 1,
        },
    ],
    "lambada_openai": [
        {"context": "“Come,” she said to Tom,\n“sit by me,” and so he", "continuation": "sat"},
        {"context": "He left. \nShe stayed.", "continuation": "\n\nNobody"},
    ],
    "hellaswag": [
        {
            "ind": index,
            "activity_label": f"Baking {index}",
            "ctx_a": "A cook [header] opens an oven.",
            "ctx_b": "the cook",
            "ctx": "A cook [header] opens an oven. the cook",
            "endings": ["takes [step] out  bread.", "sings. [title] Next", "sleeps.", "swims."],
            "label": str(index),
            "split": "val",
            "source_id": "toy",
        }
        for index in range(2)
    ],
}  # fmt: skip


def byte_marks_tokenizer():
    names = dict.fromkeys(("bos_token", "eos_token", "pad_token"), END_OF_TEXT)
    return PreTrainedTokenizerFast(tokenizer_object=with_end_of_text(byte_tokenizer()), **names)


def make_model(pattern, **changes):
    torch.manual_seed(0)
    fields = {
        "vocab_size": 256, "hidden_size": 32, "intermediate_size": 32,
        "num_hidden_layers": len(pattern),
        "num_attention_heads": 4, "num_key_value_heads": 2, "layer_pattern": pattern,
        "window_size": 5, "dictionary": {"num_centroids": 6, "chunk_size": 4}, "num_codes": 7,
        "block_size": 3, "initializer_range": 0.3,
    }  # fmt: skip
    return OVQForCausalLM(OVQConfig(**(fields | changes))).eval()


def requests(*pairs):
    return [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(pairs)]
