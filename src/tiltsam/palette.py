"""Colours of every figure: Okabe and Ito's palette, told apart by colour-blind readers; one colour per method."""

__all__ = ["METHOD_COLORS", "OKABE_ITO"]

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
}
"""The same method has the same colour everywhere."""
