"""The run folder: intervals, tables, files that survive a kill, checkpoints that give back the same bits."""

import dataclasses
import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_dg import results
from fedjax_dg.config import RunConfig
from fedjax_dg.results import (
    SCHEMA,
    Cell,
    Checkpoints,
    Progress,
    RunFolder,
    environment,
    read_json,
    write_atomically,
)

CONFIG = RunConfig(rounds=4)
CELL = Cell("fedavg", "mean", "noto", 0)


# --- files -----------------------------------------------------------------------------------------------------------


def test_a_write_that_does_not_end_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    write_atomically(path, "old")

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            write_atomically(path, "new")
    assert path.read_text() == "old"
    write_atomically(path, "newer")
    assert path.read_text() == "newer" and [p.name for p in tmp_path.iterdir()] == ["result.json"]


def test_environment_names_what_numbers_depend_on():
    found = environment()
    assert set(found) == {"jax", "python", "platform", "devices", "threefry_partitionable", "versions"}
    assert found["jax"] == jax.__version__ == found["versions"]["jax"]
    assert found["platform"] == jax.default_backend() and len(found["devices"]) == jax.device_count()
    assert found["threefry_partitionable"] is bool(jax.config.jax_threefry_partitionable)


def test_a_damaged_json_file_is_named(tmp_path):
    path = tmp_path / "result.json"
    for content in ("", '{"cells": [', "\xff"):
        path.write_text(content, encoding="latin-1")
        with pytest.raises(
            ValueError, match="result.json is missing or damaged .*: restore it, or run again with --over"
        ):
            read_json(path)


def test_metrics_lines_carry_the_cell_and_are_strict_json(tmp_path):
    folder = RunFolder(tmp_path / "run", CONFIG)
    folder.add_metrics(CELL, {"round": 1, "loss": float("inf"), "merge": {"residual": [0.5, float("nan")]}})
    folder.add_metrics(CELL._replace(seed=3), {"round": 1, "loss": 0.5})
    text = (folder.path / "metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text
    first, second = (json.loads(line) for line in text.splitlines())
    assert (first["cell"], first["loss"], first["merge"]) == ("fedavg-mean-noto-seed0", None, {"residual": [0.5, None]})
    assert second == {"cell": "fedavg-mean-noto-seed3", **CELL.as_record(), "seed": 3, "round": 1, "loss": 0.5}


def test_metrics_beyond_the_checkpoints_and_broken_lines_are_dropped(tmp_path):
    folder, other = RunFolder(tmp_path / "run", CONFIG), CELL._replace(seed=1)
    for number in (1, 2, 3):
        folder.add_metrics(CELL, {"round": number})
        folder.add_metrics(other, {"round": number})
    folder.add_metrics(CELL._replace(seed=2), {"round": 1})
    with open(folder.path / "metrics.jsonl", "a") as file:
        file.write('{"cell": "fedavg-mean-noto-seed0", "rou')  # the run was killed here
    folder.keep_metrics({CELL.name: 3, other.name: 1})
    folder.add_metrics(CELL, {"round": 4})
    kept = [json.loads(line) for line in (folder.path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["seed"], line["round"]) for line in kept] == [(0, 1), (1, 1), (0, 2), (0, 3), (0, 4)]


def test_keep_metrics_before_any_line(tmp_path):
    folder = RunFolder(tmp_path / "run", CONFIG)
    folder.keep_metrics({})
    assert (folder.path / "metrics.jsonl").read_text() == ""


def test_a_new_folder_holds_its_configuration(tmp_path):
    folder = RunFolder(tmp_path / "deep" / "run", CONFIG)
    assert json.loads((folder.path / "config.json").read_text()) == {"schema": SCHEMA, **dataclasses.asdict(CONFIG)}
    assert folder.finished() == []


def test_the_same_run_again_needs_resume_or_overwrite(tmp_path):
    RunFolder(tmp_path / "run", CONFIG)
    with pytest.raises(ValueError, match="already holds this run: pass --resume to continue it .*--overwrite to start"):
        RunFolder(tmp_path / "run", CONFIG)
    RunFolder(tmp_path / "run", CONFIG, resume=True)


@pytest.mark.parametrize("resume", [False, True])
def test_another_configuration_is_refused(tmp_path, resume):
    RunFolder(tmp_path / "run", CONFIG)
    other = dataclasses.replace(CONFIG, client_lr=0.5, settings={"alpha": 0.5})
    with pytest.raises(
        ValueError, match="client_lr 0.1 -> 0.5, settings {} -> {'alpha': 0.5}.: pass --overwrite .* --out"
    ):
        RunFolder(tmp_path / "run", other, resume=resume)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["client_lr"] == 0.1


def test_another_schema_is_refused(tmp_path, monkeypatch):
    RunFolder(tmp_path / "run", CONFIG)
    monkeypatch.setattr(results, "SCHEMA", SCHEMA + 1)
    with pytest.raises(ValueError, match="schema 1 -> 2"):
        RunFolder(tmp_path / "run", CONFIG, resume=True)


def test_overwrite_leaves_nothing_of_the_old_run(tmp_path):
    folder = RunFolder(tmp_path / "run", CONFIG)
    folder.add_metrics(CELL, {"round": 1})
    write_atomically(folder.path / "result.json", json.dumps({"cells": [CELL.as_record()]}))
    checkpoints = folder.checkpoints(CELL)
    checkpoints.save(progress(1))
    checkpoints.close()
    RunFolder(tmp_path / "run", dataclasses.replace(CONFIG, rounds=8), overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["run"]
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["config.json"]
    assert json.loads((tmp_path / "run" / "config.json").read_text())["rounds"] == 8


def test_overwrite_killed_in_the_middle_leaves_no_half_run(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path / "run", CONFIG)
    write_atomically(folder.path / "result.json", json.dumps({"cells": [CELL.as_record()]}))

    def killed(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            RunFolder(tmp_path / "run", CONFIG, overwrite=True)
    again = RunFolder(tmp_path / "run", CONFIG, overwrite=True)
    assert again.finished() == []
    (tmp_path / ".run.old").mkdir(exist_ok=True)
    (tmp_path / ".run.old" / "result.json").touch()  # killed while the old run was deleted
    RunFolder(tmp_path / "run", CONFIG, overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("options", [{}, {"resume": True}, {"overwrite": True}])
def test_a_folder_of_something_else_is_never_touched(tmp_path, options):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="exists and is no run folder: choose another --out"):
        RunFolder(tmp_path, CONFIG, **options)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_run_killed_in_its_first_write_can_be_resumed(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".config.json.tmp").write_text('{"sche')
    RunFolder(tmp_path / "run", CONFIG, resume=True)


def test_a_damaged_configuration_is_named_and_can_be_overwritten(tmp_path):
    RunFolder(tmp_path / "run", CONFIG)
    (tmp_path / "run" / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json is missing or damaged"):
        RunFolder(tmp_path / "run", CONFIG, resume=True)
    RunFolder(tmp_path / "run", CONFIG, overwrite=True)


@pytest.mark.parametrize("where", ["file", "file/run"])
def test_a_file_in_the_way_is_named(tmp_path, where):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file.* cannot be a run folder .Not a directory.: choose another --out"):
        RunFolder(tmp_path / where, CONFIG)


# --- checkpoints -----------------------------------------------------------------------------------------------------


def progress(number, scale=1.0):
    """Arrays of every kind that a run has: floats with odd values, integers, a scalar, key data, nothing at all."""
    floats = jnp.asarray([scale, -0.0, 1e-42, np.nextafter(np.float32(1), 2), jnp.nan, -jnp.inf], jnp.float32)
    state = {
        "variables": {"params": {"head": {"kernel": floats.reshape(2, 3)}}, "batch_stats": {}},
        "shared": (),
        "clients": ((), {"control": floats * 2, "count": jnp.arange(4, dtype=jnp.int32).reshape(2, 2)}),
        "half": floats.astype(jnp.bfloat16),
        "round": jnp.int32(number),
    }
    arrays = {"state": state, "best": {"kernel": np.asarray(floats)}, "key": jax.random.key_data(jax.random.key(7))}
    return Progress(arrays, {"round": number, "best": {"accuracy": 0.1 + 0.2, "none": None}, "seconds": 1.5})


def bits(tree):
    return [(np.asarray(x).dtype, np.asarray(x).shape, np.asarray(x).tobytes()) for x in jax.tree.leaves(tree)]


def blank(arrays):
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), arrays)


@pytest.fixture
def saved(tmp_path):
    """A folder with the checkpoints of rounds 1 and 2."""
    checkpoints = Checkpoints(tmp_path / "cell")
    for number in (1, 2):
        checkpoints.save(progress(number, scale=number))
    checkpoints.close()
    return tmp_path / "cell"


def reopened(path):
    checkpoints = Checkpoints(path)
    assert checkpoints.latest() == 2
    return checkpoints


def test_a_checkpoint_gives_back_the_same_bits(saved):
    want, checkpoints = progress(2, scale=2), reopened(saved)
    got = checkpoints.restore(blank(want.arrays))
    assert bits(got.arrays) == bits(want.arrays)
    assert jax.tree.structure(got.arrays) == jax.tree.structure(want.arrays)
    assert got.notes == want.notes
    checkpoints.close()


def test_the_newest_two_checkpoints_are_kept(saved):
    checkpoints = reopened(saved)
    checkpoints.save(progress(4))
    assert sorted(p.name for p in saved.iterdir()) == ["2", "4"]
    assert checkpoints.latest() == 4
    checkpoints.close()


def test_no_checkpoint_yet(tmp_path):
    checkpoints = Checkpoints(tmp_path / "cell")
    assert checkpoints.latest() is None
    checkpoints.check({"anything": jnp.zeros(3)})
    checkpoints.close()


def test_an_unfinished_checkpoint_is_not_taken_for_one(saved):
    """Orbax writes into a folder of this name and renames it at the end."""
    shutil.copytree(saved / "2", saved / "3.orbax-checkpoint-tmp")
    shutil.rmtree(saved / "3.orbax-checkpoint-tmp" / "notes")
    checkpoints = reopened(saved)
    assert int(checkpoints.restore(progress(0).arrays).arrays["state"]["round"]) == 2
    checkpoints.save(progress(3))
    assert int(checkpoints.restore(progress(0).arrays).arrays["state"]["round"]) == 3
    checkpoints.close()


def test_an_older_checkpoint_half_deleted_does_no_harm(saved):
    shutil.rmtree(saved / "1" / "arrays")
    checkpoints = reopened(saved)
    assert int(checkpoints.restore(progress(0).arrays).arrays["state"]["round"]) == 2
    checkpoints.save(progress(3))
    checkpoints.save(progress(4))
    assert sorted(p.name for p in saved.iterdir()) == ["3", "4"]
    checkpoints.close()


def changed(change):
    arrays = progress(0).arrays
    change(arrays["state"])
    return arrays


def wider(state):
    state["variables"]["params"]["head"]["kernel"] = jnp.zeros((2, 4))


def more(state):
    state["shared"] = jnp.zeros(3)


def fewer(state):
    del state["half"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (wider, r"holds state.variables.params.head.kernel of shape \(2, 3\), but this run needs \(2, 4\): continue"),
        (more, r"holds state.shared of shape None, but this run needs \(3,\): continue with the version that wrote it"),
        (
            fewer,
            r"holds state.half of shape \(6,\), but this run needs None: .* or delete .*cell to run this cell again",
        ),
    ],
)
def test_a_checkpoint_of_another_shape_is_refused(saved, change, message):
    checkpoints = reopened(saved)
    for look in (checkpoints.check, checkpoints.restore):
        with pytest.raises(ValueError, match=message):
            look(changed(change))
    checkpoints.close()


def truncate(folder):
    """Halve the largest file of the arrays."""
    path = max((p for p in (folder / "arrays").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def without(name):
    def remove(folder):
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return remove


@pytest.mark.parametrize(
    "damage",
    [truncate, without("arrays"), without("notes"), without("arrays/_METADATA"), without("arrays/manifest.ocdbt")],
)
def test_a_damaged_checkpoint_is_named_with_the_way_out(saved, damage):
    damage(saved / "2")
    checkpoints = reopened(saved)
    with pytest.raises(ValueError, match="cell cannot be read .*: continue with .*, or delete .*cell to run") as caught:
        checkpoints.restore(progress(0).arrays)
    assert "\n" not in str(caught.value)
    checkpoints.close()
