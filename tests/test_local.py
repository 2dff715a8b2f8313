"""Local-only: nothing is sent, and no client knows of another."""

import numpy as np
import pytest
import torch
from tiny import make_parties, same, simulate, tiny_shards, train_round

from fedapa_mpi.store.state import copy_of


def test_nothing_is_sent_and_the_server_learns_nothing():
    server, clients = make_parties("local")
    before = copy_of(server.state_dict())
    assert list(server.download([0, 2], 1)) == [(0, {}), (2, {})]
    train_round(server, clients, [0, 2], 1)
    assert clients[0].upload() == {}
    assert server.joined.tolist() == [True, False, True]
    server.joined.fill_(False)
    assert same(server.state_dict(), before)
    assert before.keys() == {"n", "joined"}
    assert server.weights() is None


def test_a_client_that_is_not_sampled_keeps_its_model():
    server, clients = make_parties("local")
    before = copy_of(clients[1].state_dict())
    train_round(server, clients, [0, 2], 1)
    assert same(clients[1].state_dict(), before)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Everybody in every round: three clients, and the first two of them alone."""
    folder = tmp_path_factory.mktemp("local")
    argv = ["local", "--rounds", "3", "--join_low", "1", "--batch_size", "4"]
    shards = tiny_shards(3)
    return simulate(folder / "three", argv, shards), simulate(folder / "two", argv, shards[:2])


def test_a_client_does_not_depend_on_the_others(runs):
    three, two = (run.clients() for run in runs)
    for i in (0, 1):
        assert same(three[i], two[i])
    assert not torch.equal(three[0]["model/head.weight"], three[1]["model/head.weight"])


def test_traffic_is_zero(runs):
    for run in runs:
        rows = run.rows()
        assert np.all(rows["sampled"])
        assert not rows["bytes/down"].any()
        assert not rows["bytes/up"].any()
        assert "A" not in rows


def test_everybody_starts_from_the_same_model():
    _, clients = make_parties("local")
    first, *others = (client.model.state_dict() for client in clients.values())
    assert all(same(first, other) for other in others)
