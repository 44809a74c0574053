"""The states of a trainer: made, read, and given other values."""

from __future__ import annotations

from typing import Any

import jax

from jaxche.cadence import DivergenceCorrection
from jaxche.messages import short_traceback
from jaxche.replicas import without_replica_axis
from jaxche.scaling import ScaleLearningRateState, noise_scale
from jaxche.training._ema import with_ema_values
from jaxche.training._optimizer_checks import check_opt_state, check_params_alone, check_replacement, check_start
from jaxche.training._rounds import Rounds, check_untraced, checked_state
from jaxche.training._state import TrainerState


class States(Rounds):
    """Rounds, and the states that they begin with and end at."""

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


def _of_given_tx(opt_state: Any) -> Any:
    """The state of the optimizer that was given, which a scaling rule wraps."""
    return opt_state.inner_state if isinstance(opt_state, ScaleLearningRateState) else opt_state
