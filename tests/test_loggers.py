"""Numbers of runs in TensorBoard, W&B and MLflow: what is written, resumed, and lost; bars and lines of progress."""

import io
import json
import struct
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from rich.console import Console
from tiny import tiny_backbone, tiny_federation

import fedjax_dg as fdg
from fedjax_dg import loggers, progress
from fedjax_dg.cli import main
from fedjax_dg.results import Cell, read_json

CELL, OTHER = Cell("fedavg", "mean", "-90%", 0), Cell("fedavg", "hfedatm", "-90%", 0)
DONE = {**CELL.as_record(), "accuracy": 0.5, "selected_round": 2, "rounds": 3, "seconds": 1.5, "selection": "last"}


def record(number, accuracy):
    merge = {"fot": {"conv1": {"identity_fraction": [1.0, 0.5]}}, "regmean": {}}
    return {
        "round": number,
        "train_loss": 1.0 / number,
        "accuracy": accuracy,
        "accuracy/-90%": accuracy,
        "loss": None,
        "hparams": {"alpha": 0.5},
        "merge": merge,
    }


def whole_run(report, cell=CELL):
    report("compiled", cell, 2.0)
    report("start", cell, 0)
    report("stage", cell, ("translator", 0, 1, {}))
    report("stage", cell, ("translator", 1, 1, {"loss": 0.25}))
    for number in (1, 2, 3):
        report("record", cell, record(number, number / 4))
    report("done", cell, DONE)


ROUNDS = {
    "train_loss": {1: 1.0, 2: 0.5, 3: 1 / 3},
    "accuracy": {1: 0.25, 2: 0.5, 3: 0.75},
    "merge/fot/conv1/identity_fraction": {1: 0.75, 2: 0.75, 3: 0.75},
    "translator/loss": {1: 0.25},
}
RESULT = {"accuracy": 0.5, "selected_round": 2, "rounds": 3, "seconds": 1.5}


# --- the numbers -----------------------------------------------------------------------------------------------------


def test_numbers_leave_out_what_is_none():
    got = loggers.numbers(
        {"a": None, "b": [], "c": float("nan"), "d": [1.0, float("inf")], "e": "text", "f": [None], "g": ()}
    )
    assert got == {}
    assert loggers.numbers({"a": np.float32(2), "b": {"c": [[1, 2], [3, 6]]}, "seed": 3, "round": 1}) == {
        "a": 2,
        "b/c": 3,
    }


# --- TensorBoard, with the real writer -------------------------------------------------------------------------------


def events(folder):
    """All scalars of a folder's event files: name -> step -> value. An event purges what came before it, if it says so."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    found = {}
    for path in sorted(folder.glob("events*")):
        data, place = path.read_bytes(), 0
        while place < len(data):  # TFRecord: length, its checksum, content, its checksum
            (length,) = struct.unpack("<Q", data[place : place + 8])
            event = Event.FromString(data[place + 12 : place + 12 + length])
            place += length + 16
            if event.session_log.status == SessionLog.START:
                found = {k: {s: v for s, v in steps.items() if s < event.step} for k, steps in found.items()}
            for value in event.summary.value:
                if value.WhichOneof("value") == "simple_value":
                    found.setdefault(value.tag, {})[event.step] = value.simple_value
    return found


def test_tensorboard_has_every_number(tmp_path):
    with loggers.tensorboard(tmp_path) as report:
        whole_run(report)
    found = events(tmp_path / "tensorboard" / CELL.name)
    for name, steps in ROUNDS.items():
        assert found[name] == pytest.approx(steps), name
    assert "loss" not in found and not [name for name in found if "hparams" in name]
    for name, value in RESULT.items():
        assert found[f"result/{name}"] == pytest.approx({2: value})


def test_tensorboard_of_a_resumed_cell_is_one_curve(tmp_path, monkeypatch):
    with loggers.tensorboard(tmp_path) as report:
        for number in (1, 2, 3):
            report("record", CELL, record(number, 0.0))
    # files are named by the second, and read in the order of their names
    import tensorboardX.event_file_writer as writer

    monkeypatch.setattr(writer.time, "time", lambda now=writer.time.time() + 100: now)
    with loggers.tensorboard(tmp_path) as report:
        report("start", CELL, 1)
        report("record", CELL, record(2, 1.0))
    assert events(tmp_path / "tensorboard" / CELL.name)["accuracy"] == {1: 0.0, 2: 1.0}


# --- W&B and MLflow, with the few functions that are used of them ----------------------------------------------------


@pytest.fixture
def wandb(monkeypatch):
    """What was asked of a module that looks like wandb: its runs, by id."""
    for name in ("WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    runs = {}

    class Run:
        def __init__(self, **options):
            self.id, self.options = options["id"] or f"id{len(runs)}", options
            self.rows, self.summary, self.axes, self.exit_code = [], {}, {}, None

        def define_metric(self, name, step_metric):
            self.axes[name] = step_metric

        def log(self, values):
            self.rows.append(values)

        def finish(self, exit_code):
            self.exit_code = exit_code

    def init(**options):
        run = Run(**options)
        runs.setdefault(run.id, []).append(run)
        return run

    module = ModuleType("wandb")
    module.init, module.Settings = init, lambda **settings: settings
    monkeypatch.setitem(sys.modules, "wandb", module)
    return runs


@pytest.fixture
def mlflow(monkeypatch):
    """What was asked of a module that looks like mlflow: its runs, by id."""
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    for name in ("MLFLOW_DISABLE_TELEMETRY", "MLFLOW_HTTP_REQUEST_MAX_RETRIES"):
        monkeypatch.setenv(name, "1")
    server = SimpleNamespace(uri=None, experiments={}, runs={})

    class Client:
        def __init__(self, uri):
            server.uri = uri

        def get_experiment_by_name(self, name):
            return SimpleNamespace(experiment_id=server.experiments[name]) if name in server.experiments else None

        def create_experiment(self, name):
            return server.experiments.setdefault(name, "7")

        def create_run(self, experiment_id, run_name, tags):
            run = SimpleNamespace(
                name=run_name, experiment=experiment_id, tags=tags, params={}, metrics={}, status=None
            )
            run_id = f"run{len(server.runs)}"
            server.runs[run_id] = run
            return SimpleNamespace(info=SimpleNamespace(run_id=run_id))

        def log_batch(self, run_id, metrics=(), params=()):
            assert len(metrics) <= 1000 and len(params) <= 100  # else MLflow refuses
            for key, value, _, step in metrics:
                assert set(key) <= set("abcdefghijklmnopqrstuvwxyz0123456789_-. /:")
                server.runs[run_id].metrics.setdefault(key, {})[step] = value
            server.runs[run_id].params.update(params)

        def set_tag(self, run_id, key, value):
            server.runs[run_id].tags[key] = value

        def set_terminated(self, run_id, status):
            server.runs[run_id].status = status

    module, entities = ModuleType("mlflow"), ModuleType("mlflow.entities")
    module.MlflowClient = Client
    entities.Metric = lambda key, value, timestamp, step: (key, value, timestamp, step)
    entities.Param = lambda key, value: (key, value)
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    return server


def test_wandb_has_every_number_and_stays_at_home(tmp_path, wandb):
    (tmp_path / "config.json").write_text('{"rounds": 3}')
    with loggers.wandb(tmp_path) as report:
        whole_run(report)
    ((run,),) = wandb.values()
    assert run.options["mode"] == "offline" and run.options["project"] == "fedjax_dg"
    assert run.options["config"] == {"rounds": 3, **CELL.as_record()} and run.options["name"] == CELL.name
    assert run.axes == {"*": "round"}
    for name, steps in ROUNDS.items():
        assert {row["round"]: row[name] for row in run.rows if name in row} == steps
    assert run.summary == {f"result/{name}": value for name, value in RESULT.items()}
    assert run.exit_code == 0


def test_wandb_does_as_the_environment_says(tmp_path, wandb, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    with loggers.wandb(tmp_path) as report:
        report("start", CELL, 0)
    ((run,),) = wandb.values()
    assert (run.options["mode"], run.options["project"]) == ("online", "mine")


def test_mlflow_has_every_number_in_the_run_folder(tmp_path, mlflow):
    (tmp_path / "config.json").write_text('{"rounds": 3, "settings": {"alpha": 0.5}}')
    with loggers.mlflow(tmp_path) as report:
        whole_run(report)
    (run,) = mlflow.runs.values()
    assert mlflow.uri == f"sqlite:///{tmp_path}/mlflow.db" and mlflow.experiments == {"fedjax_dg": "7"}
    assert run.params["settings/alpha"] == "0.5" and run.params["held_out"] == "-90%" and run.params["rounds"] == "3"
    for name, steps in ROUNDS.items():
        assert run.metrics[name] == steps
    assert run.metrics["accuracy/-90_"] == ROUNDS["accuracy"]
    assert {k: run.metrics[f"result/{k}"] for k in RESULT} == {k: {2: v} for k, v in RESULT.items()}
    assert run.status == "FINISHED"


def test_a_resumed_cell_goes_on_in_its_own_run(tmp_path, wandb, mlflow):
    for done in (0, 1):
        with loggers.opened(["wandb", "mlflow"], tmp_path) as report:
            for cell in (CELL, OTHER):
                report("start", cell, done)
                report("record", cell, record(done + 1, 0.5))
            if done == 0:
                assert [run.status for run in mlflow.runs.values()] == ["RUNNING"] * 2
    assert [len(sessions) for sessions in wandb.values()] == [2, 2]
    assert [run.metrics["accuracy"] for run in mlflow.runs.values()] == [{1: 0.5, 2: 0.5}] * 2
    assert [run.status for run in mlflow.runs.values()] == ["KILLED"] * 2  # stopped, not finished
    assert {run.exit_code for sessions in wandb.values() for run in sessions} == {1}
    assert [set(read_json(tmp_path / f"{name}_runs.json")) for name in ("wandb", "mlflow")] == [
        {CELL.name, OTHER.name}
    ] * 2


def test_what_broke_down_says_so(tmp_path, wandb, mlflow):
    with loggers.opened(["tensorboard", "wandb", "mlflow"], tmp_path) as report:
        report("start", CELL, 0)
        report("failed", CELL, "Round 1: not finite")
    ((run,),) = wandb.values()
    assert (run.exit_code, run.summary) == (1, {"error": "Round 1: not finite"})
    (run,) = mlflow.runs.values()
    assert (run.status, run.tags["error"]) == ("FAILED", "Round 1: not finite")


# --- what fails stops nothing ----------------------------------------------------------------------------------------


def failing(fails):
    """A logger that fails at the reports numbered in ``fails``; and those it was asked for."""
    asked = []

    class Logger:
        def __enter__(self):
            return self.report

        def __exit__(self, *exception):
            asked.append("exit")

        def report(self, event, cell, value):
            asked.append(value)
            if len(asked) in fails:
                raise ConnectionError("no\nroute")

    return Logger(), asked


def test_the_first_failure_is_told_and_all_are_counted():
    told, (logger, asked) = [], failing({2, 3, 5})
    with loggers.guarded("wandb", logger, told.append) as report:
        for number in range(6):
            report("record", CELL, number)
        assert told == ["Logging to wandb failed (ConnectionError: no route); the run goes on."]
    assert asked == [0, 1, 2, 3, 4, 5, "exit"]
    assert told[1:] == ["Logging to wandb: 3 reports are missing there; metrics.jsonl has all numbers."]


def test_after_three_failures_in_a_row_a_logger_is_left_alone():
    told, (logger, asked) = [], failing({1, 2, 3})
    with loggers.guarded("mlflow", logger, told.append) as report:
        for number in range(6):
            report("record", CELL, number)
    assert asked == [0, 1, 2, "exit"] and len(told) == 2 and "6 reports are missing" in told[1]


def test_an_interruption_is_no_failure():
    logger, asked = failing(())

    def interrupted(event, cell, value):
        raise KeyboardInterrupt

    logger.report = interrupted
    with pytest.raises(KeyboardInterrupt), loggers.guarded("wandb", logger) as report:
        report("record", CELL, 0)
    assert asked == ["exit"]


def test_one_that_fails_in_the_end_is_told():
    told, (logger, _) = [], failing(())
    logger.__class__.__exit__ = lambda self, *exception: 1 / 0
    with loggers.guarded("wandb", logger, told.append) as report:
        report("record", CELL, 0)
    assert told == ["Logging to wandb failed (ZeroDivisionError: division by zero); the run goes on."]


def test_an_error_of_the_run_goes_through():
    told, (logger, _) = [], failing(())
    with pytest.raises(ZeroDivisionError), loggers.guarded("wandb", logger, told.append):
        raise ZeroDivisionError
    assert told == []


def test_one_that_does_not_close_leaves_the_others_closed(tmp_path, wandb):
    def open_sink(cell, done):
        def end(how, result, error):
            ended.append((cell, how))
            raise ConnectionError

        return loggers.Sink(lambda values, step: None, end)

    ended = []
    with pytest.raises(ConnectionError), loggers.by_cell(open_sink) as report:
        report("start", CELL, 0)
        report("start", OTHER, 0)
    assert sorted(ended) == sorted([(CELL, "stopped"), (OTHER, "stopped")])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["tensorbord"], "Unknown logger 'tensorbord'; did you mean 'tensorboard'?"),
        (["wandb"], r"Logging to wandb needs wandb: run pip install 'fedjax-dg\[wandb\]'."),
    ],
)
def test_what_cannot_log_is_said_before_the_run(names, message, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=message):
        loggers.chosen(names)
    with pytest.raises(ValueError, match=message), loggers.opened(names, tmp_path):
        pass


# --- the command line ------------------------------------------------------------------------------------------------

SMALL = "--stations 3 --clients-per-station 2 --station-rounds 1 --local-steps 1 --batch-size 8 --rounds 2 --seeds 1"


def test_logging_changes_nothing_of_a_run(tmp_path, capsys, monkeypatch, mlflow):
    """Beside a logger that works and one that does not: every number is in the run folder, and the run is the same run."""
    monkeypatch.setitem(sys.modules, "wandb", ModuleType("wandb"))  # has no init
    folder = tmp_path / "run"
    run = ["run", *SMALL.split(), "--aggregator", "mean", "--out", str(folder)]
    assert main([*run, "--log", "wandb,tensorboard,mlflow"]) == 0
    out = capsys.readouterr().out
    assert "Logging to wandb failed (AttributeError" in out and "Logging to wandb: 4 reports are missing" in out
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (cell,) = read_json(folder / "result.json")["cells"]
    (logged,) = mlflow.runs.values()
    assert logged.metrics["accuracy"] == {line["round"]: line["accuracy"] for line in lines}
    assert logged.metrics["result/accuracy"] == {cell["selected_round"]: cell["accuracy"]}
    seen = events(folder / "tensorboard" / "fedavg-mean-fluent_mono-seed0")
    assert seen["train_loss"] == pytest.approx({line["round"]: line["train_loss"] for line in lines})
    assert "log" not in read_json(folder / "config.json")
    assert main([*run, "--resume"]) == 0


def test_a_logger_that_does_not_exist_leaves_no_folder(tmp_path, capsys):
    assert main(["run", "--log", "visdom", "--out", str(tmp_path / "run")]) == 2
    assert "Unknown logger 'visdom'" in capsys.readouterr().err and not (tmp_path / "run").exists()


# --- progress --------------------------------------------------------------------------------------------------------


def console_of(**options):
    return Console(file=io.StringIO(), width=100, color_system=None, **options)


def test_bars_are_shown_where_they_can_move(monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    assert progress.shows_bars(console_of(force_terminal=True))
    assert not progress.shows_bars(console_of())
    assert not progress.shows_bars(console_of(force_jupyter=True))  # without ipywidgets
    monkeypatch.setattr(progress.importlib.util, "find_spec", lambda name: name)
    assert progress.shows_bars(console_of(force_jupyter=True))


def test_a_bar_on_a_terminal():
    console = console_of(force_terminal=True)
    with progress.round_bar(4, 1, console) as report:
        for number in (2, 3, 4):
            report({"round": number, "train_loss": 0.5, "accuracy": 0.25, "source_accuracy": None})
    last = console.file.getvalue().splitlines()[-2]  # then the cursor comes back
    assert "4/4" in last and "loss 0.500  held-out 25.0 %" in last


def test_ten_lines_elsewhere():
    console = console_of()
    with progress.round_bar(40, 20, console) as report:
        for number in range(21, 41):
            report({"round": number, "train_loss": 0.5, "source_accuracy": 0.25})
    lines = console.file.getvalue().splitlines()
    assert lines == [f"round {number} of 40: loss 0.500  source 25.0 %" for number in (24, 28, 32, 36, 40)]


def test_run_shows_its_rounds(key, capsys):
    federation = tiny_federation([[4, 3]], batch_size=2)
    round_fn = fdg.make_round(tiny_backbone(), fdg.algorithms.fedavg(), federation.topology)
    _, history = fdg.run(round_fn, round_fn.init(key), federation, rounds=2, key=key, progress=True)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(history) == 2 and lines[1].startswith(f"round 2 of 2: loss {history[1]['train_loss']:.3f}")
    fdg.run(round_fn, round_fn.init(key), federation, rounds=1, key=key)
    assert capsys.readouterr().out == ""
