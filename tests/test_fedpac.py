"""FedPAC: programme, statistics and phases against numbers worked by hand."""

import dataclasses
import logging

import numpy as np
import pytest
import scipy.optimize
import torch
from byhand import parties
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import (
    Values,
    batchnorm_model,
    make_parties,
    make_setup,
    same,
    shard,
    train_round,
)
from torch import nn

from fedapa_mpi import config, models
from fedapa_mpi.data.federation import Shard
from fedapa_mpi.models import SplitModel
from fedapa_mpi.store.state import copy_of, nbytes
from fedapa_mpi.strategies import fedpac
from fedapa_mpi.strategies.fedpac import Client, Config, Server
from fedapa_mpi.strategies.parts import heads
from fedapa_mpi.strategies.parts.heads import programme, solve

EXACT = {"atol": 1e-12, "rtol": 0}


def double(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def close(a, b, **tolerance):
    torch.testing.assert_close(a, b, **(tolerance or {"atol": 1e-6, "rtol": 0}))


# -- the quadratic programme ---------------------------------------------------------------------


def test_two_clients():
    # P_1 = diag(0.1, 0.1 + 0.2): alpha = (0.3, 0.1) / 0.4, value 0.75^2 0.1 + 0.25^2 0.3 = 0.075
    h = double([0.0, 0.0], [0.2, 0.4])  # squared distance 0.2
    P = programme(h @ h.T, double(0.1, 0.1), 0)
    close(P, double([0.1, 0.0], [0.0, 0.3]), **EXACT)
    alpha = solve(P)
    close(alpha, double(0.75, 0.25), **EXACT)
    assert (alpha @ P @ alpha).item() == pytest.approx(0.075)


@pytest.mark.parametrize("i", range(4))
def test_programme_is_its_definition(i):
    draw = torch.Generator().manual_seed(1)
    h = torch.randn(4, 3, 2, generator=draw, dtype=torch.float64)  # K = 4, C = 3, D = 2
    v = torch.rand(4, generator=draw, dtype=torch.float64)
    P = torch.zeros(4, 4, dtype=torch.float64)
    for j in range(4):
        for k in range(4):
            for c in range(3):
                P[j, k] += torch.dot(h[i, c] - h[j, c], h[i, c] - h[k, c])
        P[j, j] += v[j]
    flat = h.flatten(1)
    ours = programme(flat @ flat.T, v, i)
    close(ours, P, **EXACT)
    assert torch.equal(ours, ours.T)
    assert torch.linalg.eigvalsh(ours).min() > 0


@pytest.mark.parametrize("K", [1, 2, 7])
def test_equal_clients_share_equally(K):
    h = torch.full((K, 5), 0.3, dtype=torch.float64)
    v = torch.full((K,), 0.01, dtype=torch.float64)
    close(solve(programme(h @ h.T, v, 0)), torch.full_like(v, 1 / K), atol=1e-9, rtol=0)


def test_far_from_all_others_a_client_keeps_its_own_head():
    h = double([0.0, 0.0], [1e3, 0.0], [0.0, 1e3])
    assert solve(programme(h @ h.T, double(0.1, 0.1, 0.1), 0)).tolist() == [1, 0, 0]


@pytest.mark.parametrize("K", [1, 3])
def test_nothing_to_choose_by(K):
    alpha = solve(torch.zeros(K, K, dtype=torch.float64))
    assert alpha.sum().item() == pytest.approx(1)
    assert (alpha >= 0).all()


def test_small_weights_are_dropped_and_the_rest_rescaled():
    # diag(1, 1, 1999): (1, 1, 1 / 1999) / (2 + 1 / 1999), the last one 0.00025
    assert solve(torch.diag(double(1.0, 1.0, 1999.0))).tolist() == pytest.approx([0.5, 0.5, 0])
    assert solve(torch.diag(double(1.0, 1.0, 1999.0)))[2].item() == 0
    # diag(1, 1, 199): the last one 0.0025 stays
    alpha = solve(torch.diag(double(1.0, 1.0, 199.0)))
    close(alpha, double(199.0, 199.0, 1.0) / 399, **EXACT)


def test_of_thousands_not_all_are_dropped():
    alpha = solve(torch.eye(1001, dtype=torch.float64))
    assert alpha.sum().item() == pytest.approx(1)
    assert torch.isfinite(alpha).all()


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8])
def test_scale_does_not_matter(scale):
    h = torch.randn(5, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    v = double(0.1, 0.2, 0.3, 0.4, 0.5)
    P = programme(h @ h.T, v, 1)
    close(solve(scale * P), solve(P), atol=1e-9, rtol=0)


numbers = st.floats(-4, 4, width=32)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_weights_are_weights_and_the_best(data):
    K = data.draw(st.integers(1, 6))
    h = double(*[data.draw(st.lists(numbers, min_size=3, max_size=3)) for _ in range(K)])
    v = double(*[data.draw(st.sampled_from([0.0, 1e-4, 0.01, 1.0])) for _ in range(K)])
    P = programme(h @ h.T, v, data.draw(st.integers(0, K - 1)))
    alpha = solve(P)
    assert (alpha >= 0).all()
    assert alpha.sum().item() == pytest.approx(1, abs=1e-12)
    # towards no corner does the value fall: for a convex function that is the minimum. What was
    # dropped moves P alpha by at most 2 K 0.001 of the largest entry
    slope = P @ alpha - alpha @ P @ alpha
    assert slope.min().item() >= -0.004 * K * P.abs().max().item() - 1e-12


def test_what_has_no_solution_raises():
    with pytest.raises((RuntimeError, ValueError)):
        solve(torch.full((3, 3), torch.nan, dtype=torch.float64))


def test_a_wrong_answer_of_the_solver_is_noticed(monkeypatch):
    # some versions return one without a word
    P = torch.diag(double(0.1, 0.3))
    monkeypatch.setattr(scipy.optimize, "nnls", lambda A, b: (np.array([0.7, 0.3]), 0.0))
    with pytest.raises(RuntimeError, match="not the minimum"):
        solve(P)
    monkeypatch.setattr(scipy.optimize, "nnls", lambda A, b: (np.array([0.3, 0.1]), 0.0))
    close(solve(P), double(0.75, 0.25), **EXACT)


# -- the server ----------------------------------------------------------------------------------


def small_model():
    """theta (2 ones), features [2], three classes without bias: a head [3, 2]."""
    return SplitModel(Values(2), nn.Linear(2, 3, bias=False))


def make_server(n, **switches):
    server = Server(make_setup(Config(**switches), clients=len(n), architecture=small_model))
    server.welcome({i: {"n": torch.tensor(count)} for i, count in enumerate(n)})
    return server


def message(theta, head, h, v, means):
    """An upload; means: {class: (mean, count)}."""
    return {
        "theta": torch.tensor(theta),
        "head": torch.full((6,), head),
        "h": torch.tensor(h),
        "v": torch.tensor([v]),
        "mean": torch.tensor([mean for mean, _ in means.values()]).reshape(-1, 2),
        "ids": torch.tensor(list(means), dtype=torch.int64),
        "count": torch.tensor([count for _, count in means.values()], dtype=torch.int64),
    }


NEAR, FAR = [[0.0, 0.0]] * 3, [[0.2, 0.4], [0.0, 0.0], [0.0, 0.0]]
AWAY = [[0.0, 0.0], [0.0, 0.0], [0.0, 1e3]]
UPLOADS = {
    0: message([0.0, 4.0], 1.0, NEAR, 0.1, {0: ([1.0, 2.0], 1)}),
    1: message([4.0, 0.0], 2.0, FAR, 0.1, {0: ([5.0, 6.0], 3)}),
    2: message([8.0, 8.0], 4.0, AWAY, 0.1, {1: ([7.0, 8.0], 4)}),
}


def aggregate(server, uploads, t=1):
    server.aggregate(dict(server.download(sorted(uploads), t)), uploads, t)


def test_a_round_of_three_clients():
    server = make_server([1, 3, 4])
    aggregate(server, UPLOADS)
    # theta: 1/8 (0, 4) + 3/8 (4, 0) + 4/8 (8, 8)
    assert server.theta.tolist() == [5.5, 4.5]
    # class 0: 1/4 (1, 2) + 3/4 (5, 6); class 1: client 2 alone; class 2: nobody
    assert server.proto.tolist() == [[4, 5], [7, 8], [0, 0]]
    assert server.known.tolist() == [True, True, False]
    # the first two: 3/4 and 1/4 as worked above; the third is so far from both that its share at
    # theirs, (0.075 - 0.05) / 10^6 for the second, is dropped, and theirs at its own likewise
    close(server.head, torch.tensor([[1.25], [1.75], [4.0]]).expand(3, 6))
    first = dict(server.download([0, 1, 2], 2))
    assert [list(m) for m in first.values()] == [["theta", "proto", "ids", "head"]] * 3
    assert first[2]["ids"].tolist() == [0, 1]
    assert first[2]["ids"].dtype == torch.int64
    assert first[2]["proto"].tolist() == [[4, 5], [7, 8]]
    close(first[1]["head"], torch.full((6,), 1.75))


def test_renaming_the_clients_renames_their_heads():
    # whoever mixes up statistics and heads gives these three the wrong ones
    names = [2, 0, 1]
    server = make_server([4, 1, 3])
    aggregate(server, {k: UPLOADS[i] for k, i in enumerate(names)})
    close(server.head, torch.tensor([[4.0], [1.25], [1.75]]).expand(3, 6))


def test_prototypes_of_classes_that_nobody_owns_in_a_round_stay():
    server = make_server([1, 3, 4])
    aggregate(server, UPLOADS)
    aggregate(server, {0: UPLOADS[0]}, 2)
    assert server.proto.tolist() == [[1, 2], [7, 8], [0, 0]]
    assert server.known.tolist() == [True, True, False]


def test_weights_of_prototypes_are_formed_first():
    # 3e38 + 3e38 would overflow float32
    means = {0: ([3e38, 0.0], 1)}
    server = make_server([1, 1])
    aggregate(server, {i: message([0.0, 0.0], 1.0, NEAR, 0.1, means) for i in (0, 1)})
    assert server.proto[0, 0].item() == pytest.approx(3e38)


def test_a_single_upload():
    server = make_server([1, 3, 4])
    aggregate(server, {1: UPLOADS[1]})
    assert server.theta.tolist() == [4, 0]
    assert server.head[1].tolist() == [2] * 6
    initial = models.vector(server.setup.make_model().head)
    assert torch.equal(server.head[[0, 2]], initial.expand(2, 6))


def test_a_round_without_uploads_changes_nothing():
    server = make_server([1, 3, 4])
    aggregate(server, UPLOADS)
    before = copy_of(server.state_dict())
    aggregate(server, {}, 2)
    assert same(server.state_dict(), before)


def test_who_has_no_samples_keeps_its_head_and_gives_it_to_nobody():
    # its h = 0 and v = 0 would make it everybody's best choice
    nothing = message([9.0, 9.0], 9.0, NEAR, 0.0, {})
    server = make_server([1, 3, 4, 0])
    aggregate(server, {**UPLOADS, 3: nothing})
    close(server.head, torch.tensor([[1.25], [1.75], [4.0], [9.0]]).expand(4, 6))
    assert server.theta.tolist() == [5.5, 4.5]
    server = make_server([0])
    aggregate(server, {0: nothing})
    assert server.head[0].tolist() == [9] * 6


def test_without_a_solution_a_client_keeps_its_own_head(monkeypatch, caplog):
    def fails(P):
        if P[0, 0] < 1:  # all but the third
            raise RuntimeError("Maximum number of iterations reached.")
        return solve(P)

    monkeypatch.setattr(heads, "solve", fails)
    server = make_server([1, 3, 4])
    with caplog.at_level(logging.WARNING, "fedapa_mpi"):
        aggregate(server, UPLOADS, 7)
    assert server.head[:, 0].tolist() == [1, 2, 4]
    assert server.state_dict()["unsolved"].item() == server.unsolved == 2
    assert len(caplog.messages) == 2
    assert "round 7: client 1 keeps its head" in caplog.messages[1]
    assert "(2 so far): Maximum number" in caplog.messages[1]


def test_held_out_clients_get_what_everybody_gets_first():
    server = make_server([1, 3, 4])
    initial = server.head[0].clone()
    aggregate(server, UPLOADS)
    ((_, usual),) = server.download([0], 2)
    new = server.newcomer()
    assert torch.equal(new["head"], initial)
    del new["head"], usual["head"]
    assert same(new, usual)


def test_statistics_are_averaged_and_counters_stay():
    server, clients = make_parties("fedpac", architecture=batchnorm_model, clients=2)
    sent = dict(server.download([0, 1], 1))
    uploads = {}
    for i, client in clients.items():
        client.receive(sent[i])
        client.train(1)
        uploads[i] = client.upload()
    server.aggregate(sent, uploads, 1)
    a, b = (uploads[i]["theta_buffers"] for i in (0, 1))
    close(server.theta_buffers, (12 * a + 17 * b) / 29)  # n = (12, 17)
    counters = [client.model.extractor[1].num_batches_tracked.item() for client in clients.values()]
    assert counters == [6, 8]  # floor(n / 4) steps in each phase
    clients[0].receive(dict(server.download([0], 2))[0])
    assert torch.equal(clients[0].model.extractor[1].running_var, server.theta_buffers[5:])
    assert clients[0].model.extractor[1].num_batches_tracked.item() == 6


# -- the client ----------------------------------------------------------------------------------


def samples(x, y, classes=3):
    x, y = torch.tensor(x, dtype=torch.float32), torch.tensor(y)
    return Shard(x, y, x[:0], y[:0], classes, 1.0, (0.0,), (1.0,))


def scale_model():
    """z = theta x with one number, a head [3, 1] without bias."""
    return SplitModel(nn.Linear(1, 1, bias=False), nn.Linear(1, 3, bias=False))


def plane_model():
    """z = x in two dimensions."""
    model = SplitModel(nn.Linear(2, 2, bias=False), nn.Linear(2, 3, bias=False))
    model.extractor.weight.data.copy_(torch.eye(2))
    return model


def make_client(own, architecture, **switches):
    changes = {k: switches.pop(k) for k in ("momentum", "client_opt") if k in switches}
    setup = make_setup(
        Config(**switches), client=0, shard=own, architecture=architecture, **changes
    )
    return Client(setup)


def download(theta, head, proto):
    """proto: {class: prototype}."""
    return {
        "theta": torch.tensor(theta),
        "head": torch.tensor(head),
        "proto": torch.tensor(list(proto.values())),
        "ids": torch.tensor(list(proto), dtype=torch.int64),
    }


def test_statistics():
    # class 0: (1, 0), (3, 0), class 1: (0, 2). p = (2/3, 1/3), means (2, 0), (0, 2), second
    # moments 5 and 4: h = ((4/3, 0), (0, 2/3), 0); v = (2/3 5 + 1/3 4 - 4/9 4 - 1/9 4) / 3 = 22/27
    client = make_client(samples([[1, 0], [0, 2], [3, 0]], [0, 1, 0]), plane_model)
    client.train(1)
    close(client.h, torch.tensor([[4 / 3, 0], [0, 2 / 3], [0, 0]]))
    close(client.v, torch.tensor([22 / 27]))
    upload = client.upload()
    assert torch.equal(upload["h"], client.h)
    assert torch.equal(upload["v"], client.v)
    assert upload["ids"].tolist() == [0, 1]
    assert upload["count"].tolist() == [2, 1]
    assert upload["ids"].dtype == upload["count"].dtype == torch.int64


def test_statistics_are_those_of_what_was_downloaded():
    # BatchNorm's statistics move in the head phase already
    trained, idle = (make_client(shard(12), batchnorm_model) for _ in range(2))
    for client in (trained, idle):
        client.receive(first_download(client))
    trained.train(1)
    with torch.no_grad():
        idle.set_mode(training=False)
        z = idle.model.extractor(idle.shard.x)
    h = torch.stack([z[idle.shard.y == c].sum(dim=0) / 12 for c in range(3)])
    close(trained.h, h)
    close(trained.v, ((z.square().sum() / 12 - h.square().sum()) / 12)[None])


@pytest.mark.parametrize(("lam", "theta"), [(1.0, 2.611455), (0.5, 2.311455), (0.0, 2.011455)])
def test_both_phases(lam, theta):
    # x = 1, theta = 2, phi = 0, y = 0. Head phase: z = 2, probabilities 1/3 each, gradient
    # (-2/3, 1/3, 1/3) 2, step 0.1: phi = (2/15, -1/15, -1/15).
    # Extractor phase: scores phi z = (4/15, -2/15, -2/15), probabilities (0.427234, 0.286383,
    # 0.286383); dCE/dz = -0.572766 (2/15 + 1/15) = -0.114553; with the target 5 the pull adds
    # lam 2 (2 - 5) = -6 lam; step 0.1 and x = 1: theta = 2 + 0.0114553 + 0.6 lam
    client = make_client(samples([[1.0]], [0]), scale_model, lam=lam)
    client.receive(download([2.0], [0.0] * 3, {0: [5.0], 2: [-70.0]}))
    client.train(1)
    upload = client.upload()
    close(upload["head"], torch.tensor([2 / 15, -1 / 15, -1 / 15]))
    close(upload["theta"], torch.tensor([theta]))
    close(upload["mean"], torch.tensor([[theta]]))  # of the trained extractor
    assert client.h.flatten().tolist() == [2, 0, 0]  # of the downloaded one
    assert client.v.tolist() == [0]


def test_pull_is_a_mean_over_batch_and_features():
    # two samples in two dimensions, phi = 0 and head_lr tiny: the gradient is that of the pull,
    # 2 (z - target) / 4; z - target = (1, 0) - (2, 0), (0, 1) - (0, 5)
    # dW = sum_b 2 (z - target)_b x_b^T / 4 = diag(-0.5, -2): W = eye + 0.1 diag(0.5, 2)
    client = make_client(samples([[1, 0], [0, 1]], [0, 1]), plane_model, head_lr=1e-12)
    message = download([1.0, 0.0, 0.0, 1.0], [0.0] * 6, {0: [2.0, 0.0], 1: [0.0, 5.0]})
    client.receive(message)
    client.train(1)
    close(client.upload()["theta"], torch.tensor([1.05, 0, 0, 1.2]))


def test_no_pull_while_no_class_has_a_prototype():
    thetas = []
    for lam in (0.0, 100.0):
        client = make_client(shard(12), two_layers, lam=lam)
        client.receive(first_download(client))
        client.train(1)
        thetas.append(client.upload()["theta"])
    assert torch.equal(*thetas)


def two_layers():
    return SplitModel(nn.Sequential(nn.Linear(4, 5), nn.ReLU()), nn.Linear(5, 3))


def first_download(client):
    return Server(dataclasses.replace(client.setup, shard=None)).newcomer()


def test_a_class_without_prototype_is_drawn_to_its_own_mean_from_before():
    # class 0 has none: its target is its mean (2, 0) under the downloaded extractor
    client = make_client(samples([[1, 0], [0, 2], [3, 0]], [0, 1, 0]), plane_model)
    client.receive(download([1.0, 0.0, 0.0, 1.0], [0.0] * 6, {1: [5.0, 5.0]}))
    client.train(1)
    close(client.target, torch.tensor([[2.0, 0], [5, 5], [0, 0]]))
    # in the next round it has one, and class 1 has lost its own
    client.receive(download([2.0, 0.0, 0.0, 2.0], [0.0] * 6, {0: [7.0, 7.0]}))
    client.train(2)
    close(client.target, torch.tensor([[7.0, 7], [0, 4], [0, 0]]))


def test_each_phase_moves_its_own_part():
    client = make_client(shard(12), two_layers, lam=1.0)
    client.receive(first_download(client))
    seen = []
    plain = fedpac.training.fit

    def watched(client, t, **options):
        before = [models.vector(part) for part in (client.model.extractor, client.model.head)]
        loss = plain(client, t, **options)
        after = [models.vector(part) for part in (client.model.extractor, client.model.head)]
        seen.append([torch.equal(a, b) for a, b in zip(before, after)])
        return loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fedpac.training, "fit", watched)
        client.train(1)
    assert seen == [[True, False], [False, True]]


@pytest.mark.parametrize(("client_opt", "same_as_first"), [("reset", True), ("persist", False)])
def test_momentum(client_opt, same_as_first):
    client = make_client(samples([[1.0]], [0]), scale_model, client_opt=client_opt)
    ends = []
    for t in (1, 2):
        client.receive(download([2.0], [0.0] * 3, {0: [5.0]}))
        client.train(t)
        ends.append(client.upload())
    assert torch.equal(ends[0]["theta"], ends[1]["theta"]) == same_as_first
    assert torch.equal(ends[0]["head"], ends[1]["head"]) == same_as_first


def one_class(n):
    """A shard that owns class 1 only."""
    s = shard(n)
    return Shard(s.x, torch.ones_like(s.y), s.x_test, s.y_test, 3, 1.0, (0.0,), (1.0,))


def one_weight():
    """z = theta x with theta = 1, and a head (a, b) from (0, 0): on x = 1, logits theta (a, b)."""
    model = SplitModel(nn.Linear(1, 1, bias=False), nn.Linear(1, 2, bias=False))
    nn.init.ones_(model.extractor.weight)
    nn.init.zeros_(model.head.weight)
    return model


def test_two_rounds_of_three_clients_by_hand():
    # all inputs are 1; labels 0, 0, 1; s = 1 / (1 + exp(-2 theta a)), heads stay (a, -a)
    # round 1: h = (1, 0), (1, 0), (0, 1), v = 0. Head: a = +-0.1 * 0.5 = +-0.05. Extractor, no
    # pull yet: s = 0.5249792, theta = 1 + 0.1 * 2 * 0.05 (1 - s) = 1.0047502, for all three; so
    # both prototypes. Heads: who has other classes costs |h_i - h_j|^2 = 2 and gets no share
    # round 2, theta = T: s = 0.5250976, a = 0.05 + 0.1 T (1 - s) = 0.0977158; the pull is 0 at
    # theta = T; s = 0.5489329, theta = T + 0.1 * 2 a (1 - s) = 1.0135655
    server, clients = parties(
        "fedpac", Config(), labels=(0, 0, 1), n=(2, 1, 1), architecture=one_weight
    )
    for t, (theta, a) in enumerate([(1.0047502, 0.05), (1.0135655, 0.0977158)], start=1):
        train_round(server, clients, [0, 1, 2], t)
        close(server.theta, torch.tensor([theta]))
        close(server.proto[:2], torch.tensor([[theta], [theta]]))
        close(server.head, torch.tensor([[a, -a], [a, -a], [-a, a]]))


def test_bytes_where_classes_are_missing():
    # the model has D = 5 features, C = 3 classes, 25 + 18 parameters
    server, clients = make_parties("fedpac")
    clients[1].setup = dataclasses.replace(clients[1].setup, shard=one_class(9))
    assert nbytes(dict(server.download([1], 1))[1]) == 4 * 43  # m = 0
    train_round(server, clients, [1], 1)
    assert server.known.tolist() == [False, True, False]
    assert nbytes(dict(server.download([0], 2))[0]) == 4 * 43 + (4 * 5 + 8)  # m = 1
    # m_i = 1: one mean, its class and count; h_i and v_i whole
    assert nbytes(clients[1].upload()) == 4 * 43 + 4 * 3 * 5 + 4 + (4 * 5 + 16)


@pytest.mark.parametrize("own", [shard(0), shard(1), one_class(9), shard(9, 0)])
@pytest.mark.parametrize("architecture", [two_layers, batchnorm_model])
def test_small_clients(own, architecture):
    server, clients = make_parties("fedpac", architecture=architecture)
    clients[0] = Client(make_setup(Config(), client=0, shard=own, architecture=architecture))
    server.welcome({0: clients[0].hello()})
    for t in (1, 2, 3):
        train_round(server, clients, [0, 1], t)
    for party in (server, *clients.values()):
        assert all(torch.isfinite(tensor).all() for tensor in party.state_dict().values())
    upload = clients[0].upload()
    assert upload["ids"].tolist() == own.y.unique().tolist()
    assert upload["mean"].shape == (len(own.y.unique()), 5)
    assert server.unsolved == 0
    assert (clients[0].v >= 0).all()


def test_a_client_that_never_joined():
    server, clients = make_parties("fedpac")
    fresh = copy_of(clients[2].state_dict())
    for t in (1, 2):
        train_round(server, clients, [0, 1], t)
    assert same(clients[2].state_dict(), fresh)
    ((_, message),) = server.download([2], 3)
    assert torch.equal(message["head"], models.vector(clients[2].model.head))  # the initial one
    clients[2].receive(message)
    assert torch.equal(models.vector(clients[2].model.extractor), server.theta)


# -- reductions ----------------------------------------------------------------------------------


def test_one_client_without_pull_is_alternating_local_training_bit_for_bit():
    server, clients = make_parties("fedpac", Config(lam=0.0), clients=1)
    _, alone = make_parties("fedpac", Config(lam=0.0), clients=1)
    for t in (1, 2, 3):
        train_round(server, clients, [0], t)
        alone[0].train(t)
    theirs = models.vector(alone[0].model)
    assert torch.equal(models.vector(clients[0].model), theirs)
    assert torch.equal(torch.cat([server.theta, server.head[0]]), theirs)


def test_the_pull_changes_the_result():
    ends = []
    for lam in (0.0, 1.0):
        server, clients = make_parties("fedpac", Config(lam=lam))
        for t in (1, 2):
            train_round(server, clients, [0, 1, 2], t)
        ends.append(server.theta)
    assert not torch.equal(*ends)


def test_heads_are_mixed_and_personal():
    server, clients = make_parties("fedpac")
    train_round(server, clients, [0, 1, 2], 1)
    own = torch.stack([models.vector(client.model.head) for client in clients.values()])
    assert all(not torch.equal(server.head[i], own[i]) for i in range(3))
    assert not torch.equal(server.head[0], server.head[1])


# -- configuration -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("switches", "message"),
    [
        ({"lam": -1.0}, r"lam is -1.0, expected a number in \[0, inf\)"),
        ({"lam": float("nan")}, "lam is nan"),
        ({"head_lr": 0.0}, r"head_lr is 0.0, expected a number in \(0, inf\)"),
        ({"head_lr": float("inf")}, "head_lr is inf"),
    ],
)
def test_settings_that_make_no_sense(switches, message):
    with pytest.raises(ValueError, match=message):
        Config(**switches)


@pytest.mark.parametrize(
    ("switches", "changes", "words"),
    [
        ({}, {"client_opt": "reset"}, []),
        ({}, {"client_opt": "persist", "momentum": 0.0}, []),
        ({"lam": 0.0}, {"client_opt": "reset"}, ["not aligned"]),
        ({}, {"client_opt": "persist"}, ["momentum"]),
    ],
)
def test_notices(switches, changes, words):
    notices = Server(make_setup(Config(**switches), **changes)).notices()
    assert len(notices) == len(words)
    assert all(word in notice for word, notice in zip(words, notices))


def test_momentum_starts_anew_by_default():
    assert config.experiment("fedpac", {}).run.client_opt == "reset"
    assert config.experiment("fedpac", {"client_opt": "persist"}).run.client_opt == "persist"
