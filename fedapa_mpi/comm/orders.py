"""What rank 0 decides and everybody else obeys."""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from enum import StrEnum, auto
from typing import Any, Self

POINTS = ("recv", "post")  # where sampled clients are evaluated: before and after training


class Action(StrEnum):
    """What an order asks for."""

    ROUND = auto()  # run a round
    CHECKPOINT = auto()  # send the clients' states to rank 0
    ABANDON = auto()  # give up the round under way and put the clients' states back
    STOP = auto()  # say farewell and end


@dataclass(frozen=True)
class Order:
    """What rank 0 decided; everybody else obeys. Client ids are global, not per rank.

    clients     sampled, in the order drawn
    dropped     of those, the ones that will fail to answer
    points      of ("recv", "post"): where to evaluate the sampled clients
    held        other clients whose held model is evaluated after training
    delivered   other clients that are evaluated on an uncounted delivery
    newcomers   clients outside the federation that get one delivery and one training
    sequential  one client after the other, in the order drawn, instead of all at once

    Raises ValueError when the fields contradict each other.
    """

    action: Action
    round: int
    clients: tuple[int, ...] = ()
    dropped: frozenset[int] = frozenset()
    points: tuple[str, ...] = ()
    held: tuple[int, ...] = ()
    delivered: tuple[int, ...] = ()
    newcomers: tuple[int, ...] = ()
    sequential: bool = False

    def __post_init__(self) -> None:
        self._check(_is_int(self.round) and self.round >= 0, "round", "an integer >= 0")
        for name in ("clients", "dropped", "held", "delivered", "newcomers"):
            self._check(_are_ids(getattr(self, name)), name, "distinct client ids >= 0")
        sampled = set(self.clients)
        self._check(sampled.issuperset(self.dropped), "dropped", "some of the sampled clients")
        answering = sampled.difference(self.dropped)
        for name in ("held", "delivered"):
            self._check(answering.isdisjoint(getattr(self, name)), name, "none that answers")
        self._check(all(p in POINTS for p in self.points), "points", f"some of {POINTS}")
        self._check(isinstance(self.sequential, bool), "sequential", "true or false")

    def turns(self) -> tuple[tuple[int, ...], ...]:
        """Which clients work together: all at once, ascending, or one by one as drawn."""
        if self.sequential:
            return tuple((i,) for i in self.clients)
        return (tuple(sorted(self.clients)),) if self.clients else ()

    def answering(self, turn: Iterable[int]) -> tuple[int, ...]:
        """The clients of a turn whose upload will come, in the turn's order."""
        return tuple(i for i in turn if i not in self.dropped)

    def note(self) -> dict[str, Any]:
        """This order as JSON-able facts, for Envelope.note."""
        return {
            "action": self.action.value,
            "round": self.round,
            "clients": list(self.clients),
            "dropped": sorted(self.dropped),
            "points": list(self.points),
            "held": list(self.held),
            "delivered": list(self.delivered),
            "newcomers": list(self.newcomers),
            "sequential": self.sequential,
        }

    @classmethod
    def from_note(cls, note: dict[str, Any]) -> Self:
        """The order that `note` describes; ValueError when it does not describe one."""
        names = {f.name for f in fields(cls)}
        if note.keys() != names:
            raise ValueError(f"order has the fields {sorted(note)}, expected {sorted(names)}")
        values = dict(note, action=Action(note["action"]))
        for name in ("clients", "dropped", "points", "held", "delivered", "newcomers"):
            if not isinstance(note[name], list):
                raise ValueError(f"order's {name} is {note[name]!r}, expected a list")
            values[name] = tuple(note[name])
        order = cls(**values)  # checks that the dropped are ids before they go into a set
        return replace(order, dropped=frozenset(order.dropped))

    def _check(self, good: bool, name: str, expected: str) -> None:
        if not good:
            value = getattr(self, name)
            raise ValueError(
                f"order of round {self.round}: {name} is {value!r}, expected {expected}"
            )


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _are_ids(values: Iterable[Any]) -> bool:
    ids = list(values)
    return all(_is_int(i) and i >= 0 for i in ids) and len(set(ids)) == len(ids)
