"""Pictures of a few pixels in the place of the package of photographs."""

import zlib

from PIL import Image

from helpers.models.chat_models import drawing
from hf_xattn.demo.photographs.pictures import STAMPS, read_table


THINGS = read_table()


def make_stamps(folder):
    """A tiny picture for every file of the table, cut out of its background."""
    for file in {file for thing in THINGS for file in (*thing.trained, *thing.others)}:
        path = folder / STAMPS.folder / f"{file}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        stamp = Image.new("RGBA", (20, 14))
        stamp.paste(drawing(zlib.crc32(file.encode()), 12), (4, 1))
        stamp.save(path)
    return folder
