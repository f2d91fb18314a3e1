"""The comparison of mixers: models are equal, figures exact, and nothing is dropped in silence."""

import json
from dataclasses import fields, is_dataclass, replace

import pytest
import torch
from typer.testing import CliRunner

from ovq.cli import app
from ovq.comparison import ComparisonConfig, compare, equal_models, measure, read_comparison
from ovq.comparison.flops import counted_flops, ovq_operator_flops, training_flops
from ovq.comparison.models import make_model, sizes, token_ids
from ovq.comparison.peak import peak_in_new_process
from ovq.comparison.report import length_table, markdown, medians, write
from ovq.layers.registry import MIXERS
from ovq.models import OVQConfig
from ovq.models.modeling_ovq import CACHE_FIELD
from ovq.ops.ovq_attention import DictionaryConfig

FIELDS = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "window_size": 8,
    "dictionary": {"num_centroids": 6, "chunk_size": 4},
    "num_codes": 7,
    "block_size": 4,
    "ssm_state_size": 8,
}
TINY = ComparisonConfig(
    mixers=("full_attention", "ovq", "mamba2"),
    lengths=(16, 32),
    num_repeats=2,
    decode_tokens=2,
    model=FIELDS,
)


def num_trained(config):
    return sum(parameter.numel() for parameter in make_model(config, 0).parameters())


@pytest.mark.parametrize("pure", [False, True])
def test_models_are_equal_and_differ_in_nothing_else(pure):
    base = OVQConfig(**FIELDS)
    models = equal_models(list(MIXERS), base, pure=pure)
    target = num_trained(models["full_attention"])
    assert models["full_attention"].intermediate_size == base.intermediate_size
    assert models["mamba2"].intermediate_size < base.intermediate_size - 10
    for name, config in models.items():
        assert abs(num_trained(config) / target - 1) < 0.02, name
        assert config.layer_pattern == ([name] if pure else ["sliding_window", name])
        given = {"layer_pattern": base.layer_pattern, "intermediate_size": 96}
        assert config.to_dict() | given == base.to_dict()


def test_the_first_mixer_is_the_reference_without_full_attention():
    models = equal_models(["mamba2", "ovq"], FIELDS)
    assert models["mamba2"].intermediate_size == 96 < models["ovq"].intermediate_size


def test_scalable_softmax_is_kept_where_a_mixer_has_it():
    base = FIELDS | {"ssmax_length": 64, "layer_pattern": ["mamba2"]}  # which is not used
    models = equal_models(["full_attention", "ovq", "mamba2"], base)
    assert [models[x].ssmax_length for x in models] == [64, 64, None]


def test_a_short_convolution_is_where_there_may_be_one():
    models = equal_models(["full_attention", "ovq"], FIELDS | {"use_short_conv": True})
    assert [config.use_short_conv for config in models.values()] == [False, True]


def test_a_mixer_that_cannot_be_made_equal_is_named():
    small = FIELDS | {"intermediate_size": 8}
    with pytest.raises(ValueError, match=r"got 'mamba2' with .* at intermediate_size 1"):
        equal_models(["full_attention", "mamba2"], small)
    coarse = FIELDS | {"hidden_size": 8, "intermediate_size": 3, "vocab_size": 2, "head_dim": 2}
    coarse |= {"num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1}
    with pytest.raises(ValueError, match=r"within 2% of .* got 'mesa_net'"):
        equal_models(["linear_attention", "mesa_net"], coarse, pure=True)


@pytest.mark.parametrize("mixers", [[], ["ovq", "ovq"], ["ovq", "nonsense"]])
def test_mixers_are_known_and_each_there_once(mixers):
    with pytest.raises(ValueError, match="mixers must be"):
        equal_models(mixers, FIELDS)


def held_bytes(value, seen=None):
    """Bytes of the distinct storages that a state keeps alive."""
    seen = {} if seen is None else seen
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        seen[storage.data_ptr() if storage.nbytes() else 0] = storage.nbytes()
    elif is_dataclass(value):
        for each in fields(value):
            held_bytes(getattr(value, each.name), seen)
    return sum(seen.values())


@pytest.mark.parametrize("name", MIXERS)
def test_state_bytes_are_those_really_held(name):
    config = equal_models([name], FIELDS, pure=True)[name]
    lengths = (3, 8, 37)
    told, model = sizes(config, lengths), make_model(config, 0).eval()
    for length in lengths:
        with torch.no_grad():
            output = model(input_ids=token_ids(config, length, 0), use_cache=True)
        held = sum(held_bytes(state) for state in getattr(output, CACHE_FIELD).states)
        assert told["state_bytes"][str(length)] == held, length


@pytest.mark.parametrize("name", MIXERS)
def test_operations_at_a_length_are_those_counted_there(name):
    """Of a few tokens, of whole blocks, and with tokens left over."""
    config, lengths = equal_models([name], FIELDS)[name], (7, 320, 397, 640)
    if name == "windowed_ovq":  # counted at the length itself, in chunks of 4
        lengths = (7, 45)
    expected = {}
    for length in lengths:
        expected[length] = counted_flops(make_model(config, 0).train(), length)
        if name == "ovq":
            dictionary = DictionaryConfig(**config.dictionary)
            heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
            of_operator = ovq_operator_flops(dictionary, length, **heads)
            assert of_operator > 0
            expected[length] += of_operator
    assert training_flops(config, lengths) == expected


def test_operations_of_full_attention_by_hand():
    config = equal_models(["full_attention"], FIELDS, pure=True)["full_attention"]
    D, KV, width, vocab = 32, 16, 96, 61
    products = 2 * (2 * D * D + 2 * D * KV + 3 * D * width) + D * vocab
    for T in (1000, 1024):
        pairs = 2 * 4 * T * (T + 1) // 2  # layers, heads
        assert training_flops(config, [T]) == {T: 6 * T * products + 14 * 8 * pairs}


def test_operations_of_linear_attention_and_mamba2_by_hand():
    """Chunks of 64; each product costs its double once more in the backward."""
    configs = equal_models(["linear_attention", "mamba2"], FIELDS, pure=True)
    T, D, C = 1024, 32, 64
    H, G, K = 4, 2, 8
    mixer = 2 * D * D + 2 * D * G * K  # projections, per token
    mixer += G * K * K + H * (C * K + C * K + K * K)  # added; scores, read from chunk, from past
    config = configs["linear_attention"]
    products = 2 * (mixer + 3 * D * config.intermediate_size) + D * 61
    assert training_flops(config, [T]) == {T: 6 * T * products}

    H, V, K = 8, 8, 8  # twice the hidden size; ssm_state_size
    mixer = D * (3 * H * V + 2 * K + H)  # projections
    mixer += C * K + H * (C * V + K * V + K * V)  # C B of the group; within, left, found
    mixer += H * C * C * 2 / 3  # sums of decays, of which only one factor has a gradient
    config = configs["mamba2"]
    products = 2 * (mixer + 3 * D * config.intermediate_size) + D * 61
    assert training_flops(config, [T])[T] == pytest.approx(6 * T * products, rel=1e-9)


@pytest.mark.parametrize("window_size", [0, 3])
def test_an_operator_that_keeps_every_token_computes_what_full_attention_does(window_size):
    T = 20
    dictionary = DictionaryConfig(
        num_centroids=T, chunk_size=1, growth="immediate", window_size=window_size
    )
    found = ovq_operator_flops(dictionary, T, num_heads=4, num_kv_heads=2, head_dim=8)
    absorbed = T - window_size
    compared = 2 * 8 * 2 * absorbed * (absorbed + 1) // 2
    assert found == 14 * 8 * 4 * T * (T + 1) // 2 + compared


def test_peaks_are_of_a_process_of_its_own_and_grow_with_the_sequence():
    config = equal_models(["full_attention"], FIELDS)["full_attention"]
    short, long = (peak_in_new_process(config, length, 0) for length in (256, 4096))
    assert 4 * short < long
    # Its activations: at least 20 numbers [T, D] a layer, and not a hundred times as many.
    assert 1 < long / (4 * 4096 * 32 * 2 * 20) < 100
    with pytest.raises(ChildProcessError, match="RuntimeError"):
        peak_in_new_process(config, 2**45, 0)


@pytest.fixture
def peaks(monkeypatch):
    """The calls that measure a peak of memory, without their processes; and a short pilot."""
    calls = []
    monkeypatch.setattr(measure, "PILOT", 16)

    def peak(config, length, seed):
        calls.append((config.layer_pattern[-1], length))
        return 2**20 * length

    monkeypatch.setattr(measure, "peak_in_new_process", peak)
    return calls


def test_a_comparison_is_whole_and_in_turns(tmp_path, peaks):
    path, lines = tmp_path / "compare.json", []
    result = compare(TINY, path, lambda done, total, what: lines.append((done, total, what)))
    assert read_comparison(path) == json.loads(json.dumps(result))
    assert (result["status"], result["num_starts"]) == ("done", 1)
    assert len(result["figures"]) == len(TINY.mixers) * 2 * 4
    for row in result["figures"]:
        assert len(row["samples"]) == (1 if row["figure"] == "memory" else 2)
        assert min(row["samples"]) > 0
        assert row["skipped"] is None
    in_turns = [what.split()[-1] for _, _, what in lines if "T=16 forward:" in what]
    assert in_turns == [*TINY.mixers, *TINY.mixers]
    done = [at for at, _, _ in lines]
    assert done == sorted(done)
    assert lines[-1][0] == lines[-1][1]
    write(result, tmp_path)
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
    table = (tmp_path / "table.md").read_text()
    assert all(table.count(f"| {name} |") == 3 for name in TINY.mixers)
    assert "[1]" not in table


def test_an_interrupted_comparison_goes_on_with_what_is_there(tmp_path, peaks, monkeypatch):
    path, stop_at, samples = tmp_path / "compare.json", 17, []
    config = replace(TINY, mixers=("full_attention", "ovq"))

    def interrupt(done, total, what):
        if ":" in what:
            samples.append(what)
        if len(samples) == stop_at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare(config, path, interrupt)
    before = {measure._key(row): row for row in read_comparison(path)["figures"]}
    assert sum(len(row["samples"]) for row in before.values()) == stop_at
    monkeypatch.setattr(measure, "sizes", lambda *_: pytest.fail("sizes were there"))
    result = compare(config, path, interrupt)
    assert result["num_starts"] == 2
    assert "Taken in 2 starts" in markdown(result)
    assert len(samples) == 2 * 2 * (3 * 2 + 1)  # none taken twice
    for row in result["figures"]:
        known = before.get(measure._key(row), {"samples": []})["samples"]
        assert row["samples"][: len(known)] == known
    assert compare(config, path, lambda *_: pytest.fail("all was there")) == result


@pytest.mark.parametrize(("seconds", "num_samples"), [(0.1, 4), (7.0, 2), (31.0, 1)])
def test_what_takes_long_is_sampled_less(tmp_path, peaks, monkeypatch, seconds, num_samples):
    monkeypatch.setattr(measure, "_seconds", lambda call: seconds)
    config = replace(TINY, mixers=("linear_attention",), num_repeats=4, lengths=(16,), budget=1e9)
    rows = compare(config, tmp_path / "compare.json")["figures"]
    found = {len(row["samples"]) for row in rows if row["figure"] != "memory"}
    assert found == {num_samples}


def test_what_exceeds_the_budget_is_skipped_with_a_reason(tmp_path, peaks, monkeypatch):
    monkeypatch.setattr(measure, "_seconds", lambda call: 10.0)
    config = replace(TINY, mixers=("full_attention", "ovq"), budget=15.0)
    result = compare(config, tmp_path / "compare.json")
    skipped = [row for row in result["figures"] if row["length"] == 32]
    assert len(skipped) == 2 * 4
    for row in skipped:
        assert not row["samples"]
        assert f"of {row['mixer']} at T = 32 would take about" in row["skipped"]
    assert {length for _, length in peaks} == {16}
    about = float(skipped[0]["skipped"].split("about ")[1].split()[0])
    assert 20 <= about <= 30  # twice as many tokens, and more operations a token
    table = markdown(result)
    assert "[8] " in table
    assert "| [1] |" in length_table(result, 32)
    assert "[" not in length_table(result, 16)
    write(result, tmp_path)


def test_a_process_that_ends_without_a_figure_is_a_reason(tmp_path, peaks, monkeypatch):
    def killed(config, length, seed):
        raise ChildProcessError("the process ended with -9")

    monkeypatch.setattr(measure, "peak_in_new_process", killed)
    config = replace(TINY, mixers=("linear_attention",), lengths=(16,))
    row = compare(config, tmp_path / "compare.json")["figures"][-1]
    assert row["skipped"] == "memory of linear_attention at T = 16: the process ended with -9"


def test_times_are_ratios_to_full_attention():
    model = {"training_flops": {"100": 10**11}}
    rows = [("ovq", [2.0, 9.0, 2.0]), ("full_attention", [4.0, 1.0, 5.0])]
    result = {
        "models": {name: model for name, _ in rows},
        "reference": "full_attention",
        "config": {"decode_tokens": 10},
        "figures": [
            {"mixer": n, "length": 100, "figure": "forward", "samples": s, "skipped": None}
            for n, s in rows
        ],
    }
    assert medians(result)["ovq", 100, "forward"] == 2.0
    assert "| ovq | 1.0000 | 50 | 0.50 |" in length_table(result, 100)


def test_foreign_files_and_other_configurations_are_errors(tmp_path, peaks):
    path = tmp_path / "compare.json"
    for content in ("{", "[]", '{"format": "other"}', '{"format": "ovq-compare"}'):
        path.write_text(content)
        with pytest.raises(ValueError, match="path must be"):
            compare(TINY, path)
    path.unlink()
    config = replace(TINY, mixers=("linear_attention",), lengths=(16,))
    whole = compare(config, path)
    with pytest.raises(ValueError, match=r"of the same config, got .* of seed 0, not 1: give"):
        compare(replace(config, seed=1), path)
    for name in measure.PARTS:
        path.write_text(json.dumps({k: v for k, v in whole.items() if k != name}))
        with pytest.raises(ValueError, match=f"path must be a whole compare.json, .*{name} None"):
            compare(config, path)
    path.write_text(json.dumps(whole | {"figures": [{"mixer": "ovq"}]}))
    with pytest.raises(ValueError, match=r"path must be a whole compare.json, got .* the figure"):
        compare(config, path)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("budget", float("inf"), "budget must be above 0 seconds and finite, got inf"),
        ("budget", float("nan"), "budget must be above 0 seconds and finite, got nan"),
        ("lengths", (16, 2**25), "lengths must be at most 16,777,216, got 33,554,432"),
        ("num_repeats", 0, "num_repeats must be at least 1, got 0"),
        ("decode_tokens", 0, "decode_tokens must be at least 1, got 0"),
    ],
)
def test_values_out_of_their_ranges_raise(field, value, message):
    with pytest.raises(ValueError, match=message):
        replace(TINY, **{field: value})


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--mixers", "ovq,nonsense"], "got 'nonsense'"),
        (["--lengths", "64,x"], "got 'x'"),
        (["--lengths", ","], "got ','"),
        (["--lengths", "1,64"], "lengths must be at least 2"),
        (["--budget", "0"], "budget must be above 0"),
    ],
)
def test_bad_input_is_one_line(options, named, tmp_path):
    result = CliRunner().invoke(app, ["compare", "-o", str(tmp_path / "out"), *options])
    assert result.exit_code == 2
    assert named in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()
    if "nonsense" in named:
        assert all(name in result.stderr for name in MIXERS)


def test_an_output_that_is_a_file_fails_before_the_work(tmp_path):
    path = tmp_path / "file"
    path.write_text("precious")
    result = CliRunner().invoke(app, ["compare", "-o", str(path)])
    assert (result.exit_code, path.read_text()) == (2, "precious")
    assert "--output must be a folder" in result.stderr


def test_the_command(tmp_path, peaks, monkeypatch):
    monkeypatch.setattr(measure, "MODEL", FIELDS)
    options = ["--mixers", "ovq", "--lengths", "64,32", "--pure", "--quick", "-o", tmp_path]
    result = CliRunner().invoke(app, ["compare", *map(str, options)])
    assert result.exit_code == 0, result.output
    assert {path.name for path in tmp_path.iterdir()} == {"compare.json", "table.md", "compare.png"}
    written = read_comparison(tmp_path / "compare.json")
    assert written["config"]["lengths"] == [32, 64]
    assert written["models"]["ovq"]["layer_pattern"] == ["ovq"]
    assert "**T = 64**" in result.stdout
