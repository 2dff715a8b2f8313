"""placement.py: clients to ranks, ranks to devices, for the machines that users have."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedapa_mpi.comm.placement import (
    Enlisted,
    assign,
    seats,
    sharing_notice,
    spans,
    table_rows,
)


def machine(ranks, gpus, node=1, first=0):
    """`ranks` ranks on one node, all of which see the same `gpus` GPUs."""
    devices = tuple(str(g) for g in range(gpus))
    return [Enlisted(first + r, node, f"node{node:02}", devices) for r in range(ranks)]


def one_each(ranks):
    return [[i] for i in range(ranks - 1)]


def devices(result):
    return [seat.device for seat in result]


def test_longest_client_first_to_the_least_loaded_rank():
    # By hand: 9 -> rank 0, 7 -> 1, 6 -> 2, 5 -> 2 (11), 4 -> 1 (11), 1 -> 0 (10)
    assert assign([9, 1, 7, 5, 6, 4], 3) == [[0, 1], [2, 5], [3, 4]]


def test_the_cap_beats_the_load():
    # Alone by load, the three short ones would all go to rank 1.
    assert assign([100, 1, 1, 1], 2) == [[0, 3], [1, 2]]


def test_equal_sizes_fill_the_lower_ranks_first():
    assert assign([5, 5, 5, 5], 2) == [[0, 2], [1, 3]]
    assert assign([0, 0, 0, 0], 3) == [[0, 3], [1], [2]]


def test_more_ranks_than_clients_leave_empty_lists():
    assert assign([3, 4], 4) == [[1], [0], [], []]
    assert assign([], 2) == [[], []]


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 12))
def test_every_client_has_one_rank_and_no_rank_too_many(sizes, ranks):
    placed = assign(sizes, ranks)
    assert len(placed) == ranks
    assert sorted(i for clients in placed for i in clients) == list(range(len(sizes)))
    assert all(clients == sorted(clients) for clients in placed)
    assert max(len(clients) for clients in placed) == -(-len(sizes) // ranks)


@pytest.mark.parametrize(
    ("sizes", "ranks", "message"), [([1], 0, "ranks is 0"), ([-1], 1, "sizes")]
)
def test_impossible_assignments_are_refused(sizes, ranks, message):
    with pytest.raises(ValueError, match=message):
        assign(sizes, ranks)


def test_without_gpus_everybody_is_on_the_cpu():
    result = seats(machine(4, 0), one_each(4))
    assert devices(result) == ["cpu"] * 4
    assert [seat.role for seat in result] == ["server", "client 0", "client 1", "client 2"]
    assert [seat.physical for seat in result] == ["cpu"] * 4


@pytest.mark.parametrize("gpus", [1, 4, 8])
def test_client_ranks_go_round_the_gpus_and_the_server_takes_none(gpus):
    result = seats(machine(7, gpus), one_each(7))
    assert devices(result) == ["cpu"] + [f"cuda:{p % gpus}" for p in range(6)]


def test_a_rank_narrowed_to_one_gpu_uses_that_one():
    enlisted = [Enlisted(r, 1, "node01", (f"GPU-{r}",)) for r in range(4)]
    result = seats(enlisted, one_each(4))
    assert devices(result) == ["cpu", "cuda:0", "cuda:0", "cuda:0"]
    assert [seat.physical for seat in result] == ["cpu", "GPU-1", "GPU-2", "GPU-3"]
    assert sharing_notice(result) is None


def test_each_node_counts_for_itself():
    enlisted = machine(3, 4, node=1) + machine(3, 2, node=2, first=3)
    result = seats(enlisted, one_each(6))
    assert devices(result) == ["cpu", "cuda:0", "cuda:1", "cuda:0", "cuda:1", "cuda:0"]


def test_nodes_are_told_apart_by_group_and_not_by_host_name():
    enlisted = [Enlisted(r, r // 2, "same", ("0",)) for r in range(4)]
    assert devices(seats(enlisted, one_each(4))) == ["cpu", "cuda:0", "cuda:0", "cuda:0"]
    notice = sharing_notice(seats(enlisted, one_each(4)))
    assert notice is not None
    assert notice.startswith("2 client ranks share 1 GPU on same:")


def test_ranks_dealt_out_to_nodes_in_turn():
    enlisted = [Enlisted(r, r % 2, f"n{r % 2}", ("0", "1")) for r in range(5)]
    assert devices(seats(enlisted, one_each(5))) == ["cpu", "cuda:0", "cuda:0", "cuda:1", "cuda:1"]


def test_order_of_enlistment_does_not_matter():
    enlisted = machine(4, 2)
    assert seats(enlisted[::-1], one_each(4)) == seats(enlisted, one_each(4))


def test_a_rank_with_several_clients_has_one_device():
    result = seats(machine(3, 4), [[0, 1, 2, 7], [3, 4]])
    assert [seat.role for seat in result[1:]] == ["clients 0-2, 7", "clients 3, 4"]
    assert [seat.clients for seat in result[1:]] == [(0, 1, 2, 7), (3, 4)]
    assert devices(result) == ["cpu", "cuda:0", "cuda:1"]


def test_idle_ranks_take_neither_a_gpu_nor_a_position():
    result = seats(machine(5, 4), [[0], [], [1], []])
    assert [seat.role for seat in result] == ["server", "client 0", "idle", "client 1", "idle"]
    assert devices(result) == ["cpu", "cuda:0", "cpu", "cuda:1", "cpu"]


@pytest.mark.parametrize(("gpus", "device"), [(0, "cpu"), (2, "cuda:0")])
def test_a_single_process_is_server_and_has_all_clients(gpus, device):
    (seat,) = seats(machine(1, gpus), [[0, 1, 2]])
    assert seat.role == "server and clients 0-2"
    assert seat.clients == (0, 1, 2)
    assert seat.device == device
    assert table_rows([seat])[0][2] == "server and clients 0-2"


def test_the_server_takes_a_gpu_when_told():
    result = seats(machine(3, 2), one_each(3), server_device="cuda:1")
    assert devices(result) == ["cuda:1", "cuda:0", "cuda:1"]
    assert sharing_notice(result) is None  # the server is no client rank


def test_cpu_can_be_forced_and_one_gpu_be_named():
    assert devices(seats(machine(3, 2), one_each(3), device="cpu")) == ["cpu"] * 3
    assert devices(seats(machine(3, 2), one_each(3), device="cuda:1")) == ["cpu"] + ["cuda:1"] * 2
    assert devices(seats(machine(4, 2), one_each(4), device="cuda"))[1:] == [
        "cuda:0",
        "cuda:1",
        "cuda:0",
    ]


@pytest.mark.parametrize(
    ("gpus", "options", "message"),
    [
        (0, {"device": "cuda"}, "rank 1 on node01 sees 0 GPUs.*CUDA_VISIBLE_DEVICES"),
        (2, {"device": "cuda:2"}, "'cuda:2', but rank 1 on node01 sees 2 GPUs"),
        (0, {"server_device": "cuda"}, "rank 0 on node01 sees 0 GPUs"),
        (2, {"device": "gpu"}, "expected auto, cpu, cuda or cuda:N"),
        (2, {"device": "cuda:"}, "expected auto"),
        (2, {"device": "cuda:-1"}, "expected auto"),
        (2, {"device": "1"}, "expected auto"),
    ],
)
def test_devices_that_cannot_be_had_are_refused(gpus, options, message):
    with pytest.raises(ValueError, match=message):
        seats(machine(3, gpus), one_each(3), **options)


def test_ranks_and_lists_must_match():
    with pytest.raises(ValueError, match="2 lists, expected 3"):
        seats(machine(4, 0), one_each(3))
    with pytest.raises(ValueError, match=r"\[1, 2\]"):
        seats(machine(2, 0, first=1), one_each(2))
    with pytest.raises(ValueError, match="expected 0, 1"):
        seats([], [])


def test_sharing_is_noticed_per_node():
    enlisted = machine(9, 4, node=1) + machine(3, 2, node=2, first=9)
    notice = sharing_notice(seats(enlisted, one_each(12)))
    assert notice is not None
    first, rest = notice.split(", ", 1)
    assert first == "8 client ranks share 4 GPUs on node01"
    assert rest.startswith("3 client ranks share 2 GPUs on node02:")


def test_many_crowded_nodes_make_one_sentence():
    enlisted = [e for n in range(6) for e in machine(3, 1, node=n, first=3 * n)]
    notice = sharing_notice(seats(enlisted, one_each(18)))
    assert notice is not None
    assert notice.count(" on node0") == 3
    assert "likewise on 3 more nodes" in notice


@pytest.mark.parametrize("gpus", [0, 3, 8])
def test_no_notice_when_nobody_shares(gpus):
    assert sharing_notice(seats(machine(4, gpus), one_each(4))) is None


def test_table_rows_say_which_gpu_where_names_differ():
    enlisted = [*machine(2, 2), Enlisted(2, 1, "node01", ("5",)), Enlisted(3, 1, "node01")]
    assert table_rows(seats(enlisted, [[0, 1, 2], [3, 4], []])) == [
        ("0", "node01", "server", "cpu"),
        ("1", "node01", "0-2", "cuda:0"),
        ("2", "node01", "3, 4", "cuda:0 (GPU 5)"),
        ("3", "node01", "idle", "cpu"),
    ]


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([], ""),
        ([4], "4"),
        ([3, 7], "3, 7"),
        ([1, 2], "1, 2"),
        ([7, 2, 0, 1, 3], "0-3, 7"),
        ([0, 1, 2, 5, 6, 7, 8, 10], "0-2, 5-8, 10"),
    ],
)
def test_spans(ids, text):
    assert spans(ids) == text
