"""APPLE against numbers worked by hand, and what must hold for any numbers."""

import math

import numpy as np
import pytest
import torch
from byhand import parties, poor_shards
from tiny import (
    batchnorm_model,
    make_parties,
    make_setup,
    models_of,
    same,
    simulate,
    tiny_shards,
    train_round,
)
from torch import nn

from fedapa_mpi import models
from fedapa_mpi.models import SplitModel
from fedapa_mpi.store.state import copy_of, nbytes
from fedapa_mpi.strategies import apple
from fedapa_mpi.strategies.parts import relationships


def close(a, b, atol=5e-7):
    torch.testing.assert_close(a.detach(), torch.as_tensor(b, dtype=a.dtype), atol=atol, rtol=0)


class Answer(nn.Module):
    """A model that is one number and answers it."""

    def __init__(self):
        super().__init__()
        self.v = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.v


def scalar_client(monkeypatch, p, cores, target, **switches):
    """Client 0 of two with scalar cores and the loss (v - target)^2 / 2."""
    half_square = lambda v, y: 0.5 * (v - target).square().sum()  # noqa: E731
    monkeypatch.setattr(nn.functional, "cross_entropy", half_square)
    setup = make_setup(
        apple.Config(**switches),
        clients=2,
        client=0,
        architecture=lambda: SplitModel(nn.Identity(), Answer()),
    )
    client = apple.Client(setup)
    client.receive(
        {
            "ids": torch.tensor([1]),
            "core": torch.tensor([[float(cores[1])]]),
            "p0": torch.tensor(p),
        }
    )
    with torch.no_grad():
        client.core.fill_(cores[0])
    return client


# -- gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pull", "gradient"),
    [
        # c = (2, 4), p = (1/2, 1/2): v = 3, g = v - 1 = 2; dc_1 = p_1 g = 1, dp = g c = (4, 8)
        (0.0, (4, 8)),
        # p0 = (1/4, 3/4), mu lambda = 0.1: + 0.1 (p - p0) = (0.025, -0.025)
        (0.1, (4.025, 7.975)),
    ],
)
def test_gradients_of_core_and_relationships(monkeypatch, pull, gradient):
    client = scalar_client(monkeypatch, (0.5, 0.5), (2, 4), 1)
    client.p0.copy_(torch.tensor([0.25, 0.75]))
    client.pull = pull
    client.loss(torch.ones(1), torch.zeros(1)).backward()
    close(client.core.grad, [1])
    close(client.p.grad, gradient)
    assert not client.cores.requires_grad
    assert client.model.head.v.grad is None


@pytest.mark.parametrize(
    ("schedule", "r", "value"),
    [
        ("cosine", 0, 1),
        ("cosine", 5, 0.5),
        ("exponential", 0, 1),
        ("exponential", 5, 0.031623),
        ("exponential", 1, 0.501187),
        ("cosine", 10, 0),
        ("exponential", 10, 0),
        ("cosine", 11, 0),
        ("exponential", 1000, 0),
    ],
)
def test_schedule_of_the_regulariser(schedule, r, value):
    assert relationships.relaxation(r, 10, schedule) == pytest.approx(value, abs=1e-6)
    assert relationships.relaxation(r, 0, schedule) == 0


def test_pull_by_round():
    _, clients = make_parties("apple", apple.Config(mu=0.3, loosen=0.5), horizon=4)
    pulls = []
    for t in (1, 2, 3):
        clients[0].train(t)
        pulls.append(clients[0].pull)
    # L = 2: lambda = 1, 0.001^(1/2), 0
    assert pulls == pytest.approx([0.3, 0.3 * 0.031623, 0], abs=1e-6)


def test_regulariser_holds_the_relationships():
    def moved(mu):
        config = apple.Config(mu=mu, loosen=1.0, schedule="cosine", p_lr=0.01)
        server, clients = make_parties("apple", config)
        for t in (1, 2, 3):
            train_round(server, clients, [0, 1, 2], t)
        return (clients[0].p - clients[0].p0).norm().item()

    assert 0 < moved(20.0) < 0.8 * moved(0.0)


# -- a whole round -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("switches", "p"),
    [
        # labels 0, 0, 1, n = 1, 2, 1: p0 = (1/4, 1/2, 1/4); cores start at 0, lr 0.1
        # round 1: v = 0, g = (-0.5, 0.5) or its negative, step p_ii g, <g, c> = 0 leaves p:
        #   c = 0.1 * 0.25 * 0.5 = 0.0125, 0.1 * 0.5 * 0.5 = 0.025, -0.0125, each (c, -c)
        # round 2, client 1: v = 0.25 * 0.0125 + 0.5 * 0.025 - 0.25 * 0.0125 = 0.0125,
        #   s = 1 / (1 + exp(-0.025)) = 0.506250, g = (-0.493750, 0.493750)
        #   c_1 = 0.0125 + 0.1 * 0.25 * 0.493750 = 0.02484375
        #   <g, c> = -2 * 0.493750 c = (-0.01234375, -0.0246875, 0.01234375); its step is 1
        ({"mu": 0.0}, (0.26234375, 0.5246875, 0.23765625)),
        # the pull is 0 at p0: one step is the same
        ({"mu": 5.0, "loosen": 1.0}, (0.26234375, 0.5246875, 0.23765625)),
        ({"p_lr": 0.0}, (0.25, 0.5, 0.25)),
    ],
)
def test_two_rounds_of_three_clients(switches, p):
    config = apple.Config(**{"p_lr": 1.0, **switches})
    server, clients = parties("apple", config, [0, 0, 1], [1, 2, 1])
    train_round(server, clients, [0, 1, 2], 1)
    cores = [0.0125, 0.025, -0.0125]
    close(server.core, [[c, -c] for c in cores])
    close(clients[0].p, [0.25, 0.5, 0.25])
    train_round(server, clients, [0, 1, 2], 2)
    close(server.core[0], [0.02484375, -0.02484375], atol=1e-6)
    close(clients[0].p, p, atol=1e-6)
    # v of the new c_1 and p, and of the cores that were downloaded
    v = p[0] * 0.02484375 + p[1] * 0.025 - p[2] * 0.0125
    close(models.vector(clients[0].model), [v, -v], atol=1e-6)


def test_v_is_formed_anew_for_each_batch():
    # client 1 alone of three, two steps: c = 0.0125, v = 0.25 * 0.0125 = 0.003125,
    # s = 1 / (1 + exp(-0.00625)) = 0.501563: c = 0.0125 + 0.025 * 0.498438 = 0.0249609
    server, clients = parties("apple", apple.Config(p_lr=0.0), [0, 0, 1], [1, 2, 1], epochs=2)
    train_round(server, clients, [0], 1)
    close(server.core, [[0.0249609, -0.0249609], [0, 0], [0, 0]])


def test_the_first_mixture_is_the_initial_model():
    server, clients = make_parties("apple")
    initial = models.vector(clients[0].model)
    for i, message in server.download([0, 1, 2], 1):
        close(message["p0"], [12 / 51, 17 / 51, 22 / 51])
        clients[i].receive(message)
        close(models.vector(clients[i].model), initial)


def test_core_goes_to_the_server_and_the_mixture_stays():
    server, clients = make_parties("apple", apple.Config(p_lr=0.01))
    train_round(server, clients, [0, 1, 2], 1)
    for i, client in clients.items():
        assert torch.equal(server.core[i], client.core)
        assert not torch.equal(server.core[i], models.vector(client.model))
        assert client.upload().keys() == {"core"}
    sent = dict(server.download([0, 2], 2))
    assert sent[2]["ids"].tolist() == [0, 1]
    assert sent[2]["ids"].dtype == torch.int64
    assert torch.equal(sent[2]["core"], server.core[[0, 1]])
    assert sent[2].keys() == {"ids", "core"}  # p0 once


def test_clients_of_a_round_do_not_see_each_others_new_cores():
    server, clients = parties("apple", apple.Config(), [0, 0, 1], [1, 2, 1])
    train_round(server, clients, [0, 1, 2], 1)
    assert (clients[2].cores == 0).all()


def test_relationships_start_their_momentum_afresh():
    server, clients = parties("apple", apple.Config(p_lr=1.0, mu=0.0), [0, 0], [1, 1], momentum=0.9)
    for t in (1, 2):
        train_round(server, clients, [0, 1], t)
    client = clients[0]
    client.receive(dict(server.download([0], 3))[0])
    before = client.p.detach().clone(), client.core.detach().clone()
    old = client.optimizer.state[client.core]["momentum_buffer"].clone()
    client.train(3)
    close(before[0] - client.p, client.p.grad)
    close(before[1] - client.core, 0.1 * (0.9 * old + client.core.grad))


def test_own_initial_cores_differ_and_are_known_to_the_server():
    server, clients = make_parties("apple", apple.Config(initial_cores="own"))
    for i, client in clients.items():
        assert torch.equal(server.core[i], client.core)
        assert torch.equal(models.vector(client.model), client.core)
        assert not torch.equal(server.core[i], server.core[i - 1])
    common, _ = make_parties("apple")
    assert torch.equal(common.core, common.core[:1].expand(3, -1))
    train_round(server, clients, [0, 1, 2], 1)
    assert torch.isfinite(server.core).all()


# -- who takes part --------------------------------------------------------------------------------


def test_who_never_joined_counts_with_its_initial_core():
    server, clients = make_parties("apple")
    initial = server.core[2].clone()
    for t in (1, 2):
        train_round(server, clients, [0, 1], t)
    assert torch.equal(server.core[2], initial)
    assert clients[2].p.tolist() == [0, 0, 1]  # itself alone: the initial model
    assert torch.equal(models.vector(clients[2].model), initial)
    sent = dict(server.download([0, 2], 3))
    assert "p0" in sent[2]
    assert "p0" not in sent[0]


def test_a_single_participant_changes_its_core_only():
    server, clients = make_parties("apple")
    before = server.core.clone()
    train_round(server, clients, [1], 1)
    assert torch.equal(server.core[[0, 2]], before[[0, 2]])
    assert not torch.equal(server.core[1], before[1])


def test_a_round_without_uploads_changes_nothing():
    server, clients = make_parties("apple", apple.Config(downloads=1))
    train_round(server, clients, [0, 1], 1)
    before = copy_of(server.state_dict())
    server.aggregate(dict(server.download([0, 2], 2)), {}, 2)
    assert same(server.state_dict(), before)


def test_nobody_has_samples():
    server, _ = parties("apple", apple.Config(), [0, 0], [0, 0])
    assert dict(server.download([0], 1))[0]["p0"].tolist() == [0.5, 0.5]


def test_statistics_are_the_mixtures_own():
    server, clients = make_parties("apple", architecture=batchnorm_model)
    train_round(server, clients, [0, 1, 2], 1)
    ((_, message),) = server.download([0], 2)
    statistics = models.buffers(clients[0].model)
    assert not torch.equal(statistics, models.buffers(clients[1].model))
    clients[0].receive(message)
    assert torch.equal(models.buffers(clients[0].model), statistics)
    assert clients[0].model.extractor[1].num_batches_tracked.item() == 3


@pytest.mark.parametrize("flags", [[], ["--downloads", "2"], ["--initial_cores", "own"]])
def test_poor_clients_are_legal(tmp_path, flags):
    run = simulate(
        tmp_path / "run", ["apple", *flags, "--rounds", "3", "--batch_size", "4"], poor_shards()
    )
    for state in (run.server(), *run.clients().values()):
        assert all(bool(torch.isfinite(tensor).all()) for tensor in state.values())


# -- a limited number of downloads -----------------------------------------------------------------


def test_limited_downloads_reach_everybody_and_have_their_price():
    M, m = 6, 2
    server, clients = make_parties("apple", apple.Config(downloads=m), clients=M)
    asked = {i: [] for i in clients}
    for t in (1, 2, 3):
        for i, message in server.download(range(M), t):
            ids = message["ids"].tolist()
            assert len(ids) == m
            assert i not in ids
            asked[i] += ids
            assert nbytes(message) == m * (4 * 43 + 8) + (4 * M if t == 1 else 0)
        train_round(server, clients, range(M), t)
    for i, ids in asked.items():  # 2 + 2 + 1 never had, and one more
        assert set(ids[:5]) <= set(range(M)) - {i}
        assert len(set(ids[:4])) == 4
        assert set(ids) == set(range(M)) - {i}
        assert clients[i].had.all()
    upload = clients[0].upload()
    assert upload["wanted"].dtype == torch.bool
    assert nbytes(upload) == 4 * 43 + M
    assert len({tuple(ids) for ids in asked.values()}) > 1


def test_what_a_client_wants_is_what_it_gets_next():
    server, clients = make_parties("apple", apple.Config(downloads=1), clients=4)
    train_round(server, clients, [0, 1, 2, 3], 1)
    clients[2].wanted.copy_(torch.tensor([False, True, False, False]))
    server.aggregate({}, {2: clients[2].upload()}, 2)
    assert dict(server.download([2], 3))[2]["ids"].tolist() == [1]


def test_cores_not_downloaded_yet_count_as_ones_own_first():
    server, clients = make_parties(
        "apple", apple.Config(downloads=1, initial_cores="own"), clients=3
    )
    ((_, message),) = server.download([0], 1)
    clients[0].receive(message)
    (j,) = message["ids"].tolist()
    other = 3 - j
    p0 = message["p0"]
    expected = (p0[0] + p0[other]) * server.core[0] + p0[j] * server.core[j]
    close(models.vector(clients[0].model), expected)


def test_strong_relationships_are_asked_for_more_often():
    # m = 1, M = 4, base = max(1.5, t / 4) = 2 at t = 8: chances ~ 2^|p| = 2^0, 2^1, 2^3 for
    # clients 1, 2, 3, i.e. 1/11, 2/11, 8/11; signs do not count
    _, clients = make_parties("apple", apple.Config(downloads=1), clients=4)
    client, counts = clients[0], torch.zeros(4)
    client.had.fill_(True)
    with torch.no_grad():
        client.p.copy_(torch.tensor([9.0, 0.0, -1.0, 3.0]))
    for seed in range(2000):
        object.__setattr__(client.setup, "seed", seed)
        counts += relationships.following(client.setup, client.had, client.p.detach(), 8)
    assert counts[0] == 0
    # five standard deviations of a share are below 0.056
    close(counts / 2000, [0, 1 / 11, 2 / 11, 8 / 11], atol=0.056)


@pytest.mark.parametrize("p", [(1e4, 0, -1e4), (math.nan, 0, 0), (math.inf, 0, 0)])
def test_choice_survives_wild_relationships(p):
    _, clients = make_parties("apple", apple.Config(downloads=1), clients=3)
    clients[0].had.fill_(True)
    with torch.no_grad():
        clients[0].p.copy_(torch.tensor(p))
    client = clients[0]
    wanted = relationships.following(client.setup, client.had, client.p.detach(), 1)
    assert wanted.sum() == 1
    assert not wanted[0]


@pytest.mark.parametrize("downloads", [3, 99])
def test_a_limit_above_the_others_is_none(downloads):
    server, clients = make_parties("apple", apple.Config(downloads=downloads), clients=4)
    assert dict(server.download([1], 1))[1]["ids"].tolist() == [0, 2, 3]
    train_round(server, clients, [0, 1], 1)
    assert clients[0].upload().keys() == {"core"}


def test_limited_run_goes_on_from_a_checkpoint(tmp_path):
    flags = ["apple", "--downloads", "1", "--rounds", "4", "--checkpoint_every", "2", *FLAGS[2:]]
    run = simulate(tmp_path / "run", flags)
    server, clients = run.server(), run.clients()
    run.checkpoints[-1].unlink()
    simulate(run.folder, ["--resume", str(run.folder)])
    assert same(run.server(), server)
    assert all(same(state, clients[i]) for i, state in run.clients().items())


# -- reductions ----------------------------------------------------------------------------------

FLAGS = ["--rounds", "3", "--batch_size", "4", "--epochs", "1", "--lr", "0.02"]


@pytest.mark.parametrize("client_opt", ["persist", "reset"])
def test_a_single_client_with_fixed_relationships_is_local(tmp_path, client_opt):
    flags = [*FLAGS, "--client_opt", client_opt]
    run = simulate(tmp_path / "run", ["apple", "--p_lr", "0", *flags], tiny_shards(1))
    local = simulate(tmp_path / "local", ["local", *flags], tiny_shards(1))
    assert same(models_of(run)[0], models_of(local)[0])
    ours, theirs = run.rows(), local.rows()
    for name in ("loss", "accuracy/post/client", "accuracy/recv/client", "test_loss/post/client"):
        assert np.array_equal(ours[name], theirs[name], equal_nan=True)


@pytest.mark.parametrize(("flags", "M"), [([], 1), (["--p_lr", "0"], 4)])
def test_otherwise_it_is_not_local(tmp_path, flags, M):
    run = simulate(tmp_path / "run", ["apple", *flags, *FLAGS], tiny_shards(M))
    local = simulate(tmp_path / "local", ["local", *FLAGS], tiny_shards(M))
    assert not any(same(model, models_of(local)[i]) for i, model in models_of(run).items())


# -- configuration -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("switches", "message"),
    [
        ({"p_lr": -1.0}, r"p_lr is -1.0, expected a number in \[0, inf\)"),
        ({"mu": float("nan")}, "mu is nan"),
        ({"loosen": float("inf")}, "loosen is inf"),
        ({"downloads": -1}, r"downloads is -1, expected a number in \[0, inf\)"),
    ],
)
def test_settings_that_make_no_sense(switches, message):
    with pytest.raises(ValueError, match=message):
        apple.Config(**switches)


@pytest.mark.parametrize(
    ("switches", "words"), [({}, []), ({"mu": 0.0}, []), ({"p_lr": 0.0}, ["not learned"])]
)
def test_notices(switches, words):
    server, _ = make_parties("apple", apple.Config(**switches))
    notices = server.notices()
    assert len(notices) == len(words)
    assert all(word in notice for word, notice in zip(words, notices))
