"""Sources, runs and records that are damaged, changed or someone else's are errors of one line."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ovq.conversion import Conversion, convert, convert_to_run, converted_config, parse_pattern
from ovq.fidelity.pretrained import _check_gguf, load_pretrained
from ovq.loading import first_tokens, load_text_model, save_model
from ovq.models import OVQForCausalLM
from ovq.perplexity import keep, read_record, table
from ovq.runs import damage_refused
from ovq.tasks.tokenization import END_OF_TEXT
from tests.conversion.conftest import make_source
from tests.test_cli import bad_input, invoke

PLAN = Conversion(pattern="sliding_window_sinks:20,windowed_ovq:40", num_first_tokens=2)


@pytest.fixture
def source(source_folder, tmp_path):
    return Path(shutil.copytree(source_folder, tmp_path / "source"))


@pytest.fixture(scope="module")
def run_once(source_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("damage") / "run"
    convert_to_run(str(source_folder), PLAN, folder)
    return folder


@pytest.fixture
def run(run_once, tmp_path):
    return Path(shutil.copytree(run_once, tmp_path / "run"))


def change_json(path: Path, **fields) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change_weights(folder: Path, change: Callable[[dict], None]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


# --- sources ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: change_json(f / "config.json", hidden_size="32"), "that transformers loads"),
        (lambda f: change_json(f / "config.json", rms_norm_eps="1e-5"), "that transformers loads"),
        (lambda f: (f / "tokenizer_config.json").write_text("[]"), "that transformers loads"),
        (lambda f: (f / "model.safetensors").write_bytes(b""), "that transformers loads"),
        (
            lambda f: change_weights(f, lambda t: t.update({"model.norm.bias": torch.ones(32)})),
            "no others, got .* with unexpected model.norm.bias",
        ),
        (
            lambda f: change_weights(f, lambda t: t.pop("model.norm.weight")),
            "with missing model.norm.weight",
        ),
        (
            lambda f: change_weights(f, lambda t: t.update({"model.norm.weight": torch.ones(5)})),
            "with mismatched .*model.norm.weight",
        ),
    ],
)
def test_a_damaged_source_is_refused(source, damage, message):
    load_pretrained(str(source))
    damage(source)
    with pytest.raises(ValueError, match=message):
        load_pretrained(str(source))


@pytest.mark.plain
def test_weights_that_end_before_they_begin_are_refused(source):
    (source / "model.safetensors").unlink()
    (source / "pytorch_model.bin").write_bytes(b"")  # an EOFError, which is no OSError
    with pytest.raises(ValueError, match="that transformers loads"):
        load_pretrained(str(source))
    with pytest.raises(ValueError, match=r"must be a folder, .* got '/no/such/folder'"):
        load_pretrained("/no/such/folder")


@pytest.mark.plain
def test_what_libraries_raise_is_one_line_but_for_missing_packages():
    for error in (EOFError(), AssertionError("a\nb"), Exception("odd")):
        expected = pytest.raises(ValueError, match=r"^x must be whole: (EOFError|a b|odd)$")
        with expected, damage_refused("x must be whole"):
            raise error
    with pytest.raises(ImportError), damage_refused("x must be whole"):
        raise ImportError("sentencepiece")


@pytest.mark.plain
def test_files_of_which_transformers_leaves_parts_out_are_refused(tmp_path):
    gguf = pytest.importorskip("gguf")

    def write(name, scaling=None, tensor="blk.0.attn_q.weight"):
        writer = gguf.GGUFWriter(tmp_path / name, "llama")
        if scaling is not None:
            writer.add_rope_scaling_type(scaling)
        writer.add_tensor(tensor, torch.ones(2, 2).numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return tmp_path / name

    _check_gguf(write("plain.gguf"))
    _check_gguf(write("none.gguf", scaling=gguf.RopeScalingType.NONE))
    with pytest.raises(ValueError, match=r"rope.scaling.type 'linear'"):
        _check_gguf(write("linear.gguf", scaling=gguf.RopeScalingType.LINEAR))
    for name in ("rope_freqs.weight", "blk.0.attn_q.bias"):
        with pytest.raises(ValueError, match=f"leaves {name} out"):
            _check_gguf(write("left.gguf", tensor=name))


def test_ends_of_texts_are_told_or_refused(source, tmp_path):
    change_json(source / "config.json", eos_token_id=[1, 2])
    convert_to_run(str(source), PLAN, tmp_path / "run")
    assert load_text_model(tmp_path / "run")[0].config.eos_token_id == [1, 2]
    change_json(source / "config.json", bos_token_id=[1, 2])
    with pytest.raises(ValueError, match=r"^(model|SOURCE) must .*bos_token_id"):
        convert_to_run(str(source), PLAN, tmp_path / "other")


def test_a_head_of_its_own_stays_one_whatever_the_configuration_says():
    source = make_source(tie_word_embeddings=False)
    source.config.tie_word_embeddings = True
    config = converted_config(source.config, parse_pattern("full_attention", 1))
    model, ids = convert(source, config), torch.arange(9)[None]
    assert not model.config.tie_word_embeddings
    torch.testing.assert_close(model(ids).logits, source(ids).logits, atol=1e-4, rtol=1e-4)


def test_how_the_source_generates_is_kept():
    source = make_source()
    source.generation_config.update(eos_token_id=[5, 6], do_sample=True, top_k=7)
    model = convert(source, converted_config(source.config, parse_pattern("full_attention", 1)))
    assert model.generation_config.to_dict() == source.generation_config.to_dict()
    assert model.generation_config is not source.generation_config


# --- folders ---------------------------------------------------------------------------------


def test_a_folder_of_someone_elses_is_left_alone(source, tmp_path):
    (tmp_path / "out").mkdir()
    source = source.rename(tmp_path / "out" / "model")
    files = sorted(path.name for path in source.iterdir())
    with pytest.raises(ValueError, match="--output must be a new or empty folder or a run"):
        convert_to_run(str(source), PLAN, tmp_path / "out")
    assert sorted(path.name for path in source.iterdir()) == files


def test_what_a_killed_process_leaves_is_no_hindrance(source, run, tmp_path):
    wanted = load_text_model(run)[0].state_dict()
    (run / "run.json").rename(run / ".run.json.partial")
    shutil.copytree(run / "model", run / ".model.partial")
    convert_to_run(str(source), PLAN, run)
    assert all(torch.equal(x, wanted[n]) for n, x in load_text_model(run)[0].state_dict().items())


def test_a_conversion_of_other_files_is_no_longer_the_same(source, texts, tmp_path):
    plan = Conversion(
        pattern="windowed_ovq", tokens=40, num_first_tokens=2, distill_steps=1, distill_length=60,
        texts=str(texts),
    )  # fmt: skip
    run = tmp_path / "run"
    convert_to_run(str(source), plan, run)
    convert_to_run(str(source), plan, run)
    (texts / "book.txt").write_text("another text " * 40)
    with pytest.raises(ValueError, match=r"what the run began with, got .*book.txt with"):
        convert_to_run(str(source), plan, run)
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    change_weights(source, lambda t: t["model.norm.weight"].mul_(2))
    plan = Conversion(pattern="full_attention")
    convert_to_run(str(source), plan, tmp_path / "full")
    change_weights(source, lambda t: t["model.norm.weight"].mul_(2))
    with pytest.raises(ValueError, match=r"got model/model.safetensors with other bytes"):
        convert_to_run(str(source), plan, tmp_path / "full")


def test_a_run_without_its_weights_is_not_done(source_folder, run):
    shutil.rmtree(run / "model")
    with pytest.raises(ValueError, match=r"RUN must hold the weights .* with none"):
        convert_to_run(str(source_folder), PLAN, run)


def test_a_full_disk_is_an_os_error(tmp_path):
    class Full:
        def save_pretrained(self, folder: Path) -> None:
            raise SafetensorError("No space left on device")

    with pytest.raises(OSError, match="No space left"):
        save_model(Full(), None, tmp_path / "model")


def shorten_biases(run):
    """Weights of a model with fewer heads."""
    path = run / "model/model.safetensors"
    cut = {n: t[..., :1].clone() if "bias" in n else t for n, t in load_file(path).items()}
    save_file(cut, path, metadata={"format": "pt"})


# --- runs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda r: (r / "model/tokenizer.json").write_text("{}"), "RUN must hold a tokenizer"),
        (lambda r: (r / "model/config.json").write_text("[]"), "RUN must hold a whole model"),
        (lambda r: change_json(r / "run.json", weights=[1]), "with damaged weights"),
        (lambda r: change_json(r / "run.json", config={"model": []}), "damaged config model"),
        (lambda r: change_json(r / "model/config.json", rms_norm_eps=0.5), "with rms_norm_eps"),
        (
            lambda r: change_json(
                r / "model/config.json", num_attention_heads=8, num_key_value_heads=4, head_dim=4
            ),
            "with num_attention_heads = 8, not 4",
        ),
        (shorten_biases, "with mismatched keys .*dictionary_bias"),
    ],
)
def test_a_damaged_run_is_refused(run, damage, message):
    damage(run)
    with pytest.raises(ValueError, match=message):
        load_text_model(run)


def test_fields_given_at_loading_reach_every_layer(run):
    changed = OVQForCausalLM.from_pretrained(
        run / "model", dictionary={"num_centroids": 3}, window_size=5
    )
    sinks, ovq, _ = (layer.mixer for layer in changed.model.layers)
    assert (sinks.window_size, ovq.dictionary.num_centroids) == (5, 3)
    before = load_text_model(run)[0].model.layers[1].mixer.dictionary
    assert ovq.dictionary.chunk_size == before.chunk_size > 1


# --- sizes -----------------------------------------------------------------------------------


@pytest.mark.plain
def test_sizes_out_of_their_range():
    with pytest.raises(ValueError, match="tokens must be at most 16,777,216, got 999,999,999"):
        parse_pattern("windowed_ovq:999999999", 1)
    with pytest.raises(ValueError, match=r"distance must lie in \[0, 2\^31\)"):
        Conversion(pattern="windowed_ovq", distance=2**40)


@pytest.mark.plain
def test_a_small_share_of_slots_still_has_some():
    config = converted_config(
        make_source().config, parse_pattern("windowed_ovq:1024", 1), share_of_slots=0.02
    )
    assert config.for_layer(0).dictionary["num_centroids"] >= 1


# --- records and commands --------------------------------------------------------------------


def entry(nll, blocks=(1.0, 2.0)):
    return {"nll": {"300": nll}, "state_bytes": {"300": 9}, "nll_of_blocks": list(blocks)}


@pytest.mark.plain
def test_losses_beyond_numbers_are_kept_and_shown(tmp_path):
    path = tmp_path / "record.json"
    record = read_record(path, "book", "text", [300])
    keep(path, record, "one", entry(900.0))
    keep(path, record, "two", entry(math.nan, (math.nan, 1.0)))
    assert "NaN" not in path.read_text()
    rows = table(read_record(path, "book", "text", [300]))[1]
    assert [row[2] for row in rows] == ["inf", "nan"]


@pytest.mark.plain
@pytest.mark.parametrize(
    "damaged", [None, [], {"nll": 3}, entry("x"), entry(1.0, (1.0,)), entry(1.0) | {"nll": {}}]
)
def test_a_damaged_entry_is_named(tmp_path, damaged):
    path = tmp_path / "record.json"
    keep(path, read_record(path, "book", "text", [300]), "one", damaged)
    with pytest.raises(ValueError, match="with damaged one"):
        read_record(path, "book", "text", [300])


@pytest.mark.plain
def test_odd_texts_are_read_as_far_as_they_must():
    class Codec:
        def encode(self, text: str) -> torch.Tensor:
            return torch.arange(len(text) // 20)  # tokens of twenty characters

        def decode(self, ids: torch.Tensor) -> str:
            return ""

    assert len(first_tokens(Codec(), "x" * 2000, 50)) == 100
    assert len(first_tokens(Codec(), "x" * 100, 50)) == 5


def test_models_that_read_other_tokens_are_not_compared(source, run, tmp_path):
    other, text = tmp_path / "other", tmp_path / "book.txt"
    shutil.copytree(run, other)
    path = other / "model/tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["normalizer"] = {"type": "Lowercase"}
    path.write_text(json.dumps(tokenizer))
    text.write_text("It Was The Best Of Times " * 9)
    options = ("--file", text, "--lengths", 100, "-o", tmp_path / "record.json")
    assert invoke("perplexity", run, *options).exit_code == 0
    assert "the tokens that others read, got" in bad_input("perplexity", other, *options)


def test_no_file_but_its_own_is_written_over(run, tmp_path):
    text, notes = tmp_path / "book.md", tmp_path / "notes.md"
    text.write_text("it was the best of times " * 9)
    notes.write_text("precious")
    for output, said in (
        ("book.json", "must leave"), ("notes.json", "must leave"), ("r.md", "must be a JSON file"),
    ):  # fmt: skip
        options = ("--file", text, "--lengths", 100, "-o", tmp_path / output)
        assert said in bad_input("perplexity", run, *options)
    assert notes.read_text() == "precious"
    assert "lengths must rise" in bad_input("perplexity", run, "--file", text, "--lengths", "")
    short = bad_input("perplexity", run, "--file", text, "--lengths", "900,100")
    assert "--lengths must be at most the 225 tokens" in short
    nothing = bad_input("perplexity", run, tmp_path / "nothing", "--file", text, "--lengths", 99)
    assert "RUN must be a run folder" in nothing
    assert "--file must be a file" in bad_input("perplexity", run, "--file", tmp_path / "nothing")
    model = bad_input("perplexity", run / "model", "--file", text, "--lengths", 99)
    assert "`ovq convert` makes a run" in model


def test_what_a_conversion_says_of_its_options_and_layers(source, tmp_path):
    options = (source, "--pattern", "sliding_window,full_attention", "-o", tmp_path / "run")
    nothing = bad_input("convert", *options, "--distill", tmp_path / "nowhere")
    assert "texts must be 'kjv' or a folder of .txt files" in nothing
    assert "go with --distill only" in bad_input("convert", *options, "--distill-steps", 3)
    done = invoke("convert", *options)
    assert (
        "in order: 1 sliding_window of 1,024, 1 full_attention, 1 sliding_window" in done.stdout
    ), done.output


def test_the_mark_that_a_tokenizer_puts_before_texts(source, tmp_path):
    path = source / "tokenizer.json"
    convert_to_run(str(source), PLAN, tmp_path / "without")
    tokenizer, text = json.loads(path.read_text()), tmp_path / "book.txt"
    mark = {"SpecialToken": {"id": END_OF_TEXT, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    number = load_text_model(tmp_path / "without")[1].tokenizer.bos_token_id
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing", "single": [mark, first], "pair": [mark, first, second],
        "special_tokens": {
            END_OF_TEXT: {"id": END_OF_TEXT, "ids": [number], "tokens": [END_OF_TEXT]}
        },
    }  # fmt: skip
    path.write_text(json.dumps(tokenizer))
    convert_to_run(str(source), PLAN, tmp_path / "with")
    text.write_text("it was the best of times")
    for name, number in (("without", 24), ("with", 25)):
        codec = load_text_model(tmp_path / name)[1]
        assert codec.encode(text.read_text()).shape == (24,)
        assert first_tokens(codec, text.read_text(), 5).shape == (number,)
        output = tmp_path / "states" / f"{name}.state"
        read = invoke("read", tmp_path / name, "--file", text, "-o", output)
        assert f"after {number} tokens" in read.stdout, read.output
        options = ("--prompt", "abc", "--max-new-tokens", 2)
        fresh = invoke("generate", tmp_path / name, *options).stdout
        assert f"after the {number - 21} tokens of the prompt" in fresh
        on = invoke("generate", tmp_path / name, *options, "--state", output).stdout
        assert f"after the {number + 3} tokens in all" in on


def test_a_distillation_tells_what_it_gained(source, texts, tmp_path):
    options = ("--pattern", "windowed_ovq:40", "--first-tokens", 2, "-o", tmp_path / "run")
    distill = ("--distill", texts, "--distill-steps", 4, "--distill-length", 120)
    done = invoke("convert", source, *options, *distill)
    run = json.loads((tmp_path / "run/run.json").read_text())
    assert 0 <= run["divergence"]["after"] < run["divergence"]["before"]
    for when, value in run["divergence"].items():
        assert f"divergence from SOURCE {when} the fit: {value:.5f}" in done.stdout
