// Sorts tables, and draws plots lazily. The page includes plot.js first.

for (const table of document.querySelectorAll("table")) {
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => {
    heading.querySelector("button").addEventListener("click", () => sort(table, headings, column));
  });
}

function sort(table, headings, column) {
  const heading = headings[column];
  const numeric = heading.classList.contains("number");
  // The first click puts the largest number or the first name at the top.
  const before = heading.getAttribute("aria-sort");
  const descending = before === "none" ? numeric : before === "ascending";
  for (const other of headings) other.setAttribute("aria-sort", "none");
  heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
  const body = table.tBodies[0];
  const rows = [...body.rows].map((row) => ({ row, key: keyOf(row.cells[column], numeric) }));
  rows.sort((a, b) => compare(a.key, b.key, descending));
  body.append(...rows.map(({ row }) => row));
}

function keyOf(cell, numeric) {
  if (!numeric) return cell.textContent;
  return cell.dataset.value === undefined ? null : Number(cell.dataset.value);
}

function compare(a, b, descending) {
  if (a === null || b === null) return (a === null) - (b === null); // missing values stay at the bottom
  const order = typeof a === "number" ? a - b : a.localeCompare(b, undefined, { numeric: true });
  return descending ? -order : order;
}

// Draw a plot when it comes near the window, so that a page with hundreds of curves opens quickly.
const near = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      near.unobserve(entry.target);
      plots.get(entry.target).open();
    }
  },
  { rootMargin: "600px" },
);
for (const element of plots.keys()) near.observe(element);
addEventListener("beforeprint", () => plots.forEach((plot) => plot.open()));
