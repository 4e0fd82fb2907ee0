"""Checks a site that was built: links lead somewhere, figures have texts, code fits its boxes.

python docs/check.py docs/_build/html
"""

import re
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

NO_PAGES = {"_modules", "_sources", "_static"}  # code, what pages are made from, and templates
WIDTH = 88  # of a line of code
FILES = (".png", ".svg", ".jpg", ".gif")


class Page(HTMLParser):
    """What a page links to, the anchors that it has, its code, and its figures without a text."""

    def __init__(self, path: Path):
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.silent: list[str] = []
        self.remote: list[str] = []
        text = path.read_text("utf-8")
        boxes = re.findall("<pre>(.*?)</pre>", text, re.DOTALL)
        self.code = unescape(re.sub("<.*?>", "", "\n".join(boxes))).splitlines()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Notes a link, an anchor, or a figure."""
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        text = values.get("alt", "").strip()
        if tag == "img" and (not text or text.endswith(FILES)):  # Sphinx's own text is the path
            self.silent.append(values.get("src", ""))
        source = values.get("src") or (values.get("href") if tag == "link" else "") or ""
        is_fetched = tag in ("script", "img") or values.get("rel") == "stylesheet"
        if is_fetched and urlsplit(source).scheme in ("http", "https"):
            self.remote.append(source)


def check(site: Path) -> tuple[int, int, list[str]]:
    """Returns how many pages and links there are, and what is wrong."""
    pages = {
        path.resolve(): Page(path)
        for path in sorted(site.rglob("*.html"))
        if not set(path.relative_to(site).parts) & NO_PAGES
    }
    wrong = []
    count = 0
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        wrong += [f"{name}: a figure without a text, {source}" for source in page.silent]
        wrong += [f"{name}: fetched from a network, {source}" for source in page.remote]
        if name.parts[0] != "api":  # there docstrings set the width
            wrong += [f"{name}: too long, {line}" for line in page.code if len(line) > WIDTH]
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            count += 1
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.exists():
                wrong.append(f"{name}: {link} leads nowhere")
            elif target in pages:
                anchors = pages[target].anchors | {""}
                if unquote(parts.fragment) not in anchors:
                    wrong.append(f"{name}: {link} has no such place")
    return len(pages), count, wrong


def main() -> None:
    """Checks the site whose folder is given."""
    pages, links, wrong = check(Path(sys.argv[1]))
    print(f"{pages} pages, {links} links inside of the site, {len(wrong)} wrong")
    if wrong or not pages:
        sys.exit("\n".join(dict.fromkeys(wrong)) or "there is no page")


if __name__ == "__main__":
    main()
