"""What the README shows is what runs."""

import re
from pathlib import Path
from types import SimpleNamespace

import jax
from tiny import tiny_backbone, tiny_federation

import fedjax_dg as fdg

README = (Path(__file__).parent.parent / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_first_example_is_the_doctest_of_the_package():
    tested = re.findall(r"^>>> (.*)$", fdg.__doc__, re.MULTILINE)
    shown = [line.replace("rounds=20", "rounds=2") for line in PYTHON[0].splitlines() if line]  # the doctest is shorter
    assert tested[: len(shown)] == shown


def test_sweep_example_runs(key):
    federation = tiny_federation([[4, 3]], batch_size=2)
    names = {"fdg": fdg, "jax": jax, "key": key, "backbone": tiny_backbone(), "federation": federation}
    exec(PYTHON[1], names)
    assert names["losses"].shape == (2,)
    assert names["losses"][0] != names["losses"][1]


def test_merging_example_runs():
    """With a small network in place of ResNet-18, and drawn weights in place of files."""
    library = SimpleNamespace(
        backbones=SimpleNamespace(resnet18=lambda num_classes: fdg.backbones.lenet5(num_classes)),
        weights=SimpleNamespace(load=lambda backbone, path: jax.jit(backbone.init)(jax.random.key(len(path)))),
    )
    names = {"fdg": library, "images": jax.random.normal(jax.random.key(0), (2, 3, 32, 32, 3))}
    exec(PYTHON[2], names)
    assert names["logits"].shape == (3, 1000)
    assert jax.numpy.isfinite(names["logits"]).all()
