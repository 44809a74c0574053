"""Who owns which part of a model, and in which order the parts run."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from typing import TypeVar

Node = TypeVar("Node", bound=Hashable)


def order_partitions(plan: Sequence[Node], partitions: Sequence[Sequence[Node]]) -> list[list[Node]]:
    """Put partitions in the order in which a plan runs through them.

    Args:
      plan: the nodes (layers) of the model in the order they run, each once.
      partitions: for each partition, the nodes it owns: a stretch of the plan, in any order.

    Returns:
      The partitions in the order they run, the nodes of each in the order of the plan.

    Raises:
      ValueError: names the node that is claimed twice, claimed by none, not in the plan, or out of its stretch; or the
        partition that is empty.

    Example:
      >>> order_partitions(["a", "b", "c", "d"], [["c", "d"], ["a", "b"]])
      [['a', 'b'], ['c', 'd']]
    """
    place: dict[Node, int] = {}
    for i, node in enumerate(plan):
        if node in place:
            raise ValueError(f"plan has node {node!r} twice; give each layer a name of its own")
        place[node] = i
    if not partitions:
        raise ValueError("partitions is empty; write e.g. partitions=[['a', 'b'], ['c', 'd']]")
    owner: dict[Node, int] = {}
    for p, nodes in enumerate(partitions):
        if len(nodes) == 0:
            raise ValueError(f"partitions[{p}] is empty; give it at least one node of the plan, or leave it out")
        for node in nodes:
            if node not in place:
                raise ValueError(f"partitions[{p}] claims {node!r}, which is not in the plan {list(plan)!r}")
            if node in owner:
                where = f"partitions[{owner[node]}] and partitions[{p}]" if owner[node] != p else f"partitions[{p}]"
                raise ValueError(f"node {node!r} is claimed twice, by {where}; leave it in one place")
            owner[node] = p
    for node in plan:
        if node not in owner:
            raise ValueError(f"node {node!r} is claimed by no partition; add it to one of the {len(partitions)}")
    ordered = [sorted(nodes, key=place.__getitem__) for nodes in partitions]
    for p, nodes in enumerate(ordered):
        for before, after in itertools.pairwise(nodes):
            if place[after] != place[before] + 1:
                between = plan[place[before] + 1]
                raise ValueError(
                    f"partitions[{p}] is interleaved with partitions[{owner[between]}]: node {between!r} runs between "
                    f"its {before!r} and {after!r}; a partition must be one stretch of the plan"
                )
    return sorted(ordered, key=lambda nodes: place[nodes[0]])
