"""Colours of all figures: the Okabe-Ito palette, safe for colour-blind readers, with one colour per method.

It has eight colours; those of SAM's variants are further ones that can be told apart on light and dark pages.
"""

__all__ = [
    "METHOD_COLORS",
    "METHOD_COLORS_ON_DARK",
    "OKABE_ITO",
    "OTHER_COLOR",
    "color_of",
    "method_class",
    "method_color",
]

OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
"""Blue, vermilion, green, purple, orange, sky blue, black, yellow."""

METHOD_COLORS = {
    "erm": "#0072B2",
    "sam": "#D55E00",
    "tsam": "#009E73",
    "pgn": "#CC79A7",
    "rsam": "#E69F00",
    "esam2": "#56B4E9",
    "asam": "#000000",
    "gsam": "#88BB66",
    "looksam": "#AA0000",
    "friendlysam": "#BB55FF",
    "wsam": "#883333",
    "usam": "#7700FF",
    "msam": "#7700BB",
}
"""Colour of each method in every figure."""

METHOD_COLORS_ON_DARK = METHOD_COLORS | {"asam": "#F2F2F2"}
"""Colours on a dark page, where black would be invisible."""

OTHER_COLOR = "#808080"
"""Colour of methods that are not in :data:`METHOD_COLORS`."""


def method_color(method: str) -> str:
    """Return the colour of a method, or :data:`OTHER_COLOR`."""
    return METHOD_COLORS.get(method, OTHER_COLOR)


def method_class(method: str) -> str:
    """Return the name of the method's colour on an HTML page: the method, or ``other``."""
    return method if method in METHOD_COLORS else "other"


def color_of(name: str, number: int = 0) -> str:
    """Return the colour of the method that starts ``name``, or the ``number``-th colour of the palette.

    Example:
        >>> color_of("tsam seed 3") == METHOD_COLORS["tsam"]
        True
    """
    first = name.split()[0].lower() if name.split() else ""
    return METHOD_COLORS.get(first, OKABE_ITO[number % len(OKABE_ITO)])
