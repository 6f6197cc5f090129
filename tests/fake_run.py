"""Run folders written by hand, with models that were drawn and not trained: for tests of what reads them."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np

import fedjax_dg as fdg
from fedjax_dg.config import RunConfig, check
from fedjax_dg.models import network_of
from fedjax_dg.results import Cell, Progress, RunFolder, environment, identity

DOMAINS = ("noto", "twemoji", "fluent_flat", "fluent_mono")
CLASSES = ("animal", "food", "travel", "object", "flag", "<person>")
DESCRIPTION = {
    "input_shape": [32, 32, 3],
    "input_dtype": "uint8",
    "class_names": list(CLASSES),
    "domain_names": list(DOMAINS),
    "vocab_size": None,
    "encoder_sizes": None,
    "encoded": False,
    "sizes": {"num_domains": 4, "num_sources": 3},
}


def config_of(**options) -> RunConfig:
    sizes = {"stations": 2, "clients_per_station": 2, "rounds": 2, "station_rounds": 1, "seeds": 2, "held_out": "all"}
    return check(RunConfig(**{**sizes, **options}))


def line_of(cell: Cell, accuracy=0.5, source=0.6, **more) -> dict:
    scores = {"accuracy": accuracy, "balanced_accuracy": accuracy - 0.01, "accuracy_unseen": accuracy - 0.02}
    rest = {"selection": "source-validation", "selected_round": 2, "rounds": 2, "seconds": 1.5, "compilations": 1}
    return cell.as_record() | scores | {"source_accuracy": source, "compile_seconds": 3.0} | rest | more


def record_of(cell: Cell, number: int, accuracy=0.5, source=0.6, **more) -> dict:
    domains = {f"accuracy/{name}": (accuracy if name == cell.held_out else source) for name in DOMAINS}
    scores = {"accuracy": accuracy, "source_accuracy": source, "train_loss": 2.0 / number, "loss": 1.5, **domains}
    return {"cell": cell.name, **cell.as_record(), "round": number, **scores, **more}


def grid(config: RunConfig, rules=("mean", "hfedatm"), held_outs=DOMAINS, seeds=2) -> list[dict]:
    """Lines of cells; accuracies all differ, and one domain is the worst."""
    cells = [Cell(config.algorithm, r, h, s) for h in held_outs for s in range(seeds) for r in rules]
    return [
        line_of(cell, 0.3 + 0.04 * DOMAINS.index(cell.held_out) + 0.013 * number, 0.6 + 0.011 * number)
        for number, cell in enumerate(cells)
    ]


def write_run(
    path: Path, config: RunConfig | None = None, cells=None, failed=(), records=None, told=DESCRIPTION
) -> Path:
    """config.json, model.json, splits.json, result.json, metrics.jsonl; no checkpoints."""
    config = config_of() if config is None else config
    cells = grid(config) if cells is None else cells
    folder = RunFolder(path, config)
    sides = {name: {"train": 80, "validation": 20} for name in DOMAINS}
    folder.keep_splits({str(seed): {"digest": f"{seed:x}" * 64, "domains": sides} for seed in range(config.seeds)})
    folder.keep_model([identity(line) for line in cells], told)
    if records is None:
        of = [identity(line) for line in cells]
        records = [
            record_of(cell, number, line["accuracy"] - 0.1 * (2 - number), line["source_accuracy"])
            for cell, line in zip(of, cells)
            for number in (1, 2)
        ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    if cells or failed:
        result = {"schema": 1, "config": dataclasses.asdict(config), "environment": environment(), "cells": cells}
        (path / "result.json").write_text(json.dumps(result | {"failed": list(failed)}))
    return path


def write_checkpoint(path: Path, config: RunConfig, line: dict, key=0, told=DESCRIPTION) -> fdg.Variables:
    """A cell's checkpoint, whose best model is freshly drawn."""
    cell = identity(line)
    backbone, algorithm = network_of(dataclasses.replace(config, aggregator=cell.aggregator), told)

    @jax.jit
    def draw(key):
        return algorithm.init(backbone, backbone.init(key), key).variables

    variables = jax.tree.map(np.asarray, draw(jax.random.key(key)))
    checkpoints = RunFolder(path, config, resume=True).checkpoints(cell)
    other = jax.tree.map(lambda x: np.full_like(x, np.nan), variables)
    checkpoints.save(Progress({"state": {"variables": other}, "best": variables}, {"round": 2}))
    checkpoints.close()
    return variables
