"use strict";
// Tables: sorted by a header, filtered by words, and shown a page of rows at a time where they are
// long. The rows of a long table lie packed, and become elements only when they are shown.
page.PAGE_ROWS = 100;
// Letters of a cell that needs room, and of one that stays on one line, as in the template.
page.LONG_TEXT = 28;
page.SHORT_TEXT = 16;

page.packedRows = () => {
  page.unpackedRows ??= page.unpack("rows").then(JSON.parse);
  return page.unpackedRows;
};

// A row as data: what its cells read as, and what they sort by (null: not known; absent: text).
page.rowOf = (element) => ({
  element,
  texts: [...element.cells].map((cell) => cell.textContent),
  values: [...element.cells].map(({ dataset: { value } }) =>
    value === undefined ? undefined : value === "" ? null : Number(value)),
});

page.rowOfPacked = ([cells, marked]) => ({
  marked,
  texts: cells.map((cell) => (Array.isArray(cell) ? cell[1] : cell)),
  values: cells.map((cell) => (Array.isArray(cell) ? cell[0] : undefined)),
});

page.elementOf = (row) => {
  if (row.element) return row.element;
  const made = document.createElement("tr");
  if (row.marked) made.className = "marked";
  row.texts.forEach((text, index) => {
    const cell = made.insertCell();
    cell.textContent = text;
    const isNumber = row.values[index] !== undefined;
    cell.classList.toggle("number", isNumber);
    cell.classList.toggle("long", !isNumber && text.length > page.LONG_TEXT);
    cell.classList.toggle("short", text.length <= page.SHORT_TEXT);
  });
  row.element = made;
  return made;
};

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
    this.long = figure.dataset.packed === "yes";
    this.order = null;
    this.first = 0;
    this.sought = "";
    this.headers.forEach((header, column) => {
      header.querySelector("button").addEventListener("click", () => this.sort(column));
    });
    if (this.counted) this.addFilter();
    if (this.long) this.addPager();
  }

  async rows() {
    if (this.long) {
      const packed = await page.packedRows();
      this.known ??= packed[this.figure.id].map(page.rowOfPacked);
    } else {
      this.known ??= [...this.body.rows].map(page.rowOf);
    }
    return this.known;
  }

  async sort(column) {
    const header = this.headers[column];
    const down = header.getAttribute("aria-sort") === "ascending";
    this.headers.forEach((other) => other.setAttribute("aria-sort", "none"));
    header.setAttribute("aria-sort", down ? "descending" : "ascending");
    this.order = { column, down };
    this.first = 0;
    await this.show();
  }

  async show() {
    const words = page.words(this.sought);
    let rows = (await this.rows()).filter((row) => {
      if (words.length === 0) return true;
      row.sought ??= row.texts.join("\n").toLowerCase();
      return words.every((word) => row.sought.includes(word));
    });
    if (this.order) {
      const compare = page.compare(this.order.column);
      rows = rows.toSorted(this.order.down ? (a, b) => compare(b, a) : compare);
    }
    const size = this.long ? page.PAGE_ROWS : rows.length;
    const shown = rows.slice(this.first, this.first + size);
    this.body.replaceChildren(...shown.map(page.elementOf));
    if (this.counted) this.count(rows.length, shown.length);
  }

  count(found, shown) {
    const all = this.known.length.toLocaleString("en");
    const range = `${(this.first + 1).toLocaleString("en")}–${(this.first + shown).toLocaleString("en")}`;
    const which = this.sought.trim() ? `${found.toLocaleString("en")} of ${all} rows match` : `${all} rows`;
    this.counted.textContent = shown < found ? `Rows ${range} · ${which}` : which;
    if (!this.long) return;
    this.earlier.disabled = this.first === 0;
    this.later.disabled = this.first + shown >= found;
  }

  addFilter() {
    const input = document.createElement("input");
    input.type = "search";
    input.placeholder = "Filter rows";
    input.setAttribute("aria-label", "Filter rows by words");
    let waiting;
    input.addEventListener("input", () => {
      clearTimeout(waiting);
      waiting = setTimeout(() => { this.sought = input.value; this.first = 0; this.show(); }, 120);
    });
    this.counted.before(input);
    this.counted.setAttribute("role", "status");
  }

  addPager() {
    const pager = document.createElement("div");
    pager.className = "pager";
    const button = (text, by) => {
      const made = document.createElement("button");
      made.type = "button";
      made.textContent = text;
      made.addEventListener("click", async () => {
        this.first += by;
        await this.show();
        this.figure.querySelector(".scroll").scrollTop = 0;
      });
      pager.append(made);
      return made;
    };
    this.earlier = button("Previous", -page.PAGE_ROWS);
    this.later = button("Next", page.PAGE_ROWS);
    this.earlier.disabled = true;
    this.counted.after(pager);
  }
}

document.querySelectorAll("figure.table").forEach((figure) => {
  if (figure.dataset.packed !== "yes" || page.canUnpack()) new SortedTable(figure);
});
