"""Models, split into the extractor that may travel and the head that stays.

Sizes of LeNet-5: Y. LeCun et al., "Gradient-based learning applied to document recognition",
Proc. IEEE 86, 1998, with ReLU, max-pooling and no padding, as in the FedAPA experiments; the CNN
of four layers is theirs too. ResNet-18: K. He et al., "Deep Residual Learning for Image
Recognition", CVPR 2016. Features are taken after the last ReLU before the head.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedapa_mpi import own_model


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
    _need_image("lenet5", input_shape, 16)
    extractor = nn.Sequential(
        *_two_convolutions(input_shape[0], 6, 16),
        nn.Linear(16 * _pixels_left(input_shape), 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
    )
    return SplitModel(extractor, nn.Linear(84, classes))


def cnn4(input_shape: tuple[int, ...], classes: int) -> SplitModel:
    """The 4-layer CNN of the FedAPA experiments, 512 features, for images as LeNet-5's.

    Raises:
        ValueError: the input is not such an image.
    """
    _need_image("cnn4", input_shape, 16)
    extractor = nn.Sequential(
        *_two_convolutions(input_shape[0], 32, 64),
        nn.Linear(64 * _pixels_left(input_shape), 512),
        nn.ReLU(),
    )
    return SplitModel(extractor, nn.Linear(512, classes))


def resnet18(input_shape: tuple[int, ...], classes: int) -> SplitModel:
    """torchvision's ResNet-18, untrained, adapted to small images; 512 features, BatchNorm.

    The first convolution is 3 x 3 with stride 1 and padding 1 instead of 7 x 7 with stride 2, and
    the max-pooling after it is left out: both are made for images of 224 x 224.

    Raises:
        ValueError: the input is not an image [channels, height, width] of at least 8 x 8.
    """
    _need_image("resnet18", input_shape, 8)  # three strides of 2 leave one pixel
    from torchvision.models import resnet18 as untrained  # costs every rank a second

    extractor = untrained(weights=None, num_classes=1)
    extractor.conv1 = nn.Conv2d(input_shape[0], 64, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(extractor.conv1.weight, mode="fan_out", nonlinearity="relu")
    extractor.maxpool, extractor.fc = nn.Identity(), nn.Identity()
    return SplitModel(extractor, nn.Linear(512, classes))


BUILDERS = {"mlp": mlp, "lenet5": lenet5, "cnn4": cnn4, "resnet18": resnet18}


def build(name: str, input_shape: tuple[int, ...], classes: int) -> SplitModel:
    """The model ``name`` for inputs of one shape, initialised from torch's global generator.

    Args:
        name: of a builder, or ``package.module:factory`` for a model of the user's.

    Raises:
        ValueError: the model cannot take inputs of this shape, or is not made by the rule.
    """
    if ":" in name:
        return SplitModel(*own_model.parts(name, input_shape, classes))
    return BUILDERS[name](input_shape, classes)


def check(name: str, input_shape: tuple[int, ...], classes: int) -> None:
    """Raises ValueError if the model does not fit the data; to be asked once, before a run."""
    with torch.random.fork_rng([]):
        if ":" in name:
            own_model.check(name, input_shape, classes)
        else:
            build(name, input_shape, classes)


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """A copy of tensors as one vector [P]."""
    parts = [tensor.detach().reshape(-1) for tensor in tensors]
    return torch.cat(parts) if parts else torch.empty(0)


@torch.no_grad()
def fill(tensors: Iterable[Tensor], values: Tensor) -> None:
    """Copies a vector [P] into tensors."""
    targets = list(tensors)
    sizes = [tensor.numel() for tensor in targets]
    if sum(sizes) != values.numel():
        raise ValueError(f"{values.numel()} values came for a model part of {sum(sizes)}")
    for tensor, part in zip(targets, values.split(sizes), strict=True):
        tensor.copy_(part.view_as(tensor))


def vector(module: nn.Module) -> Tensor:
    """A copy of all parameters as one vector [P], in ``parameters()`` order."""
    return flat(module.parameters())


def set_vector(module: nn.Module, values: Tensor) -> None:
    """Copies a vector [P] into the parameters."""
    fill(module.parameters(), values)


def named(module: nn.Module, values: Tensor) -> dict[str, Tensor]:
    """Views into a vector [P] by parameter name, for ``functional_call``; gradients reach it."""
    own = dict(module.named_parameters())
    parts = values.split([tensor.numel() for tensor in own.values()])
    return {name: part.view_as(own[name]) for name, part in zip(own, parts, strict=True)}


def buffers(module: nn.Module) -> Tensor:
    """A copy of the floating-point buffers (BatchNorm statistics) as one vector, maybe empty.

    Integer counters are not among them: they stay with the client.
    """
    return flat(_float_buffers(module))


def set_buffers(module: nn.Module, values: Tensor) -> None:
    """Copies a vector into the floating-point buffers."""
    fill(_float_buffers(module), values)


def outgoing(module: nn.Module, name: str) -> dict[str, Tensor]:
    """A model part as it travels: ``name`` [P] and, if it has any, ``name_buffers``."""
    return packed(name, vector(module), buffers(module))


def packed(name: str, values: Tensor, statistics: Tensor) -> dict[str, Tensor]:
    """The message that ``install`` takes, from parameters [P] and buffers [Q], maybe none."""
    return {name: values} | ({f"{name}_buffers": statistics} if statistics.numel() else {})


def install(module: nn.Module, name: str, message: Mapping[str, Tensor]) -> None:
    """Copies what ``outgoing`` sent into a model part."""
    set_vector(module, message[name])
    if f"{name}_buffers" in message:
        set_buffers(module, message[f"{name}_buffers"])


def feature_size(model: SplitModel) -> int:
    """D, the number of features that the head takes: columns of its first weight matrix [*, D].

    Raises:
        ValueError: the head has no weight matrix.
    """
    for parameter in model.head.parameters():
        if parameter.dim() == 2:
            return parameter.shape[1]
    raise ValueError(
        f"the head, a {type(model.head).__name__}, has no weight matrix [*, D] that tells how many "
        f"features it takes: this strategy needs one, for example nn.Linear(D, classes)"
    )


def has_batchnorm(module: nn.Module) -> bool:
    """Whether a batch of one sample would fail or be meaningless in training."""
    return any(isinstance(m, _BatchNorm) for m in module.modules())


def _need_image(name: str, input_shape: tuple[int, ...], least: int) -> None:
    if len(input_shape) != 3 or min(input_shape[1:]) < least:
        raise ValueError(
            f"{name} needs images [channels, height, width] of at least {least} x {least}, this "
            f"data set has inputs {list(input_shape)}: use --model mlp or another data set"
        )


def _two_convolutions(channels: int, first: int, second: int) -> list[nn.Module]:
    """Two convolutions 5 x 5 without padding, each with ReLU and 2 x 2 max-pooling; flat [B, D]."""
    return [
        nn.Conv2d(channels, first, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(first, second, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
    ]


def _pixels_left(input_shape: tuple[int, ...]) -> int:
    """Pixels of one channel after ``_two_convolutions``."""
    height, width = (((size - 4) // 2 - 4) // 2 for size in input_shape[1:])
    return height * width


def _float_buffers(module: nn.Module) -> Iterator[Tensor]:
    return (b for b in module.buffers() if b.is_floating_point())
