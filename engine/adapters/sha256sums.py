"""The SHA256SUMS file that may lie beside an adapter's files, as sha256sum writes it: one line a file.

<64 hexadecimal digits>  adapter_model.safetensors
"""

from __future__ import annotations

import re

from engine.adapters.files import SUMS_FILE
from engine.errors import AdapterRefused

_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](?:\./)?(.+)", re.ASCII)  # a star: read in binary mode


def parse_sums(content: bytes) -> dict[str, str]:
    """File name -> digest. Raises AdapterRefused: a file that is there to be believed must be readable."""
    lines = content.decode(errors="replace").splitlines()
    matches = [_LINE.fullmatch(line) for line in lines if line.strip()]
    if None in matches:
        raise AdapterRefused(f"{SUMS_FILE} is not as sha256sum writes it", param=SUMS_FILE)
    return {match[2]: match[1].lower() for match in matches if match}
