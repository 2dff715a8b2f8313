"""The strategies. The file name is the strategy's name: there is nothing to register."""

from __future__ import annotations

import ast
import importlib
import re
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

_FOLDER = Path(__file__).parent
_NOT_STRATEGIES = ("__init__", "base")
_PLAIN = ("dataclasses", "typing", "fedapa_mpi.checks")  # what a Config may import from


def names() -> list[str]:
    """All strategies, sorted."""
    return sorted(p.stem for p in _FOLDER.glob("*.py") if p.stem not in _NOT_STRATEGIES)


def load(name: str) -> ModuleType:
    """The strategy's module, with ``Config``, ``Server`` and ``Client``. Imports torch."""
    return importlib.import_module(f"{__name__}.{name}")


@cache
def config_class(name: str) -> type[Any]:
    """The strategy's ``Config``, without importing torch: ``--help`` must not cost seconds.

    Executes that one class of the file, so a ``Config`` may use only ``dataclasses``, ``typing``,
    ``fedapa_mpi.checks`` and builtins.
    """
    path = _FOLDER / f"{name}.py"
    wanted = [node for node in _tree(path).body if _is_config(node) or _is_plain_import(node)]
    namespace: dict[str, Any] = {"__name__": f"{__name__}.{name}"}
    # annotations as objects, not as the strings that this file's own future import would make
    exec(compile(ast.Module(wanted, []), str(path), "exec", dont_inherit=True), namespace)
    return namespace["Config"]


def config_docs(name: str) -> dict[str, str]:
    """What stands under each field of the strategy's ``Config``."""
    return field_docs(_FOLDER / f"{name}.py", "Config")


def summary(name: str) -> str:
    """The first line of the strategy's docstring."""
    return (ast.get_docstring(_tree(_FOLDER / f"{name}.py")) or name).splitlines()[0]


def field_docs(path: Path, class_name: str) -> dict[str, str]:
    """The texts that stand under the fields of a dataclass in a source file, by field."""
    classes = {node.name: node for node in _tree(path).body if isinstance(node, ast.ClassDef)}
    docs = {}
    for field, text in pairwise(classes[class_name].body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            assert isinstance(field.target, ast.Name)
            docs[field.target.id] = re.sub(r"\s+", " ", ast.literal_eval(text.value)).strip()
    return docs


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _is_config(node: ast.stmt) -> bool:
    return isinstance(node, ast.ClassDef) and node.name == "Config"


def _is_plain_import(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module in _PLAIN
