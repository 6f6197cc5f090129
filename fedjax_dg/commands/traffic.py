"""``fedjax-dg traffic``: what travels between a client and its server."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from fedjax_dg import datasets
from fedjax_dg.aggregators import AGGREGATORS
from fedjax_dg.backbones import BACKBONES, TEXT_BACKBONES
from fedjax_dg.config import RunConfig, build_aggregator, build_algorithm, check, names, parse_settings, topology
from fedjax_dg.errors import unknown
from fedjax_dg.traffic import Traffic, as_json, traffic_of


@dataclass(frozen=True)
class TrafficOptions:
    """What travels between a client and its server, read off shapes; nothing is trained."""

    algorithm: str = "fedavg"
    aggregator: str = "mean"
    """The server rule."""
    station_aggregator: str = "mean"
    """The stations' rule."""
    backbone: str = "lenet5"
    num_classes: int = 7
    num_domains: int = 3
    """Source domains."""
    image_size: int | None = None
    """One side of the images; by default the backbone's own."""
    regmean_scope: str | None = None
    """Dense layers that HFedATM merges by RegMean: head, all_dense, none; by default head for texts, else all_dense."""
    stations: int = 1
    clients_per_station: int = 3
    station_rounds: int = 1
    rounds: int = 20
    set: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="KEY=VALUE")] = ()
    """An option of the algorithm or the aggregator; may be given several times."""
    json: bool = False
    """Print one JSON object."""


def traffic_command(console: Console):
    def traffic(options: tyro.conf.OmitArgPrefixes[TrafficOptions] = TrafficOptions()) -> int:
        found = traffic_of_options(options)
        if options.json:
            console.print_json(json.dumps(as_json(found)))
        else:
            show_traffic(console, found)
        return 0

    traffic.__doc__ = TrafficOptions.__doc__
    return traffic


def traffic_of_options(options: TrafficOptions) -> Traffic:
    """``traffic.traffic_of`` for names. Raises ``ValueError`` for what does not fit."""
    shared = ("algorithm", "aggregator", "backbone", "stations", "clients_per_station", "station_rounds", "rounds")
    shared += ("regmean_scope",)
    texts = options.backbone in TEXT_BACKBONES
    dataset = next(iter(datasets.texts.LOADERS)) if texts else RunConfig.dataset
    given = {name: getattr(options, name) for name in shared}
    config = check(RunConfig(dataset=dataset, **given, settings=parse_settings(options.set), eval_every=1))
    if len(names(config.aggregator)) > 1:
        raise ValueError(f"aggregator={config.aggregator!r} names several server rules: give one.")
    if options.station_aggregator not in AGGREGATORS:
        raise unknown("aggregator", options.station_aggregator, AGGREGATORS)
    for name in ("num_classes", "num_domains"):
        if getattr(options, name) < 1:
            raise ValueError(f"{name}={getattr(options, name)} is not positive: give 1 or more.")
    if texts and options.image_size is not None:
        raise ValueError(f"image_size={options.image_size} is given, but {options.backbone} takes texts: leave it out.")
    size = {} if options.image_size is None else {"image_size": options.image_size}
    factory: Any = (TEXT_BACKBONES if texts else BACKBONES)[config.backbone]
    backbone = factory(options.num_classes, **size)
    sizes = {"num_domains": options.num_domains, "num_sources": options.num_domains}
    return traffic_of(
        backbone,
        build_algorithm(config, **sizes),
        topology(config),
        options.rounds,
        build_aggregator(config, config.aggregator),
        AGGREGATORS[options.station_aggregator](),
    )


def show_traffic(console: Console, found: Traffic) -> None:
    """Print what travels, how much of it there is, and what it tells."""
    parts = Table("part", "floats", "bytes", "where", "kept until", title="Sizes")
    for name, part in found.parts.items():
        parts.add_row(name, f"{part.size.floats:,}", f"{part.size.bytes:,}", part.place, part.until)
    ways = Table("one client", "floats up", "floats down", "MB up", "MB down", title="Traffic")
    for name, both in (
        ("before round 1", found.before),
        ("a round", found.per_round),
        (f"{found.rounds} rounds", found.per_run),
    ):
        floats = (f"{way.floats:,}" for way in both)
        ways.add_row(name, *floats, *(f"{way.bytes / 1e6:,.2f}" for way in both))
    told = Table("beside the model's parameters", "seen by", "when", title="What leaves a client")
    for what, seen_by, when in found.disclosures:
        told.add_row(what, seen_by, when)
    for table in (parts, ways, told) if found.disclosures else (parts, ways):
        for column in table.columns[1:]:
            column.justify = "right" if "floats" in str(column.header) or "bytes" in str(column.header) else "left"
        console.print(table)
