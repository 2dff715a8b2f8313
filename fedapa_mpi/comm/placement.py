"""Which rank has which clients, and which device: pure functions, the same on every machine.

World rank 0 is the server and has no clients, unless it is the only rank. Every other rank is a
client rank and may have several clients, or none when there are more ranks than clients.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

CPU = "cpu"


@dataclass(frozen=True)
class Enlisted:
    """What a rank tells about itself before clients are placed.

    node     the shared-memory group it belongs to (host names can repeat, groups cannot)
    devices  its visible GPUs as the launcher named them, ("0", "1") or ("GPU-5c1f...",); may be ()
    """

    rank: int
    node: Hashable
    host: str
    devices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Seat:
    """What a rank does and where.

    role      "server", "clients 3, 7", "server and clients 0-19" (one process) or "idle"
    device    "cpu" or "cuda:1", as torch counts on that rank; in one process the clients' device
    physical  the same device as the launcher named it; "cpu" for the CPU
    """

    rank: int
    node: Hashable
    host: str
    role: str
    clients: tuple[int, ...]
    device: str
    physical: str


def assign(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Spread clients over client ranks: longest first, each to the least loaded rank.

    sizes: training samples of each client [M]. Returns one ascending list of clients per client
    rank (index 0 is world rank 1); no list is longer than ceil(M / ranks), so one client per rank
    when ranks allow. Equal loads: the rank with fewer clients, then the lower one.
    Raises ValueError for ranks < 1 or a negative size.
    """
    if ranks < 1:
        raise ValueError(f"ranks is {ranks}, expected at least 1 client rank: start more processes")
    if any(size < 0 for size in sizes):
        raise ValueError(f"sizes are {list(sizes)}, expected numbers of samples >= 0")
    most = -(-len(sizes) // ranks)
    placed: list[list[int]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for client in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        free = (r for r in range(ranks) if len(placed[r]) < most)
        rank = min(free, key=lambda r: (load[r], len(placed[r]), r))
        placed[rank].append(client)
        load[rank] += sizes[client]
    return [sorted(clients) for clients in placed]


def seats(
    enlisted: Sequence[Enlisted],
    clients_of_rank: Sequence[Sequence[int]],
    server_device: str = CPU,
    device: str = "auto",
) -> list[Seat]:
    """Give every rank its role and its device; one seat per rank, in rank order.

    clients_of_rank: as `assign` returns it, one list per client rank (of a single rank: its own).
    server_device, device: "auto" (a GPU if one is visible), "cpu", "cuda" (a GPU or an error) or
    "cuda:2" (that one). A client rank takes the visible device number p modulo their count, p its
    position among its node's ranks with clients; so a rank that was narrowed to one device takes
    that one. Ranks without clients stay on the CPU and take no position.
    Raises ValueError for an unknown device or one that is not visible.
    """
    ranks = sorted(enlisted, key=lambda e: e.rank)
    _check_ranks(ranks, clients_of_rank)
    if len(ranks) == 1:
        return [_seat(ranks[0], "server and ", clients_of_rank[0], device, 0)]
    result = [_seat(ranks[0], "server", (), server_device, 0)]
    taken: dict[Hashable, int] = {}  # per node: ranks with clients so far
    for e, clients in zip(ranks[1:], clients_of_rank):
        position = taken.get(e.node, 0)
        taken[e.node] = position + bool(clients)
        result.append(_seat(e, "" if clients else "idle", clients, device, position))
    return result


def sharing_notice(seats: Iterable[Seat]) -> str | None:
    """One sentence when several client ranks share a GPU, None when none do."""
    users: dict[Hashable, list[Seat]] = {}
    for seat in seats:
        if seat.clients and seat.device != CPU:
            users.setdefault(seat.node, []).append(seat)
    crowded = []
    for group in users.values():
        gpus = len({seat.physical for seat in group})
        if gpus < len(group):
            noun = "GPU" if gpus == 1 else "GPUs"
            crowded.append(f"{len(group)} client ranks share {gpus} {noun} on {group[0].host}")
    if not crowded:
        return None
    more = [f"likewise on {len(crowded) - 3} more nodes"] if len(crowded) > 3 else []
    where = ", ".join(crowded[:3] + more)
    return f"{where}: they divide its time and memory; fewer ranks per node may be as fast."


def table_rows(seats: Iterable[Seat]) -> list[tuple[str, str, str, str]]:
    """The placement as text, one row (rank, host, clients, device) per rank."""
    rows = []
    for seat in seats:
        clients = seat.role.removeprefix("clients ")
        rows.append((str(seat.rank), seat.host, clients, _device_text(seat)))
    return rows


def spans(ids: Iterable[int]) -> str:
    """Client ids for reading, ascending, runs of three or more shortened: "0-3, 7, 8"."""
    parts: list[str] = []
    # Within a run of successive numbers the difference to their position does not change.
    for _, run in groupby(enumerate(sorted(ids)), key=lambda pair: pair[1] - pair[0]):
        numbers = [str(i) for _, i in run]
        parts += [f"{numbers[0]}-{numbers[-1]}"] if len(numbers) > 2 else numbers
    return ", ".join(parts)


def _check_ranks(ranks: Sequence[Enlisted], clients_of_rank: Sequence[Sequence[int]]) -> None:
    if not ranks or [e.rank for e in ranks] != list(range(len(ranks))):
        raise ValueError(f"enlisted ranks are {[e.rank for e in ranks]}, expected 0, 1, ... once")
    expected = max(1, len(ranks) - 1)
    if len(clients_of_rank) != expected:
        raise ValueError(
            f"clients_of_rank has {len(clients_of_rank)} lists, expected {expected}: one per "
            "client rank (rank 0 is the server unless it is alone)"
        )


def _seat(e: Enlisted, role: str, clients: Sequence[int], request: str, position: int) -> Seat:
    if clients:
        role += f"{'client' if len(clients) == 1 else 'clients'} {spans(clients)}"
    device = CPU if role == "idle" else _choose(e, request, position)
    physical = CPU if device == CPU else e.devices[int(device.removeprefix("cuda:"))]
    return Seat(e.rank, e.node, e.host, role, tuple(clients), device, physical)


def _choose(e: Enlisted, request: str, position: int) -> str:
    """The device of a rank as torch names it; errors say which rank cannot have it and why."""
    number = request.removeprefix("cuda:")
    if request not in ("auto", CPU, "cuda") and (number == request or not number.isdecimal()):
        raise ValueError(f"device is {request!r}, expected auto, cpu, cuda or cuda:N")
    if request == CPU or (request == "auto" and not e.devices):
        return CPU
    index = int(number) if number != request else position % max(1, len(e.devices))
    if index >= len(e.devices):
        raise ValueError(
            f"device is {request!r}, but rank {e.rank} on {e.host} sees {len(e.devices)} GPUs: ask "
            "the launcher for GPUs (--gres=gpu:N), check CUDA_VISIBLE_DEVICES and that this torch "
            "was built for CUDA, or use auto or cpu"
        )
    return f"cuda:{index}"


def _device_text(seat: Seat) -> str:
    """The launcher's name is worth reading only where torch counts differently."""
    same = seat.device in (seat.physical, f"cuda:{seat.physical}")
    return seat.device if same else f"{seat.device} (GPU {seat.physical.removeprefix('GPU-')})"
