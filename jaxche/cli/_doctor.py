"""`jaxche doctor`: checks this machine, and the processes of a run, before training."""

from __future__ import annotations

import argparse
import os
import socket
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import jaxche
from jaxche.cli import _doctor_checks as checks
from jaxche.cli import _doctor_devices as device_checks
from jaxche.cli._command import Command, exit_at_once, join, paint, print_error
from jaxche.cli._doctor_checks import Finding
from jaxche.cli._options import Options, directory_path
from jaxche.messages import aligned

_COLUMNS = 100
_ROWS = 16
# The bytes of a million parameters, and of all measured all-reduces.
_MILLION = 4 * 2**20
_SIZES = (4 * 2**10, 256 * 2**10, _MILLION, 32 * 2**20)
_CLOCK_MS = 1000.0

_EPILOG = """\
examples:
  jaxche doctor                          this machine
  jaxche doctor -n 2                     two processes on this machine, their link and clocks
  srun -N 2 jaxche doctor                the processes of Slurm, mpirun or jaxche launch
  jaxche doctor --store s3://bucket/run  this machine and an object store

exit codes:
  0     healthy
  1     a problem; the line says what to write
  2     invalid arguments
"""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    options = Options(parser)
    options.add_processes("number of processes to start, between which links are measured (default: 1, no links)")
    options.add(
        "--store",
        type=directory_path,
        metavar="URL",
        help="also check that a store can be written: a folder, s3://... or gs://...",
    )
    options.add_number(
        "--timeout 60",
        "S",
        "seconds to wait for devices to start, and for the other processes (default: %(default)g)",
        above=True,
        default=60.0,
    )


def _run(args: argparse.Namespace) -> int:
    import jax

    try:
        # Not `initialize` without a launcher, which refuses GPUs of several kinds: processes started here may take one.
        is_alone = jaxche.cluster.detect(os.environ).launcher == "none"
        info = jaxche.cluster.ClusterInfo(0, 1, "none") if is_alone else join(args.timeout)
    except (ValueError, TimeoutError) as error:
        print_error("doctor", f"the processes cannot join: {error}")
        # The exit handlers of Python would wait for the missing processes.
        return exit_at_once(1) if jax.distributed.is_initialized() else 1
    if info.launcher == "none" and (args.processes or 1) > 1:
        command = [sys.executable, "-m", "jaxche", *args.words]
        return jaxche.cluster.launch(command, args.processes, prefix=False, only_rank0=True)
    with device_checks.plugin_errors() as errors:
        started = device_checks.start_devices(args.timeout)
    if not started:
        # Without the CUDA line: its libraries may hang like the devices.
        driver = device_checks.read_driver()
        drivers = [] if driver == device_checks.Driver() else [device_checks.driver_finding(driver)]
        _print([checks.versions(), checks.machine(), *drivers, device_checks.not_started(args.timeout)])
        exit_at_once(1)
    findings = _examine(args.store if info.process_id == 0 else None, info.launcher, errors)
    if info.num_processes == 1:
        _print(findings)
        return _verdict(findings, "jaxche doctor -n 2 measures between processes; jaxche train trains a small model")
    try:
        return _together(findings, info, args.timeout)
    except (RuntimeError, TimeoutError) as error:
        # A device or a link failed.
        _print(findings)
        print_error("doctor", f"process {info.process_id}: {error}")
        exit_at_once(1)


def _examine(store: str | None, launcher: str, errors: Sequence[str]) -> list[Finding]:
    devices = device_checks.device_finding()
    text = {"none": "none: a single process", "jaxche": "jaxche launch, or JAXCHE_* variables"}
    findings = [
        checks.versions(),
        checks.machine(),
        *device_checks.gpu_findings(os.environ, errors),
        devices,
        Finding("launcher", text.get(launcher, launcher)),
        checks.variables(os.environ),
        checks.allocation(os.environ),
        checks.proxies(os.environ),
        checks.ports(),
    ]
    if not devices.fix:
        findings += [checks.compilation(), checks.cache()]
    if store is not None:
        findings.append(checks.store(store))
    return findings


def _together(findings: list[Finding], info: jaxche.cluster.ClusterInfo, timeout_s: float) -> int:
    """Compare the processes; all call this, process 0 prints and returns the exit code."""
    import jax

    mine = {
        "host": socket.gethostname(),
        "kind": jaxche.sharding.local_devices()[0].device_kind,
        "devices": len(jaxche.sharding.local_devices()),
        "free": checks.free_memory_gib(),
        "problems": [finding for finding in findings if finding.fix],
    }
    reports = jaxche.cluster.all_gather("doctor", mine, timeout_s)
    offsets = jaxche.cluster.clocks(timeout_s)
    # Replicas on devices of several kinds merge on their hosts.
    mixed = len({one["kind"] for one in reports}) > 1 or any(map(jaxche.sharding.is_private, jaxche.sharding.devices()))
    links = jaxche.cluster.measure_all_reduce(_SIZES, jax.devices("cpu") if mixed else jax.devices())
    jax.distributed.shutdown()
    if info.process_id != 0:
        return 0

    for rank, report in enumerate(reports[1:], 1):
        findings += [Finding(f"process {rank}", f"{name}: {text}", fix) for name, text, fix in report["problems"]]
    worst, clock = max(enumerate(offsets), key=lambda found: abs(found[1].ahead_ms))
    if abs(clock.ahead_ms) - clock.error_ms > _CLOCK_MS:
        text = f"process {worst} is {clock.ahead_ms / 1e3:.1f} s ahead of process 0"
        findings.append(Finding("clocks", text, "chronyd -q"))
    _print(findings)
    _print_processes(reports, offsets)
    _print_links(links, "between hosts (where replicas merge)" if mixed else "between devices")
    return _verdict(findings, f"jaxche launch -n {info.num_processes} train.py, or jaxche train")


def _print_processes(reports: Sequence[Mapping[str, Any]], offsets: Sequence[jaxche.cluster.Clock]) -> None:
    print(f"\n{len(reports)} processes")
    rows = [["process", "host", "devices", "memory free", "clock ahead"]]
    for rank, (one, clock) in enumerate(list(zip(reports, offsets, strict=True))[:_ROWS]):
        free = f"{one['free']:.1f} GiB" if one["free"] else "unknown"
        ahead = f"{clock.ahead_ms:.1f} ± {clock.error_ms:.1f} ms" if rank else "0"
        rows.append([str(rank), one["host"][:24], f"{one['devices']} x {one['kind'][:28]}", free, ahead])
    print(aligned(rows, left=len(rows[0]), indent=2))
    if len(reports) > _ROWS:
        print(f"  and {len(reports) - _ROWS} more")


def _print_links(links: Mapping[int, float], where: str) -> None:
    print(f"\nall-reduce {where}, bytes a device")
    rows = [["size", "time", "rate"]]
    for size, ms in links.items():
        shown = f"{size >> 20} MiB" if size >= 2**20 else f"{size >> 10} KiB"
        rows.append([shown, f"{ms:.2f} ms", f"{size / ms / 1e6:.3f} GB/s"])
    print(aligned(rows, left=len(rows[0]), indent=2))
    ms = links[_MILLION]
    print(f"  A model of a million parameters merges in {ms:.0f} ms, which is 1.5 % of a round of {ms / 15:.1f} s.")


def _print(findings: Sequence[Finding]) -> None:
    for finding in findings:
        mark, how = ("BAD", "bad") if finding.fix else ("ok", "good")
        start = f"{mark:4s}{finding.name:11s}"
        text = textwrap.fill(finding.text, _COLUMNS, initial_indent=start, subsequent_indent=" " * len(start))
        print(paint(text[:4], how) + text[4:])
        if finding.fix:
            print(textwrap.fill(f"write: {finding.fix}", _COLUMNS, initial_indent=" " * 15, subsequent_indent=" " * 22))


def _verdict(findings: Sequence[Finding], then: str) -> int:
    bad = [finding for finding in findings if finding.fix]
    if bad:
        print(f"\n{paint(f'{len(bad)} problem(s).', 'bad')} Next: {bad[0].fix}")
        return 1
    print(f"\n{paint('healthy.', 'good')} Next: {then}")
    return 0


COMMAND = Command("doctor", "check this machine and its links, and measure their speed", _EPILOG, _add_arguments, _run)
