// Which part of a large pool is shown: what the user chose, or where most blocks are used.

import { draw, regionPaths } from "./charts.js";
import { byId, count, setText } from "./elements.js";

export const WINDOW = 2048; // blocks shown at once

export class PoolWindow {
  /** `onMove` is called when another part is to be shown. */
  constructor(onMove) {
    this.firstBlock = 0;
    this.onMove = onMove;
    byId("first").addEventListener("input", (event) => {
      byId("follow").checked = false;
      this.#moveTo(Number(event.target.value) * WINDOW);
    });
  }

  /** Show where the window is in the pool that this map is of; move it if it follows. */
  update(map) {
    this.numBlocks = map.num_blocks;
    byId("window").hidden = map.num_blocks <= WINDOW;
    byId("first").max = Math.ceil(map.num_blocks / WINDOW) - 1;
    draw(byId("regions"), regionPaths(map.regions, map.num_blocks, 20));
    this.#showRange();
    // Not under the hands of somebody who walks through the blocks.
    if (byId("follow").checked && !byId("grid").contains(document.activeElement)) this.#follow(map);
  }

  #follow({ regions, num_blocks: numBlocks }) {
    const used = new Array(Math.ceil(numBlocks / WINDOW)).fill(0);
    regions.used.forEach((number, i) => {
      used[Math.floor((i * regions.num_blocks) / WINDOW)] += number;
    });
    const busiest = used.indexOf(Math.max(...used));
    // Twice as many, so that it does not go to and fro between two.
    if (used[busiest] > 2 * used[this.firstBlock / WINDOW]) this.#moveTo(busiest * WINDOW);
  }

  #moveTo(firstBlock) {
    this.firstBlock = firstBlock;
    this.#showRange();
    this.onMove();
  }

  #showRange() {
    const end = Math.min(this.firstBlock + WINDOW, this.numBlocks);
    const text = `blocks ${count(this.firstBlock)} to ${count(end - 1)} of ${count(this.numBlocks)}`;
    setText(byId("range"), text);
    byId("first").value = this.firstBlock / WINDOW;
    byId("first").setAttribute("aria-valuetext", text);
  }
}
