"""Small JPEG pictures inside records."""

import base64
import io
from typing import Any

QUALITIES = (90, 80, 70, 60, 50, 40, 30, 20)


def jpeg_uri(image: Any, max_bytes: int) -> str:
    """Return a Pillow image as a JPEG data URI of the best quality within `max_bytes`, or the least."""
    data = b""
    for quality in QUALITIES:
        buffer = io.BytesIO()
        image.save(buffer, format="JPEG", quality=quality)
        data = buffer.getvalue()
        if len(data) <= max_bytes:
            break
    return f"data:image/jpeg;base64,{base64.b64encode(data).decode()}"
