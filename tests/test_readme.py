"""What the README shows is what runs."""

import re
from pathlib import Path

import jax
from tiny import tiny_backbone, tiny_federation

import fedjax_dg as fdg

README = (Path(__file__).parent.parent / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_first_example_is_the_doctest_of_the_package():
    tested = re.findall(r"^>>> (.*)$", fdg.__doc__, re.MULTILINE)
    shown = [line for line in PYTHON[0].splitlines() if line]
    assert tested[: len(shown)] == shown


def test_sweep_example_runs(key):
    federation = tiny_federation([[4, 3]], batch_size=2)
    names = {"fdg": fdg, "jax": jax, "key": key, "backbone": tiny_backbone(), "federation": federation}
    exec(PYTHON[1], names)
    assert names["losses"].shape == (2,)
    assert names["losses"][0] != names["losses"][1]
