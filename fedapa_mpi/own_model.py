"""A user's own model, ``--model package.module:factory``, and how it is split.

``factory(input_shape, classes)`` returns a ``torch.nn.Module`` that is

* a module with the attributes ``extractor`` and ``head``, such that its output is
  ``head(extractor(x))`` (``SplitModel(extractor, head)`` is one), or
* an ``nn.Sequential``: its last module is the head, all before it the extractor.

x is float32 [B, *input_shape], features are [B, D], the output is [B, classes].
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_RULE = (
    "expected a torch.nn.Module with the attributes extractor and head, such that its output is "
    "head(extractor(x)), or an nn.Sequential, whose last module is the head"
)


def parts(name: str, input_shape: tuple[int, ...], classes: int) -> tuple[nn.Module, nn.Module]:
    """A new extractor and head, initialised from torch's global generator.

    Raises:
        ValueError: there is no such factory, or what it returns cannot be split.
    """
    return _split(name, _made(name, input_shape, classes))


def check(name: str, input_shape: tuple[int, ...], classes: int) -> None:
    """Makes the model once and tries it on a batch.

    Raises:
        ValueError: the model does not keep the rule or does not fit the data; says in what.
    """
    module = _made(name, input_shape, classes).eval()
    extractor, head = _split(name, module)
    _check_parameters(name, module, extractor, head)
    # two samples that token ids and measurements can both be
    batch = torch.stack([torch.zeros(input_shape), torch.ones(input_shape)])
    features = _answer(name, "extractor", extractor, batch)
    if features.dim() != 2 or len(features) != 2:
        raise ValueError(
            f"model {name}: the extractor makes {list(features.shape)} of a batch "
            f"{list(batch.shape)}, expected features [2, D]: end it with nn.Flatten()"
        )
    logits = _answer(name, "head", head, features)
    if logits.shape != (2, classes):
        raise ValueError(
            f"model {name}: the output for a batch {list(batch.shape)} is {list(logits.shape)}, "
            f"expected {[2, classes]}: one score per class, the factory gets their number"
        )
    _check_forward(name, module, batch, logits)


def _made(name: str, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    factory = _factory(name)
    try:
        inspect.signature(factory).bind(input_shape, classes)
    except TypeError as error:
        raise ValueError(
            f"model {name}: the factory cannot be called as factory(input_shape, classes): {error}"
        ) from error
    try:
        module = factory(input_shape, classes)
    except ValueError as error:
        where = traceback.extract_tb(error.__traceback__)[-1]  # it may be meant or be a mistake
        raise ValueError(
            f"model {name} for inputs {list(input_shape)}: {error} ({where.filename}, line "
            f"{where.lineno})"
        ) from error
    if not isinstance(module, nn.Module):
        raise ValueError(f"model {name}: the factory returned a {_type(module)}, {_RULE}")
    return module


def _factory(name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    found = _imported(name, module)
    if not hasattr(found, attribute):
        raise ValueError(
            f"model {name}: {module} ({getattr(found, '__file__', None)}) has no {attribute!r}: "
            f"expected a function of (input_shape, classes) of that name"
        )
    factory = getattr(found, attribute)
    if not callable(factory):
        raise ValueError(
            f"model {name}: {attribute} is a {_type(factory)}, which cannot be called: expected a "
            f"function of (input_shape, classes)"
        )
    return factory


def _imported(name: str, module: str) -> Any:
    here = os.getcwd()
    if here not in sys.path and not sys.flags.safe_path:
        sys.path.insert(0, here)  # `python -m` does so, a console script does not
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"model {name}: {module} cannot be imported ({error}): it has to be importable on "
            f"every node, from the current folder ({here}), from PYTHONPATH or installed"
        ) from error


def _split(name: str, module: nn.Module) -> tuple[nn.Module, nn.Module]:
    extractor, head = getattr(module, "extractor", None), getattr(module, "head", None)
    if isinstance(extractor, nn.Module) and isinstance(head, nn.Module):
        return extractor, head
    if extractor is None and head is None and isinstance(module, nn.Sequential) and len(module) > 1:
        *first, last = module
        return nn.Sequential(*first), last
    raise ValueError(
        f"model {name}: the factory returned a {_type(module)} "
        f"{_faults(module, extractor, head)}: {_RULE}"
    )


def _faults(module: nn.Module, extractor: object, head: object) -> str:
    given = {"extractor": extractor, "head": head}
    missing = [part for part, value in given.items() if value is None]
    if isinstance(module, nn.Sequential) and len(missing) == 2:
        return f"of length {len(module)}"
    if missing:
        return f"without {' and '.join(missing)}"
    wrong = [f"{part} is a {_type(v)}" for part, v in given.items() if not isinstance(v, nn.Module)]
    return f"whose {' and '.join(wrong)}"


def _check_parameters(name: str, module: nn.Module, extractor: nn.Module, head: nn.Module) -> None:
    """All of the model belongs to one of the two parts, and both can learn."""
    owned = {part: {id(t) for t in _tensors(p).values()} for part, p in _named(extractor, head)}
    for part, own in _named(extractor, head):
        if not any(True for _ in own.parameters()):
            raise ValueError(f"model {name}: the {part}, a {_type(own)}, has no parameters")
    tensors = _tensors(module)
    lazy = [key for key, t in tensors.items() if nn.parameter.is_lazy(t)]
    if lazy:
        raise ValueError(f"model {name}: {lazy[0]} has no size yet: use a layer that is not lazy")
    shared = [k for k, t in tensors.items() if id(t) in owned["extractor"] & owned["head"]]
    if shared:
        raise ValueError(f"model {name}: {shared[0]} is in the extractor and in the head: copy it")
    loose = [k for k, t in tensors.items() if id(t) not in owned["extractor"] | owned["head"]]
    if loose:
        raise ValueError(
            f"model {name}: {', '.join(loose)} is neither in the extractor nor in the head, so "
            f"that nobody would train or send it: move it into one of them"
        )


def _answer(name: str, part: str, module: nn.Module, batch: Tensor) -> Tensor:
    """The output in evaluation mode, the same each time also if the module draws numbers."""
    torch.manual_seed(0)
    try:
        with torch.no_grad():
            answer = module(batch)
    except Exception as error:
        raise ValueError(
            f"model {name}: the {part} fails on a float32 batch {list(batch.shape)}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(answer, Tensor):
        raise ValueError(f"model {name}: the {part} returns a {_type(answer)}, expected a tensor")
    return answer


def _check_forward(name: str, module: nn.Module, batch: Tensor, logits: Tensor) -> None:
    if type(module).forward is nn.Module.forward:
        return  # it has none: extractor and head are all it says
    own = _answer(name, "model", module, batch)
    if own.shape != logits.shape or not torch.allclose(own, logits, equal_nan=True):
        raise ValueError(
            f"model {name}: its output is not head(extractor(x)): move what {_type(module)}."
            f"forward does beside into the extractor or the head"
        )


def _named(extractor: nn.Module, head: nn.Module) -> list[tuple[str, nn.Module]]:
    return [("extractor", extractor), ("head", head)]


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _type(value: object) -> str:
    return type(value).__name__
