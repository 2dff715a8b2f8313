"""``python tests/faults.py FAULT [run arguments]``: a run in which something goes wrong.

FAULT is ``what:place:client:round``, for example ``raise:train:3:2``.

    what    raise, exit (sys.exit(3)), thread (raises in a thread), kill (SIGKILL to itself),
            term / usr1 (a signal to itself), nan (the upload becomes NaN), delay (sleeps; see
            FAULT_SECONDS), fullstop (SIGSTOP to itself: a rank that no longer answers)
    place   train (in the client's training), upload (just after it has started to leave),
            aggregate (at the server), rename (checkpoint written, but not under its name yet),
            stored (the server reads a client's state from a checkpoint; round is ignored)
    client  whose; ignored at the server
    round   in which

With FAULT=none nothing is changed, with ``shuffle`` every training is delayed at random.
FAULT_PROGRAM=sweep runs a sweep instead of a run; with FAULT_TURN=2 the fault happens only the
second time that a process comes to that place, so in the second of its runs.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from itertools import count

import torch

from fedapa_mpi import crew, rounds, run, sweep
from fedapa_mpi.comm.transport import Transport
from fedapa_mpi.store import checkpoint, folder

PROGRAMS = {"run": run, "sweep": sweep}
turns = count(1)


def happen(what: str) -> bool:
    """The fault itself; says whether it was its turn."""
    turn = str(next(turns))
    if os.environ.get("FAULT_TURN", turn) != turn:
        return False
    print(f"fault: {what} in pid {os.getpid()}", file=sys.stderr, flush=True)
    if what == "raise":
        raise RuntimeError("the injected error")
    if what == "exit":
        sys.exit(3)
    if what == "thread":
        threading.Thread(target=lambda: happen("raise")).start()
        time.sleep(20)
    if what == "delay":
        time.sleep(float(os.environ.get("FAULT_SECONDS", "1")))
    signals = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "usr1": signal.SIGUSR1,
               "int": signal.SIGINT, "fullstop": signal.SIGSTOP}  # fmt: skip
    if what in signals:
        os.kill(os.getpid(), signals[what])
        time.sleep(0.1)
    return True


def inject(fault: str) -> None:
    """Wraps the place where the fault is to happen."""
    if fault == "none":
        return
    if fault == "shuffle":
        wrap(crew.Crew, "participate", lambda *a: time.sleep(random.random() / 20))
        return
    what, place, client, t = fault.split(":")
    i, t = int(client), int(t)
    if what == "nan":
        plain = crew.Crew.participate

        def participate(self, client, message, order):
            upload = plain(self, client, message, order)
            if (client, order.round) == (i, t) and happen(what):
                upload = {name: tensor * torch.nan for name, tensor in upload.items()}
            return upload

        crew.Crew.participate = participate
    elif place == "train":
        wrap(crew.training, "fit",
             lambda c, now, **_: (c.setup.client, now) == (i, t) and happen(what))  # fmt: skip
    elif place == "upload":
        wrap(Transport, "send",
             lambda _, kind, c, now, message: (kind.name, c, now) == ("UPLOAD", i, t)
             and happen(what), after=True)  # fmt: skip
    elif place == "aggregate":
        wrap(rounds, "_aggregate", lambda s, sent, up, now, clock: now == t and happen(what))
    elif place == "rename":
        wrap(folder.os, "replace",
             lambda a, b: str(b).endswith(f"round-{t:06}.h5") and happen(what))  # fmt: skip
        assert checkpoint.replacing is folder.replacing
    elif place == "stored":
        wrap(checkpoint.Checkpoint, "client", lambda _, c: c == i and happen(what))
    else:
        raise SystemExit(f"unknown fault {fault}")


def wrap(owner, name, extra, after=False):
    """Calls ``extra`` with the arguments of ``owner.name`` before or after each call."""
    plain = getattr(owner, name)

    def wrapped(*args, **kwargs):
        if not after:
            extra(*args, **kwargs)
        result = plain(*args, **kwargs)
        if after:
            extra(*args, **kwargs)
        return result

    setattr(owner, name, wrapped)


if __name__ == "__main__":
    inject(sys.argv[1])
    program = PROGRAMS[os.environ.get("FAULT_PROGRAM", "run")]
    sys.exit(program.main(sys.argv[2:]))
