"""Gated DeltaNet and Mamba-2 equal transformers' own: operators, layers, a whole model."""

import inspect
from importlib import import_module
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ovq.layers import GatedDeltaNet, Mamba2
from ovq.models import OVQConfig, OVQForCausalLM
from ovq.models.modeling_ovq import CACHE_FIELD
from ovq.ops.gated_delta_rule import gated_delta_rule
from ovq.ops.mesa import mesa
from ovq.ops.ssd import ssd

NEAR = {"atol": 1e-5, "rtol": 1e-5}


def of_transformers(model: str, name: str):
    """A class or function of one of its modeling files; versions without it skip the test."""
    try:
        module = import_module(f"transformers.models.{model}.modeling_{model}")
        return getattr(module, name)
    except (ImportError, AttributeError):
        pytest.skip(f"this version of transformers has no {name} in {model}")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("model", ["olmo_hybrid", "qwen3_next"])
@pytest.mark.parametrize("form", ["chunk", "recurrent"])
@pytest.mark.parametrize("num_tokens", [1, 70])
@pytest.mark.parametrize("carried", [False, True])
def test_gated_delta_rule(model, form, num_tokens, carried):
    theirs = of_transformers(model, f"torch_{form}_gated_delta_rule")
    q, k, v = (normal(2, num_tokens, 3, 8, seed=seed) for seed in range(3))
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    g, beta = -normal(2, num_tokens, 3, seed=3).exp(), normal(2, num_tokens, 3, seed=4).sigmoid()
    state = normal(2, 3, 8, 8, seed=5) if carried else None
    expected = theirs(q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True)
    for ours, other in zip(gated_delta_rule(q, k, v, g, beta, state), expected, strict=True):
        torch.testing.assert_close(ours, other, **NEAR)


def state_space_inputs(num_tokens: int) -> tuple[list[Tensor], Tensor]:
    x, dt = normal(2, num_tokens, 4, 8), F.softplus(normal(2, num_tokens, 4, seed=1))
    B, C = (normal(2, num_tokens, 2, 5, seed=seed) for seed in (2, 3))
    return [x, dt, -normal(4, seed=4).exp(), B, C], normal(2, 4, 5, 8, seed=5)


@pytest.mark.parametrize("carried", [False, True])
def test_state_space_scan(carried):
    """Theirs holds its state as ``[B, H, V, K]``."""
    theirs = of_transformers("mamba2", "mamba2_chunk_scan")
    arguments, state = state_space_inputs(70)
    x, dt, A, B, C = arguments
    y, after = theirs(
        x, dt, A, B, C, chunk_size=16, return_final_states=True,
        initial_states=state.mT.contiguous() if carried else None,
    )  # fmt: skip
    ours, our_after = ssd(*arguments, state if carried else None)
    torch.testing.assert_close(ours, y, **NEAR)
    torch.testing.assert_close(our_after.mT, after, **NEAR)


def test_state_space_step():
    theirs = of_transformers("mamba2", "mamba2_selective_state_update")
    arguments, state = state_space_inputs(1)
    x, dt, A, B, C = arguments
    after = state.mT.contiguous()  # which it changes in place
    y = theirs(
        after, x[:, 0], dt[:, 0, :, None].expand(-1, -1, 8), A[:, None, None].expand(-1, 8, 5),
        B[:, 0], C[:, 0], D=None,
    )  # fmt: skip
    ours, our_after = ssd(*arguments, state)
    torch.testing.assert_close(ours[:, 0], y, **NEAR)
    torch.testing.assert_close(our_after.mT, after, **NEAR)


def moved_from_their_start(module: nn.Module) -> nn.Module:
    """The module with every parameter moved, so that none is left out unseen."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return module.eval()


def renamed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict under our names; filters ``[F, 1, P]`` are ``[P, F]`` with us."""
    found = {name.replace("conv1d", "short_conv"): tensor for name, tensor in weights.items()}
    found["short_conv.weight"] = found["short_conv.weight"][:, 0].T
    return found


def our_gated_delta_net(theirs: nn.Module) -> GatedDeltaNet:
    layer = GatedDeltaNet(
        theirs.hidden_size, theirs.num_v_heads, theirs.head_k_dim, value_head_dim=theirs.head_v_dim
    )
    layer.load_state_dict(renamed(theirs.state_dict()))
    return layer


def our_mamba2(theirs: nn.Module) -> Mamba2:
    layer = Mamba2(
        theirs.hidden_size, theirs.num_heads, theirs.head_dim,
        ssm_state_size=theirs.ssm_state_size, num_groups=theirs.n_groups,
    )  # fmt: skip
    layer.load_state_dict(renamed(theirs.state_dict()))
    return layer


def in_pieces(layer, x: Tensor, cuts: list[int]) -> Tensor:
    outputs, state = [], None
    for start, stop in pairwise([0, *cuts, x.shape[1]]):
        o, state = layer(x[:, start:stop], state)
        outputs.append(o)
    return torch.cat(outputs, dim=1)


def test_gated_delta_net_layer():
    """A layer of OLMo-Hybrid, values wider than keys; ours also cut, and token by token."""
    layer_class = of_transformers("olmo_hybrid", "OlmoHybridGatedDeltaNet")
    config = of_transformers("olmo_hybrid", "OlmoHybridConfig")(
        hidden_size=48, num_hidden_layers=2, linear_num_key_heads=3, linear_num_value_heads=3,
        linear_key_head_dim=8, linear_value_head_dim=12, linear_allow_neg_eigval=False,
        layer_types=["linear_attention", "full_attention"], num_attention_heads=4,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = moved_from_their_start(layer_class(config, layer_idx=0))
    ours, x = our_gated_delta_net(theirs), normal(2, 70, 48)
    with torch.no_grad():
        expected = theirs(x)
        for cuts in ([], [1, 2, 40], list(range(1, 70))):
            torch.testing.assert_close(in_pieces(ours, x, cuts), expected, **NEAR)


def small_mamba2(num_groups: int) -> nn.Module:
    """A Mamba-2 model of transformers."""
    model_class = of_transformers("mamba2", "Mamba2ForCausalLM")
    config = of_transformers("mamba2", "Mamba2Config")(
        vocab_size=61, hidden_size=32, num_hidden_layers=3, num_heads=8, head_dim=8, state_size=6,
        n_groups=num_groups, chunk_size=16, expand=2, initializer_range=0.3,
        pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return moved_from_their_start(model_class(config))


@pytest.mark.parametrize("num_groups", [1, 2])
def test_mamba2_layers(num_groups):
    """Each mixer of the model against ours on the hidden states that it sees there."""
    norm = of_transformers("mamba2", "MambaRMSNormGated")
    if num_groups > 1 and "group_size" not in inspect.signature(norm.__init__).parameters:
        pytest.skip("this transformers normalises all groups as one")
    mamba2, seen = small_mamba2(num_groups), []
    for block in mamba2.backbone.layers:
        block.mixer.register_forward_hook(lambda module, x, y: seen.append((module, x[0], y)))
    with torch.no_grad():
        mamba2(torch.arange(1, 41)[None], use_cache=False)
        assert len(seen) == 3
        for theirs, x, expected in seen:
            for cuts in ([], [1, 2, 30], list(range(1, 40))):
                torch.testing.assert_close(in_pieces(our_mamba2(theirs), x, cuts), expected, **NEAR)


def our_whole_model(theirs: nn.Module) -> OVQForCausalLM:
    """Our model of the same mixers; its feed-forward blocks, which theirs lacks, give zero."""
    config = theirs.config
    model = OVQForCausalLM(
        OVQConfig(
            vocab_size=config.vocab_size, hidden_size=config.hidden_size, layer_pattern=["mamba2"],
            num_hidden_layers=config.num_hidden_layers, head_dim=config.head_dim,
            ssm_expand=float(config.expand), ssm_state_size=config.state_size,
            rms_norm_eps=config.layer_norm_epsilon, intermediate_size=1, num_attention_heads=1,
        )
    ).eval()  # fmt: skip
    for ours, block in zip(model.model.layers, theirs.backbone.layers, strict=True):
        nn.init.zeros_(ours.mlp.down_proj.weight)
        ours.mixer.load_state_dict(our_mamba2(block.mixer).state_dict())
        ours.input_layernorm.load_state_dict(block.norm.state_dict())
    model.model.embed_tokens.load_state_dict(theirs.backbone.embeddings.state_dict())
    model.model.norm.load_state_dict(theirs.backbone.norm_f.state_dict())
    model.lm_head.load_state_dict(theirs.lm_head.state_dict())
    return model


def test_mamba2_model():
    """The same logits, and token by token on a carried state."""
    mamba2 = small_mamba2(num_groups=1)
    ours, token_ids = our_whole_model(mamba2), torch.randint(1, 61, (2, 30))
    with torch.no_grad():
        expected = mamba2(token_ids, use_cache=False).logits
        near = {"atol": 1e-5 * expected.abs().max().item(), "rtol": 1e-5}
        torch.testing.assert_close(ours(token_ids).logits, expected, **near)
        cache, logits = None, []
        for column in token_ids.split(1, dim=1):
            outputs = ours(column, cache=cache, use_cache=True)
            cache = getattr(outputs, CACHE_FIELD)
            logits.append(outputs.logits)
    torch.testing.assert_close(torch.cat(logits, 1), expected, **near)


class TestFlashLinearAttention:
    """The kernels of flash-linear-attention, on a GPU, in bfloat16: 1 % of the largest entry."""

    @pytest.fixture(autouse=True)
    def needs_a_gpu(self):
        if not torch.cuda.is_available():
            pytest.skip("flash-linear-attention runs on a GPU alone")
        pytest.importorskip("fla")

    @staticmethod
    def assert_near(ours: Tensor, theirs: Tensor) -> None:
        error = (ours.float() - theirs.float()).abs().max()
        assert error < 0.01 * theirs.abs().max()

    def test_gated_delta_rule(self):
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        q, k, v = (normal(2, 200, 4, 64, seed=seed).cuda() for seed in range(3))
        q, k, v = (x.bfloat16() for x in (F.normalize(q, dim=-1), F.normalize(k, dim=-1), v))
        g, beta = (
            -normal(2, 200, 4, seed=3).exp().cuda(),
            normal(2, 200, 4, seed=4).sigmoid().cuda(),
        )
        state = normal(2, 4, 64, 64, seed=5).cuda()
        expected = chunk_gated_delta_rule(
            q, k, v, g=g, beta=beta.bfloat16(), initial_state=state, output_final_state=True
        )
        for pair in zip(gated_delta_rule(q, k, v, g, beta, state), expected, strict=True):
            self.assert_near(*pair)

    def test_ssd(self):
        """Mamba-2's recurrence is their gated linear attention with one decay a head."""
        from fla.ops.simple_gla import chunk_simple_gla

        x, B, C = (normal(2, 200, 4, 64, seed=seed).cuda().bfloat16() for seed in range(3))
        dt, A = F.softplus(normal(2, 200, 4, seed=3)).cuda(), -normal(4, seed=4).exp().cuda()
        state = normal(2, 4, 64, 64, seed=5).cuda()
        expected = chunk_simple_gla(
            C, B, (dt[..., None] * x).bfloat16(), dt * A, scale=1.0, initial_state=state,
            output_final_state=True,
        )  # fmt: skip
        for pair in zip(ssd(x, dt, A, B, C, state), expected, strict=True):
            self.assert_near(*pair)

    def test_mesa(self):
        """Their definition, which solves exactly as ours does; it holds the two sums apart."""
        from fla.ops.mesa_net.naive import naive_mesa_net_exact

        q, k, v = (normal(2, 40, 4, 16, seed=seed).cuda() for seed in range(3))
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        g = -normal(2, 40, 4, seed=3).exp().cuda()
        beta, lamb = normal(2, 40, 4, seed=4).sigmoid().cuda(), normal(4, 16, seed=5).exp().cuda()
        o, *sums = naive_mesa_net_exact(q, k, v, g, lamb, beta)
        ours, state = mesa(q, k, v, g, beta, lamb)
        self.assert_near(ours, o)
        self.assert_near(state, torch.cat(sums, dim=-1))
