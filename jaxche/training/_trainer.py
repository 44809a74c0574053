"""The trainer: its states, fit, evaluation, replay, and the measurement of rates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from typing import Any, NoReturn

import jax
import optax
from jax.sharding import Mesh

from jaxche.cadence import ApplyPolicy, DivergenceCorrection, ElChe, VirtualFleet
from jaxche.distributed import ElasticGroup
from jaxche.messages import brief, finite_number, short_traceback
from jaxche.replicas import BatchOutputs, without_replica_axis
from jaxche.reports import History, RoundInfo
from jaxche.scaling import ScaleLearningRateState, ScalingRule, noise_scale
from jaxche.sharding import Device, ShardingStrategy
from jaxche.stages import Partitioned
from jaxche.training._arguments import Arguments
from jaxche.training._checks import check_recorded
from jaxche.training._ema import with_ema_values
from jaxche.training._evaluate import evaluate, metric_program
from jaxche.training._explain import explanation, summary
from jaxche.training._fit import fit
from jaxche.training._membership import Membership
from jaxche.training._plan import GivenRound
from jaxche.training._rounds import Rounds, check_untraced, checked_state
from jaxche.training._start_checks import check_opt_state, check_params_alone, check_replacement, check_start
from jaxche.training._state import TrainerState


class Trainer(Rounds):
    r"""Trains one model on replicas of different speeds.

    .. math:: x' = x_0 - \alpha \sum_i w_i (x_0 - x_i)

    In a round every replica takes its own number of local steps without waiting for the others. Then one weighted
    ``psum`` merges the parameters, and with them times, counts and losses. From these every host makes the same next
    plan. With one replica the trainer is a plain training loop.

    Args:
      loss_fn: ``loss_fn(params, batch) -> loss`` or ``(loss, metrics)``, the loss a mean over the batch, metrics a
        dict of scalars; each of them may be a :class:`~jaxche.Weighted`, a total with its weight. It gets ``rng=`` or
        ``key=`` (a new key for every batch) and ``model_state=`` if it names them; with the latter it returns
        ``(loss, (metrics, new_model_state))``. Frozen weights are arrays of a
        ``jax.tree_util.Partial(loss_fn, backbone=weights)``: every replica has them on its device, and no step changes
        them, no merge sums them, no checkpoint saves them. Or a :class:`~jaxche.Partitioned` with ``Direct`` or
        ``Pipeline``: every replica is then a pipeline, and parameters have one entry per stage.
      tx: any ``optax.GradientTransformation`` whose update needs no more than gradients, parameters and ``value=``, the
        loss of the batch; a line search needs more. Each replica has its own optimizer state. A schedule in ``tx``
        counts the batches of all replicas, as on one device (see the notes).
      policy: when to merge, an :class:`~jaxche.ApplyPolicy` or its value: ``"sync"`` after every step, ``"cadence"``
        when the slowest replica has done ``anchor`` batches, ``"async"`` the same with divergence correction and with
        rounds that cross the end of an epoch, ``"auto"`` as ``"sync"`` or as ``"cadence"``, whichever promises more
        progress (:meth:`explain` says why).
      che: the cadence; by default with the rounds that make most progress a second (``tuner="progress"``).
      average: ``"parameters"`` (local SGD) or ``"gradients"`` (replicas accumulate the gradients of their batches
        and make one identical update, equal to one device on the joined batch). By default ``"gradients"`` under
        ``sync`` and ``"parameters"`` otherwise.
      merge: weights of parameters, see :func:`~jaxche.merge_weights`: ``"steps"``, ``"batch"`` or ``"fednova"``.
        ``"auto"`` is the rule that measured best, ``"steps"``.
      opt_state: what a merge does with each replica's optimizer state: ``"average"`` (default, where parameters are
        averaged) takes the weighted mean of its moments and of their counts, ``"local"`` keeps it, ``"reset"``
        initializes the moments again. Schedules and random keys continue in all three cases. Where merges run beside
        steps it is ``"local"``.
      outer: optax transform on the pseudo-gradient of the merge; None averages.
      ema: keep a moving average of the merged parameters and of the floats in the model state, whose mean age is this
        part of the run so far, e.g. 0.05; see the notes. ``fit(validation=)`` evaluates it, and :meth:`with_ema` is the
        state with it.
      replicas: the replicas of all processes, each a device or a mesh of devices (an *island*). ``"process"``: all
        devices of a process are one replica, whose step is one program, as of ``jit`` over a mesh, and cuts each batch
        over them; for equally fast devices. By default every device of :func:`jaxche.devices` is a replica; with
        ``strategy=HybridShard(n)`` every node of ``n`` devices, with other sharding strategies all of a process. For a
        model in stages each replica is a list of devices, one per stage, and each stage is merged over its devices; by
        default the devices of each process in their order. The ``devices=`` of the ``Partitioned`` are not used.
      strategy: how the devices of an island share parameters, gradients and optimizer state, e.g.
        ``jaxche.FullShard()``. Islands merge shard by shard, over the devices with the same shard, without a gather.
        Islands of different sizes first reshard among their own devices to a common layout.
      backend: where replicas merge: ``"device"``, on their own devices; ``"host"``, on the CPU devices of their
        processes, so that no program spans accelerators; ``"auto"``, on the host if replicas are of different kinds or
        processes share a GPU.
      seed: seed of ``rng=``.
      pace_ms: for experiments on equal devices: pad every local step to this wall time in ms a batch, one number or
        one per replica; a step on a part of a batch to that part. ``jaxche launch --pace`` sets it through the
        variable ``JAXCHE_PACE_MS``.
      scaling: a scaling rule, e.g. ``jaxche.AdaScale()``. ``tx`` keeps the learning rate of one small batch, and the
        rule scales each update for the larger batch. When gradients are averaged, that is the batch of the round. When
        parameters are averaged, each local step counts for the :func:`~jaxche.scaling.effective_replicas` of the
        merge, and replicas with two steps or more in a round estimate the noise from their own batches (one more
        gradient in memory). A single replica compares successive gradients, with one more in memory, too. A round
        measures its first steps, 8 of each replica or 12 of a single one; after eight rounds, some rounds only, so that
        one step in eight is measured. The other steps run a program without this arithmetic, and decay the averages of
        the noise scale all the same (:func:`~jaxche.scaling.noise_scale.skip`).
      base_batch_size: examples in the batch that the learning rate was tuned for; by default one batch of the data.
      fleet: a :class:`~jaxche.VirtualFleet` whose clock replaces real time, for experiments with devices of any speeds
        in one process: the replicas train for real and as fast as they can, and the times that the cadence, the
        history and the plots get are the fleet's. Runs repeat bit for bit. ``info.clock_ms`` is the clock. Replicas
        may share a device, and by default they are distributed over all devices; such replicas merge on CPU devices.
      rows: ``"speed"`` (default under ``sync``): the batches of an update are joined, and each replica takes the rows
        that it can do in the common time, from measured times :math:`t_i(b) = f_i + s_i b`. The update is that of one
        device on the joined batch. Shares change if a round becomes at least 0.5 ms and 4 % (the first time 10 %)
        shorter; after the first change, new ones are compiled once rounds without them have lost as much time as that
        takes. Under ``cadence`` local steps share batches in the same way: each step of all replicas is on the rows
        of one batch, or of a few where that is faster, so that all take equally many steps, and more of them.
        ``"equal"``: whole batches; a run under ``sync`` then repeats bit for bit, and does not follow times.
      joined_batches: under ``sync``, the batches in an update; by default one per replica. A single replica makes an
        update of each batch, whatever their number here.
      max_rows: the largest step in rows, one number or one per replica; a larger share takes several steps. By default
        what a device has memory for, if it says how much it has.
      outputs: ``outputs(info, batches)`` is called after every round with the :class:`RoundInfo` and the outputs of
        each batch of this process's replicas, in the order of the data: what ``loss_fn`` returns beside the loss, such
        as logits, on the host. Then ``loss_fn`` may return ``(loss, outputs)`` with arrays of any shape, or a dict, of
        which the scalars are metrics. All processes give this argument.
      wire: how a merge sends the change of the parameters: ``"float32"``, or for slow links ``"bfloat16"``, ``"int8"``
        or ``"int4"``, with one scale for each 128 numbers. Later merges send what rounding leaves of the changes; what
        it leaves of the optimizer's moments stays with the replica. ``"auto"``: ``"float32"`` until merges take 5 % of
        the time, then ``"int4"`` if a merge is measured to be faster. See ``docs/slow_links.md``.
      overlap: the part of a round that a replica takes while the merge of the round before runs, from 0 (wait for each
        merge) to 0.5. Then it takes in the result, :math:`x_i \leftarrow x_i + (x' - y_i)`, with :math:`y_i` its
        parameters at the end of that round. Moments stay with their replica (``opt_state="local"``), and merges run
        on CPU devices that no replica trains on. What reads the state waits for the merge: an evaluation, a checkpoint,
        :meth:`params`, the end of a fit. By default 0, but under ``auto``, where all replicas are accelerators, 0 or
        0.5, whichever promises more progress.
      groups: replicas that merge among themselves several times within a round, because what is between them is faster
        than the link to the others: ``"process"``, those of each process, or lists of ranks, each list of one process.
        Parameters, statistics and, with ``opt_state="average"``, moments take the mean by steps. The merge at the end
        of a round stays that of all replicas. See ``docs/slow_links.md``.
      group_merges: merges in a round with ``groups=``, the last one included; by default from what merges of groups
        take, and 2 under other tuners than ``"progress"``. Every replica takes a step before each of them.

    Notes:
      **Schedules.** On one device a schedule in ``tx`` is a function of the number of updates, one per batch. Here it
      is a function of the number of batches of all replicas, so ``optax.cosine_decay_schedule(0.1, epochs *
      len(data))`` ends at the end of the run with any number of replicas, at any speeds, under every policy. If a
      round has N steps in total and n of one replica, the count of that replica advances by N/n at each step; after
      the merge all counts are equal. When gradients are averaged, the one update of the round advances the count by N.
      With ``optax.MultiSteps(tx, k)`` a count stands for k batches, as on one device. This holds for the counts of
      ``scale_by_schedule``, ``inject_hyperparams``, ``MultiSteps``, ``add_decayed_weights``, ``add_noise``,
      ``schedule_free``, ``ademamix`` and ``momo``, nested or not; a transformation of your own keeps such a count in an
      ``optax.ScaleByScheduleState``. Other counts are of the updates of their replica: the counts of moments (e.g. in
      Adam's bias correction), the step of ``conditionally_transform``, and those of ``prodigy``, ``dadapt_adamw``,
      ``momo_adam`` and ``madgrad``, which have one count for schedule and moments. A scaling rule has its own progress,
      see :func:`~jaxche.scaling.progress_schedule`. A schedule of ``outer`` counts merges. The windows of an
      ``optax.contrib.reduce_on_plateau`` are of the updates of the replica with most steps, whose rate a merge gives to
      all.

      **Moving average.** With ``ema=``:math:`a` and :math:`t` examples at one merge, :math:`t'` at a later one,

      .. math:: \bar x' = s \bar x + (1 - s) x', \qquad s = (t / t')^{1/a - 1}

      so the mean age of the parameters in the average is :math:`a t'`, whatever the length of the run. At a constant
      learning rate it is often as good as a schedule that falls to zero. It sends no bytes, and takes the memory of the
      parameters once more, in float32 or wider.

    Attributes:
      last_good_state: after an error in :meth:`fit`, the state after the last good round; None if ``donate=True`` has
        taken it.

    Raises:
      ValueError: an invalid argument, with the line to write instead; or :func:`jaxche.initialize` was not called in a
        process that a launcher started as one of several.

    References:
      flodl (ElChe). Stich, *Local SGD converges fast and communicates little*, ICLR 2019. Karras et al., *Analyzing and
      improving the training dynamics of diffusion models*, CVPR 2024 (``ema=``).

    Example:
      >>> import jaxche, jax.numpy as jnp, numpy as np, optax
      >>> rng = np.random.default_rng(0)
      >>> x = rng.normal(size=(64, 3)).astype(np.float32)
      >>> data = jaxche.Batches({"x": x, "y": x @ np.array([1.0, -2.0, 0.5], np.float32)}, batch_size=8)
      >>> trainer = jaxche.Trainer(lambda w, b: jnp.mean((b["x"] @ w - b["y"]) ** 2), optax.sgd(0.1))
      >>> state = trainer.init(jnp.zeros(3))
      >>> state, history = trainer.fit(state, data, epochs=60, progress=False)
      >>> np.round(trainer.params(state), 2).tolist()
      [1.0, -2.0, 0.5]
    """

    @jax.transfer_guard("allow")  # batches, counts and results are copied between host and devices
    def __init__(
        self,
        loss_fn: Callable[..., Any] | Partitioned,
        tx: optax.GradientTransformation,
        policy: ApplyPolicy | str = ApplyPolicy.CADENCE,
        che: ElChe | None = None,
        average: str | None = None,
        merge: str = "steps",
        opt_state: str = "auto",
        outer: optax.GradientTransformation | None = None,
        replicas: Sequence[Device | Mesh | Sequence[Device]] | str | None = None,
        strategy: ShardingStrategy | None = None,
        backend: str = "auto",
        seed: int = 0,
        pace_ms: float | Sequence[float] | None = None,
        scaling: ScalingRule | None = None,
        base_batch_size: float | None = None,
        fleet: VirtualFleet | None = None,
        rows: str | None = None,
        joined_batches: int | None = None,
        max_rows: int | Sequence[int] | None = None,
        outputs: Callable[[RoundInfo, list[BatchOutputs]], Any] | None = None,
        wire: str = "float32",
        overlap: float | None = None,
        groups: str | Sequence[Sequence[int]] | None = None,
        group_merges: int | None = None,
        ema: float | None = None,
    ):
        given = locals()
        arguments = Arguments(**{one.name: given[one.name] for one in fields(Arguments)})
        super().__init__(arguments.settings())
        if isinstance(self._group, ElasticGroup):
            self._membership = Membership(self, self._group)

    __init__ = short_traceback(__init__)

    def __repr__(self) -> str:
        """One line: the replicas, and the arguments by which they train."""
        return summary(self)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Trainer cannot be pickled or copied: its programs are compiled for the devices of this process. Make "
            "another one with the same arguments; to save a run write trainer.fit(state, data, checkpoints='runs/mine')"
        )

    @short_traceback
    @jax.transfer_guard("allow")
    def init(self, params: Any, model_state: Any = None, opt_state: Any = None) -> TrainerState:
        """Put one set of parameters on every replica.

        Args:
          params: pytree of float arrays, e.g. ``model.init(rng, x)["params"]``, or a function without arguments that
            returns it. The devices of an island then each compute their own shards, so that a model larger than one
            device can start. The function is traced once per island, so it must draw from keys, not from a stateful
            generator. Every process passes the same parameters.
          model_state: pytree of the values that the loss changes besides parameters, e.g. batch statistics.
          opt_state: initial optimizer state of every replica, e.g. ``train_state.opt_state``; by default
            ``tx.init(params)``.

        Returns:
          The state before the first round.

        Raises:
          ValueError: no arrays, a leaf that is not float, a ``tx`` that is already scaled, whose update needs more
            than gradients and the loss, or that follows the path of one replica, or an ``opt_state`` of another
            optimizer.
        """
        check_untraced("trainer.init")
        self._check_context_mesh("trainer.init")
        check_start(self._settings, self.world_size, params, model_state, opt_state)
        local_states = self._engine.placement(params, model_state, opt_state)
        state = TrainerState(local_states, self._settings.che, DivergenceCorrection(), _view=self._engine.view)
        return self._with_own_choices(state)

    @short_traceback
    @jax.transfer_guard("allow")
    def replace(
        self, state: TrainerState, params: Any = None, model_state: Any = None, opt_state: Any = None
    ) -> TrainerState:
        """The state with other values, e.g. another target network or learning rate, in a run that goes on.

        All that is not given stays: the place in the data, random keys, measured times, and the optimizer state of each
        replica. In a run of several processes all of them call this together.

        Args:
          state: from :meth:`init` or a round; if ``opt_state`` is given, also of a trainer with another ``tx``.
          params: pytree like ``trainer.params(state)``, for every replica.
          model_state: pytree like ``trainer.model_state(state)``, for every replica.
          opt_state: pytree like ``tx.init(params)``, for every replica.

        Returns:
          The next state; the one passed in stays valid.

        Raises:
          ValueError: a tree with other arrays than the one that it replaces, or ``params`` without ``opt_state`` for an
            optimizer that makes its steps from parameters in its state.
        """
        self.check_state(state, "trainer.replace", any_tx=opt_state is not None)
        state = state.merged()
        params = tuple(params) if isinstance(params, list) and self._settings.staged else params
        values = {"params": params, "model_state": model_state, "opt_state": opt_state}
        given = {name: tree for name, tree in values.items() if tree is not None}
        local = state.local_states[0]
        wanted = without_replica_axis({"params": local.params, "model_state": local.model_state})
        for name, shapes in wanted.items():
            if name in given:
                check_replacement(name, given[name], shapes)
        if opt_state is not None:
            check_opt_state(self._settings.tx, wanted["params"], opt_state, self._settings.staged)
        elif params is not None:
            check_params_alone(self._settings.tx, params if self._settings.staged else [params])
        params = self.params(state) if params is None else params
        return state.with_values(self._engine.placement(params, model_state, opt_state), list(given))

    @short_traceback
    def params(self, state: TrainerState) -> Any:
        """The merged parameters: one plain pytree without a replica axis, on this process's first replica."""
        return self._engine.unreplicate(checked_state(state).merged().local_states[0].params)

    @short_traceback
    def model_state(self, state: TrainerState) -> Any:
        """The merged model state: one plain pytree without a replica axis."""
        return self._engine.unreplicate(checked_state(state).merged().local_states[0].model_state)

    @short_traceback
    def opt_state(self, state: TrainerState) -> Any:
        """The optimizer state: one plain pytree without a replica axis, e.g. for :meth:`init`.

        If replicas have states of their own, as with ``opt_state="local"``, it is that of the first replica of this
        process. With ``scaling=`` it is the state of the ``tx`` that was given.
        """
        return self._engine.unreplicate(_of_given_tx(checked_state(state).merged().local_states[0].opt_state))

    @short_traceback
    def noise(self, state: TrainerState) -> noise_scale.NoiseScale | None:
        """The measured gradient noise scale, or None without ``scaling=``."""
        return self._engine.unreplicate(checked_state(state).local_states[0].noise)

    @short_traceback
    @jax.transfer_guard("allow")
    def with_ema(self, state: TrainerState) -> TrainerState:
        """The state with the moving averages of ``ema=`` as parameters and model state, to evaluate and to export.

        In a run of several processes all of them call this together.

        Args:
          state: from :meth:`init` or a round of a trainer with ``ema=``.

        Returns:
          A state for :meth:`evaluate`, :meth:`params` and :meth:`model_state`. Of model state, values other than floats
          are the newest.

        Raises:
          ValueError: the trainer has no ``ema=``.

        Example:
          >>> import jax.numpy as jnp, numpy as np, optax
          >>> import jaxche
          >>> data = jaxche.Batches(np.ones((12, 2), np.float32), batch_size=2)
          >>> trainer = jaxche.Trainer(lambda w, x: jnp.mean((x @ w - 1.0) ** 2), optax.sgd(0.1), "sync", ema=0.05)
          >>> state, history = trainer.fit(trainer.init(jnp.zeros(2)), data, epochs=5, progress=False)
          >>> averages = trainer.params(trainer.with_ema(state))
          >>> bool((0 < averages).all() and (averages < trainer.params(state)).all())
          True
        """
        self.check_state(state, "trainer.with_ema")
        if self._settings.ema is None:
            raise ValueError("this trainer keeps no moving average; write jaxche.Trainer(loss_fn, tx, ema=0.05)")
        return with_ema_values(self._engine, state)

    fit = short_traceback(jax.transfer_guard("allow")(fit))

    @short_traceback
    @jax.transfer_guard("allow")
    def evaluate(
        self, state: TrainerState, data: Any, metric_fn: Callable[..., Any] | None = None, metrics: Any = None
    ) -> dict[str, float]:
        r"""Evaluate the merged parameters on every batch of some data, each taken once, on all replicas at once.

        .. math:: \bar m = \frac{\sum_b e_b m_b}{\sum_b e_b}, \qquad
                  \bar m = \frac{\sum_b \mathrm{total}_b}{\sum_b \mathrm{weight}_b}

        with the means :math:`m_b` of the batches and their numbers of examples :math:`e_b`, or with a
        :class:`~jaxche.Weighted` of each batch. The sums are in float64 and in the order of the data. So the result
        repeats bit for bit, and does not depend on the number of replicas as far as equal devices round a batch alike.
        A replica takes its next batch when it has finished one; processes share the batches by measured speed. In a run
        of several processes all of them call this together. The state is not changed.

        Args:
          state: from :meth:`init`, a round or a fit.
          data: ``len(data)`` batches, ``data[i]``, with ``.epoch(0)`` if there is one; in one process also any finite
            iterable of batches.
          metric_fn: ``metric_fn(params, batch)``, compiled. It gets ``model_state=`` and ``rng=``, a key for each
            batch, if it names them. It returns a dict of scalars that are means over the batch, or
            :class:`~jaxche.Weighted` where other things than examples count, such as tokens. An object with ``merge``
            and ``compute``, such as a ``clu.metrics.Collection``, is merged in the order of the data. A loss function
            may be given too: its loss and metrics are the results, its model state is discarded. With a trainer of an
            :class:`~jaxche.NNXLoss` it is ``metric_fn(model, batch)``, the model with the trained variables and in
            evaluation mode. With one of a :class:`~jaxche.Partitioned` it is ``metric_fn(y, batch)``, ``y`` the output
            of the last stage. The default is the loss function of the trainer. It runs in training mode, unless it is
            an ``NNXLoss``: give a ``metric_fn`` if the model has dropout or batch statistics.
          metrics: an ``nnx.Metric`` or ``nnx.MultiMetric``: ``metric_fn`` returns the arguments of its ``update``, as a
            dict, and the result is that of one object that is updated with one batch after the other. The given object
            is not changed.

        Returns:
          The results by name. A single loss is called ``"loss"``; dataclasses that metrics compute give one entry for
          each field.

        Raises:
          ValueError: no batches, or a ``metric_fn`` that returns something else.
          RankError: another process failed.

        Example:
          >>> import jaxche, jax.numpy as jnp, numpy as np, optax
          >>> data = jaxche.Batches({"x": np.arange(10.0, dtype=np.float32)}, batch_size=4, seed=None)
          >>> trainer = jaxche.Trainer(lambda w, batch: jnp.mean((w - batch["x"]) ** 2), optax.sgd(0.1))
          >>> state = trainer.init(jnp.zeros(()))
          >>> trainer.evaluate(state, data)
          {'loss': 28.5}
          >>> def metric_fn(w, batch):
          ...     large = batch["x"] > 4
          ...     return {"mean": batch["x"].mean(), "large": jaxche.Weighted((batch["x"] * large).sum(), large.sum())}
          >>> trainer.evaluate(state, data, metric_fn)
          {'large': 7.0, 'mean': 4.5}
        """
        self.check_state(state, "trainer.evaluate")
        return evaluate(self, state, data, metric_program(self, metric_fn, metrics), metrics)

    @short_traceback
    @jax.transfer_guard("allow")
    def replay(self, state: TrainerState, data: Any, history: Iterable[RoundInfo]) -> tuple[TrainerState, History]:
        """Repeat recorded rounds: the same batches on the same replicas, at any speed.

        On the same devices the result is equal bit for bit.

        Args:
          state: the state before the first recorded round.
          data: the data of the recorded run.
          history: the recorded rounds, e.g. ``History.from_json(Path("history.jsonl"))``.

        Returns:
          ``(state, history)`` of the repeated run.

        Raises:
          ValueError: the history begins at another place than the state, or has another number of replicas.
        """
        self.check_state(state, "trainer.replay")
        again, history = History(), list(history) if isinstance(history, Iterable) else [history]
        if not all(isinstance(info, RoundInfo) for info in history):
            raise ValueError(
                f"history={brief(history)} is no list of rounds; write jaxche.History.from_json(Path('history.jsonl'))"
            )
        for number, info in enumerate(history):
            if len(info.counts) != self.world_size:
                raise ValueError(
                    f"history has {len(info.counts)} replicas in round {info.round}, and this trainer has "
                    f"{self.world_size}; give it as many replicas. If the number changed during the run, as in an "
                    f"elastic run, replay the rounds before that: history[:{number}]"
                )
        if self.world_size > 1:
            groups = self._engine.groups.numbers(self.world_size)
            check_recorded(history, self._settings.wire, self._overlaps(state), groups)
        for info in history:
            epoch, start, _ = (state.pending_batches or ((state.epoch, state.cursor, 0),))[0]
            if (info.round, info.epoch, info.cursor) != (state.round, epoch, start):
                raise ValueError(
                    f"history has round {info.round} at batch {info.cursor} of epoch {info.epoch}, but the state is at "
                    f"round {state.round}, batch {start} of epoch {epoch}; start from the state before the first "
                    "recorded round, e.g. state = trainer.init(params), and give the same data"
                )
            state = state if info.overlapped else state.merged()
            if state.wire is not None and info.average == "parameters":
                state = replace(state, wire=replace(state.wire, wire=info.wire))
            if state.choice is not None and info.policy:
                choice = replace(state.choice, policy=ApplyPolicy(info.policy), overlap=info.overlap)
                state = replace(state, choice=choice)
            state, info = self._round(state, data, given=GivenRound.of(info))
            again.append(info)
        return self._settled(state), again

    @short_traceback
    @jax.transfer_guard("allow")
    def measure_rates(self, state: TrainerState, data: Any, seconds: float = 2.0) -> tuple[float, ...]:
        """Batches per second of every replica, all running at once without merges: the upper bound of any cadence.

        Args:
          state: the state to run from; it is not changed.
          data: as for :meth:`round`.
          seconds: how long to run.

        Returns:
          One rate per replica, in batches a second.

        Raises:
          ValueError: the state is of another trainer, or the seconds are no number.
        """
        self.check_state(state, "trainer.measure_rates")
        seconds = finite_number("seconds", seconds, "trainer.measure_rates(state, data, seconds=2.0)", 0.0)
        if (fleet := self._settings.fleet) is not None:
            return tuple((1e3 / fleet.speeds(state.round)).tolist())
        reader = self._reader(data)
        self._prepared_plan(reader, state)
        return tuple(self._engine.free_run(state.local_states, reader.some(4), seconds))

    def explain(self, state: TrainerState) -> str:
        """What the trainer does with its replicas, and why, in one line.

        Under the policy ``cadence`` also what ``"auto"`` expects more progress of, if there is something.

        Args:
          state: after the rounds from which speeds and merges are measured.
        """
        return explanation(self, checked_state(state, "trainer.explain"))


def _of_given_tx(opt_state: Any) -> Any:
    """The state of the optimizer that was given, which a scaling rule wraps."""
    return opt_state.inner_state if isinstance(opt_state, ScaleLearningRateState) else opt_state
