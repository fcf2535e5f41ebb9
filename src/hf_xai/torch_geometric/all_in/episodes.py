"""Episodes: to tell the classes of a few items after a few examples of each, whatever the classes are."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

LOGIT_SCALE = 10.0


@dataclass(frozen=True)
class Episode:
    """Examples and questions of one episode, as numbers of items.

    Args:
        support: Examples, ``(classes, support_per_class)``.
        queries: The other items, ``(queries,)``.
        targets: Row of ``support`` that each query belongs to, ``(queries,)``.
    """

    support: Tensor
    queries: Tensor
    targets: Tensor


def episode_classes(labels: Tensor, support_per_class: int) -> Tensor:
    """Classes with enough members for the examples and one query, ascending.

    Args:
        labels: Class of each item, integers, ``(items,)``.
        support_per_class: Examples of each class.
    """
    classes, counts = labels.unique(return_counts=True)
    return classes[counts > support_per_class]


def draw_episode(
    labels: Tensor,
    support_per_class: int,
    *,
    generator: torch.Generator,
    queries_per_class: int | None = None,
    max_classes: int | None = None,
) -> Episode:
    """Draws an episode; classes without enough members stay out.

    Args:
        labels: Class of each item, integers on the CPU, ``(items,)``; two classes or more with enough members.
        support_per_class: Examples of each class, >= 1.
        generator: Draws classes and members.
        queries_per_class: Most queries of each class; None for all others of the class.
        max_classes: Most classes; None for all.
    """
    classes = episode_classes(labels, support_per_class)
    classes = classes[torch.randperm(classes.numel(), generator=generator)[:max_classes]]
    last = None if queries_per_class is None else support_per_class + queries_per_class
    support, queries, targets = [], [], []
    for position, label in enumerate(classes.tolist()):
        members = (labels == label).nonzero().flatten()
        members = members[torch.randperm(members.numel(), generator=generator)]
        support.append(members[:support_per_class])
        queries.append(members[support_per_class:last])
        targets.append(torch.full_like(queries[-1], position))
    return Episode(torch.stack(support), torch.cat(queries), torch.cat(targets))


def prototype_logits(states: Tensor, support: Tensor, queries: Tensor, scale: float = LOGIT_SCALE) -> Tensor:
    r"""Compares queries with the mean example of each class (prototypical networks, arXiv 1703.05175, with cosines).

    $$z_{qc} = 10 \cos\Bigl(s_q,\; \frac{1}{m} \sum_{i \in \mathrm{support}_c} s_i\Bigr)$$

    Args:
        states: State of each item, ``(items, channels)``.
        support: Numbers of the examples, ``(classes, support_per_class)``.
        queries: Numbers of the queries, ``(queries,)``.
        scale: Of the cosines. Default: our choice.

    Returns:
        ``(queries, classes)``, from ``-scale`` to ``scale``; 0 for a state of zeros.
    """
    prototypes = functional.normalize(states[support].mean(dim=1), dim=1)
    return scale * functional.normalize(states[queries], dim=1) @ prototypes.T
