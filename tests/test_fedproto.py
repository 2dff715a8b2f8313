"""FedProto against numbers worked by hand: prototypes, the pull to them, the two ways to answer."""

import math

import numpy as np
import pytest
import torch
from lines import line_parties, line_round, line_shard, slope
from tiny import (
    make_parties,
    make_setup,
    models_of,
    same,
    shard,
    simulate,
    tiny_model,
    tiny_shards,
    train_round,
)
from torch import nn
from torch.nn import functional as F

from fedapa_mpi import training
from fedapa_mpi.models import SplitModel
from fedapa_mpi.store.state import copy_of, nbytes
from fedapa_mpi.strategies import fedproto

FLAGS = ["--rounds", "3", "--batch_size", "4", "--epochs", "1", "--lr", "0.02"]


def make_server(clients=2, **switches):
    """A server for features of width 5 and 3 classes."""
    return fedproto.Server(make_setup(fedproto.Config(**switches), clients=clients))


def prototypes(*rows):
    """An upload of (class, first two features, count); the other features are 0."""
    return {
        "mean": torch.tensor([[*mean, 0.0, 0.0, 0.0] for _, mean, _ in rows]).reshape(-1, 5),
        "ids": torch.tensor([c for c, *_ in rows], dtype=torch.int64),
        "count": torch.tensor([n for *_, n in rows], dtype=torch.int64),
    }


def aggregate(server, uploads, t=1):
    server.aggregate(dict(server.download(sorted(uploads), t)), uploads, t)
    return {c: server.proto[c, :2].tolist() for c in range(3) if server.known[c]}


# -- prototypes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("aggregation", "mean"),
    # plain ((1, 0) + (3, 0)) / 2, by samples (3 (1, 0) + 1 (3, 0)) / 4; the paper's formula would
    # divide this by the two owners: (0.75, 0)
    [("plain", [2.0, 0.0]), ("weighted", [1.5, 0.0])],
)
def test_mean_over_the_owners(aggregation, mean):
    server = make_server(aggregation=aggregation)
    uploads = {0: prototypes((0, (1.0, 0.0), 3)), 1: prototypes((0, (3.0, 0.0), 1))}
    assert aggregate(server, uploads) == {0: mean}


def test_who_does_not_own_a_class_does_not_count_for_it():
    server = make_server(3)
    uploads = {
        0: prototypes((0, (1.0, 2.0), 5), (2, (4.0, 4.0), 1)),
        1: prototypes(),
        2: prototypes((2, (6.0, 0.0), 9)),
    }
    assert aggregate(server, uploads) == {0: [1, 2], 2: [5, 2]}
    assert server.joined.all()
    ((_, message),) = server.download([1], 2)
    assert message["ids"].tolist() == [0, 2]
    assert message["ids"].dtype == torch.int64
    assert message["proto"][:, :2].tolist() == [[1, 2], [5, 2]]


def test_a_single_owner_makes_the_prototype_bit_for_bit():
    for aggregation in ("plain", "weighted"):
        server = make_server(1, aggregation=aggregation)
        mean = torch.randn(1, 5, generator=torch.Generator().manual_seed(1))
        upload = {"mean": mean, "ids": torch.tensor([1]), "count": torch.tensor([7])}
        aggregate(server, {0: upload})
        assert torch.equal(server.proto[1], mean[0])


@pytest.mark.parametrize(
    ("missing", "after"), [("retain", {0: [1, 2], 1: [3, 3]}), ("rebuild", {1: [3, 3]})]
)
def test_a_class_that_nobody_sent(missing, after):
    server = make_server(missing=missing)
    aggregate(server, {0: prototypes((0, (1.0, 2.0), 1))})
    assert aggregate(server, {1: prototypes((1, (3.0, 3.0), 1))}, 2) == after
    before = copy_of(server.state_dict())
    aggregate(server, {}, 3)  # nobody answered at all
    assert same(server.state_dict(), before)
    # a client forgets what is gone
    client = fedproto.Client(make_setup(fedproto.Config(), client=0, shard=shard()))
    client.proto.fill_(9)
    client.known.fill_(True)
    client.receive(dict(server.download([0], 4))[0])
    assert client.known.tolist() == [c in after for c in range(3)]
    assert torch.equal(client.proto[client.known], server.proto[server.known])
    assert not client.proto[~client.known].any()


def test_local_prototypes_are_means_over_all_samples():
    _, clients = make_parties("fedproto", drop_last="true", batch_size=5)  # 12, 17, 22 samples
    for client in clients.values():
        client.train(1)
        upload, data = client.upload(), client.shard
        assert upload["ids"].tolist() == [0, 1, 2]
        assert upload["count"].tolist() == data.y.bincount().tolist()
        for mean, c in zip(upload["mean"], upload["ids"]):
            torch.testing.assert_close(mean, client.model.extractor(data.x[data.y == c]).mean(0))


def test_one_class_no_class_and_bytes():
    data = [([1.0, 3.0], [2, 2]), ([], [])]
    server, clients = line_parties("fedproto", data, classes=3)
    uploads = {i: client.upload() for i, client in clients.items()}
    assert uploads[0]["mean"].tolist() == [[2.0]]
    assert uploads[1]["mean"].shape == (0, 1)
    assert [nbytes(upload) for upload in uploads.values()] == [4 + 8 + 8, 0]  # D = 1
    assert nbytes(dict(server.download([0], 1))[0]) == 0
    server.aggregate({}, uploads, 1)
    assert nbytes(dict(server.download([0], 2))[0]) == 4 + 8


def test_bytes_do_not_depend_on_the_model():
    def wide_model():
        return SplitModel(nn.Sequential(nn.Linear(4, 500), nn.Linear(500, 5)), nn.Linear(5, 3))

    sizes = []
    for architecture in (tiny_model, wide_model):
        server, clients = make_parties("fedproto", architecture=architecture)
        train_round(server, clients, [0, 1, 2], 1)
        sizes.append((nbytes(dict(server.download([0], 2))[0]), nbytes(clients[0].upload())))
    assert sizes == [(3 * (4 * 5 + 8), 3 * (4 * 5 + 16))] * 2


# -- rounds by hand ------------------------------------------------------------------------------

DATA = [([1.0, 3.0, 5.0], [0, 0, 1]), ([1.0], [1]), ([8.0], [0])]


@pytest.mark.parametrize(
    ("aggregation", "P0", "slopes"),
    [
        # a = 1 after round 1: there is no prototype yet, and phi = 0 gives no gradient.
        # p_0 = (1 + 3) / 2 = 2 and p_1 = 5 of client 0, p_1 = 1 of client 1, p_0 = 8 of client 2:
        # P_0 = (2 + 8) / 2 = 5, P_1 = (5 + 1) / 2 = 3
        # round 2 with phi = 0 again; the pull's gradient of a is 2 mean (x - P_y) x:
        # 2 ((1-5) 1 + (3-5) 3 + (5-3) 5) / 3 = 0;  2 (1-3) 1 = -4;  2 (8-5) 8 = 48
        ("plain", 5.0, (1.0, 1.4, -3.8)),
        # P_0 = (2 * 2 + 1 * 8) / 3 = 4, P_1 = 3: client 0: 2 (-3 - 3 + 10) / 3 = 8/3; -4;
        # 2 (8-4) 8 = 64
        ("weighted", 4.0, (1 - 0.8 / 3, 1.4, -5.4)),
    ],
)
def test_two_rounds_of_three_clients(aggregation, P0, slopes):
    server, clients = line_parties("fedproto", DATA, classes=3, aggregation=aggregation)
    uploads = line_round(server, clients)
    assert [slope(c) for c in clients.values()] == [1, 1, 1]
    assert uploads[0]["mean"][:, 0].tolist() == [2, 5]
    assert uploads[0]["count"].tolist() == [2, 1]
    assert server.proto[:, 0].tolist() == [P0, 3, 0]
    assert server.known.tolist() == [True, True, False]  # nobody owns class 2
    for client in clients.values():
        nn.init.zeros_(client.model.head.weight)
    line_round(server, clients, 2)
    assert [slope(c) for c in clients.values()] == pytest.approx(slopes)


# -- the pull ------------------------------------------------------------------------------------


def test_pull_is_a_mean_over_batch_and_features():
    # features (0, 0), prototype (2, 0): (4 + 0) / 2 = 2, although the squared distance is 4;
    # two samples, one of them of a class without prototype: 1
    setup = make_setup(fedproto.Config(lam=3.0), client=0, shard=line_shard([0.0], [0], 3))
    model = SplitModel(nn.Linear(1, 2, bias=False), nn.Linear(2, 3))
    client = fedproto.Client(setup)
    client.model = model
    client.proto = torch.tensor([[2.0, 0.0], [9.0, 9.0], [9.0, 9.0]])
    client.known = torch.tensor([True, False, False])
    x = torch.zeros(2, 1)
    for y, pull in (([0, 0], 2.0), ([0, 1], 1.0), ([1, 2], 0.0)):
        labels = torch.tensor(y)
        entropy = F.cross_entropy(model(x), labels)
        assert (client.loss(x, labels) - entropy).item() == pytest.approx(3 * pull, abs=1e-5)


def test_a_class_without_prototype_pulls_nowhere():
    _, clients = make_parties("fedproto")
    client = clients[0]
    client.proto.fill_(100.0)  # known is false throughout
    x, y = client.shard.x, client.shard.y
    gradients = []
    for loss in (client.loss(x, y), F.cross_entropy(client.model(x), y)):
        gradients.append(torch.autograd.grad(loss, list(client.model.parameters())))
    assert all(torch.equal(a, b) for a, b in zip(*gradients))


def test_the_pull_has_a_gradient_and_changes_what_is_learned():
    def after(lam):
        server, clients = make_parties("fedproto", fedproto.Config(lam=lam))
        for t in (1, 2):
            train_round(server, clients, [0, 1, 2], t)
        return torch.cat([p.detach().flatten() for p in clients[1].model.parameters()])

    without = after(0.0)
    distances = [(after(lam) - without).norm().item() for lam in (0.01, 0.1)]
    assert 0 < distances[0] < distances[1]


@pytest.mark.parametrize("M", [1, 4])
def test_without_pull_the_models_are_those_of_local_bit_for_bit(tmp_path, M):
    ours = simulate(tmp_path / "fedproto", ["fedproto", "--lam", "0", *FLAGS], tiny_shards(M))
    local = simulate(tmp_path / "local", ["local", *FLAGS], tiny_shards(M))
    for i, model in models_of(local).items():
        assert same(models_of(ours)[i], model)
    rows, others = ours.rows(), local.rows()
    assert np.array_equal(rows["loss"], others["loss"], equal_nan=True)
    for point in ("recv", "post"):
        for what in ("accuracy", "test_loss"):  # the head's are those of Local as well
            ours, theirs = rows[f"{what}/{point}/head/client"], others[f"{what}/{point}/client"]
            assert np.array_equal(ours, theirs, equal_nan=True)
    assert not np.array_equal(rows["test_loss/post/client"], others["test_loss/post/client"])


# -- answers -------------------------------------------------------------------------------------


def answering(known, own=(0, 1, 2), **switches):
    """A client with z = x and prototypes 0, 10, 20 of which some are known."""
    setup = make_setup(fedproto.Config(**switches), client=0, shard=line_shard(own, own, 3))
    client = fedproto.Client(setup)
    client.model = SplitModel(nn.Identity(), nn.Linear(1, 3))
    client.proto = torch.tensor([[0.0], [10.0], [20.0]]) * torch.tensor(known)[:, None]
    client.known = torch.tensor(known)
    return client


X = torch.tensor([[1.0], [4.0], [6.0], [16.0], [1e6]])


def test_the_nearest_prototype_is_the_answer():
    client = answering([True, True, True])
    scores = client.predict(X)
    assert scores.argmax(dim=1).tolist() == [0, 0, 1, 2, 2]
    assert scores[0].tolist() == [-1, -9, -19]


def test_a_class_without_prototype_is_never_answered_and_costs_a_finite_loss():
    client = answering([True, False, True])
    scores = client.predict(X)
    assert scores.argmax(dim=1).tolist() == [0, 0, 0, 2, 2]
    assert scores[0].tolist() == [-1, -138, -19]  # -(2 * 19 + 100)
    assert torch.isfinite(F.cross_entropy(scores, torch.ones(5, dtype=torch.int64)))
    assert (answering([True, False, False]).predict(X).argmax(dim=1) == 0).all()
    assert (answering([False, False, True]).predict(X).argmax(dim=1) == 2).all()


def test_candidates_may_be_the_own_classes():
    client = answering([True, True, True], own=(0, 2), candidates="own")
    assert client.predict(X).argmax(dim=1).tolist() == [0, 0, 0, 2, 2]
    client = answering([True, True, False], own=(1, 2), candidates="own")
    assert (client.predict(X).argmax(dim=1) == 1).all()


@pytest.mark.parametrize(
    "client",
    [answering([False] * 3), answering([True, False, False], own=(1, 2), candidates="own")],
)
def test_without_a_candidate_the_head_answers(client):
    assert torch.equal(client.predict(X), client.model.head(X))
    assert torch.equal(client.predict_head(X), client.model.head(X))


def test_both_answers_are_measured():
    client = answering([True, True, True])  # test samples 0, 1, 2: all next to prototype 0
    with torch.no_grad():
        client.model.head.weight.copy_(torch.tensor([[0.0], [1.0], [1.6]]))
        client.model.head.bias.copy_(torch.tensor([0.0, -0.5, -1.5]))
    # scores at 0: (0, -0.5, -1.5), at 1: (0, 0.5, 0.1), at 2: (0, 1.5, 1.7)
    score = training.evaluate(client)
    assert score[:, 0].tolist() == [1, 3]
    assert torch.isfinite(score).all()


def test_both_answers_are_recorded(tmp_path):
    rows = simulate(tmp_path / "run", ["fedproto", *FLAGS], tiny_shards(2)).rows()
    for point in ("recv", "post"):
        assert np.isfinite(rows[f"accuracy/{point}/head/macro"]).all()
        assert np.isfinite(rows[f"test_loss/{point}/client"]).all()
    # before the first prototypes there is nothing but the head
    for what in ("accuracy", "test_loss"):
        for point in ("recv", "post"):
            ours, head = (rows[f"{what}/{point}{way}/client"] for way in ("", "/head"))
            assert np.array_equal(ours[0], head[0])
    assert not np.array_equal(ours[1:], head[1:])


def test_who_never_joined_answers_with_its_initial_head():
    server, clients = make_parties("fedproto")
    before = copy_of(clients[2].state_dict())
    train_round(server, clients, [0, 1], 1)
    assert same(clients[2].state_dict(), before)
    x = clients[2].shard.x_test
    assert torch.equal(clients[2].predict(x), tiny_initial()(x))


def tiny_initial():
    return make_setup().make_model()


def test_no_model_travels():
    server, clients = make_parties("fedproto")
    train_round(server, clients, [0, 1, 2], 1)
    assert clients[0].upload().keys() == {"mean", "ids", "count"}
    assert dict(server.download([0], 2))[0].keys() == {"proto", "ids"}
    models = [c.model.extractor[0].weight for c in clients.values()]
    assert not torch.equal(models[0], models[1])


# -- configuration -------------------------------------------------------------------------------


@pytest.mark.parametrize("lam", [-1.0, math.inf, math.nan])
def test_settings_that_make_no_sense(lam):
    with pytest.raises(ValueError, match=rf"lam is {lam}, expected a number in \[0, inf\)"):
        fedproto.Config(lam=lam)


def test_notices():
    assert make_server().notices() == []
    (notice,) = make_server(lam=0.0).notices()
    assert "Local" in notice
