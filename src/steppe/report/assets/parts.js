// The parts of a section. Each fills its place on the page, or returns false if it has nothing to show.

const FEW = 6; // lines that can be told apart at first sight

/** Shown at first: the best few methods by final accuracy. */
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
  const chart = new LineChart("Accuracy against tasks learned");
  const curve = (method) => (task === "seen" ? method.seen : {
    mean: method.matrix.map((row) => row.mean[Number(task)]),
    std: method.matrix.map((row) => row.std[Number(task)]),
  });
  const update = () => {
    const shown = methods.filter((method) => chosen.has(method.place));
    const words = task === "seen" ? "mean over tasks seen" : taskName(section, Number(task));
    chart.describe(`${section.measured} accuracy against tasks learned, ${words}; methods: ${shown.map((each) => each.name).join(", ")}. `
      + "Arrow keys read out values.");
    chart.update({
      x: section.tasks.map((_, place) => place + 1),
      whole: true,
      xTitle: "tasks learned",
      yTitle: `${section.measured.toLowerCase()} accuracy (%), ${words}`,
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
  const options = [["seen", "mean over tasks seen"],
    ...section.tasks.map((_, place) => [String(place), taskName(section, place)])];
  const tasks = choice("tasks", options, (value) => { task = value; update(); });
  const band = tick("band: one standard deviation over seeds", true, (on) => { bands = on; update(); });
  const several = methods.some((method) => method.seeds.length > 1);
  part.append(
    make("h3", {}, "Accuracy as tasks are learned"),
    make("div", { class: "controls" }, tasks.element, several ? band : null),
    methods.length > 1 ? methodBoxes(methods, chosen, update) : "",
    chart.host,
  );
  update();
  return true;
}

/** One map, or two to compare if there are several methods; visible maps share their scale. */
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
    make("p", { class: "note" }, `${section.measured} accuracy in percent on each task (column) after each task (row), mean over seeds. `
      + (maps.length > 1 ? "The two maps share their scale." : "")),
  );
  update();
  return true;
}

const seconds = (value) => (!known(value) ? "–" : `${value < 10 ? fixed(value, 2) : fixed(value, 0)} s`);
const bytes = (value) => {
  if (!known(value)) return "–";
  const [size, unit] = value >= 1e9 ? [1e9, "GB"] : value >= 1e6 ? [1e6, "MB"] : value >= 1e3 ? [1e3, "kB"] : [1, "B"];
  return `${fixed(value / size, unit === "B" ? 0 : 1)} ${unit}`;
};
const KINDS = { train: "training", evaluate: "testing", memory: "memory update" };

function costs(section, methods, part) {
  const time = section.timed_by === "cpu_seconds" ? "CPU time per task" : "Time per task";
  const sides = [
    { measure: "seconds", words: time, text: seconds, chart: new StackedBars("Time by kind") },
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
    make("h3", {}, "Time and memory"),
    methods.length > 1 ? make("div", { class: "controls" }, list.element) : "",
    make("div", { class: "pair" }, ...blocks),
    make("p", { class: "note" }, "Mean over seeds, on the machine of the runs; for all methods, a run’s time divided by "
      + "its number of tasks. Memory: besides the network; working memory can be rebuilt from the weights and the rest."),
  );
  update(start);
  return true;
}
