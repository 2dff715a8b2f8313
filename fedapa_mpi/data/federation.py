"""One client's data: cut out on rank 0, sent as one message, normalised on the client's device."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedapa_mpi.data.datasets import Dataset
from fedapa_mpi.data.hashes import client_hash, federation_hash
from fedapa_mpi.data.partition import Partition


@dataclass(frozen=True, eq=False)
class Shard:
    """The samples of one client, on one device, and how to normalise them. May hold no samples.

    Raises ValueError if samples and labels do not fit together.
    """

    x: Tensor  # [n, ...] as stored (uint8 or float32), float32 after `on`
    y: Tensor  # int64 [n]
    x_test: Tensor  # [n_test, ...]
    y_test: Tensor  # int64 [n_test]
    classes: int
    scale: float
    mean: tuple[float, ...]  # one per channel (second axis of x), or one for all
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        for which, x, y in (("training", self.x, self.y), ("test", self.x_test, self.y_test)):
            if y.dtype != torch.int64 or y.shape != x.shape[:1]:
                raise ValueError(
                    f"{which} labels are {y.dtype} {list(y.shape)} for samples of shape "
                    f"{list(x.shape)}: expected torch.int64 with one label per sample"
                )
        if self.x.shape[1:] != self.x_test.shape[1:]:
            raise ValueError(
                f"test samples have shape {list(self.x_test.shape[1:])}, training samples "
                f"{list(self.x.shape[1:])}: both must be the same"
            )
        channels = self.input_shape[0] if self.input_shape else 1
        if len(self.mean) != len(self.std) or len(self.mean) not in (1, channels):
            raise ValueError(
                f"normalisation has {len(self.mean)} means and {len(self.std)} standard "
                f"deviations: expected one of each, or {channels} (one per channel)"
            )

    @property
    def n(self) -> int:
        """Number of training samples."""
        return len(self.y)

    @property
    def n_test(self) -> int:
        """Number of test samples."""
        return len(self.y_test)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample, known for an empty shard too."""
        return tuple(self.x.shape[1:])

    def message(self) -> dict[str, Tensor]:
        """Everything `from_message` needs, as named tensors."""
        return {
            "x": self.x,
            "y": self.y,
            "x_test": self.x_test,
            "y_test": self.y_test,
            "classes": torch.tensor([self.classes]),  # [1] int64
            "normalisation": torch.tensor(  # [1 + 2 * channels] float64: scale, means, deviations
                [self.scale, *self.mean, *self.std], dtype=torch.float64
            ),
        }

    @classmethod
    def from_message(cls, message: dict[str, Tensor]) -> "Shard":
        """The shard that `message` describes; its tensors are the message's own, not copies."""
        scale, *moments = message["normalisation"].tolist()
        channels = len(moments) // 2
        return cls(
            x=message["x"],
            y=message["y"],
            x_test=message["x_test"],
            y_test=message["y_test"],
            classes=int(message["classes"]),
            scale=scale,
            mean=tuple(moments[:channels]),
            std=tuple(moments[channels:]),
        )

    def on(self, device: torch.device | str) -> "Shard":
        """A shard on `device` with float32 samples (x / scale - mean) / std; this one is unchanged.

        Samples move before they are converted: four times fewer bytes cross to the device.
        """
        return replace(
            self,
            x=self._normalised(self.x.to(device)),
            y=self.y.to(device),
            x_test=self._normalised(self.x_test.to(device)),
            y_test=self.y_test.to(device),
            scale=1.0,
            mean=(0.0,),
            std=(1.0,),
        )

    def _normalised(self, x: Tensor) -> Tensor:
        channelwise = (-1, *[1] * (x.ndim - 2)) if len(self.mean) > 1 else (1,)
        mean = torch.tensor(self.mean, device=x.device).view(channelwise)
        std = torch.tensor(self.std, device=x.device).view(channelwise)
        normalised = (x.to(torch.float32) / self.scale - mean) / std
        # Images of one channel keep odd strides on some ways here; convolutions look at them, take
        # another algorithm, and round otherwise: the bits would depend on the number of ranks.
        return torch.empty(x.shape, device=x.device).copy_(normalised)


def shards(dataset: Dataset, partition: Partition) -> list[Shard]:
    """Each client's own contiguous copy of its samples, in client order, in the source's dtype."""
    x, x_test = partition.sources(dataset.x_train, dataset.x_test)
    y, y_test = partition.sources(dataset.y_train, dataset.y_test)
    return [
        Shard(
            x=_rows(x, train),
            y=_rows(y, train),
            x_test=_rows(x_test, test),
            y_test=_rows(y_test, test),
            classes=dataset.classes,
            scale=dataset.scale,
            mean=dataset.mean,
            std=dataset.std,
        )
        for train, test in zip(partition.train, partition.test)
    ]


def shard_hash(shard: Shard) -> str:
    """Sha256 (hex) over the samples, labels, number of classes and normalisation of a client."""
    return client_hash({name: t.cpu().numpy() for name, t in shard.message().items()})


def data_hash(shards: Iterable[Shard]) -> str:
    """Sha256 (hex) over all shards, in the order given: equal hashes mean equal federations."""
    return federation_hash(map(shard_hash, shards))


def _rows(array: np.ndarray, indices: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array[indices]))
