"""What a server or a client remembers, found by type, as flat named tensors.

Public attributes are the state: tensors, modules, optimizers, lists of tensors and numbers.
A frozen dataclass is configuration. Anything else would be forgotten by a checkpoint, so it is
refused, and so is a tensor in a private attribute.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

State = dict[str, Tensor]


class Stateful:
    """Base of all that a checkpoint holds. Shapes are fixed in ``__init__``."""

    def state_dict(self) -> State:
        """Named tensors, live and not copied: ``A``, ``model/head.weight``, ``optimizer/0.step``.

        Raises:
            TypeError: an attribute cannot be stored; the message names it.
        """
        state: State = {}
        seen: set[tuple[Any, ...]] = set()
        for name, value in vars(self).items():
            if name.startswith("_"):
                _refuse_hidden(self, name, value)
                continue
            for key, tensor in _entries(self, name, value):
                place = _place(tensor)
                if tensor.numel() and place in seen:
                    continue  # storage that two names share is stored once
                seen.add(place)
                state[key] = tensor
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes back what ``state_dict`` gave, in place.

        Raises:
            ValueError: names, shapes or dtypes differ from this object's own.
        """
        _check_fits(self, state)
        for name, value in list(vars(self).items()):
            if name.startswith("_"):
                continue
            if isinstance(value, bool | int | float):
                setattr(self, name, type(value)(state[name].item()))
            elif isinstance(value, Optimizer):
                _load_optimizer(value, name, state)
            elif isinstance(value, list | tuple):
                for own, row in zip(value, state[name], strict=True):
                    own.copy_(row)
            else:
                for key, own in _entries(self, name, value):
                    if key in state:  # absent when it shares storage with an earlier name
                        own.copy_(state[key])


def copy_of(state: Mapping[str, Tensor]) -> State:
    """A copy that later changes of the owner do not reach."""
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def nbytes(state: Mapping[str, Tensor]) -> int:
    """Bytes of all tensors of a state or a message."""
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


def _entries(owner: object, name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value.detach()
    elif isinstance(value, nn.Module):
        for part in (value.named_parameters(), value.named_buffers()):
            for key, tensor in part:
                yield f"{name}/{key}", tensor.detach()
    elif isinstance(value, Optimizer):
        yield from _optimizer_entries(value, name)
    elif isinstance(value, bool | int | float):
        yield name, _number(value)
    elif isinstance(value, list | tuple) and value and all(isinstance(v, Tensor) for v in value):
        yield name, torch.stack([v.detach() for v in value])
    elif not _is_frozen_dataclass(value):
        raise TypeError(
            f"{type(owner).__name__}.{name} is a {type(value).__name__}, which no checkpoint can "
            f"hold: make it a tensor, module, optimizer, list of equal tensors or number, or put "
            f"it into the frozen configuration"
        )


def _optimizer_entries(optimizer: Optimizer, name: str) -> Iterator[tuple[str, Tensor]]:
    packed = optimizer.state_dict()
    for index, slots in packed["state"].items():
        for slot, value in slots.items():
            if value is not None:
                yield f"{name}/{index}.{slot}", torch.as_tensor(value)
    for g, group in enumerate(packed["param_groups"]):
        for key, value in group.items():
            if isinstance(value, bool | int | float):
                yield f"{name}/group{g}.{key}", _number(value)


def _load_optimizer(optimizer: Optimizer, name: str, state: Mapping[str, Tensor]) -> None:
    packed = optimizer.state_dict()
    packed["state"] = {}
    for key, tensor in state.items():
        owner, _, entry = key.rpartition("/")
        where, _, field = entry.partition(".")
        if owner != name:
            continue
        if where.startswith("group"):
            group = packed["param_groups"][int(where.removeprefix("group"))]
            group[field] = type(group[field])(tensor.item())
        else:
            packed["state"].setdefault(int(where), {})[field] = tensor.clone()
    optimizer.load_state_dict(packed)  # torch moves each slot to its parameter's device


def _check_fits(owner: Stateful, state: Mapping[str, Tensor]) -> None:
    own = owner.state_dict()
    slots = tuple(f"{name}/" for name, v in vars(owner).items() if isinstance(v, Optimizer))
    missing = [name for name in own if name not in state and not name.startswith(slots)]
    unknown = [name for name in state if name not in own and not name.startswith(slots)]
    if missing or unknown:
        raise ValueError(
            f"the stored state is not one of a {type(owner).__module__}.{type(owner).__name__}: "
            f"missing {missing or 'nothing'}, unknown {unknown or 'nothing'}"
        )
    for name in own.keys() & state.keys():
        mine, stored = own[name], state[name]
        if (mine.shape, mine.dtype) != (stored.shape, stored.dtype):
            raise ValueError(
                f"{name} is stored as {stored.dtype} {list(stored.shape)}, "
                f"this run needs {mine.dtype} {list(mine.shape)}"
            )


def _refuse_hidden(owner: object, name: str, value: Any) -> None:
    if _holds_tensor(value):
        raise TypeError(
            f"{type(owner).__name__}.{name} hides a tensor in a private attribute, so that a "
            f"checkpoint would miss it: give it a public name"
        )


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_holds_tensor(v) for v in value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return any(_holds_tensor(v) for v in value)
    return isinstance(value, Tensor | nn.Module | Optimizer)


def _number(value: bool | int | float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _is_frozen_dataclass(value: Any) -> bool:
    params = getattr(type(value), "__dataclass_params__", None)
    return dataclasses.is_dataclass(value) and params is not None and params.frozen
