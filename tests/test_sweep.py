"""Sweeps: what is drawn and combined, which settings share a program, and that every cell is the run alone."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest
from shared import one_compilation

import fedjax_dg as fdg
from fedjax_dg import cells, estimate
from fedjax_dg.cells import batches_of, size_of
from fedjax_dg.cli import main
from fedjax_dg.config import RunConfig, build_algorithm, check, topology
from fedjax_dg.results import Cell, identity, read_json, read_metrics
from fedjax_dg.sweep import drawn, grids_of, product, read_sweep

CONFIG = RunConfig(
    aggregator="mean",
    stations=2,
    clients_per_station=2,
    station_rounds=1,
    local_steps=1,
    rounds=2,
    seeds=1,
    examples_per_domain=200,
)
BASE = check(CONFIG)
SCORES = ("train_loss", "loss", "accuracy", "source_accuracy", "balanced_accuracy")


# --- which settings --------------------------------------------------------------------------------------------------


def test_a_grid_is_a_product_and_lists_and_draws_multiply_with_it():
    found = product([{"mu": 1.0}, {"mu": 2.0}], {"client_lr": [0.1, 0.2]}, None, BASE)
    assert found == [{"mu": m, "client_lr": lr} for m in (1.0, 2.0) for lr in (0.1, 0.2)]
    space = {"count": 3, "mu": {"uniform": [0.0, 1.0]}}
    config = check(dataclasses.replace(BASE, algorithm="fedprox"))
    assert len(product(None, {"client_lr": [0.1, 0.2]}, space, config)) == 6
    assert product(None, {"client_lr": np.array([0.5, 0.5])}, None, BASE) == [{"client_lr": 0.5}]


def test_draws_are_in_their_bounds_and_of_the_right_kind():
    space = {
        "client_lr": {"log_uniform": [1e-3, 1e-1]},
        "batch_size": {"int_uniform": [3, 5]},
        "algorithm": {"choice": ["fedavg", "fedsr"]},
    }
    found = drawn({"count": 200, "defaults_first": False, **space}, BASE)
    rates, sizes = (np.array([s[k] for s in found]) for k in ("client_lr", "batch_size"))
    assert 1e-3 <= rates.min() < 2e-3 and 5e-2 < rates.max() <= 1e-1
    assert 0.35 < (rates < 1e-2).mean() < 0.65  # a decade each
    assert set(sizes) == {3, 4, 5} and {s["algorithm"] for s in found} == {"fedavg", "fedsr"}
    assert all(type(s["client_lr"]) is float and type(s["batch_size"]) is int for s in found)


def test_a_draw_depends_on_seed_name_and_number_alone():
    rate, size = {"client_lr": {"log_uniform": [1e-3, 1e-1]}}, {"batch_size": {"int_uniform": [3, 500]}}
    few, many = drawn({"count": 3} | rate, BASE), drawn({"count": 5} | size | rate, BASE)
    assert [s["client_lr"] for s in many][:3] == [s["client_lr"] for s in few]
    other = drawn({"count": 3, "hparams_seed": 1} | rate, BASE)
    assert not {s["client_lr"] for s in other[1:]} & {s["client_lr"] for s in few}
    space = {"mu": {"uniform": [0.0, 1.0]}, "nu": {"uniform": [0.0, 1.0]}}
    (alike,) = drawn({"count": 1, "defaults_first": False} | space, BASE)
    assert alike["mu"] != alike["nu"]
    assert few[0] == other[0] == {"client_lr": BASE.client_lr}  # the configuration's own
    assert drawn({"count": 1, "alpha": {"uniform": [0.0, 0.1]}}, check(RunConfig()))[0] == {"alpha": 0.75}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "Nothing is swept: give a list of settings"),
        ({"settings": [{}]}, "Nothing is swept"),
        ({"grid": {"client_lr": 0.1}}, "client_lr = 0.1 in a grid is no list of values: give one, such as"),
        ({"grid": {"client_lr": []}}, r"client_lr = \[\] in a grid is no list"),
        ({"grid": {"algorithm": "fedsr"}}, "algorithm = 'fedsr' in a grid is no list"),
        ({"settings": [{"client_lr": 1.0}], "grid": {"client_lr": [0.1]}}, "client_lr is swept in more than one way"),
        (
            {"random": {"client_lr": {"uniform": [0, 1]}}},
            "count=None of a random search is not a positive whole number",
        ),
        ({"random": {"count": 2, "client_lr": {"normal": [0, 1]}}}, "says not how to draw it: write { log_uniform = "),
        ({"random": {"count": 2, "client_lr": 0.1}}, "client_lr = 0.1 says not how to draw it"),
        (
            {"random": {"count": 2, "client_lr": {"log_uniform": [0.0, 1.0]}}},
            "has no such bounds: give the smallest, then",
        ),
        ({"random": {"count": 2, "client_lr": {"uniform": [1.0, 0.5]}}}, "has no such bounds"),
        ({"random": {"count": 2, "client_lr": {"choice": []}}}, "has no such bounds"),
        (
            {"random": {"count": 2, "hparams_seed": -1}},
            "hparams_seed=-1, defaults_first=True: give a whole number from 0",
        ),
        ({"random": {"count": 2, "momentun": {"uniform": [0, 1]}}}, "Unknown option of fedavg or mean 'momentun'"),
    ],
)
def test_what_sweeps_nothing_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        product(**{"settings": None, "grid": None, "random": None, "config": BASE} | given)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"held_out": "noto"}, "held_out cannot be swept: all cells of a sweep have it in common"),
        ({"seeds": 5}, "seeds cannot be swept"),
        ({"client_lr": -0.1}, "client_lr=-0.1 is not positive"),
        ({"client_lr": "fast"}, "client_lr = 'fast' in a sweep is not of type float"),
        ({"algorithm": "fedswag"}, "Unknown algorithm 'fedswag'"),
        ({"mu": 0.1}, "Unknown option of fedavg or mean 'mu'"),
        ({"rounds": 0}, "rounds=0 is not positive"),
    ],
)
def test_a_bad_setting_is_refused_before_anything_is_trained(tmp_path, setting, message):
    with pytest.raises(ValueError, match=message):
        fdg.sweep(CONFIG, [{"client_lr": 0.1}, setting], out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


# --- what shares a program -------------------------------------------------------------------------------------------


def test_settings_that_differ_in_numbers_share_a_grid_and_others_have_their_own():
    config = check(dataclasses.replace(CONFIG, aggregator="mean,hfedatm", seeds=2))
    settings = product(None, {"gram": ["sum", "mean"], "alpha": [0.5, 1.0], "client_lr": [0.1, 1]}, None, config)
    first, second = grids_of(config, settings)
    assert [g.config.settings["gram"] for g in (first, second)] == ["sum", "mean"]
    assert "alpha" not in first.config.settings and first.config.client_lr == config.client_lr
    # gram and alpha are nothing to the mean
    of_mean = [c for g in (first, second) for c in g.cells if c.aggregator == "mean"]
    assert {c.setting for c in of_mean} == {(("client_lr", 0.1),), (("client_lr", 1.0),)}
    assert len(set(of_mean)) == 4 and len(of_mean) == 8  # both grids have them, and one trains them
    assert len([c for c in first.cells if c.aggregator == "hfedatm"]) == 2 * 2 * 2
    assert size_of(first, "mean", 16) == 2 and size_of(first, "hfedatm", 3) == 2 and size_of(first, "hfedatm", 1) == 1


def test_options_of_the_run_have_a_grid_each_and_no_name_twice():
    settings = [{"algorithm": "fedavg"}, {"algorithm": "fedprox", "mu": 0.1}, {"algorithm": "fedprox", "mu": 1.0}]
    grids = grids_of(BASE, settings)
    assert [g.config.algorithm for g in grids] == ["fedavg", "fedprox"]
    assert [c.setting for g in grids for c in g.cells] == [(), (("mu", 0.1),), (("mu", 1.0),)]
    assert [c.name for g in grids for c in g.cells] == [
        "fedavg-mean-fluent_mono-seed0",
        "fedprox-mean-fluent_mono-seed0-mu=0.1",
        "fedprox-mean-fluent_mono-seed0-mu=1.0",
    ]


def test_batches_hold_cells_of_one_federation_and_round():
    cells = [
        Cell("fedavg", rule, "noto", s, (("mu", m),)) for s in (0, 1) for rule in ("mean", "median") for m in range(5)
    ]
    latest = {cell: int(cell == cells[1]) for cell in cells}
    batches = batches_of(cells, latest, lambda rule: {"mean": 3, "median": 4}[rule])
    assert sorted(cell for batch in batches for cell in batch) == sorted(cells)
    assert [len(batch) for batch in batches] == [3, 1, 1, 4, 1, 3, 2, 4, 1]
    assert all(len({(c.seed, c.aggregator, latest[c]) for c in batch}) == 1 for batch in batches)


def test_names_of_cells_are_fit_for_folders_and_differ():
    odd = [Cell("a", "b", "c", 0, (("pretrained", path),)) for path in ("x/y", "x_y", "x?y", "z" * 400, "z" * 401)]
    assert len({c.name for c in odd}) == 5
    assert all(re.fullmatch(r"[\w.=,+ -]{1,170}", c.name) for c in odd)
    assert odd[0].as_record() == {**dict(zip("abcd", "abcd")), "hparams": {}} or identity(odd[0].as_record()) == odd[0]


# --- files -----------------------------------------------------------------------------------------------------------


def written(tmp_path, sweep, run="rounds = 2\n"):
    path = tmp_path / "s.toml"
    path.write_text(f"[run]\n{run}\n{sweep}")
    return path


def test_files_say_grids_lists_and_random_searches(tmp_path):
    text = "[sweep.grid]\nclient_lr = [0.1, 0.2]\n[sweep.list]\nmu = [1, 2]\nbatch_size = [3, 4]\n"
    found = read_sweep(written(tmp_path, text + "[sweep.random]\ncount = 2\nalpha = { uniform = [0.1, 0.9] }"))
    assert found["settings"] == [{"mu": 1, "batch_size": 3}, {"mu": 2, "batch_size": 4}]
    assert found["grid"] == {"client_lr": [0.1, 0.2]}
    assert found["random"] == {"count": 2, "alpha": {"uniform": [0.1, 0.9]}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "says not what to sweep: add a table"),
        ("[sweep]\nclient_lr = [0.1]", "says not what to sweep"),
        ("[sweep.gird]\nclient_lr = [0.1]", "Unknown table .sweep.NAME. in .* 'gird'; did you mean 'grid'"),
        ("[sweep.list]\nmu = [1, 2]\nbatch_size = [3]", "needs lists of one length"),
        ("[sweep.list]\nmu = 1", "needs lists of one length"),
        ("[sweeps]\nmu = 1", "Unknown table in .*'sweeps'"),
    ],
)
def test_a_file_without_a_sweep_is_refused(tmp_path, capsys, text, message):
    assert main(["sweep", "--config", str(written(tmp_path, text)), "--out", str(tmp_path / "run")]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "run").exists()


def test_each_command_names_the_other(tmp_path, capsys):
    path = written(tmp_path, "[sweep.grid]\nclient_lr = [0.1]")
    assert main(["run", "--config", str(path)]) == 2
    assert "has [sweep] tables: give it to fedjax-dg sweep" in capsys.readouterr().err
    assert main(["sweep"]) == 2
    assert "No sweep is given: name its file with --config" in capsys.readouterr().err
    assert main(["sweep", "--config", str(path), "--at-once", "0"]) == 2
    assert "at_once=0 is not positive" in capsys.readouterr().err


@pytest.fixture(scope="module", autouse=True)
def programs():
    with one_compilation() as compiled:
        yield compiled


# --- trained ---------------------------------------------------------------------------------------------------------


def records(folder):
    """What was measured after every round of every cell."""
    return {(identity(r), r["round"]): {k: r[k] for k in SCORES} for r in read_metrics(folder)}


GRID = {"client_lr": [0.02, 0.1, 0.3]}


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """Three settings x two seeds, one at a time; and what it compiled."""
    told = []
    found = fdg.sweep(
        dataclasses.replace(CONFIG, seeds=2),
        grid=GRID,
        out=tmp_path_factory.mktemp("swept") / "run",
        report=lambda event, cell, value: told.append(event),
    )
    return found, told


def test_one_program_runs_all_settings_and_seeds(swept):
    found, told = swept
    assert told.count("compiled") == 1 and len(found.cells) == 6 and found.failed == []
    assert [c["hparams"] for c in found.cells] == [{"client_lr": lr} for s in range(2) for lr in GRID["client_lr"]]
    assert [c["seed"] for c in found.cells] == [0, 0, 0, 1, 1, 1]
    assert read_json(found.folder / "result.json")["cells"] == found.cells


def test_arrays_have_the_cells_in_their_places(swept):
    found, _ = swept
    assert found.axes == {
        "aggregator": ["mean"],
        "setting": [{"client_lr": lr} for lr in GRID["client_lr"]],
        "held_out": ["fluent_mono"],
        "seed": [0, 1],
    }
    scores = found.scores("source_accuracy")
    assert scores.shape == (1, 3, 1, 2)
    for cell in found.cells:
        place = GRID["client_lr"].index(cell["hparams"]["client_lr"])
        assert scores[0, place, 0, cell["seed"]] == cell["source_accuracy"]
    assert found._replace(cells=found.cells[1:]).scores()[0, 0, 0, 0] != found.scores()[0, 0, 0, 0]  # nan
    assert "Selected for fedavg, mean: client_lr=" in found.table()
    assert found.table(settings="all", format="csv").count("client_lr=") == 3


def test_every_cell_is_the_run_alone_to_the_bit(swept, tmp_path):
    found, _ = swept
    expected = records(found.folder)
    for client_lr in GRID["client_lr"][:2]:
        options = "--aggregator mean --stations 2 --clients-per-station 2 --station-rounds 1 --local-steps 1 --rounds 2"
        options += " --examples-per-domain 200"
        alone = tmp_path / str(client_lr)
        assert main(["run", *options.split(), "--seeds", "2", "--client-lr", str(client_lr), "--out", str(alone)]) == 0
        for (cell, number), scores in records(alone).items():
            assert scores == expected[cell._replace(setting=(("client_lr", client_lr),)), number]


def test_settings_side_by_side_are_the_same_up_to_rounding(swept, tmp_path):
    """Three in a program for two: the last one is computed beside itself."""
    found, _ = swept
    beside = fdg.sweep(dataclasses.replace(CONFIG, seeds=2), grid=GRID, out=tmp_path / "run", at_once=2)
    expected, got = records(found.folder), records(beside.folder)
    assert got.keys() == expected.keys()
    for which, scores in got.items():
        for name in ("train_loss", "loss"):
            assert scores[name] == pytest.approx(expected[which][name], rel=2e-5)
        for name in ("accuracy", "source_accuracy"):
            assert scores[name] == pytest.approx(expected[which][name], abs=0.01)  # of 200 icons, two


def test_a_setting_that_breaks_down_leaves_the_others_alone(swept, tmp_path):
    found, _ = swept
    config, settings = dataclasses.replace(CONFIG, seeds=1), [{"client_lr": x} for x in (0.02, 1e30, 0.1)]
    told = []
    beside = fdg.sweep(config, settings, out=tmp_path / "run", at_once=2, report=lambda *what: told.append(what[:2]))
    (failure,) = beside.failed
    assert failure["hparams"] == {"client_lr": 1e30} and re.match("Round 2: .* is not finite", failure["error"])
    expected = records(found.folder)
    for which, scores in records(beside.folder).items():
        if which[0].setting[0][1] != 1e30:
            assert scores["loss"] == pytest.approx(expected[which]["loss"], rel=2e-5)
    assert np.isnan(beside.scores()).tolist() == [[[[False]], [[True]], [[False]]]]
    assert f"Missing: fedavg, mean, fluent_mono, seed 0, client_lr=1e+30: {failure['error']}" in beside.table(
        settings="all"
    )
    assert [event for event, cell in told if cell.setting[0][1] == 1e30] == ["start", "record", "failed"]


class Killed(KeyboardInterrupt):
    """Stands for a kill; nothing is cleaned up after it."""


@pytest.mark.parametrize("at_once", [1, 2])
def test_a_sweep_that_was_stopped_goes_on_to_the_same_numbers(tmp_path, at_once):
    def stop_after(number):
        def report(event, cell, value):
            nonlocal number
            number -= event == "record"
            if number == 0:
                raise Killed  # between the writing of two cells' checkpoints

        return report

    config, grid = dataclasses.replace(CONFIG, seeds=2), {"client_lr": GRID["client_lr"][:2]}
    whole = fdg.sweep(config, grid=grid, out=tmp_path / "whole", at_once=at_once, jobs=1)
    out = tmp_path / "stopped"
    with pytest.raises(Killed):
        fdg.sweep(config, grid=grid, out=out, at_once=at_once, jobs=1, report=stop_after(3))
    again = fdg.sweep(config, grid=grid, out=out, at_once=at_once, jobs=1, resume=True)
    assert records(out) == records(whole.folder)
    assert again.scores().tolist() == whole.scores().tolist()


def test_settings_can_be_added_and_finished_ones_are_not_run_again(swept, tmp_path):
    config, out, started = dataclasses.replace(CONFIG, rounds=1), tmp_path / "run", []
    fdg.sweep(config, grid={"client_lr": [0.1]}, out=out)
    more = fdg.sweep(
        config,
        grid={"client_lr": [0.1, 0.2]},
        out=out,
        resume=True,
        report=lambda event, cell, value: started.append(cell) if event == "start" else None,
    )
    assert [cell.setting for cell in started] == [(("client_lr", 0.2),)]
    assert [c["hparams"]["client_lr"] for c in more.cells] == [0.1, 0.2]
    with pytest.raises(ValueError, match="already holds this run: pass --resume"):
        fdg.sweep(config, grid={"client_lr": [0.1]}, out=out)


@pytest.mark.slow
def test_methods_that_work_before_round_1_are_swept_side_by_side(tmp_path):
    """ELCFS makes a bank of amplitudes first."""
    config = dataclasses.replace(CONFIG, algorithm="elcfs", rounds=1, batch_size=4)
    alone = fdg.sweep(config, grid={"meta_lr": [0.1, 0.9]}, out=tmp_path / "alone", at_once=1)
    beside = fdg.sweep(config, grid={"meta_lr": [0.1, 0.9]}, out=tmp_path / "beside", at_once=2)
    one, other = records(alone.folder), records(beside.folder)
    assert len(one) == 2 and one.keys() == other.keys()
    assert all(other[k]["loss"] == pytest.approx(one[k]["loss"], rel=2e-5) for k in one)


def test_the_command_writes_what_a_run_writes(tmp_path, capsys):
    run = 'aggregator = "mean"\nstations = 2\nclients_per_station = 2\nstation_rounds = 1\nlocal_steps = 1\nrounds = 1'
    path = written(
        tmp_path, "[sweep.list]\nclient_lr = [0.1, 0.2]\nalgorithm = ['fedavg', 'fedprox']", run + "\nseeds = 1"
    )
    assert main(["sweep", "--config", str(path), "--dry-run"]) == 0
    out = tmp_path / "run"
    assert main(["sweep", "--config", str(path), "--out", str(out), "--jobs", "1"]) == 0
    told = capsys.readouterr().out
    result = read_json(out / "result.json")
    assert [(c["algorithm"], c["hparams"]) for c in result["cells"]] == [
        ("fedavg", {"client_lr": 0.1}),
        ("fedprox", {"client_lr": 0.2}),
    ]
    assert sorted(p.name for p in out.iterdir()) == [
        *("cells.json", "checkpoints", "config.json", "metrics.jsonl", "model.json", "result.json", "splits.json"),
        "table.md",
    ]
    assert "fedprox-mean-fluent_mono-seed0-client_lr=0.2: held-out" in told
    assert "Selected for fedprox, mean: client_lr=0.2 (1 of 1)" in told and f"Run folder: {out}" in told
    assert main(["sweep", "--config", str(path), "--out", str(out), "--resume"]) == 0
    assert json.loads((out / "result.json").read_text()) == result


def test_leave_one_domain_out_trains_without_pairs_too():
    config = check(dataclasses.replace(CONFIG, held_out="all", selection="leave-one-domain-out", seeds=1))
    (grid,) = grids_of(config, [{"client_lr": 0.1}])
    names = ["noto", "twemoji", "fluent_flat", "fluent_mono"]
    pairs = [f"{a}+{b}" for i, a in enumerate(names) for b in names[i + 1 :]]
    assert [c.held_out for c in grid.cells] == names + pairs
    federation = grid.federations["noto+fluent_mono", 0]
    held = np.unique(np.asarray(federation.domain)[np.asarray(federation.mask)])
    assert held.tolist() == [1, 2]
    judged = federation.evaluation.examples
    counts = np.bincount(np.asarray(judged.domain)[np.asarray(judged.mask)])
    assert counts[0] == counts[3] == 200 > counts[1]
    with pytest.raises(ValueError, match="compares all held-out domains, but held_out=noto: give all"):
        check(dataclasses.replace(CONFIG, held_out="noto", selection="leave-one-domain-out"))


def test_a_pair_is_scored_on_both_its_domains(swept):
    from fedjax_dg.evaluate import Evaluation, scores

    confusion = np.zeros((3, 2, 2))
    confusion[0] = [[3, 1], [0, 0]]
    confusion[1] = [[0, 0], [2, 2]]
    confusion[2] = [[1, 0], [0, 0]]
    found = scores(Evaluation(confusion, confusion * 0, np.array([4.0, 8.0, 1.0])), ("a", "b", "c"), "a+b")
    assert (found["accuracy"], found["balanced_accuracy"], found["loss"]) == (5 / 8, (3 / 4 + 2 / 4) / 2, 12 / 8)
    assert (found["source_accuracy"], found["accuracy/a"], found["accuracy/b"]) == (1.0, 0.75, 0.5)


def test_cells_side_by_side_are_as_many_as_fit(monkeypatch):
    (grid,) = grids_of(BASE, [{"client_lr": x} for x in (0.1, 0.2, 0.3)])
    assert cells.default_at_once(grid, 3) == 1  # on CPU
    device = jax.devices()[0]
    monkeypatch.setattr(estimate.jax, "devices", lambda: [type("Accelerator", (), {"platform": "gpu"})()])
    for room, expected in ((1e12, 3), (1e3, 1)):
        monkeypatch.setattr(estimate, "device_memory", lambda room=room: room)
        assert cells.default_at_once(grid, 3) == size_of(grid, "mean", None) == expected
    needed = estimate.client_bytes(grid.backbone, build_algorithm(BASE), topology(BASE)) * (4 + 2)  # clients, stations
    monkeypatch.setattr(estimate, "device_memory", lambda: int(2.5 * needed / estimate.TRAINING_SHARE))
    assert cells.default_at_once(grid, 3) == 2
    assert device.platform == "cpu"


def test_what_cannot_be_computed_side_by_side_is_said():
    def grid_of(config, **changed):
        (grid,) = grids_of(check(dataclasses.replace(CONFIG, **config)), [{"client_lr": x} for x in (0.1, 0.2)])
        return grid._replace(**changed)

    streamed, plain = grid_of({"stream": "on"}), grid_of({})
    for grid, why in (
        (streamed, "the examples are streamed"),
        (plain._replace(mesh="some devices"), "every cell is spread over several devices"),
    ):
        assert size_of(grid, "mean", None) == size_of(grid, "mean", 1) == 1
        with pytest.raises(ValueError, match=f"at_once=2 is given, but {why}: leave it out, or give 1"):
            size_of(grid, "mean", 2)
