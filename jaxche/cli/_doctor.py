"""`jaxche doctor`: whether this machine, and a run of several processes, can train."""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import textwrap
from collections.abc import Sequence

from jaxche.cli import _health
from jaxche.cli._arguments import folder, number, whole
from jaxche.cli._command import Command
from jaxche.cli._health import Finding
from jaxche.cli._joined import joined, launcher
from jaxche.cli._paint import paint
from jaxche.cluster import ClusterInfo, clocks, launch, measure_all_reduce, share
from jaxche.drawing import aligned
from jaxche.sharding import devices, is_private, local_devices

_COLUMNS = 100
_ROWS = 16
_SIZES = (4 * 2**10, 256 * 2**10, 4 * 2**20, 32 * 2**20)
_CLOCK_MS = 1000.0

_EXAMPLES = """\
examples:
  jaxche doctor                          this machine
  jaxche doctor -n 2                     two processes here: link and clocks too
  srun -N 2 jaxche doctor                the processes of Slurm; mpirun and jaxche launch alike
  jaxche doctor --store s3://bucket/run  and whether an object store can be used

exit codes:
  0     healthy
  1     something is wrong; the line says what to write
  2     the arguments make no sense
"""


def _arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-n", "--processes", type=whole("-n 2"), help="start so many here and measure between them")
    add("--store", type=folder, metavar="URL", help="write to and read from this store: a folder, s3://..., gs://...")
    add(
        "--timeout",
        type=number("--timeout 60", above=True),
        default=60.0,
        metavar="S",
        help="seconds to wait for devices to start, and for the other processes (default: %(default)g)",
    )


def _run(args: argparse.Namespace) -> int:
    import jax

    try:
        info = joined(args.timeout) if launcher() != "none" else ClusterInfo(0, 1, "none")
    except (ValueError, TimeoutError) as error:
        sys.stderr.write(f"jaxche doctor: the processes cannot meet: {error}\n")
        sys.stderr.flush()
        if jax.distributed.is_initialized():
            # Python's own exit would wait for the very processes that did not answer.
            os._exit(1)
        return 1
    if info.launcher == "none" and (args.processes or 1) > 1:
        command = [sys.executable, "-m", "jaxche", *args.words]
        return launch(command, args.processes, prefix=False, only_rank0=True)
    if not _health.start_devices(args.timeout):
        _print([_health.versions(), _health.machine(), _health.hung(args.timeout)])
        sys.stdout.flush()
        os._exit(1)  # Python's own exit could wait for them
    findings = _examine(args.store if info.process_id == 0 else None, info.launcher)
    if info.num_processes == 1:
        _print(findings)
        return _verdict(findings, "jaxche doctor -n 2 measures between processes; jaxche train shows it all at work")
    try:
        return _together(findings, info, args.timeout)
    except (RuntimeError, TimeoutError) as error:
        # The devices of this process do not start, or a link broke: the others do not come to Python's exit either.
        _print(findings)
        sys.stderr.write(f"jaxche doctor: process {info.process_id}: {error}\n")
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(1)


def _examine(store: str | None, launcher: str) -> list[Finding]:
    findings = [_health.versions(), _health.machine(), _health.devices()]
    text = {"none": "none: this process is on its own", "jaxche": "jaxche launch, or JAXCHE_* variables"}
    findings.append(Finding("launcher", text.get(launcher, launcher)))
    findings += [_health.variables(os.environ), _health.proxies(os.environ), _health.ports()]
    if not findings[2].mend:
        findings += [_health.compilation(), _health.cache()]
    if store is not None:
        findings.append(_health.store(store))
    return findings


def _together(findings: list[Finding], info: ClusterInfo, timeout_s: float) -> int:
    """The part that all processes do at once; process 0 speaks and gives the exit code."""
    import jax

    mine = {
        "host": socket.gethostname(),
        "kind": local_devices()[0].device_kind,
        "devices": len(local_devices()),
        "free": _health.free_memory_gib(),
        "problems": [finding for finding in findings if finding.mend],
    }
    told = share("doctor", info.process_id, info.num_processes, json.dumps(mine), timeout_s)
    others = [json.loads(text) for text in told]
    compared = clocks(info.process_id, info.num_processes, timeout_s)
    # One program runs on one kind of device; where kinds differ, replicas merge on their hosts.
    mixed = len({one["kind"] for one in others}) > 1 or any(map(is_private, devices()))
    links = measure_all_reduce(_SIZES, jax.devices("cpu") if mixed else jax.devices())
    jax.distributed.shutdown()
    if info.process_id != 0:
        return 0
    assert compared is not None

    for rank, other in enumerate(others[1:], 1):
        findings += [Finding(f"process {rank}", f"{name}: {text}", mend) for name, text, mend in other["problems"]]
    worst = max(range(len(compared)), key=lambda rank: abs(compared[rank].ahead_ms))
    if abs(compared[worst].ahead_ms) - compared[worst].error_ms > _CLOCK_MS:
        findings.append(
            Finding(
                "clocks", f"process {worst} is {compared[worst].ahead_ms / 1e3:.1f} s ahead of process 0", "chronyd -q"
            )
        )
    _print(findings)
    print(f"\n{info.num_processes} processes")
    rows = [["process", "host", "devices", "memory free", "clock ahead"]]
    for rank, (one, clock) in enumerate(list(zip(others, compared, strict=True))[:_ROWS]):
        free = f"{one['free']:.1f} GiB" if one["free"] else "unknown"
        ahead = f"{clock.ahead_ms:.1f} ± {clock.error_ms:.1f} ms" if rank else "0"
        rows.append([str(rank), one["host"][:24], f"{one['devices']} x {one['kind'][:28]}", free, ahead])
    print(aligned(rows, left=len(rows[0]), indent=2))
    if len(others) > _ROWS:
        print(f"  and {len(others) - _ROWS} more")
    where = "between hosts (where replicas merge)" if mixed else "between devices"
    print(f"\nall-reduce {where}, bytes a device")
    rows = [["size", "time", "rate"]]
    for size, ms in links:
        shown = f"{size >> 20} MiB" if size >= 2**20 else f"{size >> 10} KiB"
        rows.append([shown, f"{ms:.2f} ms", f"{size / ms / 1e6:.3f} GB/s"])
    print(aligned(rows, left=len(rows[0]), indent=2))
    ms = links[2].ms
    print(
        f"  A model of a million parameters merges in {ms:.0f} ms; for that to be 1.5 %, rounds take {ms / 15:.1f} s."
    )
    return _verdict(findings, f"jaxche launch -n {info.num_processes} train.py, or jaxche train")


def _print(findings: Sequence[Finding]) -> None:
    for finding in findings:
        mark, how = ("BAD", "bad") if finding.mend else ("ok", "good")
        start = f"{mark:4s}{finding.name:11s}"
        text = textwrap.fill(finding.text, _COLUMNS, initial_indent=start, subsequent_indent=" " * len(start))
        print(paint(text[:4], how) + text[4:])
        if finding.mend:
            print(
                textwrap.fill(f"write: {finding.mend}", _COLUMNS, initial_indent=" " * 15, subsequent_indent=" " * 22)
            )


def _verdict(findings: Sequence[Finding], then: str) -> int:
    bad = [finding for finding in findings if finding.mend]
    if bad:
        print(f"\n{paint(f'{len(bad)} problem(s).', 'bad')} Next: {bad[0].mend}")
        return 1
    print(f"\n{paint('healthy.', 'good')} Next: {then}")
    return 0


COMMAND = Command(
    "doctor",
    "whether this machine and its links can train, and how fast they are",
    _EXAMPLES,
    _arguments,
    _run,
    refusals=(ValueError,),
)
