// Everything that is drawn from a map: grid, window on a large pool, one block, requests.

import { dress, facts, shortName } from "./blocks.js";
import { byId, count, element, setText } from "./elements.js";
import { Grid } from "./grid.js";
import { Colours } from "./owners.js";
import { PoolWindow } from "./window.js";

const MOST_REQUESTS = 40;

export class Pool {
  /** `onMove` is called when another part of the pool is to be shown. */
  constructor(onMove) {
    this.window = new PoolWindow(onMove);
    this.colours = new Colours();
    this.pickedIds = null; // ids of requests to be seen before the others
    this.inspectedId = null; // number of the block told of
    this.map = null;
    this.grid = new Grid(byId("grid"), {
      onFocus: (id) => this.#inspect(id),
      onPick: (block) => this.#pickOwners(block),
    });
  }

  update(map) {
    this.map = map;
    this.#draw();
    this.window.update(map);
  }

  #draw() {
    const { map } = this;
    const ids = map.requests.map((request) => request.request_id);
    this.requestColours = this.colours.assign(ids);
    if (this.pickedIds !== null && !ids.some((id) => this.pickedIds.has(id))) this.pickedIds = null;
    const picked =
      this.pickedIds && new Set(ids.flatMap((id, i) => (this.pickedIds.has(id) ? [i] : [])));
    this.grid.update(map, this.requestColours, picked);
    this.#showInspected();
    this.#showRequests();
  }

  #inspect(id) {
    this.inspectedId = id;
    this.#showInspected();
  }

  #showInspected() {
    const { map } = this;
    const block = this.grid.blocks[this.inspectedId - map.first_block];
    if (this.inspectedId === null || block === undefined) return;
    const swatch = element("span", "cell big");
    const colours = block.owners.map((index) => this.requestColours[index]);
    dress(swatch, block, map, colours);
    swatch.setAttribute("aria-hidden", "true");
    const lines = facts(block, map).map((fact) => element("li", "", fact));
    setText(byId("inspector-title"), `Block ${block.id}`);
    byId("inspected").replaceChildren(swatch, element("ul", "", ...lines));
  }

  #pickOwners(block) {
    const ids = block === null ? [] : block.owners.map((i) => this.map.requests[i].request_id);
    this.#pick(ids);
  }

  /** Bring out what belongs to these requests; the same ones again, or none: show all alike. */
  #pick(ids) {
    const isSame = this.pickedIds?.size === ids.length && ids.every((id) => this.pickedIds.has(id));
    this.pickedIds = ids.length === 0 || isSame ? null : new Set(ids);
    this.#draw();
  }

  #showRequests() {
    const { map } = this;
    const body = byId("requests").tBodies[0];
    const shown = map.requests.slice(0, MOST_REQUESTS);
    while (body.rows.length > shown.length) body.lastElementChild.remove();
    while (body.rows.length < shown.length) body.append(this.#requestRow());
    shown.forEach((request, i) => this.#fillRow(body.rows[i], request, this.requestColours[i]));
    const more = map.requests.length - shown.length;
    const hidden = more > 0 ? `${count(more)} more hold blocks. ` : "";
    const none = map.requests.length === 0 ? "No request holds a block. " : "";
    setText(byId("requests-note"), `${none}${hidden}${count(map.num_waiting)} waiting.`);
  }

  #requestRow() {
    const name = element("span", "name", element("span"), element("span"));
    const button = element("button", "pick", element("span", "swatch"), name);
    button.type = "button";
    button.addEventListener("click", () => this.#pick([button.dataset.id]));
    const header = element("th", "", button);
    header.scope = "row";
    return element("tr", "", header, ...[1, 2, 3, 4].map(() => element("td")));
  }

  #fillRow(row, request, colour) {
    const button = row.cells[0].firstChild;
    button.dataset.id = request.request_id;
    button.title = request.request_id;
    button.setAttribute("aria-pressed", String(this.pickedIds?.has(request.request_id) ?? false));
    button.firstChild.className = `swatch o${colour}`;
    const [name, sample] = shortName(request.request_id);
    setText(button.lastChild.firstChild, name);
    setText(button.lastChild.lastChild, sample);
    const tokens =
      request.num_computed_tokens < request.num_tokens - 1
        ? `${count(request.num_computed_tokens)} / ${count(request.num_tokens)}`
        : count(request.num_tokens);
    const { num_blocks: blocks, num_cached_tokens: hit, num_preemptions: preempted } = request;
    [tokens, count(blocks), count(hit), count(preempted)].forEach((text, i) =>
      setText(row.cells[i + 1], text),
    );
  }
}
