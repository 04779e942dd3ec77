// Readings of the last minutes, and what follows from two of them.

export const SECONDS = 180;

export class History {
  constructor() {
    /** Oldest first; `time` is in seconds of this page's clock. */
    this.samples = [];
  }

  add(sample) {
    const oldest = sample.time - SECONDS - 60;
    this.samples = this.samples.filter(({ time }) => time >= oldest);
    this.samples.push(sample);
  }

  get last() {
    return this.samples.at(-1);
  }

  /** The latest reading that is at least so old, counted from reading `index`, or the first one. */
  before(seconds, index = this.samples.length - 1) {
    const limit = this.samples[index].time - seconds;
    let i = index;
    while (i > 0 && this.samples[i].time > limit) i -= 1;
    return this.samples[i];
  }

  /** How much a total grew in the last `seconds`. */
  growth(name, seconds, index = this.samples.length - 1) {
    return this.samples[index][name] - this.before(seconds, index)[name];
  }

  /** Growth per second over about `seconds`; null of one reading. */
  rate(name, seconds, index = this.samples.length - 1) {
    const elapsed = this.samples[index].time - this.before(seconds, index).time;
    return elapsed > 0 ? this.growth(name, seconds, index) / elapsed : null;
  }

  /** [seconds ago, value] of each reading that is shown; `valueAt` gets its index. */
  series(valueAt) {
    const now = this.last.time;
    const points = [];
    for (let i = 0; i < this.samples.length; i += 1) {
      const age = now - this.samples[i].time;
      if (age <= SECONDS) points.push([age, valueAt(i)]);
    }
    return points;
  }
}
