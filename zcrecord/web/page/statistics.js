// SPDX-License-Identifier: 0BSD
/**
 * Statistics of a tensor's elements as they come: nothing is kept but counts.
 *
 * A histogram needs the range of values first, which a stream does not have. So elements are counted by the upper half
 * of their bits as float32: 128 buckets for each power of two, from which a histogram of any range is made later.
 */

const DISTINCT = 64; // values, up to which each is counted by itself

export class Statistics {
  #single = new Float32Array(1);
  #bits = new Uint32Array(this.#single.buffer);
  #buckets = new Float64Array(1 << 16);
  #mean = 0;
  #squares = 0; // of distances to the mean
  #values = new Map(); // null once there are too many

  constructor() {
    Object.assign(this, { count: 0, finite: 0, zeros: 0, nans: 0, infinities: 0, min: Infinity, max: -Infinity });
  }

  get mean() {
    return this.finite ? this.#mean : NaN;
  }

  /** The standard deviation of all elements that are finite, not of a sample of more. */
  get deviation() {
    return this.finite ? Math.sqrt(this.#squares / this.finite) : NaN;
  }

  /** How many values there are; null for more than 64. */
  get distinct() {
    return this.#values && this.#values.size;
  }

  add(numbers) {
    const values = this.#values;
    let [sum, finite, last, pending] = [0, 0, NaN, 0];
    const shift = numbers.find(Number.isFinite) ?? 0; // or sums of squares of large neighbours would cancel out
    let squares = 0;
    for (let i = 0; i < numbers.length; i++) {
      const x = numbers[i];
      if (x - x !== 0) {
        if (x !== x) this.nans++;
        else this.infinities++;
        continue;
      }
      if (x === 0) this.zeros++;
      if (x < this.min) this.min = x;
      if (x > this.max) this.max = x;
      finite++;
      sum += x - shift;
      squares += (x - shift) * (x - shift);
      this.#single[0] = x;
      this.#buckets[this.#bits[0] >>> 16]++;
      if (!this.#values) continue;
      if (x === last) {
        pending++;
        continue;
      }
      if (pending) values.set(last, (values.get(last) ?? 0) + pending);
      [last, pending] = [x, 1];
      if (values.size > DISTINCT) this.#values = null;
    }
    if (this.#values && pending) values.set(last, (values.get(last) ?? 0) + pending);
    if (this.#values && values.size > DISTINCT) this.#values = null;
    this.count += numbers.length;
    if (finite) this.#merge(finite, shift + sum / finite, Math.max(0, squares - (sum * sum) / finite));
  }

  #merge(count, mean, squares) {
    const all = this.finite + count;
    const apart = mean - this.#mean;
    this.#squares += squares + (apart * apart * this.finite * count) / all;
    this.#mean += (apart * count) / all;
    this.finite = all;
  }

  /** Returns the bars of a histogram, each [from, to, count]: one for each value if there are few, else `bins`. */
  bars(bins = 48) {
    if (!this.finite) return [];
    if (this.#values) return [...this.#values].sort(([a], [b]) => a - b).map(([value, count]) => [value, value, count]);
    const width = this.max / bins - this.min / bins; // a difference of its ends may be infinite
    const counts = new Float64Array(bins);
    const binOf = (x) => Math.min(bins - 1, Math.max(0, Math.floor(x / width - this.min / width)));
    this.#buckets.forEach((count, bucket) => {
      if (!count) return;
      const [low, high] = [this.#edge(bucket), this.#edge(bucket + 1)].sort((a, b) => a - b);
      const [first, last] = [binOf(Math.max(low, this.min)), binOf(Math.min(high, this.max))];
      for (let bin = first; bin <= last; bin++) counts[bin] += count / (last - first + 1);
    });
    return Array.from(counts, (count, bin) => [this.min + bin * width, this.min + (bin + 1) * width, count]);
  }

  /** Returns the number nearest to zero that is in a bucket. */
  #edge(bucket) {
    this.#bits[0] = (bucket & 0x7fff) > 0x7f80 ? (bucket & 0x8000 ? 0xff7fffff : 0x7f7fffff) : bucket << 16;
    const value = this.#single[0];
    return Number.isFinite(value) ? value : Math.sign(value) * 3.4e38;
  }
}
