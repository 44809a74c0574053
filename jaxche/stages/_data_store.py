"""Stages that share nothing but a folder or a bucket."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxche.sharding import Device
from jaxche.stages._checks import check_micro_batching
from jaxche.stages._names import PLAN
from jaxche.stages._opening import open_objects
from jaxche.stages._store_run import StoreRun
from jaxche.stages._store_wire import StoreWire

_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class DataStore:
    """Activations and gradients go through shared storage: a folder, or a bucket of an object store.

    The processes that hold the stages share nothing else: each runs the same script with ``local_stages=[i]``. Every
    object is written once and whole, checked when it is read, and deleted by its reader once the reader's own state
    after that step is saved; so a process that dies at any moment can be started again with the same command, goes
    on at the step it was at, and the run ends with the parameters it would have ended with. Until any stage has saved a
    state, it needs the others to be running for that.

    Args:
      url: a folder (``"/shared/run"``, ``"file:///shared/run"``), a bucket (``"s3://bucket/path"``,
        ``"gs://bucket/path"``), or ``"memory://name"`` for stages of one process.
      micro_batch_size: examples in a micro-batch; None for the whole batch at once.
      schedule: order of a stage's forward and backward passes, ``"1f1b"`` or ``"gpipe"``.
      run: name of the run, under which its objects lie. A run of the same name is gone on with, where it saved states.
        What one that saved none left behind is never read: each start of all processes makes an identity that all
        objects are named by, and a process that is started again takes over that of those that run.
      timeout_s: seconds a stage waits for an object, or for the processes of the other stages, before it gives up.
      save_every: steps from one saved state to the next; what was received since the last one stays in the store.
      options: what obstore takes for the URL beside the environment, such as ``endpoint``, ``access_key_id``,
        ``secret_access_key``, ``region`` or ``client_options``; ``client_options={"timeout": "5m"}`` lets one
        transfer take more than 30 s. Not shown in the representation.

    Raises:
      ValueError: an argument is not as described.

    Example:
      >>> store = DataStore("/shared/run", micro_batch_size=8)
      >>> store.schedule, store.run
      ('1f1b', 'run')
    """

    url: str
    micro_batch_size: int | None = None
    schedule: str = "1f1b"
    run: str = "run"
    timeout_s: float = 600.0
    save_every: int = 1
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self):
        url = self.url
        if not isinstance(url, str | os.PathLike) or not os.fspath(url):
            raise ValueError(f'url={url!r} must be a folder or a bucket; write e.g. DataStore("/shared/run")')
        object.__setattr__(self, "url", os.fspath(url))
        check_micro_batching(self.micro_batch_size, self.schedule)
        if not isinstance(self.run, str) or not _RUN.fullmatch(self.run):
            raise ValueError(f"run={self.run!r} must be letters, digits, '.', '_' and '-'; write e.g. run='run-2'")
        if not isinstance(self.timeout_s, int | float) or not 0 < self.timeout_s < math.inf:
            raise ValueError(f"timeout_s={self.timeout_s!r} must be a positive number of seconds; write timeout_s=600")
        if not isinstance(self.save_every, int) or isinstance(self.save_every, bool) or self.save_every < 1:
            raise ValueError(
                f"save_every={self.save_every!r} must be a number of steps, at least 1; write save_every=1"
            )
        if not isinstance(self.options, Mapping):
            raise ValueError(
                f"options is a {type(self.options).__name__}; write e.g. options={{'region': 'us-east-1'}}"
            )

    def wire(self, stages: Sequence[int], n_stages: int, devices: Sequence[Device | None]) -> StoreWire:
        """Open the wire of one process, after a trial that the store can be used.

        Args:
          stages: the stages this process holds, ascending.
          n_stages: how many there are in all processes together.
          devices: unused: where arrays are wanted is said when they are received.

        Raises:
          ImportError: obstore is not installed.
          ConnectionError: the store cannot be used; says what was tried.
          ValueError: the run was begun with other stages or micro-batches.
        """
        del devices
        objects = open_objects(self.url, self.run, self.options)
        plan = {"stages": n_stages, "micro_batch_size": self.micro_batch_size, "schedule": self.schedule}
        objects.agree(PLAN, json.dumps(plan))
        run = StoreRun(objects, stages, n_stages, self.timeout_s)
        return StoreWire(run, stages, n_stages, self.timeout_s, self.save_every)
