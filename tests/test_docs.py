"""What README and the pages under docs/ show works: Python runs, commands parse, links lead somewhere, pages build."""

import difflib
import importlib
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxche.cli import main
from jaxche.cli._main import make_parser

ROOT = Path(__file__).parent.parent
# Those that `scripts/docs` writes into docs/reference are checked where they are built.
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "docs/reference/index.md"]
TEXTS = {str(path.relative_to(ROOT)): path.read_text(encoding="utf8") for path in PAGES}
README = TEXTS["README.md"]


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.S | re.M)


def prose(text):
    """The text without code."""
    return re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)


def anchors(text):
    """The anchors of the headings, as GitHub and MyST make them."""
    titles = re.findall(r"^#+ (.+)$", prose(text), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def commands():
    """Every `jaxche ...` of a bash block or a line of text."""
    found = [line.split("#")[0] for text in TEXTS.values() for b in blocks(text, "bash") for line in b.splitlines()]
    found += [span for text in TEXTS.values() for span in re.findall(r"`([^`\n]*jaxche [^`\n]*)`", text)]
    found = [line[line.index("jaxche ") :] for line in found if re.search(r"(^|\s|\()jaxche [a-z]", line)]
    return sorted({re.sub(r"[)\"]+$", "", line.split(" >")[0].strip()) for line in found})


# Each page in one namespace. Pages for the same number of devices share a process. Starting it and compiling, which is
# done for each device, take the time.
RUNNER = """
import json, runpy, sys, traceback, warnings
import jax, matplotlib

runpy.run_path(sys.argv[2])["share"]()
matplotlib.use("agg")
devices, pages = json.loads(sys.argv[1])
jax.config.update("jax_num_cpu_devices", devices)
warnings.simplefilter("error")
failed = {}
for page, blocks in pages.items():
    names = {}
    try:
        for i, block in enumerate(blocks):
            exec(compile(block, f"{page}, Python block {i + 1}", "exec"), names)
    except BaseException:
        failed[page] = traceback.format_exc()
with open("failed.json", "w") as file:
    json.dump(failed, file)
"""
RUN = {page: found for page, text in TEXTS.items() if page != "README.md" and (found := blocks(text, "python"))}
DEVICES = {page: 4 if page in ("docs/sharding.md", "docs/slow_links.md", "docs/stages.md") else 2 for page in RUN}


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    """The traceback of each page whose blocks do not run."""
    env, running = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}, {}
    for devices in set(DEVICES.values()):
        folder = tmp_path_factory.mktemp("pages")
        pages = json.dumps([devices, {page: RUN[page] for page in RUN if DEVICES[page] == devices}])
        with (folder / "output").open("w") as output:
            command = [sys.executable, "-c", RUNNER, pages, str(ROOT / "tests/compilation.py")]
            running[folder] = subprocess.Popen(command, cwd=folder, env=env, stdout=output, stderr=output)
    codes = {folder: process.wait() for folder, process in running.items()}
    found = {}
    for folder, code in codes.items():
        assert code == 0, (folder / "output").read_text(encoding="utf8")
        found |= json.loads((folder / "failed.json").read_text(encoding="utf8"))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN)
def test_the_python_blocks_run(page, failed):
    assert page not in failed, failed[page]


@pytest.mark.slow
def test_the_loops_of_the_readme_train(capsys):
    names = {}
    for i, block in enumerate(blocks(README, "python")):
        exec(compile(block, f"README.md, Python block {i + 1}", "exec"), names)
    # The linen loop, before and after.
    before, after = (float(x) for x in re.findall(r"epoch 2: loss ([\d.]+)", capsys.readouterr().out))
    assert after < 1
    assert before < 1
    # The nnx model was trained in place and goes on working.
    assert names["model"](names["x"]).shape == (256, 1)
    assert int(names["optimizer"].step[...]) > 3 * 16  # its own loop's, and more by the trainer
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(names["loss"].params))


def test_the_readme_fits_in_150_lines():
    assert len(README.splitlines()) <= 150
    assert README.count("![") == 1


def test_a_train_state_loop_changes_in_five_lines():
    before = next(block for block in blocks(README, "python") if "TrainState.create" in block)
    before = before[before.index("for epoch") :].splitlines()
    after = next(block for block in blocks(README, "python") if "state.replace" in block).splitlines()
    after = [line for line in after if line.strip() and not line.startswith("import jaxche")]
    added = [line for line in difflib.ndiff(before, after) if line.startswith("+ ")]
    assert len(added) <= 5, added


@pytest.mark.parametrize("command", commands())
def test_the_commands_are_understood(command, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command.replace("<name>", "mine"))
    assert make_parser().parse_args(words[1:])
    if "--emit" in words:
        monkeypatch.setattr("sys.argv", words)
        assert main(words[1:]) == 0
        assert capsys.readouterr().out.strip()


def test_the_search_finds_commands_and_blocks():
    """A search that finds nothing would pass everything."""
    assert len(commands()) > 20
    assert sum(len(blocks(text, "python")) for text in TEXTS.values()) > 25
    # A fence of another kind would be neither run nor parsed.
    fences = {fence for text in TEXTS.values() for fence in re.findall(r"^```(\S+)$", text, re.M)}
    assert fences <= {"python", "bash", "text", "bibtex", "{toctree}"}


def test_the_scripts_can_be_run():
    scripts = {script for text in TEXTS.values() for script in re.findall(r"scripts/\w+(?:\.py)?", text)}
    assert {"scripts/train", "scripts/test", "scripts/docs", "scripts/bench_cadence.py"} <= scripts
    for script in scripts:
        assert (ROOT / script).exists(), script
        assert script.endswith(".py") or os.access(ROOT / script, os.X_OK), script


@pytest.mark.parametrize("page", TEXTS)
def test_the_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(TEXTS[page])):
        if link.startswith("https://"):
            continue
        target, _, anchor = link.partition("#")
        path = (ROOT / page).parent / target if target else ROOT / page
        assert path.exists(), f"{page}: {link}"
        if anchor:
            assert anchor in anchors(path.read_text(encoding="utf8")), f"{page}: {link}"


def test_every_page_is_in_the_navigation():
    navigation = re.findall(r"^```\{toctree\}\n(.*?)^```", TEXTS["docs/index.md"], re.S | re.M)[0].split()
    pages = {page.removeprefix("docs/").removesuffix(".md") for page in TEXTS if page.startswith("docs/")}
    assert pages - {"index"} == {name for name in navigation if not name.startswith(":")}
    for page in pages - {"index", "reference/index"}:
        assert f"(docs/{page}.md)" in README, f"README.md names no docs/{page}.md"


class Sources(HTMLParser):
    """What a page loads: scripts, style sheets, images; and its anchors."""

    def __init__(self):
        super().__init__()
        self.loaded, self.ids = set(), set()

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.ids.add(given.get("id"))
        if tag == "link" and given.get("rel") not in ("canonical", "index", "next", "prev", "search"):
            self.loaded.add(given["href"])
        elif tag != "a" and given.get("src"):
            self.loaded.add(given["src"])


@pytest.fixture(scope="module")
def site(run_forked, tmp_path_factory):
    """The pages, as `scripts/docs` builds them."""
    folder = tmp_path_factory.mktemp("site")
    script = (ROOT / "scripts/docs").read_text(encoding="utf8")
    arguments = re.search(r"-m (sphinx .*) docs ", script)[1].split()
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    built = run_forked("-m", *arguments, "docs", folder, cwd=ROOT, env=env)
    assert built.returncode == 0, built.stderr
    return folder


def read(path):
    page = Sources()
    page.feed(path.read_text(encoding="utf8"))
    return page


@pytest.mark.slow
def test_the_reference_has_every_name(site):
    specification = importlib.util.spec_from_file_location("conf", ROOT / "docs/conf.py")
    conf = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(conf)
    assert len(conf.PACKAGES) > 8
    shown = set().union(*(read(site / f"reference/{package}.html").ids for package in conf.PACKAGES))
    for package in conf.PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            found = {f"{package}.{name}", f"jaxche.{name}", f"module-{package}.{name}"} & shown
            assert found or f"{package}.{name}" in conf.PACKAGES, f"{package}.{name} is on no page"


@pytest.mark.slow
def test_the_pages_load_nothing_from_a_network(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    for path in pages:
        away = [source for source in read(path).loaded if re.match(r"(https?:)?//", source)]
        assert not away, f"{path.name}: {away}"
    for path in [*site.rglob("*.css"), *site.rglob("*.js")]:
        assert not re.search(r"@import|url\(.?(https?:)?//", path.read_text(encoding="utf8")), path.name
    assert "<math" in (site / "how_it_works.html").read_text(encoding="utf8")


@pytest.mark.slow
def test_a_name_in_the_text_links_to_the_reference(site):
    assert 'href="reference/jaxche.html#jaxche.Trainer"' in (site / "getting_started.html").read_text(encoding="utf8")
