"""What a page says: its blocks, the commands in them, and whether an output is the one that it shows."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(
    r"((?:^<!--[^\n]*?(?:\n[^\n]+?)*?-->\n\s*)*)^( *)```([^\n]*)\n(.*?)^\2```$", re.MULTILINE | re.DOTALL
)
NOTE = re.compile(r"<!-- *(.*?) *-->", re.DOTALL)
LANGUAGES = {
    "bash",
    "console",
    "python",
    "javascript",
    "typescript",
    "json",
    "text",
    "toml",
    "yaml",
    "ini",
    "promql",
} | {"nginx"}

ID = r"(?P<id>\b[a-z]+-[0-9a-f]{16}\b|\bGPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b)"
LOOSE = {
    "anything": r"\.\.\.",
    "time": r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:\d\d)?",
    "length": r"\b(?:\d+(?:\.\d+)?(?: ?(?:ms|s|m|h|d))\b ?)+",
    "process": r"(?<=pid )\d+|(?<=\"pid\":)\s?\d+",
    "port": r"(?<=MASTER_PORT=)\d+|(?<=MASTER_PORT\": \")\d+|(?<=MASTER_PORT\":\")\d+",
    "space": r"\s+",
}
TOKEN = re.compile("|".join([ID, *(f"(?P<{kind}>{shape})" for kind, shape in LOOSE.items())]))


@dataclass(frozen=True)
class Block:
    """A fenced block, with the comments in front of it."""

    language: str
    text: str
    line: int
    notes: tuple[str, ...] = ()

    def note(self, kind: str) -> str | None:
        """What a comment of this kind says; "" if it is only the word; None without one."""
        said = [note[len(kind) :].lstrip(": ") for note in self.notes if note.startswith(kind)]
        return "\n".join(said) if said else None


@dataclass
class Names:
    """What the page calls something, and what it is called in this run."""

    real: dict[str, str] = field(default_factory=dict)

    def apply(self, command: str) -> str:
        """The command with the names of this run."""
        return re.sub(ID, lambda found: self.real.get(found.group(), found.group()), command)

    def learn(self, expected: str, printed: str) -> bool:
        """Whether the output is the expected one; if so, the ids in it are known from then on."""
        seen: dict[str, str] = {}
        shape = re.compile("".join(self._pieces(expected.strip(), seen)), re.DOTALL)
        found = shape.fullmatch(printed.strip())
        if found is None:
            return False
        new = {name: found[group] for name, group in seen.items()}
        if len({*new.values(), *self.real.values()}) < len({*new, *self.real}):
            return False  # two ids of the page would be one
        self.real |= new
        return True

    def _pieces(self, expected: str, seen: dict[str, str]) -> list[str]:
        pieces, at = [], 0
        for token in TOKEN.finditer(expected):
            pieces.append(re.escape(expected[at : token.start()]))
            pieces.append(self._piece(token, seen))
            at = token.end()
        return [*pieces, re.escape(expected[at:])]

    def _piece(self, token: re.Match[str], seen: dict[str, str]) -> str:
        name = token.group()
        if token.lastgroup == "id":
            if name in self.real:
                return re.escape(self.real[name])
            if name in seen:
                return f"(?P={seen[name]})"
            seen[name] = f"n{len(seen)}"
            return f"(?P<{seen[name]}>{ID.replace('?P<id>', '?:')})"
        match token.lastgroup:
            case "anything":
                return ".*?"
            case "space":
                return r"\s*\n\s*" if "\n" in name else r"[ \t]+"
            case kind:
                return f"(?:{LOOSE[str(kind)]})"


def blocks(page: Path) -> list[Block]:
    """The blocks of a page in their order."""
    text = page.read_text()
    return [
        Block(
            language=found[3].strip(),
            text=re.sub(rf"^{found[2]}", "", found[4], flags=re.MULTILINE),
            line=text.count("\n", 0, found.start(2)) + 1,
            notes=tuple(NOTE.findall(found[1])),
        )
        for found in BLOCK.finditer(text)
    ]


def commands(session: str) -> list[tuple[str, str]]:
    """The commands of a console block, each with the output that is shown after it."""
    turns: list[tuple[list[str], list[str]]] = []
    for line in session.splitlines():
        if line.startswith("$ "):
            turns.append(([line[2:]], []))
            continue
        typed, printed = turns[-1]
        if not printed and (typed[-1].endswith("\\") or line.startswith("> ")):
            typed.append(line.removeprefix("> "))
        else:
            printed.append(line)
    return [("\n".join(typed), "\n".join(printed)) for typed, printed in turns]
