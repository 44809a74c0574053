"""A model cut into stages, each with its parameters and its optimizer state on its own device."""

from __future__ import annotations

import contextlib
import numbers
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from jaxche.messages import brief, short_traceback, whole_number
from jaxche.scaling import with_extra_args
from jaxche.sharding import (
    Device,
    check_numbers,
    check_range,
    check_transform,
    check_update,
    context_mesh,
    local_devices,
)
from jaxche.stages._program import MicroBatches, Pace, PacedProgram, StageProgram, StageSpec
from jaxche.stages._runner import Plan, StageResult, run_stages
from jaxche.stages._schedule import SCHEDULES
from jaxche.stages._stage import (
    Stage,
    check_arrays,
    check_stage_params,
    evaluate_stage,
    spec,
    stage_key,
    trace_stages,
)
from jaxche.stages._wire import StageProtocol, Wire


class PartitionedState(NamedTuple):
    """Training state of a :class:`Partitioned` model: one entry a stage, each on its stage's device.

    Attributes:
      step: steps taken.
      params: parameters of each stage; None for a stage of another process.
      opt_state: optax state of each stage, likewise.

    Example:
      >>> import jax, jax.numpy as jnp, jaxche, optax
      >>> model = jaxche.Partitioned([lambda p, x: x * p], lambda y, x: jnp.mean(y**2), jaxche.Direct())
      >>> state = model.init([jnp.ones(1)], optax.sgd(0.1))
      >>> state.step, state.params[0].tolist()
      (0, [1.0])
    """

    step: int
    params: tuple[Any, ...]
    opt_state: tuple[Any, ...]


class Partitioned:
    r"""A model cut into stages on different devices, or in different processes.

    .. math:: x_1 = f_0(\theta_0, \mathrm{batch}), \quad x_{i+1} = f_i(\theta_i, x_i), \quad
              L = \mathrm{loss}(x_S, \mathrm{batch})

    Loss and gradients equal those of the whole model under every protocol. With micro-batches the loss is the mean of
    their losses. This equals the loss of the batch if ``loss`` is a plain mean over examples, and not, for example, a
    mean over unmasked tokens whose number differs between micro-batches.

    A stage is any function of a pytree of parameters and a pytree of arrays: ``module.apply`` of a linen module, or a
    closure over the graph of an nnx model, see the examples. A stage with an argument ``rng`` or ``key`` gets a
    different key for every step, stage and micro-batch. The keys are the same under all protocols with the same
    micro-batches.

    Args:
      stages: the functions ``f_0(params[0], batch)`` and ``f_i(params[i], x)``, each returning a pytree of arrays.
        Integer and boolean arrays, such as masks, are sent too; gradients flow through the float arrays.
      loss: ``loss(y, batch)``, a scalar, the mean over the batch.
      protocol: how stages communicate: ``jaxche.Direct()``, ``jaxche.Pipeline(micro_batch_size=8)`` or
        ``jaxche.DataStore(url)``.
      devices: one a stage; default: the first devices of :func:`jaxche.devices` in this process. A device may appear
        several times.
      local_stages: the stages of this process, e.g. ``[jax.process_index()]``, if they are spread over processes. All
        processes then call the same methods in the same order with the same batch. Default: all stages.
      remat: whether a stage saves only its input for the backward and recomputes the rest; one value, or one a stage.
      seed: seed of the keys of stages with an argument ``rng`` or ``key``.
      paces: for experiments on equal devices, a :class:`~jaxche.stages.Pace` a stage to which its tasks are padded.

    Attributes:
      stages: the functions.
      loss: the loss.
      protocol: how stages communicate.
      devices: the device of each stage; None for a stage of another process.
      peak_activations: for each stage, the most micro-batches whose activations it kept at once in the last step; None
        for a stage of another process.
      remat: one bool a stage.
      seed: as given.

    Raises:
      ValueError: an invalid argument, or fewer devices than stages. Methods raise it for parameters or batches that
        do not fit a stage, with the name of the stage.

    Example:
      >>> import jax, jax.numpy as jnp, jaxche, optax
      >>> def hidden(params, batch):
      ...     return jnp.tanh(batch["x"] @ params["w"])
      >>> def output(params, x):
      ...     return x @ params["w"]
      >>> def loss(y, batch):
      ...     return jnp.mean((y - batch["y"]) ** 2)
      >>> model = jaxche.Partitioned([hidden, output], loss, jaxche.Pipeline(micro_batch_size=2))
      >>> params = [{"w": jnp.ones((3, 4))}, {"w": jnp.ones((4, 1))}]
      >>> batch = {"x": jnp.ones((8, 3)), "y": jnp.zeros((8, 1))}
      >>> value, grads = model.value_and_grad(params, batch)
      >>> round(float(value), 2), grads[0]["w"].shape, len(grads[1]["w"].devices())
      (15.84, (3, 4), 1)
      >>> state = model.init(params, optax.sgd(0.1))
      >>> state, value = model.step(state, batch)
      >>> state.step
      1

      Flax modules as stages, linen and nnx:

      >>> from flax import linen, nnx
      >>> dense = linen.Dense(4)
      >>> graph, start = nnx.split(nnx.Linear(4, 1, rngs=nnx.Rngs(0)))
      >>> stages = [
      ...     lambda params, batch: linen.relu(dense.apply({"params": params}, batch["x"])),
      ...     lambda params, x: nnx.merge(graph, params)(x),
      ... ]
      >>> params = [dense.init(jax.random.key(0), batch["x"])["params"], start]
      >>> loss, grads = jaxche.Partitioned(stages, loss, jaxche.Direct()).value_and_grad(params, batch)
      >>> grads[1]["kernel"].shape
      (4, 1)
    """

    @short_traceback
    def __init__(
        self,
        stages: Sequence[Callable[..., Any]],
        loss: Callable[[Any, Any], Any],
        protocol: StageProtocol,
        devices: Sequence[Device] | None = None,
        *,
        local_stages: Sequence[int] | None = None,
        remat: bool | Sequence[bool] = False,
        seed: int = 0,
        paces: Sequence[Pace] | None = None,
    ):
        if not isinstance(stages, Collection) or not stages:
            raise ValueError(
                f"stages={brief(stages)} is no list of functions; write e.g. stages=[f0, f1] with f(params, x)"
            )
        if not callable(loss):
            raise ValueError(f"loss={loss!r} is not a function; write def loss(y, batch): ... return the mean")
        seed = whole_number("seed", seed, -(2**63), "seed=0", 2**63 - 1)
        _check_protocol(protocol)
        if paces is not None and not (
            isinstance(paces, Sequence)
            and len(paces) == len(stages)
            and all(pace is None or isinstance(pace, Pace) for pace in paces)
        ):
            raise ValueError(f"paces={paces!r} for {len(stages)} stages; write paces=[Pace(2.0, 4.0)] * {len(stages)}")
        remats = tuple(remat) if isinstance(remat, Sequence) else (remat,) * len(stages)
        if len(remats) != len(stages) or any(not isinstance(r, bool) for r in remats):
            raise ValueError(f"remat={remat!r} must be one bool, or {len(stages)}, one a stage; write remat=True")
        self._stages = [Stage(i, call, own) for i, (call, own) in enumerate(zip(stages, remats, strict=True))]
        self.stages, self.loss, self.protocol, self.remat, self.seed = tuple(stages), loss, protocol, remats, seed
        self._local = _check_local_stages(local_stages, len(stages))
        self.devices = _check_devices(devices, self._local, len(stages))
        self.peak_activations: tuple[int | None, ...] = (None,) * len(stages)
        self._paces = paces or [None] * len(stages)
        self._specs: list[Any] = [None] * len(stages)  # of the parameters
        self._plans: dict[Any, Plan] = {}
        self._next_step = 0
        # Two calls at once could give their activations the same names.
        self._one_at_a_time = threading.Lock()
        self._update: Any = None
        self._opt_structures: dict[int, Any] = {}  # of the optimizer's states, by stage
        self._outputs = [jax.jit(partial(_output, stage, seed)) for stage in self._stages]
        self._wire: Wire | None = None
        self._open_wire()  # fail now if the other processes or the store cannot be reached

    @short_traceback
    def value_and_grad(self, params: Sequence[Any], batch: Any, *, step: int | None = None) -> tuple[Any, tuple]:
        """The loss and the gradients of every stage.

        Args:
          params: one entry a stage. For stages of other processes only the shapes are read: these entries may be
            ``jax.ShapeDtypeStruct``, or None once the shapes are known from :meth:`init`.
          batch: pytree of arrays with a leading batch axis, the same in every process.
          step: number of the step, for keys and tags; default: one more than in the previous call.

        Returns:
          The scalar loss, and a tuple with the gradients of each stage on its device; None for a stage of another
          process.

        Raises:
          ValueError: parameters or a batch that do not fit the stages.
        """
        with self._one_at_a_time:
            step = self._next_step if step is None else int(step)
            _, results, loss = self._run(step, params, batch)
            self._open_wire().finish(step)
        return loss, self._by_stage({stage: result.grads for stage, result in results.items()})

    @short_traceback
    def init(self, params: Sequence[Any], tx: optax.GradientTransformation) -> PartitionedState:
        """Put the parameters of each stage on its device, and initialize its optimizer state.

        Args:
          params: one entry a stage, as for :meth:`value_and_grad`.
          tx: an optax transformation of gradients and parameters. It is applied to each stage separately, so
            ``optax.clip_by_global_norm``, for example, sees the norm of one stage. It gets the loss of the batch as
            ``value=``.

        Returns:
          The state for :meth:`step`. After a restart of this process under a protocol that saves states, the state
          after the last finished step.

        Raises:
          ValueError: ``tx`` is not an optax transformation, or its update needs further arguments, such as
            ``value_fn=``; or the parameters do not fit the stages.
        """
        check_transform("tx", tx)
        self._record_specs(params)
        placed = self._place(params)
        check_update(tx, *placed.values())
        wide = with_extra_args(tx)

        def update(grads: Any, params: Any, opt_state: Any, loss: Any) -> tuple[Any, Any]:
            updates, opt_state = wide.update(grads, opt_state, params, value=loss)
            return optax.apply_updates(params, updates), opt_state

        self._update, init = jax.jit(update), jax.jit(tx.init)
        states = tuple((tree, init(tree)) for tree in placed.values())
        self._opt_structures = {s: jax.tree.structure(own) for s, (_, own) in zip(self._local, states, strict=True)}
        found = self._open_wire().rejoin(spec(states))
        self._next_step, states = found if found is not None else (0, states)
        pairs = zip(self._local, states, strict=True)
        return self._state(self._next_step, {stage: jax.device_put(s, self.devices[stage]) for stage, s in pairs})

    @short_traceback
    def step(self, state: PartitionedState, batch: Any) -> tuple[PartitionedState, Any]:
        """Take one optimizer step on one batch. The given state is not modified.

        Args:
          state: from :meth:`init` or the previous step.
          batch: pytree of arrays with a leading batch axis, the same in every process.

        Returns:
          The next state and the loss of the batch.

        Raises:
          ValueError: no :meth:`init` before, or a batch that does not fit the stages.
        """
        if self._update is None:
            raise ValueError("step before init; write state = model.init(params, tx) first")
        if not isinstance(state, PartitionedState):
            raise ValueError(
                f"state is {brief(state)}, not the state of a partitioned model; write state = model.init(params, tx), "
                "then state, loss = model.step(state, batch)"
            )
        for stage, want in self._opt_structures.items():
            if (have := jax.tree.structure(state.opt_state[stage])) != want:
                raise ValueError(
                    f"state.opt_state[{stage}] is {brief(have, 200)}, but the tx given to init last has "
                    f"{brief(want, 200)}; write state = model.init(params, tx) with the tx of the state"
                )
        # A checkpoint or a tree.map may have made an array of the step, and put all stages on one device.
        step = int(state.step)
        opt_states = {s: jax.device_put(state.opt_state[s], self.devices[s]) for s in self._local}
        with self._one_at_a_time:
            placed, results, loss = self._run(step, state.params, batch)
            states = {
                s: self._update(results[s].grads, placed[s], opt_states[s], jax.device_put(loss, self.devices[s]))
                for s in self._local
            }
            self._open_wire().finish(step, tuple(states.values()))
        return self._state(step + 1, states), loss

    @short_traceback
    def compile(self, params: Sequence[Any], batch: Any) -> None:
        """Compile the programs for batches of these shapes, if they are not compiled yet.

        Args:
          params: one entry a stage: arrays, or their shapes and dtypes.
          batch: pytree of arrays with a leading batch axis, or their shapes and dtypes.

        Raises:
          ValueError: parameters or a batch that do not fit the stages.
        """
        self._plan_for(params, batch)

    @short_traceback
    def explain(self, params: Sequence[Any], batch: Any) -> str:
        """Describe the micro-batches of batches of these shapes; compiles their programs as :meth:`compile` does.

        Args:
          params: one entry a stage: arrays, or their shapes and dtypes.
          batch: pytree of arrays with a leading batch axis, or their shapes and dtypes.

        Returns:
          One line: the number of stages and micro-batches, and the schedule.

        Raises:
          ValueError: parameters or a batch that do not fit the stages.
        """
        size, count = self._plan_for(params, batch).micro
        cut = "1 micro-batch" if size is None else f"{count} micro-batches of {size}, {self.protocol.schedule}"
        return f"{len(self._stages)} stages, {cut}"

    @short_traceback
    def trace(self, params: Sequence[Any], batch: Any) -> Any:
        """The jaxpr of all stages and the loss as one function, e.g. to compare the code of processes.

        Args:
          params: one entry a stage: arrays, or their shapes and dtypes.
          batch: pytree of arrays, or their shapes and dtypes.

        Returns:
          The jaxpr of ``(params, batch, key) -> loss``.

        Raises:
          ValueError: a stage does not accept its input.
        """
        trace_stages(self._stages, self.loss, tuple(map(spec, params)), spec(batch))

        def whole(params: Sequence[Any], batch: Any, key: Any) -> Any:
            x = batch
            for stage, tree in zip(self._stages, params, strict=True):
                x = stage(tree, x, key)
            return self.loss(x, batch)

        return jax.make_jaxpr(whole)(tuple(params), batch, jax.random.key(0))

    def __repr__(self) -> str:
        return f"Partitioned({len(self._stages)} stages, {self.protocol!r})"

    @short_traceback
    def apply(self, params: Sequence[Any], batch: Any) -> Any:
        """The output of the last stage, for evaluation. All stages must be in this process; the batch stays whole.

        Args:
          params: one entry a stage, e.g. ``state.params``.
          batch: pytree of arrays.

        Returns:
          The output of the last stage, on its device. Stages with an argument ``rng`` or ``key`` get those of step 0.

        Raises:
          ValueError: some stages are in other processes.
        """
        if len(self._local) < len(self._stages):
            raise ValueError(
                f"apply needs all stages in this process, which has {list(self._local)} of {len(self._stages)}; gather "
                "the parameters and make a jaxche.Partitioned without local_stages"
            )
        self._record_specs(params)
        check_numbers(batch)
        check_range(batch)
        check_arrays(batch, "batch")
        x = batch
        for stage, tree in self._place(params).items():
            x = self._outputs[stage](tree, jax.device_put(x, self.devices[stage]))
        return x

    def close(self) -> None:
        """Close the connections to other stages; the next call opens new ones."""
        wire, self._wire = self._wire, None  # also where its close raises the error of a thread
        if wire is not None:
            wire.close()

    def _open_wire(self) -> Wire:
        """The wire, opened if it is not open."""
        if self._wire is None:
            self._wire = self.protocol.wire(self._local, len(self._stages), self.devices)
        return self._wire

    def _by_stage(self, local: dict[int, Any]) -> tuple[Any, ...]:
        """One entry a stage; None for those of other processes."""
        return tuple(map(local.get, range(len(self._stages))))

    def _state(self, step: int, states: dict[int, tuple[Any, Any]]) -> PartitionedState:
        params, opt_states = ({stage: state[i] for stage, state in states.items()} for i in (0, 1))
        return PartitionedState(step, self._by_stage(params), self._by_stage(opt_states))

    def _record_specs(self, params: Sequence[Any]) -> None:
        """Check the parameters, or their shapes, and record the specs of all stages."""
        mesh = context_mesh()
        if mesh is not None and any({self.devices[stage]} != set(mesh.devices.flat) for stage in self._local):
            raise ValueError(
                "a jaxche.Partitioned was called under jax.set_mesh(...), on whose mesh all programs would run, and "
                "each stage has a device of its own; call it outside of it"
            )
        check_stage_params(params, len(self._stages))
        for stage, tree in enumerate(params):
            if stage in self._local or tree is not None:
                self._specs[stage] = spec(tree)
            elif self._specs[stage] is None:
                raise ValueError(
                    f"params[{stage}] is None, and the shapes of that stage of another process are not known here; "
                    f"call model.init(params, tx) with all parameters first, or give their jax.ShapeDtypeStruct"
                )

    def _place(self, params: Sequence[Any]) -> dict[int, Any]:
        """The parameters of this process on their devices."""
        for stage in self._local:
            check_arrays(params[stage], f"params[{stage}]")
        return {stage: jax.device_put(params[stage], self.devices[stage]) for stage in self._local}

    def _plan_for(self, params: Sequence[Any], batch: Any) -> Plan:
        """The plan for these shapes."""
        if any(isinstance(x, Tracer) for x in jax.tree.leaves((params, batch))):
            raise ValueError(
                "params or batch is traced: the stages are compiled programs of their own, which jax.jit and jax.grad "
                "cannot contain; write loss, grads = model.value_and_grad(params, batch), or model.step(state, batch)"
            )
        self._record_specs(params)
        check_numbers(batch)
        check_range(batch)
        given = (tuple(self._specs), spec(batch))
        leaves, structure = jax.tree.flatten(given)
        key = (structure, *leaves)
        if key not in self._plans:
            self._plans[key] = self._compile(*given)
        return self._plans[key]

    def _compile(self, params: Sequence[Any], batch: Any) -> Plan:
        """Trace all stages and compile those of this process, from specs of parameters and batch."""
        micro = MicroBatches.of(batch, self.protocol.micro_batch_size)
        outputs = trace_stages(self._stages, self.loss, params, micro.spec(batch))
        last = len(self._stages) - 1
        programs = {}
        for stage in self._local:
            x = outputs[stage - 1] if stage > 0 else None
            out = outputs[stage] if stage < last else None
            given = StageSpec(params[stage], x, batch if stage in (0, last) else None, out)
            loss = self.loss if stage == last else None
            program = StageProgram(self._stages[stage], loss, self.seed, self.devices[stage], micro, given)
            pace = self._paces[stage]
            programs[stage] = program if pace is None else PacedProgram(program, pace)
        return Plan(micro, SCHEDULES[self.protocol.schedule](last + 1, micro.count), programs)

    def _run(self, step: int, params: Sequence[Any], batch: Any) -> tuple[dict[int, Any], dict[int, StageResult], Any]:
        """One forward and backward through the stages of this process: their parameters, their results, the loss."""
        plan = self._plan_for(params, batch)
        placed = self._place(params)
        check_arrays(batch, "batch")
        try:
            results = run_stages(plan, self._open_wire(), step, placed, batch)
        except BaseException:
            # The wire may hold trees of the step that failed: the next step opens a new one.
            with contextlib.suppress(Exception):  # an error of the close would hide that of the step
                self.close()
            raise
        self._next_step = step + 1
        self.peak_activations = self._by_stage({stage: result.peak for stage, result in results.items()})
        # The process of the last stage publishes the loss to all others.
        last = len(self._stages) - 1
        if last not in results:
            return placed, results, jnp.float32(self._open_wire().read_loss(step))
        loss = results[last].loss
        if len(results) <= last:
            self._open_wire().publish(step, float(loss))
        return placed, results, loss


def _output(stage: Stage, seed: int, params: Any, x: Any) -> Any:
    """The output of a stage in step 0; an input that it does not accept is refused with the name of the stage."""
    key = stage_key(seed, 0, stage.index, 0)
    evaluate_stage(stage, params, x, key)
    return stage(params, x, key)


def _check_protocol(protocol: Any) -> None:
    if isinstance(protocol, type) or not all(hasattr(protocol, n) for n in ("wire", "micro_batch_size", "schedule")):
        raise ValueError(
            f"protocol={protocol!r} is not a protocol; write protocol=jaxche.Direct(), "
            "jaxche.Pipeline(micro_batch_size=8) or jaxche.DataStore('/shared/run')"
        )


def _check_local_stages(local_stages: Sequence[int] | None, n_stages: int) -> tuple[int, ...]:
    """The stages of this process, ascending."""
    if local_stages is None:
        return tuple(range(n_stages))
    given = list(local_stages) if isinstance(local_stages, Iterable) else [local_stages]
    local = tuple(sorted(map(int, given))) if all(isinstance(i, numbers.Integral) for i in given) else ()
    if not local or len(set(local)) != len(local) or local[0] < 0 or local[-1] >= n_stages:
        raise ValueError(
            f"local_stages={given!r} must be different numbers from 0 to {n_stages - 1}, at least one; "
            "write e.g. local_stages=[jax.process_index()]"
        )
    return local


def _check_devices(devices: Sequence[Device] | None, local: Sequence[int], n_stages: int) -> tuple[Device | None, ...]:
    """One entry a stage: its device, or None for a stage of another process."""
    have = local_devices() if devices is None else list(devices) if isinstance(devices, Iterable) else [devices]
    if any(not isinstance(device, jax.Device) for device in have):
        raise ValueError(f"devices={devices!r} must be devices, e.g. devices=jax.devices()")
    if devices is not None and len(have) == n_stages:
        have = [have[stage] for stage in local]
    if len(have) < len(local):
        raise ValueError(
            f"{len(local)} stages need {len(local)} devices, but there "
            f"{'is' if len(have) == 1 else 'are'} {len(have)}; to put several stages on one device write "
            f"devices=[jax.local_devices()[0]] * {n_stages}"
        )
    placed: list[Device | None] = [None] * n_stages
    for stage, device in zip(local, have, strict=False):
        if device.process_index != jax.process_index():
            raise ValueError(
                f"devices: {device} of stage {stage} belongs to process {device.process_index}, this is process "
                f"{jax.process_index()}; give the stages of this process devices of jax.local_devices()"
            )
        placed[stage] = device
    return tuple(placed)
