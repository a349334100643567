"""From runs to something to look at: ``tiltsam report`` and :func:`write_report`.

runs       reads records, and says what it cannot read
settings   runs that differ in the seed alone, averaged
tables     what stands in the tables      writing    ... as HTML, Markdown, LaTeX
figures    which curves                   drawing    ... as PNG and PDF
page       the HTML page, with assets/    write      all of it
"""

from tiltsam.lab.report.write import Report, write_report

__all__ = ["Report", "write_report"]
