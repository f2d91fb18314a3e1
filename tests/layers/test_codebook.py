"""The codebook is k-means in moving averages: still within a forward, and no code stays dead."""

import subprocess
import sys
from datetime import timedelta

import pytest
import torch
from torch import Tensor, distributed

from ovq.layers.codebook import DEAD_AFTER, DECAY, Codebook


def clusters(num_tokens: int, seed: int = 0) -> Tensor:
    """Vectors of 2 heads near 3 centers each, unequally often; ``[2, T, 2, 4]``."""
    draw = torch.Generator().manual_seed(seed)
    centers = 3 * torch.eye(4)[:3]
    which = torch.tensor([0, 0, 0, 1, 1, 2])[torch.randint(6, (2, num_tokens, 2), generator=draw)]
    heads = torch.tensor([1.0, -1.0])[:, None]
    noise = 0.1 * torch.randn(2, num_tokens, 2, 4, generator=draw)
    return centers[which] * heads + noise


def train(codebook: Codebook, x: Tensor, num_forwards: int = 1) -> Codebook:
    for _ in range(num_forwards):
        codebook.begin_forward()
        codebook.record(x, codebook.assign(x))
        codebook.end_forward()
    return codebook


def copies(codebook: Codebook) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in codebook.state_dict().items()}


def test_averages_by_hand():
    codebook = Codebook(num_heads=1, num_codes=2, dim=1)
    codebook.codes.copy_(torch.tensor([0.0, 10.0]).view(1, 2, 1))
    codebook.shares.copy_(torch.tensor([0.5, 0.5]).view(1, 2))
    codebook.sums.copy_(torch.tensor([0.0, 5.0]).view(1, 2, 1))
    codebook.idle.zero_()
    train(codebook, torch.tensor([1.0, 2.0, 3.0, 8.0]).view(1, 4, 1, 1))
    torch.testing.assert_close(codebook.shares[0], torch.tensor([0.5, 0.5]).lerp(
        torch.tensor([0.75, 0.25]), 1 - DECAY))  # fmt: skip
    torch.testing.assert_close(codebook.sums[0, :, 0], torch.tensor([0.0, 5.0]).lerp(
        torch.tensor([6 / 4, 8 / 4]), 1 - DECAY))  # fmt: skip
    torch.testing.assert_close(codebook.error, torch.tensor([(1 + 4 + 9 + 4) / (1 + 4 + 9 + 64)]))
    assert codebook.codes.flatten().tolist() == [0.0, 10.0]
    codebook.begin_forward()
    expected = codebook.sums[0, :, 0] / codebook.shares[0]
    torch.testing.assert_close(codebook.codes[0, :, 0], expected)


def test_finds_the_centers_of_clusters():
    torch.manual_seed(0)
    codebook = train(Codebook(num_heads=2, num_codes=8, dim=4), clusters(50), num_forwards=30)
    codebook.begin_forward()
    for head, sign in enumerate((1, -1)):
        distances = torch.cdist(codebook.codes[head], sign * 3 * torch.eye(4)[:3])
        assert (distances.amin(0) < 0.2).all()
    assert (codebook.health().quantization_error < 0.01).all()


def test_health_by_hand():
    codebook = Codebook(num_heads=1, num_codes=4, dim=1)
    codebook.shares.copy_(torch.tensor([0.25, 0.25, 0.5, 0.0]))
    codebook.idle.copy_(torch.tensor([0, DEAD_AFTER - 1, 0, DEAD_AFTER]))
    health = codebook.health()
    assert health.live_codes.tolist() == [3]
    torch.testing.assert_close(health.perplexity, torch.tensor([2**1.5]))
    assert health.quantization_error is None


def test_more_codes_leave_less_error_and_none_dead():
    torch.manual_seed(0)
    few = train(Codebook(num_heads=2, num_codes=3, dim=4), clusters(200), num_forwards=20)
    many = train(Codebook(num_heads=2, num_codes=32, dim=4), clusters(200), num_forwards=20)
    assert (many.health().quantization_error < 0.7 * few.health().quantization_error).all()
    assert (many.health().live_codes >= 30).all()


def test_collapse_is_reported():
    """One vector, many codes: one is alive."""
    torch.manual_seed(0)
    codebook = train(Codebook(1, 8, 4), torch.ones(1, 20, 1, 4), num_forwards=2 * DEAD_AFTER)
    health = codebook.health()
    assert health.live_codes.tolist() == [1]
    assert health.perplexity.item() < 1.5
    assert health.quantization_error.item() < 1e-6


def test_a_code_that_died_is_put_on_a_vector_again():
    torch.manual_seed(0)
    codebook = train(Codebook(1, 2, 1), torch.tensor([-1.0, 1.0]).view(1, 2, 1, 1), 5)
    far = torch.tensor([9.0, 11.0]).view(1, 2, 1, 1)
    assert codebook.health().live_codes.tolist() == [2]
    train(codebook, far, DEAD_AFTER - 1)
    assert codebook.idle.max() == DEAD_AFTER - 1
    assert codebook.codes.amin() < 0
    train(codebook, far, 3)
    assert codebook.health().live_codes.tolist() == [2]
    codebook.begin_forward()
    assert codebook.codes.amin() > 8


def test_seeds_repeat_and_differ_from_code_to_code():
    x, books = clusters(100), []
    for _ in range(2):
        torch.manual_seed(0)
        books.append(train(Codebook(2, 16, 4), x, 2))
    first, second = (copies(codebook) for codebook in books)
    assert all(tensor.equal(second[name]) for name, tensor in first.items())
    assert len(books[0].sums[0].unique(dim=0)) == 16


def test_nothing_moves_until_the_forward_ends_and_codes_until_the_next_begins():
    codebook = train(Codebook(2, 5, 4), clusters(20), 3)
    codebook.begin_forward()
    before, x = copies(codebook), clusters(20, seed=1)
    codebook.record(x, codebook.assign(x))
    assert all(a.equal(before[name]) for name, a in copies(codebook).items())
    codebook.end_forward()
    assert codebook.codes.equal(before["codes"])
    assert not codebook.sums.equal(before["sums"])
    learned = copies(codebook)
    codebook.record(x, codebook.assign(x))  # by a backward that repeats the forward
    codebook.begin_forward()
    assert not codebook.codes.equal(before["codes"])
    codebook.end_forward()
    assert codebook.sums.equal(learned["sums"])


def test_several_records_of_a_forward_equal_one_of_all():
    x, books = clusters(30), []
    for parts in ([x], x.split([7, 23], dim=1)):
        torch.manual_seed(0)
        codebook = train(Codebook(2, 3, 4), clusters(200), 4)  # none is dead
        codebook.begin_forward()
        for part in parts:
            codebook.record(part, codebook.assign(part))
        codebook.end_forward()
        books.append(codebook)
    for (name, a), b in zip(copies(books[0]).items(), copies(books[1]).values(), strict=True):
        torch.testing.assert_close(a, b, msg=name)
    torch.testing.assert_close(books[0].error, books[1].error)


def test_averages_stay_in_float32():
    codebook = train(Codebook(2, 5, 4), clusters(20), 3)
    before = copies(codebook)
    codebook.to(torch.bfloat16).half()
    for name, tensor in copies(codebook).items():
        assert tensor.equal(before[name]), name
        assert tensor.dtype == before[name].dtype
    assert codebook.double().codes.dtype == torch.float64
    assert codebook.to("meta").codes.device.type == "meta"


def test_no_vectors_change_no_code():
    codebook = train(Codebook(2, 5, 4), clusters(200), 3)
    codebook.begin_forward()
    codes = codebook.codes.clone()
    train(codebook, clusters(0))
    codebook.begin_forward()
    torch.testing.assert_close(codebook.codes, codes)


def test_commitment_pulls_vectors_to_their_codes():
    codebook = train(Codebook(2, 5, 4), clusters(20), 3)
    x = clusters(6).requires_grad_()
    assigned = codebook.assign(x)
    loss = codebook.commitment(x, assigned)
    chosen = codebook.codes[torch.arange(2), assigned]
    torch.testing.assert_close(loss, (x - chosen).square().sum() / (2 * 6 * 2))
    (gradient,) = torch.autograd.grad(loss, [x])
    torch.testing.assert_close(gradient, 2 * (x - chosen).detach() / (2 * 6 * 2))


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_bad_sizes_raise(sizes):
    with pytest.raises(ValueError, match="must be at least 1, got 0"):
        Codebook(*sizes)


OTHER_PROCESS = """
import sys
from datetime import timedelta
import torch
from torch import distributed
from ovq.layers.codebook import Codebook

path, tensors = sys.argv[1] + "/store", torch.load(sys.argv[1] + "/tensors")
codebook = Codebook(1, 6, 3)
codebook.load_state_dict(tensors["codebook"])
distributed.init_process_group(
    "gloo", store=distributed.FileStore(path, 2), rank=1, world_size=2,
    timeout=timedelta(seconds=60),
)
for _ in range(3):
    codebook.begin_forward()
    codebook.record(tensors["x"], codebook.assign(tensors["x"]))
    codebook.end_forward()
torch.save(codebook.state_dict(), sys.argv[1] + "/learned")
distributed.destroy_process_group()
"""


def test_two_processes_learn_what_one_learns_of_both(tmp_path):
    torch.manual_seed(0)
    x, more = torch.randn(1, 40, 1, 3), torch.randn(1, 30, 1, 3)
    alone, together = train(Codebook(1, 6, 3), x, 3), Codebook(1, 6, 3)
    assert not alone.idle.any()  # so that no seed is needed
    together.load_state_dict(alone.state_dict())
    torch.save({"codebook": alone.state_dict(), "x": more}, tmp_path / "tensors")
    command = [sys.executable, "-c", OTHER_PROCESS, str(tmp_path)]
    with subprocess.Popen(command) as other:
        store = distributed.FileStore(str(tmp_path / "store"), 2)
        limit = timedelta(seconds=60)
        distributed.init_process_group("gloo", store=store, rank=0, world_size=2, timeout=limit)
        try:
            train(together, x, 3)
        finally:
            distributed.destroy_process_group()
        assert other.wait(timeout=60) == 0
    train(alone, torch.cat([x, more], dim=1), 3)
    there = torch.load(tmp_path / "learned")
    for name, tensor in alone.state_dict().items():
        torch.testing.assert_close(together.state_dict()[name], tensor)
        assert there[name].equal(together.state_dict()[name]), name
    torch.testing.assert_close(together.error, alone.error)
