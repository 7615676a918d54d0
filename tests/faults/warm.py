"""What the server of processes imports before it forks any."""

from __future__ import annotations

import torch

torch.set_num_threads(1)  # a pool of threads would not survive the fork

from tests.faults import processes  # noqa: E402, F401
from tests.parity.harness import tiny_model  # noqa: E402
from tests.parity.test_placements import shape_of  # noqa: E402

tiny_model("llama")
shape_of("llama")  # a plan by hand needs it
