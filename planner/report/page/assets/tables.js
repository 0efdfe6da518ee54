"use strict";
// Tables: sorted by a header, and filtered by words where they are long.
// A row as data: what its cells read as, and what they sort by (null: not known; absent: text).
page.rowOf = (element) => ({
  element,
  texts: [...element.cells].map((cell) => cell.textContent),
  values: [...element.cells].map(({ dataset: { value } }) =>
    value === undefined ? undefined : value === "" ? null : Number(value)),
});

page.collator = new Intl.Collator("en", { numeric: true });

page.compare = (column) => (a, b) => {
  const [x, y] = [a.values[column], b.values[column]];
  if (x === undefined && y === undefined) {
    return page.collator.compare(a.texts[column], b.texts[column]);
  }
  return (x ?? -Infinity) - (y ?? -Infinity) || 0;
};

page.words = (text) => text.toLowerCase().split(/\s+/).filter((word) => word);

class SortedTable {
  constructor(figure) {
    this.figure = figure;
    this.body = figure.querySelector("tbody");
    this.headers = [...figure.querySelectorAll("th")];
    this.counted = figure.querySelector(".counted");
    this.order = null;
    this.sought = "";
    this.headers.forEach((header, column) => {
      header.querySelector("button").addEventListener("click", () => this.sort(column));
    });
    if (this.counted) this.addFilter();
    this.rows = [...this.body.rows].map(page.rowOf);
  }

  sort(column) {
    const header = this.headers[column];
    const down = header.getAttribute("aria-sort") === "ascending";
    this.headers.forEach((other) => other.setAttribute("aria-sort", "none"));
    header.setAttribute("aria-sort", down ? "descending" : "ascending");
    this.order = { column, down };
    this.show();
  }

  show() {
    const words = page.words(this.sought);
    let rows = this.rows.filter((row) => {
      if (words.length === 0) return true;
      row.sought ??= row.texts.join("\n").toLowerCase();
      return words.every((word) => row.sought.includes(word));
    });
    if (this.order) {
      const compare = page.compare(this.order.column);
      rows = rows.toSorted(this.order.down ? (a, b) => compare(b, a) : compare);
    }
    this.body.replaceChildren(...rows.map((row) => row.element));
    if (this.counted) this.count(rows.length);
  }

  count(found) {
    const all = this.rows.length.toLocaleString("en");
    this.counted.textContent = this.sought.trim() ? `${found.toLocaleString("en")} of ${all} rows match` : `${all} rows`;
  }

  addFilter() {
    const input = document.createElement("input");
    input.type = "search";
    input.placeholder = "Filter rows";
    input.setAttribute("aria-label", "Filter rows by words");
    let waiting;
    input.addEventListener("input", () => {
      clearTimeout(waiting);
      waiting = setTimeout(() => { this.sought = input.value; this.show(); }, 120);
    });
    this.counted.before(input);
    this.counted.setAttribute("role", "status");
  }
}

document.querySelectorAll("figure.table").forEach((figure) => new SortedTable(figure));
