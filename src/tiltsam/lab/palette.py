"""Colours of all figures: the Okabe-Ito palette, safe for colour-blind readers, with one colour per method.

It has eight colours; those of SAM's variants are further ones that can be told apart on light and dark pages.
"""

__all__ = ["METHOD_COLORS", "METHOD_COLORS_ON_DARK", "OKABE_ITO", "OTHER_COLOR"]

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
    "momentumsam": "#7700BB",
}
"""Colour of each method in every figure."""

METHOD_COLORS_ON_DARK = METHOD_COLORS | {"asam": "#F2F2F2"}
"""Colours on a dark page, where black would be invisible."""

OTHER_COLOR = "#808080"
"""Colour of methods that are not in :data:`METHOD_COLORS`."""
