"""When the replicas average."""

from __future__ import annotations

from enum import StrEnum


class ApplyPolicy(StrEnum):
    """When the replicas average.

    =========  ==========================================  ===========================================
    policy     the replicas average                        what else
    =========  ==========================================  ===========================================
    SYNC       after every batch (one each)                equals standard synchronous data
                                                           parallelism: gradients are averaged, so
                                                           Adam matches one device on the joined batch
    CADENCE    when the slow replica has done ``anchor``   all replicas change epoch together
               batches; fast ones have filled the same
               wall time with more of them
    ASYNC      as CADENCE                                  divergence correction lowers the anchor and
                                                           lets it recover; fast replicas run into the
                                                           next epoch on their own
    =========  ==========================================  ===========================================

    Members are strings, so a policy may be written either way.

    Raises:
      ValueError: for any other string; the message lists what to write.

    References:
      flodl 0.4.0, ``ApplyPolicy``.

    Example:
      >>> ApplyPolicy("cadence") is ApplyPolicy.CADENCE
      True
      >>> ApplyPolicy.ASYNC == "async"
      True
    """

    SYNC = "sync"
    CADENCE = "cadence"
    ASYNC = "async"

    @classmethod
    def _missing_(cls, value: object) -> ApplyPolicy:
        names = ", ".join(f'"{member.value}"' for member in cls)
        raise ValueError(f'policy={value!r} is not a policy; write one of {names}, e.g. policy="cadence"')
