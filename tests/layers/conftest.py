"""A small configuration that every mixer of the registry can be built from."""

from dataclasses import dataclass, field

import pytest


@dataclass
class SmallConfig:
    hidden_size: int = 32
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 8
    window_size: int = 5
    rope_theta: float = 10000.0
    use_short_conv: bool = False
    num_codes: int = 7
    block_size: int = 3
    straight_through: str = "keys"
    expand_v: float = 1.0
    ssm_state_size: int = 6
    ssm_expand: float = 2.0
    num_first_tokens: int = 2
    dictionary_distance: int = 6
    max_rotary_position: int = 9
    initial_beta: float = 8.0
    ssmax_length: int | None = None
    initial_decay_rate: float = 16.0
    dictionary: dict = field(default_factory=lambda: {"num_centroids": 6, "chunk_size": 4})


@pytest.fixture
def config() -> SmallConfig:
    return SmallConfig()
