"""Colours of every figure: Okabe and Ito's palette, told apart by colour-blind readers; one colour per method."""

__all__ = ["METHOD_COLORS", "METHOD_COLORS_ON_DARK", "OKABE_ITO", "OTHER_COLOR", "color_of", "method_color"]

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
    # Okabe and Ito's last, yellow, is too faint on white; this violet is as far from the seven others as they are from
    # each other, with full colour vision and without the red, green or blue receptors.
    "esam1": "#8A3FFC",
}
"""The same method has the same colour everywhere."""

METHOD_COLORS_ON_DARK = METHOD_COLORS | {"asam": "#F2F2F2"}
"""On a dark page the only colour that would vanish, black, turns white."""

OTHER_COLOR = "#808080"
"""Of what is no method of ours."""


def method_color(method: str) -> str:
    """The colour of a method; all that are not ours have one."""
    return METHOD_COLORS.get(method, OTHER_COLOR)


def color_of(name: str, number: int = 0) -> str:
    """The colour of the method that a name begins with; of another name, the palette's ``number``-th.

    Example:
        >>> color_of("tsam seed 3") == METHOD_COLORS["tsam"]
        True
    """
    first = name.split()[0].lower() if name.split() else ""
    return METHOD_COLORS.get(first, OKABE_ITO[number % len(OKABE_ITO)])
