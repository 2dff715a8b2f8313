"""BatchNorm: statistics are shared as the method shares, counters stay, neither is learned from.

Client 0 sees inputs around 0, client 1 inputs around 100; the model normalises them first, so
that ``running_mean`` is a plain moving average of what a client saw.
"""

from dataclasses import replace

import pytest
import torch
from tiny import CLASSES, CPU, INPUTS, make_setup, play, same, shard, simulate
from torch import nn

from fedapa_mpi import strategies
from fedapa_mpi.comm.messages import copied
from fedapa_mpi.models import SplitModel
from fedapa_mpi.strategies import fedapa

B = 4
MEAN, COUNTER = "extractor.0.running_mean", "extractor.0.num_batches_tracked"


def normalising(input_shape=(INPUTS,), classes=CLASSES):
    extractor = nn.Sequential(nn.BatchNorm1d(*input_shape), nn.Linear(*input_shape, 5), nn.ReLU())
    return SplitModel(extractor, nn.Linear(5, classes))


def around(mean, n):
    """The tiny problem, moved."""
    own = shard(n, 6, seed=n)
    return replace(own, x=own.x + mean, x_test=own.x_test + mean)


def two(strategy, config=None, sizes=(12, 20), **changes):
    """A server and the clients around 0 and 100; 3 and 5 batches in an epoch."""
    module = strategies.load(strategy)
    config = config or module.Config()
    common = {"clients": 2, "architecture": normalising, "batch_size": B, **changes}
    server = module.Server(make_setup(config, **common))
    clients = {}
    for i, (mean, n) in enumerate(zip((0, 100), sizes)):
        clients[i] = module.Client(make_setup(config, client=i, shard=around(mean, n), **common))
    server.welcome({i: client.hello() for i, client in clients.items()})
    return server, clients


def statistics(client):
    return client.model.extractor[0].running_mean


def train_all(server, clients, t):
    def answer(i, message):
        clients[i].receive(message)
        clients[i].train(t)
        return clients[i].upload()

    play(server, [0, 1], t, answer)


def test_a_client_has_the_statistics_of_its_own_data():
    _, clients = two("local")
    for i, k in ((0, 3), (1, 5)):
        clients[i].train(1)
        # k steps of m <- 0.9 m + 0.1 (mean of the batch, which is near the client's)
        expected = (1 - 0.9**k) * clients[i].shard.x.mean(dim=0)
        assert torch.allclose(statistics(clients[i]), expected, atol=0.2)
        assert clients[i].model.state_dict()[COUNTER].item() == k


def test_fedapa_mixes_them_by_A():
    server, clients = two("fedapa")
    train_all(server, clients, 1)
    own = [statistics(clients[i]).clone() for i in (0, 1)]
    variances = [clients[i].model.extractor[0].running_var.clone() for i in (0, 1)]
    server.A.copy_(torch.tensor([[0.75, 0.25], [0.1, 0.9]]))
    for i, message in server.download([0, 1], 2):
        clients[i].receive(copied(message))
    for i, (a, b) in enumerate(((0.75, 0.25), (0.1, 0.9))):
        assert torch.allclose(statistics(clients[i]), a * own[0] + b * own[1])
        mixed = a * variances[0] + b * variances[1]
        assert torch.allclose(clients[i].model.extractor[0].running_var, mixed)
    assert statistics(clients[0]).mean() > 8  # a quarter of 100 (1 - 0.9^5) = 41 is in it
    for i, steps in ((0, 3), (1, 5)):
        counter = clients[i].model.state_dict()[COUNTER]
        assert (counter.dtype, counter.item()) == (torch.int64, steps)


@pytest.mark.parametrize("gradient", ["descent", "centred"])
def test_fedapa_learns_nothing_from_them(gradient):
    def weights(noise):
        server, clients = two("fedapa", fedapa.Config(gradient=gradient, eta=0.1))

        def answer(i, message):
            clients[i].receive(message)
            clients[i].train(1)
            message = clients[i].upload()
            message["theta_buffers"] += noise
            return message

        play(server, [0, 1], 1, answer)
        return server.A

    assert torch.equal(weights(0), weights(1e6))


def test_fedavg_averages_them_by_sample_counts():
    server, clients = two("fedavg")
    train_all(server, clients, 1)
    own = [statistics(clients[i]).clone() for i in (0, 1)]
    for i, message in server.download([0, 1], 2):
        clients[i].receive(copied(message))
    for i in (0, 1):
        assert torch.allclose(statistics(clients[i]), (12 * own[0] + 20 * own[1]) / 32)
    assert [c.model.state_dict()[COUNTER].item() for c in clients.values()] == [3, 5]


@pytest.mark.parametrize("strategy", ["fedapa", "fedavg"])
def test_a_counter_is_nobody_elses(strategy):
    """Only a client's own steps count, whatever it has received."""
    server, clients = two(strategy)
    for t in (1, 2, 3):
        train_all(server, clients, t)
    assert [c.model.state_dict()[COUNTER].item() for c in clients.values()] == [9, 15]
    travelling = [*server.state_dict().values(), *clients[0].upload().values()]
    assert not any(tensor.numel() == 1 and tensor.item() == 9 for tensor in travelling)


def test_batches_of_one_are_skipped():
    _, clients = two("fedapa", sizes=(B + 1, 1), drop_last="false")
    assert clients[0].train(1) == pytest.approx(1, abs=1)
    assert torch.tensor(clients[1].train(1)).isnan()
    assert [c.model.state_dict()[COUNTER].item() for c in clients.values()] == [1, 0]
    assert torch.equal(statistics(clients[1]), torch.zeros(INPUTS, device=CPU))


@pytest.mark.parametrize(
    ("strategy", "flags"),
    [
        ("fedapa", []),
        ("fedapa", ["--share", "model", "--gradient", "centred", "--eta", "0.1"]),
        ("fedapa", ["--preset", "official", "--min_train", "1", "--drop_last", "false"]),
        ("fedavg", ["--client_opt", "reset"]),
        ("local", []),
    ],
)
def test_a_run_stays_finite_and_resumes_with_the_same_bits(tmp_path, strategy, flags):
    shards = [around(0, 2 * B + 1), around(100, B), around(100, 1), around(0, B + 1)]
    if "--drop_last" not in flags:
        flags = [*flags, "--drop_last", "false"]
    argv = [strategy, "--model", f"{__name__}:normalising", f"--batch_size={B}", *flags]
    argv += ["--epochs=2", "--join_low=1", "--lr=0.1"]
    whole = simulate(tmp_path / "whole", [*argv, "--rounds=6"], shards)
    halves = tmp_path / "halves"
    simulate(halves, [*argv, "--rounds=2"], shards)
    resumed = simulate(halves, ["--resume", str(halves), "--rounds=6"], shards)
    assert same(whole.server(), resumed.server())
    clients, again = whole.clients(), resumed.clients()
    for i, state in clients.items():
        assert same(state, again[i])
        assert all(tensor.isfinite().all() for tensor in state.values())
    assert all(tensor.isfinite().all() for tensor in whole.server().values())
    # 6 rounds of 2 epochs of 2, 1, 0 and 1 batches
    counters = [clients[i][f"model/{COUNTER}"] for i in range(4)]
    assert [(c.dtype, c.item()) for c in counters] == [(torch.int64, n) for n in (24, 12, 0, 12)]
    loss = whole.rows()["loss"]
    assert torch.tensor(loss)[:, [0, 1, 3]].isfinite().all()
    assert torch.tensor(loss)[:, 2].isnan().all()
