"""DBE against numbers worked by hand: the consensus, the pull, the bias, and what it reduces to."""

import json
import math

import numpy as np
import pytest
import torch
from lines import line_parties, line_round, line_shard, slope
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

from fedapa_mpi import training
from fedapa_mpi.comm.messages import copied
from fedapa_mpi.store.state import copy_of
from fedapa_mpi.strategies import dbe

FLAGS = ["--rounds", "4", "--batch_size", "4", "--epochs", "1", "--lr", "0.02"]


def tiny_client(**switches):
    """A client of the tiny problem with 12 samples, 4 in a batch, 5 features."""
    return dbe.Client(make_setup(dbe.Config(**switches), client=0, shard=shard()))


# -- the start -----------------------------------------------------------------------------------


def welcome(n, means):
    server = dbe.Server(make_setup(dbe.Config(), clients=len(n)))
    hellos = {
        i: {"n": torch.tensor(n[i]), "zbar": torch.full((5,), float(mean))}
        for i, mean in enumerate(means)
    }
    server.welcome(hellos)
    return server


@pytest.mark.parametrize(
    ("n", "means", "consensus"),
    [
        ((1, 3), (0, 4), 3.0),  # (1 * 0 + 3 * 4) / 4
        ((5, 5), (1, 2), 1.5),
        ((0, 2), (9, 4), 4.0),  # who has no sample has no weight
        ((7,), (4,), 4.0),
    ],
)
def test_consensus(n, means, consensus):
    server = welcome(n, means)
    assert server.zbar_g.tolist() == [consensus] * 5
    assert server.n.tolist() == list(n)


def test_features_that_are_not_finite_end_the_run_at_once():
    with pytest.raises(FloatingPointError, match="lower --lr"):
        welcome((1, 3), (math.inf, 4))


def test_initialisation_leaves_the_client_as_it_was():
    for architecture in (None, batchnorm_model):
        changes = {"architecture": architecture} if architecture else {}
        _, clients = make_parties("dbe", **changes)  # they have said hello once
        before = copy_of(clients[0].state_dict())
        first, again = clients[0].hello(), clients[0].hello()
        assert same(clients[0].state_dict(), before)
        assert same(first, again)
        assert first["zbar"].shape == (5,)
        assert first["zbar"].dtype == torch.float32
        assert torch.count_nonzero(first["zbar"])


def test_initialisation_is_E_epochs_of_the_common_model_on_cross_entropy(monkeypatch):
    # the same steps by the loop of local training, with features written down
    from fedapa_mpi.strategies import base

    client = tiny_client(mu=0.25)
    said = client.hello()["zbar"]
    plain = base.Client(client.setup)
    seen = []
    plain.model.head.register_forward_pre_hook(lambda _, z: seen.append(z[0].detach().mean(dim=0)))
    training.fit(plain, 0)
    assert len(seen) == 3  # 12 samples, B = 4
    a, b, c = seen
    # ((0.25 a) * 0.75 + 0.25 b) * 0.75 + 0.25 c
    torch.testing.assert_close(said, 0.140625 * a + 0.1875 * b + 0.25 * c)
    assert torch.equal(tiny_client(mu=1.0).hello()["zbar"], c)  # the last batch only
    # over all samples, with the model as trained
    exact = plain.model.extractor(client.shard.x).mean(dim=0)
    torch.testing.assert_close(tiny_client(initial_mean="exact").hello()["zbar"], exact)
    assert not torch.allclose(exact, c, rtol=1e-3)


def test_who_cannot_make_a_step_sends_the_mean_of_the_initial_model():
    setup = make_setup(dbe.Config(), client=0, shard=shard(3), drop_last="true")
    client = dbe.Client(setup)
    exact = client.model.extractor(client.shard.x).mean(dim=0)
    torch.testing.assert_close(client.hello()["zbar"], exact)


@pytest.mark.parametrize("initial_mean", ["tracked", "exact"])
def test_a_client_without_samples_has_no_say(initial_mean):
    data = [([], []), ([2.0], [0])]
    server, clients = line_parties("dbe", data, initial_mean=initial_mean)
    assert clients[0].hello()["zbar"].tolist() == [0]
    assert server.zbar_g.tolist() == [2]
    line_round(server, clients)
    for party in (server, *clients.values()):
        assert all(bool(torch.isfinite(t).all()) for t in party.state_dict().values())


# -- a round by hand -----------------------------------------------------------------------------

# means 2, 4, 6 of 1, 3, 4 samples
DATA = [([2.0], [0]), ([4.0] * 3, [1] * 3), ([6.0] * 4, [1] * 4)]


def test_two_rounds_of_three_clients():
    server, clients = line_parties("dbe", DATA, kappa=2.0)
    # phi = 0, so the initialisation leaves a = 1 while it looks: zbar_i = 2, 4, 6
    # zbar_g = (1 * 2 + 3 * 4 + 4 * 6) / 8 = 4.75
    assert server.zbar_g.tolist() == [4.75]
    line_round(server, clients)
    # a_i = 1 - 0.1 * 2 (zbar_i - 4.75) x_i: 1 + 0.2 * 2.75 * 2, 1 + 0.2 * 0.75 * 4,
    # 1 - 0.2 * 1.25 * 6
    assert [slope(c) for c in clients.values()] == pytest.approx([2.1, 1.6, -0.5])
    # phi_1 = 0.1 ([y = 1] - 1/2) z: -0.1, 0.2, 0.3 and phi_0 the opposite
    phi = [c.model.head.weight[:, 0].tolist() for c in clients.values()]
    assert phi == [pytest.approx([-p, p]) for p in (-0.1, 0.2, 0.3)]
    # phi was 0 when the bias had its gradient phi_0 (..) + phi_1 (..)
    assert [c.b.item() for c in clients.values()] == [0, 0, 0]
    # w: a = (2.1 + 3 * 1.6 - 4 * 0.5) / 8, phi_1 = (-0.1 + 3 * 0.2 + 4 * 0.3) / 8
    assert server.w.tolist() == pytest.approx([0.6125, -0.2125, 0.2125])
    assert [c.zbar.item() for c in clients.values()] == [2, 4, 6]

    line_round(server, clients, 2)
    # the pull aims at the same consensus. Client 1: z = 0.6125 * 4 = 2.45, scores -+ 0.520625,
    # p_0 = 1 / (1 + exp(1.04125)) = 0.260908; gradient of b: phi_0 p_0 + phi_1 (p_1 - 1)
    # = -2 * 0.2125 p_0 = -0.110886, so that b = 0.0110886
    assert clients[1].b.item() == pytest.approx(0.0110886, rel=1e-5)
    # of z the same, and from the pull 2 (2.45 - 4.75) = -4.6:
    # a = 0.6125 - 0.1 * 4 * (-0.110886 - 4.6)
    assert slope(clients[1]) == pytest.approx(2.4968544, rel=1e-6)
    assert server.zbar_g.tolist() == [4.75]


def test_the_bias_shifts_the_scores_by_W_b():
    client = tiny_client()
    with torch.no_grad():
        client.b.copy_(torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0]))
        x = client.shard.x_test
        shift = client.model.head.weight @ client.b  # [C]
        torch.testing.assert_close(client.predict(x), client.model(x) + shift)
        assert shift.abs().min() > 0.01


def test_evaluation_uses_the_own_bias():
    _, clients = line_parties("dbe", [([1.0, 2.0], [0, 0])])
    client = clients[0]
    with torch.no_grad():
        client.model.head.weight.copy_(torch.tensor([[1.0], [-1.0]]))
        assert training.evaluate(client)[0, 0] == 2
        client.b.fill_(-1.5)  # 1 - 1.5 < 0 < 2 - 1.5
        assert training.evaluate(client)[0, 0] == 1


# -- the pull ------------------------------------------------------------------------------------


def test_pull():
    # 50 * 1/2 * (1^2 + 3^2) / 2 = 125
    client = tiny_client()
    z = torch.tensor([[1.0, 3.0, 0, 0, 0]]).repeat(4, 1)
    pull = 50 * (client.follow(z) - client.zbar_g).square().mean() / 2
    assert pull.item() == pytest.approx(125 * 2 / 5)  # five features here, two of them not 0
    x, y = client.shard.x[:4], client.shard.y[:4]
    client.zbar.zero_()
    with torch.no_grad():
        client.zbar_g.copy_(client.model.extractor(x).mean(dim=0) - torch.tensor([1.0, 3, 0, 0, 0]))
    entropy = torch.nn.functional.cross_entropy(client.model(x), y)
    assert (client.loss(x, y) - entropy).item() == pytest.approx(125 * 2 / 5, rel=1e-5)


def test_running_mean():
    client = tiny_client(mu=0.1)
    z = torch.full((4, 5), 2.0)
    for _ in range(5):
        client.follow(z)
    # 1 - 0.9^5 = 0.40951
    torch.testing.assert_close(client.zbar, torch.full((5,), 2 * 0.40951))
    client.receive({"w": torch.zeros(43)})
    assert client.zbar.tolist() == [0] * 5


def test_gradient_flows_through_the_last_batch_only():
    client = tiny_client(mu=0.1)
    first, second = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(3))
    first, second = first.requires_grad_(), second.requires_grad_()
    assert not client.zbar.requires_grad
    client.follow(first)
    assert not client.zbar.requires_grad
    zbar = client.follow(second)
    (zbar.square().mean() / 2).backward()
    assert first.grad is None
    # d/dz of mean_D 1/2 zbar^2: zbar / 5 for each feature, and 0.1 / 4 for each sample
    torch.testing.assert_close(second.grad, (zbar / 5 * 0.1 / 4).detach().expand(4, 5))


def test_the_pull_changes_what_is_learned():
    def trained(**switches):
        server, clients = make_parties("dbe", dbe.Config(**switches))
        train_round(server, clients, [0, 1, 2], 1)
        return server.w

    without = trained(kappa=0.0)
    assert not torch.equal(trained(kappa=1e-3), without)
    distances = [(trained(kappa=k) - without).norm().item() for k in (0.01, 0.1)]
    assert 0 < distances[0] < distances[1]


def test_the_bias_learns_without_momentum_and_the_model_with():
    server, clients = make_parties("dbe")
    train_round(server, clients, [0], 1)
    client = clients[0]
    assert torch.count_nonzero(client.b)
    model, bias = client.optimizer.param_groups
    assert (model["momentum"], bias["momentum"], bias["lr"]) == (0.9, 0, 0.1)
    assert bias["params"][0] is client.b
    assert not client.optimizer.state[client.b].get("momentum_buffer")
    _, clients = make_parties("dbe", dbe.Config(personal_bias=False))
    train_round(server, clients, [0], 1)
    assert not torch.count_nonzero(clients[0].b)


# -- messages ------------------------------------------------------------------------------------


def test_the_consensus_comes_until_the_first_answer():
    server, clients = make_parties("dbe")

    def names(t):
        return {i: set(message) for i, message in server.download([0, 1, 2], t)}

    assert names(1) == {i: {"w", "zbar"} for i in range(3)}
    sent = dict(server.download([0, 1], 1))
    for i, message in sent.items():
        clients[i].receive(copied(message))
        clients[i].train(1)
        assert torch.equal(clients[i].zbar_g, server.zbar_g)
    server.aggregate(sent, {0: clients[0].upload()}, 1)  # client 1 fails to answer
    assert names(2) == {0: {"w"}, 1: {"w", "zbar"}, 2: {"w", "zbar"}}
    before = clients[0].zbar_g.clone()
    clients[0].receive(dict(server.download([0], 2))[0])
    assert torch.equal(clients[0].zbar_g, before)


def test_nothing_personal_travels():
    server, clients = make_parties("dbe")
    train_round(server, clients, [0, 1, 2], 1)
    assert clients[0].upload().keys() == {"w"}
    assert clients[0].upload()["w"].shape == (43,)
    assert len({tuple(c.b.tolist()) for c in clients.values()}) == 3


def test_who_is_not_sampled_keeps_its_bias():
    server, clients = make_parties("dbe")
    train_round(server, clients, [0, 1, 2], 1)
    before = copy_of(clients[1].state_dict())
    train_round(server, clients, [0, 2], 2)
    assert same(clients[1].state_dict(), before)


def test_a_newcomer_gets_model_and_consensus():
    server, clients = make_parties("dbe")
    train_round(server, clients, [0, 1, 2], 1)
    message = server.newcomer()
    newcomer = dbe.Client(make_setup(dbe.Config(), client=7, shard=shard(seed=9)))
    newcomer.receive(copied(message))
    assert torch.equal(newcomer.upload()["w"], server.w)
    assert torch.equal(newcomer.zbar_g, server.zbar_g)
    assert not torch.count_nonzero(newcomer.b)


# -- whole runs ----------------------------------------------------------------------------------

OFF = ["--kappa", "0", "--personal_bias", "false"]


@pytest.mark.parametrize(("other", "M"), [("fedavg", 4), ("local", 1), ("fedavg", 1)])
def test_without_pull_and_bias_it_is_fedavg_bit_for_bit(tmp_path, other, M):
    ours = simulate(tmp_path / "dbe", ["dbe", *OFF, *FLAGS], tiny_shards(M))
    theirs = simulate(tmp_path / other, [other, *FLAGS], tiny_shards(M))
    for i, model in models_of(theirs).items():
        assert same(models_of(ours)[i], model)
    if other == "fedavg":
        assert torch.equal(ours.server()["w"], theirs.server()["w"])
    rows, others = ours.rows(), theirs.rows()
    for name in ("loss", "accuracy/post/client", "accuracy/recv/client", "test_loss/post/client"):
        assert np.array_equal(rows[name], others[name], equal_nan=True)


@pytest.mark.parametrize("switches", [[], OFF[:2], OFF[2:]])
def test_with_either_it_is_not(tmp_path, switches):
    ours = simulate(tmp_path / "dbe", ["dbe", *switches, *FLAGS])
    theirs = simulate(tmp_path / "fedavg", ["fedavg", *FLAGS])
    assert not torch.equal(ours.server()["w"], theirs.server()["w"])


def test_a_resumed_run_still_knows_the_consensus(tmp_path):
    # one client a round: after two rounds somebody has not joined
    argv = ["dbe", *FLAGS, "--join_low", "0.25", "--join_high", "0.25"]
    run = simulate(tmp_path / "run", [*argv, "--checkpoint_every", "2"])

    def fingerprint():
        return json.loads((run.folder / "status.json").read_text())["fingerprint"]

    end = fingerprint()
    run.checkpoints[-1].unlink()
    joined = run.server()["joined"]
    assert 0 < joined.sum() < 4
    assert torch.count_nonzero(run.server()["zbar_g"])
    simulate(run.folder, ["--resume", str(run.folder)])
    assert fingerprint() == end
    assert run.server()["joined"].sum() > joined.sum()


# -- configuration -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("switches", "message"),
    [
        ({"kappa": -1.0}, r"kappa is -1.0, expected a number in \[0, inf\)"),
        ({"kappa": math.inf}, r"kappa is inf"),
        ({"kappa": math.nan}, r"kappa is nan"),
        ({"mu": 0.0}, r"mu is 0.0, expected a number in \(0, 1\]"),
        ({"mu": 1.5}, r"mu is 1.5"),
        ({"mu": math.nan}, r"mu is nan"),
    ],
)
def test_settings_that_make_no_sense(switches, message):
    with pytest.raises(ValueError, match=message):
        dbe.Config(**switches)


@pytest.mark.parametrize(
    ("switches", "ends"),
    [
        ({}, []),
        ({"personal_bias": False}, []),
        ({"kappa": 0.0}, ["it is FedAvg with a personal bias"]),
        ({"kappa": 0.0, "personal_bias": False}, ["it is FedAvg"]),
    ],
)
def test_notices(switches, ends):
    notices = dbe.Server(make_setup(dbe.Config(**switches))).notices()
    assert len(notices) == len(ends)
    assert all(notice.endswith(end) for notice, end in zip(notices, ends))


def test_a_client_with_one_class_is_legal():
    server, clients = line_parties("dbe", [([1.0, 2.0], [1, 1])])
    line_round(server, clients)
    assert line_shard([1.0], [1]).n == 1
    assert torch.isfinite(server.w).all()
