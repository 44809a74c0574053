"""Fake devices, made once for all tests: they prove correctness, never speed."""

import collections
import contextlib
import gc
import inspect
import json
import os
import runpy
import socket
import struct
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax._src import compilation_cache

import jaxche
from jaxche.reports import RoundInfo

# Imports and collection make hundreds of thousands of objects that stay; see `pytest_collection_finish`.
gc.disable()
DEVICES = 8
# Of `jaxche launch`, Slurm, Open MPI, MPICH and Kubernetes.
LAUNCHERS = ("JAXCHE_", "SLURM_", "OMPI_", "PMI_", "PMIX_", "MPI_", "KUBERNETES_", "JOB_COMPLETION_INDEX")
# Of all processes that run tests side by side, and of those that they start.
_CACHE = Path(__file__).resolve().parent.parent / ".cache" / "jax" / "tests"

# Tests compile thousands of small programs and run each for microseconds: compiling them plainly is ten times faster.
# Not on a GPU, whose compiler reads the first of these flags too. Child processes inherit them.
PLAIN_CODE = (
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",
    # Later versions end the process at a flag that they no longer have.
    *(("--xla_cpu_use_fusion_emitters=false",) if jax.version.__version_info__ < (0, 11) else ()),
)


# Linux allows a process 65,530 memory maps, and a program takes about ten. Without any left XLA ends the process.
_MAPS, _MOST_MAPS = Path("/proc/self/maps"), 30_000
_PROGRAMS = {}
_FORKS = Path(__file__).with_name("multiprocess") / "forks.py"
_PARAMETERS = inspect.signature(subprocess.Popen._execute_child)


def share_programs():
    """One program serves all functions that compile to it, as long as this process lives.

    JAX's cache reads and links it again for each of them. Programs belong to a client and its devices.
    """
    read, write = compilation_cache.get_executable_and_time, compilation_cache.put_executable_and_time
    missed = threading.local()  # the devices for which this thread compiles, or None

    def get(key, options, backend, devices, callbacks=()):
        missed.devices = None
        if callbacks:  # which JAX from 0.12 on binds to the program
            return read(key, options, backend, devices, callbacks)
        place = backend, key, tuple(devices)
        if place not in _PROGRAMS:
            found = None, None
            with contextlib.suppress(Exception):  # half of a program, whose process was killed: it is written again
                found = read(key, options, backend, devices)
            if found[0] is None:
                missed.devices = tuple(devices)
                return found
            _PROGRAMS[place] = found
        return _PROGRAMS[place]

    def put(key, name, program, backend, seconds):
        if missed.devices is not None:
            _PROGRAMS[backend, key, missed.devices] = program, seconds
        write(key, name, program, backend, seconds)

    compilation_cache.get_executable_and_time, compilation_cache.put_executable_and_time = get, put


jax.config.update("jax_num_cpu_devices", DEVICES)
_PLATFORMS = os.environ.get("JAX_PLATFORMS", "cpu").split(",")
# An accelerator is named first: it computes what is on one device, and meshes are of fake devices all the same, because
# most tests need more devices than a machine has GPUs. tests/training/test_gpu.py asks for the GPUs themselves.
jax.config.update("jax_platforms", ",".join(sorted(_PLATFORMS, key="cpu".__ne__)))
if _PLATFORMS[0] != "cpu" and "cpu" in _PLATFORMS:
    jax.config.update("jax_default_device", jax.devices(_PLATFORMS[0])[0])
if jax.config.jax_platforms == "cpu":
    os.environ["XLA_FLAGS"] = " ".join([*PLAIN_CODE, os.environ.get("XLA_FLAGS", "")]).strip()
    share_programs()
    runpy.run_path(str(Path(__file__).with_name("compilation.py")))["share"]()
# The compiled programs of one test serve the next, also those that took no time: eager operations and small steps are
# compiled again and again, in every module and in every process a test starts. Child processes find the same cache.
jax.config.update("jax_compilation_cache_dir", str(_CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(_CACHE)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
# Programs without the lines that they were traced from are lowered, hashed and compiled faster.
jax.config.update("jax_traceback_in_locations_limit", 0)
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
# On a busy machine any example may take long.
hypothesis.settings.register_profile("without times", deadline=None)
hypothesis.settings.load_profile("without times")
# Tests send nothing to Weights & Biases.
os.environ |= {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}


def pytest_collection_modifyitems(items):
    """Files with many slow tests first: where a long one is left to the end, nothing runs beside it.

    Every third file is one of real processes, which wait as much as they compute: side by side they leave cores idle.
    """
    for item in items:
        if " at 0x" in item.nodeid:
            raise pytest.UsageError(f"{item.nodeid}: the address differs between processes that run tests; give ids=")
    slow = collections.Counter(item.path for item in items if item.get_closest_marker("slow"))
    files = sorted(dict.fromkeys(item.path for item in items), key=lambda path: slow[path], reverse=True)
    waiting = [path for path in files if path.parent.name == "multiprocess"]
    computing = [path for path in files if path not in waiting]
    place = {path: i for i, path in enumerate(computing)} | {path: 2 * i - 0.5 for i, path in enumerate(waiting)}
    items.sort(key=lambda item: place[item.path])


def pytest_collection_finish():
    """Modules and tests stay until the end, and jaxprs are many: the garbage collector visits neither all the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _no_launcher():
    """Whatever started the tests: they and the processes that they start are on their own."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(LAUNCHERS)]:
            patch.delenv(name)
        yield


@pytest.fixture(scope="module", autouse=True)
def _few_programs():
    """A process of many modules drops its programs before it has no memory maps left."""
    yield
    if _MAPS.exists() and len(_MAPS.read_bytes().splitlines()) > _MOST_MAPS:
        _PROGRAMS.clear()
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def devices():
    """The fake devices."""
    return jax.devices()


@pytest.fixture
def close():
    """Compare two trees, tightly unless told otherwise."""

    def check(a, b, rtol=1e-5, atol=1e-6):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b)

    return check


@pytest.fixture
def same():
    """Two trees are equal bit for bit."""

    def check(a, b):
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b))

    return check


@pytest.fixture
def interrupted(tmp_path):
    """The results of ``fit(checkpoints=, callbacks=)`` resumed after an error in a round, and without that error."""

    def run(fit, round):
        def fail(state, info):
            if info.round == round:
                raise RuntimeError("the machine stops")

        with pytest.raises(RuntimeError, match="stops"):
            fit(checkpoints=tmp_path / "a", callbacks=[fail])
        return fit(checkpoints=tmp_path / "a"), fit(checkpoints=tmp_path / "b")

    return run


@pytest.fixture(scope="session")
def round_info():
    """Makes the record of a round: of replicas that took 200 ms for so many steps, and merged in 10 ms."""

    def make(counts=(10, 4), **fields):
        values = {
            "round": 0,
            "epoch": 0,
            "cursor": 0,
            "counts": counts,
            "planned": counts,
            "weights": tuple(n / sum(counts) for n in counts),
            "wall_ms": (200.0,) * len(counts),
            "sync_ms": 10.0,
            "loss": 1.0,
            "metrics": {"accuracy": 0.5},
            "drift": 0.01,
            "drift_dir": 0.2,
            "losses": (1.0,) * len(counts),
            "examples": 32 * sum(counts),
            "anchor": min(counts),
            "verdict": "calm",
        }
        return RoundInfo(**values | fields)

    return make


def malformed(token, rng):
    """The first bytes of a connection without the token of the listener."""
    frame = struct.Struct(">I")
    values = ([1, 0], None, 3, {}, [[]], [None, None], "x", [3.5, "x"], ["x" * 32, 0], {"token": 1})
    text = json.dumps(values[rng.integers(len(values))]).encode()
    changed = token[:-1] + ("0" if token[-1] != "0" else "1")
    kinds = (
        lambda: rng.bytes(int(rng.integers(0, 200))),
        lambda: frame.pack(len(text)) + text,
        lambda: frame.pack(1 << int(rng.integers(8, 32))) + text,
        lambda: b"\xff" * int(rng.integers(1, 64)),
        lambda: token.encode()[: int(rng.integers(0, len(token)))],
        lambda: token.encode() + b"\xff" + b"1",
        lambda: changed.encode() + b"\x011",
        lambda: token.upper().encode() + b"!" + b"\x011",
        lambda: ("\u00e9" * 16).encode() + b"\x011",
        lambda: f"{changed} 1 1\n".encode(),
        lambda: b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(int(rng.integers(0, 70_000))),
    )
    return kinds[rng.integers(len(kinds))]()


@pytest.fixture(scope="session")
def strangers():
    """Sends greetings that are none to a listener, half of them through each of its doors, beside 500 silences.

    Gives the most threads, files and KiB of memory that the process of the listener then had above what it has before.
    """

    def besiege(address, pid=None, hellos=10_000, silences=500, seed=0):
        host, port, name, token = address
        doors = [(socket.AF_INET, (host, port))] + ([(socket.AF_UNIX, f"\0{name}")] if name else [])
        rng, silent, before = np.random.default_rng(seed), [], measured(pid)
        most = before
        with contextlib.ExitStack() as stack:
            for i in range(silences + hellos):
                family, where = doors[i % len(doors)]
                sock = socket.socket(family)
                if i < silences:
                    silent.append(stack.enter_context(sock))
                sock.connect(where)  # waits where the listener is slow
                sock.settimeout(20)
                if i >= silences:
                    with sock, contextlib.suppress(ConnectionError):  # closed after the first bytes
                        sock.sendall(malformed(token, rng))
                if i % 500 == 499:
                    most = np.maximum(most, measured(pid))
            own = 0 if pid else len(silent)
        return dict(zip(("threads", "files", "kib"), (most - before - [0, own, 0]).tolist(), strict=True))

    return besiege


def measured(pid=None):
    """Threads, open files and KiB of memory of a process; of this one unless told otherwise."""
    folder = Path(f"/proc/{pid or os.getpid()}")
    if not folder.exists():  # not on Linux: then this much is not tested
        return np.zeros(3, np.int64)
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    return np.array([int(status["Threads"]), len(os.listdir(folder / "fd")), int(status["VmRSS"].split()[0])])


class Store:
    """What the coordination service does for processes, in one."""

    def __init__(self):
        self._values, self._changed = {}, threading.Condition()
        self.reads = 0

    def key_value_set(self, key, value, allow_overwrite=False):
        with self._changed:
            if key in self._values and not allow_overwrite:
                raise jax.errors.JaxRuntimeError("ALREADY_EXISTS")
            self._values[key] = value
            self._changed.notify_all()

    def key_value_increment(self, key, by):
        with self._changed:
            self._values[key] = str(int(self._values.get(key, "0")) + by)
            return int(self._values[key])

    def key_value_delete(self, key):
        with self._changed:
            self._values.pop(key, None)

    def blocking_key_value_get(self, key, timeout_ms):
        with self._changed:
            self.reads += 1
            if not self._changed.wait_for(lambda: key in self._values, timeout_ms / 1e3):
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")
            return self._values[key]

    def key_value_dir_get(self, place):
        with self._changed:
            self.reads += 1
            return [(key, value) for key, value in self._values.items() if key.startswith(place)]

    key_value_set_bytes, key_value_dir_get_bytes = key_value_set, key_value_dir_get


@pytest.fixture
def store():
    """A store of a run."""
    return Store()


@pytest.fixture
def coordinator():
    """An address with a listening socket, as process 0 of a run has."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def until():
    """Waits for something to become true, and says whether it did."""

    def wait(true, within_s=20):
        deadline = time.monotonic() + within_s
        while not true() and time.monotonic() < deadline:
            time.sleep(0.02)
        return true()

    return wait


class Problem:
    """Least squares with a nonlinearity, so that local SGD and joined batches really differ."""

    def __init__(self, examples=96, batch_size=8):
        rng = np.random.default_rng(0)
        x = rng.normal(size=(examples, 5)).astype(np.float32)
        y = np.tanh(x @ rng.normal(size=(5, 2))).astype(np.float32)
        self.data = jaxche.Batches({"x": x, "y": y}, batch_size, seed=3)
        self.params = {
            "w": rng.normal(size=(5, 2)).astype(np.float32) * 0.3,
            "b": np.zeros(2, np.float32),
        }

    @staticmethod
    def loss(params, batch):
        error = jnp.tanh(batch["x"] @ params["w"] + params["b"]) - batch["y"]
        return jnp.mean(error**2), {"mae": jnp.mean(jnp.abs(error))}

    def joined(self, epoch, indices):
        """Several batches as one."""
        batches = [self.data.epoch(epoch)[i] for i in indices]
        return jax.tree.map(lambda *x: np.concatenate(x), *batches)


@pytest.fixture
def problem():
    return Problem()


@pytest.fixture(scope="session")
def make_problem():
    return Problem


@pytest.fixture
def told():
    """What rounds say, to be compared: a nan equals a nan."""

    def texts(history):
        return [str(asdict(info)) for info in history]

    return texts


@pytest.fixture(scope="session")
def train_rounds():
    """Trains rounds of the given counts: the trainer, the state after the last, and what was told of each."""

    def train(loss, params, data, replicas, rounds, tx=None, **knobs):
        trainer = jaxche.Trainer(loss, tx or optax.adam(0.05), replicas=replicas, **knobs)
        state, infos = trainer.init(params), []
        for counts in rounds:
            state, info = trainer.round(state, data, counts=counts)
            infos.append(info)
        return trainer, state, infos

    return train


@pytest.fixture
def trained_alike(close):
    """Two results of ``train_rounds`` are of the same training, on replicas of whatever kind."""

    def check(one, other):
        (a, after_a, infos_a), (b, after_b, infos_b) = one, other
        # Stages keep a list of trees where the whole model has what it was given.
        close(*(jax.tree.leaves(trainer.params(state)) for trainer, state in ((a, after_a), (b, after_b))), rtol=2e-5)
        for u, v in zip(infos_a, infos_b, strict=True):
            assert u.loss == pytest.approx(v.loss, rel=1e-5)
            assert u.losses == pytest.approx(v.losses, rel=1e-5, nan_ok=True)
            assert u.metrics == pytest.approx(v.metrics, rel=1e-5)
            assert u.drift == pytest.approx(v.drift, rel=1e-3, abs=1e-7)
            assert u.drift_dir == pytest.approx(v.drift_dir, rel=1e-3, abs=1e-6)
            assert (u.counts, u.examples, u.epoch, u.weights) == (v.counts, v.examples, v.epoch, v.weights)

    return check


@pytest.fixture
def patient(monkeypatch):
    """A stall of this machine cuts no round short."""
    monkeypatch.setattr("jaxche.training._plan._MIN_EXTRA_MS", 60_000.0)


@pytest.fixture
def lockstep(patient):
    """Makes the cadence of replicas that take two steps a round each: no timing decides."""

    def make(world=2):
        return jaxche.ElChe(world_size=world, anchor=2, max_anchor=2, max_batch_diff=0)

    return make


class Forked(subprocess.Popen):
    """A program in a fork of the process with all imports, which starts it and waits for it."""

    def __init__(self, ask, program, **options):
        self._ask = ask
        super().__init__([str(word) for word in program], **options)

    def _execute_child(self, args, *rest):
        given = _PARAMETERS.bind(self, args, *rest).arguments
        pipes = [given[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
        call = {"program": args, "environ": given["env"] or dict(os.environ), "folder": given["cwd"] or os.getcwd()}
        outputs = [number if file == -1 else file for number, file in ((1, pipes[3]), (2, pipes[5]))]
        self.pid = int(self._ask(call, outputs))
        self._child_created = True
        self._close_pipe_fds(*pipes)

    def _try_wait(self, flags):
        while (status := self._ask({"ended": self.pid})) == b"no" and not flags & os.WNOHANG:
            time.sleep(0.02)
        return (0, 0) if status == b"no" else (self.pid, int(status))

    def _internal_poll(self, _deadstate=None):
        if self.returncode is None:
            pid, status = self._try_wait(os.WNOHANG)
            if pid:
                self._handle_exitstatus(status)
        return self.returncode


@pytest.fixture(scope="session")
def _asked():
    """Sends a message to the process that has imported what others import, and returns the answer."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, str(_FORKS), str(theirs.fileno())]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(_FORKS.parents[2])}

    def ask(call, files=()):
        socket.send_fds(ours, [json.dumps(call, default=str).encode()], list(files))
        return ours.recv(16)

    with ours, subprocess.Popen(command, env=env, pass_fds=[theirs.fileno()]) as process:
        theirs.close()
        yield ask
        ours.close()
        process.wait()


@pytest.fixture(scope="session")
def fork(_asked):
    """Starts a program beside the test: a file, ``-m jaxche`` or ``-c``, with its arguments."""
    return lambda *program, **options: Forked(_asked, program, **options)


@pytest.fixture(scope="session")
def run_forked(fork):
    """Runs a program in a fork to its end, and its ranks in forks of that."""

    def run(*program, timeout=150, **options):
        with fork(*program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options) as run:
            try:
                out, err = run.communicate(timeout=timeout)
            finally:
                run.kill()
        return subprocess.CompletedProcess(program, run.returncode, out, err)

    return run
