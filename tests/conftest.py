"""What every test needs: one torch thread for each of the workers that share the machine, and no deadlines.

The number of threads is set before torch is imported: OpenMP reads it once.
"""

from __future__ import annotations

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"

import hypothesis
import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

# A busy machine is no failure, and a failure seen once must be seen again.
hypothesis.settings.register_profile("lohan", deadline=None, derandomize=True, print_blob=False)
hypothesis.settings.load_profile("lohan")
