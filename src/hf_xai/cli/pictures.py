"""Pictures side by side: one row for each way of sampling, one column for each sample."""

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

CELL = 96  # pixels; pictures below this size are enlarged without smoothing
MARGIN = 6
FONT_SIZE = 14


def write_grid(path: Path, rows: Mapping[str, "Sequence[Image]"], columns: Sequence[str]) -> None:
    """Writes a labelled grid of pictures of one size.

    Args:
        path: The PNG file.
        rows: Pictures of each row, by its label.
        columns: Label of each column.
    """
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(size=FONT_SIZE)
    first = next(iter(rows.values()))[0]
    scale = max(1, round(CELL / max(first.size)))
    width, height = first.width * scale, first.height * scale
    left = 2 * MARGIN + max(int(font.getlength(label)) for label in rows)
    top = 2 * MARGIN + FONT_SIZE
    size = (left + len(columns) * (width + MARGIN), top + len(rows) * (height + MARGIN))
    sheet = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(sheet)
    for column, label in enumerate(columns):
        center = (left + column * (width + MARGIN) + width // 2, top // 2)
        draw.text(center, label, fill="black", font=font, anchor="mm")
    for row, (label, pictures) in enumerate(rows.items()):
        y = top + row * (height + MARGIN)
        draw.text((left - MARGIN, y + height // 2), label, fill="black", font=font, anchor="rm")
        for column, picture in enumerate(pictures):
            enlarged = picture.resize((width, height), Image.Resampling.NEAREST)
            sheet.paste(enlarged, (left + column * (width + MARGIN), y))
    sheet.save(path)


def data_uri(picture: "Image") -> str:
    """A picture as a PNG inside an address, for a page without files beside it."""
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
