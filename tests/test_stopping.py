"""stopping.py: real signals in a process of its own, and how long a stop may take."""

import os
import signal
import subprocess
import sys
import time

import pytest

from fedapa_mpi import stopping
from fedapa_mpi.stopping import StopFlag, parse_duration

# Sleeps in short steps, as polite waiting does, and tells why it ended.
CHILD = """
import sys, time
from fedapa_mpi.stopping import StopFlag, install
flag = StopFlag()
install(flag)
{extra}
print("ready", flush=True)
end = time.monotonic() + {seconds}
while time.monotonic() < end:
    time.sleep(0.01)
    if flag.asked() and {leave}:
        break
print(flag.reason)
"""


def child(seconds=30, leave=True, extra=""):
    """A running child that has its handlers."""
    code = CHILD.format(seconds=seconds, leave=leave, extra=extra)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


def finish(process):
    """Its last words and its exit status."""
    try:
        output, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    return output.strip(), process.returncode


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT"])
def test_a_signal_sets_the_flag_and_kills_nobody(name):
    process = child()
    process.send_signal(getattr(signal, name))
    assert finish(process) == (name, 0)


def test_repeated_signals_are_borne_and_the_first_reason_stays():
    process = child(seconds=1.5, leave=False)
    for number in [signal.SIGUSR1] * 20 + [signal.SIGTERM, signal.SIGUSR2, signal.SIGINT]:
        process.send_signal(number)
        time.sleep(0.01)  # pending signals of one kind merge, and the first must be the first
    assert finish(process) == ("SIGUSR1", 0)


def test_a_second_ctrl_c_aborts_with_130():
    process = child(leave=False)
    process.send_signal(signal.SIGINT)
    time.sleep(2 * stopping.SAME_PRESS)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert finish(process) == ("", 130)


def test_what_a_second_ctrl_c_calls_can_be_replaced():
    process = child(leave=False, extra="flag.abort = lambda: sys.exit(7)")
    process.send_signal(signal.SIGINT)
    time.sleep(2 * stopping.SAME_PRESS)
    process.send_signal(signal.SIGINT)
    assert finish(process) == ("", 7)


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still unless told: clock(240) is 240 s after the start."""
    now = [1000.0]
    monkeypatch.setattr(stopping.time, "monotonic", lambda: now[0])

    def at(seconds):
        now[0] = 1000.0 + seconds

    return at


@pytest.fixture
def aborts(flag):
    calls = []
    flag.abort = lambda: calls.append(130)
    return calls


@pytest.fixture
def flag():
    return StopFlag()


def test_one_ctrl_c_that_arrives_twice_counts_once(clock, flag, aborts):
    flag.interrupt()
    clock(0.5 * stopping.SAME_PRESS)
    flag.interrupt()
    assert aborts == []
    clock(1)
    flag.interrupt()
    assert aborts == [130]


def test_the_first_ctrl_c_after_another_reason_only_asks(clock, flag, aborts):
    flag.ask("SIGUSR1")
    clock(5)
    flag.interrupt()
    assert aborts == []
    clock(10)
    flag.interrupt()
    assert aborts == [130]
    assert flag.reason == "SIGUSR1"


def test_nobody_asked(clock, flag):
    clock(10**6)
    assert not flag.asked()
    assert flag.reason is None
    assert not flag.expired(0)


@pytest.mark.parametrize(
    ("reason", "grace", "seconds"),
    [("SIGTERM", None, 20), ("SIGUSR1", None, 240), ("max_time", None, 240), ("SIGINT", None, 240)]
    + [("SIGTERM", 60.0, 60), ("SIGUSR1", 5.0, 5), ("SIGUSR1", 0.0, 0)],
)
def test_grace(clock, flag, reason, grace, seconds):
    clock(7)
    flag.ask(reason)
    if seconds:
        clock(7 + seconds - 0.1)
        assert not flag.expired(grace)
    clock(7 + seconds)
    assert flag.expired(grace)


def test_a_later_term_shortens_the_grace_and_keeps_the_reason(clock, flag):
    flag.ask("SIGUSR1")
    clock(10)
    flag.ask("SIGTERM")
    clock(25)
    flag.ask("SIGTERM")  # no new grace for asking again
    assert flag.reason == "SIGUSR1"
    assert not flag.expired()
    clock(30)
    assert flag.expired()
    assert not flag.expired(60.0)


def test_a_late_term_does_not_lengthen_the_grace(clock, flag):
    flag.ask("SIGUSR1")
    clock(235)
    flag.ask("SIGTERM")
    clock(240)
    assert flag.expired()


def test_the_first_reason_and_its_time_stay(clock, flag):
    flag.ask("max_time")
    clock(100)
    flag.ask("SIGUSR1")
    assert flag.reason == "max_time"
    clock(240)
    assert flag.expired()


def test_handlers_need_the_main_thread_and_are_all_set(flag):
    before = {number: signal.getsignal(number) for number in stopping.SIGNALS}
    try:
        stopping.install(flag)
        os.kill(os.getpid(), signal.SIGUSR2)
        assert flag.reason == "SIGUSR2"
        assert len({signal.getsignal(number) for number in stopping.SIGNALS}) == 1
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("0.5", 0.5),
        (90, 90),
        (1.5, 1.5),
        (" 90 ", 90),
        ("1:30", 90),
        ("90:00", 5400),
        ("2:00:00", 7200),
        ("100:00:01", 360001),
        ("0:00:01.25", 1.25),
        ("1-12:00:00", 129600),
        ("1-12", 129600),
        ("1-12:30", 131400),
        ("0-00:00:07", 7),
    ],
)
def test_durations(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text",
    ["", "soon", "1:60", "1:00:60", "1:60:00", "1-24", "-5", "1:", ":30", "1:2:3:4", "1-2-3", "5m"]
    + ["1e3", "nan", "inf", "1 2", "1-", float("nan"), "١"],
)
def test_what_is_no_duration_is_named(text):
    with pytest.raises(ValueError, match=r"duration is .*expected seconds"):
        parse_duration(text)
