"""FedAMP against numbers worked by hand, and what must hold for any numbers."""

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

from fedapa_mpi import models
from fedapa_mpi.store.state import copy_of
from fedapa_mpi.strategies import fedamp
from fedapa_mpi.strategies.parts import geometry

E1 = math.exp(-1)


def make_server(w, **switches):
    """A server whose clients have sent these models, one per row."""
    w = torch.as_tensor(w, dtype=torch.float32)
    M, P = w.shape
    setup = make_setup(fedamp.Config(**switches), clients=M, architecture=lambda: vector_model(P))
    server = fedamp.Server(setup)
    server.aggregate({}, {i: {"w": w[i]} for i in range(M)}, 1)
    return server


def mixtures(server):
    ids = range(server.setup.clients)
    return torch.stack([message["u"] for _, message in server.download(ids, 2)])


def close(a, b, atol=5e-7):
    torch.testing.assert_close(a, torch.as_tensor(b, dtype=a.dtype), atol=atol, rtol=0)


def random_models(M=5, P=40, seed=0):
    return torch.randn(M, P, generator=torch.Generator().manual_seed(seed))


# -- attention ---------------------------------------------------------------------------------


def test_two_models():
    # d = 1, alpha = step sigma / (M - 1) = 0.5, xi_12 = 0.5 exp(-1) = 0.183940
    server = make_server([[0, 0], [1, 0]], sigma=1.0, step=0.5)
    close(server.xi, [[0.816060, 0.183940], [0.183940, 0.816060]])
    close(mixtures(server), [[0.183940, 0], [0.816060, 0]])


def test_three_models():
    # w = 0, 1, 3: d_12 = 1, d_13 = 9, d_23 = 4; sigma = 4, alpha A' = 0.5 exp(-d / 4):
    # xi_12 = 0.389400, xi_13 = 0.052700, xi_23 = 0.183940
    # u_1 = 0.389400 + 3 * 0.052700 = 0.547500
    # u_2 = (1 - 0.389400 - 0.183940) + 3 * 0.183940 = 0.978480
    # u_3 = 0.183940 + 3 (1 - 0.052700 - 0.183940) = 2.474021
    server = make_server([[0], [1], [3]], sigma=4.0)
    close(server.xi[0], [1 - 0.389400 - 0.052700, 0.389400, 0.052700], atol=1e-6)
    close(mixtures(server), [[0.547500], [0.978480], [2.474021]], atol=2e-6)
    # 4 is the median of 1, 4, 9 as well
    assert torch.equal(make_server([[0], [1], [3]]).xi, server.xi)


def test_the_median_is_that_of_models_that_differ():
    # w = 0, 0, 0, 1: of the six d three are 0 and three are 1; sigma = 1
    xi = make_server([[0], [0], [0], [1]]).xi
    close(xi[0], [1 - 2 / 3 - E1 / 3, 1 / 3, 1 / 3, E1 / 3])
    close(xi[3], [E1 / 3, E1 / 3, E1 / 3, 1 - E1])


@pytest.mark.parametrize("form", ["attention", "cosine"])
def test_one_round_of_three_clients(form):
    # labels 0, 0, 1, one step of 0.1 from (0, 0): w = (v, -v) with v = 0.05, 0.05, -0.05
    # attention: d_12 = 0, d_13 = d_23 = 2 * 0.1^2 = 0.02 = sigma; xi_12 = 0.5, xi_13 = 0.183940
    #   u_1 = (0.5 + 0.316060 - 0.183940) * 0.05 = 0.0316060
    #   u_3 = (2 * 0.183940 - 0.632121) * 0.05 = -0.0132121
    # cosine, scale 1: cos_12 = 1, cos_13 = -1, xi_ii = 1/3,
    #   xi_12 = 2/3 e / (e + 1/e) = 0.587198, xi_13 = 0.079468; xi_31 = xi_32 = 1/3
    #   u_1 = (1/3 + 0.587198 - 0.079468) * 0.05 = 0.0420532
    #   u_3 = (2/3 - 1/3) * 0.05 = 0.0166667
    switches = {"scale": 1.0} if form == "cosine" else {}
    server, clients = parties(
        "fedamp", fedamp.Config(form=form, **switches), labels=[0, 0, 1], n=[1, 2, 4]
    )
    assert all(message["u"].tolist() == [0, 0] for _, message in server.download([0, 1, 2], 1))
    train_round(server, clients, [0, 1, 2], 1)
    close(server.w, [[0.05, -0.05], [0.05, -0.05], [-0.05, 0.05]])
    u1, u3 = {"attention": (0.0316060, -0.0132121), "cosine": (0.0420532, 0.0166667)}[form]
    close(mixtures(server), [[u1, -u1], [u1, -u1], [u3, -u3]])


@pytest.mark.parametrize("sigma", [0.0, 0.5, 100.0])
def test_rows_sum_to_one_and_mixtures_are_convex(sigma):
    w = random_models()
    w[3] = w[1]
    xi = make_server(w, sigma=sigma).xi
    close(xi.sum(dim=1), torch.ones(5), atol=1e-15)
    assert (xi > -1e-15).all()
    assert torch.equal(xi, xi.T)
    assert xi[1, 3] == 0.25  # equal models: 1 / (M - 1)


def test_a_wide_attention_shares_equally_and_a_small_alpha_not_at_all():
    w = random_models()
    # alpha = sigma / M: step = (M - 1) / M
    equal = make_server(w, sigma=1e9, step=0.8)
    close(equal.xi, torch.full((5, 5), 0.2))
    close(mixtures(equal), w.mean(dim=0).expand(5, -1), atol=1e-6)
    # alpha = 1 fixed, sigma = 1e9: step = alpha (M - 1) / sigma
    alone = make_server(w, sigma=1e9, step=4e-9)
    close(alone.xi, torch.eye(5), atol=1e-8)
    close(mixtures(alone), w, atol=1e-6)


@pytest.mark.parametrize("form", ["attention", "cosine"])
def test_equal_models_stay_what_they_are(form):
    server = make_server([[0.5, -3, 1e-3]] * 4, form=form)
    close(mixtures(server), server.w, atol=1e-6)
    assert torch.isfinite(server.xi).all()


def test_distances_do_not_depend_on_the_blocks(monkeypatch):
    w = torch.randint(-8, 9, (4, 8), generator=torch.Generator().manual_seed(1)).float()
    whole = geometry.squared_distances(w)
    close(whole, (w[:, None] - w[None]).square().sum(dim=2), atol=1e-11)
    assert (whole.diagonal() == 0).all()
    monkeypatch.setattr(geometry, "COLUMNS", 3)
    close(geometry.squared_distances(w), whole, atol=1e-11)


def test_scale_zero_is_said():
    server, _ = make_parties("fedamp", fedamp.Config(form="cosine", scale=0.0))
    assert "whatever their angles" in " ".join(server.notices())


# -- the cosine form ---------------------------------------------------------------------------


def test_cosine_weights():
    # cosines of w_1 with the others: 0 and sqrt(1/2), whatever the lengths; scale 2, xi_ii = 0.4:
    # exp(0) = 1, exp(1.414214) = 4.113250; 0.6 / 5.113250 = 0.117342, 0.6 - that = 0.482658
    server = make_server([[1, 0], [0, 5], [3, 3]], form="cosine", scale=2.0, self_weight=0.4)
    close(server.xi[0], [0.4, 0.117342, 0.482658])
    close(server.xi.diagonal(), [0.4] * 3)
    close(server.xi.sum(dim=1), [1.0] * 3)


def test_cosine_defaults_to_one_over_M():
    close(make_server(random_models(), form="cosine").xi.diagonal(), [0.2] * 5)


def test_a_model_of_zeros_has_no_angle():
    xi = make_server([[0, 0], [1, 0], [0, 1]], form="cosine").xi
    close(xi[0], [1 / 3] * 3)
    assert torch.isfinite(xi).all()


@pytest.mark.parametrize("form", ["attention", "cosine"])
def test_geometry_sees_parameters_only(form):
    def xi(statistics):
        server, clients = make_parties(
            "fedamp", fedamp.Config(form=form), architecture=batchnorm_model
        )
        sent = dict(server.download([0, 1, 2], 1))
        uploads = {}
        for i, client in clients.items():
            client.receive(sent[i])
            client.train(1)
            uploads[i] = client.upload()
            uploads[i]["w_buffers"].mul_(statistics)
        server.aggregate(sent, uploads, 1)
        return server

    usual, huge = xi(1), xi(1e6)
    assert torch.equal(usual.xi, huge.xi)
    assert not torch.equal(usual.w_buffers, huge.w_buffers)
    assert usual.xi[0, 1] > 0


def test_statistics_are_mixed_and_counters_stay():
    server, clients = make_parties("fedamp", architecture=batchnorm_model)
    train_round(server, clients, [0, 1, 2], 1)
    messages = dict(server.download([0, 1, 2], 2))
    expected = server.xi.float() @ server.w_buffers
    for i, client in clients.items():
        steps = client.model.extractor[1].num_batches_tracked.item()
        client.receive(messages[i])
        close(models.buffers(client.model), expected[i], atol=1e-6)
        assert client.model.extractor[1].num_batches_tracked.item() == steps > 0


# -- the pull ------------------------------------------------------------------------------------


def test_gradient_of_the_pull_is_prox_times_the_difference():
    _, clients = make_parties("fedamp", fedamp.Config(start="own", prox=0.25))
    client = clients[0]
    x, y = client.shard.x[:4], client.shard.y[:4]
    u = torch.linspace(-1, 1, 43)
    client.receive({"u": u})
    gradients = {}
    for weight in (0.25, 0.0):
        object.__setattr__(client.setup.config, "prox", weight)
        client.model.zero_grad()
        client.loss(x, y).backward()
        gradients[weight] = torch.cat([p.grad.reshape(-1) for p in client.model.parameters()])
    pull = gradients[0.25] - gradients[0.0]
    close(pull, 0.25 * (models.vector(client.model) - u), atol=1e-6)
    assert pull.abs().max() > 0.1


def test_one_step_from_ones_own_model():
    # w = 0, u = (0.4, 0.2), label 0, lr 0.1, prox 0.5: gradient (-0.5, 0.5) + 0.5 (0 - u)
    # = (-0.7, 0.4), w = (0.07, -0.04)
    _, clients = parties("fedamp", fedamp.Config(start="own", prox=0.5), [0], [1])
    clients[0].receive({"u": torch.tensor([0.4, 0.2])})
    assert models.vector(clients[0].model).tolist() == [0, 0]
    clients[0].train(1)
    close(clients[0].upload()["w"], [0.07, -0.04])


def test_two_steps_from_the_cloud_model():
    # u = 0, label 0, lr 0.1, prox 2: after one step v = 0.05; s = 1 / (1 + exp(-0.1)) = 0.524979,
    # gradient s - 1 + 2 * 0.05 = -0.375021: v = 0.0875021
    _, clients = parties("fedamp", fedamp.Config(prox=2.0), [0], [1], epochs=2)
    clients[0].receive({"u": torch.zeros(2)})
    clients[0].train(1)
    close(clients[0].upload()["w"], [0.0875021, -0.0875021])


# -- who takes part ----------------------------------------------------------------------------


def test_who_never_joined_stands_for_the_initial_model():
    server, clients = parties("fedamp", fedamp.Config(sigma=1.0), [0, 0, 1], [1, 1, 1])
    train_round(server, clients, [0], 1)
    close(server.w, [[0.05, -0.05], [0, 0], [0, 0]])
    # d_12 = d_13 = 0.005: weights 0.5 exp(-0.005) = 0.497506 twice; u_1 = 0.004988 * 0.05
    close(mixtures(server)[0], [0.000249, -0.000249])
    # the others are equal to each other: 0.5, and 0.497506 of w_1
    close(mixtures(server)[2], [0.024875, -0.024875])


def test_who_is_not_sampled_still_counts_with_what_it_sent_last():
    server = make_server([[0], [1], [3]], sigma=4.0)
    server.aggregate({}, {1: {"w": torch.tensor([2.0])}}, 2)
    assert server.w.tolist() == [[0], [2], [3]]
    # d_12 = 4, d_13 = 9: 0.183940 * 2 + 0.052700 * 3 = 0.525979
    close(mixtures(server)[0], [0.525979], atol=1e-6)


def test_a_round_without_uploads_changes_nothing():
    server = make_server(random_models())
    before = copy_of(server.state_dict())
    server.aggregate(dict(server.download([0, 3], 2)), {}, 2)
    assert same(server.state_dict(), before)


def test_newcomers_get_the_mean_of_those_who_joined():
    server, clients = parties("fedamp", fedamp.Config(), [0, 0, 1], [1, 1, 1])
    assert server.newcomer()["u"].tolist() == [0, 0]
    train_round(server, clients, [0, 1], 1)
    close(server.newcomer()["u"], [0.05, -0.05])


@pytest.mark.parametrize("form", ["attention", "cosine"])
@pytest.mark.parametrize("start", ["cloud", "own"])
def test_poor_clients_are_legal(tmp_path, form, start):
    run = simulate(
        tmp_path / "run",
        ["fedamp", "--form", form, "--start", start, "--rounds", "3", "--batch_size", "4"],
        poor_shards(),
    )
    for state in (run.server(), *run.clients().values()):
        assert all(bool(torch.isfinite(tensor).all()) for tensor in state.values())


# -- reductions ----------------------------------------------------------------------------------

FLAGS = ["--rounds", "3", "--batch_size", "4", "--epochs", "1", "--lr", "0.02"]


@pytest.mark.parametrize(
    ("switches", "M"),
    [
        (["--start", "own", "--prox", "0"], 4),
        (["--start", "own", "--prox", "0", "--form", "cosine"], 4),
        (["--prox", "0"], 1),
        (["--prox", "0", "--form", "cosine"], 1),
    ],
    ids=lambda value: str(value).strip("[]"),
)
def test_reduces_to_local_bit_for_bit(tmp_path, switches, M):
    run = simulate(tmp_path / "run", ["fedamp", *switches, *FLAGS], tiny_shards(M))
    local = simulate(tmp_path / "local", ["local", *FLAGS], tiny_shards(M))
    for i, state in run.clients().items():
        state.pop("u")
        assert same(state, local.clients()[i])
    ours, theirs = run.rows(), local.rows()
    for name in ("loss", "accuracy/post/client", "accuracy/recv/client", "test_loss/post/client"):
        assert np.array_equal(ours[name], theirs[name], equal_nan=True)


@pytest.mark.parametrize(
    "switches",
    [["--start", "own"], ["--prox", "0"], [], ["--form", "cosine", "--start", "own"]],
    ids=lambda value: " ".join(value) or "defaults",
)
def test_otherwise_it_is_not_local(tmp_path, switches):
    run = simulate(tmp_path / "run", ["fedamp", *switches, *FLAGS])
    local = simulate(tmp_path / "local", ["local", *FLAGS])
    for i, state in run.clients().items():
        state.pop("u")
        assert not same(state, local.clients()[i])


# -- configuration -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("switches", "message"),
    [
        ({"sigma": -1.0}, r"sigma is -1.0, expected a number in \[0, inf\)"),
        ({"prox": float("nan")}, "prox is nan"),
        ({"scale": float("inf")}, "scale is inf"),
        ({"step": 0.0}, r"step is 0.0, expected a number in \(0, 1\]"),
        ({"step": 1.5}, "step is 1.5"),
        ({"self_weight": 1.1}, r"self_weight is 1.1, expected a number in \[0, 1\]"),
    ],
)
def test_settings_that_make_no_sense(switches, message):
    with pytest.raises(ValueError, match=message):
        fedamp.Config(**switches)


@pytest.mark.parametrize(
    ("switches", "words"),
    [
        ({}, []),
        ({"form": "cosine"}, []),
        ({"start": "own"}, []),
        ({"prox": 0.0}, []),
        ({"start": "own", "prox": 0.0}, ["local training"]),
        ({"form": "cosine", "self_weight": 1.0}, ["nothing is shared"]),
    ],
)
def test_notices(switches, words):
    notices = make_server([[1], [2]], **switches).notices()
    assert len(notices) == len(words)
    assert all(word in notice for word, notice in zip(words, notices))
