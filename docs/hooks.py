"""What the site needs beyond mkdocs: files from outside ``docs``, formulas, reST in docstrings, the flags of commands.

The pages are read in the repository, too, and link to files beside ``docs`` (``../examples/digits.py``). The site shows
such a file below ``repository/``: code and Markdown as pages, all else as it is. Formulas become MathML, which browsers
draw by themselves, so neither building nor reading the site needs the network.
"""

from __future__ import annotations

import argparse
import html
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

import griffe
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|[/#])([^)\s#]+)")
MATH = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
# Code, which stays as it is, or a number with its error and interval.
MEASURED = re.compile(
    r"<pre.*?</pre>|<code.*?</code>|\d(?: ± [\d.]+(?: \[[−+][\d.]+, [−+])?| \[[−+][\d.]+, [−+])", re.DOTALL
)
NOT_SHOWN = re.compile(r"^See :class:`\w+`\.$|^:meta private:$", re.MULTILINE)  # documented by the base class; internal
ROLE = re.compile(r":(\w+):`([^`]+)`")
CODE = re.compile(r"`[^`]+`")
TABLE_ROW = re.compile(r"^\|.*\|$", re.MULTILINE)
TABLE = re.compile(r"^(=+(?:  +=+)+)\n(.*)\n\1\n(.*?)\n\1$", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Take in the files outside ``docs`` that a page links to, and those that they link to in turn."""
    waiting = list(files.documentation_pages())
    while waiting:
        page = waiting.pop()
        for link in LINK.findall(page.content_string):
            place = _repository_path(page.src_uri, link)
            target = _site_path(place)
            if target is None or files.get_file_from_path(target) is not None:
                continue
            if place.endswith(".py"):
                text = f"# {place}\n\n````python\n{(ROOT / place).read_text()}````\n"
                file = File.generated(config, target, content=text)
            else:
                file = File.generated(config, target, abs_src_path=str(ROOT / place))
            files.append(file)
            if place.endswith(".md"):
                waiting.append(file)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links that leave ``docs``, or come back to it, to where the site has their files; mend code in tables."""

    def to_site(match: re.Match[str]) -> str:
        target = _site_path(_repository_path(page.file.src_uri, match[0]))
        return match[0] if target is None else posixpath.relpath(target, posixpath.dirname(page.file.src_uri))

    if page.file.src_uri == "command-line.md":
        markdown = markdown.replace("The built site lists every flag here.\n\n<!-- commands -->", _commands())
    # The repository's pages ask for a backslash before a bar in the code of a table; here it would be seen.
    markdown = TABLE_ROW.sub(lambda row: CODE.sub(lambda code: code[0].replace(r"\|", "|"), row[0]), markdown)
    return LINK.sub(to_site, markdown)


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Write formulas as MathML, and keep numbers with their errors and intervals on one line."""
    content = MATH.sub(lambda match: _mathml(html.unescape(match[2]), block=match[1] == "div"), content)
    return MEASURED.sub(lambda match: match[0] if match[0][0] == "<" else match[0].replace(" ", "\u00a0"), content)


def _commands() -> str:
    """Return the flags of every command as Markdown."""
    sys.path.insert(0, str(ROOT / "src"))
    from tiltsam.cli import build_parser

    parts = []
    for name, parser in build_parser()[1].items():
        parts.append(f"## tiltsam {name}\n\n{parser.description or parser.format_usage()}\n")
        if parser.epilog:
            lines = [line.strip() for line in re.sub(r"^examples?:", "", parser.epilog).split("\n")]
            parts.append("```\n" + "\n".join(filter(None, lines)).replace("; tiltsam", "\ntiltsam") + "\n```\n")
        for group in parser._action_groups:
            rows = [_flag(parser, action) for action in group._group_actions if action.dest != "help"]
            if rows:
                title = {"options": "flag", "positional arguments": "argument"}.get(group.title or "", group.title)
                parts.append("\n".join([f"| {title} | |", "|---|---|", *rows]) + "\n")
    return "\n".join(parts).replace("%%", "%")


def _flag(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    choices = ",".join(map(str, action.choices)) if action.choices else ""
    value = "" if action.nargs == 0 else str(action.metavar or (f"{{{choices}}}" if choices else action.dest.upper()))
    name = ", ".join(action.option_strings)
    text = parser._get_formatter()._expand_help(action) if action.help else ""
    cells = [f"`{name} {value}`".replace(" `", "`") if name else f"`{value}`", html.escape(text, quote=False)]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _mathml(tex: str, *, block: bool) -> str:
    # The converter turns letters into double-struck ones within braces alone, sets functions without a space after
    # them, and bars with one on each side.
    formula = convert(re.sub(r"\\mathbb +(\w)", r"\\mathbb{\1}", tex), display="block" if block else "inline")
    formula = re.sub(r"<mo[^>]*>&#x0007C;</mo>", "<mi>|</mi>", formula)
    return re.sub(r"(<mi>(?:cos|exp|log|sin)</mi>)(?!<mo)", r'\1<mspace width="0.17em" />', formula)


def _repository_path(src_uri: str, link: str) -> str:
    """Return the repository path of a link of a page of the site."""
    source = src_uri.removeprefix("repository/") if src_uri.startswith("repository/") else f"docs/{src_uri}"
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def _site_path(place: str) -> str | None:
    """Return the path of a file of the repository in the site, or ``None`` if there is no such file."""
    if place.startswith("..") or not (ROOT / place).is_file():
        return None
    if place.startswith("docs/"):
        return place.removeprefix("docs/")
    return f"repository/{place}.md" if place.endswith(".py") else f"repository/{place}"


class Rest(griffe.Extension):
    """Turns the reST of docstrings into Markdown: roles, formulas, simple tables, literal blocks."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **kwargs: Any) -> None:
        """Rewrite the docstrings of a package once all of it is known."""
        self._rewrite(pkg)

    def _rewrite(self, thing: griffe.Object) -> None:
        if thing.docstring is not None:
            thing.docstring.value = _markdown(thing.docstring.value, thing)
        for name, member in list(thing.members.items()):
            if isinstance(member, griffe.Object):
                if member.docstring is not None and NOT_SHOWN.search(member.docstring.value):
                    del thing.members[name]
                else:
                    self._rewrite(member)


def _markdown(text: str, thing: griffe.Object) -> str:
    text = ROLE.sub(lambda match: _role(match[1], match[2], thing), text)
    text = re.sub(r"^ *\.\. code-block::.*\n|(?<=:):$", "", text, flags=re.MULTILINE)
    text = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)  # the one that is read as doctests
    return TABLE.sub(lambda match: _table(*match.groups()), text)


def _role(kind: str, target: str, thing: griffe.Object) -> str:
    if kind == "math":
        return f"${target}$"
    shown = target.removeprefix("~")
    label = shown.rpartition(".")[2] if target.startswith("~") else shown
    # A name without an entry on its page stays plain code.
    return f'<autoref optional identifier="{_full_path(shown, thing)}"><code>{label}</code></autoref>'


def _full_path(name: str, thing: griffe.Object) -> str:
    """Return the path at which a name in a docstring of ``thing`` is defined."""
    first, _, rest = name.partition(".")
    try:
        path = thing.resolve(first) if first != "tiltsam" else first
        return str(thing.modules_collection[f"{path}.{rest}" if rest else path].canonical_path)
    except (griffe.GriffeError, KeyError):
        return name


def _table(rule: str, head: str, body: str) -> str:
    edges = [match.start() for match in re.finditer(r"=+", rule)]

    def row(line: str) -> str:
        cells = [line[a:b].strip().replace("|", r"\|") for a, b in zip(edges, [*edges[1:], None], strict=True)]
        return f"| {' | '.join(cells)} |"

    return "\n".join([row(head), "|---" * len(edges) + "|", *map(row, body.splitlines())])
