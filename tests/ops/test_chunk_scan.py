"""The scan over chunks: the loop it stands for, and its gradients."""

import pytest
import torch
from torch import Tensor

from ovq.ops.chunk_scan import _scan, scan_chunks, scan_corrected_chunks

ROWS, HEADS, K, V, C = 2, 3, 4, 5, 6


def leaves(num_chunks: int) -> list[Tensor]:
    """Decays, additions, keys, what is written and recalled, a memory."""
    draw = torch.Generator().manual_seed(num_chunks)
    shapes = [(num_chunks, ROWS, HEADS, *of) for of in ((), (K, V), (K, C), (C, V), (C, K))]
    shapes.append((ROWS, HEADS, K, V))
    return [0.5 * torch.randn(s, generator=draw, dtype=torch.float64) for s in shapes]


@pytest.mark.parametrize("num_chunks", [1, 2, 5])
def test_the_scans_are_their_loops(num_chunks):
    whole, added, keys, written, recalled, start = leaves(num_chunks)
    before, last = scan_chunks(whole, added, start)
    corrected, u, corrected_last = scan_corrected_chunks(whole, keys, written, recalled, start)
    h = g = start
    for m, w in enumerate(whole[..., None, None]):
        torch.testing.assert_close(before[m], h)
        torch.testing.assert_close(corrected[m], g)
        h = w * h + added[m]
        torch.testing.assert_close(u[m], written[m] + recalled[m] @ g)
        g = w * g + keys[m] @ u[m]
    torch.testing.assert_close(last, h)
    torch.testing.assert_close(corrected_last, g)


@pytest.mark.parametrize("num_chunks", [1, 3])
def test_first_and_second_gradients(num_chunks):
    *of_chunks, start = leaves(num_chunks)
    whole, added, *corrections = (x[:, :1, :1] for x in of_chunks)
    start = start[:1, :1]
    for scan, arguments in (
        (scan_chunks, (whole, added, start)),
        (scan_corrected_chunks, (whole, *corrections, start)),
    ):
        arguments = [x.detach().requires_grad_() for x in arguments]
        assert torch.autograd.gradcheck(scan, arguments, fast_mode=True)
        assert torch.autograd.gradgradcheck(scan, arguments, fast_mode=True)


@pytest.mark.plain
@pytest.mark.parametrize("from_the_end", [False, True])
def test_the_operator_keeps_torchs_rules(from_the_end):
    whole, *others = leaves(3)
    whole, added, *corrections, start = (
        x.requires_grad_() for x in (whole[..., None, None], *others)
    )
    rules = ("test_schema", "test_autograd_registration", "test_faketensor")
    for rest in (corrections, [None] * 3):
        arguments = (whole, added, start, *rest, from_the_end)
        torch.library.opcheck(_scan, arguments, test_utils=rules)
