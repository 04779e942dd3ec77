// Which colour an owner has: as long as it holds blocks the same one.

const NUM_COLOURS = 10;

export class Colours {
  constructor() {
    this.byId = new Map();
  }

  /** Colours of these requests, in their order; those that are gone give theirs back. */
  assign(ids) {
    const kept = new Set(ids);
    for (const id of this.byId.keys()) {
      if (!kept.has(id)) this.byId.delete(id);
    }
    const users = new Array(NUM_COLOURS).fill(0);
    for (const colour of this.byId.values()) users[colour] += 1;
    return ids.map((id) => {
      if (!this.byId.has(id)) {
        const colour = users.indexOf(Math.min(...users));
        users[colour] += 1;
        this.byId.set(id, colour);
      }
      return this.byId.get(id);
    });
  }
}

/** Stripes in the colours of up to `most` owners, as a CSS background. */
export function stripes(colours, most = 4) {
  const shown = colours.slice(0, most);
  if (shown.length === 1) return `var(--o${shown[0]})`;
  const stops = shown.map((colour, i) => {
    const [from, to] = [(100 * i) / shown.length, (100 * (i + 1)) / shown.length];
    return `var(--o${colour}) ${from}% ${to}%`;
  });
  return `linear-gradient(100deg, ${stops.join(", ")})`;
}
