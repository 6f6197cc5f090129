"""``fedjax-dg run`` end to end: files, resume to the same bits whatever stopped it, breakdowns, and the other commands."""

import io
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from rich.console import Console
from shared import one_compilation

from fedjax_dg import cells
from fedjax_dg.cells import CellRun
from fedjax_dg.cli import ProgressBars, main
from fedjax_dg.config import RunConfig
from fedjax_dg.experiment import Grid
from fedjax_dg.results import Cell, Checkpoints, identity, read_json
from fedjax_dg.run import Block, NotFinite, check_finite
from fedjax_dg.types import RoundInfo, ServerState, Variables

# the network judges thousands of images after every round
pytestmark = pytest.mark.usefixtures("full_optimization")


def words(text):
    return text.split()


SMALL = words("--stations 3 --clients-per-station 2 --station-rounds 1 --local-steps 1 --batch-size 8")
# client and shared state, a server optimizer, sampled participants; 2 rules x 2 seeds = 4 cells of 3 rounds
SCAFFOLD = words("--algorithm scaffold --aggregator mean,fedavgm --participants 1 --rounds 3 --seeds 2 --jobs 1")
# client and station state, blocks of two rounds
MTGC = words("--algorithm mtgc --aggregator mean --rounds 6 --eval-every 2 --seeds 1")
# client state, random predictions, merges with Gram matrices
FEDSR = words("--algorithm fedsr --aggregator hfedatm --rounds 3 --seeds 1")
# work before round 1: two parts each to make latents and to train a translator
LSI = words(
    "--algorithm lsi --aggregator mean --held-out noto --rounds 2 --seeds 1 --client-lr 0.01 --set head_epochs=1"
)
LSI += words("--set bank=1 --set inversion_steps=501 --set translator_steps=501 --set hidden=8")
# to be killed: more rounds of a program of SCAFFOLD
LONG = words("--algorithm scaffold --aggregator fedavgm --participants 1 --rounds 6 --seeds 1")


@pytest.fixture(scope="module", autouse=True)
def programs():
    """A round is compiled once for all runs of this process; the runs that are killed compile their own."""
    with one_compilation():
        yield


@pytest.fixture
def little_optimization():
    """For what is compiled to be looked at, or to run for a round or two."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def run(folder, *options):
    return main(["run", *SMALL, "--out", str(folder), *options])


def latest(path, number=None):
    """Arrays as bytes, and notes but for times, of a cell's newest checkpoint, or that of round ``number``."""
    checkpoints = Checkpoints(path)
    arguments = ocp.args.Composite(arrays=ocp.args.StandardRestore(), notes=ocp.args.JsonRestore())
    restored = checkpoints.manager.restore(number or checkpoints.latest(), args=arguments)
    checkpoints.close()
    arrays = {k: (v.dtype, v.shape, np.asarray(v).tobytes()) for k, v in restored["arrays"].items()}
    return arrays, {k: v for k, v in restored["notes"].items() if k != "seconds"}


def everything(folder):
    """All that a run leaves behind, but for times."""
    result = read_json(folder / "result.json")
    for cell in result["cells"]:
        del cell["seconds"], cell["compile_seconds"]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "checkpoints": {path.name: latest(path) for path in sorted((folder / "checkpoints").iterdir())},
        "metrics": sorted(lines, key=lambda line: (line["cell"], line["round"])),
        "result": result,
        "table": (folder / "table.md").read_text(),
    }


def assert_same_run(folder, whole):
    got = everything(folder)
    for name, (arrays, notes) in whole["checkpoints"].items():
        assert list(arrays) == list(got["checkpoints"][name][0])
        assert [k for k, v in arrays.items() if got["checkpoints"][name][0][k] != v] == []
        assert got["checkpoints"][name][1] == notes
    assert got == whole


def stop_after(monkeypatch, number, of="record"):
    """The next run is interrupted in the ``number``-th report of that kind."""
    reports, report = [], ProgressBars.report

    def interrupting(self, event, cell, value):
        report(self, event, cell, value)
        reports.append(event)
        if reports.count(of) == number:
            raise KeyboardInterrupt

    monkeypatch.setattr(ProgressBars, "report", interrupting)


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """An uninterrupted run of SCAFFOLD: its folder, what it printed, and what it printed of errors."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        assert run(folder, *SCAFFOLD) == 0
    return folder, out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def whole(told):
    return told[0]


@pytest.fixture(scope="module")
def expected(whole):
    return everything(whole)


# --- what a run leaves behind ----------------------------------------------------------------------------------------

CELLS = [f"scaffold-{rule}-fluent_mono-seed{seed}" for rule in ("mean", "fedavgm") for seed in (0, 1)]


def test_files(whole):
    assert sorted(p.name for p in whole.iterdir()) == [
        "cells.json",
        "checkpoints",
        "config.json",
        "metrics.jsonl",
        "model.json",
        "result.json",
        "splits.json",
        "table.md",
    ]
    assert sorted(p.name for p in (whole / "checkpoints").iterdir()) == sorted(CELLS)
    assert sorted(p.name for p in (whole / "checkpoints" / CELLS[0]).iterdir()) == ["2", "3"]


def test_a_seed_is_shared_by_the_rules_that_are_compared_and_by_no_other_seed(expected):
    mean, other_mean, fedavgm, other_fedavgm = (expected["checkpoints"][name][0]["key"] for name in CELLS)
    assert mean == fedavgm != other_mean == other_fedavgm


def test_config_file_is_the_resolved_configuration(whole):
    config = read_json(whole / "config.json")
    assert config.pop("schema") == 1
    assert RunConfig(**config) == RunConfig(
        algorithm="scaffold",
        aggregator="mean,fedavgm",
        stations=3,
        clients_per_station=2,
        domain_mix=0.0,
        station_rounds=1,
        local_epochs=1,
        local_steps=1,
        batch_size=8,
        participants=1,
        rounds=3,
        seeds=2,
    )


def test_result_has_the_schema(whole):
    result = read_json(whole / "result.json")
    assert list(result) == ["schema", "config", "environment", "cells", "summary", "paired", "failed"]
    assert {"schema": 1, **result["config"]} == read_json(whole / "config.json")
    assert [identity(c).name for c in result["cells"]] == CELLS
    for cell in result["cells"]:
        assert set(cell) == {
            *("algorithm", "aggregator", "held_out", "seed", "accuracy", "balanced_accuracy", "accuracy_unseen"),
            *("source_accuracy", "selection", "selected_round", "rounds", "seconds", "compile_seconds", "compilations"),
        }
        assert cell["selection"] == "source-validation" and cell["rounds"] == 3 and cell["compilations"] == 1
        assert cell["seconds"] > 0 and cell["compile_seconds"] > 0
    assert [list(s) for s in result["summary"]] == [
        ["algorithm", "aggregator", "held_out", "mean", "ci95", "se", "n"]
    ] * 2
    (paired,) = result["paired"]
    assert (paired["aggregator"], paired["baseline"], paired["n"]) == ("fedavgm", "mean", 2)
    assert result["failed"] == []


def test_a_metrics_line_for_each_evaluated_round(whole):
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert sorted((line["cell"], line["round"]) for line in lines) == sorted((c, r) for c in CELLS for r in (1, 2, 3))
    domains = {"accuracy/noto", "accuracy/twemoji", "accuracy/fluent_flat", "accuracy/fluent_mono"}
    assert {"train_loss", "loss", "accuracy", "accuracy_unseen", "balanced_accuracy", "source_accuracy"} < set(lines[0])
    assert domains < set(lines[0])


def test_results_are_the_scores_of_the_selected_round(whole):
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    for cell in read_json(whole / "result.json")["cells"]:
        mine = [line for line in lines if identity(line) == identity(cell)]
        best = max(mine, key=lambda line: line["source_accuracy"])  # the first of equals
        assert best["round"] == cell["selected_round"]
        assert all(cell[k] == best[k] for k in ("accuracy", "balanced_accuracy", "accuracy_unseen", "source_accuracy"))


def test_the_best_model_is_not_changed_by_later_rounds(tmp_path, monkeypatch):
    """States are donated to the next block, so their buffers may be written again."""
    monkeypatch.setattr(cells, "is_better", lambda selection, new, best: new["round"] <= 2)
    assert run(tmp_path / "run", *SCAFFOLD, "--seeds", "1") == 0
    for cell in (tmp_path / "run" / "checkpoints").iterdir():
        (second, _), (third, notes) = (latest(cell, number) for number in (2, 3))
        names = [name.removeprefix("best.") for name in third if name.startswith("best.")]
        assert notes["best"]["round"] == 2 and "params.head.kernel" in names
        assert all(third[f"best.{name}"] == second[f"state.variables.{name}"] for name in names)
        assert third["best.params.head.kernel"] != third["state.variables.params.head.kernel"]


@pytest.mark.parametrize(("selection", "best"), [("source-validation", 2), ("oracle", 1), ("last", 3)])
def test_the_checkpoint_holds_the_best_model_by_the_rule(tmp_path, selection, best):
    checkpoints = Checkpoints(tmp_path / "cell")
    cell = Cell("fedavg", "mean", "noto", 0)
    cell_run = CellRun(cell, jax.random.key(0), checkpoints, selection, {}, None, 0.0, {})
    for number, source, held_out in ((1, 0.5, 0.8), (2, 0.9, 0.1), (3, 0.7, 0.3)):
        model = Variables({"w": jnp.full(2, float(number))}, {})
        state = ServerState(model, (), (), (), (), (), jnp.int32(number))
        cell_run.keep(Block(state, None, {"round": number, "source_accuracy": source, "accuracy": held_out}))
    checkpoints.close()
    arrays, notes = latest(tmp_path / "cell")
    assert (notes["round"], notes["best"]["round"], cell_run.best["round"]) == (3, best, best)
    assert arrays["best.params.w"][2] == np.full(2, best, np.float32).tobytes()


def test_runs_at_a_time_do_not_change_a_bit(tmp_path, expected):
    assert run(tmp_path / "run", *SCAFFOLD, "--jobs", "3") == 0
    assert_same_run(tmp_path / "run", expected)


def test_progress_lines(told):
    folder, out, err = told
    assert err == ""
    lines = out.splitlines()
    assert len([line for line in lines if re.fullmatch(r"Compiled the round with (mean|fedavgm) in .* s", line)]) == 2
    for name in CELLS:
        pattern = rf"{name}: held-out .* %, source .* % \(round [123] of 3, by source-validation\), .* s"
        assert len([line for line in lines if re.fullmatch(pattern, line)]) == 1
    (title,) = [line for line in lines if "round selected by source-validation" in line]
    assert "interval over 2 seeds; 3 stations x 2 clients, 3 rounds" in title
    assert "Always answering the commonest class of fluent_mono: 25.7 %" in lines
    assert lines[-1] == f"Run folder: {folder}"


def test_no_command_breaks_lines_in_a_pipe(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    folder = tmp_path / ("long name " * 12)
    assert run(folder, *SCAFFOLD, "--rounds", "1", "--seeds", "1") == 0
    assert main(["table", str(folder)]) == 0
    assert main(["data", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"Run folder: {folder}" in lines
    assert len([line for line in lines if "server rule" in line and "fluent_mono" in line]) == 2
    assert any(line.endswith("Smileys & Emotion, Travel & Places") for line in lines)


# --- resume ----------------------------------------------------------------------------------------------------------


# in a first cell, after its last round but before its result, in later cells
@pytest.mark.parametrize(
    ("number", "jobs"), [(1, "1"), (3, "1"), pytest.param(5, "2", marks=pytest.mark.slow), (11, "2")]
)
def test_interrupted_and_resumed_is_the_same_run(tmp_path, expected, capsys, number, jobs):
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, number)
        assert run(tmp_path / "run", *SCAFFOLD, "--jobs", jobs) == 130
    assert "interrupted; the same command with --resume continues" in capsys.readouterr().err
    assert run(tmp_path / "run", *SCAFFOLD, "--jobs", jobs, "--resume") == 0
    assert_same_run(tmp_path / "run", expected)


@pytest.mark.slow
@pytest.mark.parametrize("options", [MTGC, pytest.param(FEDSR, marks=pytest.mark.slow)])
def test_states_of_clients_and_stations_survive(tmp_path, options):
    assert run(tmp_path / "whole", *options) == 0
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 2)
        assert run(tmp_path / "run", *options) == 130
    arrays, notes = latest(next((tmp_path / "run" / "checkpoints").iterdir()))
    assert notes["round"] == (4 if options is MTGC else 2)
    kinds = {name.split(".")[1] for name in arrays if name.startswith("state.")}
    assert kinds == {"variables", "clients", "round"} | ({"stations"} if options is MTGC else set())
    assert run(tmp_path / "run", *options, "--resume") == 0
    assert_same_run(tmp_path / "run", everything(tmp_path / "whole"))


@pytest.mark.slow
def test_stages_before_round_1_go_on_where_they_were(tmp_path):
    """LSI's, killed when its translator is half done: what was done is not done again, and the end is the same."""
    run(tmp_path / "whole", *LSI)
    save, saved, asked = Checkpoints.save, [], []

    def killed(self, progress):
        saved.append(self.path.parent.name)
        if len(saved) == 5:
            raise KeyboardInterrupt
        save(self, progress)

    def counted(self, progress):
        asked.append(self.path.parent.name)
        save(self, progress)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "save", killed)
        assert run(tmp_path / "run", *LSI) == 130
    assert saved == ["heads", "latents", "latents", "translator", "translator"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "save", counted)
        assert run(tmp_path / "run", *LSI, "--resume") == 0
    assert asked == ["translator", "checkpoints", "checkpoints"]
    name = "lsi-mean-noto-seed0"
    for path in (f"checkpoints/{name}", f"stages/translator/{name}", f"stages/latents/{name}"):
        assert latest(tmp_path / "run" / path) == latest(tmp_path / "whole" / path)
    lines = [(tmp_path / folder / "metrics.jsonl").read_text().splitlines() for folder in ("run", "whole")]
    assert lines[0] == lines[1]
    told = [json.loads(line) for line in lines[0]]
    assert [(t.get("stage"), t["round"]) for t in told if "domain_accuracy" in t] == [("translator", 0)] * 2


def test_a_metrics_line_without_its_checkpoint_is_written_once(tmp_path, expected):
    """A kill between the two writes of a round."""
    save, saved = Checkpoints.save, []

    def killed(self, progress):
        saved.append(progress)
        if len(saved) == 5:
            raise KeyboardInterrupt
        save(self, progress)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "save", killed)
        assert run(tmp_path / "run", *SCAFFOLD) == 130
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"cell": "scaffold-mea')
    assert run(tmp_path / "run", *SCAFFOLD, "--resume") == 0
    assert_same_run(tmp_path / "run", expected)


def test_finished_cells_are_not_run_again(tmp_path, expected):
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 2, of="done")
        assert run(tmp_path / "run", *SCAFFOLD) == 130
    before = {c["aggregator"]: c for c in read_json(tmp_path / "run" / "result.json")["cells"]}
    assert set(before) == {"mean", "fedavgm"}  # both rules of the first seed: the table is already paired
    started = []
    with pytest.MonkeyPatch.context() as patch:
        report = ProgressBars.report

        def listening(self, event, cell, value):
            started.extend([(cell.seed, value)] if event == "start" else [])
            report(self, event, cell, value)

        patch.setattr(ProgressBars, "report", listening)
        assert run(tmp_path / "run", *SCAFFOLD, "--resume") == 0
        assert started == [(1, 0), (1, 0)]
        started.clear()
        assert run(tmp_path / "run", *SCAFFOLD, "--resume") == 0
        assert started == []
    after = read_json(tmp_path / "run" / "result.json")["cells"]
    assert all(cell in after for cell in before.values())  # times too
    assert_same_run(tmp_path / "run", expected)


def test_resume_of_nothing_starts_a_run_and_overwrite_starts_over(tmp_path, expected):
    assert run(tmp_path / "run", *SCAFFOLD, "--rounds", "1", "--resume") == 0
    assert run(tmp_path / "run", *SCAFFOLD, "--overwrite") == 0
    assert_same_run(tmp_path / "run", expected)


def test_a_checkpoint_of_another_shape_stops_before_training(tmp_path, capsys):
    """Client states of 3 stations where the run has 2."""
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 1)
        assert run(tmp_path / "run", *SCAFFOLD) == 130
    config = read_json(tmp_path / "run" / "config.json")
    (tmp_path / "run" / "config.json").write_text(json.dumps(config | {"stations": 2}))
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    capsys.readouterr()
    assert run(tmp_path / "run", *SCAFFOLD, "--stations", "2", "--resume") == 2
    out, err = capsys.readouterr()
    assert re.search(
        r"holds state.clients.*of shape \(3, 2.*but this run needs \(2, 2.*or delete .* to run this cell", err
    )
    assert err.count("\n") == 1 and out == ""
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


def test_a_damaged_checkpoint_is_named_and_can_be_deleted(tmp_path, capsys, expected):
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 2)
        assert run(tmp_path / "run", *SCAFFOLD) == 130
    cell = tmp_path / "run" / "checkpoints" / CELLS[0]
    for path in (cell / "2" / "arrays").rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:10])
    capsys.readouterr()
    assert run(tmp_path / "run", *SCAFFOLD, "--resume") == 2
    err = capsys.readouterr().err
    assert f"delete {cell} to run this cell again" in err and err.count("\n") == 1
    for path in sorted(cell.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    cell.rmdir()
    assert run(tmp_path / "run", *SCAFFOLD, "--resume") == 0
    assert_same_run(tmp_path / "run", expected)


def kill_after(folder, lines, delay, *options):
    """A run in a process of its own, killed ``delay`` seconds after its metrics have that many lines."""
    command = [sys.executable, "-m", "fedjax_dg.cli", "run", *SMALL, "--out", str(folder), *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    metrics = folder / "metrics.jsonl"
    while process.poll() is None and (not metrics.exists() or metrics.read_text().count("\n") < lines):
        time.sleep(0.002)
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    _, err = process.communicate()
    assert process.returncode == -signal.SIGKILL, f"the run had ended before it could be killed: {err}"


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    folder = tmp_path_factory.mktemp("long") / "run"
    assert run(folder, *LONG) == 0
    return everything(folder)


def test_killed_and_resumed_is_the_same_run(tmp_path, long):
    """The kill falls into the first 30 ms after a metrics line, when the checkpoint is being written."""
    kill_after(tmp_path / "run", 3, random.Random(0).uniform(0, 0.03), *LONG)
    assert run(tmp_path / "run", *LONG, "--resume") == 0
    assert_same_run(tmp_path / "run", long)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 4))
def test_killed_three_times_and_resumed_is_the_same_run(tmp_path, long, seed):
    moment = random.Random(seed)
    for lines in sorted(moment.sample(range(1, 6), 3)):
        kill_after(tmp_path / "run", lines, moment.uniform(0, 0.06), *LONG, "--resume")
    assert run(tmp_path / "run", *LONG, "--resume") == 0
    assert_same_run(tmp_path / "run", long)


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.0, 0.5, 1.0, 2.0, 3.0])
def test_killed_at_any_time_of_its_start(tmp_path, long, delay):
    command = [sys.executable, "-m", "fedjax_dg.cli", "run", *SMALL, "--out", str(tmp_path / "run"), *LONG]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not (tmp_path / "run").exists():
        time.sleep(0.0005)
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert run(tmp_path / "run", *LONG, "--resume") == 0
    assert_same_run(tmp_path / "run", long)


# --- training breaks down --------------------------------------------------------------------------------------------


def round_info(finite, merged=(True,), participants=None):
    """What ``check_finite`` looks at: finite [rounds, S, P], merged [rounds], participants [rounds, S, P]."""
    finite = np.asarray(finite)
    participants = np.broadcast_to(np.arange(finite.shape[2]), finite.shape) if participants is None else participants
    nothing = jnp.zeros(())
    return RoundInfo(
        jnp.asarray(participants),
        {},
        jnp.ones(finite.shape, jnp.int32),
        jnp.asarray(finite),
        jnp.asarray(merged),
        {"x": nothing},
        {"x": nothing},
    )


def test_a_breakdown_names_round_station_and_client():
    finite = np.ones((3, 2, 2), bool)
    check_finite(round_info(finite, [True] * 3), done=4)
    finite[1, 1, 0] = finite[2, 0, 0] = False
    info = round_info(finite, [True, False, False], participants=np.broadcast_to([[2, 5], [3, 4]], finite.shape))
    with pytest.raises(
        NotFinite, match=r"^Round 6: the loss or a parameter of client 3 at station 1 is not finite \(1 "
    ):
        check_finite(info, done=4)
    with pytest.raises(NotFinite, match="^Round 2: the merged model is not finite though every client's is"):
        check_finite(round_info(np.ones((2, 1, 1), bool), [True, False]), done=0)


@pytest.mark.usefixtures("little_optimization")
def test_a_cell_that_breaks_down_stops_and_the_others_finish(tmp_path, capsys):
    """One round with a server step of 1e30, and no client can train from there."""
    options = [*SCAFFOLD, "--seeds", "1", "--set", "server_lr=1e30"]
    assert run(tmp_path / "run", *options) == 1
    out, err = capsys.readouterr()
    reason = r"Round 2: the loss or a parameter of client [01] at station 0 is not finite \(3 such clients\); lower .*"
    assert re.fullmatch(rf"fedjax-dg: scaffold-fedavgm-fluent_mono-seed0: {reason}\n", err)
    assert re.search(rf"^scaffold-fedavgm-fluent_mono-seed0: stopped. {reason}$", out, re.MULTILINE)
    result = read_json(tmp_path / "run" / "result.json")
    assert [c["aggregator"] for c in result["cells"]] == ["mean"]
    (failed,) = result["failed"]
    assert failed["aggregator"] == "fedavgm" and re.fullmatch(reason, failed["error"])
    arrays, notes = latest(tmp_path / "run" / "checkpoints" / "scaffold-fedavgm-fluent_mono-seed0")
    assert notes["round"] == 1
    assert all(np.isfinite(np.frombuffer(b, d)).all() for d, _, b in arrays.values())
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)  # strict JSON, though the loss of round 1 overflows
    assert run(tmp_path / "run", *options, "--resume") == 1
    again = read_json(tmp_path / "run" / "result.json")
    assert (again["cells"], again["failed"]) == (result["cells"], result["failed"])


@pytest.mark.slow
def test_a_rate_far_too_high_stops_every_cell(tmp_path, capsys):
    options = ["--aggregator", "mean", "--seeds", "1", "--rounds", "2", "--local-steps", "2", "--client-lr", "1e30"]
    assert run(tmp_path / "run", *options) == 1
    out, err = capsys.readouterr()
    assert "Round 1: the loss or a parameter of client 0 at station 0 is not finite (6 such clients)" in err
    assert "┃" not in out  # no table of nothing
    result = read_json(tmp_path / "run" / "result.json")
    assert (result["cells"], len(result["failed"])) == ([], 1)


# --- the other commands ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("little_optimization")
def test_dry_run_prints_what_would_run_and_writes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["run", *SMALL, *SCAFFOLD, "--dry-run"]) == 0
    out = capsys.readouterr().out
    config, end = json.JSONDecoder().raw_decode(out)
    assert RunConfig(**config).algorithm == "scaffold" and config["participants"] == 1 and config["data_dir"] is None
    lines = out[end:].splitlines()
    assert "Federation with fluent_mono held out, seed 0: examples by station and domain" in lines
    table = [re.sub(r"[│ ]+", " ", line).split() for line in lines if line.startswith("│")]
    assert table == [
        ["0", "816", "0", "0", "0", "408", "408"],
        ["1", "0", "816", "0", "0", "408", "408"],
        ["2", "0", "0", "816", "0", "408", "408"],
        ["all", "816", "816", "816", "0", "408", "408"],
    ]
    assert "Clients by their main domain: noto 2, twemoji 2, fluent_flat 2" in lines
    assert "Padding: 0 % of the places; 4 cells to run" in lines
    assert any(re.fullmatch(r"Devices: \d+ \w+; mesh: all stations and clients on cpu:0", line) for line in lines)
    memory = [
        re.fullmatch(r"Memory of a round with (\w+): ([1-9]\d*) MiB a device; compiled in .* s", line) for line in lines
    ]
    assert [m[1] for m in memory if m] == ["mean", "fedavgm"]
    times = [
        re.match(r"Time with (\w+): about ([\d.e+]+) s a round, ([\d.e+]+) s for its 2 cells", line) for line in lines
    ]
    assert [t[1] for t in times if t and float(t[2]) > 0 and float(t[3]) > float(t[2])] == ["mean", "fedavgm"]
    assert list(tmp_path.iterdir()) == []


def test_table_of_several_runs(whole, tmp_path, capsys):
    other = tmp_path / "run"
    shutil.copytree(whole, other, ignore=shutil.ignore_patterns("checkpoints"))
    assert main(["table", str(whole), str(other), str(whole)]) == 0
    lines = [[cell.strip() for cell in line.strip("│").split("│")] for line in capsys.readouterr().out.splitlines()]
    for line in (whole / "table.md").read_text().splitlines()[4:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert [x[0] for x in lines if x[1:] == cells] == [str(whole), str(other)]  # both are called run


@pytest.mark.parametrize("content", [None, "", "{"])
def test_table_of_no_result(tmp_path, capsys, content):
    if content is not None:
        (tmp_path / "result.json").write_text(content)
    assert main(["table", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and ("has no result.json" in err if content is None else "is missing or damaged" in err)


def test_table_of_no_run(capsys):
    assert main(["table"]) == 2
    assert "No run folder is given: name one or more" in capsys.readouterr().err


def test_data_list(capsys):
    assert main(["data", "list"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("emoji_styles: 4,084 examples\n  4 domains: noto, twemoji, fluent_flat, fluent_mono\n")


def test_bars_on_a_terminal():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=120, color_system=None)
    cell = Cell("fedavg", "mean", "noto", 1)
    bars = ProgressBars(console, [Grid(RunConfig(rounds=4), None, None, {}, [cell], {})])
    with bars as report:
        report("compiled", cell, 2.0)
        report("start", cell, 1)
        for number in (2, 3, 4):
            report("record", cell, {"round": number, "train_loss": 0.5, "accuracy": 0.25})
            bars.bars.refresh()
            assert bars.bars.tasks[-1].completed == number == bars.bars.tasks[0].completed
        done = {"accuracy": 0.25, "source_accuracy": 0.5, "selected_round": 2, "rounds": 4, "seconds": 1.0}
        report("done", cell, done | {"selection": "last"})
        assert len(bars.bars.tasks) == 1
    assert "loss 0.500  held-out 25.0 %" in file.getvalue() and "mean, noto, seed 1" in file.getvalue()
