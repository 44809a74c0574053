"""Layer 2, places: where parameters, gradients and optimizer state live on a mesh, and the step that keeps them so."""

from jaxche.sharding._checks import collections_of, refuse_bad_params
from jaxche.sharding._collectives import Collective, collectives
from jaxche.sharding._compare import Comparison, compare_strategies
from jaxche.sharding._devices import RemoteDevice, devices, is_private, know_devices, local_devices
from jaxche.sharding._explain import Explanation, bytes_in_theory
from jaxche.sharding._gradient import value_and_grad
from jaxche.sharding._layout import Layout, Leaf
from jaxche.sharding._loss import Loss, as_loss, batch_size
from jaxche.sharding._program import ShardedState
from jaxche.sharding._sizes import as_bytes, nbytes, nbytes_per_device
from jaxche.sharding._step import ShardedStep, sharded_step
from jaxche.sharding._strategy import (
    Device,
    FullShard,
    HybridShard,
    HybridShardGradOp,
    NoShard,
    ShardGradOp,
    ShardingStrategy,
)
from jaxche.sharding._update import sharded_update

__all__ = [
    "Collective",
    "Comparison",
    "Device",
    "Explanation",
    "FullShard",
    "HybridShard",
    "HybridShardGradOp",
    "Layout",
    "Leaf",
    "Loss",
    "NoShard",
    "RemoteDevice",
    "ShardGradOp",
    "ShardedState",
    "ShardedStep",
    "ShardingStrategy",
    "as_bytes",
    "as_loss",
    "batch_size",
    "bytes_in_theory",
    "collections_of",
    "collectives",
    "compare_strategies",
    "devices",
    "is_private",
    "know_devices",
    "local_devices",
    "nbytes",
    "nbytes_per_device",
    "refuse_bad_params",
    "sharded_step",
    "sharded_update",
    "value_and_grad",
]
