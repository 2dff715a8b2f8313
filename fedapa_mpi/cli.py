"""The command line: one flat parser made from the fields of a run and of its strategy."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser

from fedapa_mpi import __version__, strategies
from fedapa_mpi.config import Experiment, RunConfig, experiment, field_names, meaningless

DEFAULT_STRATEGY = "fedapa"
_COMMANDS = ("config", "print_config", "resume", "dry_run", "version")
CONFIG_FILE = Path(__file__).with_name("config.py")


@dataclass(frozen=True)
class Request:
    """What the user asked for, before anything stored is known."""

    strategy: str | None  # None: not said
    argv: tuple[str, ...] = ()  # flags, hyphens in names turned into underscores
    file: Mapping[str, str] = field(default_factory=dict)  # the values of --config
    resume: str | None = None  # a run's folder, or "auto"
    out: str | None = None
    dry_run: bool = False


class Finished(Exception):
    """There is nothing to run: ``text`` is the answer."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


def read(argv: Sequence[str]) -> Request:
    """Reads the command line as far as it goes without the stored configuration of a resumed run.

    Raises:
        Finished: for ``--help``, ``--version`` and ``--print_config``.
        ValueError: for anything that is wrong, unless only a resumed run's strategy can tell.
    """
    argv = [_underscores(word) for word in argv]
    if "--version" in argv:
        raise Finished(f"fedapa-mpi {__version__}")
    word = argv.pop(0) if argv and not argv[0].startswith("-") else None
    file = _read_yaml(_value_of("--config", argv))
    named = file.pop("strategy", None)
    strategy = word or named
    if strategy is not None and strategy not in strategies.names():
        known = ", ".join(strategies.names())
        raise ValueError(f"strategy is {strategy!r}, expected one of {known}")
    if {"--help", "-h"} & set(argv):
        raise Finished(parser(strategy or DEFAULT_STRATEGY).format_help())
    print_config = "--print_config" in argv
    request = Request(
        strategy=strategy,
        argv=tuple(w for w in argv if w != "--print_config"),
        file=file,
        resume=_value_of("--resume", argv),
        out=_value_of("--out", argv) or file.get("out"),
        dry_run="--dry_run" in argv,
    )
    if request.resume and not print_config:
        return request  # its flags are read once the stored strategy and values are known
    asked = resolve(request, look=print_config)
    if print_config:
        raise Finished(yaml.safe_dump(asked.flat(), sort_keys=False).rstrip())
    return request


def resolve(
    request: Request, stored: Mapping[str, Any] | None = None, look: bool = False
) -> Experiment:
    """The configuration that a request means, on top of a stored one if a run is continued.

    Args:
        look: also look into a data set that is a file, which only rank 0 should do.

    Raises:
        ValueError: an unknown flag, a bad value, or a flag that would have no effect.
    """
    strategy = request.strategy or (stored or {}).get("strategy") or DEFAULT_STRATEGY
    from_file = _parsed(strategy, request.file)
    from_argv = _parsed(strategy, request.argv)
    asked = experiment(strategy, {**from_file, **from_argv}, stored, look)
    # a file made by --print_config names every field, so there only a changed one is a wish
    layers = {name: from_file[name] for name in from_file if name in ("dataset", "preset")}
    defaults = experiment(strategy, layers).flat()
    wishes = {name for name in from_file if from_file[name] != defaults[name]} | set(from_argv)
    complaints = meaningless(asked, wishes)
    if complaints:
        raise ValueError("; ".join(complaints))
    return asked


def split_flags(argv: Sequence[str], own: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    """A command's own flags and those of a run, by name, from words ``--name value`` or with =.

    Raises:
        ValueError: a word that is no flag, or a flag without a value.
    """
    found: dict[str, str] = {}
    words = [_underscores(word) for word in argv]
    while words:
        name, equals, value = words.pop(0).partition("=")
        if not name.startswith("--"):
            raise ValueError(f"{name!r} is not a flag: expected --NAME VALUE")
        if not equals and (not words or words[0].startswith("--")):
            raise ValueError(f"{name} needs a value")
        found[name[2:]] = value if equals else words.pop(0)
    return {n: v for n, v in found.items() if n in own}, {
        n: v for n, v in found.items() if n not in own
    }


def useless(strategy: str, argv: Sequence[str], shared: Mapping[str, str]) -> set[str]:
    """Those of the ``shared`` flags of a run that have no effect beside the flags in ``argv``.

    Raises:
        ValueError: one of the shared flags is none that all strategies have.
    """
    unknown = sorted(set(shared) - set(field_names(RunConfig)))
    if unknown:
        raise ValueError(
            f"--{unknown[0]} is no flag that all strategies share; a strategy's own flags go "
            f"behind its name, as in {strategy}:{unknown[0]}={shared[unknown[0]]}"
        )
    given = {**_parsed(strategy, shared), **_parsed(strategy, argv)}
    complaints = meaningless(experiment(strategy, given), shared)
    return {complaint.partition(" ")[0] for complaint in complaints}


@cache  # a sweep reads many command lines
def parser(strategy: str) -> ArgumentParser:
    """The flat parser of a run with one strategy."""
    result = ArgumentParser(
        prog="python -m fedapa_mpi.run",
        usage="%(prog)s [STRATEGY] [--FLAG VALUE ...]",
        description=f"Runs a personalised federated learning experiment. STRATEGY is one of "
        f"{', '.join(strategies.names())}; default {DEFAULT_STRATEGY}, or the resumed run's. "
        f"Hyphens and underscores in flags mean the same.",
        exit_on_error=False,
        default_env=False,
        allow_abbrev=False,
    )
    common = result.add_argument_group("command")
    common.add_argument("--config", type=str, help="YAML file with values of any flags below.")
    common.add_argument("--print_config", action="store_true", help="Print all values and exit.")
    common.add_argument(
        "--resume",
        type=str,
        help="Folder of a run to go on with; auto: the folder --out, if it holds a checkpoint.",
    )
    common.add_argument(
        "--dry_run",
        action="store_true",
        help="Say what would run where, with memory and bytes, and exit.",
    )
    common.add_argument("--version", action="store_true", help="Print the version and exit.")
    add_fields(
        result.add_argument_group("run"),
        RunConfig,
        strategies.field_docs(CONFIG_FILE, "RunConfig"),
    )
    add_fields(
        result.add_argument_group(f"{strategy}: {strategies.summary(strategy)}"),
        strategies.config_class(strategy),
        strategies.config_docs(strategy),
    )
    return result


def add_fields(
    group: Any,
    config_class: type[Any],
    docs: Mapping[str, str],
    names: Collection[str] | None = None,
) -> None:
    """Makes a flag of every field of a configuration, or of those in ``names``."""
    types = typing.get_type_hints(config_class)
    for f in dataclasses.fields(config_class):
        if names is None or f.name in names:
            group.add_argument(
                f"--{f.name}", type=types[f.name], default=f.default, help=docs.get(f.name, "")
            )


def parse(parser: ArgumentParser, argv: Sequence[str]) -> dict[str, Any]:
    """The values given, by name, checked for name and type; nothing that was not given.

    Raises:
        ValueError: what the parser complains of, on one line.
    """
    try:
        return vars(parser.parse_args([_underscores(word) for word in argv], defaults=False))
    except Exception as error:
        raise ValueError(_shorter(str(error))) from error


def _parsed(strategy: str, given: Sequence[str] | Mapping[str, str]) -> dict[str, Any]:
    """The values given, by field; errors as ``parse``."""
    if isinstance(given, Mapping):
        given = [f"--{name}={value}" for name, value in given.items()]
    values = parse(parser(strategy), given)
    return {name: value for name, value in values.items() if name not in _COMMANDS}


def _shorter(message: str) -> str:
    lines = [line.strip() for line in message.strip().splitlines() if line.strip()]
    return " ".join(lines)


def _read_yaml(path: str | None) -> dict[str, str]:
    if path is None:
        return {}
    try:
        # all as text: YAML would take 1:30 for 90, and a value means what it means as a flag
        values = yaml.load(Path(path).read_text(encoding="utf-8"), yaml.BaseLoader)
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"--config {path} cannot be read: {error}") from error
    if not isinstance(values, dict) or not all(isinstance(v, str) for v in values.values()):
        raise ValueError(f"--config {path} holds other than 'flag: value' lines")
    values = {name.replace("-", "_"): value for name, value in values.items()}
    for name in _COMMANDS:
        if name in values:
            raise ValueError(f"--config {path} holds {name}, which belongs on the command line")
    return values


def _underscores(word: str) -> str:
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value


def _value_of(flag: str, argv: Sequence[str]) -> str | None:
    """The (last) value of a flag in a command line that no parser has read yet."""
    value = None
    for word, following in zip_longest(argv, argv[1:]):
        if word == flag:
            if following is None or following.startswith("--"):
                raise ValueError(f"{flag} needs a value")
            value = following
        elif word.startswith(f"{flag}="):
            value = word.partition("=")[2]
    return value
