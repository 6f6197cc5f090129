"""What a configuration resolves to: its data, federations, network and rounds, and the cells to train (``cells``)."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_dg import datasets, encoding, sharding, splits, weights
from fedjax_dg.alignment.groups import from_leaves, leaves_of
from fedjax_dg.backbones import Backbone, on_encoded
from fedjax_dg.config import (
    Numbers,
    RunConfig,
    build_aggregator,
    build_algorithm,
    build_backbone,
    build_station_aggregator,
    build_text_backbone,
    names,
    numbers_of,
    relevant,
    topology,
)
from fedjax_dg.datasets import Domains, kept, tokenizing
from fedjax_dg.datasets.domains import thinned
from fedjax_dg.datasets.images import resize
from fedjax_dg.datasets.reading import read_all
from fedjax_dg.errors import unknown
from fedjax_dg.estimate import fits, num_bytes
from fedjax_dg.federation import Deal, Federation, deal, in_fewer_shapes, place, validation_share
from fedjax_dg.recipes import AUGMENTS
from fedjax_dg.results import Cell
from fedjax_dg.run import (
    Round,
    Rounds,
    check_fit,
    make_round,
    message_shapes,
    over_numbers,
)
from fedjax_dg.types import Variables

#: What of a configuration says which data are read.
DATA_OPTIONS = (
    "dataset",
    "data_dir",
    "image_size",
    "examples_per_domain",
    "split",
    "max_length",
    "pretrained",
    "held_out",
)


class Grid(NamedTuple):
    """All that a configuration resolves to before anything is trained."""

    config: RunConfig
    domains: Domains  # of a frozen encoder: what it made of the texts
    backbone: Backbone
    federations: Federations
    cells: list[Cell]
    splits: dict[str, Any]  # of each seed: which examples are for validation
    mesh: sharding.Mesh | None = None  # what each round spreads over; None: one device
    pretrained: Variables | None = None  # what every cell starts from; without a head that does not fit
    notices: tuple[str, ...] = ()  # about it, the data and the rules
    workers: int = 0  # processes that decode images; 0 = threads


class Federations(Mapping[tuple[str, int], Federation]):
    """Federations by held-out domain and seed, each put on the devices when it is asked for; the last two are kept."""

    def __init__(self, data: Data, deals: dict[tuple[str, int], Deal], mesh, stream: bool):
        domains, decoded = data
        self.deals, self.stream = deals, stream
        self.placed = functools.lru_cache(2)(
            lambda which: place(domains if stream else decoded(), deals[which], mesh, stream)
        )

    def __getitem__(self, which: tuple[str, int]) -> Federation:
        return self.placed(which)

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return iter(self.deals)

    def __len__(self) -> int:
        return len(self.deals)

    def forget(self) -> None:
        """Let go of those on the devices."""
        self.placed.cache_clear()


class Data(NamedTuple):
    """A data set, and itself with all its images decoded, once and when that is asked for."""

    domains: Domains
    decoded: Callable[[], Domains]


def data_of(domains: Domains, workers: int) -> Data:
    """A data set whose images are decoded by so many processes (0: threads)."""
    return Data(domains, functools.cache(lambda: domains._replace(inputs=read_all(domains.inputs, workers))))


def load_once(config: RunConfig, workers: int, shared: dict[tuple, Data]) -> Data:
    """The configuration's data, read again only if they are others than those ``shared`` before."""
    key = tuple(getattr(config, name) for name in DATA_OPTIONS)
    if key not in shared:
        shared.clear()
        shared[key] = data_of(load_data(config), workers)
    return shared[key]


def load_data(config: RunConfig) -> Domains:
    """The configuration's data set. ``ValueError`` for an option that it does not have, or what is wrong with its files."""
    allowed = inspect.signature(datasets.DATASETS[config.dataset]).parameters
    if config.data_dir is not None and "data_dir" not in allowed:
        raise ValueError(
            f"data_dir={config.data_dir!r} is given, but {config.dataset} comes with the library: leave data_dir out."
        )
    if config.max_length is not None and "max_length" not in allowed:
        raise ValueError(
            f"max_length={config.max_length} is given, but {config.dataset} holds no texts: leave max_length out."
        )
    wanted = {
        "data_dir": config.data_dir,
        "image_size": config.image_size,
        "official": config.split == "official",
        "max_length": config.max_length,
        "tokenizer": config.pretrained if config.pretrained and tokenizing.files_of(config.pretrained) else None,
        "held_out": config.held_out if config.held_out != "all" else None,  # else a tokenizer that is trained sees all
    }
    domains = datasets.load(config.dataset, **{k: v for k, v in wanted.items() if v is not None and k in allowed})
    if config.examples_per_domain is not None:
        domains = thinned(domains, config.examples_per_domain)
    if config.image_size is None or "image_size" in allowed:
        return domains
    return domains._replace(inputs=resize(domains.inputs, config.image_size))


def resolve(
    config: RunConfig,
    devices: Sequence[Any] | None = None,
    workers: int = 0,
    report: Callable[[int, int], None] = lambda done, total: None,
    settings: Sequence[Mapping[str, Any]] = ({},),
    shared: dict[tuple, Data] | None = None,
) -> Grid:
    """Load the data, deal out every federation among the ``devices`` (by default the first), list the cells.

    ``settings``: hyper-parameters that differ between the cells of a sweep, and only in numbers (``sweep.grids_of``).
    ``shared``: data for several grids (``load_once``). A frozen encoder reads all texts here and ``report(done, total)`` is
    told of it. Raises ``ValueError`` for what does not fit.
    """
    data = load_once(config, workers, {} if shared is None else shared)
    domains = data.domains
    if config.held_out != "all" and config.held_out not in domains.domain_names:
        raise unknown("held-out domain", config.held_out, (*domains.domain_names, "all"))
    mesh = sharding.mesh_for(topology(config), devices) if devices is not None and len(devices) > 1 else None
    sources = None if config.sources is None else names(config.sources)
    held_outs = (config.held_out,)
    if config.held_out == "all":
        trained = sources if config.setting == "single-domain" and sources else ()
        held_outs = tuple(name for name in domains.domain_names if name not in trained)
    if config.selection == "leave-one-domain-out":
        if len(held_outs) < 3:
            raise ValueError(
                f"selection=leave-one-domain-out leaves out two of {len(held_outs)} domains, so none is left to train "
                "on: choose another rule."
            )
        held_outs += tuple("+".join(pair) for pair in itertools.combinations(held_outs, 2))
    deals = {
        (held_out, seed): deal_of(config, domains, held_out, seed)
        for held_out in held_outs
        for seed in range(config.seeds)
    }
    deals = in_fewer_shapes(deals)
    # seed by seed, and the rules of a pair next to each other: an interrupted table is still paired
    cells = [
        Cell(config.algorithm, rule, held_out, seed, setting)
        for held_out in held_outs
        for seed in range(config.seeds)
        for rule in names(config.aggregator)
        for setting in dict.fromkeys(relevant(config, rule, setting) for setting in settings)
    ]
    fraction = validation_share(config.setting, config.validation_fraction)
    sides = {str(seed): splits.draw(domains, config.split, fraction, seed) for seed in range(config.seeds)}
    told = {seed: splits.describe(domains, side) for seed, side in sides.items()}
    start = start_of(config, domains, report)
    if start.domains is not domains:
        data = data_of(start.domains, workers)
    domains = start.domains
    streamed = config.stream == "on"
    if config.stream == "auto":
        streamed = not all(fits(domains.inputs, dealt, mesh) for dealt in deals.values())
    federations = Federations(data, deals, mesh, streamed)
    return Grid(
        config, domains, start.backbone, federations, cells, told, mesh, start.pretrained, start.notices, workers
    )


def deal_of(config: RunConfig, domains: Domains, held_out: str, seed: int) -> Deal:
    """Who holds which examples in one of the configuration's cells."""
    return deal(
        domains,
        held_out,
        domain_mix=config.domain_mix,
        setting=config.setting,
        sources=None if config.sources is None else names(config.sources),
        seed=seed,
        station_assignment=config.station_assignment,
        remainders=config.remainders,
        label_alpha=config.label_alpha,
        split=config.split,
        validation_fraction=config.validation_fraction,
        **topology(config)._asdict(),
    )


class Start(NamedTuple):
    """The network, what it reads and what it starts from."""

    domains: Domains
    backbone: Backbone
    pretrained: Variables | None
    notices: tuple[str, ...]


def start_of(config: RunConfig, domains: Domains, report: Callable[[int, int], None]) -> Start:
    """The configuration's network for a data set, and pretrained weights; a frozen encoder has read all texts already."""
    classes, shape = len(domains.class_names), domains.inputs.shape[1:]
    notices = () if domains.notice is None else (domains.notice,)
    if domains.vocab_size is None:
        backbone = build_backbone(config, classes, shape[:2], shape[2])
    else:
        backbone = build_text_backbone(config, classes, shape[0], domains.vocab_size)
        notices += text_notices(config, backbone)
    if config.pretrained is None:
        return Start(domains, backbone, None, notices)
    # of a model of ours the method's own layers are taken too, where this run's method has them
    reader, added = backbone, set(weights.metadata(config.pretrained).get("added", ()))
    if added:
        adapted = build_algorithm(config).adapt(backbone)
        reader = adapted if added & set(leaves_of(jax.eval_shape(adapted.init, jax.random.key(0)))) else backbone
    leaves, notice = weights.find_leaves(reader, config.pretrained)
    notices += () if notice is None else (notice,)
    if left := sorted({leaf.split("/")[1] for leaf in added - set(leaves)}):
        notices += (f"Weights file {config.pretrained}: {', '.join(left)}, which its method had added, left out.",)
    if config.freeze_encoder:
        states, failed = encoding.encoded(backbone, from_leaves(leaves), domains.inputs, kept.folder("encoded"), report)
        notices += () if failed is None else (failed,)
        domains, backbone = domains._replace(inputs=states), on_encoded(backbone)
        leaves = {leaf: x for leaf, x in leaves.items() if not leaf.startswith("params/encoder/")}
    return Start(domains, backbone, from_leaves(leaves) if leaves else None, notices)


def text_notices(config: RunConfig, backbone: Backbone) -> tuple[str, ...]:
    """What a user should know of a network for texts: whose sizes it has, and what HFedATM does to it."""
    sizes = backbone.module.config
    told = ()
    if config.pretrained is not None:
        told += (
            f"{config.backbone} with the sizes of {config.pretrained}: model_type {sizes.model_type}, "
            f"{sizes.num_hidden_layers} layers of width {sizes.hidden_size}, {sizes.vocab_size:,} tokens.",
        )
    rules = {name: build_aggregator(config, name) for name in names(config.aggregator)}
    if aligning := [name for name, rule in rules.items() if rule.align is not None]:
        told += (
            f"{' and '.join(aligning)}: {config.backbone} has no convolutions, so there is nothing for FOT to align.",
        )
    for name, rule in rules.items():
        if name in ("hfedatm", "hfedatm_literal") and (grams := message_shapes(backbone, rule)):
            every = "all dense layers" if len(grams) > len(backbone.drawn) else f"the layers {' and '.join(grams)}"
            told += (
                f"{name}: RegMean merges {every}; {len(grams)} Grams of {num_bytes(grams) / 2**20:.1f} MiB in all go up "
                "from a client, the other layers are averaged.",
            )
    return told


def sizes_of(grid: Grid) -> dict[str, int]:
    """What a method may have to know of the data set: how many domains it has, and how many of them are trained on."""
    rows = next(iter(grid.federations.deals.values())).held
    held = np.unique(grid.domains.domain[rows[rows >= 0]])
    return {"num_domains": len(grid.domains.domain_names), "num_sources": len(held)}


def describe_model(grid: Grid) -> dict[str, Any]:
    """What ``models.load_model`` needs to rebuild the network where the data, and the pretrained weights, are not."""
    domains, encoder = grid.domains, getattr(grid.backbone.module, "config", None)
    return {
        "input_shape": list(domains.inputs.shape[1:]),
        "input_dtype": str(domains.inputs.dtype),
        "class_names": [str(name) for name in domains.class_names],
        "domain_names": [str(name) for name in domains.domain_names],
        "vocab_size": domains.vocab_size,
        "encoder_sizes": None if encoder is None else encoder._asdict(),
        "encoded": grid.config.freeze_encoder,  # inputs are what a frozen encoder made of texts
        "sizes": sizes_of(grid),
    }


def round_of(grid: Grid, aggregator: str) -> Round:
    """The configuration's round with one server rule; checked against the federation."""
    return rounds_of(grid, aggregator).like


def rounds_of(grid: Grid, aggregator: str, together: bool = False) -> Rounds:
    """The configuration's rounds with one server rule, for any hyper-parameters; checked against the federation."""
    config, sizes = grid.config, sizes_of(grid)

    def make(numbers: Numbers, like: Round | None) -> Round:
        to_server = build_aggregator(config, aggregator, numbers.server)
        to_station = build_station_aggregator(config, numbers.station)
        algorithm = build_algorithm(config, numbers.algorithm, **sizes)
        return make_round(grid.backbone, algorithm, topology(config), to_server, to_station, mesh=grid.mesh, like=like)

    if (augment := AUGMENTS[config.augment]) is not None:  # raises now what it would raise while the round is traced
        inputs = grid.domains.inputs
        jax.eval_shape(augment, jax.ShapeDtypeStruct((1, *inputs.shape[1:]), inputs.dtype), jax.random.key(0))
    found = over_numbers(make, numbers_of(config, aggregator), together)
    check_fit(found.like, next(iter(grid.federations.values())))
    return found


def majority_share(domains: Domains, held_out: str) -> float:
    """Accuracy on a held-out domain of always answering its commonest class."""
    labels = domains.labels[domains.domain == domains.domain_names.index(held_out)]
    return float(np.bincount(labels).max() / len(labels))
