"""FedAvg: the weighted mean against numbers worked by hand."""

import pytest
import torch
from tiny import batchnorm_model, make_parties, make_setup, same, train_round, vector_model

from fedapa_mpi.store.state import copy_of, nbytes
from fedapa_mpi.strategies import base, fedavg


def make_server(n, P=1):
    """A server whose clients have these numbers of samples, and w = (1, ..., 1)."""
    setup = make_setup(clients=len(n), architecture=lambda: vector_model(P))
    server = fedavg.Server(setup)
    server.welcome({i: {"n": torch.tensor(count)} for i, count in enumerate(n)})
    return server


def aggregate(server, uploads):
    sent = dict(server.download(sorted(uploads), 1))
    server.aggregate(sent, {i: {"w": torch.tensor(w)} for i, w in uploads.items()}, 1)
    return server.w.tolist()


@pytest.mark.parametrize(
    ("n", "uploads", "w"),
    [
        ((1, 3), {0: [0.0], 1: [4.0]}, [3.0]),  # (1 * 0 + 3 * 4) / 4
        ((5, 5, 5, 5), {0: [1.0], 1: [2.0], 2: [4.0], 3: [9.0]}, [4.0]),  # equal: plain mean
        ((1, 100, 3), {0: [0.0], 2: [4.0]}, [3.0]),  # who did not answer has no weight
        ((0, 2), {0: [100.0], 1: [4.0]}, [4.0]),  # no samples, no weight
        ((0, 0), {0: [1.0], 1: [4.0]}, [2.5]),  # nobody has samples: all the same weight
        ((7, 9), {}, [1.0]),  # nobody answered: w stays
    ],
)
def test_mean(n, uploads, w):
    assert aggregate(make_server(n), uploads) == w


def test_weights_are_formed_before_they_are_applied():
    # 3e38 + 3e38 would overflow float32
    assert aggregate(make_server((1, 1)), {0: [3e38], 1: [3e38]}) == pytest.approx([3e38])


def test_equal_uploads_stay_as_they_are_up_to_rounding():
    w = torch.randn(50, generator=torch.Generator().manual_seed(1))
    mean = aggregate(make_server((1, 5, 11), 50), {i: w.tolist() for i in range(3)})
    torch.testing.assert_close(torch.tensor(mean), w, rtol=3e-7, atol=0)


def test_a_single_upload_becomes_w_bit_for_bit():
    w = torch.randn(50, generator=torch.Generator().manual_seed(2))
    server = make_server((3, 7), 50)
    aggregate(server, {1: w.tolist()})
    assert torch.equal(server.w, w)
    assert server.joined.tolist() == [False, True]


def test_a_round_without_uploads_changes_nothing():
    server, clients = make_parties("fedavg", architecture=batchnorm_model)
    train_round(server, clients, [0, 2], 1)
    before = copy_of(server.state_dict())
    server.aggregate(dict(server.download([0, 1], 2)), {}, 2)
    assert same(server.state_dict(), before)


def test_statistics_are_averaged_like_parameters_and_counters_are_not():
    server, clients = make_parties("fedavg", architecture=batchnorm_model, clients=2)
    messages = dict(server.download([0, 1], 1))
    assert messages[0]["w_buffers"].tolist() == [0.0] * 5 + [1.0] * 5
    uploads = {}
    for i, client in clients.items():
        client.receive(messages[i])
        client.train(1)
        uploads[i] = client.upload()
    server.aggregate(messages, uploads, 1)
    a, b = (uploads[i]["w_buffers"] for i in (0, 1))
    torch.testing.assert_close(server.w_buffers, (12 * a + 17 * b) / 29)  # n = (12, 17)
    counters = [client.model.extractor[1].num_batches_tracked for client in clients.values()]
    assert [c.tolist() for c in counters] == [3, 4]  # floor(n / 4) steps
    clients[0].receive(dict(server.download([0], 2))[0])
    assert torch.equal(clients[0].model.extractor[1].running_var, server.w_buffers[5:])
    assert counters[0].item() == 3
    assert counters[0].dtype == torch.int64


@pytest.mark.parametrize(
    ("architecture", "floats"),
    [
        ({}, 25 + 18),  # (4 + 1) * 5 in the extractor, (5 + 1) * 3 in the head
        ({"architecture": batchnorm_model}, 25 + 10 + 18 + 10),  # weight, bias; mean, variance
    ],
)
def test_traffic(architecture, floats):
    server, clients = make_parties("fedavg", **architecture)
    ((_, down),) = server.download([1], 1)
    clients[1].receive(down)
    assert nbytes(down) == nbytes(clients[1].upload()) == 4 * floats


def test_everybody_gets_the_same():
    server, clients = make_parties("fedavg")
    train_round(server, clients, [0, 1, 2], 1)
    messages = dict(server.download([0, 1, 2], 2))
    assert all(torch.equal(message["w"], server.w) for message in messages.values())


def test_weighted_mean_of_many_is_taken_in_client_order():
    # ((1 + 1) + 2^25) - 2^25 is 0 in float32; from the other end it would be 2
    parts = {i: {"w": torch.tensor([v])} for i, v in enumerate((4.0, 4.0, 2.0**27, -(2.0**27)))}
    n = torch.ones(4, dtype=torch.int64)
    assert base.weighted_mean(parts, "w", n).item() == 0
    assert base.weighted_mean(dict(reversed(parts.items())), "w", n).item() == 2
