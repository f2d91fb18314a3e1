"""Models of recurrent mixers, alone and between sliding windows."""

import pytest
import torch

from ovq.models import OVQForCausalLM

MIXERS = ("gated_delta_net", "mamba2")
PATTERNS = [["sliding_window", "gated_delta_net"], ["mamba2", "sliding_window"], list(MIXERS)]
PATTERNS += [["mesa_net", "sliding_window"]]


@pytest.mark.parametrize("layer_pattern", PATTERNS, ids="-".join)
def test_greedy_text_is_the_argmax_loops(make_model, token_ids, layer_pattern):
    model = make_model(layer_pattern=layer_pattern)
    expected = token_ids
    for _ in range(8):
        expected = torch.cat([expected, model(expected).logits[:, -1:].argmax(-1)], dim=1)
    assert len(expected[:, -8:].unique()) > 4
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert model.generate(token_ids, **options).equal(expected)


def test_saved_and_loaded_model_is_identical(make_model, token_ids, tmp_path):
    """No parameter starts anew when it is loaded, least of all those of the decays."""
    model = make_model(layer_pattern=list(MIXERS), expand_v=1.5, ssm_state_size=9, ssm_expand=1.5)
    with torch.no_grad():  # nothing left at its starting value, as after training
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    loaded = OVQForCausalLM.from_pretrained(tmp_path).eval()
    for name, tensor in model.state_dict().items():
        assert tensor.equal(loaded.state_dict()[name]), name
    assert loaded(token_ids).logits.equal(model(token_ids).logits)


@pytest.mark.parametrize("name", MIXERS)
def test_parameters_that_a_file_lacks_start_as_new_ones(make_model, name):
    model = make_model(layer_pattern=[name])
    lacking = ("A_log", "dt_bias", "mixer.o_norm.weight", "mixer.norm.weight", "conv.weight")
    kept = {n: t for n, t in model.state_dict().items() if not n.endswith(lacking)}
    loaded = OVQForCausalLM.from_pretrained(None, config=model.config, state_dict=kept)
    mixer = loaded.model.layers[0].mixer
    assert mixer.A_log.le(2.78).all()
    assert mixer.A_log.std() > 0
    assert mixer.dt_bias.gt(-7).all()
    assert mixer.dt_bias.lt(-2).all()
    assert (mixer.norm if name == "mamba2" else mixer.o_norm).weight.eq(1).all()
    assert 0.4 < mixer.short_conv.weight.abs().max() <= 0.5


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("lacking", ["A_log", "dt_bias", "norm.weight"])
def test_a_file_that_lacks_one_parameter_keeps_the_others(make_model, name, lacking):
    model = make_model(layer_pattern=[name])
    before = model.state_dict()
    kept = {n: t + 1 for n, t in before.items() if not n.endswith(lacking)}
    loaded = OVQForCausalLM.from_pretrained(None, config=model.config, state_dict=kept)
    for full_name, tensor in loaded.state_dict().items():
        if full_name in kept:
            assert tensor.equal(before[full_name] + 1), full_name  # the model may hold those kept
        elif lacking == "norm.weight":
            assert tensor.eq(1).all(), full_name


@pytest.mark.parametrize("name", [*MIXERS, "mesa_net"])
def test_gradient_checkpointing_changes_no_gradient(make_model, token_ids, name):
    model = make_model(layer_pattern=[name, "sliding_window"]).train()

    def gradients():
        model.zero_grad()
        model(token_ids, labels=token_ids).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = gradients()
    # Renamed in transformers 5.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
    for replayed, plain in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(replayed, plain)
