// Small words for building the page. Text is always text: nothing from the server becomes markup.

export function byId(id) {
  return document.getElementById(id);
}

/** An element with a class and children, which are elements or text. */
export function element(tag, className = "", ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

/** Set text only where it changes, so that selections and readers are left alone. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Rows of [name, value, note] in a table's body. */
export function setRows(table, rows) {
  const body = table.tBodies[0];
  while (body.rows.length > rows.length) body.lastElementChild.remove();
  while (body.rows.length < rows.length) {
    const header = element("th");
    header.scope = "row";
    body.append(element("tr", "", header, element("td"), element("td", "note")));
  }
  rows.forEach(([name, value, note = "", className = ""], i) => {
    const { cells } = body.rows[i];
    cells[0].className = className;
    setText(cells[0], name);
    setText(cells[1], value);
    setText(cells[2], note);
  });
}

const GROUPED = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export function count(value) {
  return GROUPED.format(value);
}

/** Three digits that matter: 0.123, 1.23, 12.3, 1,234. */
export function amount(value) {
  if (value === null) return "–";
  if (value >= 100 || Number.isInteger(value)) return GROUPED.format(value);
  return value.toPrecision(value >= 10 ? 3 : 2);
}

export function seconds(value) {
  if (value === null) return "–";
  return value < 1 ? `${amount(value * 1000)} ms` : `${amount(value)} s`;
}

export function percent(part, whole) {
  if (!(whole > 0)) return "–";
  const value = (100 * part) / whole;
  return `${value > 0 && value < 10 ? value.toFixed(1) : Math.round(value)} %`;
}

export function plural(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}
