"""Evaluation: a metric function on every batch of some data, by all replicas of all processes."""

from __future__ import annotations

import collections
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxche.cadence import split_by_ratio
from jaxche.data import as_batch, as_stream, checked_length, is_stream, reading, sequence_of
from jaxche.distributed import Group
from jaxche.messages import type_of
from jaxche.replicas import LocalState, Placement, drop_replica_axis, numeric_settings
from jaxche.sharding import batch_size
from jaxche.stages import Direct, Partitioned
from jaxche.training._metrics import arguments_of, as_metric, outputs_of, total_of
from jaxche.training._rounds import Rounds
from jaxche.training._stages import StagedPlacement, with_replica_axis
from jaxche.training._state import TrainerState

# Batches in flight per replica: one runs while the host reads the next; more would make a slow replica end late.
_IN_FLIGHT = 2
# More batches than any data set has that ends: Grain's repeat() gives one the length of sys.maxsize.
MOST_BATCHES = 2**48
# Programs that a trainer keeps.
_PROGRAMS = 4


class Part(NamedTuple):
    """Successive batches for some ranks: those of one process, or one rank that several processes drive together."""

    processes: tuple[int, ...]
    ranks: tuple[int, ...]
    batches: range


class Result(NamedTuple):
    """The outputs of a batch, on the host."""

    index: int
    examples: int
    outputs: Any


def parts_of(processes_of_ranks: Sequence[tuple[int, ...]], speeds: Sequence[float], batches: int) -> list[Part]:
    """Deal out the batches by speed; the parts are in the order of the data, and of the processes that combine them."""
    groups: dict[Any, list[int]] = {}
    for rank, processes in enumerate(processes_of_ranks):
        groups.setdefault(processes if len(processes) == 1 else (*processes, rank), []).append(rank)
    ranks = sorted(groups.values(), key=lambda own: (processes_of_ranks[own[0]][0], own))
    sizes = split_by_ratio(batches, [sum(speeds[rank] for rank in own) for own in ranks])
    ends = np.cumsum([0, *sizes]).tolist()
    return [Part(processes_of_ranks[own[0]], tuple(own), range(ends[i], ends[i + 1])) for i, own in enumerate(ranks)]


class Source:
    """Batches with their numbers for the threads of some replicas; user code runs in one of them at a time."""

    def __init__(self, batches: Iterable[tuple[int, Any]], owned: bool = True):
        self._lock, self._stopped = threading.Lock(), False
        self.owned = owned  # whether this process combines the results
        batches = iter(batches)
        ahead = list(itertools.islice(batches, 1))
        self.first = ahead[0][1] if ahead else None
        self._batches = itertools.chain(ahead, batches)

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        while True:
            with self._lock:
                if self._stopped or (found := next(self._batches, None)) is None:
                    return
            yield found

    def stop(self) -> None:
        """End all threads after their batch, because one has failed."""
        self._stopped = True


class MetricProgram:
    """The metric function, compiled for each replica and each shape of a batch.

    ``updates`` is whether its results are the arguments of an update of metrics, ``scalars_only`` whether it is a loss
    that returns more than scalars.
    """

    def __init__(
        self,
        loss_fn: Any,
        metric_fn: Callable[..., Any] | None,
        seed: int,
        updates: bool,
        scalars_only: bool,
    ):
        self.metric_fn, self.updates = metric_fn, updates
        function: Any = metric_fn or loss_fn
        if hasattr(loss_fn, "in_eval_mode"):  # an NNXLoss
            function = loss_fn.in_eval_mode(metric_fn)
        elif metric_fn is not None and hasattr(metric_fn, "in_eval_mode"):
            function = metric_fn.in_eval_mode()
        elif isinstance(loss_fn, Partitioned):
            function = metric_fn or loss_fn.loss
        call = as_metric(function, "y, batch" if isinstance(loss_fn, Partitioned) else "params, batch")
        convert = arguments_of if updates else partial(outputs_of, scalars_only=scalars_only)
        self._seed, self._form = seed, None
        self._lock, self._compiled = threading.Lock(), {}

        def run(params: Any, model_state: Any, batch: Any, index: Any) -> Any:
            rng = jax.random.fold_in(jax.random.key(seed), index)
            return jax.tree.map(jnp.asarray, convert(call(params, model_state, batch, rng)))

        self._run = run

    def begin(self, form: Any) -> None:
        """Forget the programs for states of another form."""
        if form != self._form:
            self._form, self._compiled = form, {}

    def compiled(self, placement: Any, local: LocalState, batch: Any) -> Callable[[LocalState, Any, int], Any]:
        """``call(local, batch, index) -> outputs`` for batches of this shape."""
        leaves, treedef = jax.tree.flatten(batch)
        where = tuple(device.id for device in placement.devices.flat)
        shapes = ((np.shape(x), np.result_type(x) if np.isscalar(x) else x.dtype) for x in leaves)
        key = (where, treedef, *shapes, *numeric_settings())
        with self._lock:
            if key not in self._compiled:
                batch_size(batch)  # refuses ragged batches by name before XLA sees them
                make: Any = self._staged if isinstance(placement, StagedPlacement) else self._whole
                self._compiled[key] = make(placement, local, batch)
            return self._compiled[key]

    def check(self, placement: Any, local: LocalState, batch: Any, metrics: Any) -> None:
        """Trace the function on a batch, and update metrics with zeros of the shapes that it returns."""
        examples = batch_size(batch)
        placement.put(batch)  # refuses text and objects
        staged = isinstance(placement, StagedPlacement)
        forward: Any = self._forward(placement) if staged else None

        def run(params: Any, model_state: Any, batch: Any) -> Any:
            if staged:
                return self._run(forward.apply(params, batch), None, batch, 0)
            return self._run(drop_replica_axis(params), drop_replica_axis(model_state), batch, 0)

        shapes = jax.eval_shape(run, local.params, local.model_state, batch)
        outputs = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
        total_of(outputs, metrics).add(outputs, examples)

    def _whole(self, placement: Placement, local: LocalState, batch: Any) -> Callable[[LocalState, Any, int], Any]:
        def run(params: Any, model_state: Any, batch: Any, index: Any) -> Any:
            outputs = self._run(drop_replica_axis(params), drop_replica_axis(model_state), batch, index)
            # Whole on every device, so that each process of the replica can read them.
            return placement.constrain({"sums": outputs})["sums"]

        arguments = (local.params, local.model_state, placement.put(batch), np.uint32(0))
        program = jax.jit(run, compiler_options=placement.compiler_options).lower(*arguments).compile()

        def call(local: LocalState, batch: Any, index: int) -> Any:
            return program(local.params, local.model_state, placement.put(batch), np.uint32(index))

        return call

    def _staged(
        self, placement: StagedPlacement, local: LocalState, batch: Any
    ) -> Callable[[LocalState, Any, int], Any]:
        forward, device = self._forward(placement), placement.devices[0][-1]
        metric = jax.jit(self._run)

        def call(local: LocalState, batch: Any, index: int) -> Any:
            output = forward.apply(local.params, batch)
            return metric(*jax.device_put((output, None, batch), device), np.uint32(index))

        jax.block_until_ready(call(local, batch, 0))
        return call

    def _forward(self, placement: StagedPlacement) -> Partitioned:
        model = placement.model
        stages = [with_replica_axis(stage) for stage in model.stages]
        return Partitioned(stages, model.loss, Direct(), list(placement.devices[0]), seed=model.seed + self._seed)


def metric_program(trainer: Rounds, metric_fn: Callable[..., Any] | None, metrics: Any) -> MetricProgram:
    """The program of a metric function, reused from an earlier evaluation if there is one."""
    if isinstance(metrics, type):
        raise ValueError(
            f"metrics={metrics.__name__} is a class; write metrics={metrics.__name__}(), with its arguments, such as "
            "nnx.metrics.Average('loss') for the mean of the argument loss"
        )
    if metrics is not None and (metric_fn is None or not hasattr(metrics, "update") or not hasattr(metrics, "compute")):
        raise ValueError(
            f"metrics={type(metrics).__name__} needs update() and compute(), and a metric_fn that returns the "
            "arguments of the update, e.g. metrics=nnx.metrics.Accuracy(), metric_fn=lambda model, batch: {'logits': "
            "model(batch['x']), 'labels': batch['y']}"
        )
    programs, updates = trainer._metric_programs, metrics is not None
    for program in programs:
        if program.updates == updates and _is_same(program.metric_fn, metric_fn):
            return program
    scalars_only = metric_fn is None and trainer._settings.outputs is not None
    programs.append(MetricProgram(trainer._settings.loss_fn, metric_fn, trainer._settings.seed, updates, scalars_only))
    del programs[:-_PROGRAMS]
    return programs[-1]


def _is_same(function: Any, other: Any) -> bool:
    """Whether two functions are one, or equal for good, as their hash says: objects without one may change."""
    try:
        return function is other or (hash(function) == hash(other) and function == other)
    except TypeError:
        return False


def evaluate(
    trainer: Rounds, state: TrainerState, data: Any, program: MetricProgram, metrics: Any = None
) -> dict[str, float]:
    """The results of a metric function over ``data``, each batch taken once; all processes call it together."""
    engine, group, state = trainer._engine, trainer._group, state.merged()
    engine.lay_out(state.local_states)
    trainer._wait_for_reads()  # the data of the training may be evaluated
    leaves, tree = jax.tree.flatten((state.local_states[0].params, state.local_states[0].model_state))
    form = [tree, *((x.shape, str(x.dtype)) for x in leaves)]
    program.begin((group.quorum_id, form))
    errors: list[Exception] = []  # of batches that one of the processes of a replica could not read
    with group.errors_everywhere(engine.ranks[0], "the start of an evaluation"):
        size = number_of_batches(data, group)
        speeds = state.che.ms_per_batch if state.che else ()
        speeds = [1 / ms for ms in speeds] if speeds and all(speeds) else [1.0] * trainer.world_size
        if size is None:  # of a stream, which this process alone reads, for all its ranks
            parts = [Part((group.process_index,), tuple(range(trainer.world_size)), range(1))]
        else:
            parts = parts_of(engine.processes_of_present_ranks, speeds, size)
        sources = _sources(group, data, size, parts, errors)
        for rank, placement, local in engine.here(state.local_states):
            if rank in sources:
                program.compiled(placement, local, sources[rank].first)
    if len(set(sizes := group.all_gather(size))) > 1:
        raise ValueError(f"processes evaluate different numbers of batches ({sizes}); give the same data to all")
    found: dict[int, Result] = {}

    def run_one(rank: int, placement: Any, local: LocalState) -> list[Result]:
        return _run(program, group, sources[rank], placement, local) if rank in sources else []

    with group.errors_everywhere(engine.ranks[0], "an evaluation"):
        try:
            for rank, results in zip(engine.ranks, engine.map(run_one, state.local_states), strict=True):
                if rank in sources and sources[rank].owned:
                    found |= {result.index: result for result in results}
        except BaseException:  # of a keyboard interrupt, too
            for source in sources.values():
                source.stop()
            raise
        if errors:
            raise errors[0]
    return _combined(group, metrics, parts, [found[index] for index in sorted(found)])


def check_evaluation(trainer: Rounds, state: TrainerState, data: Any, program: MetricProgram, metrics: Any) -> None:
    """Refuse what an evaluation would refuse, as far as one batch and the shapes of its results show it."""
    engine = trainer._engine
    engine.lay_out(state.local_states)
    trainer._wait_for_reads()  # the data of the training may be evaluated
    batch = next(batches_of(data), None)
    if batch is None:
        raise ValueError("validation: the data set is empty; give at least one batch")
    _, placement, local = engine.here(state.local_states)[0]
    try:
        program.check(placement, local, batch, metrics)
    except Exception as error:
        error.add_note("raised by the first batch of validation data, before the first step")
        raise


def number_of_batches(data: Any, group: Group) -> int | None:
    """The number of batches; None for a stream."""
    if not is_stream(data):
        if (size := checked_length(data)) > MOST_BATCHES:
            raise ValueError(
                f"data has {size:,} batches, as a data set that repeats without end, and an evaluation reads each of "
                "them; leave out .repeat()"
            )
        return size
    if group.num_processes > 1:
        raise ValueError(
            f"data is {type_of(data)}, without len(data) and data[i]; several processes share the batches of "
            "an evaluation by their index: give e.g. list(data), jaxche.Batches(arrays, batch_size=32) or a "
            "grain.MapDataset"
        )
    return None


def batches_of(data: Any) -> Iterator[Any]:
    """The batches of a sequence or of a stream, in order."""
    if is_stream(data):
        return map(as_batch, as_stream(data).iterable(0))
    return map(reading(sequence_of(data, 0)), range(len(data)))


def _sources(
    group: Group, data: Any, size: int | None, parts: Sequence[Part], errors: list[Exception]
) -> dict[int, Source]:
    """The batches of each local rank that has any; ranks of one part share them."""
    if size is None:
        source = Source(enumerate(batches_of(data)))
        if source.first is None:
            raise ValueError("data has no batches; give at least one")
        return dict.fromkeys(parts[0].ranks, source)
    read, own, found = reading(sequence_of(data, 0)), group.process_index, {}
    for part in parts:
        if own in part.processes and part.batches:
            owned = own == part.processes[0]
            batches = ((index, read(index)) for index in part.batches)
            if len(part.processes) > 1:
                batches = _read_together(part.batches, read, errors)
            found |= dict.fromkeys(part.ranks, Source(batches, owned))
    return found


def _read_together(
    indices: Iterable[int], read: Callable[[int], Any], errors: list[Exception]
) -> Iterator[tuple[int, Any]]:
    """The batches of a replica whose processes take each of them together: where a read fails, the one before it."""
    batch = None
    for index in indices:
        try:
            batch = read(index)
        except Exception as error:
            if batch is None:
                raise
            errors.append(error)
        yield index, batch


def _run(program: MetricProgram, group: Group, source: Source, placement: Any, local: LocalState) -> list[Result]:
    """Take batches until there are no more."""
    in_flight: collections.deque[Result] = collections.deque()
    results = []
    try:
        for index, batch in source:
            try:
                call = program.compiled(placement, local, batch)
                in_flight.append(Result(index, batch_size(batch), call(local, batch, index)))
            except Exception as error:  # of a batch of another form, or under jax_debug_nans
                error.add_note(f"raised by batch {index} of the data of this evaluation")
                raise
            if len(in_flight) == _IN_FLIGHT:
                results.append(_on_host(in_flight.popleft()))
            group.watchdog.heartbeat_while_waiting()
        return [*results, *map(_on_host, in_flight)]
    except Exception:
        source.stop()
        raise


def _on_host(result: Result) -> Result:
    return result._replace(outputs=jax.device_get(result.outputs))


def _combined(group: Group, metrics: Any, parts: Sequence[Part], results: Sequence[Result]) -> dict[str, float]:
    """The results of all processes, combined in the order of the data."""
    owners = sorted({part.processes[0] for part in parts if part.batches})
    errors = []

    def add(saved: Any) -> Any:
        try:
            total = total_of(results[0].outputs, metrics)
            if saved is not None:
                total.load(saved, results[0].outputs)
            for result in results:
                total.add(result.outputs, result.examples)
            return total.result() if group.process_index == owners[-1] else total.save()
        except Exception as e:
            errors.append(e)
            return None

    found = group.relay(owners, add)
    group.raise_everywhere(errors[0] if errors else None, group.process_index, "an evaluation")
    return found
