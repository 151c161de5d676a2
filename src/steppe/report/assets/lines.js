// Lines with bands over a shared axis.

/**
 * spec: { x: numbers, xTitle, yTitle, title(place), series, floor, ceiling, height, xTicks, format(value) }
 * series: { name, place (its color), y: numbers or nulls, bands: [{ low, high, opacity }], back (drawn behind),
 *   text(place) or rows(place) for the tooltip }
 */
class LineChart extends Chart {
  update(spec) {
    this.spec = spec;
    this.redraw();
  }

  range() {
    const { series, floor, ceiling } = this.spec;
    const values = series.flatMap((each) => [
      ...each.y,
      ...(each.bands || []).flatMap((band) => [...band.low, ...band.high]),
    ]).filter(known);
    if (!values.length) return [floor ?? 0, ceiling ?? 1];
    let low = Math.min(...values);
    let high = Math.max(...values);
    const pad = (high - low || Math.abs(high) * 0.1 || 1) * 0.06;
    low = Math.max(low - pad, floor ?? -Infinity);
    high = Math.min(high + pad, ceiling ?? Infinity);
    return high > low ? [low, high] : [low - 1, high + 1];
  }

  paint(width) {
    const { x, xTitle, yTitle, series, height = 380 } = this.spec;
    const frame = { left: 46, right: width - 10, top: 24, bottom: height - 42 };
    const [low, high] = this.spec.domain || this.range();
    const first = x[0];
    const last = x[x.length - 1];
    this.toX = (value) => (last === first
      ? (frame.left + frame.right) / 2
      : frame.left + ((value - first) / (last - first)) * (frame.right - frame.left - 8) + 4);
    this.toY = (value) => frame.bottom - ((value - low) / (high - low)) * (frame.bottom - frame.top);
    this.frame = frame;
    const levels = ticks(low, high, Math.max(3, height / 70));
    for (const level of levels.values) {
      const y = this.toY(level);
      this.svg.append(
        draw("line", { class: "grid", x1: frame.left, x2: frame.right, y1: y, y2: y }),
        draw("text", { x: frame.left - 8, y: y + 4, "text-anchor": "end" }, fixed(level, levels.digits)),
      );
    }
    this.paintAxis(frame, xTitle);
    this.svg.append(draw("text", { x: 0, y: 12 }, short(yTitle, width)));
    for (const each of series) this.paintSeries(each);
    this.marks = draw("g", {});
    this.svg.append(this.marks);
    return height;
  }

  paintAxis(frame, title) {
    const { x, whole } = this.spec;
    const wanted = clamp((frame.right - frame.left) / 60, 2, 12);
    const step = Math.ceil(x.length / wanted);
    const places = whole
      ? { values: x.filter((_, place) => place % step === (x.length - 1) % step), digits: 0 }
      : ticks(x[0], x[x.length - 1], wanted);
    const line = { class: "axis", x1: frame.left, x2: frame.right, y1: frame.bottom, y2: frame.bottom };
    this.svg.append(draw("line", line));
    for (const value of places.values) {
      const at = { x: this.toX(value), y: frame.bottom + 18, "text-anchor": "middle" };
      this.svg.append(draw("text", at, fixed(value, places.digits)));
    }
    const middle = (frame.left + frame.right) / 2;
    this.svg.append(draw("text", { x: middle, y: frame.bottom + 37, "text-anchor": "middle" }, title));
  }

  paintSeries(each) {
    const { x } = this.spec;
    const group = draw("g", { class: colour(each.place) });
    for (const band of each.bands || []) {
      const there = x.map((_, place) => place).filter((place) => known(band.low[place]) && known(band.high[place]));
      if (there.length < 2) continue;
      const corner = (values) => (place) => `${this.toX(x[place]).toFixed(1)},${this.toY(values[place]).toFixed(1)}`;
      const points = [...there.map(corner(band.high)), ...there.toReversed().map(corner(band.low))];
      group.append(draw("polygon", { class: "band", points: points.join(" "), "fill-opacity": band.opacity }));
    }
    let path = "";
    let joined = false;
    each.y.forEach((value, place) => {
      if (known(value)) path += `${joined ? "L" : "M"}${this.toX(x[place]).toFixed(1)} ${this.toY(value).toFixed(1)}`;
      joined = known(value);
    });
    const kind = each.back ? "line back" : "line";
    group.append(draw("path", { class: kind, d: path, "stroke-dasharray": each.back ? "2 4" : dash(each.place) }));
    const there = each.y.map((value, place) => (known(value) ? place : -1)).filter((place) => place >= 0);
    if (there.length === 1) {
      group.append(draw("circle", { class: "dot", cx: this.toX(x[there[0]]), cy: this.toY(each.y[there[0]]), r: 4 }));
    }
    this.svg.append(group);
  }

  nearest(px) {
    const gaps = this.spec.x.map((value) => Math.abs(this.toX(value) - px));
    return gaps.indexOf(Math.min(...gaps));
  }

  moved(at, key) {
    const last = this.spec.x.length - 1;
    const steps = { ArrowRight: at === null ? 0 : at + 1, ArrowLeft: at === null ? last : at - 1, Home: 0, End: last };
    const to = steps[key];
    return to === undefined ? undefined : clamp(to, 0, last);
  }

  mark(at) {
    const x = this.toX(this.spec.x[at]);
    const shown = this.spec.series.filter((each) => known(each.y[at]) && !each.back);
    shown.sort((a, b) => b.y[at] - a.y[at]);
    this.marks.replaceChildren(
      draw("line", { class: "cross", x1: x, x2: x, y1: this.frame.top, y2: this.frame.bottom }),
      ...shown.map((each) =>
        draw("circle", { class: `dot ${colour(each.place)}`, cx: x, cy: this.toY(each.y[at]), r: 3.5 })),
    );
    const row = (each) => [swatch(each.place), each.name, each.text(at)];
    const rows = shown.flatMap((each) => (each.rows ? each.rows(at) : [row(each)]));
    const middle = (this.frame.top + this.frame.bottom) / 2;
    this.tooltip.show(x, middle, this.spec.title(at), rows.length ? rows : [[null, "nothing measured here", ""]]);
  }

  unmark() {
    if (this.marks) this.marks.replaceChildren();
  }
}

/** The band of one standard deviation around a mean. */
function deviation(mean, std) {
  if (!std.some(known)) return [];
  const edge = (sign) => mean.map((value, place) => (known(value) ? value + sign * (std[place] ?? 0) : null));
  return [{ low: edge(-1), high: edge(1), opacity: 0.15 }];
}
