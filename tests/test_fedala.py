"""FedALA: the mixing weights against numbers worked by hand, and who mixes when."""

import logging

import pytest
import torch
from byhand import parties
from tiny import (
    batchnorm_model,
    make_parties,
    make_setup,
    models_of,
    same,
    shard,
    simulate,
    tiny_shards,
    train_round,
)
from torch import nn

from fedapa_mpi import models
from fedapa_mpi.data.federation import Shard
from fedapa_mpi.models import SplitModel
from fedapa_mpi.store.state import copy_of
from fedapa_mpi.strategies import fedala
from fedapa_mpi.strategies.fedala import Client, Config, Server

FLAGS = ["--rounds", "3", "--batch_size", "4", "--epochs", "1", "--lr", "0.02"]


def close(a, b, atol=0.0):
    torch.testing.assert_close(a.detach(), torch.as_tensor(b, dtype=a.dtype), atol=atol, rtol=0)


class Linear(Client):
    """A client whose loss has the gradient 0.2 in every element of the top."""

    def loss(self, x, y):
        return 0.2 * sum(tensor.sum() for tensor in self.model.parameters())


def small_model():
    """Three parameters: two of the extractor, one of the head."""
    return SplitModel(nn.Linear(1, 1), nn.Linear(1, 1, bias=False))


def make_client(cls=Client, config=None, own=None, **changes):
    own = own or shard(12)
    return cls(make_setup(config or Config(), client=0, shard=own, **changes))


def receive(client, w):
    client.receive({"w": torch.as_tensor(w, dtype=torch.float32)})
    return models.vector(client.model)


def settled(**switches):
    """A client that has had its first phase: from now on there is one pass per contact."""
    config = Config(top=1, **switches)
    client = make_client(Linear, config, architecture=small_model, batch_size=100)
    client.contacts = 2
    models.set_vector(client.model, torch.ones(3))
    return client


# -- one step ------------------------------------------------------------------------------------


def test_one_step_of_the_mixing_weights():
    # w_i = 1, w = 3, W = 1, g = 0.2, eta = 1: W = 1 - 0.2 (3 - 1) = 0.6, w_hat = 1 + 2 * 0.6 = 2.2
    client = settled()
    assert receive(client, [5, 6, 3]).tolist() == pytest.approx([5, 6, 2.2])
    assert client.W.tolist() == pytest.approx([0.6])
    # the weights go on from where they were: W = 0.6 - 0.2 (3 - 2.2) = 0.44, 2.2 + 0.8 * 0.44
    assert receive(client, [7, 8, 3]).tolist() == pytest.approx([7, 8, 2.552])
    assert client.W.tolist() == pytest.approx([0.44])


def test_several_batches_start_from_the_same_two_models():
    # 12 samples, s = 80: 9 of them, B = 4: three steps, W = 1 - 3 * 0.1 * 0.2 * 2 = 0.88,
    # w_hat = 1 + 2 * 0.88
    config = Config(top=1, weight_lr=0.1)
    client = make_client(Linear, config, architecture=small_model)
    client.contacts = 2
    models.set_vector(client.model, torch.ones(3))
    assert receive(client, [5, 6, 3])[2].item() == pytest.approx(2.76)


@pytest.mark.parametrize(
    ("w", "W"),
    [
        (103, 0.0),  # 1 - 0.2 * 102 is clipped at 0: w_hat = w_i
        (-99, 1.0),  # 1 + 0.2 * 100 is clipped at 1: w_hat = w
    ],
)
def test_mixing_weights_are_clipped_and_exact_at_both_ends(w, W):
    client = settled()
    top = receive(client, [0.1, 0.2, w])[2].item()
    assert client.W.tolist() == [W]
    assert top == (1 if W == 0 else w)


def test_the_gradient_is_that_of_cross_entropy_in_the_mixture():
    # the step of all 43 parameters against one taken by torch itself
    client = make_client(config=Config(top=4, percent=100, weight_lr=0.5), batch_size=100)
    client.contacts = 2
    own, w = (
        models.vector(client.model),
        torch.randn(43, generator=torch.Generator().manual_seed(1)),
    )
    client.W.fill_(0.25)
    mixed = own + 0.25 * (w - own)
    reference = make_client()
    models.set_vector(reference.model, mixed)
    reference.loss(reference.shard.x, reference.shard.y).backward()
    g = torch.cat([p.grad.flatten() for p in reference.model.parameters()])
    W = (0.25 - 0.5 * g * (w - own)).clamp(0, 1)
    after = receive(client, w)
    torch.testing.assert_close(client.W, W)
    torch.testing.assert_close(after, own + (w - own) * W)
    assert (client.W - 0.25).abs().max() > 0.01


def test_only_the_top_is_mixed():
    client = settled()
    before = models.vector(client.model)
    after = receive(client, [0.3, 0.7, 3])
    assert after[:2].tolist() == torch.tensor([0.3, 0.7]).tolist()
    assert after[2] != before[2]
    assert client.W.shape == (1,)
    assert make_client(config=Config(top=2)).W.shape == (18,)  # the head: 3 x 5 weights, 3 biases
    assert make_client(config=Config(top=4)).W.shape == (43,)  # everything


# -- phases --------------------------------------------------------------------------------------


def passes_of(client, monkeypatch, losses):
    """Passes that one contact takes if the batches' losses are these; one batch per pass."""
    seen = []

    def gradient(self, batch):
        seen.append(batch.tolist())
        return torch.tensor(losses[len(seen) - 1]), torch.zeros_like(self.W)

    monkeypatch.setattr(Client, "_gradient", gradient)
    receive(client, models.vector(client.model) + 1)
    return seen


def test_first_phase_ends_when_the_last_losses_are_alike(monkeypatch):
    client = make_client(config=Config(window=3, threshold=0.1), batch_size=100)
    client.contacts = 1
    # deviations of three in a row: (9, 1, 5) 3.3, (1, 5, 1.1) 1.8, (5, 1.1, 1) 1.9,
    # (1.1, 1, 1.2) 0.08: after the sixth pass
    seen = passes_of(client, monkeypatch, [9, 1, 5, 1.1, 1, 1.2, 7, 7, 7])
    assert len(seen) == 6
    assert all(batch == seen[0] for batch in seen)  # the same data in all passes


def test_later_there_is_one_pass(monkeypatch):
    client = make_client(config=Config(window=3), batch_size=100)
    client.contacts = 2
    assert len(passes_of(client, monkeypatch, [9, 1, 5])) == 1


def test_first_phase_is_capped_and_says_so(monkeypatch, caplog):
    logging.getLogger("fedapa_mpi").propagate = True
    client = make_client(config=Config(window=3, max_passes=5), batch_size=100)
    client.contacts = 1
    with caplog.at_level(logging.WARNING, "fedapa_mpi"):
        assert len(passes_of(client, monkeypatch, [1, 9] * 5)) == 5
    (record,) = caplog.records
    assert "client 0" in record.getMessage()
    assert "after 5 passes" in record.getMessage()


@pytest.mark.parametrize(
    ("n", "percent", "count"), [(12, 80, 9), (12, 100, 12), (3, 1, 1), (1, 80, 1)]
)
def test_slice(n, percent, count):
    client = make_client(config=Config(percent=percent), own=shard(n), batch_size=4)
    drawn = []
    for client.contacts in (1, 2):
        batches = client._slice()
        assert [len(batch) for batch in batches[:-1]] == [4] * (len(batches) - 1)
        drawn.append(torch.cat(batches).tolist())
    assert all(len(set(order)) == count for order in drawn)
    assert all(set(order) <= set(range(n)) for order in drawn)
    if n == 12:
        assert drawn[0] != drawn[1] != sorted(drawn[1])  # shuffled, anew for each contact


def test_first_contact_installs_the_global_model_even_if_the_client_differs():
    client = make_client()
    w = torch.randn(43, generator=torch.Generator().manual_seed(2))
    assert torch.equal(receive(client, w), w)
    assert client.contacts == 1
    assert client.W.tolist() == [1.0] * 18
    client.train(1)
    assert not torch.equal(receive(client, w), w)  # from the second on it mixes
    assert client.contacts == 2
    assert client.W.min() < 1


def test_a_client_that_never_joined_holds_the_initial_model_and_ones():
    server, clients = make_parties("fedala")
    fresh = copy_of(make_parties("fedala")[1][2].state_dict())
    for t in (1, 2):
        train_round(server, clients, [0, 1], t)
    assert same(clients[2].state_dict(), fresh)
    ((_, message),) = server.download([2], 3)
    clients[2].receive(message)
    assert torch.equal(models.vector(clients[2].model), server.w)


def test_equal_models_leave_the_mixing_weights_alone():
    client = make_client()
    client.contacts = 2
    client.W.fill_(0.7)
    w = models.vector(client.model)
    assert torch.equal(receive(client, w), w)
    assert torch.equal(client.W, torch.full((18,), 0.7))


def one_class(n):
    """A shard that owns class 1 only."""
    s = shard(n)
    return Shard(s.x, torch.ones_like(s.y), s.x_test, s.y_test, 3, 1.0, (0.0,), (1.0,))


@pytest.mark.parametrize("own", [shard(0), shard(1), one_class(9), shard(9, 0)])
def test_small_clients(own):
    client = make_client(own=own)
    for t in (1, 2, 3):
        after = receive(client, torch.full((43,), 0.1 * t))
        client.train(t)
        assert torch.isfinite(after).all()
        assert torch.isfinite(client.upload()["w"]).all()
    assert ((client.W >= 0) & (client.W <= 1)).all()
    if own.n == 0:
        assert torch.equal(after, torch.full((43,), 0.3))  # nothing to learn from: W stays 1


def test_mixing_touches_no_statistics():
    server, clients = make_parties("fedala", architecture=batchnorm_model)
    for t in (1, 2):
        train_round(server, clients, [0, 1, 2], t)
    counter = clients[0].model.extractor[1].num_batches_tracked
    before = counter.item()
    ((_, message),) = server.download([0], 3)
    clients[0].receive(message)
    assert counter.item() == before > 0
    assert torch.equal(models.buffers(clients[0].model), server.w_buffers)
    assert not torch.equal(models.vector(clients[0].model), server.w)


# -- reductions ----------------------------------------------------------------------------------


def run_models(tmp_path, argv, M=4):
    return models_of(simulate(tmp_path / "-".join(argv), [*argv, *FLAGS], tiny_shards(M)))


@pytest.mark.parametrize("top", ["2", "4"])
def test_without_steps_it_is_fedavg_bit_for_bit(tmp_path, top):
    ours = run_models(tmp_path, ["fedala", "--weight_lr", "0", "--top", top])
    theirs = run_models(tmp_path, ["fedavg"])
    assert all(same(ours[i], theirs[i]) for i in range(4))
    mixed = run_models(tmp_path, ["fedala", "--top", top])
    assert not any(same(mixed[i], theirs[i]) for i in range(4))


def test_one_client_alone_is_local_bit_for_bit(tmp_path):
    ours, theirs = (run_models(tmp_path, [name], 1) for name in ("fedala", "local"))
    assert same(ours[0], theirs[0])


def test_weights_of_zero_for_all_tensors_are_local_bit_for_bit():
    config = Config(weight_lr=0, top=4)
    server, clients = make_parties("fedala", config)
    _, alone = make_parties("local")
    for i in clients:
        clients[i].contacts = 1
        clients[i].W.zero_()
    for t in (1, 2, 3):
        train_round(server, clients, [0, 1, 2], t)
        for client in alone.values():
            client.train(t)
    for i in clients:
        assert torch.equal(models.vector(clients[i].model), models.vector(alone[i].model))
    assert not torch.equal(server.w, models.vector(clients[0].model))


def test_a_client_that_diverged_begins_again_at_the_global_model():
    server, clients = make_parties("fedala")
    ((_, message),) = server.download([0], 1)
    clients[0].receive(message)
    with torch.no_grad():
        for tensor in clients[0].model.parameters():
            tensor.fill_(torch.nan)
    clients[0].receive(message)
    close(models.vector(clients[0].model), message["w"])
    assert (clients[0].W == 1).all()


def test_losses_that_overflow_end_the_first_phase(monkeypatch):
    server, clients = make_parties("fedala", Config(max_passes=10))
    monkeypatch.setattr(
        Client, "_gradient", lambda self, batch: (torch.tensor(torch.inf), self.W * torch.nan)
    )
    for _ in range(2):
        ((_, message),) = server.download([0], 1)
        clients[0].receive(message)
    close(models.vector(clients[0].model), message["w"])


def test_two_rounds_of_three_clients_by_hand():
    # model (v, -v), s(v) = 1 / (1 + exp(-2 v)); n / N = (1/2, 1/4, 1/4), labels 0, 0, 1
    # round 1 from v = 0: 0.05, 0.05, -0.05 after a step of 0.1, so w has v = 0.025
    # round 2, labels 0: own 0.05, w - own = -0.025; in v a pass takes W to W - 0.025 (1 - s)
    #   W = 1: v = 0.025, s = 0.512497, W = 0.987812, v = 0.05 - 0.025 W = 0.0253047
    #   s = 0.512650, W = 0.975629, v = 0.0256093; the step: + 0.1 (1 - s) = 0.0487198
    # label 1: own -0.05, w - own = 0.075; a pass takes W to W - 0.075 s
    #   W = 1: W = 0.961563, v = -0.05 + 0.075 W = 0.0221172
    #   s = 0.511057, W = 0.923233, v = 0.0192425; the step: - 0.1 s = -0.0509620
    config = Config(percent=100.0, top=1, window=2, max_passes=2)
    server, clients = parties("fedala", config, labels=(0, 0, 1), n=(2, 1, 1))
    train_round(server, clients, [0, 1, 2], 1)
    close(server.w, [0.025, -0.025], atol=1e-6)
    messages = dict(server.download([0, 1, 2], 2))
    for i, (W, mixed) in enumerate(
        [(0.9756287, 0.0256093), (0.9756287, 0.0256093), (0.9232334, 0.0192425)]
    ):
        clients[i].receive(messages[i])
        close(clients[i].W, [W, W], atol=1e-6)
        close(models.vector(clients[i].model), [mixed, -mixed], atol=1e-6)
    uploads = {i: (client.train(2), client.upload())[1] for i, client in clients.items()}
    for i, v in enumerate((0.0743291, 0.0743291, -0.0317195)):
        close(uploads[i]["w"], [v, -v], atol=1e-6)
    server.aggregate(messages, uploads, 2)
    # 3/4 of 0.0743291 and 1/4 of -0.0317195
    close(server.w, [0.0478169, -0.0478169], atol=1e-6)


# -- configuration -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("switches", "message"),
    [
        ({"weight_lr": -1.0}, r"weight_lr is -1.0, expected a number in \[0, inf\)"),
        ({"weight_lr": float("nan")}, "weight_lr is nan"),
        ({"percent": 0.0}, r"percent is 0.0, expected a number in \(0, 100\]"),
        ({"percent": 101.0}, "percent is 101.0"),
        ({"top": 0}, r"top is 0, expected a number in \[1, inf\)"),
        ({"threshold": 0.0}, r"threshold is 0.0, expected a number in \(0, inf\]"),
        ({"window": 1}, r"window is 1, expected a number in \[2, inf\)"),
        ({"max_passes": 9}, "max_passes is 9, expected at least window, which is 10"),
    ],
)
def test_settings_that_make_no_sense(switches, message):
    with pytest.raises(ValueError, match=message):
        Config(**switches)


def test_more_tensors_than_the_model_has():
    with pytest.raises(ValueError, match="top is 5, expected at most 4"):
        Server(make_setup(Config(top=5)))
    Server(make_setup(Config(top=4)))


def test_notices():
    assert Server(make_setup(Config())).notices() == []
    (notice,) = Server(make_setup(Config(weight_lr=0))).notices()
    assert "FedAvg" in notice


def test_defaults():
    assert fedala.Config() == Config(1.0, 80.0, 2, 0.01, 10, 100)
