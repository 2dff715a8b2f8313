"""The scoreboard: which score a client counts with in a round that it did not take part in."""

import numpy as np
import pytest
import torch
from tiny import shard, simulate, tiny_shards

from fedapa_mpi.comm.orders import Action, Order
from fedapa_mpi.scores import Scoreboard
from fedapa_mpi.store.state import copy_of

NAN = [float("nan")] * 3
BOTH = ("recv", "post")


def score(value):
    return [float(value), 10.0, 1.0]


def report(**columns):
    """A round's report, one way of answering: for each column {client: score}; NaN elsewhere."""
    ids = sorted({i for table in columns.values() for i in table})
    message = {"client": torch.tensor(ids, dtype=torch.int64)}
    for column in (*BOTH, "held"):
        rows = [columns.get(column, {}).get(i, NAN) for i in ids]
        message[column] = torch.tensor(rows, dtype=torch.float64).reshape(-1, 1, 3)
    return message


def enter(board, clients, points=BOTH, t=1, dropped=(), delivered=(), **columns):
    """Enters a round in which the clients of ``held`` are measured; gives the correct answers."""
    held = tuple(columns.get("held", ()))
    order = Order(Action.ROUND, t, tuple(clients), frozenset(dropped), points, held, delivered)
    entered = board.enter(order, report(**columns))
    return {point: entered[point][:, 0, 0].tolist() for point in BOTH}


def same_numbers(found, expected):
    assert np.array_equal(np.array(found), np.array(expected), equal_nan=True)


def test_a_sampled_client_counts_with_its_own_scores():
    board = Scoreboard(2)
    found = enter(board, [1, 0], recv={0: score(1), 1: score(2)}, post={0: score(3), 1: score(4)})
    assert found == {"recv": [1, 2], "post": [3, 4]}
    assert board.known.tolist() == [True, True]


def test_an_unsampled_client_counts_with_the_model_it_holds():
    board = Scoreboard(3)
    # nobody knows yet how the initial model does: 1 and 2 have to be measured
    assert board.unknown([1, 2]) == (1, 2)
    found = enter(
        board,
        [0],
        recv={0: score(1)},
        post={0: score(5)},
        held={1: score(7), 2: score(8)},
    )
    assert found == {"recv": [1, 7, 8], "post": [5, 7, 8]}
    # in the next round 1 takes part; the models of 0 and 2 are as they were
    assert board.unknown([0, 2]) == ()
    found = enter(board, [1], t=2, recv={1: score(6)}, post={1: score(9)})
    assert found == {"recv": [5, 6, 8], "post": [5, 9, 8]}


def test_a_client_trained_in_a_round_without_evaluation_is_measured_later():
    board = Scoreboard(2)
    enter(board, [0, 1], recv={0: score(1), 1: score(1)}, post={0: score(2), 1: score(3)})
    found = enter(board, [0], points=(), t=2, recv={0: NAN})  # trains, no score
    for point in BOTH:
        same_numbers(found[point], [np.nan, np.nan])
    assert board.unknown([0, 1]) == (0,)
    found = enter(board, [1], t=3, recv={1: score(4)}, post={1: score(5)}, held={0: score(9)})
    assert found == {"recv": [9, 4], "post": [9, 5]}


@pytest.mark.parametrize(
    ("points", "after_training", "unknown"),
    [(("post",), 5, ()), (("recv",), np.nan, (0,))],
)
def test_evaluation_at_one_point(points, after_training, unknown):
    board = Scoreboard(2)
    column = {points[0]: {0: score(5)}}
    found = enter(board, [0], points=points, held={1: score(7)}, **column)
    same_numbers(found[points[0]], [5, 7])
    (other,) = set(BOTH) - set(points)
    same_numbers(found[other], [np.nan, np.nan])
    # the model that client 0 holds is the trained one: recv says nothing about it
    assert board.unknown([0, 1]) == unknown
    same_numbers(board.held[0, 0, 0].item(), after_training)


def test_a_dropped_client_counts_as_unsampled():
    board = Scoreboard(2)
    found = enter(
        board, [0, 1], dropped=[1], recv={0: score(1)}, post={0: score(2)}, held={1: score(7)}
    )
    assert found == {"recv": [1, 7], "post": [2, 7]}
    assert board.unknown([1]) == ()


def test_broadcast_scores_both_points_with_the_delivery_and_holds_nothing():
    board = Scoreboard(3)
    found = enter(
        board,
        [0],
        delivered=(1, 2),
        recv={0: score(1), 1: score(3), 2: score(4)},
        post={0: score(2)},
    )
    assert found == {"recv": [1, 3, 4], "post": [2, 3, 4]}
    assert board.unknown([0, 1, 2]) == (1, 2)  # what was delivered has been taken away again


def test_a_client_without_test_samples_is_not_measured_again():
    board = Scoreboard(2)
    found = enter(board, [0], recv={0: score(1)}, post={0: score(2)}, held={1: NAN})
    same_numbers(found["post"], [2, np.nan])
    assert board.unknown([1]) == ()


def test_scores_that_were_given_out_do_not_change_later():
    board = Scoreboard(2)
    order = Order(Action.ROUND, 1, (0,), points=BOTH, held=(1,))
    first = board.enter(order, report(recv={0: score(1)}, post={0: score(2)}, held={1: score(3)}))
    kept = {point: tensor.clone() for point, tensor in first.items()}
    enter(board, [0, 1], t=2, recv={0: NAN, 1: NAN}, post={0: score(8), 1: score(9)})
    assert all(torch.equal(first[point], kept[point]) for point in BOTH)


def test_it_goes_on_from_its_state():
    board, other = Scoreboard(2), Scoreboard(2)
    enter(board, [0], recv={0: score(1)}, post={0: score(2)}, held={1: score(3)})
    other.load_state_dict(copy_of(board.state_dict()))
    found = [enter(b, [1], t=2, recv={1: score(4)}, post={1: score(5)}) for b in (board, other)]
    assert found[0] == found[1] == {"recv": [2, 4], "post": [2, 5]}


# -- in whole runs ---------------------------------------------------------------------------------

FLAGS = ["--rounds", "5", "--batch_size", "4", "--join_low", "0.5", "--join_high", "0.5"]


def accuracies(run):
    rows = run.rows()
    return [rows[f"accuracy/{point}/client"] for point in BOTH], rows["answered"]


def test_stale_clients_keep_their_accuracy_until_they_train(tmp_path):
    (recv, post), answered = accuracies(simulate(tmp_path / "run", ["fedavg", *FLAGS]))
    assert not np.isnan(post).any()  # never-sampled clients count too
    for r in range(1, 5):
        idle = ~answered[r]
        assert idle.any()
        assert np.array_equal(post[r, idle], post[r - 1, idle])
        assert np.array_equal(recv[r, idle], post[r - 1, idle])


def test_broadcast_clients_count_with_the_global_model(tmp_path):
    run = simulate(tmp_path / "run", ["fedavg", *FLAGS, "--unsampled", "broadcast"])
    (recv, post), answered = accuracies(run)
    assert np.array_equal(recv[~answered], post[~answered])
    stale = simulate(tmp_path / "stale", ["fedavg", *FLAGS])
    for i, state in run.clients().items():  # it is only a way of looking
        assert all(torch.equal(state[name], stale.clients()[i][name]) for name in state)
    (expected, _), _ = accuracies(stale)
    assert np.array_equal(recv[answered], expected[answered])
    rows = run.rows()
    assert not rows["bytes/down"][~rows["sampled"]].any()  # nor is it traffic


def test_rounds_between_evaluations(tmp_path):
    every = simulate(tmp_path / "every", ["fedapa", *FLAGS])
    third = simulate(tmp_path / "third", ["fedapa", *FLAGS, "--eval_every", "3"])
    for full, sparse in zip(accuracies(every)[0], accuracies(third)[0]):
        assert np.isnan(sparse[[0, 1, 3]]).all()
        assert np.array_equal(sparse[[2, 4]], full[[2, 4]])


def test_dropped_clients_neither_train_nor_lose_their_accuracy(tmp_path):
    run = simulate(tmp_path / "run", ["fedapa", *FLAGS, "--dropout", "0.5", "--seed", "1"])
    rows = run.rows()
    lost = rows["sampled"] & ~rows["answered"]
    assert lost.any()
    assert np.isnan(rows["loss"][lost]).all()
    assert not rows["bytes/up"][lost].any()
    assert rows["bytes/down"][lost].all()
    assert (rows["trained_by/rank"][lost] == -1).all()
    assert not np.isnan(rows["accuracy/post/client"]).any()


def test_everybody_may_be_dropped(tmp_path):
    run = simulate(tmp_path / "run", ["fedapa", *FLAGS, "--dropout", "1"])
    rows = run.rows()
    assert not rows["answered"].any()
    assert torch.equal(run.server()["A"], torch.eye(4, dtype=torch.float64))
    assert not np.isnan(rows["accuracy/post/macro"]).any()


def test_clients_without_test_or_training_data(tmp_path):
    shards = [*tiny_shards(2), shard(12, 0, seed=5), shard(0, 6, seed=6), shard(1, 1, seed=7)]
    run = simulate(
        tmp_path / "run",
        ["fedapa", "--rounds", "2", "--batch_size", "4", "--join_low", "1"],
        shards,
    )
    rows = run.rows()
    assert (
        np.isnan(rows["accuracy/post/client"]).tolist() == [[False] * 2 + [True] + [False] * 2] * 2
    )
    assert np.isnan(rows["loss"]).tolist() == [[False] * 3 + [True] + [False]] * 2
    assert not np.isnan(rows["accuracy/post/macro"]).any()
    assert all(bool(torch.isfinite(tensor).all()) for tensor in run.server().values())


def test_each_way_of_answering_has_its_scores():
    board = Scoreboard(2, ways=2)
    rows = torch.arange(12.0, dtype=torch.float64).view(2, 2, 3)
    message = {"client": torch.tensor([0, 1]), "recv": rows, "post": rows + 20, "held": rows + 40}
    found = board.enter(Order(Action.ROUND, 1, (0,), points=BOTH, held=(1,)), message)
    assert torch.equal(found["post"], torch.stack([rows[0] + 20, rows[1] + 40]))
    assert torch.equal(found["recv"], torch.stack([rows[0], rows[1] + 40]))
