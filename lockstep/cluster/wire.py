"""Messages between the driver and its workers as bytes: msgpack, which holds plain values alone and runs nothing when read."""

from __future__ import annotations

from typing import Any

import msgpack


def dumps(value: Any) -> bytes:
    """Return lists, dicts, texts, numbers and bytes as one message. Raises TypeError for anything else."""
    message: bytes = msgpack.packb(value, unicode_errors="surrogatepass")
    return message


def loads(message: bytes) -> Any:
    """Reverse `dumps`; tuples come back as lists."""
    return msgpack.unpackb(message, unicode_errors="surrogatepass", strict_map_key=False)
