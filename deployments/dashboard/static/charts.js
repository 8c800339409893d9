// Two uPlot charts of stacked areas over time. Knows arrays of numbers, not what they mean.

const KEEP = 450; // points; fifteen minutes

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** Bands on top of each other, in the order of `names`, which are also names of colours. */
export class StackedChart {
  constructor(element, names, format) {
    this.element = element;
    this.names = names;
    this.format = format;
    this.times = [];
    this.values = names.map(() => []);
    this.chart = null;
    new ResizeObserver(() => this.chart?.setSize(this.size())).observe(element);
  }

  add(time, values) {
    this.times.push(time);
    this.names.forEach((name, i) => this.values[i].push(values[name] ?? 0));
    if (this.times.length > KEEP) [this.times, ...this.values].forEach((list) => list.shift());
    if (this.chart) this.chart.setData(this.data());
    else if (this.times.length > 1) this.draw();
  }

  /** Also when the colours have changed. */
  draw() {
    this.chart?.destroy();
    this.chart = new uPlot(this.options(), this.data(), this.element);
  }

  size() {
    return { width: Math.max(200, this.element.clientWidth), height: 200 };
  }

  // the sums are drawn from the highest down, so that each area covers what belongs to the ones below
  data() {
    const sums = this.values.map(() => []);
    this.times.forEach((_, t) => {
      let sum = 0;
      this.values.forEach((list, i) => { sum += list[t]; sums[i].push(sum); });
    });
    return [this.times, ...sums.reverse()];
  }

  options() {
    const axis = { stroke: color("soft"), grid: { stroke: color("line"), width: 1 }, ticks: { stroke: color("line") } };
    const series = this.names.map((name, i) => ({
      label: name, stroke: color(name), fill: color(name), width: 1, points: { show: false },
      value: (_, __, ___, t) => (t == null ? "" : this.format(this.values[i][t])),
    }));
    return {
      ...this.size(),
      scales: { y: { range: (_, __, high) => [0, high > 0 ? high * 1.05 : 1] } },
      axes: [axis, { ...axis, size: 64, values: (_, ticks) => ticks.map(this.format) }],
      series: [{}, ...series.reverse()],
    };
  }
}
