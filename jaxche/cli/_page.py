"""`jaxche report`: a run as one HTML file that needs nothing else."""

from __future__ import annotations

import argparse
import html
import io
import json
import re
import shlex
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxche.cli._arguments import file, folder
from jaxche.cli._command import Command
from jaxche.cli._report import Result, result_rows
from jaxche.cli._write import read_whole
from jaxche.drawing import html_table, per_rank
from jaxche.training import History

_EXAMPLES = """\
examples:
  jaxche report runs/mine                        writes runs/mine/report.html
  jaxche report runs/mine --out /tmp/mine.html   somewhere else
  jaxche report runs/mine --open                 and shows it in the browser

A run is a folder with a history.jsonl, or, after --compare, with one such folder for each policy.
A run that is still going on, or was cut off, is reported up to its last round.

exit codes:
  0     written
  2     there is no run in that folder, or the arguments make no sense
"""

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


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=folder, metavar="RUN", help="folder of the run, e.g. runs/mine")
    parser.add_argument("--out", type=file, metavar="FILE", help="where to write (default: report.html in that folder)")
    parser.add_argument("--open", action="store_true", help="show it in the browser")


def _run(args: argparse.Namespace) -> int:
    folder = Path(args.folder)
    path = Path(args.out) if args.out else folder / "report.html"
    path.write_text(page(folder), encoding="utf8")
    print(f"written to {path}")
    if args.open:
        webbrowser.open(path.resolve().as_uri())
    else:
        print(f"next: open {path} in a browser, or {shlex.join(['jaxche', 'report', args.folder, '--open'])}")
    return 0


def page(folder: Path) -> str:
    """The page of a run.

    Args:
      folder: of the run.

    Returns:
      HTML with its pictures inside.

    Raises:
      ValueError: a folder without a run.
    """
    result = read_whole(folder / "result.json") or {}
    histories = _histories(folder, list(result.get("results", ())))
    name = html.escape(folder.resolve().name)
    parts = [f"<h1>{name}</h1>", f"<p class=quiet>{html.escape(_described(result, histories))}</p>"]
    if result.get("results"):
        parts += ["<h2>Result</h2>", _results(result)]
    for policy, history in histories.items():
        history.memory = tuple(result.get("results", {}).get(policy, {}).get("memory", ()))
        title = f"policy {policy}" if len(histories) > 1 else "The run"
        parts.append(f"<h2>{html.escape(title)}</h2>{_svg(history)}")
        shown = history[-20:]
        parts.append(
            f"<details><summary>the last {len(shown)} of {len(history)} rounds</summary>{_rounds(shown)}</details>"
        )
    if result:
        kept = {key: result[key] for key in ("command", "arguments", "versions", "devices", "pace_ms") if key in result}
        text = html.escape(json.dumps(kept, indent=2))
        parts.append(f"<details><summary>how it was made</summary><pre>{text}</pre></details>")
    head = f'<meta charset="utf-8"><title>{name}</title><style>{_STYLE}</style>'
    return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(parts)}</body></html>\n"


def _histories(folder: Path, policies: Sequence[str]) -> dict[str, History]:
    """The history of each policy, by its name; of a run of one policy under the name of the folder."""
    found = [folder / "history.jsonl"] if (folder / "history.jsonl").exists() else list(folder.glob("*/history.jsonl"))
    found.sort(key=lambda path: (policies.index(path.parent.name) if path.parent.name in policies else -1, path))
    histories = {path.parent.name: _read(path) for path in found}
    histories = {name: history for name, history in histories.items() if history}
    if not histories:
        raise ValueError(
            f"no run in {folder}: it has no history.jsonl with a round; write e.g. jaxche report runs/mine"
        )
    if len(histories) == len(policies) == 1:
        return dict(zip(policies, histories.values(), strict=True))
    return histories


def _read(path: Path) -> History:
    return History.from_json(path, skip_damaged=True)  # the last line may be half written


def _described(result: dict[str, Any], histories: dict[str, History]) -> str:
    world = len(next(iter(histories.values()))[0].counts)
    seconds = sum(history.seconds for history in histories.values())
    text = f"{world} replica{'s' if world > 1 else ''}, {sum(map(len, histories.values()))} rounds in {seconds:.1f} s"
    if "task" in result:
        text = f"task {result['task']}, {text}"
    if "command" in result:
        text += f": {' '.join(result['command'])}"
    return text


def _results(result: dict[str, Any]) -> str:
    """What each policy reached, a column a policy."""
    rows = result_rows([Result.from_dict(one) for one in result["results"].values()], result["metric"])
    head = rows.pop(0) if len(result["results"]) > 1 else ["", *result["results"]]
    return html_table(head, rows)


def _rounds(history: History) -> str:
    rows = history.rows()
    return html_table(list(rows[0]), [[_cell(value, key) for key, value in row.items()] for row in rows])


def _cell(value: Any, key: str) -> str:
    if isinstance(value, tuple):
        return per_rank(value, "{:.1f}" if key.endswith("ms") else "{:g}")
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _svg(history: History) -> str:
    """The picture as an element of the page."""
    drawn = io.StringIO()
    history.plot().savefig(drawn, format="svg")
    text = drawn.getvalue()
    # The head names a document type, which only a file of its own may have; who made it is of no use to the reader.
    return re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.S)


COMMAND = Command(
    "report",
    "write a run as one HTML file with its pictures and tables",
    _EXAMPLES,
    _arguments,
    _run,
    usage="%(prog)s RUN [options]",
    refusals=(ValueError, ImportError, OSError),
)
