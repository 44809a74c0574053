"""Configuration of Sphinx; ``scripts/docs`` builds the pages. No page loads anything from a network."""

import importlib
import pkgutil
import re
from pathlib import Path

import latex2mathml.converter
from docutils import nodes
from sphinx.addnodes import pending_xref

import jaxche

project = "jaxche"
author = "The jaxche authors"
version = release = jaxche.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3  # as GitHub makes them, so that a link to a heading works in both places
html_theme = "furo"
html_title = f"jaxche {version}"
html_copy_source = False
templates_path = []
exclude_patterns = []

autodoc_typehints = "none"  # docstrings give types and shapes
autodoc_member_order = "groupwise"
napoleon_use_rtype = False
napoleon_use_ivar = True  # an attribute in a docstring and the field of its dataclass are one object
highlight_language = "python"

FOLDER = Path(__file__).parent
# One page for the names of `jaxche` itself, one for each of its packages. `cli` is documented by `--help`, and
# `checkpoints`, `distributed` and `replicas` serve the other packages.
PACKAGES = [f"jaxche.{module.name}" for module in pkgutil.iter_modules(jaxche.__path__) if module.ispkg]
INTERNAL = {"jaxche.checkpoints", "jaxche.cli", "jaxche.distributed", "jaxche.messages", "jaxche.replicas"}
PACKAGES = ["jaxche", *(name for name in PACKAGES if name not in INTERNAL), "jaxche.scaling.noise_scale"]


def write_reference(app):
    """Write the page of each package to docs/reference: every name of its ``__all__``, in full on one page only."""
    for package in PACKAGES:
        module = importlib.import_module(package)
        names = sorted(module.__all__, key=str.lower)
        elsewhere = [] if package == "jaxche" else [name for name in names if name in jaxche.__all__]
        lines = [f"# {package}", "", *(module.__doc__ or "").splitlines(), ""]
        if elsewhere:
            lines += ["Also in this package: " + ", ".join(f"`jaxche.{name}`" for name in elsewhere) + ".", ""]
        for name in names:
            if name in elsewhere or f"{package}.{name}" in PACKAGES:
                continue
            value = getattr(module, name)
            kind = "autoclass" if isinstance(value, type) else "autofunction" if callable(value) else "py:data"
            members = ["   :members:"] if kind == "autoclass" else []
            # Its rounds are a class of their own, which is on no page.
            members += ["   :inherited-members:"] if name == "Trainer" else []
            lines += ["```{eval-rst}", f".. {kind}:: {package}.{name}", *members, "```", ""]
        page, text = FOLDER / "reference" / f"{package}.md", "\n".join(lines)
        if not page.exists() or page.read_text(encoding="utf8") != text:
            page.write_text(text, encoding="utf8")


def link_names(app, doctree):
    """Link ``jaxche.Name`` in code font to its entry in the reference."""
    for literal in list(doctree.findall(nodes.literal)):
        name = re.match(r"(jaxche\.[\w.]+)", literal.astext())
        if name and not isinstance(literal.parent, (nodes.reference, pending_xref)):
            link = pending_xref(
                "", refdomain="py", reftype="obj", reftarget=name[1], refdoc=app.env.docname, refexplicit=True
            )
            literal.replace_self(link)
            link += literal


def visit_math(translator, node):
    """Formulas are MathML, which browsers draw without a script."""
    display = "block" if isinstance(node, nodes.math_block) else "inline"
    translator.body.append(latex2mathml.converter.convert(node.astext(), display=display))
    raise nodes.SkipNode


def setup(app):
    app.connect("builder-inited", write_reference)
    app.connect("doctree-read", link_names)
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math, None))
    return {"parallel_read_safe": True}


html_math_renderer = "mathml"
