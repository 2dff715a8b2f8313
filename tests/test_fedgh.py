"""FedGH against numbers worked by hand: the steps of the server's head, and what never travels."""

import math
from dataclasses import replace

import pytest
import torch
from lines import line_parties, line_round, slope
from tiny import batchnorm_model, make_parties, make_setup, same, shard, train_round
from torch import nn
from torch.nn import functional as F

from fedapa_mpi.models import SplitModel
from fedapa_mpi.store.state import copy_of, nbytes
from fedapa_mpi.strategies import fedgh


def zero_model():
    """Two features, a head of zeros for two classes."""
    model = SplitModel(nn.Linear(2, 2), nn.Linear(2, 2))
    for parameter in model.head.parameters():
        nn.init.zeros_(parameter)
    return model


def make_server(**switches):
    config = fedgh.Config(**{"server_lr": 1.0, "server_momentum": 0.0, **switches})
    return fedgh.Server(replace(make_setup(config, architecture=zero_model), classes=2))


def pairs(*rows):
    return {
        "mean": torch.tensor([mean for mean, _ in rows], dtype=torch.float32).reshape(-1, 2),
        "ids": torch.tensor([c for _, c in rows], dtype=torch.int64),
    }


def aggregate(server, uploads):
    server.aggregate(dict(server.download(sorted(uploads), 1)), uploads, 1)
    return server.head.weight.tolist(), server.head.bias.tolist()


# -- steps of the head -------------------------------------------------------------------------


def test_one_step():
    # phi = 0: probabilities (1/2, 1/2), gradient of the scores (-1/2, 1/2) for class 0
    server = make_server()
    W, b = aggregate(server, {0: pairs(((1, 2), 0))})
    assert W == [[0.5, 1.0], [-0.5, -1.0]]
    assert b == [0.5, -0.5]


def test_a_second_step_starts_from_the_first():
    # after it the scores of (0, 1) are (1 + 0.5, -1.5): p_0 = 1 / (1 + e^-3) = 0.952574, so that
    # a pair of class 1 moves W_0 and b_0 by -0.952574 (0, 1) and -0.952574, W_1 and b_1 back
    server = make_server()
    W, b = aggregate(server, {0: pairs(((1, 2), 0), ((0, 1), 1))})
    assert W[0] == pytest.approx([0.5, 0.047426], abs=1e-6)
    assert W[1] == pytest.approx([-0.5, -0.047426], abs=1e-6)
    assert b == pytest.approx([-0.452574, 0.452574], abs=1e-6)


def test_momentum_of_the_server():
    # the second step adds 0.5 of the first: W_0 = 0.5 * (1, 2) + 0.5 * 0.5 (1, 2) - 0.952574 (0, 1)
    server = make_server(server_momentum=0.5)
    W, b = aggregate(server, {0: pairs(((1, 2), 0), ((0, 1), 1))})
    assert W[0] == pytest.approx([0.75, 0.547426], abs=1e-6)
    assert b[0] == pytest.approx(0.5 + 0.25 - 0.952574, abs=1e-6)
    assert any(name.endswith("momentum_buffer") for name in server.state_dict())
    # and goes on in the next round, also through a state
    other = make_server(server_momentum=0.5)
    other.load_state_dict(copy_of(server.state_dict()))
    after = [aggregate(s, {1: pairs(((1, 1), 0))}) for s in (server, other)]
    assert after[0] == after[1]
    fresh = make_server(server_momentum=0.5)
    fresh.head.load_state_dict(make_head(W, b))
    assert aggregate(fresh, {1: pairs(((1, 1), 0))}) != after[0]


def make_head(W, b):
    return {"weight": torch.tensor(W), "bias": torch.tensor(b)}


def test_order_is_by_client_then_class_and_matters():
    one, two = ((1, 2), 0), ((0, 1), 1)
    together = aggregate(make_server(), {0: pairs(one, two)})
    assert aggregate(make_server(), {0: pairs(one), 2: pairs(two)}) == together
    assert aggregate(make_server(), {0: pairs(two), 2: pairs(one)}) != together


def test_a_small_step_lowers_the_loss_of_its_pair():
    server = make_server(server_lr=0.01)
    losses = []
    for _ in range(3):
        score = server.head(torch.tensor([[1.0, 2.0]]))
        losses.append(F.cross_entropy(score, torch.tensor([1])).item())
        aggregate(server, {0: pairs(((1, 2), 1))})
    assert losses[0] > losses[1] > losses[2]


def test_without_a_rate_or_a_pair_the_head_stays():
    still = make_server(server_lr=0.0)
    before = copy_of(still.head.state_dict())
    aggregate(still, {0: pairs(((1, 2), 0))})
    assert same(still.head.state_dict(), before)
    server = make_server(server_momentum=0.9)
    aggregate(server, {0: pairs(((1, 2), 0))})
    state = copy_of(server.state_dict())
    aggregate(server, {})  # no answer
    aggregate(server, {0: pairs()})  # an answer without a class
    assert same(server.state_dict(), state)


# -- a round by hand -----------------------------------------------------------------------------


def test_a_round_of_three_clients():
    data = [([1.0, 3.0, 5.0], [0, 0, 1]), ([1.0], [1]), ([8.0], [0])]
    server, clients = line_parties("fedgh", data, server_lr=0.1, server_momentum=0.0)
    uploads = line_round(server, clients)
    # phi = 0 gives a no gradient: z = x, means 2 and 5, 1, 8
    assert [slope(c) for c in clients.values()] == [1, 1, 1]
    assert [u["mean"][:, 0].tolist() for u in uploads.values()] == [[2, 5], [1], [8]]
    assert [u["ids"].tolist() for u in uploads.values()] == [[0, 1], [1], [0]]
    # local heads: phi_0 = -0.1 mean (1/2 - [y = 0]) z
    # client 0: 0.1 * (0.5 + 1.5 - 2.5) / 3 = -1/60, client 1: -0.05, client 2: 0.4
    phi = [c.model.head.weight[0].item() for c in clients.values()]
    assert phi == pytest.approx([-1 / 60, -0.05, 0.4])
    # at the server phi_0 moves by 0.1 ([c = 0] - p_0) r, phi_1 the other way:
    # (2, 0): p_0 = 1/2                                        phi_0 =  0.1
    # (5, 1): scores +-0.5, p_0 = 1 / (1 + e^-1) = 0.731059     phi_0 =  0.1 - 0.365529 = -0.265529
    # (1, 1): scores -+0.265529, p_0 = 0.370269                 phi_0 = -0.302556
    # (8, 0): scores -+2.420449, p_0 = 0.007839                 phi_0 = -0.302556 + 0.793729
    assert server.head.weight[:, 0].tolist() == pytest.approx([0.491173, -0.491173], abs=2e-6)
    ((_, message),) = server.download([1], 2)
    clients[1].receive(message)
    assert torch.equal(clients[1].model.head.weight, server.head.weight)


# -- what travels ------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", [None, batchnorm_model])
def test_the_extractor_stays_with_the_client(architecture):
    changes = {"architecture": architecture} if architecture else {}
    server, clients = make_parties("fedgh", **changes)
    train_round(server, clients, [0, 1, 2], 1)
    extractor = copy_of(clients[0].model.extractor.state_dict())
    ((_, message),) = server.download([0], 2)
    assert {name: list(t.shape) for name, t in message.items()} == {"head": [18]}
    clients[0].receive(message)
    assert same(clients[0].model.extractor.state_dict(), extractor)
    upload = clients[0].upload()
    assert {n: list(t.shape) for n, t in upload.items()} == {"mean": [3, 5], "ids": [3]}
    assert nbytes(message) == 4 * 18
    assert nbytes(upload) == 3 * (4 * 5 + 8)


def test_the_servers_head_is_nobody_elses():
    server, clients = make_parties("fedgh")
    before = copy_of(server.state_dict())
    for client in clients.values():
        client.receive(dict(server.download([0], 1))[0])
        client.train(1)
    assert same(server.state_dict(), before)
    heads = [client.model.head.weight for client in clients.values()]
    assert not torch.equal(heads[0], heads[1])


def test_local_heads_are_replaced_and_do_not_reach_the_server():
    ends = []
    for spoil in (False, True):
        server, clients = make_parties("fedgh")
        sent = dict(server.download([0, 1, 2], 1))
        uploads = {}
        for i, client in clients.items():
            client.receive(sent[i])
            client.train(1)
            if spoil:
                nn.init.ones_(client.model.head.weight)
            uploads[i] = client.upload()
        server.aggregate(sent, uploads, 1)
        ends.append(copy_of(server.state_dict()))
    assert same(*ends)


def test_means_are_those_of_all_samples_after_training():
    _, clients = make_parties("fedgh", drop_last="true", batch_size=5)
    client = clients[0]
    client.train(1)
    data, upload = client.shard, client.upload()
    for mean, c in zip(upload["mean"], upload["ids"]):
        torch.testing.assert_close(mean, client.model.extractor(data.x[data.y == c]).mean(dim=0))


def test_pairs_count_once_whatever_their_samples():
    # class 0 has one sample or five of the same
    heads = []
    for n in (1, 5):
        server, clients = line_parties("fedgh", [([2.0] * n + [3.0], [0] * n + [1])])
        uploads = {0: clients[0].upload()}
        server.aggregate({}, uploads, 1)
        heads.append(server.head.weight)
    assert torch.equal(*heads)


def test_a_class_without_owner_fades():
    server, _ = make_parties("fedgh")
    before = server.head.bias[2].item()
    mean = torch.ones(1, 5)
    for c in (0, 1):
        server.aggregate({}, {0: {"mean": mean, "ids": torch.tensor([c])}}, 1)
    assert server.head.bias[2] < before


def test_odd_clients():
    server, clients = line_parties("fedgh", [([], []), ([1.0, 2.0], [1, 1])])
    assert nbytes(clients[0].upload()) == 0
    assert nbytes(clients[1].upload()) == 4 + 8
    line_round(server, clients)
    assert server.joined.all()
    for party in (server, *clients.values()):
        assert all(bool(torch.isfinite(t).all()) for t in party.state_dict().values())


def test_who_never_joined_keeps_the_initial_model():
    server, clients = make_parties("fedgh")
    before = copy_of(clients[2].state_dict())
    train_round(server, clients, [0, 1], 1)
    assert same(clients[2].state_dict(), before)
    initial = make_setup().make_model()
    assert same(clients[2].model.state_dict(), initial.state_dict())
    newcomer = fedgh.Client(make_setup(fedgh.Config(), client=9, shard=shard()))
    newcomer.receive(server.newcomer())
    assert torch.equal(newcomer.model.head.weight, server.head.weight)
    assert same(newcomer.model.extractor.state_dict(), initial.extractor.state_dict())


def test_a_head_with_batchnorm_is_trained_pair_by_pair():
    def model():
        return SplitModel(nn.Linear(4, 5), nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 3)))

    server, clients = make_parties("fedgh", architecture=model)
    train_round(server, clients, [0, 1, 2], 1)
    assert server.head[0].running_mean.tolist() == [0] * 5
    assert torch.count_nonzero(server.head[0].bias)
    ((_, message),) = server.download([0], 2)
    assert nbytes(message) == 4 * (10 + 18 + 10)


# -- configuration -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("switches", "message"),
    [
        ({"server_lr": -0.1}, r"server_lr is -0.1, expected a number in \[0, inf\)"),
        ({"server_lr": math.inf}, r"server_lr is inf"),
        ({"server_lr": math.nan}, r"server_lr is nan"),
        ({"server_momentum": 1.0}, r"server_momentum is 1.0, expected a number in \[0, 1\)"),
        ({"server_momentum": -0.5}, r"server_momentum is -0.5"),
    ],
)
def test_settings_that_make_no_sense(switches, message):
    with pytest.raises(ValueError, match=message):
        fedgh.Config(**switches)


def test_notices():
    assert make_server().notices() == []
    (notice,) = make_server(server_lr=0.0).notices()
    assert "random" in notice
