"""The kernels in a process of vLLM, which allows nobody to change the number of torch's threads."""

import os
import subprocess
import sys

SCRIPT = """
import torch
from hasslefree.packed.kernels import ops
torch.set_num_threads(1)
torch.set_num_threads = lambda count: None
ops.groups_product(torch.ones(1, 64), torch.ones(2, 32), torch.full((2, 8), 0x44, dtype=torch.uint8), 2, 4)
print(torch.get_num_threads())
"""


def test_the_first_kernel_leaves_the_number_of_threads_as_it_was():
    """Oracle: the number that was set. Numba starts its own threads with the first kernel that runs in parallel."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment)
    assert done.stdout == "1\n", done.stderr
