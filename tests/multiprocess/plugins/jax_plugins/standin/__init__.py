"""A platform "standin" that JAX finds as it finds CUDA: CPU devices of a second client, which plays the accelerator's.

As CUDA's it waits for all processes of the run, unless its options say that it is alone.
"""

import os

from jax._src import distributed, xla_bridge
from jaxlib import xla_client


def _make():
    state = distributed.global_state
    options = {"num_nodes": state.num_processes} | xla_bridge._options_from_jax_configs("standin")
    alone = options["num_nodes"] == 1
    return xla_client.make_cpu_client(
        node_id=state.process_id,
        num_nodes=options["num_nodes"],
        distributed_client=None if alone else state.client,
        num_devices=int(os.environ.get("STANDIN_DEVICES", 1)),
    )


def initialize():
    # The lowest priority: available without JAX_PLATFORMS, but never the default backend.
    xla_bridge.register_backend_factory("standin", _make, priority=-2000)
