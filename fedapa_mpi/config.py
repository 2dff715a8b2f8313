"""The configuration of a run: fields, checks, and the layers that its values come from."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from fedapa_mpi import strategies
from fedapa_mpi.checks import at_least, check_device, names_own_model, need, one_of
from fedapa_mpi.data import datasets, fedfile, partition
from fedapa_mpi.stopping import parse_duration

# the builders of models.py, named here because that imports torch
MODELS = ("cnn4", "lenet5", "mlp", "resnet18")


@dataclass(frozen=True)
class RunConfig:
    """What every strategy shares. The flags of the command line are made from these fields."""

    dataset: str = "digits"
    """Data set: digits, fmnist, mnist, cifar10, cifar100, groups, or your own as FILE.h5."""
    data_dir: str | None = None
    """Where the files of the data set are; searched first."""
    partition: str = "pathological"
    """How samples go to clients: pathological, dirichlet, iid, pfllib-pat or pfllib-dir."""
    alpha: float = 0.1
    """Concentration of the Dirichlet partitions; small is uneven."""
    classes_per_client: int = 2
    """Classes per client of the pathological partitions."""
    balance: bool = True
    """Partition pfllib-pat: whether the clients of a class get equal shares of it."""
    assignment: Literal["block", "random"] = "block"
    """Pathological: neighbours share their classes (the authors' form), or classes are drawn."""
    fraction: float = 1.0
    """Share of each client's training data that is kept, at least 16 samples."""
    min_train: int = 1
    """Fewest training samples of a client; a partition that gives less is drawn again."""
    min_test: int = 1
    """Fewest test samples of a client."""
    groups: int = 4
    """Data set groups: number of groups, each with distributions of its own."""
    group_noise: float = 1.5
    """Data set groups: standard deviation around a class mean; class means have 1."""
    group_samples: int = 32
    """Data set groups: training samples of each client."""
    clients: int = 20
    """Number of clients M."""
    holdout_clients: int = 0
    """Clients outside the M that are tried at the end: one download, one local training."""
    join_low: float = 0.6
    """Smallest share of the clients that is sampled in a round."""
    join_high: float = 1.0
    """Largest share of the clients that is sampled in a round."""
    rounds: int = 50
    """Number of rounds T."""
    epochs: int = 2
    """Local epochs E of a sampled client."""
    batch_size: int = 64
    """Batch size B of local training."""
    lr: float = 0.01
    """Learning rate of local training."""
    momentum: float = 0.9
    """Momentum of local training."""
    client_opt: Literal["persist", "reset"] = "persist"
    """Whether a client's momentum buffers live as long as the client or one round."""
    drop_last: Literal["auto", "true", "false"] = "auto"
    """Drop the incomplete batch; auto keeps it if it is the client's only one."""
    order: Literal["parallel", "sequential"] = "parallel"
    """Clients of a round at once, or each from what the one before it has changed."""
    model: str = "lenet5"
    """Model: mlp, lenet5, cnn4, resnet18, or your own as package.module:factory."""
    seed: int = 0
    """Seed of everything that is drawn."""
    threads: int = 1
    """CPU threads of each rank; results are bit-equal only for equal values."""
    device: str = "auto"
    """Device of the clients: auto (GPUs if there are any), cpu, cuda or cuda:N."""
    server_device: str = "cpu"
    """Device of the server."""
    dropout: float = 0.0
    """Probability that a sampled client fails to answer."""
    on_nonfinite: Literal["abort", "skip"] = "abort"
    """What an upload with NaN or infinity does to the run."""
    eval_every: int = 1
    """Evaluate every so many rounds, and after the last."""
    eval_points: str = "recv,post"
    """When a sampled client is evaluated: recv after its download, post after training."""
    unsampled: Literal["stale", "broadcast"] = "stale"
    """Others count with the model they hold, or with what the server would send them."""
    out: str | None = None
    """Folder of the run; default runs/STRATEGY-DATASET-TIME."""
    max_time: str | None = None
    """Stop in good order after this time: seconds, mm:ss, hh:mm:ss or d-hh:mm:ss."""
    grace: float | None = None
    """Seconds a round may go on after a request to stop; default 20 after SIGTERM, else 240."""
    watchdog: float | None = None
    """Give the run up when nothing has been heard from a rank for so many seconds."""
    checkpoint_every: str = "auto"
    """Write a checkpoint every so many rounds; auto spends at most 5 % of the time on them."""
    keep: int = 2
    """Checkpoints that are kept, at least 2."""
    record_A_every: int = 1
    """Record the weight matrix every so many rounds; 0 never."""

    # what a run may continue with although it was started with another value
    MAY_CHANGE: ClassVar[frozenset[str]] = frozenset(
        ["rounds", "out", "max_time", "grace", "watchdog", "checkpoint_every", "keep", "data_dir"]
    )
    # flag -> (other field, its values): anywhere else the flag would be ignored
    ONLY_IF: ClassVar[dict[str, tuple[str, tuple[Any, ...]]]] = {
        "partition": ("dataset", datasets.partitioned()),
        "fraction": ("dataset", datasets.partitioned()),
        "min_train": ("dataset", datasets.partitioned()),
        "min_test": ("dataset", datasets.partitioned()),
        "alpha": ("partition", ("dirichlet", "pfllib-dir")),
        "classes_per_client": ("partition", ("pathological", "pfllib-pat")),
        "assignment": ("partition", ("pathological",)),
        "balance": ("partition", ("pfllib-pat",)),
        "groups": ("dataset", ("groups",)),
        "group_noise": ("dataset", ("groups",)),
        "group_samples": ("dataset", ("groups",)),
        "data_dir": ("dataset", tuple(n for n in datasets.partitioned() if n != "digits")),
    }

    def __post_init__(self) -> None:
        need(
            self.dataset in datasets.names() or fedfile.is_path(self.dataset),
            "dataset",
            self.dataset,
            f"one of {', '.join(sorted(datasets.names()))}, or a federation as FILE.h5 "
            f"(see python -m fedapa_mpi.data --help)",
        )
        one_of("partition", self.partition, partition.names())
        need(
            self.model in MODELS or names_own_model(self.model),
            "model",
            self.model,
            f"one of {', '.join(MODELS)}, or your own as package.module:factory (no file name)",
        )
        for field in ("clients", "epochs", "batch_size", "rounds", "threads", "eval_every"):
            at_least(field, getattr(self, field), 1)
        for field in ("groups", "group_samples"):
            at_least(field, getattr(self, field), 1)
        need(
            self.dataset != "groups" or self.groups <= self.clients,
            "groups",
            self.groups,
            f"at most clients, which is {self.clients}",
        )
        for field in (
            "min_train",
            "min_test",
            "seed",
            "record_A_every",
            "holdout_clients",
            "classes_per_client",
        ):
            at_least(field, getattr(self, field), int(field == "classes_per_client"))
        at_least("keep", self.keep, 2)
        for field in ("fraction", "alpha", "lr", "group_noise"):
            value = getattr(self, field)
            need(0 < value < math.inf, field, value, "a finite number above 0")
        need(self.fraction <= 1, "fraction", self.fraction, "at most 1")
        need(0 <= self.momentum < 1, "momentum", self.momentum, "in [0, 1)")
        need(0 <= self.dropout <= 1, "dropout", self.dropout, "a probability in [0, 1]")
        for field in ("join_low", "join_high"):
            value = getattr(self, field)
            need(0 <= value <= 1, field, value, "a share of the clients in [0, 1]")
        need(
            self.join_low <= self.join_high,
            "join_low",
            self.join_low,
            f"at most join_high, which is {self.join_high}",
        )
        for field in ("grace", "watchdog"):
            value = getattr(self, field)
            need(value is None or 0 < value < math.inf, field, value, "seconds above 0")
        check_device("device", self.device, "auto")
        check_device("server_device", self.server_device)
        need(
            bool(self.points)
            and set(self.points) <= {"recv", "post"}
            and len(set(self.points)) == len(self.points),
            "eval_points",
            self.eval_points,
            "recv, post or recv,post",
        )
        every = self.checkpoint_every
        need(
            every == "auto" or (every.isdecimal() and int(every) > 0),
            "checkpoint_every",
            every,
            "auto or a number of rounds above 0",
        )
        if self.max_time is not None:
            parse_duration(self.max_time)

    @property
    def points(self) -> tuple[str, ...]:
        """The evaluation points, in the order of a round."""
        return tuple(sorted(self.eval_points.split(","), reverse=True)) if self.eval_points else ()


@dataclass(frozen=True)
class Experiment:
    """A strategy's name, the run's configuration and the strategy's own."""

    strategy: str
    run: RunConfig
    method: Any

    def flat(self) -> dict[str, Any]:
        """All values by field name, and ``strategy``: what files store."""
        return {
            "strategy": self.strategy,
            **dataclasses.asdict(self.run),
            **dataclasses.asdict(self.method),
        }

    @classmethod
    def from_flat(cls, values: Mapping[str, Any]) -> Experiment:
        """Back from ``flat``."""
        strategy = values["strategy"]
        Method = strategies.config_class(strategy)
        run, method = _only(values, RunConfig), _only(values, Method)
        return cls(strategy, RunConfig(**run), Method(**method))


def experiment(
    strategy: str,
    given: Mapping[str, Any],
    stored: Mapping[str, Any] | None = None,
    look: bool = False,
) -> Experiment:
    """Layers the values: given ones, else stored ones, else preset, data set and field defaults.

    Args:
        given: what the user asked for, by field.
        stored: the flat configuration of the run that is continued.
        look: also look into a data set that is a file, for its number of clients.

    Raises:
        ValueError: a value or a combination of values makes no sense; the message says why.
    """
    Method = strategies.config_class(strategy)
    asked = {**(stored or {}), **given}
    preset = asked.get("preset", "paper")
    presets = getattr(Method, "PRESETS", {"paper": {}})
    dataset = str(asked.get("dataset", RunConfig.dataset))
    defaults = datasets.DEFAULTS.get(dataset, {})
    if fedfile.is_path(dataset):
        asked["dataset"] = os.path.abspath(dataset)  # it can be resumed from anywhere
        if look:
            defaults = fedfile.defaults(dataset, int(asked.get("holdout_clients", 0)))
    values = {**defaults, **presets.get(preset, {}), **asked}
    run = RunConfig(**_only(values, RunConfig))
    method = Method(**_only(values, Method))
    orders = getattr(Method, "ORDERS", ("parallel",))
    if run.order not in orders:
        raise ValueError(f"order is {run.order}, but {strategy} knows only {', '.join(orders)}")
    return Experiment(strategy, run, method)


def meaningless(experiment: Experiment, given: Iterable[str]) -> list[str]:
    """One sentence for each flag given although another value makes it have no effect."""
    values = experiment.flat()
    rules = {**RunConfig.ONLY_IF, **getattr(type(experiment.method), "ONLY_IF", {})}

    def complaint(name: str) -> str | None:
        other, needed = rules[name]
        deeper = complaint(other) if other in rules else None
        if deeper or values[other] in needed:
            return deeper
        return (
            f"has no effect with {other}={values[other]}: it needs {other} "
            f"{' or '.join(map(str, needed))}"
        )

    found = {name: complaint(name) for name in rules if name in given}
    return [f"{name} {text}" for name, text in found.items() if text]


def field_names(config_class: type[Any]) -> tuple[str, ...]:
    """The names of a configuration's fields."""
    return tuple(field.name for field in dataclasses.fields(config_class))


def _only(values: Mapping[str, Any], config_class: type[Any]) -> dict[str, Any]:
    return {name: values[name] for name in field_names(config_class) if name in values}
