"""Settings for all tests. The tiny problem is in tiny.py, launches as processes in launching.py."""

import torch

torch.set_num_threads(1)  # torch's default follows the machine, and with it the last bits
