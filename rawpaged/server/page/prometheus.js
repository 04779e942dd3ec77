// The text format of Prometheus, as far as this server writes it.

const PREFIX = "rawpaged:";
const LINE = /^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)$/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/** Metrics under this project's own names: name -> list of {labels, value}. */
export function parse(text) {
  const metrics = new Map();
  for (const line of text.split("\n")) {
    const match = line.startsWith(PREFIX) && LINE.exec(line);
    if (!match) continue;
    const [, name, labels = "", value] = match;
    const key = name.slice(PREFIX.length);
    if (!metrics.has(key)) metrics.set(key, []);
    metrics.get(key).push({ labels: parseLabels(labels), value: Number(value) });
  }
  return metrics;
}

function parseLabels(text) {
  const labels = {};
  for (const [, name, value] of text.matchAll(LABEL)) {
    labels[name] = value.replace(/\\(.)/g, (_, c) => (c === "n" ? "\n" : c));
  }
  return labels;
}

/** The value of a metric that has one, or 0. */
export function valueOf(metrics, name) {
  return metrics.get(name)?.[0].value ?? 0;
}

/** The labels of a metric that has one, or none. */
export function labelsOf(metrics, name) {
  return metrics.get(name)?.[0].labels ?? {};
}

/** Bounds and cumulative counts of a histogram. */
export function bucketsOf(metrics, name) {
  const samples = metrics.get(`${name}_bucket`) ?? [];
  return samples.map(({ labels, value }) => ({
    bound: labels.le === "+Inf" ? Infinity : Number(labels.le),
    count: value,
  }));
}

/** What came into a histogram between two readings of it. */
export function bucketsBetween(before, after) {
  return after.map(({ bound, count }, i) => ({ bound, count: count - (before[i]?.count ?? 0) }));
}

/** A quantile, straight between the bounds of its bucket; null of nothing. */
export function quantile(buckets, share) {
  const total = buckets.at(-1)?.count ?? 0;
  if (total <= 0) return null;
  const rank = share * total;
  let [low, below] = [0, 0];
  for (const { bound, count } of buckets) {
    if (count >= rank && count > below) {
      return bound === Infinity ? low : low + ((bound - low) * (rank - below)) / (count - below);
    }
    [low, below] = [bound, count];
  }
  return low;
}
