// The answer of /kv, unfolded to one entry a block, said in words and shown as a cell.

import { plural } from "./elements.js";
import { stripes } from "./owners.js";

const ENGINE_ID = /^(\d+):(?:chatcmpl|cmpl)-(.+)-[0-9a-f]{12}-(\d+)$/;
const MOST_NAMES = 4; // of a block's owners
const MOST_LETTERS = 13; // of a name

/** One object for each block of the map: {id, owners, refs, tokens, cached}; owners are indices. */
export function unfold(map) {
  const blocks = [];
  for (const run of map.runs) {
    for (let i = 0; i < run.num_blocks; i += 1) {
      blocks.push({
        id: run.first_block + i,
        owners: map.owners[run.owners],
        refs: run.ref_count,
        tokens: run.num_tokens,
        cached: run.is_cached,
      });
    }
  }
  return blocks;
}

/** What a person who cannot see the colours is told of a block. */
export function describe(block, map) {
  return `Block ${block.id}: ${facts(block, map).join("; ")}`;
}

export function facts(block, map) {
  if (block.refs === 0) return [block.cached ? "cached, held by nobody" : "free"];
  const owners = `${plural(block.refs, "owner")} (${ownerNames(block, map)})`;
  const filled = `${block.tokens} of ${map.block_size} slots filled`;
  return block.cached ? [owners, filled, "in the prefix cache"] : [owners, filled];
}

/** Make an element look like the block; `colours` are those of its owners. */
export function dress(cell, block, map, colours) {
  cell.classList.toggle("used", block.refs > 0);
  cell.classList.toggle("idle", block.refs === 0 && block.cached);
  cell.classList.toggle("cached", block.cached);
  if (block.refs > 0) {
    cell.style.setProperty("--paint", stripes(colours));
    cell.style.setProperty("--fill", `${(100 * block.tokens) / map.block_size}%`);
  } else {
    cell.removeAttribute("style");
  }
}

function ownerNames({ owners }, { requests }) {
  const names = owners.slice(0, MOST_NAMES).map((i) => shortName(requests[i].request_id).join(""));
  const more = owners.length - names.length;
  return names.join(", ") + (more > 0 ? ` and ${more} more` : "");
}

/** [name, sample]: what its client called a request, which of its prompts and samples this is. */
export function shortName(id) {
  const match = ENGINE_ID.exec(id);
  if (match === null) return [shorten(id), ""];
  const [, sample, name, prompt] = match;
  return [shorten(name), prompt === "0" ? `#${sample}` : `.${prompt}#${sample}`];
}

/** A long name without its middle. */
function shorten(name) {
  return name.length > MOST_LETTERS ? `${name.slice(0, 6)}…${name.slice(-5)}` : name;
}
