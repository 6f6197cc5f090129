"""gPerXAN (Le et al., CVPR 2024)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
from jaxtyping import ArrayLike

from fedjax_dg.algorithms.common import classify, cross_entropy, gradient_method, keep_leaves, momentum
from fedjax_dg.alignment.groups import Axis, from_leaves, leaves_of
from fedjax_dg.backbones.backbone import Backbone
from fedjax_dg.errors import unknown
from fedjax_dg.types import Algorithm, Variables

#: Which scores of the two norms stay on the client.
PERSONAL_SCORES = {"bn": ("batch_score",), "both": ("batch_score", "instance_score"), "none": ()}
SCORES = PERSONAL_SCORES["both"]


class GPerXANHparams(NamedTuple):
    client_lr: ArrayLike = 0.05
    lambda_g: ArrayLike = 0.5  # the paper's lambda, weight of the global head's loss (0.5 in the authors' code)


def gperxan(
    hparams: GPerXANHparams = GPerXANHparams(), optimizer: Callable = momentum, personal_scores: str = "bn"
) -> Algorithm:
    """Every batch norm becomes s_1 BN(x) + s_2 IN(x), BN stays personal, and the global head looks at the features.

    (s_1, s_2) is the softmax of two scores a layer, 1 and 1 at first; BN and the instance norm IN have their own scale and
    bias, and IN no running statistics (``backbones.layers.XAN``). With features b(x) and head fc,
    loss = CE(fc(b(x)), y) + lambda CE(fc_g(b(x)), y), where fc_g is the head of the server's model when the server round
    began: it gets no gradient, but hands one on to b.

    Client state: BN's scale, bias and running statistics, and the scores that ``personal_scores`` names (``bn``: BN's alone,
    so that half of a mixing ratio is shared, as in the authors' code, where a filter by name chooses it; ``both``;
    ``none``). A client trains with these whatever came down. They are uploaded with the model all the same, and the means
    of them judge the unseen domain: the server does see them. Upload: the model.

    The network must have batch norm (``with_xan`` turns it into this one); its weights, drawn or pretrained, are BN's, and
    IN starts as a copy of scale and bias. Raises ``ValueError`` before training for another network, and for an unknown
    ``personal_scores``.

    Deviations: the local optimizer starts afresh each station round (``keep_optimizer`` keeps it, as their code), and its
    learning rate is constant (theirs falls along a cosine, to 0 in the last round). Theirs leaves all norms at their
    initial values when it loads the weights of a network without IN. With several station rounds fc_g stays the server's.
    Source: Le, Ho, Do, Le-Phuoc, Wong, CVPR 2024, https://arxiv.org/abs/2403.15605.
    """
    if personal_scores not in PERSONAL_SCORES:
        raise unknown("personal_scores", personal_scores, PERSONAL_SCORES)

    def loss(backbone, params, received, local, batch, key):
        value, forward = classify(backbone, params, local, batch, key)
        model = received.server or received.variables
        frozen = Variables({**params, "head": model.params["head"]}, local.variables.batch_stats)
        other = cross_entropy(backbone.head(frozen, forward.z), batch.labels, batch.mask)
        return value + hparams.lambda_g * other, (forward, {"cross_entropy": value, "global_head": other})

    method = gradient_method(loss, optimizer(hparams.client_lr), adapt=with_xan)
    return keep_leaves(method, lambda variables: personal(variables, PERSONAL_SCORES[personal_scores]))


def norms_of(variables: Variables) -> set[str]:
    """The batch norms of a network: paths below ``params``."""
    return {
        leaf.removeprefix("batch_stats/").rpartition("/")[0] for leaf in leaves_of(Variables({}, variables.batch_stats))
    }


def personal(variables: Variables, scores: tuple[str, ...]) -> Variables:
    """The part of a network's variables that stays on a client."""
    own = {f"params/{norm}/{leaf}" for norm in norms_of(variables) for leaf in ("scale", "bias", *scores)}
    return from_leaves({k: x for k, x in leaves_of(variables).items() if k in own or k.startswith("batch_stats/")})


def with_xan(backbone: Backbone) -> Backbone:
    """The network with ``XAN`` for every batch norm, and all it declares about the new leaves; unchanged if it has it.

    ``ValueError`` for a network without batch norm: its module must have a field ``norm`` that says ``batch``.
    """
    norm = getattr(backbone.module, "norm", None)
    if norm == "xan":
        return backbone
    if norm != "batch":
        raise ValueError(
            "gperxan mixes batch norm with instance norm, but this network has no batch norm: choose resnet18, "
            "resnet18_cifar, resnet50 or vgg11_bn, with norm=batch."
        )
    norms = norms_of(jax.eval_shape(backbone.init, jax.random.key(0)))
    same = {f"params/{n}/instance/{leaf}": f"params/{n}/{leaf}" for n in norms for leaf in ("scale", "bias")}

    def gain(group):
        have = {axis.leaf for axis in group.followers}
        new = (Axis(leaf, 0) for leaf, like in sorted(same.items()) if like in have)
        return group._replace(followers=(*group.followers, *new))

    return dataclasses.replace(
        backbone,
        module=backbone.module.clone(norm="xan"),
        groups=tuple(gain(group) for group in backbone.groups),
        starts={**backbone.starts, **same, **{f"params/{n}/{score}": 1.0 for n in norms for score in SCORES}},
    )
