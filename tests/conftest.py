"""Settings of every test run: one thread, and the same examples from hypothesis each time."""

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile(
    "ovq", deadline=None, derandomize=True, database=None, max_examples=20, print_blob=False
)
settings.load_profile("ovq")
