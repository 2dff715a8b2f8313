"""Models, split into the extractor that may travel and the head that stays.

Sizes of LeNet-5: Y. LeCun et al., "Gradient-based learning applied to document recognition",
Proc. IEEE 86, 1998, with ReLU, max-pooling and no padding, as in the FedAPA experiments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class SplitModel(nn.Module):
    """``head(extractor(x))``: features [B, D] from the extractor, logits [B, C] from the head."""

    def __init__(self, extractor: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.extractor = extractor
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.extractor(x))


def mlp(input_shape: tuple[int, ...], classes: int) -> SplitModel:
    """A perceptron with 64 hidden units and 32 features, for input of any shape."""
    inputs = 1
    for size in input_shape:
        inputs *= size
    extractor = nn.Sequential(
        nn.Flatten(), nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU()
    )
    return SplitModel(extractor, nn.Linear(32, classes))


def lenet5(input_shape: tuple[int, ...], classes: int) -> SplitModel:
    """LeNet-5 with 84 features, for images [channels, height, width] of at least 16 x 16.

    Raises:
        ValueError: the input is not such an image.
    """
    if len(input_shape) != 3 or min(input_shape[1:]) < 16:
        raise ValueError(
            f"lenet5 needs images [channels, height, width] of at least 16 x 16, this data set "
            f"has inputs {list(input_shape)}: use --model mlp or another data set"
        )
    channels, height, width = (
        input_shape[0],
        *(((size - 4) // 2 - 4) // 2 for size in input_shape[1:]),
    )
    extractor = nn.Sequential(
        nn.Conv2d(channels, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * height * width, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
    )
    return SplitModel(extractor, nn.Linear(84, classes))


BUILDERS = {"mlp": mlp, "lenet5": lenet5}


def build(name: str, input_shape: tuple[int, ...], classes: int) -> SplitModel:
    """The model ``name`` for inputs of one shape, initialised from torch's global generator.

    Raises:
        ValueError: the model cannot take inputs of this shape.
    """
    return BUILDERS[name](input_shape, classes)


def vector(module: nn.Module) -> Tensor:
    """A copy of all parameters as one vector [P], in ``parameters()`` order."""
    return _flat(p.detach() for p in module.parameters())


@torch.no_grad()
def set_vector(module: nn.Module, values: Tensor) -> None:
    """Copies a vector [P] into the parameters."""
    _fill(module.parameters(), values)


def buffers(module: nn.Module) -> Tensor:
    """A copy of the floating-point buffers (BatchNorm statistics) as one vector, maybe empty.

    Integer counters are not among them: they stay with the client.
    """
    return _flat(_float_buffers(module))


@torch.no_grad()
def set_buffers(module: nn.Module, values: Tensor) -> None:
    """Copies a vector into the floating-point buffers."""
    _fill(_float_buffers(module), values)


def outgoing(module: nn.Module, name: str) -> dict[str, Tensor]:
    """A model part as it travels: ``name`` [P] and, if it has any, ``name_buffers``."""
    message = {name: vector(module)}
    statistics = buffers(module)
    if statistics.numel():
        message[f"{name}_buffers"] = statistics
    return message


def install(module: nn.Module, name: str, message: Mapping[str, Tensor]) -> None:
    """Copies what ``outgoing`` sent into a model part."""
    set_vector(module, message[name])
    if f"{name}_buffers" in message:
        set_buffers(module, message[f"{name}_buffers"])


def has_batchnorm(module: nn.Module) -> bool:
    """Whether a batch of one sample would fail or be meaningless in training."""
    return any(isinstance(m, _BatchNorm) for m in module.modules())


def _float_buffers(module: nn.Module) -> Iterator[Tensor]:
    return (b for b in module.buffers() if b.is_floating_point())


def _flat(tensors: Iterator[Tensor]) -> Tensor:
    parts = [tensor.reshape(-1) for tensor in tensors]
    return torch.cat(parts) if parts else torch.empty(0)


def _fill(tensors: Iterator[Tensor], values: Tensor) -> None:
    targets = list(tensors)
    sizes = [tensor.numel() for tensor in targets]
    if sum(sizes) != values.numel():
        raise ValueError(f"{values.numel()} values came for a model part of {sum(sizes)}")
    for tensor, part in zip(targets, values.split(sizes), strict=True):
        tensor.copy_(part.view_as(tensor))
