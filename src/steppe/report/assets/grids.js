// The accuracy matrix as a map of colors, and stacked bars.

const LIGHT = [238, 243, 248];
const DEEP = [12, 58, 110];

/** Accuracy as a shade: one hue from light to deep, the same for every method of a section. */
function shade(share) {
  const mixed = LIGHT.map((light, channel) => Math.round(light + (DEEP[channel] - light) * share));
  return `rgb(${mixed.join(" ")})`;
}

/** spec: { mean, std: rows of R (nulls above the diagonal), low, high, taskName(place) } */
class HeatMap extends Chart {
  update(spec) {
    this.spec = spec;
    this.redraw();
  }

  paint(width) {
    const { mean, low, high } = this.spec;
    const size = mean.length;
    const frame = { left: 34, top: 40 };
    const cell = Math.min((width - frame.left - 2) / size, 56);
    this.place = { ...frame, cell, size };
    const share = (value) => (high > low ? (value - low) / (high - low) : 1);
    const every = Math.ceil(18 / cell);
    this.svg.append(draw("text", { x: frame.left, y: 12 }, "tested on task"));
    for (let task = 0; task < size; task += 1) {
      if ((size - 1 - task) % every) continue;
      const middle = (task + 0.5) * cell;
      this.svg.append(
        draw("text", { x: frame.left + middle, y: frame.top - 8, "text-anchor": "middle" }, String(task + 1)),
        draw("text", { x: frame.left - 8, y: frame.top + middle + 4, "text-anchor": "end" }, String(task + 1)),
      );
    }
    mean.forEach((row, after) => row.forEach((value, task) => {
      if (!known(value) || task > after) return;
      const x = frame.left + task * cell;
      const y = frame.top + after * cell;
      this.svg.append(draw("rect", { x, y, width: cell - 1, height: cell - 1, fill: shade(share(value)) }));
      if (cell < 27) return;
      const ink = share(value) > 0.6 ? "on-dark" : "on-light";
      const text = { class: ink, x: x + cell / 2, y: y + cell / 2 + 4, "text-anchor": "middle" };
      this.svg.append(draw("text", text, fixed(value, cell < 38 ? 0 : 1)));
    }));
    const bottom = frame.top + size * cell;
    this.svg.append(draw("text", { x: frame.left, y: bottom + 18 }, "rows: after each task"));
    this.marks = draw("g", {});
    this.svg.append(this.marks);
    return bottom + this.paintScale(bottom + 34, width);
  }

  paintScale(top, width) {
    const { low, high } = this.spec;
    const long = Math.min(240, width - 140);
    for (let step = 0; step < 24; step += 1) {
      const box = { x: 34 + (step * long) / 24, y: top, width: long / 24 + 0.5, height: 10, fill: shade(step / 23) };
      this.svg.append(draw("rect", box));
    }
    this.svg.append(
      draw("text", { x: 34, y: top + 26 }, fixed(low, 1)),
      draw("text", { x: 34 + long, y: top + 26, "text-anchor": "end" }, `${fixed(high, 1)} %`),
    );
    return 68;
  }

  nearest(x, y) {
    const { left, top, cell, size } = this.place;
    const [task, after] = [Math.floor((x - left) / cell), Math.floor((y - top) / cell)];
    return task >= 0 && after < size && task <= after && known(this.spec.mean[after][task]) ? [after, task] : null;
  }

  moved(at, key) {
    const steps = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] };
    if (!steps[key]) return undefined;
    const last = this.place.size - 1;
    if (at === null) return known(this.spec.mean[last][0]) ? [last, 0] : undefined;
    const [after, task] = [at[0] + steps[key][0], at[1] + steps[key][1]];
    return after <= last && task >= 0 && task <= after && known(this.spec.mean[after][task]) ? [after, task] : at;
  }

  mark([after, task]) {
    const { left, top, cell } = this.place;
    const [x, y] = [left + task * cell, top + after * cell];
    this.marks.replaceChildren(draw("rect", { class: "picked", x, y, width: cell - 1, height: cell - 1 }));
    const { mean, std, taskName: named } = this.spec;
    const learned = mean[task][task];
    const rows = [[null, "accuracy", `${withSpread(mean[after][task], std[after][task])} %`]];
    if (after > task && known(learned)) rows.push([null, "since learned", fixed(mean[after][task] - learned)]);
    this.tooltip.show(x + cell, y + cell / 2, `${named(task)}, after task ${after + 1}`, rows);
  }

  unmark() {
    if (this.marks) this.marks.replaceChildren();
  }
}

/** spec: { rows: [{ name, values }], kinds, text(value) }; a row for each method or task, a color for each kind. */
class StackedBars extends Chart {
  update(spec) {
    this.spec = spec;
    this.redraw();
  }

  paint(width) {
    const { rows, text } = this.spec;
    const pitch = 24;
    const labels = Math.min(width * 0.36, 14 + 7 * Math.max(...rows.map((row) => row.name.length)));
    const totals = rows.map((row) => row.values.reduce((sum, value) => sum + (value ?? 0), 0));
    const room = width - labels - 78;
    const scale = room / (Math.max(...totals) || 1);
    this.hits = rows.map((row, number) => {
      const y = number * pitch;
      const hit = draw("rect", { class: "row-hit", x: 0, y, width, height: pitch });
      this.svg.append(hit, draw("text", { class: "name", x: 0, y: y + 16 }, short(row.name, labels - 8)));
      let x = labels;
      row.values.forEach((value, kind) => {
        const long = (value ?? 0) * scale;
        if (long > 0.2) {
          this.svg.append(draw("rect", { class: `bar ${colour(kind)}`, x, y: y + 5, width: long, height: pitch - 10 }));
        }
        x += long;
      });
      this.svg.append(draw("text", { x: x + 8, y: y + 16 }, text(totals[number])));
      return hit;
    });
    this.pitch = pitch;
    this.ends = totals.map((total) => labels + total * scale + 62);
    return rows.length * pitch;
  }

  nearest(_, y) {
    const row = Math.floor(y / this.pitch);
    return row >= 0 && row < this.spec.rows.length ? row : null;
  }

  moved(at, key) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[key];
    if (!step) return undefined;
    return at === null ? 0 : clamp(at + step, 0, this.spec.rows.length - 1);
  }

  mark(at) {
    this.unmark();
    this.hits[at].classList.add("at");
    const { rows, kinds, text } = this.spec;
    const shown = kinds.map((kind, place) => [swatch(place, true), kind, text(rows[at].values[place])]);
    this.tooltip.show(this.ends[at], (at + 0.5) * this.pitch, rows[at].name, shown);
  }

  unmark() {
    for (const hit of this.hits || []) hit.classList.remove("at");
  }
}
