"""Two processes train as one: the same gradients, the same codebooks in both."""

import os
import subprocess
import sys

# Run by each process: three steps on its half of a batch, beside a model that sees the whole.
STEPS = """
import sys

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from ovq.models import OVQConfig, OVQForCausalLM


def make(pattern):
    torch.manual_seed(0)
    return OVQForCausalLM(OVQConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, window_size=5,
        num_attention_heads=4, num_key_value_heads=2, layer_pattern=pattern, num_codes=7,
        dictionary={"num_centroids": 6, "chunk_size": 4}, block_size=3, initializer_range=0.3,
    )).train()


def step(model, optimizer, ids):
    optimizer.zero_grad()
    model(ids, labels=ids).loss.backward()
    optimizer.step()


distributed.init_process_group("gloo")
rank = distributed.get_rank()
ids = torch.randint(1, 61, (4, 13), generator=torch.Generator().manual_seed(0))

alone, shared = make(["sliding_window", "ovq"]), make(["sliding_window", "ovq"])
together = DistributedDataParallel(shared)
optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (alone, shared)]
for _ in range(3):
    step(alone, optimizers[0], ids)
    step(together, optimizers[1], ids[2 * rank : 2 * rank + 2])
    for found, expected in zip(shared.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, atol=1e-5, rtol=1e-4)

shared = make(["vq", "vq_static_values"])
together = DistributedDataParallel(shared, broadcast_buffers=False)
before = {name: buffer.clone() for name, buffer in shared.named_buffers()}
for _ in range(3):
    step(together, torch.optim.SGD(shared.parameters(), lr=0.1), ids[2 * rank : 2 * rank + 2])
for name, tensor in shared.state_dict().items():
    other = tensor.clone()
    distributed.broadcast(other, src=0)
    assert other.equal(tensor), name
    assert name not in before or not tensor.equal(before[name]), name
print("equal", flush=True)
distributed.destroy_process_group()
"""


def test_two_processes_train_as_one(tmp_path):
    """Gradients are the mean of one process that sees both halves; OVQ states need no exchange.

    Codebooks, which learn in the forward pass, stay in step to the bit without being broadcast.
    """
    script = tmp_path / "steps.py"
    script.write_text(STEPS)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    run = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", str(script)],
        capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("equal") == 2
