"""Strategies, layouts on a mesh, and the sharded step with its costs."""

from jaxche.sharding._checks import batch_size as batch_size
from jaxche.sharding._checks import check_numbers as check_numbers
from jaxche.sharding._checks import check_params as check_params
from jaxche.sharding._checks import check_range as check_range
from jaxche.sharding._checks import check_strategy as check_strategy
from jaxche.sharding._checks import check_transform as check_transform
from jaxche.sharding._checks import check_update as check_update
from jaxche.sharding._checks import collections_of as collections_of
from jaxche.sharding._checks import context_mesh as context_mesh
from jaxche.sharding._checks import flax_kind as flax_kind
from jaxche.sharding._checks import is_maker as is_maker
from jaxche.sharding._checks import not_floats as not_floats
from jaxche.sharding._checks import not_trained as not_trained
from jaxche.sharding._compare import Comparison, compare_strategies
from jaxche.sharding._compare import default_strategies as default_strategies
from jaxche.sharding._devices import RemoteDevice, devices
from jaxche.sharding._devices import is_private as is_private
from jaxche.sharding._devices import local_devices as local_devices
from jaxche.sharding._devices import set_devices as set_devices
from jaxche.sharding._devices import without_axes as without_axes
from jaxche.sharding._explain import Explanation
from jaxche.sharding._explain import as_bytes as as_bytes
from jaxche.sharding._explain import nbytes as nbytes
from jaxche.sharding._explain import nbytes_per_device as nbytes_per_device
from jaxche.sharding._explain import show_bytes as show_bytes
from jaxche.sharding._gradient import sharded_update, value_and_grad
from jaxche.sharding._hlo import Collective
from jaxche.sharding._hlo import collectives as collectives
from jaxche.sharding._loss import RNG_NAMES as RNG_NAMES
from jaxche.sharding._loss import Loss as Loss
from jaxche.sharding._loss import as_loss
from jaxche.sharding._loss import loss_and_aux as loss_and_aux
from jaxche.sharding._loss import mean_of as mean_of
from jaxche.sharding._loss import wanted_names as wanted_names
from jaxche.sharding._plan import plan
from jaxche.sharding._step import ShardedState, ShardedStep, sharded_step
from jaxche.sharding._strategy import Device as Device
from jaxche.sharding._strategy import (
    FullShard,
    HybridShard,
    HybridShardGradOp,
    Layout,
    Leaf,
    NoShard,
    ShardGradOp,
    ShardingStrategy,
)

# For users, on a page of the reference; what is imported "as" itself is for the other packages.
__all__ = [
    "Collective",
    "Comparison",
    "Explanation",
    "FullShard",
    "HybridShard",
    "HybridShardGradOp",
    "Layout",
    "Leaf",
    "NoShard",
    "RemoteDevice",
    "ShardGradOp",
    "ShardedState",
    "ShardedStep",
    "ShardingStrategy",
    "as_loss",
    "compare_strategies",
    "devices",
    "plan",
    "sharded_step",
    "sharded_update",
    "value_and_grad",
]
