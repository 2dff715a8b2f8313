"""FedPHP against numbers worked by hand, and what must hold for any numbers."""

import math

import numpy as np
import pytest
import torch
from byhand import parties, poor_shards
from tiny import (
    batchnorm_model,
    make_parties,
    make_setup,
    same,
    simulate,
    tiny_shards,
    train_round,
    vector_model,
)

from fedapa_mpi import models, training
from fedapa_mpi.store.state import copy_of
from fedapa_mpi.strategies import fedphp


def close(a, b, atol=5e-7):
    torch.testing.assert_close(a, torch.as_tensor(b, dtype=a.dtype), atol=atol, rtol=0)


# -- inheritance ---------------------------------------------------------------------------------


def inherit(students, *, mu=0.9, horizon=10, participation=1.0):
    """p after each of these students, scalars."""
    setup = make_setup(
        fedphp.Config(mu=mu),
        client=0,
        architecture=lambda: vector_model(1),
        horizon=horizon,
        participation=participation,
    )
    client, seen = fedphp.Client(setup), []
    for w in students:
        models.set_vector(client.model, torch.tensor([float(w)]))
        client._inherit()
        seen.append(models.vector(client.p).item())
    return seen


def test_private_model_inherits_more_and_more():
    # Z = 10: shares of the old one 0, 0.09, 0.18: 1; 0.09 * 1 + 0.91 * 2 = 1.91;
    # 0.18 * 1.91 + 0.82 * 3 = 2.8038
    assert inherit([1, 2, 3]) == pytest.approx([1, 1.91, 2.8038], abs=1e-6)


def test_share_of_the_old_one_stops_at_mu():
    # Z = floor(4 * 0.6) = 2: shares 0, 0.2, 0.4, 0.4: 0, 0.8, 0.92, 0.968
    seen = inherit([0, 1, 1, 1], mu=0.4, horizon=4, participation=0.6)
    assert seen == pytest.approx([0, 0.8, 0.92, 0.968], abs=1e-6)


def test_Z_is_at_least_one_and_takes_whole_rounds_as_whole():
    # Z = 1: 0, then 0.9
    assert inherit([1, 2], horizon=2, participation=0.1)[1] == pytest.approx(1.1, abs=1e-6)
    # 100 * 0.29 is 28.999999999999996, Z is 29: 0.9 / 29
    second = inherit([1, 2], horizon=100, participation=0.29)[1]
    assert second == pytest.approx(2 - 0.9 / 29, abs=1e-6)


def test_before_its_first_round_it_is_the_initial_model():
    server, clients = make_parties("fedphp")
    initial = models.vector(clients[0].model)
    assert torch.equal(models.vector(clients[0].p), initial)
    train_round(server, clients, [0, 1], 1)
    assert torch.equal(models.vector(clients[2].p), initial)
    assert clients[2].z == 0
    # the first student to the bit
    assert torch.equal(models.vector(clients[0].p), models.vector(clients[0].model))
    assert not torch.equal(models.vector(clients[0].p), initial)
    assert clients[0].z == 1


# -- a whole round ---------------------------------------------------------------------------------


def test_two_rounds_of_three_clients():
    # labels 0, 0, 1, n = 1, 2, 1, one step of 0.1 from w = (0, 0), kd with lam 0.2
    # round 1: student and teacher are equal and at s = 0.5, where the teacher's pull is 0:
    #   gradient 0.8 (-0.5, 0.5): v = 0.04, 0.04, -0.04; p the same; w = (1 + 2 - 1) / 4 * 0.04
    # round 2: Z = floor(4 * 0.8) = 3, share 0.9 / 3 = 0.3
    #   client 1: student s = 1 / (1 + exp(-0.04)) = 0.509999, teacher at 0.04 / 4 = 0.01:
    #   1 / (1 + exp(-0.02)) = 0.505000; gradient 0.8 (0.509999 - 1) + 0.2 (0.509999 - 0.505000)
    #   = -0.391001: v = 0.0591001, p = 0.3 * 0.04 + 0.7 * 0.0591001 = 0.0533701
    #   client 3: teacher 0.495000; gradient 0.8 * 0.509999 + 0.2 (0.509999 - 0.495000) = 0.410999:
    #   v = 0.02 - 0.0410999 = -0.0210999, p = 0.3 * -0.04 + 0.7 * -0.0210999 = -0.0267699
    #   w = (0.0591001 + 2 * 0.0591001 - 0.0210999) / 4 = 0.0390501
    config = fedphp.Config(lam=0.2, teaching="kd")
    server, clients = parties("fedphp", config, [0, 0, 1], [1, 2, 1], horizon=4, participation=0.8)
    train_round(server, clients, [0, 1, 2], 1)
    close(server.w, [0.02, -0.02])
    for i, v in enumerate((0.04, 0.04, -0.04)):
        close(models.vector(clients[i].p), [v, -v])
    train_round(server, clients, [0, 1, 2], 2)
    close(server.w, [0.0390501, -0.0390501])
    for i, (v, p) in enumerate(
        [(0.0591001, 0.0533701), (0.0591001, 0.0533701), (-0.0210999, -0.0267699)]
    ):
        close(models.vector(clients[i].model), [v, -v])
        close(models.vector(clients[i].p), [p, -p])


def test_the_private_model_answers_and_stays_at_home():
    server, clients = make_parties("fedphp")
    train_round(server, clients, [0, 1, 2], 1)
    client = clients[0]
    x = client.shard.x_test
    before = client.predict(x)
    client.receive({"w": torch.zeros(43)})
    assert torch.equal(client.predict(x), before)
    assert (client.model(x) == 0).all()
    assert client.upload().keys() == {"w"}
    assert torch.equal(client.upload()["w"], torch.zeros(43))


def test_a_single_client_makes_w():
    server, clients = make_parties("fedphp", clients=1)
    train_round(server, clients, [0], 1)
    assert torch.equal(server.w, models.vector(clients[0].model))


# -- the teacher -----------------------------------------------------------------------------------


def test_features_that_are_equal_do_not_differ():
    z = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    assert fedphp.mmd(z, z.clone()).item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(("width", "length"), [(1, 1.0), (3, 1e-3), (50, 100.0)])
def test_two_single_features_differ_by_the_same(width, length):
    # d = b: 10 - 2 (exp(-4) + exp(-2) + exp(-1) + exp(-1/2) + exp(-1/4)) = 6.186276
    z = torch.zeros(1, width)
    assert fedphp.mmd(z, z + length).item() == pytest.approx(6.186276, abs=5e-6)


def test_discrepancy_of_two_pairs():
    # z = 0, 2; teacher 0, 0: the 16 d are 4 between the 2 and the three 0, else 0: sum 24,
    # b = 24 / (16 - 4) = 2, so d / b = 2: k(2) = exp(-8) + exp(-4) + exp(-2) + exp(-1) + exp(-1/2)
    # = 1.128396, k(0) = 5; K_ss = (5 + 5 + 2 k) / 4, K_tt = 5, K_st = (5 + 5 + k + k) / 4 = K_ts:
    # R = 5 - (10 + 2 k) / 4 = 2.5 - k / 2 = 1.935802
    z, teacher = torch.tensor([[0.0], [2.0]]), torch.zeros(2, 1)
    assert fedphp.mmd(z, teacher).item() == pytest.approx(1.935802, abs=2e-6)


def test_bandwidth_is_not_differentiated():
    # B = 1, where R does not depend on the distance, but its gradient with b held fixed does:
    # R = 10 - 2 sum exp(-d f / b), d = b = 9: dR/dz = 2 sum(f exp(-f)) / 9 * 2 * 3
    z = torch.tensor([[3.0]], requires_grad=True)
    fedphp.mmd(z, torch.zeros(1, 1)).backward()
    slope = sum(f * math.exp(-f) for f in (4, 2, 1, 0.5, 0.25))
    assert z.grad.item() == pytest.approx(2 * slope / 9 * 6, rel=1e-5)


def test_dead_features_have_a_finite_gradient():
    z = torch.zeros(4, 3, requires_grad=True)
    R = fedphp.mmd(z, torch.zeros(4, 3))
    R.backward()
    assert R.item() == 0
    assert (z.grad == 0).all()


def test_answers_of_the_teacher_are_softened_and_the_students_are_not():
    # teacher softmax((4 ln 3, 0) / 4) = (3/4, 1/4), student softmax((ln 4, 0)) = (4/5, 1/5):
    # -(3/4 ln 4/5 + 1/4 ln 1/5) = 0.569717
    student, teacher = torch.tensor([[math.log(4), 0]]), torch.tensor([[4 * math.log(3), 0]])
    assert fedphp.kd(student, teacher).item() == pytest.approx(0.569717, abs=1e-6)


@pytest.mark.parametrize("teaching", ["mmd", "kd"])
def test_the_teacher_counts_and_does_not_learn(teaching):
    _, clients = make_parties("fedphp", fedphp.Config(lam=0.3, teaching=teaching))
    client = clients[0]
    models.set_vector(client.p, torch.linspace(-1, 1, 43))
    x, y = client.shard.x[:4], client.shard.y[:4]

    def gradient(lam):
        object.__setattr__(client.setup.config, "lam", lam)
        client.model.zero_grad()
        client.loss(x, y).backward()
        return torch.cat([p.grad.reshape(-1) for p in client.model.parameters()])

    pull = (gradient(0.3) - 0.7 * gradient(0.0)) / 0.3
    assert pull.abs().max() > 1e-3
    # mmd is a matter of features: it leaves the head alone
    assert (pull[25:].abs().max() < 1e-6) == (teaching == "mmd")
    assert all(p.grad is None and not p.requires_grad for p in client.p.parameters())


def test_the_first_lesson_may_be_left_out():
    def first_round(**switches):
        server, clients = make_parties("fedphp", fedphp.Config(**switches))
        train_round(server, clients, [0, 1, 2], 1)
        once = server.w.clone()
        train_round(server, clients, [0, 1, 2], 2)
        return once, server.w

    without = first_round(lam=0.0)
    later = first_round(lam=0.5, teach_first=False)
    assert torch.equal(later[0], without[0])
    assert not torch.equal(later[1], without[1])
    assert not torch.equal(first_round(lam=0.5)[0], without[0])


def test_teacher_keeps_its_statistics_until_it_inherits():
    server, clients = make_parties("fedphp", architecture=batchnorm_model)
    train_round(server, clients, [0, 1, 2], 1)
    client = clients[0]
    close(models.buffers(client.p), models.buffers(client.model), atol=0)
    client.receive(dict(server.download([0], 2))[0])
    before, statistics = copy_of(client.p.state_dict()), models.buffers(client.p)
    training.fit(client, 2)  # without the inheritance
    assert same(client.p.state_dict(), before)
    assert not client.p.training
    assert client.model.training
    student = models.buffers(client.model)
    assert (student - statistics).abs().max() > 1e-3
    client._inherit()  # share 0.9 / 3
    close(models.buffers(client.p), 0.3 * statistics + 0.7 * student, atol=1e-6)


@pytest.mark.parametrize("teaching", ["mmd", "kd"])
def test_poor_clients_are_legal(tmp_path, teaching):
    run = simulate(
        tmp_path / "run",
        ["fedphp", "--teaching", teaching, "--rounds", "3", "--batch_size", "4"],
        poor_shards(),
    )
    for state in (run.server(), *run.clients().values()):
        assert all(bool(torch.isfinite(tensor).all()) for tensor in state.values())


# -- reductions ----------------------------------------------------------------------------------

FLAGS = ["--rounds", "3", "--batch_size", "4", "--epochs", "1", "--lr", "0.02"]


@pytest.mark.parametrize("client_opt", ["persist", "reset"])
@pytest.mark.parametrize(("other", "M"), [("fedavg", 4), ("local", 1)])
def test_without_a_teacher_the_student_is_another_methods(tmp_path, other, M, client_opt):
    flags = [*FLAGS, "--client_opt", client_opt]
    run = simulate(tmp_path / "run", ["fedphp", "--lam", "0", *flags], tiny_shards(M))
    twin = simulate(tmp_path / "twin", [other, *flags], tiny_shards(M))
    for i, state in run.clients().items():
        student = {n: v for n, v in state.items() if n.startswith(("model/", "optimizer/"))}
        assert same(student, twin.clients()[i])
    if other == "fedavg":
        assert same(run.server(), twin.server())
    assert np.array_equal(run.rows()["loss"], twin.rows()["loss"], equal_nan=True)


@pytest.mark.parametrize("teaching", ["mmd", "kd"])
def test_with_a_teacher_it_is_not_fedavg(tmp_path, teaching):
    run = simulate(tmp_path / "run", ["fedphp", "--teaching", teaching, *FLAGS])
    twin = simulate(tmp_path / "twin", ["fedavg", *FLAGS])
    assert not same(run.server(), twin.server())


# -- configuration -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("switches", "message"),
    [
        ({"lam": 1.0}, r"lam is 1.0, expected a number in \[0, 1\)"),
        ({"lam": -0.1}, "lam is -0.1"),
        ({"lam": float("nan")}, "lam is nan"),
        ({"mu": 1.5}, r"mu is 1.5, expected a number in \[0, 1\]"),
    ],
)
def test_settings_that_make_no_sense(switches, message):
    with pytest.raises(ValueError, match=message):
        fedphp.Config(**switches)


@pytest.mark.parametrize(
    ("switches", "words"),
    [
        ({}, []),
        ({"lam": 0.0}, ["does not teach"]),
        ({"mu": 0.0}, ["nothing is inherited"]),
        ({"lam": 0.0, "mu": 0.0}, ["this is FedAvg"]),
    ],
)
def test_notices(switches, words):
    server, _ = make_parties("fedphp", fedphp.Config(**switches))
    notices = server.notices()
    assert len(notices) == len(words)
    assert all(word in notice for word, notice in zip(words, notices))
