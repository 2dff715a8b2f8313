"""State found by type: what is stored, under which names, what is refused and what comes back."""

from dataclasses import dataclass

import pytest
import torch
from tiny import same
from torch import nn

from fedapa_mpi.store.state import Stateful, copy_of, nbytes


@dataclass(frozen=True)
class Settings:
    """Configuration: never stored."""

    eta: float = 0.1


@dataclass
class Loose:
    """Not frozen, so it may change, so it may not be forgotten."""

    eta: float = 0.1


class Party(Stateful):
    """Takes its attributes as they are given."""

    def __init__(self, **attributes):
        for name, value in attributes.items():
            setattr(self, name, value)


class Everything(Stateful):
    """One attribute of each kind that can be stored."""

    def __init__(self):
        self.settings = Settings()
        self.A = torch.arange(4.0).view(2, 2).double()
        self.mask = torch.tensor([True, False])
        self.count = 3
        self.rate = 0.1
        self.done = False
        self.model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        self.protos = [torch.zeros(2), torch.ones(2)]
        self.parameter = nn.Parameter(torch.ones(1))
        self._cache = {"text": "not a tensor", "list": [1, 2]}


def names(**attributes):
    return list(Party(**attributes).state_dict())


# -- what is stored --------------------------------------------------------------------------------


def test_everything_has_a_name():
    state = Everything().state_dict()
    assert {name: (str(t.dtype)[6:], list(t.shape)) for name, t in state.items()} == {
        "A": ("float64", [2, 2]),
        "mask": ("bool", [2]),
        "count": ("int64", []),
        "rate": ("float64", []),
        "done": ("bool", []),
        "model/0.weight": ("float32", [3, 2]),
        "model/0.bias": ("float32", [3]),
        "model/1.weight": ("float32", [3]),
        "model/1.bias": ("float32", [3]),
        "model/1.running_mean": ("float32", [3]),
        "model/1.running_var": ("float32", [3]),
        "model/1.num_batches_tracked": ("int64", []),
        "protos": ("float32", [2, 2]),
        "parameter": ("float32", [1]),
    }
    assert state["rate"].item() == 0.1  # not rounded to float32
    assert not any(tensor.requires_grad for tensor in state.values())


def test_tensors_are_live_and_copies_are_not():
    party = Party(A=torch.zeros(2), model=nn.Linear(1, 1))
    state, copy = party.state_dict(), copy_of(party.state_dict())
    party.A.fill_(7)
    with torch.no_grad():
        party.model.weight.fill_(7)
    assert state["A"].tolist() == [7, 7]
    assert state["model/weight"].item() == 7
    assert copy["A"].tolist() == [0, 0]
    assert copy["model/weight"].item() != 7


def test_buffers_that_torch_would_not_store():
    module = nn.Module()
    module.register_buffer("mean", torch.tensor([2.0]), persistent=False)
    party = Party(module=module)
    assert names(module=module) == ["module/mean"]
    party.load_state_dict({"module/mean": torch.tensor([5.0])})
    assert module.mean.item() == 5


def test_bytes():
    assert nbytes(Party(A=torch.zeros(3), n=1, ok=True).state_dict()) == 12 + 8 + 1


def train(party, steps, seed=0):
    draw = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        party.optimizer.zero_grad()
        party.model(torch.randn(4, 2, generator=draw)).square().sum().backward()
        party.optimizer.step()


OPTIMIZERS = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "plain": lambda p: torch.optim.SGD(p, lr=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
}


def learner(kind):
    torch.manual_seed(0)
    party = Party(model=nn.Linear(2, 1))
    party.optimizer = OPTIMIZERS[kind](party.model.parameters())
    return party


@pytest.mark.parametrize(
    ("kind", "slots"),
    [
        ("momentum", {"momentum_buffer"}),
        ("plain", set()),
        ("adam", {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
    ],
)
def test_optimizers_go_on_where_they_were(kind, slots):
    party = learner(kind)
    train(party, 3)
    state = copy_of(party.state_dict())
    assert {f"optimizer/{i}.{slot}" for i in (0, 1) for slot in slots} == {
        name for name in state if name.startswith("optimizer/") and "group" not in name
    }
    assert state["optimizer/group0.lr"].item() == party.optimizer.param_groups[0]["lr"]
    train(party, 2, seed=1)

    other = learner(kind)
    train(other, 1, seed=2)  # what it holds must go
    other.load_state_dict(state)
    assert same(other.state_dict(), state)
    train(other, 2, seed=1)
    assert same(other.state_dict(), party.state_dict())


def test_loading_takes_back_group_numbers_and_empty_slots():
    party = learner("momentum")
    start = copy_of(party.state_dict())
    party.optimizer.param_groups[0]["lr"] = 0.05
    train(party, 1)
    changed = copy_of(party.state_dict())
    party.load_state_dict(start)
    assert party.optimizer.param_groups[0]["lr"] == 0.1
    assert not party.optimizer.state
    party.load_state_dict(changed)
    assert party.optimizer.param_groups[0]["lr"] == 0.05
    assert isinstance(party.optimizer.param_groups[0]["nesterov"], bool)


def test_optimizer_slots_are_not_the_loaded_tensors():
    party = learner("momentum")
    train(party, 1)
    state = copy_of(party.state_dict())
    party.load_state_dict(state)
    kept = copy_of(state)
    train(party, 1)
    assert same(state, kept)


# -- storage with two names ------------------------------------------------------------------------


def test_shared_storage_is_stored_once():
    tensor, model = torch.ones(2), nn.Linear(1, 1)
    assert names(a=tensor, b=tensor) == ["a"]
    assert names(model=model, head=model.weight) == ["model/weight", "model/bias"]
    assert names(a=tensor, b=tensor.clone()) == ["a", "b"]
    assert names(a=tensor[:1], b=tensor[1:]) == ["a", "b"]
    assert names(a=torch.empty(0), b=torch.empty(0)) == ["a", "b"]  # all at address 0


def test_parts_of_one_model_under_two_names():
    model = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1))
    party = Party(whole=model, head=model[1])
    state = copy_of(party.state_dict())
    assert list(state) == ["whole/0.weight", "whole/0.bias", "whole/1.weight", "whole/1.bias"]
    with torch.no_grad():
        model[1].weight.fill_(7)
    party.load_state_dict(state)
    assert torch.equal(party.head.weight, state["whole/1.weight"])


def test_loading_is_in_place():
    party = Everything()
    view, weight, proto = party.A[0], party.model[0].weight, party.protos[1]
    state = copy_of(party.state_dict())
    state["A"] += 1
    state["model/0.weight"].fill_(7)
    state["protos"] += 10
    party.load_state_dict(state)
    assert view.tolist() == [1, 2]
    assert party.model[0].weight is weight
    assert weight.requires_grad
    assert (weight == 7).all()
    assert proto.tolist() == [11, 11]
    state["A"].fill_(0)
    assert view.tolist() == [1, 2]


def test_numbers_come_back_as_what_they_were():
    party, other = Everything(), Everything()
    party.count, party.rate, party.done = 2**40, 1 / 3, True
    other.load_state_dict(copy_of(party.state_dict()))
    assert (other.count, other.rate, other.done) == (2**40, 1 / 3, True)
    assert [type(v) for v in (other.count, other.rate, other.done)] == [int, float, bool]
    assert same(other.state_dict(), party.state_dict())


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"table": {"a": torch.ones(1)}}, r"Party\.table is a dict, which no checkpoint can hold"),
        ({"later": None}, r"Party\.later is a NoneType"),
        ({"name": "A"}, r"Party\.name is a str"),
        ({"rows": []}, r"Party\.rows is a list"),
        ({"rows": [1, 2]}, r"Party\.rows is a list"),
        ({"rows": (torch.ones(1), 2)}, r"Party\.rows is a tuple"),
        ({"loose": Loose()}, r"Party\.loose is a Loose"),
        ({"kind": Settings}, r"Party\.kind is a type"),
        ({"draw": torch.Generator()}, r"Party\.draw is a Generator"),
        ({"_hidden": torch.ones(1)}, r"Party\._hidden hides a tensor in a private attribute"),
        ({"_model": nn.Linear(1, 1)}, r"Party\._model hides a tensor"),
        ({"_deep": {"a": [(torch.ones(1),)]}}, r"Party\._deep hides a tensor"),
        ({"_optimizer": torch.optim.SGD([torch.ones(1)], 1.0)}, r"Party\._optimizer hides"),
    ],
)
def test_what_would_be_forgotten_is_refused(attributes, message):
    with pytest.raises(TypeError, match=message):
        Party(fine=1, **attributes).state_dict()


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({"n": torch.tensor(1)}, r"not one of a test_state\.Party: missing \['A'\], unknown nothi"),
        (
            {"A": torch.ones(2), "n": torch.tensor(1), "B": torch.ones(1)},
            r"missing nothing, unknown \['B'\]",
        ),
        (
            {"A": torch.ones(3), "n": torch.tensor(1)},
            r"A is stored as torch\.float32 \[3\], this run needs torch\.float32 \[2\]",
        ),
        (
            {"A": torch.ones(2).double(), "n": torch.tensor(1)},
            r"A is stored as torch\.float64 \[2\], this run needs torch\.float32 \[2\]",
        ),
        ({"A": torch.ones(2), "n": torch.tensor(1.5)}, r"n is stored as torch\.float32 \[\]"),
    ],
)
def test_a_state_of_something_else_is_refused_untouched(stored, message):
    party = Party(A=torch.zeros(2), n=0)
    with pytest.raises(ValueError, match=message):
        party.load_state_dict(stored)
    assert party.A.tolist() == [0, 0]
    assert party.n == 0
