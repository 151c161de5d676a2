// The parts of a section. Each fills its place on the page, or says by returning false that it has nothing to show.

const FEW = 6; // lines that can be told apart at first sight

/** At first the best few methods by accuracy at the end. */
function bestFew(methods) {
  return new Set([...methods].sort((a, b) => b.acc - a.acc).slice(0, FEW).map((method) => method.place));
}

function methodOptions(methods) {
  return methods.map((method) => [String(method.place), method.name]);
}

function curves(section, methods, part) {
  const chosen = bestFew(methods);
  let task = "seen";
  let bands = true;
  const chart = new LineChart("Accuracy against tasks learnt");
  const curve = (method) => (task === "seen" ? method.seen : {
    mean: method.matrix.map((row) => row.mean[Number(task)]),
    std: method.matrix.map((row) => row.std[Number(task)]),
  });
  const update = () => {
    const shown = methods.filter((method) => chosen.has(method.place));
    const words = task === "seen" ? "mean over tasks seen" : taskName(section, Number(task));
    chart.describe(`Test accuracy against tasks learnt, ${words}; methods: ${shown.map((each) => each.name).join(", ")}. `
      + "Arrow keys read out values.");
    chart.update({
      x: section.tasks.map((_, place) => place + 1),
      whole: true,
      xTitle: "tasks learnt",
      yTitle: `test accuracy (%), ${words}`,
      floor: 0,
      ceiling: 100,
      title: (at) => `after ${taskName(section, at)}`,
      series: shown.map((method) => {
        const { mean, std } = curve(method);
        const text = (at) => withSpread(mean[at], std[at]);
        return { name: method.name, place: method.place, y: mean, bands: bands ? deviation(mean, std) : [], text };
      }),
    });
  };
  const options = [["seen", "all seen so far, mean"],
    ...section.tasks.map((_, place) => [String(place), taskName(section, place)])];
  const tasks = choice("tasks", options, (value) => { task = value; update(); });
  const band = tick("band: one standard deviation over seeds", true, (on) => { bands = on; update(); });
  const several = methods.some((method) => method.seeds.length > 1);
  part.append(
    make("h3", {}, "Accuracy as tasks are learnt"),
    make("div", { class: "controls" }, tasks.element, several ? band : null),
    methods.length > 1 ? methodBoxes(methods, chosen, update) : "",
    chart.host,
  );
  update();
  return true;
}

/** One map, or two to compare where there are several methods; the maps that show share their scale. */
function matrix(section, methods, part) {
  const inOrder = methods.filter((method) => method.seen.mean.filter(known).length > 1);
  const start = [...bestFew(inOrder.length ? inOrder : methods)].slice(0, 2);
  const maps = start.map((place) => ({ place, chart: new HeatMap("Accuracy matrix") }));
  const update = () => {
    const shown = maps.flatMap(({ place }) => methods[place].matrix.flatMap((row) => row.mean)).filter(known);
    for (const { place, chart } of maps) {
      const method = methods[place];
      chart.describe(`Accuracy on each task after each task, ${method.name}. Arrow keys read out values.`);
      chart.update({
        mean: method.matrix.map((row) => row.mean),
        std: method.matrix.map((row) => row.std),
        low: Math.min(...shown),
        high: Math.max(...shown),
        taskName: (task) => taskName(section, task),
      });
    }
  };
  const blocks = maps.map((map) => {
    const list = choice("method", methodOptions(methods), (value) => { map.place = Number(value); update(); },
      String(map.place));
    return make("div", { class: "heat" },
      methods.length > 1 ? make("div", { class: "controls" }, list.element) : "", map.chart.host);
  });
  part.append(
    make("h3", {}, "Accuracy matrix"),
    make("div", { class: "pair" }, ...blocks),
    make("p", { class: "note" }, "Test accuracy in percent on each task (column) after each task (row), mean over seeds. "
      + (maps.length > 1 ? "The two maps share their scale." : "")),
  );
  update();
  return true;
}

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
      " makes one beside a run’s result, and a new report shows it here."));
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
    chart.describe(`Loss on task ${state.task} along random directions, after task ${after}. Arrow keys read out values.`);
    chart.update({
      x: data.alphas,
      xTitle: "distance from the weights",
      yTitle: "loss",
      height: 340,
      domain: [bottom - (top - bottom) * 0.05, top + (top - bottom || 1) * 0.05],
      title: (point) => `distance ${significant(data.alphas[point])}`,
      series: drawn,
    });
    table.replaceChildren(flatnessTable(data.methods.map((each) => [methods[each.method].name, at(each, after)])));
  };
  const steps = slider("tasks learnt", afters().length, 1, (value) => { state.after = value - 1; update(); });
  steps.range.setAttribute("aria-label", "tasks learnt");
  const options = tasks.map((task) => [String(task), taskName(section, task - 1)]);
  const list = choice("loss on", options, (value) => {
    state.task = Number(value);
    steps.range.max = afters().length;
    state.after = Math.min(state.after, afters().length - 1);
    update();
  });
  const key = data.methods.map((each) =>
    make("span", {}, swatch(each.method), methods[each.method].name));
  const words = "Mean over random directions and seeds, band: one standard deviation; dotted: as it was at the first of "
    + "these moments.";
  part.append(
    make("div", { class: "controls" }, list.element, steps.element, readout),
    make("div", { class: "key" }, ...key),
    chart.host,
    table,
    make("p", { class: "note" }, words
      + (data.left_out.length ? ` Left out, for their distances are others: ${data.left_out.join(", ")}.` : "")),
  );
  update();
  return true;
}

function flatnessTable(rows) {
  const measures = Object.keys(FLATNESS).filter((measure) => rows.some(([, moment]) => moment && moment.flatness[measure]));
  if (!measures.length) return make("span");
  const cell = (found) => make("td", { class: "n" },
    found ? roughly(found.mean, found.std) : "");
  return make("table", {},
    make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "method"),
      ...measures.map((measure) => make("th", { scope: "col", class: "n" }, FLATNESS[measure])))),
    make("tbody", {}, ...rows.map(([name, moment]) => make("tr", {}, make("th", { scope: "row" }, name),
      ...measures.map((measure) => cell(moment && moment.flatness[measure]))))));
}

const seconds = (value) => (!known(value) ? "–" : `${value < 10 ? fixed(value, 2) : fixed(value, 0)} s`);
const bytes = (value) => {
  if (!known(value)) return "–";
  const [size, unit] = value >= 1e9 ? [1e9, "GB"] : value >= 1e6 ? [1e6, "MB"] : value >= 1e3 ? [1e3, "kB"] : [1, "B"];
  return `${fixed(value / size, unit === "B" ? 0 : 1)} ${unit}`;
};
const KINDS = { train: "training", evaluate: "testing", memory: "memory update" };

function costs(section, methods, part) {
  const sides = [
    { measure: "seconds", words: "Time for each task", text: seconds, chart: new StackedBars("Time by kind") },
    { measure: "bytes", words: "Memory at the end", text: bytes, chart: new StackedBars("Memory by kind") },
  ];
  const blocks = sides.map((side) => {
    side.key = make("div", { class: "key" });
    side.title = make("h4", {}, side.words);
    return make("div", {}, side.title, side.key, side.chart.host);
  });
  const update = (view) => {
    for (const side of sides) {
      const shown = view === "all" ? methods : [methods[Number(view)]];
      const named = [...new Set(shown.flatMap((method) => method[side.measure].kinds))];
      const sorted = (method, values) => named.map((kind) => values[method[side.measure].kinds.indexOf(kind)] ?? null);
      const rows = view === "all"
        ? methods.map((method) => ({ name: method.name, values: sorted(method, method[side.measure].all) }))
        : shown[0][side.measure].stages.map((stage) =>
          ({ name: taskName(section, stage.task), values: sorted(shown[0], stage.values) }));
      const kinds = named.map((kind) => (side.measure === "seconds" ? KINDS[kind] ?? kind : kind));
      side.title.textContent = view === "all" ? side.words : side.words.replace("at the end", "after each task");
      side.key.replaceChildren(...kinds.map((kind, place) => make("span", {}, swatch(place, true), kind)));
      side.chart.describe(`${side.title.textContent}: ${kinds.join(", ")}. Arrow keys read out values.`);
      side.chart.update({ rows, kinds, text: side.text });
    }
  };
  const staged = methods.filter((method) => method.seconds.stages.length && method.bytes.stages.length);
  const options = [["all", "all methods"], ...staged.map((method) => [String(method.place), `${method.name}, by task`])];
  const start = methods.length === 1 && staged.length ? "0" : "all";
  const list = choice("show", options, update, start);
  part.append(
    make("h3", {}, "What it costs"),
    methods.length > 1 ? make("div", { class: "controls" }, list.element) : "",
    make("div", { class: "pair" }, ...blocks),
    make("p", { class: "note" }, "Mean over seeds, on the machine that ran them; with all methods, a run’s time divided "
      + "by its number of tasks. Memory is what the method keeps beside the network."),
  );
  update(start);
  return true;
}

/** A part that shows one method's layers; `build(method)` gives what to put below the choice. */
function layersPart(methods, part, title, note, has, build) {
  const able = methods.filter((method) => method.layers.some(has));
  if (!able.length) return false;
  const body = make("div", {});
  const update = (place) => {
    body.replaceChildren(...build(methods[Number(place)]));
  };
  const best = [...bestFew(able)][0];
  const list = choice("method", methodOptions(able), update, String(best));
  part.append(make("h3", {}, title),
    make("div", { class: "controls" }, able.length > 1 ? list.element : able[0].name), body,
    make("p", { class: "note" }, note));
  update(best);
  return true;
}

function importances(section, methods, part) {
  const bands = [[0, 10, 0.1], [1, 9, 0.14], [3, 7, 0.22]];
  const one = (layer) => {
    const chart = new LineChart(`Importances of ${layer.name} after each task`);
    const decile = (number) => layer.deciles.map((values) => values && values[number]);
    const named = [[10, "largest λ"], [9, "90 %"], [5, "median"], [1, "10 %"], [0, "smallest"]];
    const rows = (at) => named.map(([number, name]) => [null, name, fixed(layer.deciles[at][number], 3)]);
    chart.update({
      x: section.tasks.map((_, place) => place + 1),
      whole: true,
      xTitle: "tasks learnt",
      yTitle: layer.name,
      height: 230,
      domain: [0, 1.02],
      title: (at) => `after task ${at + 1}`,
      series: [{
        name: "λ",
        place: 0,
        y: decile(5),
        bands: bands.map(([low, high, opacity]) => ({ low: decile(low), high: decile(high), opacity })),
        rows,
      }],
    });
    return chart.host;
  };
  return layersPart(methods, part, "Importances of the bases, by layer",
    "λ of each layer’s basis vectors after each task: the median, and bands that hold the middle 40 %, 80 % and all of "
    + "them; deciles averaged over seeds. 1 keeps a direction fixed, 0 leaves it free.",
    (layer) => layer.deciles,
    (method) => [make("div", { class: "multiples" }, ...method.layers.filter((layer) => layer.deciles).map(one))]);
}

function ranks(section, methods, part) {
  const build = (method) => {
    const chart = new LineChart(`Ranks of the bases of ${method.name} after each task. Arrow keys read out values.`);
    const layers = method.layers.filter((layer) => layer.rank);
    const share = (layer) => layer.rank.map((rank) => (known(rank) ? (100 * rank) / layer.of : null));
    chart.update({
      x: section.tasks.map((_, place) => place + 1),
      whole: true,
      xTitle: "tasks learnt",
      yTitle: "rank of the basis, percent of the layer’s inputs",
      height: 300,
      domain: [0, 100],
      title: (at) => `after task ${at + 1}`,
      series: layers.map((layer, place) => ({
        name: layer.name,
        place,
        y: share(layer),
        text: (at) => `${significant(layer.rank[at])} of ${layer.of}`,
      })),
    });
    const key = layers.map((layer, place) => make("span", {}, swatch(place), layer.name));
    return [make("div", { class: "key" }, ...key), chart.host];
  };
  return layersPart(methods, part, "Ranks of the bases",
    "How many directions of each layer’s inputs the memory holds after each task, mean over seeds.",
    (layer) => layer.rank, build);
}
