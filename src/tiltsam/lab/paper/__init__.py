"""The tables and figures of the paper's experiments, one recipe each: ``tiltsam reproduce`` (``docs/reproduce.md``).

numbers    the numbers that the paper prints, each with the label of its table or figure
settings   the paper's settings of each column and method, and what is chosen where it states none
recipes    one function per table or figure, which returns its cells
reproduce  train what is missing, measure what the table needs
tables     our numbers next to the paper's
cost       passes of a recipe
"""
