"""Which mixer stands in each layer of a converted model, and how much of the past it holds."""

import re
from dataclasses import dataclass
from typing import Any

# Those that run on the projections of softmax attention with rotary positions.
LAYERS = ("full_attention", "sliding_window", "sliding_window_sinks", "windowed_ovq")

CHUNK = 64
LONGEST = 2**24  # tokens that a layer may hold


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """One layer of a converted model.

    Attributes:
        name: the mixer.
        tokens: its state has the bytes of so many tokens' keys and values, in float32, and those of
            a few counts; ``None`` for one that holds every token.
    """

    name: str
    tokens: int | None


def parse_pattern(text: str, tokens: int) -> list[LayerPlan]:
    """The layers of a pattern such as ``sliding_window_sinks:256*3,windowed_ovq``.

    Args:
        text: mixers, each with the tokens it holds and how many layers there are of it in a row,
            if they are other than ``tokens`` and one.
        tokens: where the pattern says nothing.

    Raises:
        ValueError: a mixer that no trained attention can be replaced by, or a malformed number.

    Example:
        >>> [(x.name, x.tokens) for x in parse_pattern("windowed_ovq:512, full_attention*2", 64)]
        [('windowed_ovq', 512), ('full_attention', None), ('full_attention', None)]
    """
    layers: list[LayerPlan] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\w+)(?::([1-9][0-9]{0,8}))?(?:\*([1-9][0-9]{0,3}))?\s*", part)
        if match is None or match[1] not in LAYERS or (match[1] == LAYERS[0] and match[2]):
            raise ValueError(
                f"pattern must hold the mixers {', '.join(LAYERS)}, with tokens and counts such as "
                f"windowed_ovq:512*3 or full_attention*3, which holds all, got {part.strip()!r}"
            )
        held = None if match[1] == "full_attention" else int(match[2] or tokens)
        if held is not None and held > LONGEST:
            raise ValueError(f"tokens must be at most {LONGEST:,}, got {held:,}")
        layers += [LayerPlan(name=match[1], tokens=held)] * int(match[3] or 1)
    return layers


def layer_fields(
    layer: LayerPlan, *, num_first_tokens: int, share_of_slots: float, head_dim: int
) -> dict[str, Any]:
    """Fields of the configuration that give a layer its size.

    Args:
        layer: what it is and holds.
        num_first_tokens: ``S``, exact for good, where the mixer has them.
        share_of_slots: of the bytes of a windowed OVQ layer, what goes to its dictionary, about.
        head_dim: ``K = V``.

    Raises:
        ValueError: too few tokens for first tokens, window, chunk and dictionary.

    Example:
        >>> plan = LayerPlan(name="windowed_ovq", tokens=1024)
        >>> fields = layer_fields(plan, num_first_tokens=4, share_of_slots=0.25, head_dim=64)
        >>> fields["dictionary"]["window_size"], fields["dictionary"]["num_centroids"]
        (704, 248)
    """
    if layer.tokens is None:
        return {}
    rest = layer.tokens - (0 if layer.name == "sliding_window" else num_first_tokens)
    if layer.name != "windowed_ovq":
        too_few = rest < 1
        fields: dict[str, Any] = {"window_size": rest + 1}  # and itself, which no state holds
    else:
        exact = rest - round(rest * share_of_slots)
        chunk = min(CHUNK, max(1, exact // 4))
        window = round((exact - chunk) / chunk) * chunk
        if rest - window - chunk < 2 <= rest * share_of_slots:  # the window was rounded up
            window -= chunk
        # A slot has a key, a value, and a count of eight bytes.
        slots = (rest - window - chunk) * head_dim // (head_dim + 1)
        too_few = window < chunk or slots < 1
        fields = {
            "dictionary": {"num_centroids": slots, "chunk_size": chunk, "window_size": window}
        }
    if too_few or num_first_tokens < 0:
        raise ValueError(
            f"tokens must be enough for {num_first_tokens} first tokens, a window and a "
            f"dictionary of a share of {share_of_slots:g}, got {layer.tokens} for {layer.name}"
        )
    return fields
