"""The notebooks run from top to bottom, and both of their forms say the same."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jupytext
import pytest

COLAB = Path(__file__).parent.parent / "colab"
NAMES = sorted(path.stem for path in COLAB.glob("*.ipynb"))
EVERYDAY = "many_devices"  # the quickest


def cells_of(name, kind="py"):
    return [(cell.cell_type, cell.source) for cell in jupytext.read(COLAB / f"{name}.{kind}").cells]


def test_there_are_four():
    assert NAMES == ["many_devices", "start_here", "sweep", "your_own_algorithm"]


@pytest.mark.parametrize("name", NAMES)
def test_both_forms_have_the_same_cells(name):
    assert cells_of(name, "ipynb") == cells_of(name)


@pytest.mark.parametrize("name", NAMES)
def test_the_committed_outputs_are_of_one_whole_execution(name):
    path = COLAB / f"{name}.ipynb"
    code = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    kinds = [output["output_type"] for cell in code for output in cell["outputs"]]
    assert kinds and "error" not in kinds
    assert not [o for cell in code for o in cell["outputs"] if o.get("name") == "stderr"]  # warnings
    assert path.stat().st_size < 300_000


@pytest.mark.parametrize("name", NAMES)
def test_the_first_code_cell_installs_only_what_is_missing(name, monkeypatch):
    (source, *_) = [source for kind, source in cells_of(name) if kind == "code"]
    asked = []
    monkeypatch.setattr(subprocess, "run", lambda command, check: asked.append(command))
    exec(source, {})
    assert asked == []
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    exec(source, {})
    monkeypatch.setenv("FEDJAX_DG_SOURCE", "/content/copy")
    exec(source, {})
    assert [command[1:] for command in asked] == [
        ["-m", "pip", "install", "-q", where] for where in ("..", "/content/copy")
    ]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == EVERYDAY else pytest.mark.slow) for name in NAMES]
)
def test_runs_from_top_to_bottom(name):
    unoptimized = "true" if name == EVERYDAY else "false"  # which compiles quicker, and runs slower
    ended = subprocess.run(
        [sys.executable, f"{name}.py"],
        cwd=COLAB,
        env={**os.environ, "MPLBACKEND": "agg", "JAX_DISABLE_MOST_OPTIMIZATIONS": unoptimized},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stderr
    assert "Warning" not in ended.stderr
