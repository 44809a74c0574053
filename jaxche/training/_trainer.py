"""The trainer: rounds, fit, evaluation, replay, measurement of rates, and the explanation of its choices."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from jaxche.cadence import (
    DEAR,
    ApplyPolicy,
    ElChe,
    VirtualFleet,
    better_than_cadence,
    is_long_merge,
    merge_share,
)
from jaxche.distributed import ElasticGroup
from jaxche.messages import brief, finite_number, per_rank, short_traceback
from jaxche.replicas import BatchOutputs
from jaxche.reports import History, RoundInfo
from jaxche.scaling import ScalingRule
from jaxche.sharding import Device, NoShard, ShardingStrategy, show_bytes
from jaxche.stages import Partitioned
from jaxche.training._arguments import Arguments, rule_text
from jaxche.training._checks import check_recorded
from jaxche.training._evaluate import evaluate, metric_program
from jaxche.training._fit import fit
from jaxche.training._membership import Membership
from jaxche.training._plan import GivenRound, unit_of_shares
from jaxche.training._state import TrainerState
from jaxche.training._states import States, checked_state

# Replicas whose times differ by less are equally fast.
_ALIKE = 1.1


class Trainer(States):
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
        arguments = Arguments(
            loss_fn=loss_fn,
            tx=tx,
            policy=policy,
            che=che,
            average=average,
            merge=merge,
            opt_state=opt_state,
            outer=outer,
            replicas=replicas,
            strategy=strategy,
            backend=backend,
            seed=seed,
            pace_ms=pace_ms,
            scaling=scaling,
            base_batch_size=base_batch_size,
            fleet=fleet,
            rows=rows,
            joined_batches=joined_batches,
            max_rows=max_rows,
            outputs=outputs,
            wire=wire,
            overlap=overlap,
            groups=groups,
            group_merges=group_merges,
            ema=ema,
        )
        super().__init__(arguments.settings())
        if isinstance(self._group, ElasticGroup):
            self._membership = Membership(self, self._group)

    __init__ = short_traceback(__init__)

    def __repr__(self) -> str:
        """One line: the replicas, and the arguments by which they train."""
        settings, world_size, policy = self._settings, self.world_size, self.policy
        if world_size == 1:
            rules = ["a plain training loop"]
        else:
            rules = [f"policy={policy.value!r}"]
            if policy is not ApplyPolicy.AUTO:
                rules.append(f"average={settings.average!r}")
                rules += [f"merge={settings.merge!r}"] if settings.average == "parameters" else []
            rules += [f"wire={settings.wire!r}"] if settings.wire != "float32" else []
            rules += [f"overlap={settings.overlap:g}"] if settings.overlap else []
            rules += [f"groups={settings.groups.ranks}"] if settings.groups.ranks else []
            by_speed = policy in (ApplyPolicy.SYNC, ApplyPolicy.AUTO)  # by default
            rules += [f"rows={settings.rows!r}"] if (settings.rows == "speed") != by_speed else []
        rules += [f"strategy={settings.strategy}"] if settings.strategy != NoShard() else []
        rules += [f"ema={settings.ema:g}"] if settings.ema else []
        rules += [f"scaling={rule_text(settings.scaling.rule)}"] if settings.scaling else []
        return f"Trainer({', '.join([_replicas_text(self._engine.devices, settings.fleet), *rules])})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Trainer cannot be pickled or copied: its programs are compiled for the devices of this process. Make "
            "another one with the same arguments; to save a run write trainer.fit(state, data, checkpoints='runs/mine')"
        )

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
        self._prepared_plan(self._engine.reader(data), state, data)
        return tuple(self._engine.free_run(state.local_states, data, seconds))

    def explain(self, state: TrainerState) -> str:
        """What the trainer does with its replicas, and why, in one line.

        Under the policy ``cadence`` also what ``"auto"`` expects more progress of, if there is something.

        Args:
          state: after the rounds from which speeds and merges are measured.
        """
        state = self._with_own_choices(checked_state(state, "trainer.explain"))
        parts = [state.choice.reason if state.choice is not None else self._given_policy(state)]
        if state.wire is not None and state.wire.reason:
            parts.append(state.wire.reason)
        elif advice := self._cheaper_syncs(state) or self._cheaper_merges(state):
            parts.append(advice)
        if advice := self._better_policy(state):
            parts.append(advice)
        if state.che is not None and state.che.limit and self.policy not in (ApplyPolicy.SYNC, ApplyPolicy.AUTO):
            parts.append(state.che.limit)
        return "; ".join(parts)

    def _given_policy(self, state: TrainerState) -> str:
        """The policy as given, with its rounds and merges, in one line."""
        policy = f"policy={self.policy.value!r}, as given"
        if state.row_shares.rows:
            joined = state.row_shares.joined
            policy += f": rows {state.row_shares.rows} of {'a batch' if joined == 1 else f'{joined} batches'} by speed"
        elif self.policy is ApplyPolicy.SYNC:
            policy += f": {self._settings.joined} batches in a round"
        elif state.che is not None:
            policy += f": {state.che.batch_counts} batches in a round"
        if sent := self._engine.sent_bytes:
            policy += f"; a merge sends {show_bytes(sent)} of each replica, wire={self._engine.wire!r}"
        if self._engine.overlaps:
            policy += f", beside the first {self._engine.overlap:.0%} of the next round"
            if state.exchange_ms:
                policy += f", and measurements {state.exchange_ms:.3g} ms beside the last steps of this one"
        if self._engine.groups.ranks:
            groups = self._settings.groups.ranks
            policy += f"; groups {groups} merge {state.group_merges} times in a round, the last time with all"
        return policy

    def _better_policy(self, state: TrainerState) -> str:
        """What ``policy="auto"`` expects more progress of than of whole batches between merges, in one line."""
        settings, rows = self._settings, self._engine.batch_size
        is_sharded = state.stream is not None and self._has_peers  # whose rows may have to stay in their process
        if self.policy is not ApplyPolicy.CADENCE or settings.rows != "equal" or not settings.fits_auto or is_sharded:
            return ""
        if state.che is None or not rows:
            return ""
        return better_than_cadence(state.che, rows, unit_of_shares(settings.unit, rows))

    def _cheaper_merges(self, state: TrainerState) -> str:
        """Arguments that would make merges cheaper, in one line; empty if merges are cheap or none would help."""
        settings = self._settings
        if self._rules.policy_of(state) is ApplyPolicy.SYNC or settings.average != "parameters" or settings.staged:
            return ""
        if state.che is None or (share := merge_share(state.che)) < DEAR:
            return ""
        advice = []
        if settings.wire == "float32":
            advice.append("wire='int4' sends about 1/8 of the bytes")
        can_overlap = self.policy in (ApplyPolicy.CADENCE, ApplyPolicy.AUTO) and settings.scaling is None
        shares_batches = self.policy is ApplyPolicy.AUTO or settings.rows == "speed"  # in short rounds
        if can_overlap and not any(settings.overlaps) and (shares_batches or is_long_merge(state.che)):
            advice.append("overlap=0.5 hides up to half a round")
        return f"merges take {share:.0%} of the time: {', '.join(advice)}" if advice else ""

    def _cheaper_syncs(self, state: TrainerState) -> str:
        """The argument that makes the equally fast devices of a process one replica; empty if it would not help.

        ``"auto"`` gets it under local steps too, which it may take because a sync of a replica each is slow.
        """
        settings, shares, rows = self._settings, state.row_shares, self._engine.batch_size
        if self.policy not in (ApplyPolicy.SYNC, ApplyPolicy.AUTO) or not (shares.is_measured and rows):
            return ""
        if len(shares.ranks) != self.world_size:  # of another trainer
            return ""
        if settings.staged or settings.fleet is not None or any(settings.paces):
            return ""
        fixed, slope = shares.fit()
        found: dict[int, list[float]] = defaultdict(list)
        for rank, ms in zip(self._engine.order, fixed + slope * rows, strict=True):
            if settings.placements[rank].devices.size > 1:
                return ""
            found[settings.processes_of_ranks[rank][0]].append(ms)
        if any(max(own) > _ALIKE * min(own) for own in found.values()) or len(found) == len(fixed):
            return ""
        return "the replicas of a process are equally fast: replicas='process' makes one of them, which syncs faster"


def _replicas_text(replicas: Sequence[np.ndarray], fleet: VirtualFleet | None) -> str:
    """The replicas and their devices, e.g. ``"3 replicas on 2 x NVIDIA H100 and 1 x NVIDIA L4"``."""
    sizes = sorted({devices.size for devices in replicas})
    text = f"{len(replicas)} replica{'s' if len(replicas) > 1 else ''}"
    if fleet is not None:
        return f"{text} on a virtual clock, {per_rank(fleet.ms_per_batch, '{:g}')} ms a batch"
    if sizes[-1] > 1:
        text += f" of {' or '.join(map(str, sizes))} devices"
    kinds = Counter(device.device_kind for devices in replicas for device in devices.flat)
    return f"{text} on {' and '.join(f'{count} x {kind}' for kind, count in kinds.items())}"
