"""How Sphinx builds the documentation: `make docs`. No page loads anything from the network."""

from __future__ import annotations

import re

from sphinx.application import Sphinx

project = "rlhf-tasks"
html_title = "rlhf-tasks"
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
html_use_index = False
html_theme_options: dict[str, object] = {"top_of_page_buttons": []}
extensions = ["myst_parser"]
exclude_patterns = ["_build"]
myst_heading_anchors = 4
nitpicky = True
highlight_language = "text"
pygments_style, pygments_dark_style = "friendly", "monokai"

PAGE_LINK = re.compile(r"\]\(([\w/-]+)\.md\)")


def add_contents(app: Sphinx, name: str, source: list[str]) -> None:
    """Make the pages that an index page links to its table of contents, in the order of the links.

    The pages stay plain Markdown, which GitHub shows too.
    """
    if name.split("/")[-1] == "index":
        pages = dict.fromkeys(PAGE_LINK.findall(source[0]))
        source[0] += "\n\n```{toctree}\n:hidden:\n\n" + "\n".join(pages) + "\n```\n"


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_contents)
