"""What all pages share: how templates are read and rendered, and how a page gets to its place whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from timetrial.errors import UserError

if TYPE_CHECKING:
    import jinja2
    from markupsafe import Markup


def environment() -> jinja2.Environment:
    """The templates' jinja2 environment: all is escaped but `svg`, for charts are ours."""
    import jinja2  # here, not above: what merely imports this package pays for neither
    from markupsafe import Markup

    made = jinja2.Environment(
        loader=jinja2.PackageLoader("timetrial.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals["svg"] = Markup
    return made


def style(*names: str) -> Markup:
    """Style sheets of the package one after another, as markup."""
    from markupsafe import Markup

    folder = Path(__file__).parent / "templates"
    return Markup("\n".join((folder / name).read_text(encoding="utf-8") for name in names))


def check(option: str, path: Path | None, suffixes: tuple[str, ...] = ()) -> None:
    """Raise UserError, naming `option`, unless a file can be written at `path`: asked before the work, not after it.

    `suffixes`: how its name must end; any way where empty.
    """
    if path is None or (path.name and path.exists() and not path.is_file() and not path.is_dir()):
        return  # none is asked for, or it is a pipe or a device
    if not path.name:
        raise UserError(f"{option}: is no file's name; give one, such as {option} run{(suffixes or ('.html',))[0]}")
    if suffixes and not path.name.endswith(suffixes):
        raise UserError(f"{option} {path}: must end in {' or '.join(suffixes)}")
    if path.is_dir():
        raise UserError(f"{option} {path}: is a directory; give a file in it")
    folder = path.parent
    if not folder.is_dir():
        raise UserError(f"{option} {path}: there is no directory {folder}; make it first")
    if not os.access(folder, os.W_OK):
        raise UserError(f"{option} {path}: the directory {folder} cannot be written to")


def write(content: str, path: Path) -> Path:
    """Write a page beside `path` and rename it there; `path`. Raises UserError when it cannot be written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(content, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None
    return path
