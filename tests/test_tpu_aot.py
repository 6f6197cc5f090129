"""Programs for TPU pods: what the script concludes from them, and, where the compiler is installed, that it holds."""

import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from fedjax_dg import sharding

SCRIPT = Path(__file__).parent.parent / "experiments" / "benchmarks" / "tpu_aot.py"
LACKING = "libtpu is not installed: pip install 'fedjax-dg[tpu-aot]'.\n"


@functools.cache
def script():
    spec = importlib.util.spec_from_file_location("tpu_aot", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(os.environ):  # it sets what the compiler needs
        spec.loader.exec_module(module)
    return module


class Program:
    """A compiled program, as far as its text."""

    def __init__(self, text):
        self.as_text = lambda: text


@pytest.mark.parametrize(
    ("line", "counted"),
    [
        ("%all-reduce.3 = f32[6]{0:T(128)} all-reduce(%add.1), channel_id=1", {"all-reduce": 1}),
        ("%x = (f32[2]{0}, /*index=5*/f32[3]{0:T(8,128)S(1)}) all-gather(%a, %b)", {"all-gather": 1}),
        ("%s = (f32[2], f32[4]) all-gather-start(%a)\n  %d = f32[4] all-gather-done(%s)", {"all-gather": 1}),
        ("%r = f32[2] ragged-all-to-all(%a)\n  %p = f32[2] collective-permute(%r)", None),
        ("%m = f32[] maximum(%all-reduce.3, %b), metadata={op_name=\"jit(all-reduce)/max\"}", {}),
    ],
)  # fmt: skip
def test_collectives_are_counted_whatever_they_return(line, counted):
    expected = {"ragged-all-to-all": 1, "collective-permute": 1} if counted is None else counted
    assert sharding.collectives(Program(f"ENTRY %main {{\n  {line}\n}}")) == expected


def test_trips_of_loops_are_read_from_their_conditions():
    condition = """%region.{n} (p: (s32[], f32[2])) -> pred[] {{
  %constant.{n} = s32[]{{:T(128)}} constant({n})
  %get.{n} = s32[]{{:T(128)}} get-tuple-element(%p), index=0
  ROOT %lt.{n} = pred[]{{:T(512)}} compare(%get.{n}, %constant.{n}), direction=LT
}}"""
    search = "ROOT %lt.9 = pred[]{:T(512)} compare(%get.9, %get.8), direction=LT"
    text = "\n".join([condition.format(n=10), condition.format(n=4), search, condition.format(n=4).replace("LT", "GT")])
    assert script().trips(text) == [4, 10]


def row(name, mesh, **changed):
    devices = mesh[0] * mesh[1]
    plain = {"network": "lenet5", "rule": "mean", "form": "one by one", "flops": 100.0, "trips": [4, 10]}
    spoken = {"collectives": {"all-reduce": 2}, "programs": 1, "divided among": devices}
    return plain | spoken | {"name": name, "mesh": mesh, "devices": devices} | changed


@pytest.mark.parametrize(
    ("changed", "broken"),
    [
        ({}, None),
        ({"flops": 100.9}, None),
        ({"flops": 102.0}, "a device of 256"),
        ({"trips": [4, 11]}, "a device of 256"),
        ({"collectives": {"all-reduce": 2, "all-gather": 1}}, "devices talk"),
        ({"collectives": {}}, "devices talk"),
        ({"programs": 2}, "every row"),
        ({"divided among": 8}, "every row"),
    ],
)
def test_a_program_that_does_otherwise_is_noticed(changed, broken):
    held = script().verdicts([row("v5e:2x4", [8, 1]), row("v5e:16x16", [256, 1], **changed)])
    assert len(held) == 3
    assert [claim for claim, holds in held.items() if not holds] == [c for c in held if broken and c.startswith(broken)]
    assert broken is None or not all(held.values())


def test_without_the_compiler_it_says_what_to_install(monkeypatch, capsys):
    module = script()
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["tpu_aot.py"])
    assert module.main() == 2
    assert capsys.readouterr().err == LACKING


@pytest.mark.slow
def test_a_larger_pod_does_the_same_work_a_device(tmp_path):
    """Where the compiler is not installed: that the script says so."""
    command = [sys.executable, SCRIPT, "--quick", "--json", "out.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    if importlib.util.find_spec("libtpu") is None:
        assert (done.returncode, done.stdout, done.stderr) == (2, "", LACKING)
        return
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "out.json").read_text())
    rows = {(row["rule"], row["devices"]): row for row in told["rows"]}
    assert rows.keys() == {(rule, devices) for rule in ("mean", "hfedatm") for devices in (4, 8)}
    for (rule, devices), found in rows.items():
        assert found["mesh"] == [devices, 1] and found["stations"] == devices and found["clients"] == 10
        assert set(found["collectives"]) == {"all-reduce"}
        assert found["flops"] == pytest.approx(rows[rule, 4]["flops"], rel=0.01)
        assert found["programs"] == 1 and found["divided among"] == devices
        assert found["trips"].count(10) >= 1 and 4 in found["trips"]  # of 10 clients, of 4 steps
    assert told["verdicts"] and all(told["verdicts"].values())
