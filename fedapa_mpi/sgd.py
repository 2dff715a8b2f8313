"""torch's SGD without its compiler, whose import would cost every rank a second of a core.

At their first call torch's optimizers import ``torch._dynamo``, only to keep it out of their own
methods. Nothing is compiled here, so the methods are called as they were before torch wrapped
them. A torch that wraps in another way is left alone: it only starts slower.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

_plain_step = inspect.unwrap(torch.optim.SGD.step)

for _name in ("add_param_group", "load_state_dict", "state_dict", "zero_grad"):
    _method = inspect.unwrap(getattr(torch.optim.Optimizer, _name))
    _method.__dynamo_disable = _method  # "the compiler is out of it already"


class SGD(torch.optim.SGD):
    """``torch.optim.SGD``, number for number."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step along the gradients."""
        return _plain_step(self, closure)


class ClippedSGD(SGD):
    """SGD on gradients whose joint norm is first cut down to ``clip``."""

    def __init__(self, parameters: Iterable[Tensor], clip: float, **options: Any) -> None:
        super().__init__(parameters, **options)
        self.clip = clip

    def step(self, closure: Any = None) -> Any:
        """One step along the clipped gradients."""
        nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], self.clip)
        return super().step(closure)
