"""What a run survives: faults at random moments in runs of processes of unequal speeds.

    python scripts/chaos.py                      # 54 faults, nine of each kind, in runs that are started again
    python scripts/chaos.py --faults 6 --seed 1  # one of each kind
    python scripts/chaos.py --elastic --faults 20                 # elastic runs, each with ten faults
    python scripts/chaos.py --elastic --first 500 --faults 500 --results chaos.jsonl  # a part, which can be resumed
    python scripts/chaos.py --elastic --first 37 --faults 1       # a single one of them, alone
    python scripts/chaos.py --elastic --kinds stop,pause --faults 6 --heartbeat-timeout 4
    python scripts/chaos.py --elastic --kinds kill --faults 20 --state-mb 500
    python scripts/chaos.py --elastic --kinds kill --faults 5 --gpu    # on the first GPU of this machine
    python scripts/chaos.py --goodput 240        # a fault a minute, beside restarts from checkpoints
    python scripts/chaos.py --join-mb 500        # a state to a replacement, beside a bare copy
    python scripts/chaos.py --join-mb 500 --link 1gbit/0ms        # between two namespaces with such a link

``restarts.py`` and ``elastic.py`` in ``chaos_parts/`` say what is asked of the runs. A fault of an elastic campaign
follows from its number, the seed, the kinds and the number of faults a run.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from chaos_parts import elastic, goodput, join, restarts
from slow_link import Link


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=54, help="how many (default 54)")
    parser.add_argument("--undisturbed", type=int, default=12, help="runs without a fault (default 12)")
    parser.add_argument("--seed", type=int, default=0, help="of kinds, ranks and moments (default 0)")
    parser.add_argument("--elastic", action="store_true", help="hit elastic runs")
    parser.add_argument("--first", type=int, default=0, help="number of the first fault of an elastic campaign")
    parser.add_argument("--kinds", help="faults of these kinds only, e.g. stop,pause")
    parser.add_argument("--results", type=Path, help="lines of an elastic campaign; faults that it has are left out")
    parser.add_argument("--keep", type=Path, help="the folder for the runs that failed (default: none is kept)")
    parser.add_argument(
        "--heartbeat-timeout", type=float, default=15.0, help="of elastic runs, in seconds (default 15)"
    )
    parser.add_argument("--faults-a-run", type=int, default=10, help="of an elastic campaign (default 10)")
    parser.add_argument("--state-mb", type=float, default=0.0, help="of parameters and optimizer of elastic runs")
    parser.add_argument("--gpu", action="store_true", help="processes of an elastic campaign share the first GPU")
    parser.add_argument("--goodput", type=float, metavar="S", help="measure runs of so many seconds")
    parser.add_argument("--arms", help="those of --goodput (default: all)")
    parser.add_argument("--join-mb", type=float, metavar="MB", help="measure the transfer of a state of this size")
    parser.add_argument(
        "--link", type=Link.parse, metavar="RATE/ROUND_TRIP", help="of --join-mb (default: the loopback device)"
    )
    args = parser.parse_args()
    kinds = args.kinds.split(",") if args.kinds else None
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # with the run and its folder
    if args.join_mb:
        return join.benchmark(args.join_mb, args.link)
    if args.goodput:
        return goodput.benchmark(args.goodput, args.arms and args.arms.split(","), args.heartbeat_timeout)
    if args.elastic:
        options = elastic.Options(
            args.seed,
            args.faults_a_run,
            args.heartbeat_timeout,
            args.state_mb,
            kinds,
            args.results,
            args.keep,
            args.gpu,
        )
        return elastic.campaign(range(args.first, args.first + args.faults), options)
    return restarts.campaign(args.faults, args.undisturbed, args.seed, kinds or tuple(restarts.FAULTS))


if __name__ == "__main__":
    sys.exit(main())
