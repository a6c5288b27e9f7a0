"""What a page makes a browser ask for by itself."""

import re
from html.parser import HTMLParser

FETCHED = {"src", "srcset", "poster", "data", "action", "formaction", "background", "manifest"}
IN_A_STYLE = re.compile(r"(?:@import|url\(|src\s*:)\s*['\"]?\s*((?:https?:)?//[^'\")\s]+)", re.IGNORECASE)
IN_A_SCRIPT = re.compile(r"(?:fetch\(|import\(|importScripts\(|from\s+)\s*['\"`]((?:https?:)?//[^'\"`]+)")


class References(HTMLParser):
    """Addresses that a browser asks by itself; links that a reader may follow are none."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found = IN_A_STYLE.findall(text) + IN_A_SCRIPT.findall(text)
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            asked = name in FETCHED or (name == "href" and tag not in ("a", "area"))
            if asked and re.match(r"\s*(https?:)?//", value or "", re.IGNORECASE):
                self.found.append(value or "")
