"""The records the whole library is written in: data is pytrees, behaviour is records of pure functions.

Axis letters, everywhere: S stations, C clients of a station, P participants of a station (P <= C), N examples of a
client, B examples of a batch, D features, K classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float, Int

PyTree = Any
Key = Array  # a typed JAX random key
Metrics = dict[str, Any]  # arrays, or again such


class Examples(NamedTuple):
    """Some examples under any leading axes: a batch [B], a client [N], a whole federation [S, C, N].

    Padding has ``mask`` False; its values, even NaN, are never read.
    """

    inputs: Array  # [..., N, *shape]: uint8 images or float32
    labels: Int[Array, "... N"]
    mask: Bool[Array, "... N"]  # True = a real example
    domain: Int[Array, "... N"]  # a client may hold several domains


class Variables(NamedTuple):
    """A model. Corrections, penalties and optimizers touch ``params`` only; merges touch both."""

    params: PyTree
    batch_stats: PyTree


class Topology(NamedTuple):
    """The sizes of a federation and of a round: Python ints, so each is part of the compiled program."""

    stations: int
    clients_per_station: int
    station_rounds: int = 1  # client -> station rounds in one server round
    local_epochs: int = 1  # passes over a client's own examples in a station round
    local_steps: int | None = None  # if set, this many steps instead of local_epochs passes
    batch_size: int = 32
    participants: int | None = None  # clients of each station sampled for a server round; None = all


class Received(NamedTuple):
    """What a client holds while it trains and does not change: what came down, and its own memory of the round's start."""

    variables: Variables  # the station's model, where local training starts
    shared: PyTree  # the algorithm's state at the server
    station: PyTree  # the algorithm's state at this client's station
    origin: PyTree  # this client's state when the server round began
    round: Int[Array, ""] | int = 0  # server rounds done before this one, for schedules
    server: Variables | tuple = ()  # the server's model when the server round began


class Local(NamedTuple):
    """What changes with every local step."""

    variables: Variables
    optimizer: PyTree
    client: PyTree  # the algorithm's state of this client; survives the round
    tally: PyTree  # what a method accumulates over these steps; gone afterwards
    seen: PyTree = ()  # what each dense layer read in the last step's forward pass
    passes: Int[Array, ""] | int = 0  # passes over its examples that this client has finished; kept by ``local.train``


class Seen(NamedTuple):
    """What the dense layers read in the forward passes of a client's last pass over its examples."""

    inputs: dict[str, Array]  # layer -> [M, ..., d]; of layers that read the same, the first
    mask: Bool[Array, "M *t"]  # which examples are real, of text which tokens (``Backbone.real_rows``)


class Workshop(NamedTuple):
    """What an algorithm has for its work before round 1 (``Algorithm.prepare``)."""

    topology: Topology
    chunk: int  # see ``local.map_clients``
    #: (name, state, advance, blocks, tell) -> state: ``state = advance(state, block)`` for block 0, 1, ... A run folder
    #: keeps the state after each and goes on from there. ``tell(state)``, if given, is a few numbers for a human.
    stage: Callable[..., PyTree]


class Before(NamedTuple):
    """What moves before round 1, and what the server keeps until then: trees of shapes by name, for ``traffic``."""

    up: dict[str, PyTree] = {}  # from each client
    down: dict[str, PyTree] = {}  # to each client; the server's state is then not sent again
    server: dict[str, PyTree] = {}


class Disclosure(NamedTuple):
    """A statistic of a client's data that leaves it beside its model's parameters."""

    what: str
    seen_by: str
    when: str = "every round"


class Start(NamedTuple):
    """An algorithm's states before round 1. ``variables`` may have gained trainable parts."""

    variables: Variables
    client: PyTree = ()
    station: PyTree = ()
    shared: PyTree = ()


def _start(backbone, variables, key):
    return Start(variables)


def _adapt(backbone):
    return backbone


def _prepare(backbone, state, data, key, workshop):
    return state


def _before(backbone):
    return Before()


def _begin(backbone, received, client):
    return (), ()


def _report(backbone, received, local, steps, examples, key):
    return local.client, ()


def _gather(station, messages, shares):
    return station


def _absorb(shared, stations, messages, shares):
    return shared, stations


def _same_rule(rule):
    return rule


def _predict(backbone, variables, inputs, key):
    return backbone.apply(variables, inputs)


class Algorithm(NamedTuple):
    """What one client does in a round, and what server and stations remember of it. Every hook is a pure function.

    Only ``step`` is required. A client uploads its model and the ``message`` of its hooks, nothing else. A message is a
    level or an increment since the *server* round began (``received.origin``), never since the last station round:
    ``absorb`` sees those of the last station round only. ``shares`` is each client's weight in the whole federation
    (all N clients, so the shares of sampled participants sum to less than one).
    """

    #: (backbone, received, local, batch, key) -> (local, metrics): one local step on a batch [B].
    step: Callable[..., tuple[Local, Metrics]]
    #: backbone -> backbone: the network this method trains, where it adds layers or changes them.
    adapt: Callable[..., Any] = _adapt
    #: (backbone, variables, key) -> Start: states before round 1; the client state is drawn once per client.
    init: Callable[..., Start] = _start
    #: (backbone, state, data, key, workshop) -> state: once before round 1, outside the round's program.
    prepare: Callable[..., ServerState] = _prepare
    #: (backbone, examples [S, C, N, ...], ids [S, C], key) -> examples: what clients train on instead of what they hold,
    #: made whenever a run starts or goes on.
    furnish: Callable[..., Examples] | None = None
    #: (backbone, received, client, examples, key) -> (client, message): an extra pass at the server round's start.
    survey: Callable[..., tuple[PyTree, PyTree]] | None = None
    #: (shared, stations [S], messages [S, P], shares [S, P]) -> (shared, stations): after the survey.
    digest: Callable[..., tuple[PyTree, PyTree]] = _absorb
    #: (backbone, received, client) -> (optimizer, tally): when a client's local training starts.
    begin: Callable[..., tuple[PyTree, PyTree]] = _begin
    #: (backbone, received, local, steps, examples, key) -> (client, message): when it ends; ``steps`` are the real ones.
    report: Callable[..., tuple[PyTree, PyTree]] = _report
    #: (station, messages [P], shares [P]) -> station: at each station, after every station round.
    gather: Callable[..., PyTree] = _gather
    #: (shared, stations [S], messages [S, P], shares [S, P]) -> (shared, stations): after the server's merge.
    absorb: Callable[..., tuple[PyTree, PyTree]] = _absorb
    #: (backbone, variables, inputs, key) -> logits [B, K]: the prediction of the trained model.
    predict: Callable[..., Array] = _predict
    #: rule -> rule: what this method changes in how models become one, at both tiers.
    merging: Callable[[Aggregator], Aggregator] = _same_rule
    #: Passes over its examples that a client makes in a station round unless told otherwise, and the fewest that reach
    #: every part of the method.
    local_epochs: int = 1
    least_epochs: int = 1
    #: ``prepare`` or ``furnish`` reads all the clients' examples, so this method cannot be run on a streamed federation.
    resident: bool = False
    #: backbone -> Before: sizes of what ``prepare`` and ``furnish`` send and keep, for ``traffic``.
    before: Callable[..., Before] = _before
    #: What the messages of this method tell about a client's data, and to whom.
    discloses: tuple[Disclosure, ...] = ()


def _no_state(variables, num_models):
    return ()


def _no_message(backbone, start, variables, examples, key, seen):
    return ()


def _sum_messages(messages, weights):
    return ()


def _start_model(start, models):
    return start


class Aggregator(NamedTuple):
    """How several models become one: of clients at a station, or of stations at the server."""

    #: (num_examples [n], num_clients [n]) -> weights [n]: see ``aggregators.WEIGHTINGS``.
    weigh: Callable[..., Float[Array, " n"]]
    #: (backbone, state, start, models [n], weights [n], messages [n]) -> (variables, state, info).
    merge: Callable[..., tuple[Variables, PyTree, Metrics]]
    #: (variables, num_models) -> state: what this rule remembers between merges (a server optimizer's momentum).
    init: Callable[..., PyTree] = _no_state
    #: (backbone, start, variables, examples, key, seen) -> message: what a client computes for this rule, with its trained
    #: model, or with its station's merged one (``at_station``). ``start``: the tier's model before, as in ``merge``.
    #: ``seen`` is None unless the rule ``watches``.
    measure: Callable[..., PyTree] = _no_message
    #: (backbone, layer) -> whether ``measure`` wants what this dense layer read in training; None: of none. The algorithm's
    #: steps must show it (``Local.seen``).
    watches: Callable[[Any, str], bool] | None = None
    #: (messages [C], weights [C]) -> message: a station's message from those of its clients.
    combine: Callable[..., PyTree] = _sum_messages
    #: (backbone, target, models [n], messages [n]) -> (models, messages, orders, info): models, each by itself, into the
    #: basis of ``target`` before the merge. ``orders`` [n, ...] by permutation group: states of the models' clients and
    #: stations follow them.
    align: Callable[..., tuple[Variables, PyTree, PyTree, Metrics]] | None = None
    #: (start, models [n]) -> model: the target of ``align``.
    target: Callable[..., Variables] = _start_model
    #: Measure with the station's merged model after the last station round, instead of with each client's own.
    at_station: bool = False
    #: What its messages tell about a client's data, and to whom.
    discloses: tuple[Disclosure, ...] = ()


class ServerState(NamedTuple):
    """Everything a run must remember between two server rounds: checkpoint this and nothing else is lost."""

    variables: Variables
    shared: PyTree
    clients: PyTree  # [S, C, ...]
    stations: PyTree  # [S, ...]
    station_rule: PyTree  # [S, ...]: the station tier aggregator's state
    server_rule: PyTree
    round: Int[Array, ""]


class RoundInfo(NamedTuple):
    """What a round tells a human, as arrays."""

    participants: Int[Array, "S P"]  # index of the client within its station
    metrics: dict[str, Float[Array, "S P"]]  # mean over the real local steps of the last station round
    steps: Int[Array, "S P"]  # real local steps in the last station round
    finite: Bool[Array, "S P"]  # losses and parameters stayed finite in every station round
    merged_finite: Bool[Array, ""]
    station_merge: Metrics  # [S] arrays of the last station round
    server_merge: Metrics
