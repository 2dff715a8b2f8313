"""``python tests/gpus.py [run arguments]``: a run on nodes whose GPUs SLURM has invented.

torch is told that there are as many devices as CUDA_VISIBLE_DEVICES lists; nothing can be computed
on them, so this goes with ``--dry_run``. Says on stderr which rank is on which of SLURM's nodes:
nodes that one machine plays have one host name.
"""

from __future__ import annotations

import os
import sys

import torch

from fedapa_mpi import run
from fedapa_mpi.comm import launcher

if __name__ == "__main__":
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    torch.cuda.device_count = lambda: len(visible.split(",")) if visible else 0
    node = os.environ.get("SLURMD_NODENAME", "?")
    print(f"rank={launcher.declared_rank()} node={node} visible={visible}", file=sys.stderr)
    sys.exit(run.main(sys.argv[1:]))
