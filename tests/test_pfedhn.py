"""pFedHN: steps of the hypernetwork against numbers worked by hand, and what travels."""

import pytest
import torch
from tiny import (
    batchnorm_model,
    make_parties,
    make_setup,
    play,
    same,
    shard,
    simulate,
    train_round,
    vector_model,
)
from torch import nn

from fedapa_mpi import config, models
from fedapa_mpi.data.federation import Shard
from fedapa_mpi.models import SplitModel
from fedapa_mpi.sgd import ClippedSGD
from fedapa_mpi.store.state import copy_of, nbytes
from fedapa_mpi.strategies.pfedhn import Client, Config, Hypernetwork, Server

PLAIN = {"hn_lr": 0.1, "hn_momentum": 0.0, "hn_decay": 0.0}


def linear_server(v, W=((1.0,), (2.0,)), **switches):
    """A server whose hypernetwork is w_i = W v_i, with one number v_i per client."""
    setup = make_setup(
        Config(**{**PLAIN, "embedding": 1, **switches}),
        clients=len(v),
        architecture=lambda: vector_model(len(W)),
    )
    server = Server(setup)
    hypernetwork = server.hypernetwork
    hypernetwork.layers = nn.Linear(1, len(W), bias=False)
    hypernetwork.layers.weight.data.copy_(torch.tensor(W))
    hypernetwork.embedding.weight.data.copy_(torch.tensor(v)[:, None])
    c = setup.config
    server.optimizer = ClippedSGD(
        hypernetwork.parameters(),
        c.clip,
        lr=c.hn_lr,
        momentum=c.hn_momentum,
        weight_decay=c.hn_decay,
    )
    return server


def numbers(server):
    """W and v as lists."""
    parts = server.hypernetwork.layers, server.hypernetwork.embedding
    return tuple(part.weight.flatten().tolist() for part in parts)


def upload(server, answers, t=1):
    sent = dict(server.download(sorted(answers), t))
    server.aggregate(sent, {i: {"w": torch.tensor(answers[i])} for i in sorted(answers)}, t)
    return sent


def model_of(server, i):
    ((_, message),) = server.download([i], 9)
    return message["w"]


# -- steps worked by hand ------------------------------------------------------------------------


def test_one_client():
    # w = W v = (1, 2), upload (0.5, 2.5): delta = (0.5, -0.5); gradients delta v = (0.5, -0.5) of
    # W and <W, delta> = 0.5 - 1 = -0.5 of v; step 0.1: W = (0.95, 2.05), v = 1.05,
    # w = (0.9975, 2.1525); squared distance to the upload from 0.5 to 0.4975^2 + 0.3475^2
    server = linear_server([1.0])
    sent = upload(server, {0: [0.5, 2.5]})
    assert sent[0]["w"].tolist() == [1, 2]
    weights, v = numbers(server)
    assert weights == pytest.approx([0.95, 2.05])
    assert v == pytest.approx([1.05])
    w = model_of(server, 0)
    assert w.tolist() == pytest.approx([0.9975, 2.1525])
    distance = (w - torch.tensor([0.5, 2.5])).square().sum().item()
    assert distance == pytest.approx(0.368263, abs=1e-6)


UPLOADS = {0: [0.5, 2.5], 1: [2.0, 5.0], 2: [-1.0, -2.0]}  # v = (1, 2, -1): the third is unchanged


def test_three_clients_in_parallel():
    # w = (1, 2), (2, 4), (-1, -2); delta = (0.5, -0.5), (0, -1), (0, 0)
    # gradient of W: (1 (0.5, -0.5) + 2 (0, -1)) / 3 = (0.5, -2.5) / 3; of v: (-0.5, -2, 0) / 3
    server = linear_server([1.0, 2.0, -1.0])
    upload(server, UPLOADS)
    weights, v = numbers(server)
    assert weights == pytest.approx([1 - 0.05 / 3, 2 + 0.25 / 3])
    assert v == pytest.approx([1 + 0.05 / 3, 2 + 0.2 / 3, -1])


def test_three_clients_one_after_the_other():
    # after the first W = (0.95, 2.05), v_1 = 1.05; the second gets 2 W = (1.9, 4.1) and adds
    # (0, 1): delta = (0, -1), gradients (0, -2) and -2.05: W = (0.95, 2.25), v_2 = 2.205; the
    # third gets -W and adds (0.5, 0): delta = (-0.5, 0), gradients (0.5, 0) and -0.475
    server = linear_server([1.0, 2.0, -1.0])
    change = dict(enumerate(torch.tensor([[-0.5, 0.5], [0.0, 1.0], [0.5, 0.0]])))
    play(server, [0, 1, 2], 1, lambda i, message: {"w": message["w"] + change[i]}, sequential=True)
    weights, v = numbers(server)
    assert weights == pytest.approx([0.9, 2.25])
    assert v == pytest.approx([1.05, 2.205, -0.9525])


def test_delta_is_taken_from_what_was_sent():
    # the client says it got (3, 3), not the (1, 2) that would be made now: delta = (0.5, -0.5)
    server = linear_server([1.0])
    messages = ({0: {"w": torch.tensor(w)}} for w in ([3.0, 3.0], [2.5, 3.5]))
    server.aggregate(*messages, 1)
    assert numbers(server)[0] == pytest.approx([0.95, 2.05])


@pytest.mark.parametrize(
    ("clip", "size"),
    [
        # gradient of W: (0, -4), of v: -4 * 2 = -8; its norm is sqrt(80), cut down to 1
        (1.0, 80**-0.5),
        (9.0, 1.0),  # sqrt(80) = 8.94 stays
    ],
)
def test_clipping_is_by_the_joint_norm(clip, size):
    server = linear_server([1.0], clip=clip)
    upload(server, {0: [1.0, 6.0]})  # delta = (0, -4)
    weights, v = numbers(server)
    assert weights == pytest.approx([1, 2 + 0.4 * size])
    assert v == pytest.approx([1 + 0.8 * size])


def test_the_step_is_dense():
    # decay 0.5, step 0.1: a row without gradient goes from 4 to 4 - 0.1 * 0.5 * 4 = 3.8; with
    # momentum 0.9 next to 3.8 - 0.1 (0.9 * 2 + 1.9) = 3.43
    server = linear_server([1.0, 4.0], hn_momentum=0.9, hn_decay=0.5)
    for expected in (3.8, 3.43):
        upload(server, {0: [1.0, 2.0]})
        assert numbers(server)[1][1] == pytest.approx(expected)


def test_momentum_and_decay():
    # one number each: w = W v = 1, upload 0: delta = 1, gradients 1 + 0.5 = 1.5 of both; W = v =
    # 0.85. Upload w: delta = 0, gradient 0.425, momentum 0.9 * 1.5 + 0.425 = 1.775
    server = linear_server([1.0], W=((1.0,),), hn_momentum=0.9, hn_decay=0.5)
    upload(server, {0: [0.0]})
    assert numbers(server) == (pytest.approx([0.85]), pytest.approx([0.85]))
    upload(server, {0: model_of(server, 0).tolist()})
    assert numbers(server)[0] == pytest.approx([0.85 - 0.1775])


def test_without_change_and_decay_nothing_moves():
    server, _ = make_parties("pfedhn", Config(hn_decay=0.0))
    before = copy_of(server.hypernetwork.state_dict())
    sent = dict(server.download([0, 1, 2], 1))
    server.aggregate(sent, {i: {"w": sent[i]["w"].clone()} for i in sent}, 1)
    assert same(server.hypernetwork.state_dict(), before)


def test_a_round_without_uploads_changes_nothing():
    server, clients = make_parties("pfedhn")
    train_round(server, clients, [0, 2], 1)
    before = copy_of(server.state_dict())
    server.aggregate(dict(server.download([0, 1], 2)), {}, 2)
    assert same(server.state_dict(), before)  # no decay either


def test_who_does_not_answer_does_not_count():
    server = linear_server([1.0, 2.0])
    sent = dict(server.download([0, 1], 1))
    server.aggregate(sent, {0: {"w": torch.tensor([0.5, 2.5])}}, 1)
    weights, v = numbers(server)
    assert weights == pytest.approx([0.95, 2.05])  # not divided by two
    assert v == pytest.approx([1.05, 2.0])


# -- the gradient --------------------------------------------------------------------------------


def test_gradient_is_that_of_half_the_squared_distance():
    server, _ = make_parties("pfedhn", Config(clip=float("inf")))
    sent = dict(server.download([0, 1, 2], 1))
    uploads = {
        i: {"w": m["w"] + torch.randn(43, generator=server.setup.generator(i, "x"))}
        for i, m in sent.items()
    }
    reference = Hypernetwork(server.setup.config, 3, 43)
    reference.load_state_dict(server.hypernetwork.state_dict())
    new = torch.stack([upload["w"] for upload in uploads.values()])
    (0.5 * (reference([0, 1, 2]) - new).square().sum() / 3).backward()
    server.aggregate(sent, uploads, 1)
    for ours, theirs in zip(server.hypernetwork.parameters(), reference.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad)
        assert ours.grad.abs().max() > 1e-4


def test_steps_bring_generated_models_closer_to_the_uploads():
    server, _ = make_parties("pfedhn")
    goal = {i: model_of(server, i) + 0.5 for i in range(3)}
    far = sum((model_of(server, i) - goal[i]).norm() for i in range(3))
    for t in range(1, 30):
        upload(server, {i: goal[i].tolist() for i in range(3)}, t)
    near = sum((model_of(server, i) - goal[i]).norm() for i in range(3))
    assert near < 0.3 * far


# -- the hypernetwork ----------------------------------------------------------------------------


def size(module):
    return sum(p.numel() for p in module.parameters())


def test_size_is_the_authors():
    # LeNet-5 on CIFAR-10, M = 20: embeddings 20 * 6, Linear(6, 100), 3 Linear(100, 100), and
    # Linear(100, 62006): 120 + 700 + 30300 + 6262606
    assert size(Hypernetwork(Config(), 20, 62_006)) == 6_293_726


@pytest.mark.parametrize(("M", "e"), [(1, 1), (3, 1), (4, 2), (20, 6), (50, 13)])
def test_default_size_of_an_embedding(M, e):
    assert Hypernetwork(Config(), M, 5).embedding.weight.shape == (M, e)
    assert Hypernetwork(Config(embedding=7), M, 5).embedding.weight.shape == (M, 7)


def test_optimizers():
    server = Server(make_setup(Config()))
    (group,) = server.optimizer.param_groups
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.01, 0.9, 0.001)
    assert sum(p.numel() for p in group["params"]) == size(server.hypernetwork)
    (group,) = Client(make_setup(Config(), client=0, shard=shard(4))).optimizer.param_groups
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.1, 0.9, 0)  # the run's


def test_layers():
    layers = Hypernetwork(Config(hidden=8, hidden_layers=2), 4, 5).layers
    shapes = [
        tuple(layer.weight.shape) if isinstance(layer, nn.Linear) else "relu" for layer in layers
    ]
    assert shapes == [(8, 2), "relu", (8, 8), "relu", (8, 8), (5, 8)]


def test_every_client_gets_its_own_model_and_every_seed_its_own():
    server, _ = make_parties("pfedhn")
    other, _ = make_parties("pfedhn", seed=1)
    assert not torch.equal(model_of(server, 0), model_of(server, 1))
    assert not torch.equal(model_of(server, 0), model_of(other, 0))


# -- clients -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "P"), [("model", 43), ("extractor", 25)])
def test_what_travels(share, P):
    server, clients = make_parties("pfedhn", Config(share=share))
    head = clients[0].model.head.weight.detach().clone()
    ((_, message),) = server.download([0], 1)
    assert {name: list(tensor.shape) for name, tensor in message.items()} == {"w": [P]}
    assert nbytes(message) == 4 * P
    message["w"].fill_(7)
    clients[0].receive(message)
    assert (clients[0].model.extractor[0].weight == 7).all()
    assert (clients[0].model.head.weight == (7 if share == "model" else head)).all()
    assert same(clients[0].upload(), message)


def test_private_heads_are_trained_and_stay():
    server, clients = make_parties("pfedhn", Config(share="extractor"))
    before = [copy_of(client.model.head.state_dict()) for client in clients.values()]
    train_round(server, clients, [0, 1], 1)
    assert [same(c.model.head.state_dict(), b) for c, b in zip(clients.values(), before)] == [
        False,
        False,
        True,
    ]
    trained = copy_of(clients[0].model.head.state_dict())
    ((_, message),) = server.download([0], 2)
    clients[0].receive(message)
    assert same(clients[0].model.head.state_dict(), trained)


def test_statistics_and_counters_stay_with_the_client():
    server, clients = make_parties("pfedhn", architecture=batchnorm_model)
    train_round(server, clients, [0, 1], 1)
    statistics = models.buffers(clients[0].model)
    ((_, message),) = server.download([0], 2)
    clients[0].receive(message)
    assert torch.equal(models.buffers(clients[0].model), statistics)
    assert not torch.equal(statistics, models.buffers(clients[2].model))
    assert message.keys() == clients[0].upload().keys() == {"w"}


@pytest.mark.parametrize(("clip", "gradient"), [(0.5, 0.25), (50.0, 1.0)])
def test_a_clients_gradient_is_clipped(clip, gradient):
    class Sum(Client):
        def loss(self, x, y):
            return self.model.head.weight.sum()

    def architecture():
        return SplitModel(nn.Flatten(), nn.Linear(4, 1, bias=False))

    # gradient (1, 1, 1, 1) with norm 2: clipped to norm 0.5 it is (1, 1, 1, 1) / 4; one step of 0.1
    client = Sum(make_setup(Config(clip=clip), client=0, shard=shard(4), architecture=architecture))
    client.receive({"w": torch.zeros(4)})
    client.train(1)
    assert client.upload()["w"].tolist() == pytest.approx([-0.1 * gradient] * 4)


def one_class(n):
    """A shard that owns class 1 only."""
    s = shard(n)
    return Shard(s.x, torch.ones_like(s.y), s.x_test, s.y_test, 3, 1.0, (0.0,), (1.0,))


@pytest.mark.parametrize("own", [shard(0), shard(1), one_class(9), shard(9, 0)])
def test_small_clients(own):
    server, clients = make_parties("pfedhn")
    clients[0] = Client(make_setup(Config(), client=0, shard=own))
    for t in (1, 2):
        train_round(server, clients, [0, 1], t)
    assert all(torch.isfinite(tensor).all() for tensor in server.state_dict().values())
    assert torch.isfinite(model_of(server, 2)).all()


# -- whole runs ----------------------------------------------------------------------------------

RUN = ["pfedhn", "--rounds", "4", "--batch_size", "4", "--epochs", "1"]


def test_one_client_per_round_is_the_same_in_both_orders(tmp_path):
    one = ["--join_low", "0.25", "--join_high", "0.25"]
    a = simulate(tmp_path / "a", [*RUN, *one, "--order", "parallel"])
    b = simulate(tmp_path / "b", [*RUN, *one, "--order", "sequential"])
    assert same(a.server(), b.server())
    assert all(same(a.clients()[i], b.clients()[i]) for i in range(4))
    more = [simulate(tmp_path / o, [*RUN, "--order", o]) for o in ("parallel", "sequential")]
    assert not same(more[0].server(), more[1].server())


def test_without_steps_clients_get_the_same_models_in_every_round():
    server, clients = make_parties("pfedhn", Config(hn_lr=0.0))
    before = [model_of(server, i) for i in range(3)]
    train_round(server, clients, [0, 1, 2], 1)
    assert all(torch.equal(model_of(server, i), w) for i, w in enumerate(before))


def test_momentum_starts_anew_by_default():
    assert config.experiment("pfedhn", {}).run.client_opt == "reset"
    assert config.experiment("pfedhn", {"client_opt": "persist"}).run.client_opt == "persist"
    assert config.experiment("fedavg", {}).run.client_opt == "persist"


@pytest.mark.parametrize(
    ("switches", "message"),
    [
        ({"embedding": 0}, r"embedding is 0, expected a number in \[1, inf\)"),
        ({"hidden": 0}, r"hidden is 0, expected a number in \[1, inf\)"),
        ({"hidden_layers": -1}, r"hidden_layers is -1, expected a number in \[0, inf\)"),
        ({"hn_lr": -0.1}, "hn_lr is -0.1"),
        ({"hn_lr": float("inf")}, "hn_lr is inf"),
        ({"hn_decay": float("nan")}, "hn_decay is nan"),
        ({"hn_momentum": 1.0}, r"hn_momentum is 1.0, expected a number in \[0, 1\)"),
        ({"clip": 0.0}, r"clip is 0.0, expected a number in \(0, inf\]"),
    ],
)
def test_settings_that_make_no_sense(switches, message):
    with pytest.raises(ValueError, match=message):
        Config(**switches)


@pytest.mark.parametrize(
    ("switches", "client_opt", "words"),
    [
        ({}, "reset", []),
        ({"hn_lr": 0.0}, "reset", ["nothing is learned"]),
        ({}, "persist", ["momentum of earlier models"]),
    ],
)
def test_notices(switches, client_opt, words):
    notices = Server(make_setup(Config(**switches), client_opt=client_opt)).notices()
    assert len(notices) == len(words)
    assert all(word in notice for word, notice in zip(words, notices))


def test_held_out_clients_get_nothing():
    assert Server(make_setup(Config())).newcomer() is None
