// The pool as a grid of cells: drawn from a map, walked through with the keyboard.

import { describe, dress, unfold } from "./blocks.js";
import { element } from "./elements.js";

const MOST_COLUMNS = 128; // multiples of 8, so that addresses are round
const LARGEST = 36; // pixels
const SMALLEST = 11;
const PAGE = 8; // rows
const HEIGHT = 0.6; // share of the window that the grid may take before cells get smaller

export class Grid {
  /** `onFocus(block)` and `onPick(block or null)` hear what the user does. */
  constructor(root, { onFocus, onPick }) {
    this.root = root;
    this.onFocus = onFocus;
    this.onPick = onPick;
    this.cells = [];
    this.signatures = [];
    this.blocks = [];
    this.shape = "";
    this.current = 0; // index of the cell that Tab leads to
    root.addEventListener("keydown", (event) => this.#onKey(event));
    root.addEventListener("focusin", (event) => this.#onEnter(event.target, true));
    root.addEventListener("pointerover", (event) => this.#onEnter(event.target, false));
    root.addEventListener("click", (event) => this.#onClick(event.target));
    new ResizeObserver(() => this.#layOut()).observe(root);
  }

  /** Show a map; `picked` is a set of request indices to be seen before the others, or null. */
  update(map, colours, picked) {
    this.map = map;
    this.blocks = unfold(map);
    this.#layOut();
    this.blocks.forEach((block, i) => this.#paint(i, block, colours, picked));
  }

  get block() {
    return this.blocks[this.current];
  }

  #layOut() {
    if (this.blocks.length === 0) return;
    const width = this.root.clientWidth - 56; // the column of addresses
    const [columns, size] = fit(this.blocks.length, width, HEIGHT * window.innerHeight);
    this.root.style.setProperty("--size", `${size}px`);
    this.root.classList.toggle("small", size < 18);
    const shape = `${this.map.first_block} ${this.blocks.length} ${columns}`;
    if (shape === this.shape) return;
    this.shape = shape;
    this.columns = columns;
    this.#build();
  }

  #build() {
    const hadFocus = this.root.contains(document.activeElement);
    const rows = [];
    this.cells = this.blocks.map(() => element("div", "cell"));
    this.signatures = this.blocks.map(() => "");
    this.cells.forEach((cell, i) => {
      cell.setAttribute("role", "gridcell");
      cell.tabIndex = -1;
      cell.dataset.index = i;
    });
    for (let i = 0; i < this.cells.length; i += this.columns) {
      const address = element("div", "address", String(this.blocks[i].id));
      address.setAttribute("role", "rowheader");
      const row = element("div", "row", address, ...this.cells.slice(i, i + this.columns));
      row.setAttribute("role", "row");
      rows.push(row);
    }
    this.root.replaceChildren(...rows);
    this.current = Math.min(this.current, this.cells.length - 1);
    this.cells[this.current].tabIndex = 0;
    if (hadFocus) this.cells[this.current].focus();
  }

  #paint(i, block, colours, picked) {
    const owners = block.owners.map((index) => colours[index]);
    const isFaint = picked !== null && !block.owners.some((index) => picked.has(index));
    const label = describe(block, this.map);
    const signature = `${owners} ${isFaint} ${label}`;
    if (signature === this.signatures[i]) return;
    const [cell, isFirst] = [this.cells[i], this.signatures[i] === ""];
    this.signatures[i] = signature;
    const wasUsed = cell.classList.contains("used");
    cell.setAttribute("aria-label", label);
    cell.className = "cell";
    dress(cell, block, this.map, owners);
    cell.classList.toggle("shared", block.refs > 1);
    cell.classList.toggle("faint", isFaint);
    cell.classList.toggle("fresh", block.refs > 0 && !wasUsed && !isFirst);
    cell.textContent = block.refs > 1 ? String(Math.min(block.refs, 99)) : "";
  }

  #onKey(event) {
    if (event.altKey || event.metaKey) return;
    const target = this.#target(event.key, event.ctrlKey);
    if (target !== null) {
      this.cells[target]?.focus();
    } else if (event.key === "Enter" || event.key === " ") {
      this.onPick(this.block);
    } else if (event.key === "Escape") {
      this.onPick(null);
    } else {
      return;
    }
    event.preventDefault();
  }

  /** The cell that a key leads to, which need not be there; null for other keys. */
  #target(key, isWhole) {
    const { columns, current } = this;
    const last = this.cells.length - 1;
    const inRow = current % columns;
    const rowsBelow = Math.floor((last - inRow) / columns) - Math.floor(current / columns);
    switch (key) {
      case "ArrowLeft":
        return current - 1;
      case "ArrowRight":
        return current + 1;
      case "ArrowUp":
        return current - columns;
      case "ArrowDown":
        return current + columns;
      case "PageUp":
        return Math.max(inRow, current - PAGE * columns);
      case "PageDown":
        return current + Math.min(PAGE, rowsBelow) * columns;
      case "Home":
        return isWhole ? 0 : current - inRow;
      case "End":
        return isWhole ? last : Math.min(last, current - inRow + columns - 1);
      default:
        return null;
    }
  }

  #onEnter(target, isFocus) {
    if (target.dataset.index === undefined) return;
    const index = Number(target.dataset.index);
    if (isFocus) {
      this.cells[this.current].tabIndex = -1;
      this.current = index;
      target.tabIndex = 0;
    }
    this.onFocus(this.blocks[index].id);
  }

  #onClick(target) {
    if (target.dataset.index === undefined) return;
    target.focus();
    this.onPick(this.blocks[Number(target.dataset.index)]);
  }
}

/** Columns and size of a cell: the largest cells whose rows do not need more than `height`. */
function fit(numBlocks, width, height) {
  const sizeOf = (columns) => Math.floor(Math.min(LARGEST, width / columns));
  let columns = Math.max(8, 8 * Math.floor(width / LARGEST / 8)); // fewer leave space unused
  while (columns < MOST_COLUMNS && sizeOf(columns + 8) >= SMALLEST) {
    if (Math.ceil(numBlocks / columns) * sizeOf(columns) <= height) break;
    columns += 8;
  }
  return [columns, Math.max(SMALLEST, sizeOf(columns))];
}
