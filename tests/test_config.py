"""The configuration's layers and checks, and who takes part when."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest

from fedapa_mpi import schedule
from fedapa_mpi.config import Experiment, RunConfig, experiment, meaningless
from fedapa_mpi.data import datasets

# -- layers ----------------------------------------------------------------------------------------


def test_general_defaults():
    run = RunConfig()
    assert (run.clients, run.rounds, run.epochs, run.batch_size) == (20, 50, 2, 64)
    assert (run.lr, run.momentum, run.client_opt, run.drop_last) == (0.01, 0.9, "persist", "auto")
    assert (run.join_low, run.join_high, run.order, run.threads) == (0.6, 1.0, "parallel", 1)
    assert (run.min_train, run.min_test, run.fraction, run.keep) == (1, 1, 1.0, 2)
    assert run.points == ("recv", "post")


def test_defaults_of_fedapa_are_the_papers():
    method = experiment("fedapa", {}).method
    assert asdict(method) == {
        "preset": "paper",
        "gradient": "descent",
        "eta": 0.01,
        "self_weight": 0.5,
        "postprocess": "after_update",
        "server_momentum": 0.0,
        "row_isolated": True,
        "share": "extractor",
        "adapt": True,
        "initial_A": "identity",
    }


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        ("digits", {"model": "mlp", "rounds": 60, "batch_size": 16, "lr": 0.05, "epochs": 2}),
        ("fmnist", {"model": "lenet5", "rounds": 50, "batch_size": 64, "lr": 0.01, "epochs": 2}),
    ],
)
def test_defaults_by_data_set(dataset, expected):
    run = experiment("fedapa", {"dataset": dataset}).run
    assert {name: getattr(run, name) for name in expected} == expected
    assert (run.partition, run.classes_per_client) == ("pathological", 2)


def test_digits_is_the_default_data_set():
    assert experiment("fedapa", {}).flat() == experiment("fedapa", {"dataset": "digits"}).flat()
    assert set(datasets.DEFAULTS) <= set(datasets.names())


def test_given_beats_stored_beats_preset_beats_data_set_beats_field():
    stored = {"preset": "official", "self_weight": 0.25, "lr": 0.2, "rounds": 7}
    asked = experiment("fedapa", {"rounds": 9, "momentum": 0.5}, stored)
    assert asked.run.rounds == 9  # given
    assert asked.run.momentum == 0.5
    assert asked.method.self_weight == 0.25  # stored, not the preset's 1
    assert asked.run.lr == 0.2  # stored, not the data set's 0.05
    assert asked.method.server_momentum == 0.9  # the preset's, not the field's 0
    assert asked.run.min_train == 129
    assert asked.run.batch_size == 16  # the data set's, not the field's 64
    assert asked.run.epochs == 2  # the field's


def test_a_stored_data_set_brings_its_defaults():
    assert experiment("local", {}, {"dataset": "fmnist"}).run.model == "lenet5"


@pytest.mark.parametrize("strategy", ["fedapa", "fedavg"])
def test_flat_and_back_through_json(strategy):
    asked = experiment(strategy, {"lr": 0.3, "grace": 5.0, "dropout": 0.5})
    stored = json.loads(json.dumps(asked.flat()))
    assert stored["strategy"] == strategy
    back = Experiment.from_flat(stored)
    assert back.run == asked.run
    assert asdict(back.method) == asdict(asked.method)
    assert experiment(strategy, {}, stored).flat() == asked.flat()


# -- checks ----------------------------------------------------------------------------------------

BAD = [
    ({"dataset": "imagenet"}, r"dataset is imagenet, expected one of cifar10, .* as FILE.h5"),
    ({"groups": 0}, r"groups is 0, expected at least 1"),
    ({"dataset": "groups", "groups": 21}, r"groups is 21, expected at most clients, which is 20"),
    ({"group_samples": 0}, r"group_samples is 0, expected at least 1"),
    ({"group_noise": 0.0}, r"group_noise is 0.0, expected a finite number above 0"),
    ({"partition": "even"}, r"partition is even, expected one of dirichlet, iid, pathological"),
    ({"model": "vit"}, r"model is vit, expected one of cnn4, lenet5, mlp, resnet18, or your own"),
    *(
        ({"model": name}, r"expected .* or your own as package.module:factory \(no file name\)")
        for name in ("nets.py:make", "./nets:make", "nets:", ":make", "a b:make", "nets:make()")
    ),
    ({"clients": 0}, r"clients is 0, expected at least 1"),
    ({"epochs": 0}, r"epochs is 0, expected at least 1"),
    ({"batch_size": 0}, r"batch_size is 0, expected at least 1"),
    ({"rounds": 0}, r"rounds is 0, expected at least 1"),
    ({"threads": 0}, r"threads is 0, expected at least 1"),
    ({"eval_every": 0}, r"eval_every is 0, expected at least 1"),
    ({"min_train": -1}, r"min_train is -1, expected at least 0"),
    ({"min_test": -1}, r"min_test is -1, expected at least 0"),
    ({"seed": -1}, r"seed is -1, expected at least 0"),
    ({"record_A_every": -1}, r"record_A_every is -1, expected at least 0"),
    ({"classes_per_client": 0}, r"classes_per_client is 0, expected at least 1"),
    ({"keep": 1}, r"keep is 1, expected at least 2"),
    ({"fraction": 0.0}, r"fraction is 0.0, expected a finite number above 0"),
    ({"fraction": 1.1}, r"fraction is 1.1, expected at most 1"),
    ({"alpha": 0.0}, r"alpha is 0.0, expected a finite number above 0"),
    ({"alpha": float("inf")}, r"alpha is inf"),
    ({"lr": 0.0}, r"lr is 0.0, expected a finite number above 0"),
    ({"lr": float("nan")}, r"lr is nan"),
    ({"momentum": 1.0}, r"momentum is 1.0, expected in \[0, 1\)"),
    ({"momentum": float("nan")}, r"momentum is nan"),
    ({"dropout": 1.1}, r"dropout is 1.1, expected a probability"),
    ({"dropout": -0.1}, r"dropout is -0.1"),
    ({"join_low": -0.1}, r"join_low is -0.1, expected a share of the clients in \[0, 1\]"),
    ({"join_high": 1.5}, r"join_high is 1.5, expected a share"),
    ({"join_low": 0.5, "join_high": 0.4}, r"join_low is 0.5, expected at most join_high.* 0.4"),
    ({"grace": 0.0}, r"grace is 0.0, expected seconds above 0"),
    ({"watchdog": -1.0}, r"watchdog is -1.0, expected seconds above 0"),
    ({"device": "gpu"}, r"device is gpu, expected auto or cpu or cuda or cuda:N"),
    ({"device": "cuda:x"}, r"device is cuda:x"),
    ({"server_device": "auto"}, r"server_device is auto, expected cpu or cuda or cuda:N"),
    ({"eval_points": ""}, r"eval_points is , expected recv, post or recv,post"),
    ({"eval_points": "recv,agg"}, r"eval_points is recv,agg"),
    ({"eval_points": "post,post"}, r"eval_points is post,post"),
    ({"checkpoint_every": "0"}, r"checkpoint_every is 0, expected auto or a number of rounds"),
    ({"checkpoint_every": "-1"}, r"checkpoint_every is -1"),
    ({"checkpoint_every": "often"}, r"checkpoint_every is often"),
    ({"max_time": "soon"}, r"duration is 'soon', expected seconds"),
]


@pytest.mark.parametrize(("changes", "message"), BAD, ids=lambda v: str(v) * isinstance(v, dict))
def test_values_that_make_no_sense(changes, message):
    with pytest.raises(ValueError, match=message):
        RunConfig(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"join_low": 0.0, "join_high": 0.0},
        {"dropout": 1.0},
        {"momentum": 0.0},
        {"min_train": 0, "min_test": 0},
        {"device": "cuda:3", "server_device": "cuda"},
        {"checkpoint_every": "10", "max_time": "1-12:00:00"},
        {"record_A_every": 0},
    ],
)
def test_values_at_the_edge(changes):
    assert asdict(RunConfig(**changes)).items() >= changes.items()


@pytest.mark.parametrize(
    ("text", "points"),
    [("recv,post", ("recv", "post")), ("post,recv", ("recv", "post")), ("post", ("post",))],
)
def test_evaluation_points_in_the_order_of_a_round(text, points):
    assert RunConfig(eval_points=text).points == points


def test_an_order_that_the_strategy_does_not_know():
    with pytest.raises(ValueError, match=r"order is sequential, but fedavg knows only parallel"):
        experiment("fedavg", {"order": "sequential"})
    assert experiment("fedapa", {"order": "sequential"}).run.order == "sequential"


@pytest.mark.parametrize(
    ("given", "flag"),
    [
        ({"alpha": 0.5}, "alpha"),
        ({"partition": "dirichlet", "classes_per_client": 3}, "classes_per_client"),
        ({"partition": "iid", "assignment": "random"}, "assignment"),
        ({"data_dir": "x"}, "data_dir"),
        ({"adapt": False, "eta": 0.1}, "eta"),
        ({"adapt": False, "gradient": "centred"}, "gradient"),
        ({"adapt": False, "self_weight": 1.0}, "self_weight"),
        ({"adapt": False, "server_momentum": 0.5}, "server_momentum"),
        ({"adapt": False, "postprocess": "before_mix"}, "postprocess"),
    ],
)
def test_flags_without_effect_are_named(given, flag):
    (complaint,) = meaningless(experiment("fedapa", given), given)
    assert complaint.startswith(f"{flag} has no effect with ")


@pytest.mark.parametrize(
    "given",
    [
        {"partition": "dirichlet", "alpha": 0.5},
        {"dataset": "fmnist", "data_dir": "x"},
        {"assignment": "random", "classes_per_client": 3},
        {"eta": 0.0, "gradient": "centred"},
    ],
)
def test_flags_with_effect_are_not(given):
    assert meaningless(experiment("fedapa", given), given) == []
    # and a value that nobody gave is no wish
    assert meaningless(experiment("fedapa", {"adapt": False}), {"adapt"}) == []


def test_what_a_resumed_run_may_change():
    fields = set(asdict(RunConfig()))
    assert fields >= RunConfig.MAY_CHANGE
    needed = {"rounds", "out", "max_time", "grace", "watchdog", "checkpoint_every", "keep"}
    assert needed <= RunConfig.MAY_CHANGE
    assert not RunConfig.MAY_CHANGE & {"seed", "threads", "lr", "clients", "device", "dropout"}


# -- schedule --------------------------------------------------------------------------------------


def draws(rounds=300, **changes):
    run = RunConfig(**changes)
    return [schedule.sampled(run, t) for t in range(1, rounds + 1)]


def test_between_60_and_100_percent_take_part():
    everybody = draws(clients=20)
    counts = [len(clients) for clients in everybody]
    assert set(counts) == set(range(12, 21))
    assert np.mean(counts) == pytest.approx(16, abs=0.5)
    assert all(len(set(clients)) == len(clients) for clients in everybody)
    assert {i for clients in everybody for i in clients} == set(range(20))


def test_each_client_is_as_likely_as_any_other():
    counts = np.bincount(sum(draws(2000, clients=10, join_high=0.6), ()), minlength=10)
    # 1200 expected of each, standard deviation sqrt(2000 * 0.6 * 0.4) = 22
    assert abs(counts - 1200).max() < 110


def test_the_order_drawn_is_not_sorted():
    clients = draws(1, clients=20, join_low=1.0)[0]
    assert sorted(clients) == list(range(20))
    assert list(clients) != sorted(clients)


@pytest.mark.parametrize(
    ("low", "high", "M", "counts"),
    [
        (0.5, 0.5, 20, {10}),  # equal: a fixed number
        (1.0, 1.0, 7, {7}),
        (0.29, 0.29, 100, {29}),  # 0.29 * 100 is 28.999999999999996
        (0.58, 0.58, 50, {29}),  # 28.999999999999996 again
        (0.0, 0.0, 20, {1}),  # nobody would be no round
        (0.01, 0.1, 20, {1, 2}),
        (0.6, 1.0, 1, {1}),  # the floor is 0
        (0.99, 0.99, 100, {99}),
        (0.599, 0.599, 10, {5}),  # and it is a floor
    ],
)
def test_how_many_take_part(low, high, M, counts):
    found = {len(c) for c in draws(60, clients=M, join_low=low, join_high=high)}
    assert found == counts


def test_expected_share_of_a_round():
    # K uniform in 12..20 of 20, so 16 on average; in 1..1 of 20 where the floor is 0
    assert schedule.participation(RunConfig(clients=20)) == 0.8
    assert schedule.participation(RunConfig(clients=20, join_low=0.0, join_high=0.0)) == 0.05
    run = RunConfig(clients=7, join_low=0.3, join_high=0.9)
    mean = np.mean([len(schedule.sampled(run, t)) for t in range(1, 1001)]) / 7
    assert schedule.participation(run) == pytest.approx(mean, abs=0.03)


def test_the_sample_depends_on_seed_and_round_only():
    run = RunConfig(clients=20)
    assert schedule.sampled(run, 3) == schedule.sampled(run, 3)
    assert schedule.sampled(run, 3) != schedule.sampled(run, 4)
    assert schedule.sampled(run, 3) != schedule.sampled(replace(run, seed=1), 3)
    other = replace(run, lr=0.5, dropout=0.5, model="mlp", rounds=7, order="sequential")
    assert schedule.sampled(run, 3) == schedule.sampled(other, 3)
    by_strategy = {
        schedule.sampled(experiment(name, {}).run, 3) for name in ("fedapa", "fedavg", "local")
    }
    assert len(by_strategy) == 1


def test_the_sample_stays_what_it_is():
    # a change would silently break the resuming of every stored run
    assert schedule.sampled(RunConfig(clients=5, join_low=1.0), 1) == (0, 4, 3, 1, 2)
    assert sorted(schedule.dropped(RunConfig(dropout=0.3), 1)) == [1, 3, 4, 6, 7, 8, 13, 14, 19]


def test_dropout():
    assert schedule.dropped(RunConfig(), 1) == frozenset()
    assert schedule.dropped(RunConfig(dropout=1.0), 1) == set(range(20))
    run = RunConfig(dropout=0.3)
    lost = [schedule.dropped(run, t) for t in range(1, 201)]
    # 0.3 * 20 * 200 = 1200 expected, standard deviation sqrt(4000 * 0.21) = 29
    assert abs(sum(map(len, lost)) - 1200) < 150
    assert lost[0] == schedule.dropped(run, 1)
    assert len(set(lost)) > 150
    assert lost[0] != schedule.dropped(replace(run, seed=1), 1)


def test_dropout_and_sampling_are_independent_streams():
    run = RunConfig(dropout=0.5, join_low=0.5, join_high=0.5)
    both = sum(len(schedule.dropped(run, t) & set(schedule.sampled(run, t))) for t in range(1, 301))
    # 300 * 20 * 0.25 = 1500 expected
    assert abs(both - 1500) < 150


@pytest.mark.parametrize(
    ("every", "rounds", "expected"), [(1, 3, [1, 2, 3]), (3, 7, [3, 6, 7]), (9, 4, [4])]
)
def test_evaluation_rounds(every, rounds, expected):
    run = RunConfig(eval_every=every, rounds=rounds)
    assert [t for t in range(1, rounds + 1) if schedule.evaluated(run, t)] == expected
