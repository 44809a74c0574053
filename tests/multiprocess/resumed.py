"""A run that is saved, and what befalls it; run by ``jaxche launch``. Each process writes what it ended with."""

import contextlib
import errno
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxche
from jaxche.checkpoints import _writer
from jaxche.distributed import _elastic_group, process_group
from jaxche.replicas import ReplicaMesh, _merge
from jaxche.training import _checkpoints, _membership, _plan
from jaxche.training._preparation import PreparedEngine

EPOCHS = 3
# Of a run long enough for a replacement to come.
MANY_EPOCHS = 12
UNSAVED = ("JOIN", "AGAIN", "JOIN zero", "AGAIN zero")
RULES = {
    "plain": {},
    "scaled": {"scaling": jaxche.AdamScale(), "base_batch_size": 4},
    "overlapped": {"overlap": 0.5, "ema": 0.2},
    "scaled gradients": {"scaling": jaxche.AdaScale(), "base_batch_size": 4, "average": "gradients"},
    "codes": {"wire": "int4", "ema": 0.2},
    "gradients": {"average": "gradients"},
    "groups": {"groups": "process", "group_merges": 2},
}
# Of the second process, one after another, and a run long enough for them.
DEATHS, MORE_EPOCHS = 4, 12


class Problem:
    """The same in every process, and in the test."""

    def __init__(self, examples=96):
        rng = np.random.default_rng(0)
        x = rng.normal(size=(examples, 5)).astype(np.float32)
        y = np.tanh(x @ rng.normal(size=(5, 2))).astype(np.float32)
        self.data = jaxche.Batches({"x": x, "y": y}, batch_size=8, seed=3)
        self.params = {"w": rng.normal(size=(5, 2)).astype(np.float32) * 0.3, "b": np.zeros(2, np.float32)}

    @staticmethod
    def loss(params, batch, rng):
        out = batch["x"] @ params["w"] + params["b"]
        return jnp.mean((jnp.tanh(out * jax.random.bernoulli(rng, 0.8, out.shape)) - batch["y"]) ** 2)

    def trainer(self, world, **arguments):
        che = jaxche.ElChe(world_size=world, anchor=2, max_anchor=2, max_batch_diff=0) if world > 1 else None
        return jaxche.Trainer(self.loss, optax.adam(0.05), che=che, **arguments)


class Broken:
    """Data that rank 1 cannot read from some round on: rounds are of 4 batches, the last two its own."""

    def __init__(self, data, round, epoch=0):
        self._data, self._round, self._epoch = data, round, epoch

    def __len__(self):
        return len(self._data)

    def __getitem__(self, i):
        if jax.process_index() == 1 and self._epoch * len(self) + i >= 4 * self._round:
            raise OSError("disk on fire")
        return self._data[i]

    def epoch(self, number):
        return Broken(self._data.epoch(number), self._round, number)


class Deadly:
    """Data in whose second evaluation, that of round 3, rank 1 dies: also if it is too slow to get a batch of it."""

    def __init__(self, data, rounds):
        self._data, self._rounds = data, rounds

    def __len__(self):
        if jax.process_index() == 1 and 2 in self._rounds:
            signal.raise_signal(signal.SIGKILL)
        return len(self._data)

    def __getitem__(self, i):
        return self._data[i]


class Restorable:
    """An iterator over batches with a state, as those of Grain have."""

    def __init__(self, batches):
        self._batches, self._at = batches, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self._at == len(self._batches):
            raise StopIteration
        self._at += 1
        return self._batches[self._at - 1]

    def get_state(self):
        return {"at": self._at}

    def set_state(self, state):
        self._at = state["at"]


def stream(data, has_state):
    """The same batches as a stream, each epoch with a state or only to read from its start."""

    def batches(epoch):
        of_epoch = data.epoch(epoch)
        return Restorable(of_epoch) if has_state else map(of_epoch.__getitem__, range(len(of_epoch)))

    return jaxche.Stream(batches, shards=False)


def admit_amid_epochs(cursors):
    """Admit a replacement only at the end of a round of two that does not end its epoch."""
    _elastic_group.ElasticGroup.candidates = lambda self: candidates(self) if cursors[-1] < 8 else {}


def callback(what, round, world, merged):
    """What happens in the callback after a round, on one rank, unless the run was started again.

    In the folder ``merged`` each process leaves a file after that round.
    """
    rounds_here, victim = [], victim_of(what)

    def call(state, info):
        if what.startswith(("JOIN", "AGAIN", "PAUSE8")) and len(info.counts) < world:
            wait_for_replacement("twice" in what)
        if what.startswith("SLOW"):
            time.sleep(0.5)
        restart = int(os.environ.get("JAXCHE_RESTART", 0))
        if what.startswith("AGAIN") and jax.process_index() == victim and restart < DEATHS and len(rounds_here) == 2:
            signal.raise_signal(signal.SIGKILL)
        rounds_here.append(info.round)
        if what.startswith("FULL") and info.round == round + 2 and "last" not in what:
            empty_disk()
        if info.round != round or restart:
            return False
        merged.mkdir(exist_ok=True)
        (merged / str(jax.process_index())).touch()
        if jax.process_index() != victim:
            return False
        name = what.split()[0].replace("LOST", "KILL").replace("JOIN", "KILL").replace("END", "KILL")
        if name == "MERGE":
            die_in_merge()
        if name in ("KILL", "TERM", "STOP"):
            wait_for_others(merged)
            signal.raise_signal(getattr(signal, f"SIG{name}"))
        elif name == "FULL":
            fill_disk("folders" in what)
        elif name == "CUT" and rounds_here.count(round) == 1:  # a round that failed is repeated
            cut_connections()
        elif name.startswith("PAUSE"):
            pause_in_merge(name.removeprefix("PAUSE"))
        return what == "stop"

    return call


def wait_for_others(merged):
    """Until all processes have ended the round: else its merge may lose what the dying one still sends, and fail."""
    end = time.monotonic() + 60
    while len(os.listdir(merged)) < jax.process_count():
        if time.monotonic() > end:
            raise TimeoutError(f"only {sorted(os.listdir(merged))} have ended the round")
        time.sleep(0.01)


def wait_for_replacement(is_of_another_fit):
    """The run is not to end before another process has started."""
    if is_of_another_fit:  # which is no candidate
        time.sleep(0.7)
        return
    end = time.monotonic() + 60
    while not candidates(process_group()) and time.monotonic() < end:
        time.sleep(0.02)


def victim_of(what):
    """The rank that dies or stops: 1, or 0."""
    return 0 if "zero" in what.split() else 1


def fill_disk(for_folders):
    """From now on this process can make no file larger, or no folder of a checkpoint."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    if for_folders:
        os.mkdir = no_folder


def empty_disk():
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    os.mkdir = mkdir


mkdir = os.mkdir
candidates = _elastic_group.ElasticGroup.candidates


def no_folder(path, *args, **kwargs):
    if "orbax-checkpoint-tmp" in str(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    mkdir(path, *args, **kwargs)


def cut_connections():
    """End all connections of this process but those with the store, as something in the network may."""
    store = int(os.environ["JAXCHE_COORDINATOR"].rpartition(":")[2])
    for name in os.listdir("/proc/self/fd"):
        try:
            connection = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue  # no socket
        with connection, contextlib.suppress(OSError):
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getpeername()[1] != store:
                connection.shutdown(socket.SHUT_RDWR)


def pause_in_merge(seconds):
    """Stop this process at the next merge, where the others wait in the same collective; continue it after a while."""
    arguments = _merge.Merge.arguments

    def stop(self, *args):
        _merge.Merge.arguments = arguments
        subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
        signal.raise_signal(signal.SIGSTOP)
        return arguments(self, *args)

    _merge.Merge.arguments = stop


def die_in_merge():
    """Die at the next merge, where the others wait in the same collective."""

    def die(self, *args):
        signal.raise_signal(signal.SIGKILL)

    _merge.Merge.arguments = die


def die_before_connecting():
    """Die where the others connect for their first merge, and wait for the address of this process."""

    compile_everywhere = ReplicaMesh.compile_everywhere

    def compile_and_die(self, *args):
        compile_everywhere(self, *args)
        signal.raise_signal(signal.SIGKILL)

    ReplicaMesh.compile_everywhere = compile_and_die


def print_errors():
    """Print the errors of collectives from which this process recovers."""
    recover = _membership.Membership.recover

    def printing(self, run, error):
        print(error, file=sys.stderr)
        recover(self, run, error)

    _membership.Membership.recover = printing


def die_in_admission(moment):
    """Process 0 dies while it sends its state, a replacement while it receives one, or process 2 right after that.

    Or process 2 while it begins to save with the other survivors of a death.
    """
    restart = int(os.environ.get("JAXCHE_RESTART", 0))

    def die(*args, **options):
        signal.raise_signal(signal.SIGKILL)

    if moment == "sender" and jax.process_index() == 0 and not restart:
        _elastic_group.send_state = die
    if moment == "candidate" and jax.process_index() == 1 and restart == 1:
        _elastic_group.receive_bytes = die
    if moment == "member" and jax.process_index() == 2 and not restart:
        arrange = PreparedEngine.arrange

        def arrange_or_die(self, order, local_states):
            if len(order) > self.world_size:
                die()
            arrange(self, order, local_states)

        PreparedEngine.arrange = arrange_or_die
    if moment == "reopening" and jax.process_index() == 2 and not restart:
        reopen = _writer.CheckpointWriter.reopen

        def reopen_and_die(self, shrunk):
            import orbax.checkpoint as ocp

            ocp.CheckpointManager.__init__ = die
            reopen(self, shrunk)

        _writer.CheckpointWriter.reopen = reopen_and_die


def read_state_late(folder):
    """A replacement reads its state once the others have taken the local steps of their next round."""
    stepped = Path(folder) / "stepped"
    poll, receive = _membership.Membership.poll, _elastic_group.receive_bytes

    def after_steps(self):
        if self.newcomers:
            stepped.touch()
        poll(self)

    def receive_late(*args):
        end = time.monotonic() + 60
        while not stepped.exists():
            assert time.monotonic() < end, "the others wait for a process that joins"
            time.sleep(0.05)
        return receive(*args)

    if int(os.environ["JAXCHE_RESTART"]):
        _elastic_group.receive_bytes = receive_late
    else:
        _membership.Membership.poll = after_steps


def fail_to_read(step):
    """This process cannot read the parameters of a checkpoint, as when its machine has lost the file server."""
    import orbax.checkpoint as ocp  # takes as long to import as everything else here: only where it is used

    restore = ocp.CheckpointManager.restore

    def fail(self, number, args):
        if number == step and "params" in args:
            raise OSError("stale file handle")
        return restore(self, number, args=args)

    ocp.CheckpointManager.restore = fail


def main(what, round, folder, rules="plain"):
    # A stall of this machine cuts no round short: runs are compared bit for bit.
    _plan._MIN_EXTRA_MS = 60_000.0
    # The disk stays full, however long the last save is tried.
    _checkpoints._PAUSES_S = tuple(pause_s / 10 for pause_s in _checkpoints._PAUSES_S)
    if rules in ("overlapped", "groups"):  # one to train on, one to merge on; or two to train on
        jax.config.update("jax_num_cpu_devices", 2)
    jaxche.initialize(timeout_s=60)
    if what.startswith("UNREADABLE") and jax.process_index() == 1:
        fail_to_read(int(what.split()[1]))
    if "dies-" in what:
        die_in_admission(what.partition("dies-")[2])
    if "late" in what.split():
        read_state_late(folder)
    print_errors()
    if what.startswith("FIRST") and jax.process_index() == victim_of(what):
        die_before_connecting()
    replicas = jaxche.devices()[:: 2 if rules == "overlapped" else 1]
    problem, world = Problem(), len(replicas)
    trainer = problem.trainer(world, replicas=replicas, **RULES[rules])
    epochs = {"JOIN": MANY_EPOCHS, "PAUSE8": MANY_EPOCHS, "AGAIN": MORE_EPOCHS}.get(what.split()[0], EPOCHS)
    if "twice" in what:
        trainer.fit(trainer.init(problem.params), problem.data, progress=False)
        epochs //= 2
    rounds, cursors, data = [], [0], problem.data
    checkpoints = Path(folder) / "checkpoints"
    if what.split()[0] == "LOST" or what in UNSAVED or "unsaved" in what:
        checkpoints = None
    elif "saved" in what.split():  # also after the round of the death, and not after each of a long run
        checkpoints = jaxche.Checkpoints(checkpoints, every=int(round) + 1)
    if what.startswith("error"):
        data = Broken(data, int(round))
    elif "stream" in what:
        data = stream(data, "restored" in what)
        admit_amid_epochs(cursors)

    def note(state, info):
        rounds.append(info.round)
        cursors.append(state.cursor)

    state, history = trainer.fit(
        trainer.init(problem.params),
        data,
        epochs,
        callbacks=[note, callback(what, int(round), world, Path(f"{folder}-merged"))],
        progress=False,
        checkpoints=checkpoints,
        validation=Deadly(problem.data, rounds) if "evaluates" in what else None,
        donate="donated" in what,
    )
    result = {
        "params": jax.tree.map(np.ndarray.tolist, jax.device_get(trainer.params(state))),
        "averages": [x.tolist() for x in jax.tree.leaves(jax.device_get(state.merged().local_states[0].ema))],
        "rounds": [[info.round, info.epoch, info.cursor, info.counts, info.loss] for info in history],
        "validation": [[info.steps_done, info.validation] for info in history if info.validation],
    }
    (Path(folder) / f"{jax.process_index()}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
