"""The report: means and deviations by hand, what is compared with what, and four forms of table."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from launching import environment
from tiny import simulate

from fedapa_mpi import cli
from fedapa_mpi.config import Experiment
from fedapa_mpi.report import collect, formats
from fedapa_mpi.report.__main__ import main, report
from fedapa_mpi.report.formats import Table
from fedapa_mpi.store.results import SECONDS, Results, RoundRecord

M, TESTED = 4, 10  # clients, and test samples of each


def scores(share):
    """[M, 3] for an accuracy of each client, or one of all."""
    correct = np.round(np.broadcast_to(np.asarray(share, float), M) * TESTED)
    return np.stack([correct, np.full(M, TESTED), np.zeros(M)], axis=1)


def write(folder, *argv, recv=(0.1,), post=(0.5,), status="finished", partition="one"):
    """The results of a run with an accuracy per round, each a number or one per client.

    Rounds move 100 bytes down and 10 up per client, and take 1, 2, ... seconds of rank 1 and half
    as much of the server.
    """
    config = cli.resolve(cli.read([*argv, f"--clients={M}"])).flat()
    folder.mkdir(parents=True)
    results = Results.create(
        folder / "results.h5",
        attributes={"config": config, "partition_hash": partition},
        labels=np.ones((M, 2)),
        test_samples=np.full(M, TESTED),
    )
    everyone, nobody = np.ones(M, bool), np.full(M, -1)
    for t, (before, after) in enumerate(zip(recv, post, strict=True), 1):
        seconds = {name: np.full(3, np.nan) for name in SECONDS}
        seconds["compute"][1] = t
        seconds["server"][0] = t / 2
        results.append(
            RoundRecord(
                round=t,
                sampled=everyone,
                answered=everyone,
                loss=np.zeros(M),
                **dict.fromkeys(("rank", "pid", "device"), nobody),
                bytes_down=np.full(M, 100 * t),
                bytes_up=np.full(M, 10),
                seconds=seconds,
                recv=None if before is None else scores(before),
                post=None if after is None else scores(after),
            )
        )
    results.set(status=status)
    results.flush()
    return folder


def summaries(path):
    """By method; for reports with one setting."""
    runs = [run for run in map(collect.read, collect.find([path])) if run is not None]
    found = collect.summarise(collect.aligned(runs))
    assert len({summary.setting for summary in found}) == 1
    return {summary.method: summary for summary in found}


def rows(text):
    """Of a report as CSV: a dict per row."""
    return list(csv.DictReader(io.StringIO(text)))


# -- numbers ---------------------------------------------------------------------------------------


@pytest.fixture
def three_seeds(tmp_path):
    """Post macro: last 0.5, 0.7, 0.6 and best 0.8, 0.7, 0.6; recv macro: all 0.2."""
    ends = ((0.1, 0.8, 0.5), (0.2, 0.3, 0.7), (0.4, 0.5, 0.6))
    for seed, post in enumerate(ends):
        write(tmp_path / f"s{seed}", "fedavg", f"--seed={seed}", post=post, recv=(0.2,) * 3)
    return tmp_path


def test_mean_and_sample_standard_deviation(three_seeds):
    found = summaries(three_seeds)["fedavg"]
    assert found.seeds == (0, 1, 2)
    for metric in ("micro", "macro", "worst10"):  # all clients have the same accuracy
        # mean (0.5 + 0.7 + 0.6) / 3; squares 0.1^2 + 0.1^2 + 0 = 0.02 over 3 - 1
        assert found.mean[f"post/last/{metric}"] == pytest.approx(0.6)
        assert found.std[f"post/last/{metric}"] == pytest.approx(0.1)
        # mean 2.1 / 3 = 0.7; squares 0.1^2 + 0 + 0.1^2 over 2
        assert found.mean[f"post/best/{metric}"] == pytest.approx(0.7)
        assert found.std[f"post/best/{metric}"] == pytest.approx(0.1)
        assert found.mean[f"recv/last/{metric}"] == pytest.approx(0.2)
        assert found.std[f"recv/best/{metric}"] == pytest.approx(0)


def test_bytes_and_seconds_of_a_round(three_seeds):
    found = summaries(three_seeds)["fedavg"]
    assert found.mean["down"] == 4 * 100 * (1 + 2 + 3) / 3
    assert found.mean["up"] == 4 * 10
    assert found.mean["seconds"] == (1 + 2 + 3) / 3
    assert found.mean["server seconds"] == (1 + 2 + 3) / 6
    assert found.std["seconds"] == 0


def test_the_three_metrics_are_told_apart(tmp_path):
    write(tmp_path / "run", "local", post=((0.2, 0.4, 0.6, 1.0), (0.5, 0.5, 0.5, 0.6)), recv=(0, 0))
    mean = summaries(tmp_path)["local"].mean
    assert mean["post/last/macro"] == pytest.approx(2.1 / 4)
    assert mean["post/best/macro"] == pytest.approx(2.2 / 4)  # of round 1
    assert mean["post/last/worst10"] == mean["post/best/worst10"] == pytest.approx(0.5)


def test_rounds_without_evaluation_do_not_count(tmp_path):
    write(tmp_path / "run", "local", "--eval_every=2", post=(None, 0.9, None, 0.4, None),
          recv=(None, 0.1, None, 0.3, None))  # fmt: skip
    mean = summaries(tmp_path)["local"].mean
    assert mean["post/last/macro"] == pytest.approx(0.4)
    assert mean["post/best/macro"] == pytest.approx(0.9)
    assert mean["recv/last/micro"] == mean["recv/best/micro"] == pytest.approx(0.3)


def test_a_point_that_was_never_evaluated(tmp_path):
    write(tmp_path / "run", "local", "--eval_points=post", recv=(None, None), post=(0.4, 0.4))
    text = report([tmp_path], "markdown")
    assert "| local | 1 | - | - | - | - | - | - |" in text
    assert rows(report([tmp_path], "csv"))[0]["recv/last/macro mean"] == "nan"


def test_one_seed_has_no_deviation(tmp_path):
    write(tmp_path / "run", "local", "--seed=7")
    text = report([tmp_path])
    assert "±" not in text
    assert "; seed 7" in text
    found = summaries(tmp_path)["local"]
    assert all(np.isnan(value) for value in found.std.values())


def test_of_a_real_run(tmp_path):
    run = simulate(tmp_path / "run", ["fedavg", "--rounds=3", "--batch_size=4", "--lr=0.1"])
    mean = summaries(tmp_path)["fedavg"].mean
    macro = run.rows()["accuracy/post/macro"]
    assert mean["post/last/macro"] == macro[-1]
    assert mean["post/best/macro"] == macro.max()
    assert mean["down"] == run.rows()["bytes/down"].sum() / 3
    assert mean["seconds"] > 0


def test_further_ways_of_answering_have_rows_of_their_own(tmp_path):
    small = ["--rounds=2", "--batch_size=4", "--lr=0.02"]
    run = simulate(tmp_path / "proto", ["fedproto", *small])
    simulate(tmp_path / "local", ["local", *small])
    with h5py.File(run.folder / "results.h5", "r+") as h5:
        for series, value in (("post", 0.75), ("post/head", 0.25)):
            h5[f"accuracy/{series}/macro"][-1] = value
    mean = summaries(tmp_path)["fedproto"].mean
    assert (mean["post/last/macro"], mean["head/post/last/macro"]) == (0.75, 0.25)
    text = report([tmp_path], "markdown")
    assert text.count("| fedproto (head) | 1 |") == 3  # recv, post and after the end
    assert "local (head)" not in text
    found = {row["method"]: row for row in rows(report([tmp_path], "csv"))}
    assert float(found["fedproto"]["head/post/last/macro mean"]) == mean["head/post/last/macro"]
    assert found["local"]["head/post/last/macro mean"] == "nan"


def test_what_is_measured_after_the_last_round(tmp_path):
    arrays = {"final/recv": 0.3, "final/holdout/recv": 0.4, "final/holdout/post": 0.9}
    for name, method in (("a", "fedavg"), ("b", "apple")):
        folder = write(tmp_path / name, method, "--holdout_clients=2")
        with h5py.File(folder / "results.h5", "r+") as h5:
            for place, value in arrays.items():
                none = method == "apple" and "holdout" in place  # not available
                for metric in ("micro", "macro", "worst10"):
                    h5[f"{place}/{metric}"] = np.nan if none else value
    text = report([tmp_path], "markdown")
    after, held_out = text.split("Test accuracy ")[3:5]
    assert after.startswith("after the last round, over all clients with test data, all with what")
    assert "| fedavg | 1 | 0.3000 | 0.3000 | 0.3000 |" in after
    assert "| apple | 1 | 0.3000 |" in after
    assert held_out.startswith("of held-out clients, which took no part")
    assert "recv macro | recv worst 10 % | post micro" in held_out
    assert "| fedavg | 1 | 0.4000 | 0.4000 | 0.4000 | 0.9000 | 0.9000 | 0.9000 |" in held_out
    assert "| apple | 1 | - | - | - | - | - | - |" in held_out


def test_without_held_out_clients_there_is_no_table_of_them(three_seeds):
    assert "held-out" not in report([three_seeds])


# -- names and settings ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        ("fedapa", "fedapa"),
        ("fedapa --lr=0.3 --seed=4 --preset=paper", "fedapa"),
        ("fedapa --eta=0.1", "fedapa:eta=0.1"),
        ("fedapa --eta=0.1 --gradient=centred", "fedapa:gradient=centred,eta=0.1"),
        ("fedapa --adapt=false", "fedapa:adapt=false"),
        ("fedapa --preset=official", "fedapa:preset=official"),
        ("fedapa --preset=official --min_train=1", "fedapa:preset=official"),
        ("fedapa --preset=official --self_weight=0.5",
         "fedapa:preset=official,self_weight=0.5"),
        ("fedapa --self_weight=1 --share=model", "fedapa:self_weight=1.0,share=model"),
        ("fedapa --preset=official --drop_last=false", "fedapa:preset=official,drop_last=false"),
        ("fedpac", "fedpac"),
        ("fedpac --client_opt=persist", "fedpac:client_opt=persist"),
        ("local --client_opt=reset", "local"),
        ("local", "local"),
    ],
)  # fmt: skip
def test_a_method_is_named_by_what_is_not_its_default(argv, name):
    config = Experiment.from_flat(cli.resolve(cli.read(argv.split())).flat())
    assert collect.method_name(config) == name


def test_settings_have_tables_of_their_own(tmp_path):
    for name in ("local", "fedavg"):
        write(tmp_path / name, name)
        write(tmp_path / f"{name}-iid", name, "--partition=iid")
        write(tmp_path / f"{name}-lr", name, "--lr=0.3")
    text = report([tmp_path], "markdown")
    assert text.count("Test accuracy post") == text.count("Cost of a round") == 3
    assert text.count("partition=iid") == 3
    assert text.count("lr=0.3") == 3
    for table in text.split("Test accuracy ")[1:]:
        assert table.count("\n| local |") == table.count("\n| fedavg |") >= 1


def test_incidental_flags_make_no_setting(tmp_path):
    write(tmp_path / "a", "local", "--seed=0", "--keep=5", "--max_time=90")
    write(tmp_path / "b", "local", "--seed=1", "--watchdog=60", "--checkpoint_every=3")
    assert summaries(tmp_path)["local"].seeds == (0, 1)
    assert "keep" not in report([tmp_path])


def test_what_has_no_effect_is_not_shown(tmp_path):
    write(tmp_path / "a", "local", "--dataset=groups")
    assert "partition=" not in report([tmp_path])


def test_a_preset_is_compared_with_the_other_methods(tmp_path):
    write(tmp_path / "a", "fedavg")
    write(tmp_path / "b", "fedapa", "--preset=official")
    write(tmp_path / "c", "fedapa", "--preset=official", "--eta=0.1")
    write(tmp_path / "d", "fedpac")  # resets its clients' momentum
    assert set(summaries(tmp_path)) == {
        "fedavg", "fedapa:preset=official", "fedapa:preset=official,eta=0.1", "fedpac"
    }  # fmt: skip


@pytest.mark.parametrize("flag", ["--drop_last=true", "--order=sequential", "--min_train=129"])
def test_a_preset_is_compared_where_others_were_given_a_flag_of_it(tmp_path, flag):
    write(tmp_path / "a", "fedapa", flag)
    write(tmp_path / "b", "fedapa", "--preset=official", flag)
    assert set(summaries(tmp_path)) == {"fedapa", "fedapa:preset=official"}
    assert flag.removeprefix("--") in report([tmp_path])


def test_a_preset_stands_in_the_setting_nearest_to_its_own(tmp_path):
    write(tmp_path / "a", "local")
    write(tmp_path / "b", "local", "--min_train=129", "--min_test=3")
    write(tmp_path / "c", "fedapa", "--preset=official")
    runs = collect.aligned([collect.read(path) for path in collect.find([tmp_path])])
    assert runs[2].setting == runs[1].setting != runs[0].setting


def test_a_preset_alone(tmp_path):
    write(tmp_path / "a", "fedapa", "--preset=official", "--lr=0.3")
    (found,) = summaries(tmp_path).values()
    assert dict(found.setting)["lr"] == 0.3
    assert "order" not in dict(found.setting)


def test_other_partitions_in_one_setting_are_said(tmp_path, capsys):
    write(tmp_path / "a", "fedavg", partition="one")
    write(tmp_path / "b", "fedapa", "--preset=official", partition="two")
    write(tmp_path / "c", "fedavg", "--seed=1", partition="three")
    report([tmp_path])
    (line,) = capsys.readouterr().err.splitlines()
    assert "seed 0: fedavg and fedapa:preset=official did not have the same partition" in line


def test_a_configuration_of_an_older_version(tmp_path):
    folder = write(tmp_path / "a", "fedapa", "--eta=0.1")
    with h5py.File(folder / "results.h5", "r+") as h5:
        config = json.loads(h5.attrs["config"])
        for name in ("min_test", "unsampled", "initial_A"):
            del config[name]
        h5.attrs["config"] = json.dumps(config)
    assert "fedapa:eta=0.1" in summaries(tmp_path)


# -- which runs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", ["running", "interrupted", "failed"])
def test_what_has_not_finished_is_left_out_and_said(tmp_path, capsys, status):
    write(tmp_path / "sweep/done", "local")
    cut = write(tmp_path / "sweep/cut", "fedavg", status=status)
    assert main([str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert "fedavg" not in out
    assert err == f"{cut}: not finished, left out\n"
    assert main([str(cut)]) == 2
    assert "none of the runs has finished" in capsys.readouterr().err


def test_the_same_run_twice(tmp_path, capsys):
    one, two = (write(tmp_path / name, "local", "--seed=3") for name in "ab")
    write(tmp_path / "c", "local", "--seed=4")
    assert main([str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert f"the same run is there twice: {one}, {two}" in error
    assert main([str(one), str(tmp_path / "c")]) == 0


def test_a_folder_named_twice_counts_once(tmp_path, monkeypatch):
    write(tmp_path / "sweep/a", "local")
    (tmp_path / "link").symlink_to(tmp_path / "sweep")
    monkeypatch.chdir(tmp_path)
    paths = [Path("sweep"), tmp_path / "sweep", Path("sweep/a"), Path("sweep/a/results.h5"),
             Path("link")]  # fmt: skip
    assert len(collect.find(paths)) == 1


@pytest.mark.parametrize("make", [None, "folder", "file"])
def test_nothing_there(tmp_path, capsys, make):
    path = tmp_path / "runs"
    if make == "folder":
        path.mkdir()
    if make == "file":
        path.write_text("")
    assert main([str(path)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("fedapa-mpi: error:")) == ("", 1)
    assert f"{path} holds no results.h5" in err


def test_a_damaged_file_is_named(tmp_path, capsys):
    folder = write(tmp_path / "run", "local")
    with (folder / "results.h5").open("r+b") as file:
        file.truncate(500)
    assert main([str(tmp_path)]) == 2
    assert f"{folder / 'results.h5'} cannot be read" in capsys.readouterr().err


# -- tables ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["terminal", "markdown", "latex"])
def test_captions_say_point_clients_setting_and_seeds(three_seeds, form):
    text = " ".join(report([three_seeds], form).replace(r"\_", "_").split())
    for point, when in (
        ("recv", "after download, before training"),
        ("post", "after local training"),
    ):
        assert (
            f"Test accuracy {point} ({when}), over all clients with test data, unsampled ones "
            f"with the model they hold; best: of all rounds, each column on its own; "
            f"dataset=digits, partition=pathological, clients=4, rounds=60, batch_size=16, "
            f"lr=0.05, model=mlp; mean " in text
        )
    assert text.count("sample standard deviation over seeds 0, 1, 2") == 3
    assert "Cost of a round, all clients and ranks together; dataset=digits" in text


def test_captions_of_a_broadcast_run(tmp_path):
    write(tmp_path / "a", "fedavg", "--unsampled=broadcast")
    text = " ".join(report([tmp_path]).split())
    assert "unsampled ones with what the server would send them" in text
    assert "the model they hold" not in text


def test_terminal(three_seeds, capsys):
    assert main([str(three_seeds)]) == 0
    out = capsys.readouterr().out
    assert out == report([three_seeds]) + "\n"
    assert re.search(r"fedavg +3 +0\.6000 ± 0\.1000 .* 0\.7000 ± 0\.1000", out)
    assert re.search(r"fedavg +3 +800 ± 0 +40 ± 0 +2\.00 ± 0\.00", out)
    assert "\x1b" not in out


def test_terminal_cuts_no_number_of_a_long_row():
    name = "fedapa:preset=official,gradient=centred," + "x" * 200
    row = (name, "[3]", *["0.1234 ± 0.5678"] * 6)
    text = formats.terminal(
        [Table("what [b]says[/b] :smile: " * 20, ("method", *"abcdefg"), (row,))]
    )
    assert " ".join(row) == " ".join(text.splitlines()[-1].split())
    assert text.split().count("[b]says[/b]") == text.split().count(":smile:") == 20


def markdown_rows(text):
    return [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in text.splitlines()
        if line.startswith("|")
    ]


def test_markdown(three_seeds):
    write(three_seeds / "other", "fedapa", "--eta=0.1")
    text = report([three_seeds], "markdown")
    recv, post, cost = (markdown_rows(part) for part in text.split("\n\n")[1::2])
    assert recv[0] == post[0] == [
        "method", "seeds", "last micro", "last macro", "last worst 10 %",
        "best micro", "best macro", "best worst 10 %",
    ]  # fmt: skip
    assert [len(row) for row in post] == [8] * 4
    assert post[1] == ["---", *["---:"] * 7]
    assert post[2] == ["fedapa:eta=0.1", "1: 0", *["0.5000"] * 6]
    assert post[3] == ["fedavg", "3", *["0.6000 ± 0.1000"] * 3, *["0.7000 ± 0.1000"] * 3]
    assert cost[3] == ["fedavg", "3", "800 ± 0", "40 ± 0", "2.00 ± 0.00", "1.000 ± 0.000"]
    assert cost[2] == ["fedapa:eta=0.1", "1: 0", "400", "40", "1.00", "0.500"]


def test_latex(three_seeds):
    write(three_seeds / "other", "fedapa", "--eta=0.1", "--self_weight=1")
    text = report([three_seeds], "latex")
    assert text.count(r"\begin{table}") == text.count(r"\end{table}") == 3
    for table in text.split(r"\end{table}")[:-1]:
        body = table.partition(r"\midrule")[2].partition(r"\bottomrule")[0].strip().splitlines()
        columns = re.search(r"\\begin\{tabular\}\{(\w+)\}", table)[1]
        assert len(body) == 2
        assert all(line.count("&") == len(columns) - 1 for line in body)
        assert all(line.endswith(r" \\") for line in body)
    assert r"fedapa:eta=0.1,self\_weight=1.0 & 1: 0 & 0.5000" in text
    assert r"0.6000 $\pm$ 0.1000" in text
    assert r"last worst 10 \%" in text
    assert r"batch\_size=16" in text
    assert not re.search(r"(?<!\\)[%#_]", text)
    assert "±" not in text


def test_latex_signs():
    table = Table("a\\b {c} $d ~e ^f", ("x&y",), (("100 %",),))
    text = formats.latex([table])
    caption = r"a\textbackslash{}b \{c\} \$d \textasciitilde{}e \textasciicircum{}f"
    assert rf"\caption{{{caption}}}" in text
    assert r"x\&y \\" in text


def test_csv_has_full_precision(three_seeds):
    write(three_seeds / "other", "fedapa", "--eta=0.1", "--gradient=centred")
    write(three_seeds / "alpha", "local", "--partition=dirichlet", "--alpha=0.3",
          post=(1 / 3, 0.7), recv=(0, 0))  # fmt: skip
    found = {row["method"]: row for row in rows(report([three_seeds], "csv"))}
    assert set(found) == {"fedavg", "fedapa:gradient=centred,eta=0.1", "local"}
    fedavg = found["fedavg"]
    assert (fedavg["seeds"], fedavg["partition"], fedavg["alpha"]) == ("0 1 2", "pathological", "")
    assert (found["local"]["partition"], found["local"]["alpha"]) == ("dirichlet", "0.3")
    shares = np.array([0.5, 0.7, 0.6])
    for metric in ("micro", "macro", "worst10"):
        assert float(fedavg[f"post/last/{metric} mean"]) == pytest.approx(shares.mean(), rel=1e-15)
        assert float(fedavg[f"post/last/{metric} std"]) == pytest.approx(0.1, rel=1e-14)
    runs = [collect.read(path) for path in collect.find([three_seeds])]
    for summary in collect.summarise(runs):
        for name, value in summary.mean.items():
            assert float(found[summary.method][f"{name} mean"]) == value  # bit for bit
    assert np.isnan(float(found["local"]["post/best/macro std"]))
    for point in ("recv", "post"):
        for which in ("last", "best"):
            assert {f"{point}/{which}/{m} {part}" for m in ("micro", "macro", "worst10")
                    for part in ("mean", "std")} <= set(fedavg)  # fmt: skip


@pytest.mark.parametrize("form", ["terminal", "markdown", "latex", "csv"])
def test_main_prints_every_form(three_seeds, capsys, form):
    assert main([str(three_seeds), "--format", form]) == 0
    assert capsys.readouterr().out == report([three_seeds], form) + "\n"


def test_a_reader_that_stops_reading(three_seeds):
    """As in ``report RUNS | head -1``: no traceback, no complaint, status 0."""
    code = (
        "import os, sys; r, w = os.pipe(); os.dup2(w, 1); os.close(w); os.close(r); "
        "from fedapa_mpi.report.__main__ import main; status = main(sys.argv[1:]); "
        "print({'torch', 'mpi4py'} & set(sys.modules), file=sys.stderr); sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(three_seeds)], capture_output=True,
                          text=True, timeout=60, env=environment())  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "set()\n")
