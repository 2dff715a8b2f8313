"""FedAPA against numbers worked by hand, and what must hold for any numbers."""

from dataclasses import asdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import batchnorm_model, make_parties, make_setup, play, same, train_round, vector_model

from fedapa_mpi import config
from fedapa_mpi.store.state import copy_of
from fedapa_mpi.strategies import fedapa
from fedapa_mpi.strategies.parts import geometry

OFFICIAL = {  # Config.PRESETS["official"] without what the run's own flags are set to
    "self_weight": 1.0,
    "postprocess": "before_mix",
    "server_momentum": 0.9,
    "row_isolated": False,
}
DIGITS6 = {"atol": 5e-7, "rtol": 0}  # worked to six digits


def make_server(theta, **switches):
    """A server that holds these extractors, one row per client."""
    theta = torch.as_tensor(theta, dtype=torch.float32)
    M, P = theta.shape
    setup = make_setup(fedapa.Config(**switches), clients=M, architecture=lambda: vector_model(P))
    server = fedapa.Server(setup)
    server.theta.copy_(theta)
    return server


def upload(server, answers, t=1):
    """Sends what ``answers`` asks for and takes its uploads: {client: new theta}."""
    sent = dict(server.download(sorted(answers), t))
    uploads = {
        i: {"theta": torch.as_tensor(answers[i], dtype=torch.float32)} for i in sorted(answers)
    }
    server.aggregate(sent, uploads, t)
    return sent


def matrix(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def close(a, b, **tolerance):
    torch.testing.assert_close(a, b, **(tolerance or DIGITS6))


# -- one step of Eq. 5-7 -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("switches", "row", "mixture"),
    [
        # theta_1 = (1, 0), theta_2 = (0, 1), row 1 of A = (1, 0): theta_bar_1 = (1, 0)
        # upload (1, 0.5): delta = (0, 0.5), g = (<theta_1, delta>, <theta_2, delta>) = (0, 0.5)
        # eta = 0.1: (1, 0) + 0.1 g = (1, 0.05)
        # self weight 0.5: (0.5, 0.05) / 0.55 = (0.909091, 0.090909); theta_1 is (1, 0.5) now, so
        # theta_bar_1 = 0.909091 (1, 0.5) + 0.090909 (0, 1) = (0.909091, 0.545455)
        ({}, (0.909091, 0.090909), (0.909091, 0.545455)),
        # self weight 1: (1, 0.05) / 1.05 = (0.952381, 0.047619)
        ({"self_weight": 1.0}, (0.952381, 0.047619), (0.952381, 0.523810)),
        # printed sign: (1, 0) - 0.1 g = (1, -0.05), clipped to (1, 0)
        ({"gradient": "printed"}, (1.0, 0.0), (1.0, 0.5)),
        # centred: mean of g = 0.25, g = (-0.25, 0.25); (0.975, 0.025) -> (0.5, 0.025) / 0.525
        ({"gradient": "centred"}, (0.952381, 0.047619), (0.952381, 0.523810)),
    ],
)
def test_one_step(switches, row, mixture):
    server = make_server([[1, 0], [0, 1]], eta=0.1, **switches)
    sent = upload(server, {0: [1, 0.5]})
    assert sent[0]["theta"].tolist() == [1, 0]
    close(server.A, matrix(row, (0, 1)))
    (_, message), *_ = server.download([0], 2)
    close(message["theta"], torch.tensor(mixture))


def test_clipping_at_one():
    # theta = (1), (10); upload 3: delta = 2, g = (2, 20), eta = 0.1: (1.2, 2) -> clipped (1, 1),
    # self weight: (0.5, 1) / 1.5
    server = make_server([[1], [10]], eta=0.1)
    upload(server, {0: [3]})
    close(server.A[0], torch.tensor([1 / 3, 2 / 3], dtype=torch.float64))


def test_gradient_uses_extractors_from_before_the_round():
    # both rows see theta = (1, 1) although client 0's new one is stored in the same call:
    # delta_2 = 1, g_21 = <theta_1 old, 1> = 1; with the new theta_1 = 11 it would be 11
    server = make_server([[1], [1]], eta=0.1)
    upload(server, {0: [11], 1: [2]})
    close(server.A[1], torch.tensor([0.1 / 0.6, 0.5 / 0.6], dtype=torch.float64))
    assert server.theta.tolist() == [[11], [2]]


def test_delta_is_taken_from_what_was_sent():
    # client 0 says it got 5, not the theta_bar = 1 that A would give now: delta = 6 - 5
    server = make_server([[1], [1]], eta=0.1)
    server.aggregate({0: {"theta": torch.tensor([5.0])}}, {0: {"theta": torch.tensor([6.0])}}, 1)
    close(server.A[0], torch.tensor([0.5 / 0.6, 0.1 / 0.6], dtype=torch.float64))


# -- two-round traces ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("switches", "sequential", "A1", "theta2", "A2"),
    [
        # theta = (1, 1), training adds (0.5, 0.2), eta = 0.1; round 1, client 1: g = (0.5, 0.5),
        # (1, 0.05) -> (0.5, 0.05) / 0.55; client 2: g = (0.2, 0.2), (0.02, 0.5) / 0.52
        # round 2: theta_bar = (0.909091 * 1.5 + 0.090909 * 1.2, 0.038462 * 1.5 + 0.961538 * 1.2)
        # = (1.472727, 1.211538), g_1 = 0.5 (1.5, 1.2), g_2 = 0.2 (1.5, 1.2);
        # row 1: (0.5, 0.090909 + 0.06) / sum, row 2: (0.038462 + 0.03, 0.5) / sum
        (
            {},
            False,
            ((0.909091, 0.090909), (0.038462, 0.961538)),
            (1.972727, 1.411538),
            ((0.768156, 0.231844), (0.120433, 0.879567)),
        ),
        # sequential: client 2 meets theta_1 = 1.5 already, g_21 = 0.3: (0.03, 0.5) / 0.53;
        # round 2: theta_bar_2 = 0.056604 * 1.972727 + 0.943396 * 1.2 = 1.243739,
        # row 2: (0.056604 + 0.02 * 1.972727, 0.5) / sum
        (
            {},
            True,
            ((0.909091, 0.090909), (0.056604, 0.943396)),
            (1.972727, 1.443739),
            ((0.768156, 0.231844), (0.161156, 0.838844)),
        ),
        # printed sign: every step lowers the neighbour's weight, which is 0
        ({"gradient": "printed"}, False, ((1, 0), (0, 1)), (2.0, 1.4), ((1, 0), (0, 1))),
        # the authors' code; A is stored un-normalised. Round 1, client 1: momentum (0.5, 0.5),
        # row (1, 0.05); client 2: momentum of row 1 is 0.45 now and moves it to (1, 0.095),
        # row 2: g = (0.3, 0.2), (0.03, 1). Round 2, client 1 mixes (1, 0.095) / 1.095:
        # theta_bar = (1.5 + 0.095 * 1.2) / 1.095 = 1.473973
        (
            OFFICIAL,
            True,
            ((1, 0.095), (0.03, 1)),
            (1.973973, 1.441737),
            ((1, 0.277708), (0.117706, 0.986274)),
        ),
    ],
    ids=["parallel", "sequential", "printed", "official"],
)
def test_two_rounds_of_two_clients(switches, sequential, A1, theta2, A2):
    server = make_server([[1], [1]], eta=0.1, **switches)

    def answer(i, message):
        return {"theta": message["theta"] + (0.5, 0.2)[i]}

    play(server, (0, 1), 1, answer, sequential)
    close(server.theta, torch.tensor([[1.5], [1.2]]))
    close(server.A, matrix(*A1))
    play(server, (0, 1), 2, answer, sequential)
    close(server.theta[:, 0], torch.tensor(theta2))
    close(server.A, matrix(*A2))


def test_official_preset_sets_the_authors_switches():
    asked = config.experiment("fedapa", {"preset": "official"})
    assert {name: getattr(asked.method, name) for name in OFFICIAL} == OFFICIAL
    run = asked.run
    assert (run.order, run.drop_last, run.min_train, run.min_test) == ("sequential", "true", 129, 3)
    asked = config.experiment("fedapa", {"preset": "official", "self_weight": 0.5})
    assert asdict(asked.method) == asdict(
        fedapa.Config(preset="official", **{**OFFICIAL, "self_weight": 0.5})
    )


@pytest.mark.parametrize(
    ("row_isolated", "expected"),
    [
        # one gradient of 0.5 in A_12: 0.05; afterwards only client 2 takes part, with delta = 0:
        # + 0.1 * 0.45 = 0.095, + 0.1 * 0.405 = 0.1355, + 0.1 * 0.3645 = 0.17195
        (False, (0.05, 0.095, 0.1355, 0.17195)),
        (True, (0.05, 0.05, 0.05, 0.05)),
    ],
)
def test_momentum_moves_rows_of_clients_that_do_not_take_part(row_isolated, expected):
    server = make_server([[1, 0], [0, 1]], eta=0.1, **{**OFFICIAL, "row_isolated": row_isolated})
    upload(server, {0: [1, 0.5]})  # delta = (0, 0.5): g = (0, 0.5)
    seen = [server.A[0, 1].item()]
    for t in (2, 3, 4):
        (_, message), *_ = server.download([1], t)
        upload(server, {1: message["theta"]}, t)
        seen.append(server.A[0, 1].item())
    assert seen == pytest.approx(expected, abs=1e-12)


def test_momentum_of_a_client_that_takes_part_twice():
    # theta = (0), (1); uploads theta_bar + 1 twice: g_12 = 1 each time. Momentum 0.5:
    # A_12 = 0.1 -> 0.5 : 0.1, normalised (5/6, 1/6); then momentum 1.5: 1/6 + 0.15 = 0.316667
    # -> (0.5, 0.316667) / 0.816667 = (0.612245, 0.387755)
    server = make_server([[0], [1]], eta=0.1, server_momentum=0.5)
    upload(server, {0: [1]})
    server.theta[0] = 0  # so that the second step is as easy as the first
    upload(server, {0: [1 / 6 + 1]}, 2)
    close(server.A[0], torch.tensor([0.612245, 0.387755], dtype=torch.float64), atol=1e-6, rtol=0)


# -- what the gradient is ------------------------------------------------------------------------


def test_gradient_lowers_the_distance_and_the_printed_sign_raises_it():
    draw = torch.Generator().manual_seed(1)
    theta, new = torch.randn(3, 20, generator=draw), torch.randn(20, generator=draw)

    def half_squared_distance(row):
        return 0.5 * (new.double() - row @ theta.double()).square().sum().item()

    # uniform rows and s = 1/3 are a fixed point of self weight and normalisation, and before_mix
    # stores A as the step left it: what is seen is the bare step
    switches = {"eta": 1e-4, "initial_A": "uniform", "self_weight": 1 / 3}
    for gradient, sign in (("descent", -1), ("printed", 1)):
        server = make_server(theta, gradient=gradient, postprocess="before_mix", **switches)
        before = half_squared_distance(server.A[0])
        upload(server, {0: new})
        after = half_squared_distance(server.A[0])
        assert sign * (after - before) > 0
        # to first order by eta * ||gradient||^2
        delta = new.double() - theta.double().mean(dim=0)
        assert sign * (after - before) == pytest.approx(
            1e-4 * (theta.double() @ delta).square().sum().item(), rel=0.05
        )


def step_of_A(theta, delta, **switches):
    """The change of A by one step of all clients, before any postprocessing."""
    M = len(theta)
    eta = 2.0**-20  # exact to divide by
    switches |= {"initial_A": "uniform", "self_weight": 1 / M, "postprocess": "before_mix"}
    server = make_server(theta, eta=eta, **switches)
    sent = dict(server.download(range(M), 1))
    server.aggregate(sent, {i: {"theta": sent[i]["theta"] + delta[i]} for i in sent}, 1)
    return (server.A - 1 / M) / eta


def test_centred_gradient_is_the_projection_that_a_common_vector_cannot_change():
    # integers, so that float32 holds every sum exactly (the mean of four is a multiple of 1/4)
    draw = torch.Generator().manual_seed(2)
    theta = torch.randint(-8, 9, (4, 6), generator=draw).float()
    delta = torch.randint(-8, 9, (4, 6), generator=draw).float()
    common = torch.randint(-64, 65, (6,), generator=draw).float()
    tolerance = {"atol": 1e-7, "rtol": 0}

    step = step_of_A(theta, delta, gradient="centred")
    close(step.sum(dim=1), torch.zeros(4, dtype=torch.float64), **tolerance)
    plain = step_of_A(theta, delta, gradient="descent")
    close(step, plain - plain.mean(dim=1, keepdim=True), **tolerance)
    close(step, delta.double() @ (theta - theta.mean(dim=0)).double().T, **tolerance)
    close(step_of_A(theta + common, delta, gradient="centred"), step, **tolerance)
    # the paper's gradient moves, all entries of a row together
    moved = step_of_A(theta + common, delta, gradient="descent") - plain
    close(moved, (delta @ common).double()[:, None].expand(4, 4), **tolerance)
    assert moved.abs().min() > 1


def test_inner_products_do_not_depend_on_the_blocks(monkeypatch):
    draw = torch.Generator().manual_seed(3)
    theta = torch.randint(-8, 9, (4, 8), generator=draw).float()
    delta = torch.randint(-8, 9, (4, 8), generator=draw).float()
    whole = step_of_A(theta, delta)
    close(whole, (delta @ theta.T).double(), atol=1e-8, rtol=0)
    monkeypatch.setattr(geometry, "COLUMNS", 3)  # blocks of 3, 3 and 2
    assert torch.equal(step_of_A(theta, delta), whole)


@pytest.mark.parametrize(
    ("theta", "sent", "new", "g"),
    [
        ((4096, 1), (0, 0), (4096, 1), 2**24 + 1),  # products and their sum
        ((1, 0), (-1, 0), (2**24 + 2, 0), 2**24 + 3),  # delta
    ],
)
def test_gradient_is_float64(theta, sent, new, g):
    # no float32 is 2^24 + 1 or 2^24 + 3
    server = make_server([theta, (0, 0)], eta=2.0**-26)
    messages = [{1: {"theta": torch.tensor(values).float()}} for values in (sent, new)]
    server.aggregate(*messages, 1)
    weight = g / 2**26
    assert server.A[1, 0].item() == weight / (weight + 0.5)


def test_buffers_and_counters_stay_out_of_the_gradient():
    def steps(statistics):
        server, clients = make_parties("fedapa", architecture=batchnorm_model)
        sent = dict(server.download([0, 1, 2], 1))
        uploads = {}
        for i, client in clients.items():
            client.receive(sent[i])
            client.train(1)
            uploads[i] = client.upload()
            uploads[i]["theta_buffers"].mul_(statistics)
        server.aggregate(sent, uploads, 1)
        return server

    usual, huge = steps(1), steps(1e6)
    assert not torch.equal(usual.A, torch.eye(3, dtype=torch.float64))
    assert torch.equal(usual.A, huge.A)
    assert torch.equal(usual.theta, huge.theta)
    assert not torch.equal(usual.theta_buffers, huge.theta_buffers)


# -- what must hold for any numbers ------------------------------------------------------------


numbers = st.floats(-4, 4, width=32)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_rows_of_A_are_weights(data):
    M, P = data.draw(st.integers(1, 4)), 3
    vectors = st.lists(numbers, min_size=P, max_size=P)
    momentum = data.draw(st.sampled_from([0.0, 0.9]))
    server = make_server(
        data.draw(st.lists(vectors, min_size=M, max_size=M)),
        eta=data.draw(st.sampled_from([0, 0.01, 1, 1000])),
        gradient=data.draw(st.sampled_from(["descent", "printed", "centred"])),
        self_weight=data.draw(st.floats(0.01, 1)),
        server_momentum=momentum,
        row_isolated=not momentum or data.draw(st.booleans()),
        initial_A=data.draw(st.sampled_from(["identity", "uniform"])),
    )
    for t in (1, 2, 3):
        ids = data.draw(st.sets(st.integers(0, M - 1)))
        upload(server, {i: data.draw(vectors) for i in ids}, t)
        assert (server.A >= 0).all()
        close(server.A.sum(dim=1), torch.ones(M, dtype=torch.float64), atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    "switches",
    [{}, {"self_weight": 1.0}, {"gradient": "centred"}, OFFICIAL],
    ids=["default", "s=1", "centred", "official"],
)
def test_without_steps_A_stays_the_identity_and_mixtures_are_ones_own(switches):
    draw = torch.Generator().manual_seed(4)
    server = make_server(torch.randn(5, 1000, generator=draw), eta=0.0, **switches)
    for t, ids in enumerate(([0, 1, 2, 3, 4], [1, 4], [0, 2, 3]), start=1):
        sent = upload(server, {i: torch.randn(1000, generator=draw) for i in ids}, t)
        assert sorted(sent) == ids
    assert torch.equal(server.A, torch.eye(5, dtype=torch.float64))
    for i, message in server.download(range(5), 4):
        assert torch.equal(message["theta"], server.theta[i])


@pytest.mark.parametrize("switches", [{}, {"gradient": "centred"}, OFFICIAL])
def test_a_single_client_gets_back_what_it_sent(switches):
    server = make_server([[3.0, -7.5]], eta=10.0, **switches)
    upload(server, {0: [1.25, 100.0]})
    ((_, message),) = server.download([0], 2)
    assert message["theta"].tolist() == [1.25, 100.0]


def test_equal_extractors_and_updates_give_equal_weights():
    server = make_server(torch.full((4, 3), 0.5), eta=0.1)
    upload(server, {i: [0.75, 0.5, 1.0] for i in range(4)})
    # delta = (0.25, 0, 0.5), g = 0.375 everywhere: 0.0375 beside 0.5
    weights = torch.full((4, 4), 0.0375, dtype=torch.float64).fill_diagonal_(0.5)
    close(server.A, weights / weights.sum(dim=1, keepdim=True), atol=1e-9, rtol=0)


def test_renaming_the_clients_renames_the_weights():
    draw = torch.Generator().manual_seed(5)
    theta, new = torch.randn(4, 9, generator=draw), torch.randn(4, 9, generator=draw)
    names = [2, 0, 3, 1]
    A = []
    for order in (range(4), names):
        server = make_server(theta[list(order)], eta=0.05)
        for t in (1, 2):
            upload(server, {k: new[i] * t for k, i in enumerate(order)}, t)
        A.append(server.A)
    close(A[1], A[0][names][:, names], atol=1e-6, rtol=0)
    assert A[0].min() < 0.01 < A[0].fill_diagonal_(0).max()  # something was learned


# -- clients that do not train, or do not answer -----------------------------------------------


def test_an_untrained_client_moves_its_row_by_postprocessing_only():
    # 1000 parameters and mixtures of all, so that a recomputed theta_bar would differ in bits
    draw = torch.Generator().manual_seed(6)
    server = make_server(torch.randn(5, 1000, generator=draw), eta=1e6)
    server.A.copy_(torch.rand(5, 5, generator=draw, dtype=torch.float64))
    server.A /= server.A.sum(dim=1, keepdim=True)
    before = server.A.clone()
    sent = dict(server.download([1, 3, 4], 1))
    server.aggregate(sent, {3: {"theta": sent[3]["theta"].clone()}}, 1)
    row = before[3].clone()
    row[3] = 0.5
    assert torch.equal(server.A[3], row / row.sum())
    assert torch.equal(server.A[[0, 1, 2, 4]], before[[0, 1, 2, 4]])


@pytest.mark.parametrize("switches", [{}, OFFICIAL], ids=["default", "official"])
def test_a_round_without_uploads_changes_nothing(switches):
    server = make_server([[1, 0], [0, 1]], eta=0.1, **switches)
    upload(server, {0: [1, 0.5]})
    before = copy_of(server.state_dict())
    server.aggregate(dict(server.download([0, 1], 2)), {}, 2)
    assert same(server.state_dict(), before)


def test_who_does_not_answer_keeps_row_and_extractor():
    server = make_server([[1, 0], [0, 1]], eta=0.1)
    sent = dict(server.download([0, 1], 1))
    server.aggregate(sent, {1: {"theta": torch.tensor([0.5, 1.0])}}, 1)
    assert server.A[0].tolist() == [1, 0]
    assert server.theta.tolist() == [[1, 0], [0.5, 1]]
    # delta_2 = (0.5, 0), g_2 = (0.5, 0): (0.05, 0.5) / 0.55
    close(server.A[1], torch.tensor([0.090909, 0.909091], dtype=torch.float64))
    assert server.joined.tolist() == [False, True]


# -- switches ------------------------------------------------------------------------------------


def test_uniform_start_mixes_everything_equally():
    server = make_server([[1, 2], [3, 6], [8, 1]], initial_A="uniform")
    assert torch.equal(server.A, torch.full((3, 3), 1 / 3, dtype=torch.float64))
    for _, message in server.download([0, 2], 1):
        close(message["theta"], torch.tensor([4.0, 3.0]))


@pytest.mark.parametrize("postprocess", ["after_update", "before_mix"])
def test_without_adaptation_A_never_moves(postprocess):
    server = make_server(
        [[1, 2], [3, 6]], initial_A="uniform", adapt=False, postprocess=postprocess, eta=1.0
    )
    for t in (1, 2):
        upload(server, {0: [5, t], 1: [t, 5]}, t)
    assert torch.equal(server.A, torch.full((2, 2), 0.5, dtype=torch.float64))
    for _, message in server.download([0, 1], 3):  # thetas (5, 2) and (2, 5)
        assert message["theta"].tolist() == [3.5, 3.5]


def test_before_mix_sends_normalised_rows_and_stores_the_clipped_ones():
    server = make_server([[1, 0], [0, 1]], eta=0.1, postprocess="before_mix")
    upload(server, {0: [1, 0.5]})
    assert server.A[0].tolist() == [1, 0.05]  # not divided by its sum
    ((_, message),) = server.download([0], 2)
    # self weight 0.5: (0.5, 0.05) / 0.55
    close(message["theta"], torch.tensor([0.909091, 0.545455]))
    assert server.A[0].tolist() == [1, 0.05]  # a download changes nothing


@pytest.mark.parametrize(("share", "P"), [("extractor", 25), ("model", 43)])
def test_what_travels(share, P):
    server, clients = make_parties("fedapa", fedapa.Config(share=share))
    head = clients[0].model.head.weight.detach().clone()
    ((_, message),) = server.download([0], 1)
    assert {name: list(tensor.shape) for name, tensor in message.items()} == {"theta": [P]}
    message["theta"].fill_(7)
    clients[0].receive(message)
    assert (clients[0].model.extractor[0].weight == 7).all()
    assert (clients[0].model.head.weight == (7 if share == "model" else head)).all()
    sent = clients[0].upload()
    assert sent.keys() == {"theta"}
    assert torch.equal(sent["theta"], message["theta"])


def test_A_mixes_batch_statistics_and_counters_stay():
    config = fedapa.Config(adapt=False, initial_A="uniform")
    server, clients = make_parties("fedapa", config, architecture=batchnorm_model)
    train_round(server, clients, [0, 1], 1)
    statistics = torch.stack([clients[i].upload()["theta_buffers"] for i in (0, 1)])
    assert torch.equal(server.theta_buffers[:2], statistics)
    ((_, message),) = server.download([2], 2)
    assert message["theta_buffers"].shape == (10,)  # five means and five variances
    close(message["theta_buffers"], server.theta_buffers.mean(dim=0))
    batchnorm = clients[2].model.extractor[1]
    assert batchnorm.num_batches_tracked.item() == 0
    clients[2].receive(message)
    assert batchnorm.num_batches_tracked.dtype == torch.int64
    assert batchnorm.num_batches_tracked.item() == 0
    assert torch.equal(batchnorm.running_mean, message["theta_buffers"][:5])
    assert clients[0].model.extractor[1].num_batches_tracked.item() == 3  # 12 samples, B = 4


def test_a_newcomer_gets_the_mean_of_those_who_have_joined():
    server = make_server([[1, 2], [3, 6], [100, 100]])
    assert server.newcomer()["theta"].tolist() == pytest.approx([104 / 3, 36])  # nobody has: all
    upload(server, {0: [5, 0], 1: [7, 2]})
    assert server.newcomer()["theta"].tolist() == [6, 1]


def test_weights_are_A():
    server = make_server([[1], [1]])
    assert server.weights() is server.A


# -- configuration -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("switches", "message"),
    [
        ({"eta": -0.1}, r"eta is -0.1, expected a number in \[0, inf\)"),
        ({"eta": float("inf")}, r"eta is inf"),
        ({"eta": float("nan")}, r"eta is nan"),
        ({"self_weight": 0.0}, r"self_weight is 0.0, expected a number in \(0, 1\]"),
        ({"self_weight": 1.5}, r"self_weight is 1.5"),
        ({"server_momentum": 1.0}, r"server_momentum is 1.0, expected a number in \[0, 1\)"),
        ({"server_momentum": -0.1}, r"server_momentum is -0.1"),
        ({"row_isolated": False}, r"row_isolated=false has no effect without server_momentum"),
    ],
)
def test_settings_that_make_no_sense(switches, message):
    with pytest.raises(ValueError, match=message):
        fedapa.Config(**switches)


@pytest.mark.parametrize(
    ("switches", "words"),
    [
        ({}, []),
        ({"gradient": "centred"}, []),
        ({"gradient": "printed"}, ["gradient=printed"]),
        ({"eta": 0.0}, ["local training"]),
        ({"eta": 0.0, "gradient": "printed"}, ["local training"]),
        ({"adapt": False}, ["local training"]),
        ({"adapt": False, "initial_A": "uniform"}, []),
        ({"preset": "official"}, []),
    ],
)
def test_notices(switches, words):
    notices = make_server([[1], [1]], **switches).notices()
    assert len(notices) == len(words)
    assert all(word in notice for word, notice in zip(words, notices))


def test_notice_that_the_official_preset_leaves_buffers_out():
    server, _ = make_parties(
        "fedapa", fedapa.Config(preset="official"), architecture=batchnorm_model
    )
    (notice,) = server.notices()
    assert "buffers stay out of the gradient" in notice
