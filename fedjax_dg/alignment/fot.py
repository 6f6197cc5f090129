"""Filter-wise optimal transport (FOT): put models' filters into the order of a reference before a merge."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike, Float, Int
from ott.geometry import geometry
from ott.solvers import linear

from fedjax_dg import tree
from fedjax_dg.alignment.groups import Axis, Group, Order, carry, from_leaves, leaves_of, take_units
from fedjax_dg.errors import unknown
from fedjax_dg.types import Metrics, PyTree, Variables

# A matching must beat the identity by this much cost a filter: equal or dead filters would otherwise be shuffled at random.
LEAST_GAIN = 1e-6

MATCHINGS = ("sequential", "independent")
COSTS = ("squared", "unsquared")
ASSIGNMENTS = ("sinkhorn", "hungarian")


class Matching(NamedTuple):
    """How filters are matched; see ``align``. ``epsilon`` is traced, the rest is part of the program."""

    epsilon: ArrayLike = 0.05
    matching: str = "sequential"
    cost: str = "squared"
    assignment: str = "sinkhorn"
    soft: bool = False
    propagate: bool = True
    align_dense: bool = False


class Alignment(NamedTuple):
    """Aligned models, their Gram statistics in the same basis, the orders applied, and what was done, per group."""

    variables: Any
    grams: PyTree
    orders: dict[str, Order]
    info: dict[str, Metrics]


def filter_cost(
    reference: Float[Array, "a f"], filters: Float[Array, "a f"], cost: str = "squared"
) -> Float[Array, "a a"]:
    """D(a, b) = || r_a - w_b ||^2 = 2 - 2 cos for unit-length rows; an all-zero filter keeps length 0.

    ``cost="unsquared"``: the distance itself, another assignment problem.
    """

    def unit(x):
        length = jnp.linalg.norm(x, axis=1, keepdims=True)
        return x / jnp.maximum(length, 1e-12), (length > 0).astype(x.dtype)

    (reference, ones), (filters, others) = unit(reference), unit(filters)
    cosines = jnp.matmul(reference, filters.T, precision="highest")
    squared = jnp.maximum(ones + others.T - 2.0 * cosines, 0.0)
    return squared if cost == "squared" else jnp.sqrt(squared)


def assign(cost: Float[Array, "a a"]) -> Int[Array, " a"]:
    """The permutation of least cost: entry a is the column b that row a gets (Hungarian algorithm, inside jit)."""
    rows, columns = optax.assignment.hungarian_algorithm(cost)
    # optax returns pairs in no promised order, for square costs sorted by column
    return jnp.zeros(len(rows), jnp.int32).at[rows].set(columns.astype(jnp.int32))


def assign_within(cost: Float[Array, "a a"], num_groups: int) -> Int[Array, " a"]:
    """The cheapest permutation that moves whole groups of neighbours, and units within a group: what a group norm allows.

    The best order inside every pair of groups first, then the best pairing of groups.
    """
    size = len(cost) // num_groups
    pairs = cost.reshape(num_groups, size, num_groups, size).swapaxes(1, 2)
    inner = jax.vmap(jax.vmap(assign))(pairs)
    paid = jnp.take_along_axis(pairs, inner[..., None], axis=-1).sum((-2, -1))
    outer = assign(paid)
    return (outer[:, None] * size + inner[jnp.arange(num_groups), outer]).reshape(-1)


@functools.partial(jax.jit, inline=True)  # inlined: ott's solver takes long to trace, a group's size once will do
def transport(cost: Float[Array, "a a"], epsilon: ArrayLike) -> Float[Array, "a a"]:
    """The entropic transport plan between uniform marginals (Sinkhorn, ott-jax), scaled so that rows and columns sum to 1.

    The regularisation is ``epsilon`` times the standard deviation of the cost: unit filters in high dimension all lie
    near cost 2, so an absolute epsilon would blur every plan.
    """
    size = cost.shape[0]
    spread = jnp.maximum(cost.std(), 1e-6)  # all filters equal: any plan will do, but not a division by zero
    scaled = cast(float, epsilon * spread)  # traced, whatever ott's annotation says
    problem = geometry.Geometry(cost_matrix=cost, epsilon=scaled)
    return size * linear.solve(problem, threshold=0.1 / size).matrix


def match(
    cost: Float[Array, "a a"], epsilon: ArrayLike = 0.05, assignment: str = "sinkhorn", norm_groups: int = 1
) -> Int[Array, " a"]:
    """The permutation to apply: entry a is the filter that comes to place a.

    ``sinkhorn`` rounds the transport plan by an assignment on it (rows cannot simply take their maximum: that is no
    permutation); ``hungarian``, and group norms always, solve the assignment on the cost. The identity is kept unless
    the matching is cheaper (``LEAST_GAIN``).
    """
    size = cost.shape[0]
    if norm_groups > 1:
        order = assign_within(cost, norm_groups)
    else:
        order = assign(-transport(cost, epsilon) if assignment == "sinkhorn" else cost)
    identity = jnp.arange(size, dtype=jnp.int32)
    gain = jnp.trace(cost) - cost[identity, order].sum()
    return jnp.where(gain > LEAST_GAIN * size, order, identity)


def match_all(cost: Float[Array, "e a a"], options: Matching, norm_groups: int = 1) -> Int[Array, "e a"]:
    """``match`` for every model. No problem is solved where each filter's nearest is already in its place, in all models:
    the identity is then optimal, and what ``match`` would return.
    """
    in_place = jnp.diagonal(cost, axis1=1, axis2=2) <= cost.min(axis=2) + LEAST_GAIN
    identity = jnp.broadcast_to(jnp.arange(cost.shape[1], dtype=jnp.int32), cost.shape[:2])
    solve = jax.vmap(lambda c: match(c, options.epsilon, options.assignment, norm_groups))
    return jax.lax.cond(in_place.all(), lambda: identity, lambda: solve(cost))


def align(
    model: Variables | PyTree,
    reference: Variables | PyTree,
    groups: tuple[Group, ...],
    grams: PyTree = None,
    options: Matching = Matching(),
) -> Alignment:
    """Reorder the hidden units of a model so that its filters match a reference's; its function stays the same.

    Group by group in depth order, so a layer is matched after its inputs were put in place: cost D (``filter_cost``)
    summed over the group's kernels, permutation by ``match``, applied to the kernels, their biases and norms, the next
    layers' inputs (through a flatten) and the Gram statistics ``grams[layer]`` of those inputs. A residual stream has one
    order for all its kernels: it is found from those whose inputs are known, and once more from all of them.

    ``model`` and ``reference`` are Variables or bare params; the result is of the same kind. A kernel of another spatial
    size is resized to the reference's first (``resize_kernels``). Dense hidden layers stay as they are unless
    ``options.align_dense``; class and pixel axes always do. ``options`` for ablations: ``matching="independent"`` (cost
    without regard to the inputs' order), ``propagate=False`` (each layer alone, outputs and bias only, as in the authors'
    release: changes the function), ``soft`` (the plan itself instead of a permutation: mixes filters).

    Info per group: ``identity_fraction`` (share of filters that stayed), ``cost_before`` and ``cost_after`` (sum of D
    over matched pairs). Pure and jittable; ``align_all`` does several models at once. Raises ``ValueError`` for an
    unknown option or models of different widths.

    Deviation from the paper's summary and release, which reorder each layer's outputs alone: that changes the network's
    function. Source: HFedATM (CVPR 2026), https://arxiv.org/abs/2508.05135.
    """
    bare = not isinstance(model, Variables)
    own, target = (x if isinstance(x, Variables) else Variables(x, {}) for x in (model, reference))
    own = resize_kernels(own, target)
    fixed = {"groups": tuple(groups), "options": options._replace(epsilon=0.0)}
    aligned = _align_one(own, target, grams, options.epsilon, **fixed)
    return aligned._replace(variables=aligned.variables.params) if bare else aligned


@functools.partial(jax.jit, static_argnames=("groups", "options"))
def _align_one(model, reference, grams, epsilon, *, groups, options) -> Alignment:
    """Compiled once for models of one architecture."""
    one = lambda x: jax.tree.map(lambda leaf: leaf[None], x)
    aligned = align_all(one(model), reference, groups, one(grams), options._replace(epsilon=epsilon))
    return Alignment(*tree.take(tuple(aligned), 0))


def align_all(
    models: Variables,
    reference: Variables,
    groups: tuple[Group, ...],
    grams: PyTree = None,
    options: Matching = Matching(),
) -> Alignment:
    """``align`` for models [e] of one shape; every result has the leading axis [e]."""
    for kind, given, allowed in (
        ("matching", options.matching, MATCHINGS),
        ("cost", options.cost, COSTS),
        ("assignment", options.assignment, ASSIGNMENTS),
    ):
        if given not in allowed:
            raise unknown(kind, given, allowed)
    check_widths(models, reference)
    groups = chosen(groups, reference, options)
    grams = {} if grams is None else grams
    if not groups:
        return Alignment(models, grams, {}, {})
    orders, info = find_orders(models, reference, groups, options)
    put = jax.vmap(lambda state, order: carry(state, state[0], groups, order))
    if options.soft:
        models, grams = put((models, grams), orders)
        return Alignment(models, grams, orders, info)
    stayed = jnp.stack([jnp.all(order == jnp.arange(order.shape[1])) for order in orders.values()]).all()
    # most rounds move nothing: then no weight is copied
    models, grams = jax.lax.cond(stayed, lambda: (models, grams), lambda: put((models, grams), orders))
    return Alignment(models, grams, orders, info)


def find_orders(
    models: Variables, reference: Variables, groups: tuple[Group, ...], options: Matching
) -> tuple[dict[str, Order], dict[str, Metrics]]:
    """Orders [e, size] (plans [e, size, size] if soft) of every group, and what they cost.

    One scan over ``visits``, in which widths share one solver: solvers are what is slow to compile.
    """
    steps, reads = visits(groups), readers(groups)
    own, target = leaves_of(models), leaves_of(reference)
    num_models, widest = jax.tree.leaves(models)[0].shape[0], max(group.size for group in groups)
    kinds = sorted({(group.size, group.norm_groups) for group in groups})

    def rows(axis, orders):
        """The filters of a kernel as rows [e, a, f], their inputs in the orders found so far."""
        kernel = own[axis.leaf]
        if axis.leaf in reads and options.matching == "sequential":
            number, read = reads[axis.leaf]
            order = _cut(orders[number], groups[number].size)
            kernel = jax.vmap(lambda k, o: take_units(k, o, read.axis, read.positions))(kernel, order)
        return jax.vmap(lambda k: _rows(k, axis.axis))(kernel)

    def cost_of(step):
        def total(orders):
            sides = [(_rows(target[axis.leaf], axis.axis), rows(axis, orders)) for axis in step[1]]
            costs = [jax.vmap(lambda w, r=r: filter_cost(r, w, options.cost))(w) for r, w in sides]
            room = widest - groups[step[0]].size
            return jnp.pad(sum(costs), ((0, 0), (0, room), (0, room)))

        return total

    def solver(kind):
        size, norm_groups = kind

        def solve(cost):
            cost = cost[:, :size, :size]
            if options.soft:
                return _widen(jax.vmap(lambda c: transport(c, options.epsilon))(cost), widest)
            return _widen(match_all(cost, options, norm_groups), widest)

        return solve

    def visit(orders, step):
        number, place, kind = step
        cost = jax.lax.switch(number, [cost_of(s) for s in steps], orders)
        order = jax.lax.switch(kind, [solver(k) for k in kinds], cost)
        after = order * cost if options.soft else jnp.take_along_axis(cost, order[..., None], axis=2)
        return orders.at[place].set(order), (jnp.trace(cost, axis1=1, axis2=2), after.sum((1, 2)))

    places = [place for place, _ in steps]
    kind_of = [kinds.index((groups[p].size, groups[p].norm_groups)) for p in places]
    shape = (len(groups), num_models, widest)
    start = jnp.broadcast_to(jnp.eye(widest), (*shape, widest)) if options.soft else jnp.zeros(shape, jnp.int32)
    start = start if options.soft else start + jnp.arange(widest)
    numbers = tuple(jnp.asarray(x) for x in (range(len(steps)), places, kind_of))
    orders, (before, after) = jax.lax.scan(visit, start, numbers)
    last = {place: number for number, place in enumerate(places)}
    found = {group.name: _cut(orders[i], group.size) for i, group in enumerate(groups)}
    info = {}
    for i, group in enumerate(groups):
        order = found[group.name].argmax(-1) if options.soft else found[group.name]
        stayed = jnp.mean(order == jnp.arange(group.size), axis=-1)
        info[group.name] = {
            "identity_fraction": stayed,
            "cost_before": before[last[i]],
            "cost_after": after[last[i]],
        }
    return found, info


def visits(groups: tuple[Group, ...]) -> list[tuple[int, tuple[Axis, ...]]]:
    """In which order groups are matched, by number, and by which of their kernels.

    First in depth order, each by the kernels whose inputs have been put in place; then, where a residual stream had to
    leave out kernels of its own later blocks, all groups once more by all their kernels.
    """
    reads, steps = readers(groups), []
    for number, group in enumerate(groups):
        ready = tuple(a for a in group.producers if a.leaf not in reads or reads[a.leaf][0] < number)
        steps.append((number, ready or group.producers))
    if any(len(ready) < len(groups[number].producers) for number, ready in steps):
        steps += [(number, group.producers) for number, group in enumerate(groups)]
    return steps


def readers(groups: tuple[Group, ...]) -> dict[str, tuple[int, Axis]]:
    """Kernel -> number of the group whose units it reads, and along which axis."""
    return {axis.leaf: (number, axis) for number, group in enumerate(groups) for axis in group.consumers}


def chosen(groups: tuple[Group, ...], reference: Variables, options: Matching) -> tuple[Group, ...]:
    """The groups to match: of convolutions, unless dense ones are asked for; of single layers, if nothing propagates."""
    leaves = leaves_of(reference)
    groups = tuple(g for g in groups if options.align_dense or leaves[g.producers[0].leaf].ndim > 2)
    if not reference.batch_stats:  # bare parameters: statistics that are not there need not move
        keep = lambda axes: tuple(a for a in axes if not a.leaf.startswith("batch_stats/"))
        groups = tuple(g._replace(followers=keep(g.followers)) for g in groups)
    if options.propagate:
        return groups
    alone = []
    for group in groups:
        for axis in group.producers:
            layer = axis.leaf.removesuffix("/kernel")
            bias = tuple(a for a in group.followers if a.leaf == f"{layer}/bias")
            alone.append(Group(layer.removeprefix("params/"), group.size, (axis,), bias, ()))
    return tuple(alone)


def resize_kernels(model: Variables, reference: Variables) -> Variables:
    """Convolution kernels of another spatial size than the reference's, resized to it; everything else as it is.

    Bilinear without anti-aliasing, times (k / k')^2, by which a flat kernel answers a constant image as before. The
    function changes unless layers pad to their input's size. Raises ``ValueError`` for any other difference in shape.
    """
    target, leaves = leaves_of(reference), leaves_of(model)
    for name, leaf in leaves.items():
        wanted = getattr(target.get(name), "shape", None)
        if wanted is not None and leaf.ndim == 4 and leaf.shape != wanted and leaf.shape[2:] == wanted[2:]:
            gain = leaf.shape[0] * leaf.shape[1] / (wanted[0] * wanted[1])
            leaves[name] = gain * jax.image.resize(leaf, wanted, "bilinear", antialias=False)
    resized = from_leaves(leaves)
    check_widths(jax.tree.map(lambda x: jnp.asarray(x)[None], resized), reference)
    return resized


def check_widths(models: Variables, reference: Variables) -> None:
    """``ValueError`` for models that do not have the reference's leaves and shapes."""
    own, target = leaves_of(models), leaves_of(reference)
    for name in sorted({*own, *target}):
        have, want = own[name].shape[1:] if name in own else None, target[name].shape if name in target else None
        if have != want:
            raise ValueError(
                f"{name} has shape {have} in the model and {want} in the reference: only models of one architecture and "
                "width can be aligned (kernels may differ in their spatial size)."
            )


def _rows(kernel: Array, axis: int) -> Float[Array, "a f"]:
    """The filters of a kernel as rows."""
    return jnp.moveaxis(kernel, axis, 0).reshape(kernel.shape[axis], -1)


def _cut(order: Array, size: int) -> Array:
    """The part of a widened order or plan that a group uses."""
    return order[:, :size] if order.ndim == 2 else order[:, :size, :size]


def _widen(order: Array, widest: int) -> Array:
    """An order or plan with the identity beyond its size."""
    size = order.shape[1]
    if order.ndim == 2:
        rest = jnp.broadcast_to(jnp.arange(size, widest, dtype=order.dtype), (len(order), widest - size))
        return jnp.concatenate([order, rest], axis=1)
    return jnp.broadcast_to(jnp.eye(widest), (len(order), widest, widest)).at[:, :size, :size].set(order)
