"""The fonts of each split, all of which come with matplotlib and Pillow: nothing is read from the system.

A name is a file of matplotlib's, or `PILLOW` for the font inside Pillow. The fonts of the sealed test stand in
`sealed.json`.
"""

from functools import cache
from pathlib import Path

from PIL import ImageFont


PILLOW = "Pillow"
TRAIN = (
    "DejaVuSans",
    "DejaVuSans-Bold",
    "DejaVuSans-Oblique",
    "DejaVuSansMono",
    "DejaVuSansMono-Bold",
    "DejaVuSerif",
    "DejaVuSerif-Bold",
    "STIXGeneral",
    "STIXGeneralBol",
    "cmr10",
)
DEVELOPMENT = ("DejaVuSans-BoldOblique", "DejaVuSansMono-Oblique", "DejaVuSerif-Italic", "STIXGeneralItalic", "cmb10")
REMEDY = 'The fonts of the pictures come with matplotlib, which is not installed: pip install "matplotlib>=3.8"'


@cache
def _folder() -> Path:
    try:
        import matplotlib
    except ImportError:
        raise ValueError(REMEDY) from None
    return Path(matplotlib.get_data_path(), "fonts", "ttf")


def check_fonts(names: tuple[str, ...]) -> None:
    """Raises a `ValueError` if matplotlib is missing, or has no font of that name."""
    for name in names:
        if not (_folder() / f"{name}.ttf").is_file() and name != PILLOW:
            raise ValueError(f"Expected a font of matplotlib's, got {name!r}, which is not in {_folder()}.")


@cache
def font(name: str, size: int) -> ImageFont.FreeTypeFont:
    """A font of `size` pixels an em."""
    if name == PILLOW:
        loaded = ImageFont.load_default(size)
        assert isinstance(loaded, ImageFont.FreeTypeFont)
        return loaded
    # The basic layout is in every Pillow, so that all of them draw the same.
    return ImageFont.truetype(str(_folder() / f"{name}.ttf"), size, layout_engine=ImageFont.Layout.BASIC)


@cache
def x_height(name: str) -> float:
    """Height of a small x, in ems."""
    return -font(name, 200).getbbox("x", anchor="ls")[1] / 200
