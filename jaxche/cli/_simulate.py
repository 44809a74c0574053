"""`jaxche simulate`: simulates a cadence on devices of given speeds with a virtual clock."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import jaxche
from jaxche.cli._command import Command, writing
from jaxche.cli._options import Options, file_path

# The batches of a round are planned one by one, and the fastest device takes about so many times those of the slowest.
_MOST_SPREAD = 1e4
_SLOWDOWN = re.compile(r"(\d+)@(\d+)x(\d+\.?\d*|\.\d+)")

_ABOUT = """\
Devices of different speeds train copies of one model. Between two merges, which average the
copies, each device takes its own number of training steps (its count), so that none waits long.
ElChe, the controller, chooses the counts from measured times. Here it runs on a virtual clock:
nothing is trained, no device is needed, and it takes a second."""

_EPILOG = """\
examples:
  jaxche simulate --ms 20,50                                  two devices, 20 and 50 ms a step
  jaxche simulate --ms 20,50 --slowdown 0@50x2 --tuner both   device 0 slows down in round 50
  jaxche simulate --ranks 10000 --spread 4 --rounds 20        speeds between 20 and 80 ms
  jaxche simulate --ms 10,10,23 --sync-ms 45 -o fleet.png     and a plot

The table has some of the rounds. A round is the steps up to a merge, and the merge. The anchor is
the count of the slowest device; the others take as many steps as fit into the same time.
Efficiency 1 means that every device works all the time; waiting and merging lower it.
The default tuner of training, progress, cannot be simulated: it follows how fast a model changes.

exit codes:
  0     simulated
  2     invalid arguments
"""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    group = Options(parser, "devices")
    fleet = group.exclusive()
    fleet.add_numbers(
        "--ms 20,50", "MS,MS,...", "time of a training step on each device, in milliseconds (default: 20,50)"
    )
    fleet.add_integer(
        "--ranks 64",
        "number of devices of random speeds, in place of --ms; the fastest takes 20 ms a step",
        least=2,
        most=100_000,
    )
    group.add_number(
        "--spread 4",
        "X",
        "with --ranks: time of a step of the slowest device, relative to the fastest (default: 4)",
        least=1.0,
        most=_MOST_SPREAD,
    )
    group.add_number(
        "--jitter 0.05",
        "SHARE",
        "random variation of all times, e.g. 0.05 for 5 %% (default: 0)",
        most=1.0,
        default=0.0,
    )
    group.add(
        "--slowdown",
        type=_slowdown,
        metavar="RANK@ROUNDxFACTOR",
        help="a device that becomes slower: with 0@50x2 device 0, the first, takes twice as long from round 50 on",
    )
    group.add_number(
        "--first-report-ms 3000",
        "MS",
        "additional time of round 0 on each device, such as compilation (default: 0)",
        default=0.0,
    )
    group.add_integer(
        "--seed 0",
        "seed of the random speeds and times; the same seed gives the same run (default: 0)",
        least=0,
        default=0,
    )

    group = Options(parser, "rounds")
    group.add_number(
        "--sync-ms 8",
        "MS",
        "time of a merge, in milliseconds; jaxche doctor -n 2 measures it (default: %(default)g)",
        default=8.0,
    )
    group.add_integer("--rounds 100", "number of rounds (default: %(default)s)", default=100)

    group = Options(parser, "controller (ElChe)")
    group.add_integer(
        "--anchor 4",
        "count of the slowest device in the first round; later the controller chooses it (default: %(default)s)",
        most=200,
        default=4,
    )
    group.add_number(
        "--overhead-target 0.02",
        "SHARE",
        "time that merging and waiting may cost, relative to the steps, e.g. 0.02 for 2 %%; a smaller target "
        "makes longer rounds (default: %(default)g)",
        least=0.01,
        most=0.5,
        default=0.02,
    )
    group.add(
        "--tuner",
        choices=("seed", "steady", "both"),
        default="steady",
        help="how the controller follows the target: steady computes the shortest round that meets it, seed is the "
        "method of flodl, both runs one after the other (default: %(default)s)",
    )

    group = Options(parser, "files")
    group.add_out("a plot of the run, e.g. fleet.png; with --tuner both one file each (default: no plot)")
    group.add("--plot", dest="out", type=file_path, help=argparse.SUPPRESS)  # its earlier name


def _run(args: argparse.Namespace) -> int:
    fleet = _fleet(args)
    runs = {}
    for tuner in ("seed", "steady") if args.tuner == "both" else (args.tuner,):
        size = len(fleet.ms_per_batch)
        che = jaxche.ElChe(world_size=size, anchor=args.anchor, overhead_target=args.overhead_target, tuner=tuner)
        runs[tuner] = fleet.run(che, rounds=args.rounds)
    print(_describe(fleet))
    for tuner, done in runs.items():
        print(f"\ntuner {tuner}\n{done.table()}")
    for tuner, done in runs.items() if args.out else ():
        path = Path(args.out)
        _draw(done, path.with_stem(f"{path.stem}-{tuner}") if len(runs) > 1 else path)
    return 0


def _fleet(args: argparse.Namespace) -> jaxche.VirtualFleet:
    import numpy as np

    if args.spread is not None and args.ranks is None:
        raise ValueError("--spread is for random speeds; write --ranks 64 --spread 4, or give the speeds: --ms 20,50")
    if args.ranks is None:
        ms = np.array(args.ms or (20.0, 50.0))
    else:
        # Rank 0 is the fastest and the last rank the slowest, so that the spread is exact.
        between = np.random.default_rng(args.seed).uniform(1.0, args.spread or 4.0, args.ranks - 2)
        ms = 20.0 * np.array([1.0, *between, args.spread or 4.0])
    if len(ms) < 2:
        raise ValueError("a simulation needs two or more ranks; write e.g. --ms 20,50")
    changed = ms.copy()
    if args.slowdown is not None:
        if args.slowdown.rank >= len(ms):
            raise ValueError(
                f"--slowdown: there is no rank {args.slowdown.rank}, only 0 to {len(ms) - 1}; write --slowdown 1@50x2"
            )
        changed[args.slowdown.rank] *= args.slowdown.factor
    # As floats of Python, whose ratio may be infinite without a warning.
    given, slowed = (max(times) / min(times) for times in (ms.tolist(), changed.tolist()))
    if max(given, slowed) > _MOST_SPREAD:
        option, spread = ("--ms", given) if given > _MOST_SPREAD else ("--slowdown", slowed)
        raise ValueError(
            f"{option}: the slowest device takes {spread:.3g} times as long as the fastest, and at most "
            f"{_MOST_SPREAD:g} times are simulated; leave it out, e.g. --ms 20,50"
        )
    first = [args.first_report_ms] * len(ms) if args.first_report_ms else None
    return jaxche.VirtualFleet(
        ms.tolist(), args.jitter, args.sync_ms, slowdown=args.slowdown, first_report_ms=first, seed=args.seed
    )


def _describe(fleet: jaxche.VirtualFleet) -> str:
    ms = fleet.ms_per_batch
    text = f"{len(ms)} ranks, {min(ms):g} to {max(ms):g} ms a batch, {fleet.sync_ms:g} ms a merge"
    if fleet.jitter:
        text += f", jitter {100 * fleet.jitter:g} %"
    if fleet.slowdown is not None:
        text += f", rank {fleet.slowdown.rank} takes x {fleet.slowdown.factor:g} from round {fleet.slowdown.round}"
    return text


def _draw(done: jaxche.cadence.FleetRun, path: Path) -> None:
    figure = done.plot()
    formats = figure.canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        raise ValueError(f"--out {path}: the ending is none of {', '.join(formats)}; write e.g. --out fleet.png")
    with writing(path):
        figure.savefig(path, dpi=110)


def _slowdown(text: str) -> jaxche.cadence.Slowdown:
    match = _SLOWDOWN.fullmatch(text)
    if match is None or float(match[3]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no slowdown; write RANK@ROUNDxFACTOR, e.g. --slowdown 1@50x2")
    return jaxche.cadence.Slowdown(int(match[1]), int(match[2]), float(match[3]))


COMMAND = Command(
    "simulate",
    "simulate training on devices of given speeds, without the devices",
    _EPILOG,
    _add_arguments,
    _run,
    about=_ABOUT,
)
