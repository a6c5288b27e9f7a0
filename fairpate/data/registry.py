"""Every data set the project knows, by name: the loaders of pictures, and the tables that `codebooks/` declares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fairpate.config import DataConfig
from fairpate.data import celeba, chexpert, color_digits, color_mnist, fairface, utkface
from fairpate.data.declared.declaration import read_declaration
from fairpate.data.declared.reader import entry_of
from fairpate.data.entry import DatasetEntry, DataSettingsError
from fairpate.data.files import sha256_of
from fairpate.names import nearest

CODEBOOKS = Path(__file__).with_name("codebooks")
_PICTURES = (color_digits, color_mnist, utkface, fairface, celeba, chexpert)


class Registry(Mapping[str, DatasetEntry]):
    """The loaders of pictures, and a table for each YAML file in ``folder``, read when it is first asked for.

    A file is called as the data set that it declares; :class:`DataSettingsError` where it is not, or is wrong.
    """

    def __init__(self, folder: Path) -> None:
        self._entries: dict[str, DatasetEntry] = {module.ENTRY.name: module.ENTRY for module in _PICTURES}
        self._files = {path.stem: path for path in sorted(folder.glob("*.yaml"))}

    def __getitem__(self, name: str) -> DatasetEntry:
        if name not in self._entries:
            path = self._files[name]
            entry = entry_of(read_declaration(path))
            if entry.name != name:
                raise DataSettingsError(f"{path}: name: expected {name}, as the file is called, got {entry.name}.")
            self._entries[name] = entry
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*(module.ENTRY.name for module in _PICTURES), *self._files)))

    def __len__(self) -> int:
        return len(list(iter(self)))


REGISTRY: Mapping[str, DatasetEntry] = Registry(CODEBOOKS)


def option_showing_attribute(name: str, options: Mapping[str, Any], entry: DatasetEntry | None = None) -> str | None:
    """The option of data set ``name`` that makes the sensitive attribute a feature; None where none does.

    ``entry`` is that of a declared table. What else may be wrong with the name or the options is not this function's to
    say.
    """
    known = entry.options if entry is not None else REGISTRY[name].options if name in REGISTRY else {}
    for option, choice in known.items():
        if choice.shows_attribute is not None and options.get(option, choice.default) == choice.shows_attribute:
            return option
    return None


def entry_for(config: DataConfig) -> DatasetEntry:
    """The entry that ``config`` means: of a known data set, or of the declaration that it names.

    :class:`DataSettingsError` for an unknown name, a declaration that is wrong or not the one that was configured.
    """
    if config.declaration is None:
        return find_entry(config.name)
    path, entry = config.declaration.path, entry_of(read_declaration(config.declaration.path))
    if sha256_of(path) != config.declaration.sha256:
        raise DataSettingsError(f"data.declaration: {path} has changed since; restore it, or start a new run folder.")
    if entry.name in REGISTRY:
        raise DataSettingsError(f"{path}: name: {entry.name} is a known data set; give the table another name.")
    if entry.name != config.name:
        raise DataSettingsError(f"data.name: expected {entry.name}, as {path} says, got {config.name}.")
    return entry


def find_entry(name: str) -> DatasetEntry:
    """The entry called ``name``; :class:`DataError` with the nearest known name."""
    if name not in REGISTRY:
        raise DataSettingsError(f"data.name: unknown data set {name!r}{nearest(name, REGISTRY)}.")
    return REGISTRY[name]
