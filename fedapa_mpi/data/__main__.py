"""Federations as files: ``python -m fedapa_mpi.data export|inspect|validate``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from jsonargparse import ArgumentParser

from fedapa_mpi import cli, strategies
from fedapa_mpi.config import RunConfig, experiment, meaningless
from fedapa_mpi.data import faults, fedfile

HELP = """usage: python -m fedapa_mpi.data export --out FED.h5 [--FLAG VALUE ...]
       python -m fedapa_mpi.data inspect FED.h5
       python -m fedapa_mpi.data validate FED.h5

  export    write a built-in data set, partitioned as a run would, in the format that a run
            reads with --dataset FED.h5; "export --help" lists the flags
  inspect   print what a federation file says of itself, and each client's samples by class
  validate  name client, split and field of every fault; exit status 1 if there is one

The format, for M clients and C classes; n and n_test may be 0:

  /clients/0000/train/x  [n, ...] uint8 or float32     /clients/0000/train/y  [n] integers < C
  /clients/0000/test/x   [n_test, ...]                 /clients/0000/test/y   [n_test]
  /clients/0001/...      up to M - 1, with four digits or more
  /groups [M]            optional integers: which clients belong together
  attributes of /:  format = 1, classes = C, input_shape = shape of one sample; optional scale,
                    mean, std: a run trains on (x / scale - mean) / std, mean and std being numbers
                    or lists with one per channel; name, class_names
"""
# fields of a run that decide who gets which data
FIELDS = (
    "dataset",
    "data_dir",
    "partition",
    "alpha",
    "classes_per_client",
    "balance",
    "assignment",
    "fraction",
    "min_train",
    "min_test",
    "groups",
    "group_noise",
    "group_samples",
    "clients",
    "seed",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Carries out one command; returns 0, 1 for a file with faults, 2 for an error."""
    words = list(sys.argv[1:] if argv is None else argv)
    commands = {"export": _export, "inspect": _inspect, "validate": _validate}
    if not words or words[0] in ("--help", "-h"):
        print(HELP, end="")
        return 0 if words else 2
    try:
        if words[0] not in commands:
            raise ValueError(f"{words[0]!r} is no command, expected one of {', '.join(commands)}")
        return commands[words[0]](words[1:])
    except BrokenPipeError:  # whoever reads the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        print(f"fedapa-mpi: error: {error}", file=sys.stderr)
        return 2


def _export(argv: Sequence[str]) -> int:
    parser = _parser()
    if {"--help", "-h"} & set(argv):
        print(parser.format_help(), end="")
        return 0
    given = cli.parse(parser, argv)
    path = given.pop("out", None)
    if path is None or not fedfile.is_path(path):
        endings = " or ".join(fedfile.SUFFIXES)
        raise ValueError(f"--out is {path}, expected the name of a new file that ends in {endings}")
    fedfile.check_new(path)
    _write(path, given)
    print(f"{path}: {_summary(path)}")
    return 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="python -m fedapa_mpi.data export",
        usage="%(prog)s --out FED.h5 [--FLAG VALUE ...]",
        description="Writes a built-in data set, partitioned as a run with the same flags would.",
        exit_on_error=False,
        default_env=False,
        allow_abbrev=False,
    )
    parser.add_argument("--out", type=str, help="The file to write; it must not exist.")
    docs = strategies.field_docs(cli.CONFIG_FILE, "RunConfig")
    cli.add_fields(parser, RunConfig, docs, FIELDS)
    return parser


def _write(path: str, given: dict[str, Any]) -> None:
    from fedapa_mpi.data.prepare import prepare  # imports torch

    asked = experiment("local", given)
    complaints = meaningless(asked, given)
    if fedfile.is_path(asked.run.dataset):
        complaints = [f"dataset is {asked.run.dataset}, expected a built-in set: copy the file"]
    if complaints:
        raise ValueError("; ".join(complaints))
    made = prepare(asked.run)
    first = made.shards[0]
    head = fedfile.Header(
        made.classes,
        made.input_shape,
        first.scale,
        first.mean,
        first.std,
        name=asked.run.dataset,
        partition="" if made.groups is not None else asked.run.partition,
        partition_hash=made.partition_hash,
    )
    clients = (
        {name: tensor.numpy() for name, tensor in shard.message().items()} for shard in made.shards
    )
    fedfile.write(path, head, clients, made.groups)


def _inspect(argv: Sequence[str]) -> int:
    path = _path(argv)
    faults.refuse_faulty(path)
    with fedfile.reading(path) as file:
        for name, value in vars(file.header).items():
            if value not in ("", ()):
                print(f"{name}: {_text(value)}")
        rows = list(_rows(file))
    widths = [max(map(len, column)) for column in zip(*rows)]
    for *numbers, classes in rows:
        cells = [f"{text:>{width}}" for text, width in zip(numbers, widths)]
        print("  ".join([*cells, classes]))
    print(_summary(path))
    return 0


def _rows(file: fedfile.FederationFile) -> Iterator[list[str]]:
    grouped = file.groups is not None
    yield ["client", *["group"] * grouped, "train", "test", "class:training samples"]
    for i in range(len(file)):
        labels = file.labels(i, "train")
        counts = np.bincount(labels, minlength=file.header.classes)
        held = " ".join(f"{c}:{counts[c]}" for c in np.flatnonzero(counts))
        group = [] if file.groups is None else [str(file.groups[i])]
        yield [str(i), *group, str(labels.size), str(file.labels(i, "test").size), held]


def _validate(argv: Sequence[str]) -> int:
    path = _path(argv)
    found = faults.all_faults(path)
    for fault in found:
        print(f"{path}: {fault}")
    print(f"{path}: {len(found)} faults" if found else f"{path}: no faults, {_summary(path)}")
    return 1 if found else 0


def _path(argv: Sequence[str]) -> str:
    if len(argv) != 1 or argv[0].startswith("-"):
        raise ValueError(f"{' '.join(argv) or 'nothing'} is given, expected the path of one file")
    return argv[0]


def _summary(path: str) -> str:
    with fedfile.reading(path) as file:
        sizes = [
            sum(file.labels(i, split).size for i in range(len(file))) for split in fedfile.SPLITS
        ]
        return (
            f"{len(file)} clients with {sizes[0]:,} training and {sizes[1]:,} test samples of "
            f"{file.header.classes} classes"
        )


def _text(value: Any) -> str:
    many = isinstance(value, Iterable) and not isinstance(value, str)
    return ", ".join(map(str, value)) if many else str(value)


if __name__ == "__main__":
    sys.exit(main())
