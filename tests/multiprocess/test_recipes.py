"""The callbacks of docs/recipes.md in two processes: they decide alike, and one of them writes."""

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs/recipes.md").read_text(encoding="utf8")
pytestmark = pytest.mark.usefixtures("forked")


def blocks_of(*headings):
    """The Python blocks before the first heading, and those under these."""
    introduction, *sections = re.split(r"^## ", PAGE, flags=re.M)
    chosen = [introduction, *(section for section in sections if section.split("\n")[0] in headings)]
    assert len(chosen) == 1 + len(headings)
    return [block for text in chosen for block in re.findall(r"^```python\n(.*?)^```", text, re.S | re.M)]


def test_two_processes_stop_and_keep_the_best_alike(script, launcher):
    blocks = blocks_of("Early stopping", "The best parameters", "Moving average of the parameters")
    assert len(blocks) == 6
    run = launcher(
        script(f"""
            import jax, jaxche
            jaxche.initialize(timeout_s=60)
            names = {{}}
            for block in {blocks!r}:
                exec(block, names)
                if "stop_early" in block:
                    print("stopped", names["state"].round, names["stopper"].best_metric)
            trainer, best = names["trainer"], names["best"]
            print("best", best.round, names["best_loss"], float(trainer.params(best)["out"].sum()))
            print("average", float(names["average"]["out"].sum()), names["manager"] is not None)
        """)
    )
    output, errors = run.communicate(timeout=300)
    assert run.returncode == 0, errors
    told = {(rank, name): rest for rank, name, rest in re.findall(r"\[(\d)\] (stopped|best|average) (.*)", output)}
    assert len(told) == 6, output + errors
    assert told["0", "stopped"] == told["1", "stopped"]
    assert told["0", "best"] == told["1", "best"]
    (own, writes), (other, reads) = (told[rank, "average"].split() for rank in "01")
    assert own == other
    assert (writes, reads) == ("True", "False")
