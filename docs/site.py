"""A hook of mkdocs: links to files of the repository that are no pages keep their text alone."""

import re

OUTSIDE = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?:\.\./)+[^)\s]*\)")


def on_page_markdown(markdown, page, config, files):
    """Links from ``docs/`` to ``../rlmath/...``; links between pages and records stay."""
    depth = page.file.src_uri.count("/")

    def text(match):
        target = match[0].rsplit("](", 1)[1]
        return match[1] if target.count("../") > depth else match[0]

    return OUTSIDE.sub(text, markdown)
