"""Every table and figure of the paper's experiments, one command each: ``tiltsam reproduce`` (``docs/reproduce.md``).

paper      the numbers that the paper prints, each with the label of its table or figure
settings   the paper's settings of each column and method, and what was chosen where it states none
book       the recipes: functions that return the cells of a table or figure
cost       passes, counted exactly, and hours, from a short timing on this device
measures   what is measured on trained runs: losses under other objectives, neighbourhoods, eigenvalues
reproduce  runs a recipe                  tables     our numbers beside the paper's
command    the command
"""
