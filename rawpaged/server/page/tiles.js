// The row of instruments: a number, a word about it, and its last minutes.

import { draw, linePath } from "./charts.js";
import { amount, count, element, percent, seconds, setText } from "./elements.js";
import { SECONDS } from "./history.js";
import { bucketsBetween, quantile } from "./prometheus.js";

const RATE_WINDOW = 5; // seconds
const LATENCY_WINDOW = 60;
const MINUTES = SECONDS / 60;

const TILES = [
  {
    name: "Running",
    show: count,
    value: (h, i) => h.samples[i].running,
    note: (h) => `of ${h.last.limits.max_num_seqs ?? "?"} at once`,
  },
  { name: "Waiting", show: count, value: (h, i) => h.samples[i].waiting, note: most },
  {
    name: "Generated",
    unit: "tok/s",
    value: (h, i) => h.rate("generated", RATE_WINDOW, i),
    note: most,
  },
  {
    name: "Prefilled",
    unit: "tok/s",
    value: (h, i) => h.rate("prompted", RATE_WINDOW, i),
    note: most,
  },
  latency("First token", "ttft"),
  latency("Between tokens", "itl"),
  {
    name: "Prefix hits",
    show: asPercent,
    scale: 1,
    value: (h, i) => share(h.growth("hits", LATENCY_WINDOW, i), h.growth("queries", LATENCY_WINDOW, i)),
    note: (h) => `${percent(h.last.hits, h.last.queries)} since the start`,
  },
  {
    name: "Pool in use",
    show: asPercent,
    scale: 1,
    value: (h, i) => share(h.samples[i].used, h.samples[i].total),
    note: (h) => `${percent(h.last.cached, h.last.total)} more cached`,
  },
];

/** Median over the last minute, with the 95th percentile beside it. */
function latency(name, histogram) {
  const recent = (h, i) =>
    bucketsBetween(h.before(LATENCY_WINDOW, i)[histogram], h.samples[i][histogram]);
  return {
    name,
    show: seconds,
    value: (h, i) => quantile(recent(h, i), 0.5),
    note: (h) => {
      const late = quantile(recent(h, h.samples.length - 1), 0.95);
      return late === null ? "none in the last minute" : `95 % within ${seconds(late)}`;
    },
  };
}

function share(part, whole) {
  return whole > 0 ? part / whole : null;
}

function asPercent(value) {
  return value === null ? "–" : percent(value, 1);
}

function most(h, points) {
  const values = points.map(([, value]) => value ?? 0);
  return `${amount(Math.max(0, ...values))} at most in ${MINUTES} min`;
}

export class Tiles {
  constructor(section) {
    this.parts = TILES.map((tile) => {
      const value = element("span", "value", "–");
      const note = element("p", "note");
      const chart = document.createElementNS("http://www.w3.org/2000/svg", "svg");
      chart.setAttribute("viewBox", "0 0 180 32");
      chart.setAttribute("preserveAspectRatio", "none");
      chart.setAttribute("aria-hidden", "true");
      const unit = tile.unit ? [" ", element("span", "unit", tile.unit)] : [];
      section.append(
        element("div", "tile", element("h2", "", tile.name), element("p", "", value, ...unit), chart, note),
      );
      return { value, note, chart };
    });
  }

  update(history) {
    const last = history.samples.length - 1;
    TILES.forEach((tile, i) => {
      const { value, note, chart } = this.parts[i];
      const points = history.series((index) => tile.value(history, index));
      const now = tile.value(history, last);
      const scale = tile.scale ?? 1.1 * Math.max(1e-9, ...points.map(([, v]) => v ?? 0));
      setText(value, (tile.show ?? amount)(now));
      setText(note, tile.note(history, points));
      draw(chart, [["line", linePath(points, 180, 32, scale)]]);
    });
  }
}
