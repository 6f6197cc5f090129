"""What the README and the pages of HFedATM and texts show is what runs."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import jax
from text_tree import publish
from tiny import tiny_backbone, tiny_federation

import fedjax_dg as fdg

ROOT = Path(__file__).parent.parent
TEXT = "".join((ROOT / name).read_text() for name in ("README.md", "docs/hfedatm.md", "docs/texts.md"))
PYTHON = re.findall(r"```py(?:thon)?\n(.*?)```", TEXT, re.DOTALL)


def example(part):
    """The one example that has these words."""
    (found,) = (block for block in PYTHON if part in block)
    return found


def test_first_example_is_the_doctest_of_the_package():
    tested = re.findall(r"^>>> (.*)$", fdg.__doc__, re.MULTILINE)
    shown = [line.replace("rounds=20", "rounds=2") for line in PYTHON[0].splitlines() if line]  # the doctest is shorter
    assert tested[: len(shown)] == shown


def test_sweep_example_runs(key):
    federation = tiny_federation([[4, 3]], batch_size=2)
    names = {"fdg": fdg, "jax": jax, "key": key, "backbone": tiny_backbone(), "federation": federation}
    exec(example("losses"), names)
    assert names["losses"].shape == (2,)
    assert names["losses"][0] != names["losses"][1]


def test_merging_example_runs():
    """With a small network in place of ResNet-18, and drawn weights in place of files."""
    library = SimpleNamespace(
        backbones=SimpleNamespace(resnet18=lambda num_classes: fdg.backbones.lenet5(num_classes)),
        weights=SimpleNamespace(load=lambda backbone, path: jax.jit(backbone.init)(jax.random.key(len(path)))),
    )
    names = {"fdg": library, "images": jax.random.normal(jax.random.key(0), (2, 3, 32, 32, 3))}
    exec(example("resnet18"), names)
    assert names["logits"].shape == (3, 1000)
    assert jax.numpy.isfinite(names["logits"]).all()


def test_text_example_runs(tmp_path):
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
    sizes |= {"vocab_size": 20, "max_position_embeddings": 12, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "roberta", **sizes}))
    backbone = fdg.backbones.roberta(tmp_path, max_length=6)
    publish(tmp_path, backbone, jax.jit(backbone.init)(jax.random.key(0)))
    ids = jax.numpy.array([[0, 7, 8, 2], [0, 9, 2, 1]])
    names = {"fdg": fdg, "M": tmp_path, "input_ids": ids, "attention_mask": ids != 1}
    lines = example("hidden_states").replace("num_classes=2", "num_classes=2, max_length=6").splitlines()
    exec("\n".join(lines[:2]), names)
    assert [eval(line, names).shape for line in lines[2:]] == [(2, 4, 8), (2, 2)]
