// Loss along random directions around the weights, with a slider over the tasks learned.

const FLATNESS = {
  sharpness: "sharpness",
  mean_rise: "mean rise",
  curvature: "curvature",
  hessian: "largest Hessian eigenvalue",
};

function landscape(section, methods, part) {
  part.append(make("h3", {}, "Loss around the weights"));
  const data = section.landscape;
  if (!data) {
    part.append(make("p", {}, "None of these runs has a landscape yet: ", make("code", {}, "steppe landscape RUN"),
      " measures one; a new report then shows it here."));
    return true;
  }
  const moments = data.methods.flatMap((each) => each.moments);
  const tasks = [...new Set(moments.map((each) => each.task))].sort((a, b) => a - b);
  const state = { task: tasks[0], after: 0 };
  const chart = new LineChart("Loss around the weights");
  const table = make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Flatness" });
  const readout = make("output", {});
  const afters = () => [...new Set(moments.filter((each) => each.task === state.task).map((each) => each.after))]
    .sort((a, b) => a - b);
  const update = () => {
    const steps = afters();
    const after = steps[state.after];
    readout.textContent = `after task ${after}`;
    const at = (each, when) => each.moments.find((moment) => moment.task === state.task && moment.after === when);
    const drawn = [];
    for (const each of data.methods) {
      const { name, place } = methods[each.method];
      const [now, then] = [at(each, after), at(each, steps[0])];
      if (then && after !== steps[0]) drawn.push({ name, place, y: then.mean, back: true });
      if (now) {
        const text = (point) => roughly(now.mean[point], now.std[point]);
        drawn.push({ name, place, y: now.mean, bands: deviation(now.mean, now.std), text });
      }
    }
    const levels = moments.filter((each) => each.task === state.task)
      .flatMap(({ mean, std }) => [...mean, ...deviation(mean, std).flatMap((band) => band.high)]).filter(known);
    const top = Math.max(...levels);
    const bottom = Math.min(...levels);
    chart.describe(`Loss on task ${state.task} around the weights after task ${after}. Arrow keys read out values.`);
    chart.update({
      x: data.alphas,
      xTitle: "α, along random directions",
      yTitle: "loss",
      height: 340,
      domain: [bottom - (top - bottom) * 0.05, top + (top - bottom || 1) * 0.05],
      title: (point) => `α = ${significant(data.alphas[point])}`,
      series: drawn,
    });
    table.replaceChildren(flatnessTable(data.methods.map((each) => [methods[each.method].name, at(each, after)])));
  };
  const steps = slider("tasks learned", afters().length, 1, (value) => { state.after = value - 1; update(); });
  steps.range.setAttribute("aria-label", "tasks learned");
  const options = tasks.map((task) => [String(task), taskName(section, task - 1)]);
  const list = choice("loss on", options, (value) => {
    state.task = Number(value);
    steps.range.max = afters().length;
    state.after = Math.min(state.after, afters().length - 1);
    update();
  });
  const key = data.methods.map((each) =>
    make("span", {}, swatch(each.method), methods[each.method].name));
  const words = "Mean over random directions and seeds, band: one standard deviation; dotted: at the first of these "
    + "moments.";
  part.append(
    make("div", { class: "controls" }, list.element, steps.element, readout),
    make("div", { class: "key" }, ...key),
    chart.host,
    table,
    make("p", { class: "note" }, words
      + (data.left_out.length ? ` Left out, since they were measured with other settings: ${data.left_out.join(", ")}.` : "")),
  );
  update();
  return true;
}

function flatnessTable(rows) {
  const told = (measure) => rows.some(([, moment]) => moment && moment.flatness[measure]);
  const measures = Object.keys(FLATNESS).filter(told);
  if (!measures.length) return make("span");
  const cell = (found) => make("td", { class: "n" },
    found ? roughly(found.mean, found.std) : "");
  return make("table", {},
    make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "method"),
      ...measures.map((measure) => make("th", { scope: "col", class: "n" }, FLATNESS[measure])))),
    make("tbody", {}, ...rows.map(([name, moment]) => make("tr", {}, make("th", { scope: "row" }, name),
      ...measures.map((measure) => cell(moment && moment.flatness[measure]))))));
}
