"""Trained models: the selected one of a run's cell, ready to predict, and as a file for elsewhere."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import Array, ArrayLike, Float

from fedjax_dg import weights
from fedjax_dg.alignment.groups import from_leaves, leaves_of
from fedjax_dg.backbones import Backbone, EncoderConfig, on_encoded
from fedjax_dg.config import RunConfig, build_algorithm, build_backbone, build_text_backbone, settled
from fedjax_dg.errors import unknown
from fedjax_dg.results import identity, read_config_of, read_json
from fedjax_dg.types import Algorithm, Key, Variables

#: Of a folder that ``export`` wrote: the variables, by orbax, and what they are of.
VARIABLES, DESCRIPTION = "variables", "model.json"


@dataclass(frozen=True)
class Model:
    """A cell's selected model: ``model(images)`` are its logits, ``model.features(images)`` what its head reads.

    Inputs are stored ones, as the data set gives them: uint8 images [B, H, W, C], or token ids [B, L], -1 where there is
    none. Of a run with ``freeze_encoder`` they are what ``encoding.encode`` makes of texts with the pretrained encoder, [B,
    d], which is not part of this model (``encoded``).
    """

    backbone: Backbone  # as the method adapted it
    variables: Variables  # with the parameters that the method added
    class_names: tuple[str, ...]
    domain_names: tuple[str, ...]
    cell: dict[str, Any]  # its line of result.json: rule, held-out domain, seed, selected round, scores
    config: RunConfig  # with the cell's own hyper-parameters, where they were swept
    description: dict[str, Any] = field(repr=False)  # what model.json says
    predict: Callable = field(repr=False)  # jitted (variables, inputs, key) -> logits
    read: Callable = field(repr=False)  # jitted (variables, inputs) -> features

    @property
    def name(self) -> str:
        """The cell's."""
        return cell_name(self.cell)

    @property
    def encoded(self) -> bool:
        """Whether inputs are states of a frozen encoder instead of token ids."""
        return bool(self.description["encoded"])

    def __call__(self, inputs: ArrayLike, key: Key | None = None) -> Float[Array, "B K"]:
        """Logits, by the method's own prediction; ``key`` for one that draws (FedSR), by default ``jax.random.key(0)``."""
        return self.predict(self.variables, self._checked(inputs), jax.random.key(0) if key is None else key)

    def features(self, inputs: ArrayLike) -> Float[Array, "B D"]:
        """What the head reads, in evaluation mode; of FedSR mean and raw deviation of it."""
        return self.read(self.variables, self._checked(inputs))

    def _checked(self, inputs: ArrayLike) -> Array:
        inputs, wanted = jnp.asarray(inputs), self.backbone.input_shape
        if inputs.ndim == 1 + len(wanted) and (inputs.shape[1:] == wanted or self.backbone.vocab_size is not None):
            return inputs
        why = "; they are states of the frozen encoder: make them with encoding.encode" if self.encoded else ""
        raise ValueError(
            f"The inputs have the shape {list(inputs.shape)}, but this model takes {['B', *wanted]}{why}: reshape or resize "
            "them."
        )


def load_model(run: str | Path, cell: str | None = None) -> Model:
    """The selected model of a run folder's cell, or what ``export`` made of one; the data set is not needed.

    ``cell``: its name, as the folders in ``checkpoints`` have it; by default the finished cell with the highest
    source-validation accuracy, which ``model.cell`` then tells, as held-out accuracies must not choose. Which round's model
    it is, the run's ``selection`` decided. Of a text network with ``freeze_encoder`` only the classifier was trained and
    only it is here: see ``Model``. CCST's files of its encoder and decoder must still be where they were.

    Raises ``ValueError`` for a folder that is none, has no finished cell, has not this one, or is damaged.

    >>> model = load_model("runs/demo")  # doctest: +SKIP
    >>> logits = model(images)  # doctest: +SKIP
    >>> [model.class_names[k] for k in logits.argmax(-1)]  # doctest: +SKIP
    """
    run = Path(run)
    if run.is_file() or (run / VARIABLES).is_dir():
        if cell is not None:
            raise ValueError(f"{run} holds one model, so cell={cell!r} cannot be chosen: leave it out.")
        return _load_export(run)
    config = read_config_of(run)
    line = select_cell(run, cell)
    if not (run / DESCRIPTION).exists():
        raise ValueError(
            f"{run} has no {DESCRIPTION}, so an older version began it: pass --resume to fedjax-dg run, which writes it and "
            "runs no finished cell again."
        )
    networks = read_json(run / DESCRIPTION)["networks"]
    description = next((network for network in networks if cell_name(line) in network["cells"]), None)
    if description is None:
        raise ValueError(f"{run / DESCRIPTION} does not tell the network of {cell_name(line)}: run the cell again.")
    description = {name: value for name, value in description.items() if name != "cells"}
    checkpoint = run / "checkpoints" / cell_name(line)
    return rebuilt(config, line, description, lambda shapes: _restore(checkpoint, shapes))


def select_cell(run: str | Path, cell: str | None = None) -> dict[str, Any]:
    """A finished cell's line of ``result.json``, as ``load_model`` chooses it."""
    run = Path(run)
    result = read_json(run / "result.json") if (run / "result.json").exists() else {"cells": [], "failed": []}
    finished = {cell_name(line): line for line in result["cells"]}
    if cell is not None:
        begun = [path.name for path in sorted(run.glob("checkpoints/*"))]
        if failed := [line for line in result["failed"] if cell_name(line) == cell]:
            raise ValueError(f"{cell} in {run} broke down and has no selected model: {failed[0]['error']}")
        if cell in begun and cell not in finished:
            raise ValueError(f"{cell} in {run} has not finished: go on with fedjax-dg run --resume.")
        if cell not in finished:
            raise unknown(f"cell of {run}", cell, finished)
        return finished[cell]
    if not finished:
        raise ValueError(f"{run} has no finished cell yet: let it go on, with fedjax-dg run --resume.")
    # not those of two held-out domains, which only help to select
    shown = {name: line for name, line in finished.items() if "+" not in line["held_out"]} or finished
    judged = [line for line in shown.values() if line.get("source_accuracy") is not None]
    if not judged and len(shown) > 1:
        raise ValueError(
            f"No cell of {run} has a source-validation accuracy to choose by: name one of {', '.join(shown)}."
        )
    return max(judged or shown.values(), key=lambda line: line.get("source_accuracy") or 0.0)


def cell_name(line: dict[str, Any]) -> str:
    """The name of a cell of ``result.json``."""
    return identity(line).name


def config_of(config: RunConfig, line: dict[str, Any]) -> RunConfig:
    """The configuration that a cell was trained with: its rule, held-out domain, and the values that a sweep gave it."""
    own = {name: line[name] for name in ("algorithm", "aggregator", "held_out")}
    return dataclasses.replace(settled(config, line.get("hparams", {})), **own)


def rebuilt(
    config: RunConfig,
    line: dict[str, Any],
    description: dict[str, Any],
    restore: Callable[[Variables], Variables],
) -> Model:
    """The model of a configuration's cell, its variables as ``restore(shapes)`` gives them."""
    config = config_of(config, line)
    backbone, algorithm = network_of(config, description)
    variables = restore(shapes_of(backbone, algorithm))
    return Model(
        backbone,
        jax.tree.map(jnp.asarray, variables),
        tuple(description["class_names"]),
        tuple(description["domain_names"]),
        line,
        config,
        description,
        jax.jit(functools.partial(algorithm.predict, backbone)),
        jax.jit(backbone.features),
    )


def network_of(config: RunConfig, description: dict[str, Any]) -> tuple[Backbone, Algorithm]:
    """The network as the method adapts it, and the method, of what ``model.json`` says."""
    classes, shape = len(description["class_names"]), tuple(description["input_shape"])
    if description["encoder_sizes"] is None:
        backbone = build_backbone(config, classes, shape[:2], shape[2])
    else:
        sizes: dict[str, Any] = {
            name: tuple(x) if isinstance(x, list) else x for name, x in description["encoder_sizes"].items()
        }
        length = 1 if description["encoded"] else shape[0]
        backbone = build_text_backbone(config, classes, length, sizes["vocab_size"], EncoderConfig(**sizes))
        backbone = on_encoded(backbone) if description["encoded"] else backbone
    algorithm = build_algorithm(config, **description["sizes"])
    return algorithm.adapt(backbone), algorithm


def shapes_of(backbone: Backbone, algorithm: Algorithm) -> Variables:
    """Shapes of all that a model has, with what the method adds to its parameters."""

    def start(key):
        return algorithm.init(backbone, backbone.init(key), key).variables

    return jax.eval_shape(start, jax.random.key(0))


def _restore(folder: Path, shapes: Variables) -> Variables:
    """The best variables of a cell's newest checkpoint; nothing else of it is read."""

    def unusable(what: str) -> ValueError:
        return ValueError(
            f"The checkpoint in {folder} {what}: read it with the version that wrote it, or delete that folder and run "
            "the cell again."
        )

    if not folder.is_dir():
        raise ValueError(f"{folder} is missing, so there is no model of this cell: run it again.")
    wanted = {"best." + leaf.replace("/", "."): leaf for leaf in leaves_of(shapes)}
    options = ocp.CheckpointManagerOptions(create=False)  # read_only would be told on stderr
    handlers = {"arrays": ocp.PyTreeCheckpointHandler(), "notes": ocp.JsonCheckpointHandler()}
    with ocp.CheckpointManager(folder.absolute(), options=options, item_handlers=handlers) as manager:
        if (latest := manager.latest_step()) is None:
            raise ValueError(f"{folder} has no checkpoint, so there is no model of this cell: run it again.")
        try:
            stored: Any = manager.item_metadata(latest)["arrays"]
            stored = getattr(stored, "tree", stored)
            stored = {name: tuple(x.shape) for name, x in stored.items() if name.startswith("best.")}
        except Exception as error:  # as many types as there are ways to damage a folder
            raise unusable(f"cannot be read ({type(error).__name__})") from error
        expected = {name: leaves_of(shapes)[leaf].shape for name, leaf in wanted.items()}
        for name in sorted({*stored, *expected}):
            if stored.get(name) != expected.get(name):
                raise unusable(f"holds {name} of shape {stored.get(name)}, but this network needs {expected.get(name)}")
        items = {name: np.zeros(shape, np.float32) for name, shape in expected.items()}
        as_arrays = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in items}
        part = ocp.args.PyTreeRestore(item=items, restore_args=as_arrays, partial_restore=True)
        try:
            found = manager.restore(latest, args=ocp.args.Composite(arrays=part))["arrays"]
        except Exception as error:
            raise unusable(f"cannot be read ({type(error).__name__})") from error
    return from_leaves({leaf: found[name] for name, leaf in wanted.items()})


def export(model: Model, path: str | Path) -> Path:
    """Write a model as a file ``.safetensors``, or as a folder (without a suffix) with a checkpoint of orbax.

    Arrays are named as ``weights.save`` names them (``params/conv1/kernel``); ``weights.load`` and ``--pretrained`` read
    the file. Its metadata, or ``model.json`` in the folder, tell all that ``load_model`` needs: the class names, the
    configuration, the cell with its scores. The folder's orbax checkpoint, ``variables``, is a dict of ``params`` and
    ``batch_stats``. Raises ``ValueError`` for another suffix, a folder that is there, and one above it that is not.
    """
    path = Path(path)
    plain = leaves_of(jax.eval_shape(_plain_network(model).init, jax.random.key(0)))
    told = model.description | {
        "cell": model.cell,
        "config": dataclasses.asdict(model.config),
        "added": [leaf for leaf in leaves_of(model.variables) if leaf not in plain],  # by the method
    }
    if not path.absolute().parent.is_dir():
        raise ValueError(f"There is no folder {path.absolute().parent} to write {path.name} in: make it.")
    if path.suffix == ".safetensors":
        weights.save(model.variables, path, told)
        return path
    if path.suffix:
        raise ValueError(
            f"A model cannot be written as {path.suffix}: give a name that ends in .safetensors, or a folder's."
        )
    if path.exists():
        raise ValueError(f"{path} exists: remove it, or choose another --out.")
    temporary = path.absolute().with_name(f".{path.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(temporary / VARIABLES, jax.tree.map(np.asarray, model.variables._asdict()))
        checkpointer.wait_until_finished()
    (temporary / DESCRIPTION).write_text(json.dumps(told, indent=2) + "\n")
    temporary.rename(path)
    return path


def _plain_network(model: Model) -> Backbone:
    """The network that the configuration names, before the method adapted it."""
    plain = dataclasses.replace(model.config, algorithm="fedavg", settings={})
    return network_of(plain, model.description)[0]


def _load_export(path: Path) -> Model:
    """A model that ``export`` wrote."""
    told = weights.metadata(path) if path.is_file() else read_json(path / DESCRIPTION)
    if not {"config", "cell", "class_names"} <= set(told):
        raise ValueError(
            f"{path} says nothing of the network it is of, as fedjax-dg export writes it: give a run folder, or read its "
            "weights with fedjax_dg.weights.load."
        )

    def restore(shapes: Variables) -> Variables:
        try:
            if path.is_file():
                found = weights.read(path)
            else:
                with ocp.StandardCheckpointer() as checkpointer:
                    target = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes._asdict())
                    found = leaves_of(Variables(**checkpointer.restore(path.absolute() / VARIABLES, target)))
        except ValueError:
            raise
        except Exception as error:
            raise ValueError(f"{path} cannot be read ({type(error).__name__}): export the model again.") from error
        expected = {leaf: x.shape for leaf, x in leaves_of(shapes).items()}
        if {leaf: x.shape for leaf, x in found.items()} != expected:
            raise ValueError(f"{path} holds other arrays than its network has: export the model again.")
        return from_leaves(found)

    try:
        config = RunConfig(**told["config"])
    except TypeError as error:
        raise ValueError(f"{path} was written by another version ({error}): read it with that one.") from None
    return rebuilt(config, told["cell"], told, restore)
