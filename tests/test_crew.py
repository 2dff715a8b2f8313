"""The clients of one process: taking part, being measured, being put back."""

import math
import os

import pytest
import torch
from tiny import CPU, make_parties, same
from torch import nn

from fedapa_mpi import streams
from fedapa_mpi.clock import Clock
from fedapa_mpi.comm.messages import copied
from fedapa_mpi.comm.orders import Action, Order
from fedapa_mpi.crew import Crew
from fedapa_mpi.failing import Place
from fedapa_mpi.models import SplitModel
from fedapa_mpi.stopping import Abandoned
from fedapa_mpi.store.state import copy_of
from fedapa_mpi.training import evaluate

BOTH = ("recv", "post")


def dropping_model():
    return SplitModel(nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.ReLU()), nn.Linear(5, 3))


class Team:
    """A crew with its server, in round 1."""

    def __init__(self, strategy="fedapa", **changes):
        self.server, self.clients = make_parties(strategy, **changes)
        self.place, self.clock = Place(), Clock()
        self.crew = Crew(self.clients, 3, 0, CPU, self.clock, self.place)
        self.crew.begin(1)

    def message(self, i, t=1):
        return copied(dict(self.server.download([i], t))[i])

    def participate(self, i, t=1, points=BOTH):
        order = Order(Action.ROUND, t, (0, 1, 2), points=points)
        return self.crew.participate(i, self.message(i, t), order)

    def state(self, i):
        return copy_of(self.clients[i].state_dict())


def test_taking_part():
    team = Team()
    before = team.state(1)
    upload = team.participate(1)
    assert upload.keys() == {"theta"}
    assert not same(team.state(1), before)
    assert torch.equal(upload["theta"][:20], team.clients[1].model.extractor[0].weight.flatten())
    assert team.place.client is None


def test_only_a_crews_own_clients_take_part():
    _, clients = make_parties("local")
    crew = Crew({2: clients[2], 0: clients[0]}, 3, 0, CPU, Clock(), Place())
    assert list(crew.clients) == [0, 2]
    assert crew.mine((2, 1, 0)) == [2, 0]
    assert crew.mine(()) == []


# -- the report ------------------------------------------------------------------------------------


def test_a_report_has_a_row_for_each_client_that_did_something():
    team = Team()
    team.participate(2)
    team.participate(0, points=("post",))
    team.crew.evaluate_held(1, 1)
    report = team.crew.report()
    assert {name: (t.dtype, list(t.shape)) for name, t in report.items()} == {
        "client": (torch.int64, [3]),
        "loss": (torch.float64, [3]),
        "recv": (torch.float64, [3, 1, 3]),
        "post": (torch.float64, [3, 1, 3]),
        "held": (torch.float64, [3, 1, 3]),
    }
    assert report["client"].tolist() == [0, 1, 2]
    assert report["loss"].isnan().tolist() == [False, True, False]
    measured = {
        name: (~report[name].isnan()).flatten(1).all(dim=1).tolist() for name in (*BOTH, "held")
    }
    assert measured == {
        "recv": [False, False, True],
        "post": [True, False, True],
        "held": [False, True, False],
    }
    assert report["post"][0, 0, 1] == 6  # test samples


def test_a_crew_without_work_reports_nothing():
    report = Team().crew.report()
    assert {name: list(t.shape) for name, t in report.items()} == {
        "client": [0], "loss": [0], "recv": [0, 1, 3], "post": [0, 1, 3], "held": [0, 1, 3],
    }  # fmt: skip
    assert report["client"].dtype == torch.int64
    assert report["recv"].dtype == torch.float64


def test_a_new_round_begins_with_an_empty_report():
    team = Team()
    team.participate(0)
    team.crew.begin(2)
    assert team.crew.report()["client"].tolist() == []
    assert team.place.round == 2


def test_recv_is_before_training_and_post_after():
    team = Team()
    team.participate(0)
    report, client = team.crew.report(), team.clients[0]
    assert torch.equal(report["post"][0], evaluate(client))
    other = Team()
    other.clients[0].receive(other.message(0))
    assert torch.equal(report["recv"][0], evaluate(other.clients[0]))
    assert not torch.equal(report["recv"][0], report["post"][0])


def test_who_trains_here():
    assert Team().crew.identity() == {"pid": os.getpid(), "device": -1}
    crew = Crew({}, 0, 0, torch.device("cuda:3"), Clock(), Place())
    assert crew.identity()["device"] == 3


def test_time_is_charged_to_training_and_evaluation():
    team = Team()
    team.participate(0)
    spent = team.clock.take()
    assert spent["compute"] > 0
    assert spent["evaluation"] > 0
    assert spent["wait"] == spent["server"] == 0
    team.participate(1, points=())
    assert team.clock.take()["evaluation"] == 0


# -- putting back ----------------------------------------------------------------------------------


def test_undo_restores_every_bit():
    team = Team()
    team.participate(0)
    team.crew.begin(2)
    before = {i: team.state(i) for i in team.clients}
    for i in (0, 1):  # 0 has momentum buffers already, 1 gets its first
        team.participate(i, t=2)
        assert not same(team.state(i), before[i])
    team.crew.undo()
    assert all(same(team.state(i), before[i]) for i in team.clients)


def test_a_round_that_was_given_up_leaves_no_trace():
    straight, disturbed = Team(), Team()
    calls = []

    def poll():
        calls.append(1)
        if len(calls) == 5:
            raise Abandoned

    disturbed = Team(poll=poll)
    disturbed.participate(0, points=())  # three steps
    with pytest.raises(Abandoned):
        disturbed.participate(1, points=())
    disturbed.crew.undo()
    disturbed.crew.begin(1)
    for team in (straight, disturbed):
        for i in (0, 1, 2):
            team.participate(i, points=())
    assert all(same(straight.state(i), disturbed.state(i)) for i in (0, 1, 2))
    assert len(calls) > 5


def test_only_the_round_under_way_can_be_undone():
    team = Team()
    team.participate(0)
    team.crew.begin(2)
    after = team.state(0)
    team.crew.undo()
    assert same(team.state(0), after)


def test_undoing_twice_is_undoing_once():
    team = Team()
    before = team.state(0)
    team.participate(0)
    team.crew.undo()
    team.crew.undo()
    assert same(team.state(0), before)


def test_a_delivery_is_measured_and_taken_away():
    team = Team("fedavg")
    team.participate(0)
    team.server.w.fill_(0.25)
    before = team.state(1)
    team.crew.evaluate_delivered(1, team.message(1), 1)
    assert same(team.state(1), before)
    report = team.crew.report()
    assert report["client"].tolist() == [0, 1]
    # all scores are equal: class 0 is answered, and the loss is log 3 each
    truth = team.clients[1].shard.y_test
    assert report["recv"][1, 0, :2].tolist() == [int((truth == 0).sum()), 6]
    assert report["recv"][1, 0, 2].item() == pytest.approx(6 * math.log(3), rel=1e-6)
    assert report["held"][1].isnan().all()


# -- random numbers --------------------------------------------------------------------------------


def test_a_clients_own_random_numbers_depend_on_nobody_else():
    alone, crowd = Team(architecture=dropping_model), Team(architecture=dropping_model)
    torch.manual_seed(1)
    first = alone.participate(2)
    torch.manual_seed(2)
    crowd.participate(1)
    torch.rand(3)
    crowd.crew.evaluate_held(0, 1)
    state = torch.random.get_rng_state()
    assert same(crowd.participate(2), first)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_random_numbers_start_from_client_round_and_purpose():
    drawn = {}

    class Drawing(nn.Module):
        def forward(self, x):
            drawn.setdefault((self.training, here[0]), torch.rand(1).item())
            return x

    def model():
        return SplitModel(nn.Sequential(nn.Linear(4, 5), Drawing()), nn.Linear(5, 3))

    here = [None]
    team = Team(architecture=model)
    for t, i in ((1, 0), (1, 1), (2, 0)):
        team.crew.begin(t)
        here[0] = t, i
        team.participate(i, t, points=("post",))
    for (training, (t, i)), value in drawn.items():
        with streams.seeded(0, i, t, "train" if training else "evaluate"):
            assert value == torch.rand(1).item()
    assert len(set(drawn.values())) == 6


def test_error_messages_know_where():
    seen = []
    team = Team(poll=lambda: seen.append(str(team.place)))
    team.crew.begin(4)
    team.participate(2, t=4)
    assert set(seen) == {"rank 0, client 2, round 4"}
    assert str(team.place) == "rank 0, round 4"
