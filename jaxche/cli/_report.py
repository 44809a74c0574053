"""`jaxche report`: writes a run as one self-contained HTML file."""

from __future__ import annotations

import argparse
import html
import io
import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jaxche
from jaxche.cli._command import Command, write_text
from jaxche.cli._options import Options, directory_path
from jaxche.cli._result import Result, result_rows
from jaxche.cli._run_folder import read_json
from jaxche.messages import html_table

_EPILOG = """\
examples:
  jaxche report runs/mine                        writes runs/mine/report.html
  jaxche report runs/mine -o /tmp/mine.html      writes another file
  jaxche report runs/mine --open                 opens it in the browser

A run is a folder with a history.jsonl, or, after --compare, with one such folder for each policy.
The report of an unfinished run ends with its last round.

exit codes:
  0     written
  2     invalid arguments, or no run in that folder
"""

# Rounds in the table of a run.
_ROUNDS = 20

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 960px; margin: 2em auto; padding: 0 1em; color: #222; }
h1 { font-size: 1.5em; margin-bottom: 0; }
h2 { font-size: 1.15em; margin: 1.8em 0 0.4em; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { padding: 3px 12px 3px 0; text-align: right; }
th:first-child, td:first-child { text-align: left; }
tr { border-bottom: 1px solid #e4e4e4; }
thead tr { border-bottom: 2px solid #999; }
svg { max-width: 100%; height: auto; }
.quiet { color: #666; }
details { margin: 1em 0; }
pre { white-space: pre-wrap; }
"""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        type=directory_path,
        metavar="RUN",
        help="folder of the run, as jaxche train names it at its end, e.g. runs/mine",
    )
    Options(parser).add_out("the page (default: report.html in the folder of the run)")
    parser.add_argument("--open", action="store_true", help="open the page in the browser")


def _run(args: argparse.Namespace) -> int:
    folder = Path(args.folder)
    path = Path(args.out) if args.out else folder / "report.html"
    write_text(path, page(folder))
    if args.open:
        import webbrowser

        webbrowser.open(path.resolve().as_uri())
    else:
        print(f"next: open {path} in a browser, or {shlex.join(['jaxche', 'report', args.folder, '--open'])}")
    return 0


def page(folder: Path) -> str:
    """The HTML page of a run."""
    result = _read_result(folder / "result.json")
    histories = _histories(folder, list(result.get("results", ())))
    name = html.escape(folder.resolve().name)
    parts = [f"<h1>{name}</h1>", f"<p class=quiet>{html.escape(_described(result, histories))}</p>"]
    if result.get("results"):
        parts += ["<h2>Result</h2>", _results(result)]
    for policy, history in histories.items():
        history.memory = tuple(result.get("results", {}).get(policy, {}).get("memory", ()))
        title = f"policy {policy}" if len(histories) > 1 else "The run"
        parts.append(f"<h2>{html.escape(title)}</h2>{_svg(history)}")
        titles, *rows = jaxche.reports.text_rows(history, _ROUNDS)
        shown = f"the last {len(rows)} of {len(history)} rounds"
        parts.append(f"<details><summary>{shown}</summary>{html_table(titles, rows)}</details>")
    if result:
        kept = {key: result[key] for key in ("command", "arguments", "versions", "devices", "pace_ms") if key in result}
        text = html.escape(json.dumps(kept, indent=2))
        parts.append(f"<details><summary>how it was made</summary><pre>{text}</pre></details>")
    head = f'<meta charset="utf-8"><title>{name}</title><style>{_STYLE}</style>'
    return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(parts)}</body></html>\n"


def _read_result(path: Path) -> dict[str, Any]:
    """The results of a run, empty without a file; ValueError for one of another form, e.g. of another program."""
    result = read_json(path) or {}
    try:
        results = result.get("results", {})
        if results.values():
            _results(result)
        for memory in (one.get("memory", ()) for one in results.values()):
            for row in memory:
                [row[name] / 2**20 for name in ("rank", "in all", *memory[0])]
        " ".join(result.get("command", ()))
    except (TypeError, AttributeError, LookupError, ValueError, ZeroDivisionError) as error:
        raise ValueError(
            f"{path} has another form than that of jaxche train ({type(error).__name__}: {error}); write "
            f"{shlex.join(['mv', str(path), f'{path}.other'])}, and jaxche report shows the rounds of history.jsonl"
        ) from error
    return result


def _histories(folder: Path, policies: Sequence[str]) -> dict[str, jaxche.History]:
    """The history of each policy by its name; the name of the directory for a run of one policy."""
    found = [folder / "history.jsonl"] if (folder / "history.jsonl").exists() else list(folder.glob("*/history.jsonl"))
    found.sort(key=lambda path: (policies.index(path.parent.name) if path.parent.name in policies else -1, path))
    # The last line may be half written.
    read = {path.parent.name: jaxche.History.from_json(path, skip_damaged=True) for path in found}
    histories = {name: history for name, history in read.items() if history}
    if not histories:
        raise ValueError(
            f"no run in {folder}: it has no history.jsonl with a round; write e.g. jaxche report runs/mine"
        )
    if len(histories) == len(policies) == 1:
        return dict(zip(policies, histories.values(), strict=True))
    return histories


def _described(result: dict[str, Any], histories: dict[str, jaxche.History]) -> str:
    world = len(next(iter(histories.values()))[0].counts)
    seconds = sum(history.seconds for history in histories.values())
    text = f"{world} replica{'s' if world > 1 else ''}, {sum(map(len, histories.values()))} rounds in {seconds:.1f} s"
    if "task" in result:
        text = f"task {result['task']}, {text}"
    if "command" in result:
        text += f": {' '.join(result['command'])}"
    return text


def _results(result: dict[str, Any]) -> str:
    """The table of results, with a column for each policy."""
    rows = result_rows([Result.from_dict(one) for one in result["results"].values()], result["metric"])
    head = rows.pop(0) if len(result["results"]) > 1 else ["", *result["results"]]
    return html_table(head, rows)


def _svg(history: jaxche.History) -> str:
    """The plot as an SVG element."""
    drawn = io.StringIO()
    history.plot().savefig(drawn, format="svg")
    text = drawn.getvalue()
    # HTML allows no document type here, and readers do not need the metadata.
    return re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.S)


COMMAND = Command(
    "report",
    "write a run as one HTML file with its pictures and tables",
    _EPILOG,
    _add_arguments,
    _run,
    usage="%(prog)s RUN [options]",
)
