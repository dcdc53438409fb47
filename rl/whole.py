"""Files that are there whole or not at all."""

import os
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """A kill, or a power cut, leaves the old file or the new one."""
    temporary = path.with_suffix(path.suffix + ".new")
    with temporary.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
