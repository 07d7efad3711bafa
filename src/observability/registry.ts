/** Metrics in the Prometheus text exposition format, version 0.0.4. */

export type Labels = Readonly<Record<string, string>>;

/** Label values come from requests in part: past this a family counts on under `other` labels. */
const MAX_SERIES = 1000;
const MAX_LABEL_LENGTH = 128;

function escapeLabel(value: string): string {
  return value
    .slice(0, MAX_LABEL_LENGTH)
    .replace(/[\\"\n]/g, (character) => (character === "\n" ? "\\n" : `\\${character}`));
}

function labelText(names: readonly string[], labels: Labels): string {
  return names.map((name) => `${name}="${escapeLabel(labels[name] ?? "")}"`).join(",");
}

function sample(name: string, labels: string, value: number): string {
  return `${name}${labels === "" ? "" : `{${labels}}`} ${value}\n`;
}

abstract class Family<Value> {
  readonly name: string;
  readonly #help: string;
  readonly #type: string;
  readonly #labelNames: readonly string[];
  protected readonly series = new Map<string, Value>();

  constructor(type: string, name: string, help: string, labelNames: readonly string[]) {
    this.name = name;
    this.#help = help;
    this.#type = type;
    this.#labelNames = labelNames;
  }

  protected at(labels: Labels, make: () => Value): { readonly key: string; readonly value: Value } {
    let key = labelText(this.#labelNames, labels);
    let value = this.series.get(key);
    if (value === undefined && this.series.size >= MAX_SERIES) {
      key = this.#labelNames.map((name) => `${name}="other"`).join(",");
      value = this.series.get(key);
    }
    if (value === undefined) {
      value = make();
      this.series.set(key, value);
    }
    return { key, value };
  }

  protected abstract samples(key: string, value: Value): string;

  render(): string {
    let text = `# HELP ${this.name} ${this.#help}\n# TYPE ${this.name} ${this.#type}\n`;
    for (const [key, value] of this.series) text += this.samples(key, value);
    return text;
  }
}

export class Counter extends Family<number> {
  constructor(name: string, help: string, labelNames: readonly string[] = []) {
    super("counter", name, help, labelNames);
    if (labelNames.length === 0) this.series.set("", 0);
  }

  add(labels: Labels = {}, amount = 1): void {
    const { key, value } = this.at(labels, () => 0);
    this.series.set(key, value + amount);
  }

  /** Of something that counts by itself. */
  set(labels: Labels, total: number): void {
    const { key } = this.at(labels, () => 0);
    this.series.set(key, total);
  }

  protected samples(key: string, value: number): string {
    return sample(this.name, key, value);
  }
}

export class Gauge extends Family<number> {
  constructor(name: string, help: string, labelNames: readonly string[] = []) {
    super("gauge", name, help, labelNames);
  }

  set(labels: Labels, value: number): void {
    const { key } = this.at(labels, () => 0);
    this.series.set(key, value);
  }

  add(labels: Labels, amount: number): void {
    const { key, value } = this.at(labels, () => 0);
    this.series.set(key, value + amount);
  }

  /** Before a gauge with label values that come and go is set anew. */
  clear(): void {
    this.series.clear();
  }

  protected samples(key: string, value: number): string {
    return sample(this.name, key, value);
  }
}

interface Buckets {
  readonly counts: number[];
  sum: number;
  count: number;
}

export class Histogram extends Family<Buckets> {
  readonly #bounds: readonly number[];

  constructor(name: string, help: string, labelNames: readonly string[], bounds: readonly number[]) {
    super("histogram", name, help, labelNames);
    this.#bounds = bounds;
  }

  observe(labels: Labels, value: number): void {
    const { value: buckets } = this.at(labels, () => ({
      counts: this.#bounds.map(() => 0),
      sum: 0,
      count: 0,
    }));
    buckets.sum += value;
    buckets.count++;
    const first = this.#bounds.findIndex((bound) => value <= bound);
    if (first >= 0) buckets.counts[first]!++;
  }

  protected samples(key: string, buckets: Buckets): string {
    const prefix = key === "" ? "" : `${key},`;
    let text = "";
    let below = 0;
    for (const [i, bound] of this.#bounds.entries()) {
      below += buckets.counts[i]!;
      text += sample(`${this.name}_bucket`, `${prefix}le="${bound}"`, below);
    }
    text += sample(`${this.name}_bucket`, `${prefix}le="+Inf"`, buckets.count);
    return (
      text + sample(`${this.name}_sum`, key, buckets.sum) + sample(`${this.name}_count`, key, buckets.count)
    );
  }
}
