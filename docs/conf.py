"""The site: pages of `docs`, notebooks that are run, and the API from the docstrings.

python -m sphinx -W --keep-going -b html docs docs/_build/html
"""

import inspect
import os
import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx import addnodes
from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the examples import experiments, which no wheel holds

import gossipjax  # noqa: E402

SECTIONS = ("Args", "Attributes", "Raises", "Returns", "Yields", "References", "Example", "Note")
# Types that a signature shows by their names, and not by what they stand for.
ALIASES = {
    "ArrayLike": "ArrayLike",
    "WireLike": "gossipjax.wire.WireLike",
    "optax.ScalarOrSchedule": "optax.ScalarOrSchedule",
    "optax.Schedule": "optax.Schedule",
}
# Constants whose text autodoc does not find, as another module assigns them.
CONSTANTS = {
    "gossipjax.launch.MALLOC_ENVIRONMENT": "Variables of glibc, with which a process keeps memory "
    "that it has freed. The launcher sets them with `--keep-memory`, its default. They make steps "
    "on CPUs faster, and cost memory where models are large.",
    "gossipjax.wire.WireLike": "What `wire=` takes: a codec, or the floating-point type of a "
    "`FloatCodec`, such as `jnp.bfloat16`.",
}
# Classes whose names differ from those of functions by a capital, which some disks cannot tell.
TWINS = ("asynchronous.Account", "asynchronous.Outer", "faults.Account")
# Where types of other packages are described; {} is the name.
ADDRESSES = {
    "jax": "https://docs.jax.dev/en/latest/_autosummary/jax.{}.html",
    "jax.sharding": "https://docs.jax.dev/en/latest/jax.sharding.html#jax.sharding.{}",
    "jax.typing": "https://docs.jax.dev/en/latest/jax.typing.html",
    "numpy": "https://numpy.org/doc/stable/reference/generated/numpy.{}.html",
    "optax": "https://optax.readthedocs.io/en/latest/api/transformations.html#optax.{}",
    "pathlib": "https://docs.python.org/3/library/pathlib.html#pathlib.{}",
}
TYPES = {
    **dict.fromkeys(("Array", "ShapeDtypeStruct"), "jax"),
    **dict.fromkeys(("Mesh", "PartitionSpec"), "jax.sharding"),
    **dict.fromkeys(("ArrayLike", "DTypeLike"), "jax.typing"),
    **dict.fromkeys(("dtype", "ndarray"), "numpy"),
    **dict.fromkeys(("GradientTransformation", "GradientTransformationExtraArgs"), "optax"),
    **dict.fromkeys(("OptState", "Params", "Updates"), "optax"),
    "Path": "pathlib",
}
PAGE = re.compile(r"`?\bdocs/([\w/]+)\.md`?")  # how docstrings name a page, for `help`
EMPHASIS_OR_MARK = re.compile(r"(?<!\S)(\*\w+\*)(?!\w)|[|*]")

project = "gossipjax"
author = "the gossipjax authors"
copyright = "2026, the gossipjax authors"
version = release = gossipjax.__version__
extensions = [
    "myst_nb",
    "sphinx_design",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx.ext.mathjax",
    "sphinx_copybutton",
    "sphinx-mathjax-offline",
]
exclude_patterns = ["_build", "_templates"]
templates_path = ["_templates"]

# GitHub's own names: a site that it builds says where its repository is.
repository = "/".join(
    (
        os.environ.get("GITHUB_SERVER_URL", "https://github.com"),
        os.environ.get("GITHUB_REPOSITORY", "OWNER/gossipjax"),
    )
)
html_theme = "sphinx_book_theme"
html_title = "gossipjax"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {
    "show_toc_level": 2,
    "collapse_navbar": True,  # each page would hold the names of all others
    "repository_url": repository,
    "use_repository_button": "GITHUB_REPOSITORY" in os.environ,
    "navbar_persistent": [],  # the search is in the sidebar
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}

myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
myst_heading_anchors = 3
nb_execution_mode = "force"
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_merge_streams = True

default_role = "code"  # a single backtick is code, as everywhere in the docstrings
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_type_aliases = ALIASES
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
autosummary_filename_map = {f"gossipjax.{name}": f"gossipjax.{name}-class" for name in TWINS}
autodoc_preserve_defaults = True
napoleon_use_rtype = False
napoleon_use_ivar = True
napoleon_attr_annotations = False  # the signature has the types
suppress_warnings = ["config.cache", "mystnb.unknown_mime_type"]


def join_code(lines: list[str]) -> list[str]:
    """Joins a line with the next where code between backticks goes on."""
    joined: list[str] = []
    for line in lines:
        is_open = joined and joined[-1].count("`") % 2 and ">>>" not in joined[-1]
        if is_open and line.strip():
            joined[-1] += f" {line.strip()}"
        else:
            joined.append(line)
    return joined


def describe_data(app: Sphinx, what: str, name: str, thing: Any, *rest: Any) -> None:
    """Gives a constant its text; napoleon takes what is before a colon in its line for a type."""
    if what == "data":
        first, *others = [CONSTANTS[name]] if name in CONSTANTS else rest[-1]
        rest[-1][:] = [*first.split(" ", 1), *others]


def name_aliases(app: Sphinx, what: str, name: str, thing: Any, *rest: Any) -> tuple[Any, ...]:
    """Sphinx forgets the name of an alias within a union."""
    _, *texts = rest
    return tuple(text and re.sub(r"TypeAliasForwardRef\('(.+?)'\)", r"\1", text) for text in texts)


def mark_formulas(app: Sphinx, what: str, name: str, thing: Any, *rest: Any) -> None:
    """An indented part after an empty line, outside of `Args:` and the like, stays as it is."""
    lines = rest[-1]
    marked: list[str] = []
    is_section = is_literal = False
    for line in join_code(inspect.cleandoc("\n".join(lines)).splitlines()):
        indent = len(line) - len(line.lstrip())
        if line.strip() and not indent:
            is_section = line.startswith(SECTIONS)
            is_literal = False
        begins = indent >= 4 and not is_section and not is_literal and not "".join(marked[-1:])
        if begins:
            marked += ["::", ""]
            is_literal = True
        is_item = line.lstrip().startswith("- ") and "".join(marked[-1:])
        if is_item and not marked[-1].lstrip().startswith(("- ", "  ")) and not is_literal:
            marked.append("")  # a list begins after an empty line
        marked.append(line)
    lines[:] = marked


def escape_bars(app: Sphinx, what: str, name: str, thing: Any, *rest: Any) -> None:
    """`|x|` is a norm, and `*` a product, unless it stresses a word.

    What follows code at once, as a plural does, is text.
    """
    lines = rest[-1]
    is_literal = False
    for index, line in enumerate(lines):
        if line.strip() and not line.startswith("  "):
            is_literal = False
        is_literal |= line.strip() == "::"
        if is_literal or line.lstrip().startswith((">>>", "...")):
            continue
        parts = line.split("`")
        for even in range(0, len(parts), 2):
            parts[even] = EMPHASIS_OR_MARK.sub(
                lambda found: found[1] or rf"\{found[0]}", parts[even]
            )
            if even and re.match(r"[\w@]", parts[even]):
                parts[even] = rf"\ {parts[even]}"
        lines[index] = "`".join(parts)


def link_pages(app: Sphinx, what: str, name: str, thing: Any, *rest: Any) -> None:
    """The name of a page is a link to it."""
    lines = rest[-1]
    lines[:] = [PAGE.sub(r":doc:`docs/\1.md </\1>`", line) for line in lines]


def link_types(app: Sphinx, environment: Any, node: Any, content: Any) -> Any:
    """A type of another package is a link to its description there."""
    name = node["reftarget"].rpartition(".")[2]
    if node.get("reftype") != "class" or name not in TYPES:
        return None
    return nodes.reference("", "", content, refuri=ADDRESSES[TYPES[name]].format(name))


class Repository(Directive):
    """The commands that install from the repository, with its `extras`, and a link to it."""

    option_spec = {"extras": str}  # noqa: RUF012

    def run(self) -> list[nodes.Node]:
        """Returns the commands, with the address of the repository."""
        extras = self.options.get("extras")
        what = f'".[{extras}]"' if extras else "."
        environment = "python3 -m venv .venv && . .venv/bin/activate"
        commands = f"git clone {repository}\ncd gossipjax\n{environment}\npip install {what}"
        block = nodes.literal_block(commands, commands, language="sh")
        if "OWNER" in repository:  # a site that is built elsewhere does not know its address
            return [block]
        link = nodes.reference("", repository.split("//")[1], refuri=repository)
        return [block, nodes.paragraph("", "", nodes.Text("Repository: "), link)]


def setup(app: Sphinx) -> None:
    """Registers the hooks; they run before napoleon's."""
    app.add_directive("repository", Repository)
    app.connect("autodoc-process-docstring", mark_formulas, priority=100)
    app.connect("autodoc-process-docstring", escape_bars, priority=110)
    app.connect("autodoc-process-docstring", describe_data, priority=120)
    app.connect("autodoc-process-docstring", link_pages, priority=130)
    app.connect("autodoc-process-signature", name_aliases)
    app.connect("missing-reference", link_types)
    app.add_role("code", make_code)


def make_code(role: str, rawtext: str, text: str, lineno: int, inliner: Any, *rest: Any) -> Any:
    """A single backtick: code as it stands, and a link where it is a name of the reference."""
    code = nodes.literal(rawtext, text.replace("\x00", "\\"))
    environment = inliner.document.settings.env
    link = addnodes.pending_xref(
        rawtext,
        code,
        refdomain="py",
        reftype="obj",
        refdoc=environment.docname,
        reftarget=re.sub(r"^gx\.", "gossipjax.", code.astext()),
    )
    for name in ("py:module", "py:class"):
        link[name] = environment.ref_context.get(name)
    return [link], []
